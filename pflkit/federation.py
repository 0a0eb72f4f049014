"""The clients of a federation: their data, who joins a round, what travels, and how well their models do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pflkit import trees
from pflkit.checks import choice, integer, real
from pflkit.models import Model
from pflkit.streams import rng
from pflkit.training import Clients, Engine, Training, evaluate


@dataclass(frozen=True)
class Shared:
    """Part of a message that is one value for all its receivers: stored once, counted once for each of them."""

    tree: Any


@dataclass
class State:
    """What a method keeps between rounds: the server's tree, and the clients' tree [N, ...]."""

    server: Any
    kept: Any
    round: int = 0


@dataclass(frozen=True)
class Round:
    """What one round did. Arrays are per sampled client, in the order of `ids`."""

    ids: np.ndarray
    held: Any  # the models [C, ...] that the sampled clients hold after training
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    clients: Clients  # their `log`, and `flops()`


class Federation:
    """N clients with a share of `dataset` each, and one `model` that they train.

    join_ratio: the share of clients that join a round, or (low, high) from which each round draws anew; rounded to
    whole clients (halves to even), and at least one joins. seed: of all of an experiment's random streams but the
    partition's. engine: auto, loop or threads. device: "cpu", "cuda", ...; by default a GPU where there is one.
    Raises ValueError for what does not fit together.
    """

    def __init__(
        self,
        dataset,
        partition,
        model,
        *,
        training=None,
        join_ratio=1.0,
        seed=0,
        engine="auto",
        device=None,
        dtype=torch.float32,
    ):
        if not np.array_equal(partition.y, dataset.y):
            raise ValueError(f"partition={partition.name!r}: was made for other labels than those of {dataset.name!r}")
        if not isinstance(model, Model):
            raise ValueError(f"model={model!r}: must be a Model, as models.build and models.from_modules make")
        if tuple(model.shape) != tuple(dataset.shape) or model.classes != dataset.num_classes:
            raise ValueError(
                f"model={model.name!r}: takes {model.shape} and {model.classes} classes, but {dataset.name!r} has "
                f"{tuple(dataset.shape)} and {dataset.num_classes}"
            )
        self.dataset, self.partition, self.model = dataset, partition, model
        self.fingerprint = dataset.fingerprint  # of the data as they are now, for they are copied now
        self.training = Training() if training is None else training
        if not isinstance(self.training, Training):
            raise ValueError(f"training={training!r}: must be a Training, e.g. Training(lr=0.05)")
        self.join_ratio = _ratios(join_ratio)
        self.seed = integer("seed", seed, 0)
        self.device = _device(device)
        self.dtype = choice("dtype", dtype, (torch.float32, torch.float64))
        self.engine = Engine(engine, model, self.device)
        self.train, self.test = self._place(partition.train), self._place(partition.test)
        self.n = np.array([len(y) for _, y in self.train])
        self._flop_cache = {}

    def _place(self, parts):
        """Each client's (x, y) on the device: views of one tensor in which a client's rows lie side by side."""
        order, sizes = torch.from_numpy(np.concatenate(parts)), [len(part) for part in parts]
        x = self.dataset.x[order]
        x = x.to(self.device, self.dtype if x.is_floating_point() else None)
        y = torch.from_numpy(self.dataset.y)[order].to(self.device)
        return list(zip(x.split(sizes), y.split(sizes), strict=True))

    @property
    def num_clients(self):
        return len(self.train)

    def init(self):
        """The initial model (extractor, head), the same for every client and every method."""
        return trees.tree_map(
            lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), self.model.init()
        )

    def each_client(self, tree):
        """`tree` [...] copied for every client: [N, ...]."""
        return trees.repeat(tree, self.num_clients)

    def sample(self, t):
        """The ids of round `t`, sorted, drawn without replacement."""
        draw = rng(self.seed, "ids", t)
        low, high = (max(1, round(ratio * self.num_clients)) for ratio in self.join_ratio)
        return np.sort(draw.choice(self.num_clients, int(draw.integers(low, high + 1)), replace=False))

    def clients(self, ids, round, rounds):
        """The clients `ids` with their training data, for one call of a method."""
        data = [self.train[i] for i in ids]
        return Clients(self.model, data, ids, round, rounds, self.training, self.seed, self.engine, self._flop_cache)

    def start(self, method):
        """The state before the first round. No two tensors of what clients keep share memory: `play` writes to it."""
        server, kept = method.server(self), method.client(self)
        _check(method, "server", server)
        _check(method, "client", kept, self.num_clients)
        return State(server, _unshared(kept))

    def play(self, method, state, rounds):
        """One round of `method`: changes `state`, returns what happened."""
        t = state.round + 1
        ids = self.sample(t)
        if hasattr(method, "joins"):
            ids = np.asarray(method.joins(t, ids, np.arange(self.num_clients)))
            if ids.ndim != 1 or not len(ids) or not set(ids.tolist()) <= set(range(self.num_clients)):
                raise ValueError(f"{type(method).__name__}.joins: is {ids!r}, must be client numbers, at least one")
            ids = np.unique(ids)
        clients = self.clients(ids, t, rounds)
        message = self._send(method, state, ids)
        kept, upload, held = method.local(clients, trees.take(state.kept, ids), message)
        _check(method, "local: what it keeps", kept, len(ids))
        _check(method, "local: its upload", upload, len(ids))
        _check(method, "local: its model", held, len(ids))
        _check_same(method, "local: what it keeps", kept, state.kept, axes=1)
        server = method.merge(state.server, ids, message, upload, clients.n)
        _check(method, "merge", server)
        _check_same(method, "merge", server, state.server, axes=0)
        if not all(bool(leaf.isfinite().all()) for leaf in trees.leaves(server)):
            raise FloatingPointError(f"round {t}: what {type(method).__name__}.merge made is not finite")
        trees.put(state.kept, ids, kept)
        state.server, state.round = server, t
        down, up = (np.full(len(ids), trees.nbytes(tree)) for tree in (message, upload))
        return Round(ids, held, down, up, clients)

    def deployed(self, method, state, rounds):
        """The models [N, ...] that all clients would use on receiving the next message, before training on it."""
        everyone = np.arange(self.num_clients)
        message = self._send(method, state, everyone)
        clients = self.clients(everyone, state.round + 1, rounds)
        held = method.deploy(clients, trees.take(state.kept, everyone), message)
        _check(method, "deploy", held, self.num_clients)
        return held

    def _send(self, method, state, ids):
        message = received(method.download(state.server, ids), len(ids))
        _check(method, "download", message, len(ids))
        return message

    def score(self, held, ids):
        """Correct answers [C] and mean loss [C] of the models `held` [C, ...] on the test data of clients `ids`."""
        correct, loss = evaluate(self.model, held, [self.test[i] for i in ids], self.engine)
        if np.isnan(loss).any():
            raise FloatingPointError(f"client {ids[np.isnan(loss).argmax()]}: its model gives NaN on its test data")
        return correct, loss


def received(message, clients):
    """A message as `local` sees it: every leaf [clients, ...], shared ones a view of one copy of the server's value."""

    def part(leaf):
        if isinstance(leaf, Shared):
            return trees.expand(trees.clone(leaf.tree), clients)
        return leaf.clone() if torch.is_tensor(leaf) else leaf

    return trees.tree_map(part, message)


def _check(method, part, tree, clients=None):
    """Refuses what a method's function returned, unless its leaves are tensors: [clients, ...] where that is given."""
    for name, leaf in trees.named_leaves(tree):
        if not torch.is_tensor(leaf) or (clients is not None and leaf.shape[:1] != (clients,)):
            what = list(leaf.shape) if torch.is_tensor(leaf) else type(leaf).__name__
            must = "a tensor" if clients is None else f"[{clients}, ...]"
            raise ValueError(f"{type(method).__name__}.{part}, {name!r}, is {what}, must be {must}")


def _check_same(method, part, tree, start, axes):
    """Refuses a tree that has not the names, dtypes and shapes (but for the first `axes`) that `start` had."""
    now, was = ({n: f"{list(t.shape[axes:])} of {t.dtype}" for n, t in trees.named_leaves(x)} for x in (tree, start))
    for name in sorted(now.keys() | was.keys()):
        if now.get(name) != was.get(name):
            raise ValueError(
                f"{type(method).__name__}.{part}, {name!r}, is {now.get(name, 'missing')}, "
                f"at the start it was {was.get(name, 'missing')}"
            )


def _unshared(tree):
    """The same tree; a leaf with memory in common with an earlier leaf, or with itself, is copied."""
    seen = set()

    def own(t):
        memory = t.untyped_storage().data_ptr()
        if memory in seen or not t.is_contiguous():
            return t.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
        return t

    return trees.tree_map(own, tree)


def _device(name):
    """`name` as a torch device that works here; None: a GPU where there is one."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.cpu()  # "meta" is a device without values
        return probe.device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ValueError(f"device={name!r}: cannot be used here: {str(error).splitlines()[0]}") from error


def _ratios(join_ratio):
    """(low, high) of a ratio or of a range of ratios, each above 0 and at most 1."""
    ends = join_ratio if isinstance(join_ratio, tuple | list) else (join_ratio, join_ratio)
    ends = tuple(real("join_ratio", ratio, above=0, high=1) for ratio in ends)
    if len(ends) != 2 or ends[0] > ends[1]:
        raise ValueError(f"join_ratio={join_ratio!r}: a range must be (low, high), low not above high")
    return ends
