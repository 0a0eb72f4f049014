"""Are results on a GPU those of the CPU, and how long does a round take there, by each engine? Writes gpu.csv and
gpu_seconds.csv.

    python tests/gpu/check.py OUT [DEVICE]        DEVICE: cuda, or cpu to try the script where there is no GPU

Needs torch, numpy, pandas, scikit-learn, scipy, joblib, filelock and safetensors only, and no data: digits come with
scikit-learn, and what is timed runs on made-up images of the data sets' sizes, for its speed does not depend on what
they show. Each part is written as it comes, the quick ones first, so that a time limit loses little.
"""

import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package need not be installed

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from pflkit import data, models, partition, training, trees
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.training import Training

ENGINES = ("loop", "stacked", "auto")
ROUNDS = 5  # timed, after two that are not; the median counts


def difference(method, device, engine, names=("cnn-small",)):
    """The largest difference between a loop on the CPU and `engine` on `device` in all that is kept on digits, float64,
    after four rounds: so many that recorded steps are replayed.
    """
    digits = data.load("digits")
    split = partition.dirichlet(digits.y, 10, beta=0.1)
    model = [models.build(name, digits.shape, 10) for name in names]
    states = []
    for where, how in (("cpu", "loop"), (device, engine)):
        rule = Training(lr=0.05, momentum=0.9, weight_decay=1e-3)
        options = {"join_ratio": 0.5, "device": where, "dtype": torch.float64, "engine": how}
        fed = Federation(digits, split, model, training=rule, **options)
        state = fed.start(make(method))
        for _ in range(4):
            fed.play(make(method), state, 4)
        states.append(trees.tree_map(torch.Tensor.cpu, (state.server, state.kept)))
    return trees.unequal(*states)


def federation(shape, clients, samples, model, device, engine="auto", **options):
    """Clients with so many made-up training samples in all."""
    draw, n = np.random.default_rng(0), samples * 4 // 3
    x = torch.from_numpy(draw.uniform(-1, 1, (n, *shape)).astype(np.float32))
    made_up = data.Dataset("made up", x, draw.integers(0, 10, n), tuple(range(10)))
    split, net = partition.iid(made_up.y, clients), models.build(model, shape, 10)
    return Federation(made_up, split, net, training=Training(lr=0.005), device=device, engine=engine, **options)


def median(play, device):
    """The median seconds of a few calls, after two."""
    times = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        play()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def ours(fed, method, device, graphs=True):
    """Seconds a round of training, and whether steps were recorded."""
    method, engine = make(method), fed.groups[0].engine
    engine.graphs = engine.graphs if graphs else None
    state = fed.start(method)
    found = median(lambda: fed.play(method, state, 99), device)
    return found, bool(engine.graphs and engine.graphs.recorded)


def plain(fed, device):
    """Seconds a round of FedAvg's training by a plain loop: each client a DataLoader and an optimizer."""
    extractor, head = (part.module.to(device) for part in (fed.model.extractor, fed.model.head))
    start = {k: v.clone() for k, v in torch.nn.Sequential(extractor, head).state_dict().items()}

    def play():
        net = torch.nn.Sequential(extractor, head)
        for x, y in fed.train:
            net.load_state_dict(start)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.005)
            for rows, labels in DataLoader(TensorDataset(x.cpu(), y.cpu()), 10, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(net(rows.to(device)), labels.to(device)).backward()
                optimizer.step()

    return median(play, device)


def timed(device):
    """Rows of what is timed: (what, method, engine, graphs, seconds a round)."""
    small = device == "cpu"
    grey, colour = (1, 28, 28), (3, 32, 32)
    samples = 400 if small else 6000
    seconds = plain(federation(grey, 20, samples, "cnn", device), device)
    yield "4-layer CNN, 20 clients", "fedavg", "plain loop", False, seconds
    for engine in ENGINES:
        for graphs in (True, False) if engine != "loop" else (False,):
            for method in ("fedavg", "fedah"):
                fed = federation(grey, 20, samples, "cnn", device, engine)
                seconds, recorded = ours(fed, method, device, graphs)
                yield "4-layer CNN, 20 clients", method, engine, recorded, seconds
    # FedAH's CIFAR-10 protocol: 60,000 images, three quarters of them to train, 20 clients, batches of 10
    fed = federation(colour, 20, 400 if small else 45_000, "cnn", device)
    yield "FedAH's CIFAR-10 protocol", "fedah", "auto", *ours(fed, "fedah", device)[::-1]
    for clients in (10, 20, 50, 100, 200):
        fed = federation(grey, clients, samples, "cnn", device)
        seconds, recorded = ours(fed, "fedavg", device)
        yield f"4-layer CNN, {clients} clients, the same data", "fedavg", "auto", recorded, seconds
    for precision in ("tf32", "bf16") if not small else ():
        fed = federation(grey, 20, samples, "cnn", device, precision=precision)
        seconds, recorded = ours(fed, "fedavg", device)
        yield f"4-layer CNN, 20 clients, {precision}", "fedavg", "auto", recorded, seconds
    # A GPU's stacked engine trains so large a model one client at a time; all at once for comparison.
    usual = training.ALONE
    for what, engine, alone in (("", "loop", usual), ("", "stacked", usual), (", all at once", "stacked", np.inf)):
        training.ALONE = alone
        fed = federation(colour, 10, 80 if small else 400, "resnet18", device, engine)
        seconds, recorded = ours(fed, "fedavg", device)
        yield f"ResNet-18, 10 clients{what}", "fedavg", engine, recorded, seconds
    training.ALONE = usual
    for name in ("fedrep", "ditto", "fedala", "fedgh", "fedapa"):
        fed = federation(grey, 20, samples, "cnn", device)
        seconds, recorded = ours(fed, name, device)
        yield "4-layer CNN, 20 clients", name, "auto", recorded, seconds


if __name__ == "__main__":
    out, device = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"
    out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about, bad = {"device": name, "torch": torch.__version__}, []
    warnings.simplefilter("always")  # a step that could not be recorded says so
    cases = [(m, e, ("cnn-small",)) for m in ("fedavg", "fedah", "ditto", "perfedavg") for e in ENGINES]
    cases += [("fedgh", e, ("mlp", "cnn-small", "mlp-1")) for e in ENGINES[:2]]
    rest = [(m, e, ("cnn-small",)) for m in METHODS for e in ENGINES if (m, e, ("cnn-small",)) not in cases]

    def check(cases, rows):
        for method, engine, names in cases:
            gap = difference(method, device, engine, names)
            rows.append({"method": method, "model": "+".join(names), "engine": engine, **about, "difference": gap})
            print(rows[-1], flush=True)
            bad.extend([] if gap < 1e-9 else [method])
            pd.DataFrame(rows).to_csv(out / "gpu.csv", index=False)

    rows, seconds = [], []
    check(cases, rows)
    usual, training.ALONE = training.ALONE, 0  # as large models with convolutions train, one client at a time
    check([(method, "stacked", ("cnn-small",)) for method in ("fedavg", "fedah", "perfedavg")], rows)
    training.ALONE = usual
    for what, method, engine, recorded, taken in timed(device):
        row = {"what": what, "method": method, "engine": engine, "graphs": recorded, "seconds a round": taken}
        seconds.append(row | about)
        print(row, flush=True)
        pd.DataFrame(seconds).to_csv(out / "gpu_seconds.csv", index=False)
    check(rest, rows)
    if bad:
        sys.exit(f"results differ: {', '.join(bad)}")
