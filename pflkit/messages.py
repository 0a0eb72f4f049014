"""What passes between the server and the clients, and what it weighs.

A message is a tree. Its leaves, as a method's `download` and `local` give them:

    a tensor [C, ...]        a value for each of the C clients
    Shared(tree)             one value for all its receivers: stored once, counted once for each of them
    Rows(values, present)    of each client's K rows only those present travel: only these count, and only these arrive

The bytes of a leaf are those of its tensors as they are: 4 for a float32 or an int32.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from pflkit import trees


@dataclass(frozen=True)
class Shared:
    """Part of a download that is one value for all its receivers."""

    tree: Any


class Rows(NamedTuple):
    """What only some have, e.g. a prototype of each class a client owns: values [C, K, ...], present [C, K] (bool)."""

    values: torch.Tensor
    present: torch.Tensor


def received(download, clients, server=()):
    """A download as its receivers see it: every leaf [clients, ...], shared ones a view of one copy of the value.

    It has no memory in common with the `server`'s tree; other than that it is not copied.
    """
    own = trees.owner(server)

    def leaf(part):
        if isinstance(part, Shared):
            if not all(map(torch.is_tensor, trees.leaves(part.tree))):
                raise ValueError("Shared: must hold a tree of tensors, and nothing that is Shared already")
            return trees.expand(trees.clone(arrived(part.tree, ("K",))), clients)
        return trees.tree_map(own, part) if torch.is_tensor(part) or isinstance(part, Rows) else part

    return _map(leaf, arrived(download))


def arrived(message, axes=("C", "K")):
    """The message without what did not travel: rows that are not present are 0. `axes`: those of `present`."""

    def leaf(part):
        if not isinstance(part, Rows):
            return part
        values, present = part
        fits = torch.is_tensor(values) and torch.is_tensor(present) and present.dtype == torch.bool
        if not fits or present.ndim != len(axes) or values.shape[: present.ndim] != present.shape:
            first = ", ".join(axes)
            found = [f"{list(t.shape)} of {t.dtype}" if torch.is_tensor(t) else type(t).__name__ for t in part]
            raise ValueError(
                f"Rows({', '.join(found)}): must be tensors [{first}, ...] and [{first}], this of torch.bool"
            )
        absent = ~present.reshape(*present.shape, *[1] * (values.ndim - present.ndim))
        return Rows(values.masked_fill(absent, 0), present)

    return _map(leaf, message)


def split(message, at):
    """The message [C, ...] of the clients at the ascending positions `at`; what was shared stays stored once."""
    return trees.tree_map(lambda t: t if len(t) == len(at) else trees.pick(t, at), message)


def nbytes(message, clients):
    """Bytes of each client's part of a message: int64 [clients]."""
    if isinstance(message, Rows):
        one = message.values.shape[2:].numel() * message.values.element_size()
        return one * message.present.sum(1).cpu().numpy().astype(np.int64)
    if isinstance(message, dict | tuple):
        parts = message.values() if isinstance(message, dict) else message
        return sum((nbytes(part, clients) for part in parts), np.zeros(clients, dtype=np.int64))
    return np.full(clients, message.shape[1:].numel() * message.element_size(), dtype=np.int64)


def _map(f, message):
    """`f` of every leaf of a message; a Rows is one leaf."""
    if isinstance(message, Rows) or not isinstance(message, dict | tuple):
        return f(message)
    if isinstance(message, dict):
        return type(message)({name: _map(f, part) for name, part in message.items()})
    return tuple(_map(f, part) for part in message)
