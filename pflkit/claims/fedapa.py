"""The claims of FedAPA, arXiv 2502.07456."""

from dataclasses import asdict

import numpy as np
from scipy import stats

from pflkit.claims.comparisons import Comparison, above, always, joined, traffic
from pflkit.claims.scale import Claim, Paper
from pflkit.training import Training

ROUNDING = 1e-6  # a smaller relative change of the proxy loss is float32's rounding (measured: up to 2.3e-7)


def _fedapa(name, model, scheme):
    """What FedAPA's released code fixes; its text's values were not seen.

    CIFAR-100 by Dir(0.1) only: 2 classes a client leave its split empty there, so it was another number, not known. Not
    asked for: its 50 rounds, for the stopping rule of FedAH's released code decides; its test images, the data set's
    own, which our splits mix in; the weights by which its pathological split shares a class, uniform on [0.3, 0.7],
    where ours are on [0.1, 1]; and its default model, LeNet-5, which is not bundled. Ours, as nothing is known of it:
    no decay or clipping, short batches trained on.
    """
    split = {"partition": "dirichlet", "beta": 0.1, "capped": False}
    if scheme == "pathological" and name != "cifar100":
        split = {"partition": "pathological", "classes": 2, "grouped": True, "balanced": False}
    rule = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": 2}
    return split | asdict(Training()) | rule | {"clients": 20, "join_ratio": (0.6, 1.0)}


FEDAPA = Paper(_fedapa, 132)  # its code redraws until each client has over 128 samples to train and over 2 to test
THREE = tuple((name, "cnn") for name in ("fashion-mnist", "cifar10", "cifar100"))  # cnn: one of its code's four models


def _extractor_only(runs):
    """FedAPA receives and sends what FedPer does, and that is 4 R bytes, if the extractor has R parameters.

    R is known where the head is one linear layer with bias, and a number has 32 bits; else FedPer alone is compared.
    """
    if not ("fedapa" in runs and "fedper" in runs):
        return []
    ways, ours = ("down", "up"), runs["fedapa"]
    found = [traffic(f"fedapa − fedper, {way}", ours, runs["fedper"], "equal 0", [way]) for way in ways]
    if all(map(_extractor, ours)):
        found += [always(f"fedapa: {way} − 4 R", [_beyond(h, way) for h in ours], "equal 0") for way in ways]
    return found


def _extractor(history):
    """The parameters of the extractor: the model's without those of a linear head; None for others."""
    model = history.config["model"]
    r, K, size = model["features"][0], model["classes"], model["parameters"][0]
    linear = model.get("modules", [""])[-1] == f"Linear(in_features={r}, out_features={K}, bias=True)"
    return size - (r + 1) * K if linear and history.config["dtype"] == "torch.float32" else None


def _beyond(history, way):
    """The largest deviation from 4 R, be it up or down, of a client's bytes in a round that it joined."""
    gap = joined(history)[f"bytes_{way}"].to_numpy() - 4 * _extractor(history)
    return float(gap[abs(gap).argmax()])


def label_similarity(labels):
    """The cosine similarity of the clients' label distributions, from their counts [N, K] of each class: [N, N].

    >>> label_similarity([[2, 2], [5, 5], [0, 4]]).round(3).tolist()
    [[1.0, 1.0, 0.707], [1.0, 1.0, 0.707], [0.707, 0.707, 1.0]]
    """
    p = np.asarray(labels, float)
    p = p / np.linalg.norm(p, axis=1, keepdims=True)
    return p @ p.T


def _reflects(runs):
    """A run's value: Pearson's correlation of the final a_ij, i ≠ j, with the similarity of i's and j's labels."""
    values = []
    for h in runs["fedapa"]:
        if h.state is None:
            return "the runs' states were not kept"
        A = h.state.server["A"].cpu().double().numpy()
        others = ~np.eye(len(A), dtype=bool)
        pair = {"weights": A[others], "label similarities": label_similarity(h.labels)[others]}
        for name, x in pair.items():
            if len(x) == 0 or np.ptp(x) <= ROUNDING * abs(x).max():
                return (
                    f"seed {h.config['seed']}: no two clients' {name} differ from others', so no correlation is defined"
                )
        values.append(float(stats.pearsonr(*pair.values()).statistic))
    return [above(f"a_ij and label similarity{_rate(runs)}", values, "correlation")]


def _lowers(runs):
    """Holds if no update of any client and round raised its proxy loss, and some lowered it; ROUNDING is neither.

    A run's values: the largest and the smallest relative change by an update. Clients that never joined yet count as 0.
    """
    if any(h.watch.empty for h in runs["fedapa"]):
        return "what the runs watched was not kept"
    changes = [h.watch[h.watch["name"] == "proxy change"] for h in runs["fedapa"]]
    largest, smallest = [float(c["q100"].max()) for c in changes], [float(c["q00"].min()) for c in changes]
    found = []
    for what, rule, values, holds in (
        ("largest", f"at most {ROUNDING:g}", largest, max(largest) <= ROUNDING),
        ("smallest", f"below −{ROUNDING:g}", smallest, True if max(smallest) < -ROUNDING else None),
    ):
        mean = sum(values) / len(values)
        ends = mean, min(values), max(values)
        found.append(Comparison(f"{what} change of P{_rate(runs)}", "share of P", rule, tuple(values), *ends, holds))
    return found


def _rate(runs):
    """The settings of FedAPA's updates, to be read beside what they did."""
    settings = runs["fedapa"][0].config["settings"]
    return f" (server_lr {settings['server_lr']:g}, {settings['sign']})"


CLAIMS = (
    Claim(
        "PA3",
        FEDAPA,
        "Bytes a round: only the extractor both ways, as FedPer",
        ("fedapa", "fedper"),
        _extractor_only,
        exact=True,
    ),
    Claim(
        "PA5",
        FEDAPA,
        "The learned weights reflect how alike the clients' data are",
        ("fedapa",),
        _reflects,
        THREE,
    ),
    Claim(
        "PA6",
        FEDAPA,
        "Each raw update of the weights lowers the proxy loss P, at the run's rate (sure only below 2/λmax)",
        ("fedapa",),
        _lowers,
        THREE,
    ),
)
