"""The clients of a federation: their data and models, who joins a round, what travels, how well their models do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pflkit import trees
from pflkit.checks import choice, integer, real
from pflkit.graphs import PRECISIONS, arithmetic
from pflkit.messages import arrived, nbytes, received, split
from pflkit.models import Model, build
from pflkit.streams import rng
from pflkit.training import Clients, Engine, Training, evaluate, one_thread

AT_ONCE = 2**31  # bytes of the models that are scored at a time: what they are made of comes on top
KINDS = {"personal": "", "global": "_global"}  # of models where a method has both, and how their scores are named


@dataclass
class State:
    """What a method keeps between rounds: the server's tree, and the clients' tree [N, ...]."""

    server: Any
    kept: Any
    round: int = 0


@dataclass
class Round:
    """What one round did: the `ids` of its clients, in order, what passed, and the models they hold after training.

    bytes_down, bytes_up: of each client, in the order of `ids`: [C]. calls: the Clients of each call of `local`. held:
    where the method has both, as Ditto, {"personal": models, "global": models}.
    """

    ids: np.ndarray
    bytes_down: np.ndarray
    bytes_up: np.ndarray
    calls: list
    held: Any

    def flops(self):
        """The FLOPs of all training of each client: [C]."""
        flops = np.zeros(len(self.ids))
        for clients in self.calls:
            flops[np.searchsorted(self.ids, clients.ids)] = clients.flops()
        return flops

    def log(self):
        """Mean losses [C] by phase; NaN for a client without the phase."""
        log = {}
        for clients in self.calls:
            for name, values in clients.log.items():
                column = log.setdefault(name, np.full(len(self.ids), np.nan))
                column[np.searchsorted(self.ids, clients.ids)] = values
        return log


class Group:
    """The clients `ids` that have one `model`. A method's `client` is called with each.

    sizes: training samples of every client of the federation [N], for methods whose clients know them from the start.
    second: as Federation.second.
    """

    def __init__(self, model, ids, sizes, device, dtype, engine, second):
        self.model, self.ids, self.sizes, self.second = model, ids, sizes, second
        self.device, self.dtype, self.engine = device, dtype, engine
        self.flop_cache = {}

    def init(self, model=None):
        """Initial parameters (extractor, head), by default the own model's: the same for every client and method."""
        return trees.tree_map(
            lambda t: t.to(self.device, self.dtype if t.is_floating_point() else None), (model or self.model).init()
        )

    def each_client(self, tree):
        """`tree` [...] copied for every client of the group: [N, ...]."""
        return trees.repeat(tree, len(self.ids))


class Federation:
    """N clients with a share of `dataset` each, and the `model` that they train.

    model: one for all, or a list of G, which the clients get in turn: client i has the (i mod G)-th. The
    clients of one model are a group. What clients keep, and the models they hold, is then a tuple of trees [N, ...],
    one for each group with clients among those asked for; with one model it is one tree.
    join_ratio: the share of clients that join a round, or (low, high) from which each round draws anew; rounded to
    whole clients (halves to even), and at least one joins. seed: of all of an experiment's random streams but the
    partition's. engine: auto, loop, threads or stacked. device: "cpu", "cuda", ...; by default a GPU if there is one.
    precision: full; on a GPU also tf32 or bf16, which are faster and not exact (graphs.arithmetic).
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
        precision="full",
    ):
        if not np.array_equal(partition.y, dataset.y):
            raise ValueError(f"partition={partition.name!r}: was made for other labels than those of {dataset.name!r}")
        models = tuple(model) if isinstance(model, list | tuple) else (model,)
        for m in models:
            _check_model(m, dataset)
        if not 1 <= len(models) <= partition.num_clients:
            names = "+".join(m.name for m in models)
            raise ValueError(
                f"model={names!r}: {len(models)} models for {partition.num_clients} clients, must be 1 to as many"
            )
        self.dataset, self.partition = dataset, partition
        self.fingerprint = dataset.fingerprint  # of the data as they are now, for they are copied now
        self.training = Training() if training is None else training
        if not isinstance(self.training, Training):
            raise ValueError(f"training={training!r}: must be a Training, e.g. Training(lr=0.05)")
        self.join_ratio = _ratios(join_ratio)
        self.seed = integer("seed", seed, 0)
        self.device = _device(device)
        self.dtype = choice("dtype", dtype, (torch.float32, torch.float64))
        self.precision = choice("precision", precision, PRECISIONS)
        if precision != "full" and self.device.type != "cuda":
            raise ValueError(f"precision={precision!r}: must be 'full' on a device that is no GPU ({self.device.type})")
        self.train, self.test = self._place(partition.train), self._place(partition.test)
        self.n = np.array([len(y) for _, y in self.train])
        self._seconds = {}
        turns = [np.arange(g, partition.num_clients, len(models)) for g in range(len(models))]
        self.groups = [self._group(m, ids, engine) for m, ids in zip(models, turns, strict=True)]

    def _group(self, model, ids, engine):
        # How many clients train side by side, on average over the steps of the largest: the same in every round, so
        # that the engine is, and with it the rounding of a client's numbers.
        width = np.mean(self.join_ratio) * self.n[ids].sum() / self.n[ids].max()
        engine = Engine(engine, model, self.device, width)
        return Group(model, ids, self.n, self.device, self.dtype, engine, self.second)

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

    @property
    def model(self):
        """The model of all clients, or of the first group."""
        return self.groups[0].model

    def init(self, model=None):
        """Initial parameters (extractor, head), by default of the first group's model, as Group.init gives each's."""
        return self.groups[0].init(model)

    def second(self, name=""):
        """A Model that all clients can have beside their own, as FML and FedKD need one: a bundled one by its name, or
        "": the one of fewest parameters among the clients' own.
        """
        if name == "":
            return min((group.model for group in self.groups), key=Model.size)
        if name not in self._seconds:
            one = self.model
            about = {"vocabulary": one.vocabulary, "seed": self.seed}
            self._seconds[name] = build(name, one.shape, one.classes, **about)
        return self._seconds[name]

    def by_group(self, ids):
        """Of the clients `ids`, group by group: (group number, positions in `ids`, positions in the group's ids)."""
        ids = np.asarray(ids)
        found = [(g, np.flatnonzero(ids % len(self.groups) == g)) for g in range(len(self.groups))]
        return [(g, at, ids[at] // len(self.groups)) for g, at in found if len(at)]

    @property
    def joining(self):
        """The least and the largest number of clients that join a round."""
        return tuple(max(1, round(ratio * self.num_clients)) for ratio in self.join_ratio)

    def few(self):
        """The ids of all clients, as many at a time as have models of AT_ONCE bytes; mostly they are all at once."""
        most = max(group.model.size() for group in self.groups) * torch.finfo(self.dtype).bits // 8
        pieces = -(-self.num_clients // max(1, AT_ONCE // max(1, most)))
        return np.array_split(np.arange(self.num_clients), pieces)

    def sample(self, t):
        """The ids of round `t`, sorted, drawn without replacement."""
        draw = rng(self.seed, "ids", t)
        low, high = self.joining
        return np.sort(draw.choice(self.num_clients, int(draw.integers(low, high + 1)), replace=False))

    def whole(self, parts):
        """The groups' trees as one: a tuple of them, or with one model for all the one tree there is."""
        return tuple(parts) if len(self.groups) > 1 else parts[0]

    def parts(self, whole):
        """The groups' trees of a whole."""
        return whole if len(self.groups) > 1 else (whole,)

    def kinds(self, held):
        """{"": held models, or the personal ones where there are both; "_global": then the global ones}."""
        parts = self.parts(held)
        if not any(isinstance(part, dict) for part in parts):
            return {"": held}
        for part in parts:
            if not isinstance(part, dict) or part.keys() != KINDS.keys():
                names = list(part) if isinstance(part, dict) else "one model"
                raise ValueError(f"a method's model: must be (extractor, head), or both {list(KINDS)}, is {names}")
        return {suffix: self.whole([part[kind] for part in parts]) for kind, suffix in KINDS.items()}

    def clients(self, ids, round, rounds):
        """The clients `ids` of one group with their training data, for one call of a method."""
        groups = {g for g, _, _ in self.by_group(ids)}
        if len(groups) != 1:
            raise ValueError(f"ids={list(ids)}: must be clients of one model, at least one")
        group, data = self.groups[groups.pop()], [self.train[i] for i in ids]
        about = round, rounds, self.training, self.seed, group.engine, group.flop_cache, self.second
        return Clients(group.model, data, ids, *about, join_ratio=sum(self.joining) / 2 / self.num_clients)

    def start(self, method):
        """The state before the first round. No two tensors of what clients keep share memory: `play` writes to it."""
        if len(self.groups) > 1 and not getattr(method, "heterogeneous", False):
            names = ", ".join(group.model.name for group in self.groups)
            raise ValueError(
                f"model={names}: {type(method).__name__} needs one model for all clients "
                "(a method that allows several has heterogeneous = True)"
            )
        if (cohort := getattr(method, "cohort", None)) is not None:
            integer("cohort", cohort, 1)
        server, kept = method.server(self), [method.client(group) for group in self.groups]
        _check(method, "server", server)
        for group, part in zip(self.groups, kept, strict=True):
            _check(method, "client", part, len(group.ids))
        return State(server, trees.tree_map(trees.owner(), self.whole(kept)))

    @one_thread()
    def play(self, method, state, rounds):
        """One round of `method`: changes `state`, returns what happened.

        All sampled clients meet the server at once, or `cohort` of them at a time, in the order of their ids, where the
        method says so.
        """
        t = state.round + 1
        ids = self.sample(t)
        if hasattr(method, "joins"):
            ids = np.asarray(method.joins(t, ids, np.arange(self.num_clients)))
            if ids.ndim != 1 or ids.dtype.kind not in "iu" or not set(ids.tolist()) <= set(range(self.num_clients)):
                raise ValueError(f"{type(method).__name__}.joins: is {ids!r}, must be client numbers, at least one")
            ids = np.unique(ids)
        state.server = _begun(method, state, rounds)
        size = getattr(method, "cohort", None) or len(ids)
        down, up = np.zeros((2, len(ids)), dtype=np.int64)
        result = Round(ids, down, up, calls=[], held=[[] for _ in self.groups])
        for start in range(0, len(ids), size):
            self._exchange(method, state, ids[start : start + size], rounds, result)
        state.round = t
        result.held = self.whole([trees.join(own) for own in result.held if own])
        return result

    def _exchange(self, method, state, ids, rounds, result):
        """Server to clients `ids`, their local work, and back: changes `state`, and adds to the Round `result`."""
        t, message, kept = state.round + 1, self._send(method, state.server, ids), self.parts(state.kept)
        groups, keeps, uploads = self.by_group(ids), [], []
        for g, at, rows in groups:
            clients, own = self.clients(ids[at], t, rounds), split(message, at)
            clients.cohort = getattr(method, "cohort", None) or clients.cohort
            # The server's own arithmetic stays in full: here, as in `deployed`, only clients have less.
            with arithmetic(self.precision, self.device), clients.settling():
                given = method.local(clients, trees.take(kept[g], rows), own)
            if not isinstance(given, tuple) or len(given) != 3:
                raise ValueError(f"{type(method).__name__}.local: must return (what it keeps, its upload, its model)")
            for what, tree in zip(("what it keeps", "its upload", "its model"), given, strict=True):
                _check(method, f"local: {what}", tree, len(at))
            keep, upload, held = given
            _check_same(method, "local: what it keeps", keep, kept[g], axes=1)
            keeps.append((kept[g], rows, keep))
            uploads.append(arrived(upload))
            _check_same(method, "local: its upload", uploads[-1], uploads[0], 1, "for another model")
            place = np.searchsorted(result.ids, ids[at])
            result.bytes_down[place] = nbytes(own, len(at))
            result.bytes_up[place] = nbytes(uploads[-1], len(at))
            result.calls.append(clients)
            result.held[g].append(held)
        upload = trees.join(uploads, np.argsort(np.concatenate([at for _, at, _ in groups])))
        server = method.merge(state.server, ids, message, upload, self.n[ids])
        _check(method, "merge", server)
        _check_same(method, "merge", server, state.server, axes=0)
        if trees.leaves(server) and not trees.finite(trees.expand(server, 1)):
            raise FloatingPointError(f"round {t}: what {type(method).__name__}.merge made is not finite")
        for whole, rows, keep in keeps:
            trees.put(whole, rows, keep)
        state.server = server

    @one_thread()
    def deployed(self, method, state, rounds, ids=None):
        """The models [C, ...] that the clients `ids`, by default all, would use on receiving the next message, before
        training on it; or, as in Round.held, both kinds.
        """
        ids, models = np.arange(self.num_clients) if ids is None else np.asarray(ids), []
        message, kept = self._send(method, _begun(method, state, rounds), ids), self.parts(state.kept)
        for g, at, rows in self.by_group(ids):
            clients = self.clients(ids[at], state.round + 1, rounds)
            with arithmetic(self.precision, self.device), clients.settling():
                models.append(method.deploy(clients, trees.take(kept[g], rows), split(message, at)))
            _check(method, "deploy", models[-1], len(at))
        return self.whole(models)

    def _send(self, method, server, ids):
        message = received(method.download(server, ids), len(ids), server)
        _check(method, "download", message, len(ids))
        return message

    def score(self, held, ids):
        """Correct answers [C] and mean loss [C] of the models `held` [C, ...] on the test data of clients `ids`."""
        correct, loss = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids))
        for (g, at, _), models in zip(self.by_group(ids), self.parts(held), strict=True):
            group, test = self.groups[g], [self.test[ids[j]] for j in at]
            with arithmetic(self.precision, self.device):
                correct[at], loss[at] = evaluate(group.model, models, test, group.engine)
        if np.isnan(loss).any():
            raise FloatingPointError(f"client {ids[np.isnan(loss).argmax()]}: its model gives NaN on its test data")
        return correct, loss


def _begun(method, state, rounds):
    """The server's tree as the next round begins, which in `deployed` may be the one after the last."""
    if not hasattr(method, "begin"):
        return state.server
    server = method.begin(state.server, state.round + 1, rounds)
    _check(method, "begin", server)
    _check_same(method, "begin", server, state.server, axes=0)
    return server


def _check_model(model, dataset):
    """Refuses what is no Model, and one that does not take samples, or give classes, as `dataset` has them."""
    if not isinstance(model, Model):
        raise ValueError(f"model={model!r}: must be a Model, as models.build and models.from_modules make")
    name, x = f"model={model.name!r}", dataset.x
    if tuple(model.shape) != tuple(dataset.shape) or model.classes != dataset.num_classes:
        has = f"{tuple(dataset.shape)} and {dataset.num_classes}"
        raise ValueError(f"{name}: takes {model.shape} and {model.classes} classes, but {dataset.name!r} has {has}")
    ids, reals = x.dtype in (torch.int32, torch.int64), x.is_floating_point()
    if not (reals if model.vocabulary is None else ids):
        takes = "real numbers" if model.vocabulary is None else "ids (int32, int64)"
        has = "ids" if ids else "real numbers" if reals else "other values"
        raise ValueError(f"{name}: takes {takes}, but {dataset.name!r} has {has} ({x.dtype})")
    if model.vocabulary and not 0 <= int(x.min()) <= int(x.max()) < model.vocabulary:
        has = f"{int(x.min())} to {int(x.max())}"
        raise ValueError(f"{name}: takes ids from 0 to {model.vocabulary - 1}, but {dataset.name!r} has {has}")


def _check(method, part, tree, clients=None):
    """Refuses what a method's function returned, unless its leaves are tensors: [clients, ...] where that is given."""
    for name, leaf in trees.named_leaves(tree):
        if not torch.is_tensor(leaf) or (clients is not None and leaf.shape[:1] != (clients,)):
            what = list(leaf.shape) if torch.is_tensor(leaf) else type(leaf).__name__
            must = "a tensor" if clients is None else f"[{clients}, ...]"
            raise ValueError(f"{type(method).__name__}.{part}, {name!r}, is {what}, must be {must}")


def _check_same(method, part, tree, other, axes, where="at the start"):
    """Refuses a tree that has not the names, dtypes and shapes (but for the first `axes`) that an `other` has."""
    now, was = ({n: f"{list(t.shape[axes:])} of {t.dtype}" for n, t in trees.named_leaves(x)} for x in (tree, other))
    for name in sorted(now.keys() | was.keys()):
        if now.get(name) != was.get(name):
            raise ValueError(
                f"{type(method).__name__}.{part}, {name!r}, is {now.get(name, 'missing')}, "
                f"{where} it was {was.get(name, 'missing')}"
            )


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
