"""How long a round takes: our engines and a plain loop of torch modules, side by side in one process.

The plain loop is what one writes first: for each client a module, a DataLoader and torch.optim.SGD, one client after
the other. It takes the same samples in the same order, so that its weights can be compared, too.
"""

import copy
import os
import platform
import subprocess
import sys
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pflkit import data, models, partition, plots, trees
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.streams import rng
from pflkit.training import Training, one_thread

ROUNDS = 5  # of each run, and one more before, which is not counted
ENOUGH = 4  # seconds of a comparison, after which three rounds do
EIGHT = ("fedavg", "fedrep", "ditto", "fedah", "fedala", "fedfomo", "fedgh", "fedapa")
BASE = {"samples": 4000, "clients": 20, "batch size": 10, "hidden units": 64}
GROW = {  # what `scaling` lets grow, one at a time, from BASE
    "samples": (2000, 4000, 8000, 16_000, 32_000, 64_000),
    "clients": (10, 20, 50, 100, 200, 500),
    "batch size": (2, 5, 10, 20, 50, 150),
    "hidden units": (16, 64, 256, 1024, 4096),
}


class Plain:
    """FedAvg, FedRep, Ditto and FedAH as a plain loop on a CPU, all clients joining; `server` is the global model.

    scored: every client's model is tested too, as it starts its training and as it ends it; `correct` counts.
    """

    def __init__(self, method, fed, scored=False):
        self.fed, self.scored, self.round, self.correct = fed, scored, 0, 0
        self.client, self.server = getattr(self, method), fed.model.init()
        self.extractor, self.head = self.both = [copy.deepcopy(p.module) for p in (fed.model.extractor, fed.model.head)]
        # FedAH's and FedRep's heads, Ditto's personal models
        self.own = [] if method == "fedavg" else [fed.model.init() for _ in fed.train]
        self.W = [trees.full_like(head, 1.0) for _, head in self.own]

    def play(self):
        self.round += 1
        trained = []
        for i in range(len(self.fed.train)):
            self.load(self.server)
            trained.append(self.client(i))
        self.held = trees.stack(trained)
        self.server = trees.average(self.held["global"] if isinstance(self.held, dict) else self.held, self.fed.n)

    def load(self, model):
        for module, values in zip(self.both, model, strict=True):
            module.load_state_dict(values)

    def values(self):
        return tuple(trees.clone(dict(module.state_dict())) for module in self.both)

    def batches(self, i, phase):
        x, y = self.fed.train[i]
        order = rng(self.fed.seed, "batches", self.round, i, phase, 0).permutation(len(y))
        return DataLoader(TensorDataset(x, y), self.fed.training.batch_size, sampler=order.tolist())

    def train(self, i, phase, modules, logits, towards=None):
        """An epoch of SGD of the `modules`; with `towards`, as Ditto's with λ = 1, drawn to its values."""
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=self.fed.training.lr)
        for x, y in self.batches(i, phase):
            if len(y) == 1 and self.extractor in modules and self.fed.model.batch_norm:
                continue  # one sample has no variance
            optimizer.zero_grad()
            F.cross_entropy(logits(x), y).backward()
            for module, anchor in zip(modules, towards or (), strict=bool(towards)):
                for name, p in module.named_parameters():
                    p.grad += p.detach() - anchor[name]
            optimizer.step()

    def predict(self, x):
        return self.head(self.extractor(x))

    @torch.no_grad()
    def features(self, x):
        self.extractor.eval()
        z = self.extractor(x)
        self.extractor.train()
        return z

    @torch.no_grad()
    def test(self, i):
        if not self.scored:
            return
        for module in self.both:
            module.eval()
        for x, y in DataLoader(TensorDataset(*self.fed.test[i]), self.fed.training.batch_size):
            self.correct += int((self.predict(x).argmax(1) == y).sum())
        for module in self.both:
            module.train()

    def fedavg(self, i, towards=None):
        self.test(i)
        self.train(i, "train", self.both, self.predict, towards)
        self.test(i)
        return self.values()

    def ditto(self, i):
        model = self.fedavg(i)
        self.load(self.own[i])
        self.own[i] = self.fedavg(i, towards=self.server)
        return {"personal": self.own[i], "global": model}

    def fedrep(self, i):
        self.head.load_state_dict(self.own[i][1])
        self.test(i)
        self.train(i, "head", (self.head,), lambda x: self.head(self.features(x)))
        self.train(i, "extractor", (self.extractor,), self.predict)
        self.test(i)
        self.own[i] = self.values()
        return self.own[i]

    def fedah(self, i):
        own, top, W = self.own[i][1], self.server[1], self.W[i]
        for x, y in self.batches(i, "weights"):
            W = trees.tree_map(torch.Tensor.requires_grad_, W)
            mixed = trees.tree_map(torch.lerp, own, top, W)
            loss = F.cross_entropy(torch.func.functional_call(self.head, mixed, (self.features(x),)), y)
            slopes = torch.autograd.grad(loss, list(W.values()))
            stepped = (w.detach() - self.fed.training.lr * g for w, g in zip(W.values(), slopes, strict=True))
            W = {name: w.clamp(0, 1) for name, w in zip(W, stepped, strict=True)}
        self.W[i] = W
        self.own[i] = self.server[0], trees.tree_map(torch.lerp, own, top, W)
        return self.fedrep(i)


class Ours:
    """A method, by its name or as it is, by one of our engines; scored: with what `experiment.run` scores."""

    def __init__(self, method, fed, scored=False):
        self.fed, self.scored, self.correct = fed, scored, 0
        self.method = make(method) if isinstance(method, str) else method
        self.state = fed.start(self.method)

    def play(self):
        rounds = ROUNDS + 1
        if self.scored:
            self.score(self.fed.deployed(self.method, self.state, rounds), np.arange(self.fed.num_clients))
        self.result = self.fed.play(self.method, self.state, rounds)
        if self.scored:
            self.score(self.held, self.result.ids)

    def score(self, held, ids):
        for models_of_kind in self.fed.kinds(held).values():
            self.correct += int(self.fed.score(models_of_kind, ids)[0].sum())

    @property
    def held(self):
        return self.result.held

    @property
    def everything(self):
        return self.state.server, self.state.kept, self.held


def noise(n, *shape, words=None):
    """Samples of a shape, for the speed of a step does not depend on what they show."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, words, (n, *shape)) if words else draw.uniform(-1, 1, (n, *shape)).astype(np.float32)
    return data.Dataset("noise", torch.from_numpy(x), draw.integers(0, 10, n), tuple(range(10)), words)


DATA = {
    "digits": lambda: data.load("digits"),
    "grey 28x28": lambda: noise(2000, 1, 28, 28),
    "grey 28x28, few": lambda: noise(400, 1, 28, 28),
    "colour 32x32": lambda: noise(200, 3, 32, 32),
    "texts": lambda: noise(300, 200, words=98_635),
}


def begin(dataset, split, model, training, method, engine, scored=False):
    """A run on the CPU: Plain, or Ours by one of our engines."""
    own = "loop" if engine == "plain" else engine
    fed = Federation(dataset, split, model, training=training, engine=own, device="cpu")
    return (Plain if engine == "plain" else Ours)(method, fed, scored)


@dataclass(frozen=True)
class Case:
    """A comparison: `methods` on DATA among `clients`, Dirichlet(0.1), by `engines`, without and with evaluation."""

    data: str
    model: str
    clients: int
    engines: tuple
    methods: tuple
    scored: tuple = (False,)
    lr: float = 0.01

    def runs(self):
        """A function of (method, engine, scored) that makes a run."""
        dataset = DATA[self.data]()
        split = partition.dirichlet(dataset.y, self.clients, beta=0.1, seed=0)
        model = models.build(self.model, dataset.shape, dataset.num_classes, vocabulary=dataset.vocabulary)
        return partial(begin, dataset, split, model, Training(lr=self.lr))


def cases(full):
    """By default our loop, what may be quicker for such a model, and auto; in `full` all methods, and more models."""
    if not full:
        both = ("fedavg", "fedah")
        yield Case("digits", "mlp", 20, ("loop", "stacked", "auto"), both)
        yield Case("digits", "mlp", 100, ("loop", "stacked", "auto"), both)
        yield Case("grey 28x28", "cnn", 20, ("loop", "threads", "auto"), both)
        return
    yield Case("digits", "mlp", 20, ("loop", "stacked", "auto"), tuple(METHODS))
    yield Case("digits", "mlp", 20, ("loop", "stacked"), EIGHT, (True,))
    yield Case("digits", "mlp", 100, ("loop", "stacked"), EIGHT, (False, True))
    yield Case("digits", "cnn-small", 20, ("loop", "threads", "stacked", "auto"), EIGHT)
    yield Case("grey 28x28, few", "cnn", 20, ("loop", "threads"), EIGHT, (False, True))
    yield Case("texts", "fasttext", 20, ("loop", "threads", "auto"), ("fedavg", "fedrep", "fedah"))
    yield Case("colour 32x32", "resnet18", 10, ("loop", "threads"), ("fedavg",), lr=0.001)


def timed(runs, rounds=ROUNDS, enough=float("inf")):
    """Seconds of each call of `runs`, {name: (torch's threads, a function)}, called in turn: {name: [seconds]}.

    In turn, so that whatever else the machine does meets all alike. The first call of each is not counted. After three
    that are, it ends once all have taken `enough` seconds.
    """
    cores, seconds, start = torch.get_num_threads(), {name: [] for name in runs}, time.perf_counter()
    try:
        for k in range(rounds + 1):
            for name, (threads, call) in runs.items():
                torch.set_num_threads(threads)
                before = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - before)
            if k >= 3 and time.perf_counter() - start > enough:
                break
    finally:
        torch.set_num_threads(cores)
    return {name: times[1:] for name, times in seconds.items()}


def compare(case, run, method, scored):
    """Rows of one comparison: the plain loop where there is one, at its best number of threads, and our engines."""
    cores, plain = torch.get_num_threads(), ""
    runs = {engine: (cores, run(method, engine, scored)) for engine in case.engines}
    if hasattr(Plain, method):
        trials = {}
        for t in [t for t in (1, 2, 4, 8, 16, 32, 64, 128) if t < cores] + [cores]:
            trials[t] = min(timed({t: (t, run(method, "plain", scored).play)}, rounds=1)[t])
            if trials[t] > min(trials.values()):
                break  # more threads only wait more
        threads = min(trials, key=trials.get)
        plain = f"plain (threads: {threads})"
        runs = {plain: (threads, run(method, "plain", scored)), **runs}
    seconds = timed({name: (threads, one.play) for name, (threads, one) in runs.items()}, ROUNDS, ENOUGH)
    best = {engine: min(times) for engine, times in seconds.items()}
    for engine in runs:
        of = "held" if engine == plain else "everything"
        yield {
            **{"method": method, "model": case.model, "data": case.data, "clients": case.clients},
            **{"evaluation": scored, "engine": engine},
            **{"seconds": float(np.median(seconds[engine])), "quickest": best[engine]},
            **{"ratio": best[engine] / best["loop"], "speedup": best[plain] / best[engine] if plain else None},
            "difference": trees.unequal(getattr(runs[engine][1], of), getattr(runs["loop"][1], of)),
        }


def bench(full=False, out=None, say=print):
    """Runs all comparisons: a line each as it comes, and a table of them, in OUT/bench.csv too where `out` is given,
    with a plot. In `full` also `scaling` and `memory`, as further files.
    """
    rows, folder = [], out and Path(out)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    say(
        f"A round on {hardware()}: median and quickest of up to {ROUNDS}, in seconds; of the quickest: the ratio to our"
    )
    say("loop, and how many times as fast as the plain loop (which has FedAvg, FedRep, Ditto and FedAH only);")
    say("difference: of the last weights, from our loop's. + eval: with all clients' tests before and after training.")
    say("method     model      clients         engine              median quickest ratio speedup difference")
    for case in cases(full):
        run = case.runs()
        for method, scored in product(case.methods, case.scored):
            for row in compare(case, run, method, scored):
                rows.append(row)
                say(
                    f"{method:<10} {case.model:<10} {case.clients:>7} {'+ eval' * row['evaluation']:<7} "
                    f"{row['engine']:<19} {row['seconds']:>6.4f} {row['quickest']:>8.4f} {row['ratio']:>5.2f} "
                    + (f"{row['speedup']:>7.1f} " if row["speedup"] else "      - ")
                    + f"{row['difference']:>10.1e}"
                )
            if folder:
                pd.DataFrame(rows).to_csv(folder / "bench.csv", index=False)
    table = pd.DataFrame(rows)
    if folder:
        plots.save(plots.engines(table, hardware()), folder / "bench")
    if full:
        grown, peaks = scaling(), memory(cases(full))
        for name, found in (("scaling", grown), ("memory", peaks)):
            for line in ["", *found.round(4).to_string(index=False).splitlines()]:
                say(line)
            if folder:
                found.to_csv(folder / f"{name}.csv", index=False)
        if folder:
            title = f"FedAvg, MLP on noise of 8x8 pixels; {', '.join(f'{what} {n:,}' for what, n in BASE.items())}"
            plots.save(plots.scaling(grown, f"{title}; {hardware()}"), folder / "scaling")
    return table


def wide(units, shape, classes):
    """The bundled MLP with any number of hidden units."""
    pixels = torch.Size(shape).numel()
    layers = [("flat", nn.Flatten()), ("fc1", nn.Linear(pixels, units)), ("relu1", nn.ReLU())]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body, head = nn.Sequential(OrderedDict(layers)), nn.Linear(units, classes)
    return models.Model(f"mlp of {units}", body, head, shape, classes, plain=True)


def scaling(grow=None, engines=("plain", "loop", "stacked"), rounds=3):
    """Seconds of a round of FedAvg as one thing grows, by default as in GROW, and the others stay as in BASE: a row for
    each value and engine, with the median and the quickest round.

    The MLP on noise of the digits' shape, dealt out evenly. The plain loop has one thread: more only slow it down here.
    """
    rows = []
    for what, values in (grow or GROW).items():
        for value in values:
            now = BASE | {what: value}
            dataset = noise(now["samples"], 1, 8, 8)
            split = partition.iid(dataset.y, now["clients"])
            model = wide(now["hidden units"], dataset.shape, 10)
            rule, runs = Training(lr=0.01, batch_size=now["batch size"]), {}
            for engine in engines:
                threads = 1 if engine == "plain" else torch.get_num_threads()
                runs[engine] = threads, begin(dataset, split, model, rule, "fedavg", engine).play
            for engine, seconds in timed(runs, rounds).items():
                row = {"grows": what, "value": value, "engine": engine}
                rows.append(row | {"seconds": float(np.median(seconds)), "quickest": min(seconds)})
    return pd.DataFrame(rows)


@one_thread()
def steps(batches, units, repeats=30):
    """One SGD step of an MLP on 64 numbers, by one thread: batch size, hidden units, seconds (the quickest), FLOPs.

    FLOPs are those of matrix products: of each layer's outputs and its weights' gradients, and of the hidden units'.
    """
    rows = []
    for hidden in units:
        model = wide(hidden, (1, 8, 8), 10)
        params = trees.tree_map(torch.Tensor.requires_grad_, model.init())
        moving = trees.leaves(params)
        for batch in batches:
            dataset, seconds = noise(batch, 1, 8, 8), []
            y = torch.from_numpy(dataset.y)
            for _ in range(repeats):
                start = time.perf_counter()
                loss = F.cross_entropy(model.predict(params, dataset.x), y)
                with torch.no_grad():
                    torch._foreach_add_(moving, torch.autograd.grad(loss, moving), alpha=-0.01)
                seconds.append(time.perf_counter() - start)
            flops = batch * hidden * (4 * 64 + 6 * 10)
            rows.append({"batch size": batch, "hidden units": hidden, "seconds": min(seconds), "FLOPs": flops})
    return pd.DataFrame(rows)


@one_thread()
def speed(side=768, repeats=8):
    """FLOPs a second of one core, at the best: of the product of two large matrices."""
    a, seconds = torch.ones(side, side), []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * side**3 / min(seconds)


def schedule(sizes, batch):
    """Which batches of an epoch are one call, for clients of these `sizes`: {way: samples [clients, calls]}, 0: none.

    "filled up": stacked, by a loss `for_many`: clients with most batches on top, short last ones filled up. "grouped":
    by torch.vmap: full batches, then the short ones, those of one size together.
    """
    n = np.asarray(sizes)
    steps = -(-n // batch)
    rows = np.argsort(-steps, kind="stable")
    filled = np.clip(n[rows, None] - batch * np.arange(steps.max()), 0, batch)
    rows = np.argsort(-(n // batch), kind="stable")
    full = np.where(np.arange((n // batch).max()) < (n[rows] // batch)[:, None], batch, 0)
    short = n[rows] % batch
    last = [np.where(short == size, size, 0) for size in np.unique(short[short > 0])]
    return {"filled up": filled, "grouped": np.column_stack([full, *last])}


def memory(cases, method="fedavg"):
    """The most memory, in MB (10^6 bytes), of a process of its own that plays one round: a row for each case and
    engine, auto left out; start: before the round, with Python, torch and the data; peak: after it.
    """
    engines = [(case, engine) for case in cases for engine in ("plain", *case.engines) if engine != "auto"]
    jobs = list(dict.fromkeys((case.data, case.model, case.clients, engine) for case, engine in engines))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def measure(job):
        code = f"from pflkit import bench; print(*bench.peak(*{job!r}, {method!r}))"
        return subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split()

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(measure, jobs)
        names = ["data", "model", "clients", "engine", "start (MB)", "peak (MB)"]
        rows = [(*job, *map(float, pair)) for job, pair in zip(jobs, found, strict=True)]
    return pd.DataFrame(rows, columns=names)


def peak(dataset, model, clients, engine, method):
    """The most memory, in MB, that this process has had before and after a round."""
    run = Case(dataset, model, clients, (), ()).runs()(method, engine)
    before = _high_water()
    run.play()
    return before, _high_water()


def _high_water():
    """From /proc, where there is one: getrusage counts, on Linux, what the process that started this one had too."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line) * 1024 / 1e6
    import resource  # here, because Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def hardware():
    """The processor, and how many of its cores torch may use: what seconds depend on, for titles."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name, cores = found[0] if found else platform.processor() or platform.machine(), torch.get_num_threads()
    return f"{name}, {cores} core{'s' * (cores > 1)}"
