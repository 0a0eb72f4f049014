"""Who holds which samples: four ways to spread a data set over clients, and each client's own train and test part.

A data set's training and test images are put together first; each sample then goes to one client, and a client's
samples are split 75/25 at random (the protocol of FedAH, after FedALA).

    iid                  equal parts of the shuffled data set
    pathological         each client holds `classes` classes: groups of clients with the same ones, or random sets
    dirichlet            each class is spread over the clients by shares drawn from Dir(beta)
    classes_per_client   each client holds `classes` random classes in nearly equal amounts (FedGH)
    custom               your own index arrays

For every scheme and seed: no sample is used twice or lost, every client has at least one training and one test sample,
the work is bounded, and what cannot be done is refused with a ValueError.

Where released generators differ, and what we do. The one FedAH and FedALA share (PFLlib's) redraws a Dirichlet split
until every client is large enough, which for beta = 0.01 and 20 clients had not ended after 2,000 draws: we redraw at
most 50 times, then move samples. It excludes clients above the mean size from later classes, so that it is not
Dir(beta): our option `capped`. What rounding leaves goes to its last client, and what a group's random shares leave
to the group's last client, who is systematically the largest (of 4: 2.35 mean shares, the others 0.55): our shares
are exchangeable, and rounded by largest remainder. Classes left without an owner are lost there, or crash its older
copy: we refuse.
"""

import hashlib
import inspect
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from pflkit import checks, streams

MAX_REDRAWS = 50
MAX_LABEL = 65_535  # a larger "label" is surely something else, and would ask for a table of that width


@dataclass(frozen=True, eq=False)
class Partition:
    """Who holds what. `train[i]` and `test[i]` are client i's indices (int64, ascending) into the labels `y` [n]."""

    name: str
    settings: dict  # every argument of the scheme, and what it had to do (redraws, moved samples)
    y: np.ndarray = field(repr=False)
    num_classes: int
    train: tuple = field(repr=False)
    test: tuple = field(repr=False)

    @property
    def num_clients(self):
        return len(self.train)

    @property
    def fingerprint(self):
        """sha256 (hex) over the sizes and indices of all parts: equal only where everybody holds the same samples."""
        parts = [*self.train, *self.test]
        return hashlib.sha256(np.concatenate([[len(p) for p in parts], *parts]).astype("<i8").tobytes()).hexdigest()

    def counts(self):
        """Samples of each class at each client, train and test together: int array [N, K]."""
        held = (self.y[np.concatenate(both)] for both in zip(self.train, self.test, strict=True))
        return np.stack([np.bincount(labels, minlength=self.num_classes) for labels in held])

    def describe(self):
        """One row a client: its train and test samples, its distinct classes, and the entropy of its labels in bits."""
        counts = self.counts()
        return pd.DataFrame(
            {
                "client": np.arange(self.num_clients),
                "train": [len(part) for part in self.train],
                "test": [len(part) for part in self.test],
                "classes": (counts > 0).sum(1),
                "entropy": [entropy(row) for row in counts],
            }
        )


def entropy(counts):
    """Entropy in bits of a distribution given by `counts` [K]: 0 for one class, log2 K for K equal ones.

    >>> entropy([5, 5]), entropy([2, 1, 1, 0]), entropy([7, 0])
    (1.0, 1.5, 0.0)
    """
    p = np.asarray(counts)[np.asarray(counts) > 0] / np.sum(counts)
    return float((p * np.log2(1 / p)).sum())


def apportion(total, weights):
    """`total` samples shared in proportion to `weights` [m]: whole numbers that sum to `total`, by largest remainder.

    >>> apportion(10, [1, 1, 3]).tolist(), apportion(7, [1, 1, 1]).tolist()   # exactly 2, 2, 6 and 2.33 each
    ([2, 2, 6], [3, 2, 2])
    """
    exact = total * (np.asarray(weights) / np.sum(weights))
    share = np.floor(exact).astype(np.int64)
    share[np.argsort(share - exact, kind="stable")[: total - share.sum()]] += 1
    return share


def iid(y, clients, *, test_share=0.25, stratify=False, seed=0):
    """A shuffled data set cut into `clients` parts whose sizes differ by at most 1."""
    y, settings, rng = _start("iid", y, clients, test_share, stratify, seed)
    return _split("iid", settings, y, rng.permutation(np.arange(len(y)) % settings["clients"]))


def pathological(y, clients, classes=2, grouped=True, balanced=False, *, test_share=0.25, stratify=False, seed=0):
    """Each client holds exactly `classes` classes.

    grouped: clients form ceil(K / classes) groups of neighbours; all in a group hold the same classes (in label order,
    the last group filled up from class 0). This is FedAH's protocol, and favours methods that find similar clients.
    Otherwise each client's classes are drawn at random, every class having the same number of owners to within 1.
    balanced: a class is shared equally to within 1. Otherwise by weights uniform on [0.1, 1]: the largest owner of
    a class has up to about ten times the samples of the smallest. Refused: a class with no owner or too few samples.
    """
    y, settings, rng = _start("pathological", y, clients, test_share, stratify, seed)
    settings |= {"classes": classes, "grouped": checks.boolean("grouped", grouped)}
    settings |= {"balanced": checks.boolean("balanced", balanced)}
    draw_sets, weights = _grouped_sets if grouped else _random_sets, (1, 1) if balanced else (0.1, 1)
    return _by_class("pathological", settings, y, draw_sets, weights, rng)


def classes_per_client(y, clients, classes=2, *, test_share=0.25, stratify=False, seed=0):
    """FedGH's split (and pFedHN's): `classes` random classes a client, each shared by weights uniform on [0.4, 0.6].

    Every class has the same number of owners to within 1. Refused where a class would have no owner.
    """
    y, settings, rng = _start("classes_per_client", y, clients, test_share, stratify, seed)
    return _by_class("classes_per_client", settings | {"classes": classes}, y, _random_sets, (0.4, 0.6), rng)


def dirichlet(y, clients, beta=0.1, min_size=None, capped=False, *, test_share=0.25, stratify=False, seed=0):
    """Each class is spread over the clients by shares drawn from Dir(beta, ..., beta): small beta, skewed clients.

    min_size: samples (train and test) every client must have. None: 40, as the papers' generator has for its data
    sets, or a sixth of the mean size where that is less (ours; theirs: half the mean). A draw that fails is redrawn, at
    most 50 times; then the one that lacked least is repaired by moving samples from the largest clients. `settings`
    records redraws and moved.
    capped: clients that reached the mean size get nothing of later classes (the papers' generator; not a true Dir).
    """
    y, settings, rng = _start("dirichlet", y, clients, test_share, stratify, seed)
    clients = settings["clients"]
    min_size = max(2, min(40, len(y) // (6 * clients))) if min_size is None else checks.integer("min_size", min_size, 2)
    beta = checks.real("beta", beta, 1e-9, 1e9)  # wider than any use; within it no draw underflows to nothing
    settings |= {"beta": beta, "min_size": min_size, "capped": checks.boolean("capped", capped)}
    if clients * min_size > len(y):
        raise ValueError(f"clients={clients}, min_size={min_size}: need {clients * min_size} samples, got {len(y)}")
    sizes, lack, redraws = np.bincount(y), np.inf, -1
    while lack > 0 and redraws < MAX_REDRAWS:
        redraws += 1
        drawn = _dirichlet_counts(sizes, clients, beta, capped, rng)
        drawn_lack = int(np.maximum(min_size - drawn.sum(1), 0).sum())
        if drawn_lack < lack:
            counts, lack = drawn, drawn_lack
    settings |= {"redraws": redraws, "moved": lack}
    return _split("dirichlet", settings, y, _deal(y, _fill_up(counts, min_size), rng))


def custom(y, train, test):
    """Your own split: `train` and `test` are sequences of index arrays, one a client. Samples may be left out.

    Refused: an index out of range or used twice, anywhere; a client without a training or without a test sample.
    """
    y = _labels(y)
    if len(train) != len(test) or len(train) == 0:
        raise ValueError(f"train, test: must have one index array for each client, got {len(train)} and {len(test)}")
    train = [_indices(f"train[{i}]", part, len(y)) for i, part in enumerate(train)]
    test = [_indices(f"test[{i}]", part, len(y)) for i, part in enumerate(test)]
    used = np.concatenate([*train, *test])
    if len(np.unique(used)) < len(used):
        twice = np.flatnonzero(np.bincount(used) > 1)
        raise ValueError(f"train, test: {len(twice)} samples are used twice, the first is sample {twice[0]}")
    return Partition("custom", {"clients": len(train)}, y, int(y.max()) + 1, tuple(train), tuple(test))


SCHEMES = {f.__name__: f for f in (iid, pathological, dirichlet, classes_per_client)}


def make(name, y, clients, **settings):
    """The partition that the scheme `name` makes of labels `y` [n]; an unknown name or setting is refused."""
    scheme = SCHEMES[checks.choice("partition", name, SCHEMES)]
    allowed = list(inspect.signature(scheme).parameters)[2:]
    for key, value in settings.items():
        if key not in allowed:
            raise ValueError(f"{key}={value!r}: not a setting of partition {name!r}, which has {', '.join(allowed)}")
    return scheme(y, clients, **settings)


def _labels(y):
    y = np.asarray(y)
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) == 0 or y.min() < 0 or y.max() > MAX_LABEL:
        raise ValueError(f"y: must be a 1-D array of class labels 0, 1, 2, ...; got {y.dtype} of shape {y.shape}")
    return y.astype(np.int64)


def _indices(name, part, n):
    part = np.asarray(part)
    if part.ndim != 1 or part.dtype.kind not in "iu" or len(part) == 0 or part.min() < 0 or part.max() >= n:
        raise ValueError(f"{name}: must be a 1-D array of sample indices from 0 to {n - 1}, at least one")
    return np.sort(part.astype(np.int64))


def _start(name, y, clients, test_share, stratify, seed):
    """Checked labels, the settings every scheme has, and the scheme's own random stream."""
    y = _labels(y)
    settings = {
        "clients": checks.integer("clients", clients, 1),
        "test_share": checks.real("test_share", test_share, 0.01, 0.99),
        "stratify": checks.boolean("stratify", stratify),
        "seed": checks.integer("seed", seed, 0),
    }
    if 2 * settings["clients"] > len(y):
        raise ValueError(f"clients={clients}: {len(y)} samples are too few, each needs 2 (one to train, one to test)")
    return y, settings, streams.rng(settings["seed"], "partition", name)


def _by_class(name, settings, y, draw_sets, weights, rng):
    """The Partition where client i holds the classes of the i-th of the sets drawn; refused if a class has no owner."""
    present, clients = np.unique(y), settings["clients"]
    classes = settings["classes"] = checks.integer("classes", settings["classes"], 1, len(present))
    lost = len(present) - clients * classes
    if lost > 0:
        raise ValueError(f"clients={clients}, classes={classes}: {lost} of {len(present)} classes would have no owner")
    counts = _share_out(y, draw_sets(present, clients, classes, rng), weights, rng)
    return _split(name, settings, y, _deal(y, counts, rng))


def _grouped_sets(present, clients, classes, rng):
    """Class sets [N, classes], equal within each of ceil(K / classes) groups of neighbouring clients."""
    groups = -(-len(present) // classes)
    group = np.arange(clients) * groups // clients
    return present[(group[:, None] * classes + np.arange(classes)) % len(present)]


def _random_sets(present, clients, classes, rng):
    """Class sets [N, classes]: each client takes, at random, classes that have the fewest owners so far."""
    sets, owners = np.empty((clients, classes), np.int64), np.zeros(len(present), np.int64)
    for i in range(clients):
        taken = np.lexsort((rng.random(len(present)), owners))[:classes]
        owners[taken] += 1
        sets[i] = present[taken]
    return sets


def _share_out(y, sets, weights, rng):
    """Counts [N, K]: each class over the clients whose set has it, by weights uniform on (low, high).

    An owner gets at least one sample, so that it holds the class at all; two where it is the client's only class.
    """
    sizes, least = np.bincount(y), 1 if sets.shape[1] > 1 else 2
    counts = np.zeros((len(sets), len(sizes)), np.int64)
    for k in np.unique(sets):
        owners = rng.permutation(np.flatnonzero((sets == k).any(1)))  # so that no client always gets what is left over
        if sizes[k] < least * len(owners):
            raise ValueError(
                f"clients={len(sets)}, classes={sets.shape[1]}: class {k} has {sizes[k]} samples, "
                f"too few for its {len(owners)} owners (at least {least} each)"
            )
        counts[owners, k] = least + apportion(sizes[k] - least * len(owners), rng.uniform(*weights, len(owners)))
    return counts


def _dirichlet_counts(sizes, clients, beta, capped, rng):
    """Counts [N, K] of one draw, classes in label order."""
    counts = np.zeros((clients, len(sizes)), np.int64)
    for k, size in enumerate(sizes):
        # A Dirichlet whose masked entries are set to zero is, renormalised, the Dirichlet over the others.
        room = counts.sum(1) * clients < sizes.sum() if capped else np.ones(clients, bool)
        if size:
            counts[room, k] = apportion(size, rng.dirichlet(np.full(room.sum(), beta)))
    return counts


def _fill_up(counts, min_size):
    """Counts where every client has `min_size`: the smallest takes what it lacks of the largest's commonest class."""
    counts = counts.copy()
    while (size := counts.sum(1)).min() < min_size:
        poor, rich = size.argmin(), size.argmax()
        k = counts[rich].argmax()
        moved = min(min_size - size[poor], size[rich] - min_size, counts[rich, k])
        counts[poor, k] += moved
        counts[rich, k] -= moved
    return counts


def _deal(y, counts, rng):
    """The owner of each sample [n], when client i gets counts[i, k] random samples of class k."""
    owner = np.empty(len(y), np.int64)
    for k in range(counts.shape[1]):
        owner[rng.permutation(np.flatnonzero(y == k))] = np.repeat(np.arange(len(counts)), counts[:, k])
    return owner


def _split(name, settings, y, owner):
    """The Partition: each client's samples split at random into train and test, at least one of each."""
    rng = streams.rng(settings["seed"], "partition", name, "split")
    sizes = np.bincount(owner, minlength=settings["clients"])
    train, test = [], []
    for i, mine in enumerate(np.split(np.argsort(owner, kind="stable"), np.cumsum(sizes)[:-1])):
        mine = rng.permutation(mine)
        tests = min(max(round(settings["test_share"] * len(mine)), 1), len(mine) - 1)
        chosen = _stratified(y[mine], tests, i) if settings["stratify"] else np.arange(tests)
        test.append(np.sort(mine[chosen]))
        train.append(np.sort(np.delete(mine, chosen)))
    return Partition(name, settings, y, int(y.max()) + 1, tuple(train), tuple(test))


def _stratified(labels, tests, client):
    """Positions of about `tests` samples, in proportion to the classes, that leave one of each class to train."""
    counts = np.bincount(labels)
    take = np.minimum(apportion(tests, counts), np.maximum(counts - 1, 0))
    while take.sum() < tests and (counts - take).max() > 1:
        take[(counts - take).argmax()] += 1
    if take.sum() == 0:
        raise ValueError(f"stratify=True: client {client} has one sample of each of its classes, none is left to test")
    return np.concatenate([np.flatnonzero(labels == k)[: take[k]] for k in range(len(counts))])
