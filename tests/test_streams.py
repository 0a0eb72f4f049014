"""Named random streams: what they are made of, and what they leave alone."""

import os
import random
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

from pflkit.streams import rng, seed_of, torch_seed


def test_a_stream_is_numpys_seed_sequence_over_seed_count_and_names_by_crc32():
    # 0xCBF43926 is the published check value: the crc32 of "123456789"
    want = np.random.Generator(np.random.PCG64(np.random.SeedSequence([7, 2, 0xCBF43926, 3]))).random(5)
    assert np.array_equal(rng(7, "123456789", 3).random(5), want)
    assert np.array_equal(seed_of(7, "ids", 2).entropy, [7, 2, zlib.crc32(b"ids"), 2])


def test_names_numbers_order_and_seed_all_tell_streams_apart():
    names = [(0, "ids", 1), (0, "ids", 2), (0, "batches", 1), (1, "ids", 1), (0, 1, "ids"), (0, "ids", 1, "ids")]
    assert len({rng(*n).random() for n in names}) == len({torch_seed(*n) for n in names}) == len(names)


def test_numpy_integers_are_integers():
    assert torch_seed(np.int64(3), "ids", np.int32(5)) == torch_seed(3, "ids", 5)


def test_torch_takes_every_seed():
    seeds = [torch_seed(s, "weights") for s in range(200)]
    assert all(type(s) is int and 0 <= s < 2**63 for s in seeds) and max(seeds) > 2**61
    torch.Generator().manual_seed(max(seeds))


@pytest.mark.parametrize("names", [(-1, "ids"), (0, "ids", -1)])
def test_negative_numbers_are_refused(names):
    with pytest.raises(ValueError, match="non-negative"):
        rng(*names)


@pytest.mark.parametrize("names", [(1.5, "ids"), (0, "ids", 0.1), (np.float64(2), "ids")])
def test_fractions_are_refused(names):
    with pytest.raises(TypeError, match="must be integer"):
        rng(*names)


@pytest.mark.parametrize("names", [(2**32 - 1, "x"), (2**32, "x"), (2**70, 0), (True, 2**33), (np.uint64(2**63), "x")])
def test_large_numbers_are_numpys_own(names):
    seed, *rest = names
    want = [seed, len(rest), *(zlib.crc32(n.encode()) if isinstance(n, str) else n for n in rest)]
    assert np.array_equal(seed_of(*names).generate_state(4), np.random.SeedSequence(want).generate_state(4))


def test_global_random_states_are_left_alone():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    rng(0, "ids", 1).random(), torch_seed(0, "weights")
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_a_stream_is_the_same_in_every_process():  # hash() of a string is not
    code = "from pflkit.streams import rng; print(rng(3, 'ids', 1).integers(2**62))"
    for salt in ("1", "2"):
        run = [sys.executable, "-c", code]
        out = subprocess.run(
            run, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, text=True, check=True
        )
        assert int(out.stdout) == rng(3, "ids", 1).integers(2**62)


def test_a_zero_more_is_another_stream():
    assert rng(0, "x").random() != rng(0, "x", 0).random()
