"""Are results on a GPU those of the CPU, and how long does a round take there, by each engine? Writes gpu.csv.

    python tests/gpu/check.py OUT [DEVICE]        DEVICE: cuda, or cpu to try the script where there is no GPU

Needs torch, numpy, pandas, scikit-learn and safetensors only, and no data: digits come with scikit-learn, and the
4-layer CNN is timed on made-up images of Fashion-MNIST's size, for its speed does not depend on what they show.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the package need not be installed

import numpy as np
import pandas as pd
import torch

from pflkit import data, models, partition, trees
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.training import Training

TIMED = ("fedavg", "fedrep", "fedah", "fedgh", "fedapa")  # 15 minutes are lent in all


def difference(method, device, engine, names=("cnn-small",)):
    """The largest difference between a loop on the CPU and `engine` on `device` in all that is kept after two rounds on
    digits, in float64.
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
        for _ in range(2):
            fed.play(make(method), state, 2)
        states.append(trees.tree_map(torch.Tensor.cpu, (state.server, state.kept)))
    return trees.unequal(*states)


def seconds(method, device, engine):
    """The median of three rounds of 20 clients with 300 training samples each, the 4-layer CNN, batches of 10."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.uniform(-1, 1, (8000, 1, 28, 28)).astype(np.float32))
    made_up = data.Dataset("made up", x, draw.integers(0, 10, 8000), tuple(range(10)))
    model = models.build("cnn", (1, 28, 28), 10)
    fed = Federation(made_up, partition.iid(made_up.y, 20), model, device=device, engine=engine)
    state, times = fed.start(make(method)), []
    for _ in range(4):
        start = time.perf_counter()
        fed.play(make(method), state, 4)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


if __name__ == "__main__":
    out, device = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cuda"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    about = {"device": name, "torch": torch.__version__}
    rows = [
        {"method": m, "engine": engine, **about, "difference": difference(m, device, engine)}
        | ({"seconds a round": seconds(m, device, engine)} if m in TIMED else {})
        for m in METHODS
        for engine in ("loop", "stacked", "auto")
    ]
    for engine in ("loop", "stacked"):
        gap = difference("fedgh", device, engine, ("mlp", "cnn-small", "mlp-1"))
        rows.append({"method": "fedgh, mixed models", "engine": engine, **about, "difference": gap})
    table = pd.DataFrame(rows)
    print(table.to_string())
    table.to_csv(out / "gpu.csv", index=False)
    if not (table["difference"] < 1e-9).all():
        sys.exit("results differ")
