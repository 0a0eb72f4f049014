"""The claims of FedGH, arXiv 2303.13137."""

from dataclasses import asdict

import numpy as np

from pflkit.claims.comparisons import always, close, joined
from pflkit.claims.scale import Claim, Paper
from pflkit.training import Training

HALF = 0.1  # how far from 0.5 "half" may be: ours


def _fedgh(name, model, scheme):
    """What FedGH's released code fixes: FedGH_mh.py for mixed models, FedGH.py for one.

    Classes a client: its defaults. The defaults of FedGH.py are for CIFAR-100, those of FedGH_mh.py for CIFAR-10; the
    other pairs of script and data set borrow them. Not asked for: its 500 rounds, for the stopping rule of FedAH's
    released code decides; its test images, the data set's own, which our splits mix in; and its leaving out 10,000
    training images, which it splits off and never uses: full data here is all 60,000. Ours, as nothing is known of it:
    short batches are trained on.
    """
    size = {"clients": 100, "join_ratio": (0.1, 0.1), "epochs": 10, "batch_size": 64}
    if "+" in model:
        size = {"clients": 10, "join_ratio": (1.0, 1.0), "epochs": 30, "batch_size": 512}
    split = {"partition": "classes_per_client", "classes": 10 if name == "cifar100" else 2}
    rule = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0}
    return split | asdict(Training()) | rule | size


FEDGH = Paper(_fedgh)
MIXED = "+".join(f"cnn-{i}" for i in range(1, 6))
CIFAR = tuple((name, model) for name in ("cifar10", "cifar100") for model in ("cnn-1", MIXED))


def _prototypes(runs):
    """Every client's bytes in every round it joined; a run's value is its largest deviation, be it up or down."""
    if any(h.config["dtype"] != "torch.float32" for h in runs["fedgh"]):
        return "the runs are not of 32 bits a number"
    if any(h.labels is None or not h.labels.size for h in runs["fedgh"]):
        return "the runs' labels were not kept"
    up, down, beyond = zip(*map(_header, runs["fedgh"]), strict=True)
    return [
        always("fedgh: up − 4 (S + S r)", up, "equal 0"),
        always("fedgh: down − 4 (r K + K)", down, "equal 0"),
        always("fedgh: down − smallest model", beyond, "below 0"),
    ]


def _header(history):
    """(up − 4 (S + S r), down − 4 (r K + K), down − the smallest model's bytes): the worst of clients and rounds."""
    rows, model = joined(history), history.config["model"]
    ids = rows["client"].to_numpy()
    r, K = np.array(model["features"])[ids % len(model["features"])], model["classes"]
    S = (history.labels > 0).sum(1)[ids]
    up, down = (rows[way].to_numpy() for way in ("bytes_up", "bytes_down"))
    off = [up - 4 * (S + S * r), down - 4 * (r * K + K)]
    return *(float(gap[abs(gap).argmax()]) for gap in off), float(down.max() - 4 * min(model["parameters"]))


def _extraction(runs):
    """What FedGH computes beyond Local, which trains the same model on the same batches: one pass without gradients.

    In epochs: FLOPs beyond Local's, by Local's of one epoch. Local trains everybody in every round, so its work is
    counted for the same clients and rounds, those that joined FedGH's. A backward pass is two products for each one of
    the forward pass, so a third is to be expected, and more where the first layer, whose input needs no gradient, is
    much of the model.
    """
    if len(runs) < 2:
        return []
    values, epochs = [], runs["local"][0].config["training"]["epochs"]
    for both in zip(runs["fedgh"], runs["local"], strict=True):
        ours, theirs = (joined(h).set_index(["round", "client"])["flops"] for h in both)
        if not (spent := float(theirs.loc[ours.index].sum())):
            return "local trained nothing"
        values.append(epochs * (float(ours.sum()) - spent) / spent)
    return [close("fedgh: extracting representations", values, HALF, 0.5, "epochs")]


CLAIMS = (
    Claim(
        "GH8",
        FEDGH,
        "Up go S + S r numbers of 32 bits, for S classes and r features; down goes the header, less than any model",
        ("fedgh",),
        _prototypes,
        exact=True,
    ),
    Claim(
        "GH9",
        FEDGH,
        "Extracting representations costs half of one epoch's forward and backward; averaging is O(n)",
        ("fedgh", "local"),
        _extraction,
        CIFAR,
        parts=(
            ("extracting costs half of one epoch", ("fedgh", "local")),
            ("averaging is O(n)", None),
            ("in seconds", None),
        ),
    ),
)
