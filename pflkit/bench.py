"""How long a round takes: our engines and a plain loop of torch modules, side by side in one process.

The plain loop is what one writes first: for each client a module, a DataLoader and torch.optim.SGD, one client after
the other. It takes the same samples in the same order, so that its weights can be compared, too.
"""

import copy
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from pflkit import data, models, partition, trees
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.streams import rng
from pflkit.training import Training

ROUNDS = 5  # the quickest of these counts, for what else runs on the machine only adds


class Plain:
    """FedAvg and FedAH as a plain loop on a CPU, all clients joining; `server` is the global model."""

    def __init__(self, method, fed):
        self.fed, self.round, self.server, self.client = fed, 0, fed.model.init(), getattr(self, method)
        self.extractor, self.head = (copy.deepcopy(part.module) for part in (fed.model.extractor, fed.model.head))
        self.heads = [fed.model.init()[1] for _ in fed.train]
        self.W = [trees.full_like(head, 1.0) for head in self.heads]

    def play(self):
        self.round += 1
        trained = []
        for i in range(len(self.fed.train)):
            self.extractor.load_state_dict(self.server[0])
            self.head.load_state_dict(self.server[1])
            self.client(i)
            trained.append(tuple(trees.clone(dict(m.state_dict())) for m in (self.extractor, self.head)))
        self.heads = [head for _, head in trained]
        self.server = trees.average(trees.stack(trained), self.fed.n)

    def batches(self, i, phase):
        x, y = self.fed.train[i]
        order = rng(self.fed.seed, "batches", self.round, i, phase, 0).permutation(len(y))
        return DataLoader(TensorDataset(x, y), self.fed.training.batch_size, sampler=order.tolist())

    def train(self, i, phase, modules, logits):
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=self.fed.training.lr)
        for x, y in self.batches(i, phase):
            optimizer.zero_grad()
            F.cross_entropy(logits(x), y).backward()
            optimizer.step()

    @torch.no_grad()
    def features(self, x):
        return self.extractor(x)

    def fedavg(self, i):
        self.train(i, "train", (self.extractor, self.head), lambda x: self.head(self.extractor(x)))

    def fedah(self, i):
        own, top, W = self.heads[i], self.server[1], self.W[i]
        for x, y in self.batches(i, "weights"):
            W = trees.tree_map(torch.Tensor.requires_grad_, W)
            mixed = trees.tree_map(torch.lerp, own, top, W)
            loss = F.cross_entropy(torch.func.functional_call(self.head, mixed, (self.features(x),)), y)
            slopes = torch.autograd.grad(loss, list(W.values()))
            stepped = (w.detach() - self.fed.training.lr * g for w, g in zip(W.values(), slopes, strict=True))
            W = {name: w.clamp(0, 1) for name, w in zip(W, stepped, strict=True)}
        self.W[i] = W
        self.head.load_state_dict(trees.tree_map(torch.lerp, own, top, W))
        self.train(i, "head", (self.head,), lambda x: self.head(self.features(x)))
        self.train(i, "extractor", (self.extractor,), lambda x: self.head(self.extractor(x)))


class Ours:
    """A method by one of our engines."""

    def __init__(self, method, fed):
        self.fed, self.method = fed, make(method)
        self.state = fed.start(self.method)

    def play(self):
        self.held = self.fed.play(self.method, self.state, ROUNDS + 1).held

    @property
    def server(self):
        return self.state.server

    @property
    def everything(self):
        return self.state.server, self.state.kept, self.held


def cases(full):
    """(data set, model, clients, engines, methods) of each comparison.

    By default our loop, what may be quicker for such a model, and auto; in `full` all engines, on more models.
    """
    draw = np.random.default_rng(0)

    def made_up(n, *shape, words=None):
        """Samples of a shape, for the speed of a step does not depend on what they show."""
        x = draw.integers(0, words, (n, *shape)) if words else draw.uniform(-1, 1, (n, *shape)).astype(np.float32)
        return data.Dataset("made up", torch.from_numpy(x), draw.integers(0, 10, n), tuple(range(10)), words)

    digits, images = data.load("digits"), made_up(4000, 1, 28, 28)
    if not full:
        both = ("fedavg", "fedah")
        yield digits, "mlp", 20, ("loop", "stacked", "auto"), both
        yield digits, "mlp", 100, ("loop", "stacked", "auto"), both
        yield images, "cnn", 20, ("loop", "threads", "auto"), both
        return
    every = ("loop", "threads", "stacked", "auto")
    for clients in (20, 100):
        yield digits, "mlp", clients, every, METHODS
    yield digits, "cnn-small", 20, every, METHODS
    yield images, "cnn", 20, every, METHODS
    yield made_up(1000, 200, words=98_635), "fasttext", 20, every, METHODS
    yield made_up(400, 3, 32, 32), "resnet18", 10, every, ("fedavg", "fedrep", "fedah")


def compare(dataset, name, clients, engines, method):
    """Rows of one comparison: the plain loop where there is one, at its best number of threads, and our engines."""
    split = partition.dirichlet(dataset.y, clients, beta=0.1, seed=0)
    model = models.build(name, dataset.shape, dataset.num_classes, vocabulary=dataset.vocabulary)

    def federation(engine):
        return Federation(dataset, split, model, training=Training(lr=0.01), engine=engine, device="cpu")

    cores = torch.get_num_threads()
    runs = {engine: (cores, Ours(method, federation(engine))) for engine in engines}
    if hasattr(Plain, method):
        threads = [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t < cores] + [cores]
        runs |= {f"plain (threads: {t})": (t, Plain(method, federation("loop"))) for t in threads}
    seconds = {engine: [] for engine in runs}
    for _ in range(ROUNDS + 1):  # the first round of each is not counted
        for engine, (threads, run) in runs.items():
            torch.set_num_threads(threads)
            start = time.perf_counter()
            run.play()
            seconds[engine].append(time.perf_counter() - start)
    torch.set_num_threads(cores)
    best = {engine: min(times[1:]) for engine, times in seconds.items()}
    plain = sorted((engine for engine in runs if engine not in engines), key=best.get)[:1]
    for engine in [*plain, *engines]:
        of = "server" if engine in plain else "everything"
        gap = trees.unequal(getattr(runs[engine][1], of), getattr(runs["loop"][1], of))
        row = {"method": method, "model": name, "data": dataset.name, "clients": clients, "engine": engine}
        yield row | {"seconds": best[engine], "ratio": best[engine] / best["loop"], "difference": gap}


def bench(full=False, out=None, say=print):
    """Runs all comparisons: a line each as it comes, and a table of them, in OUT/bench.csv too where `out` is given."""
    rows, path = [], out and Path(out) / "bench.csv"
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
    say(f"Seconds a round of training, the quickest of {ROUNDS}; ratio: to our loop; difference: of the last weights")
    say(f"{'method':<10} {'model':<10} {'clients':>7} {'engine':<19} {'seconds':>8} {'ratio':>6} {'difference':>10}")
    for dataset, model, clients, engines, methods in cases(full):
        for method in methods:
            for row in compare(dataset, model, clients, engines, method):
                rows.append(row)
                say(
                    f"{method:<10} {model:<10} {clients:>7} {row['engine']:<19} {row['seconds']:>8.4f} "
                    f"{row['ratio']:>6.2f} {row['difference']:>10.1e}"
                )
            if path:
                pd.DataFrame(rows).to_csv(path, index=False)
    return pd.DataFrame(rows)
