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


def received(download, clients):
    """A download as its receivers see it: every leaf [clients, ...], shared ones a view of one copy of the value."""

    def leaf(part):
        if isinstance(part, Shared):
            return trees.expand(trees.clone(part.tree), clients)
        return part.clone() if torch.is_tensor(part) else part

    return arrived(_map(leaf, download))


def arrived(message):
    """The message without what did not travel: rows that are not present are 0."""

    def leaf(part):
        if not isinstance(part, Rows):
            return part
        if part.present.dtype != torch.bool or part.present.ndim != 2 or part.values.shape[:2] != part.present.shape:
            shapes = f"values {list(part.values.shape)}, present {list(part.present.shape)} of {part.present.dtype}"
            raise ValueError(f"Rows: {shapes}, must be [C, K, ...] and [C, K] of torch.bool")
        absent = ~part.present.reshape(*part.present.shape, *[1] * (part.values.ndim - 2))
        return Rows(part.values.masked_fill(absent, 0), part.present)

    return _map(leaf, message)


def split(message, at):
    """The message [C, ...] of the clients at the ascending positions `at`; what was shared stays stored once."""

    def leaf(t):
        if len(t) == len(at):
            return t
        return t[:1].expand(len(at), *t.shape[1:]) if t.stride(0) == 0 else t[at]

    return trees.tree_map(leaf, message)


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
