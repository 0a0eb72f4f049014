"""Named random streams: every draw of an experiment comes from its seed and the names of what is drawn.

So a draw depends neither on what ran before, nor on how many clients train at once, nor on the device (but dropout's,
which is drawn where it is used), and the global random states of Python, numpy and torch are left alone.
"""

import threading
import zlib

import numpy as np

# Initial weights and dropout can only be drawn from torch's one global generator. Who seeds it, and restores it, holds
# this lock: two federations may run in two threads.
GLOBAL = threading.RLock()


def seed_of(seed, *names):
    """A numpy SeedSequence for `names` (strings or non-negative ints) under an experiment's `seed`.

    Strings enter by crc32, because Python's own hash() of a string differs from process to process; the number of names
    enters too, because numpy takes ("x",) and ("x", 0) for the same.
    """
    words = [seed, len(names), *(zlib.crc32(n.encode()) if isinstance(n, str) else n for n in names)]
    # Then an array gives the same sequence in a third of the time; of what is no integer it would take the whole part.
    small = all(isinstance(word, int | np.integer) and 0 <= word < 2**32 for word in words)
    return np.random.SeedSequence(np.array(words, dtype=np.uint32) if small else words)


def rng(seed, *names):
    """A numpy Generator for `names` under `seed`.

    >>> bool(rng(0, "ids", 1).random() == rng(0, "ids", 1).random())
    True
    >>> bool(rng(0, "ids", 1).random() == rng(0, "ids", 2).random())
    False
    """
    return np.random.Generator(np.random.PCG64(seed_of(seed, *names)))


def torch_seed(seed, *names):
    """The same stream as an int below 2**63, for torch.manual_seed."""
    return int(seed_of(seed, *names).generate_state(1, np.uint64)[0] >> 1)
