"""The claims of FedGH, arXiv 2303.13137.

Beside each check stands how its vague words were made checkable. These readings are ours, all of them.

Accuracies are those after local training, of the clients that joined, for all methods: so the released code scores. At
their own points FedProto and LG-FedAvg would be scored on all clients, and at join ratios below 1 on many whose models
are rounds old, which alone can be more than what the paper is ahead.
"""

import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from pflkit import costs
from pflkit.claims import scale
from pflkit.claims.comparisons import (
    MARGIN,
    Comparison,
    Unchecked,
    above,
    ahead,
    always,
    close,
    compare,
    first,
    gaps,
    joined,
    lost,
)
from pflkit.claims.scale import NUMBERS, Claim, Paper
from pflkit.methods.fedgh import FedGH
from pflkit.protocols import MIXED
from pflkit.training import Training

TALKING = ("fedgh", "fedproto", "lgfedavg", "fd", "fml", "fedkd")  # all of them can do with different models
ALL = (*TALKING, "local", "fedavg")
OURS = "not all of the paper's seven baselines are known: beside FedProto, FML and FedKD they are ours"
AHEAD = {  # the paper's points ahead of FedProto: with one model for all clients, with five
    "one": {"cifar10": 0.54, "cifar100": 8.87},
    "five": {"cifar10": 1.17, "cifar100": 1.83},
}
SAVED = {"cifar100": 85.53}  # the paper's % of FedProto's bytes that FedGH saves until the target, models different
CLASSES = {"cifar10": (2, 4, 6, 8, 10), "cifar100": (10, 30, 50, 70, 90, 100)}  # ours, after the code's comments
RATIOS = (0.1, 0.5, 1.0)  # the ends are the paper's; what is between is ours
EACH = "at every number of classes"
EVERY = "at every participation rate from 0.1 to 1"
POINT = "after"
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
SAME = tuple((name, "cnn-1") for name in ("cifar10", "cifar100"))
DIFFERENT = tuple((name, MIXED) for name in ("cifar10", "cifar100"))
CIFAR = (*SAME, *DIFFERENT)


def _config(runs):
    """The configuration of the runs, but for what the seed and the method change."""
    return next(iter(runs.values()))[0].config


def _other_models(runs, models):
    """Why runs are not of `models`, "one" for all clients or "five"; "" if they are. More than one count as five."""
    mixed = len(set(_config(runs)["model"]["name"].split("+"))) > 1
    if mixed is (models == "five"):
        return ""
    return f"it is about {'different models' if models == 'five' else 'one model for all clients'}"


def _ahead(models, runs):
    """FedGH is above FedProto; at full scale its points ahead are the paper's, within ±MARGIN.

    Of the last round: which one the paper counts is not known to us.
    """
    if len(runs) < 2:
        return []
    if why := _other_models(runs, models):
        return why
    lead, name = gaps(runs["fedgh"], runs["fedproto"], POINT), _config(runs)["dataset"]["name"]
    found = [above("fedgh − fedproto", lead)]
    if name not in AHEAD[models]:
        return [*found, Unchecked(NUMBERS, f"it has none for {name}")]
    return [*found, replace(close("fedgh − fedproto", lead, to=AHEAD[models][name]), full=True)]


def _fewest(runs):
    """FedGH needs fewer rounds to the target than every other method that was run; on CIFAR-100 fewer bytes than
    FedProto, at full scale by the paper's % ± MARGIN.

    The target is the highest mean accuracy that all of these reach, each in its best round, seed by seed. The paper's
    is not known. So it is low where one of them learns little. Local, which sends nothing, neither sets it nor is
    compared. Reached is what was seen: evaluations that are k rounds apart tell rounds to within k.
    """
    others = [name for name in runs if name != "fedgh"]
    if "fedgh" not in runs or not others:
        return []
    if why := _other_models(runs, "five"):
        return why
    targets = [min(float(h.curve(POINT).max()) for h in seed) for seed in zip(*runs.values(), strict=True)]
    config = _config(runs)
    name, grain = config["dataset"]["name"], config["eval_every"]
    seen = f", seen every {grain}" if grain > 1 else ""

    def until(reached, name):
        return [reached(h, target, POINT) for h, target in zip(runs[name], targets, strict=True)]

    rounds = {name: until(costs.rounds_to_target, name) for name in runs}
    more = {other: [a - b for a, b in zip(rounds[other], rounds["fedgh"], strict=True)] for other in others}
    found = [above(f"rounds to the target: {other} − fedgh{seen}", more[other], "rounds") for other in others]
    if "fedproto" not in runs:
        return found
    ours, theirs = (until(costs.bytes_to_target, name) for name in ("fedgh", "fedproto"))
    if name not in SAVED:
        why = f"it is about CIFAR-100, not {name}"
        return [*found, Unchecked("fewer bytes than FedProto", why), Unchecked(NUMBERS, why)]
    saved = [100 * (1 - a / b) for a, b in zip(ours, theirs, strict=True)]
    what = f"bytes to the target that fedgh saves of fedproto's{seen}"
    return [*found, above(what, saved, "%"), replace(close(what, saved, to=SAVED[name], unit="%"), full=True)]


def _unlike(runs):
    """FML does not converge where FedGH and FedKD, if run, do: when the stopping rule has ended all runs of these, it
    has ended none of FML's; and FedGH is above FedKD.

    The rule calls a curve that falls converged, at its peak. So it contradicts only if all FML's runs, ended by it,
    keep what they reached, their last round being within MARGIN of their best; else the question is open. Before the
    others have converged nothing is said of it. But FedGH and FedKD are compared in their last round all the same.
    """
    if not runs.keys() & {"fml", "fedkd"} or "fedgh" not in runs:
        return []
    if why := _other_models(runs, "five"):
        return why
    found = ahead([("fedgh", "fedkd")], runs, point=POINT)
    if "fml" not in runs:
        return found
    if why := scale.unsettled([h for name, group in runs.items() if name != "fml" for h in group]):
        return [*found, Unchecked("FML does not converge", f"of the others {why[0]}")]
    ended = [costs.rounds_to_convergence(h, scale.PATIENCE) is not None for h in runs["fml"]]
    kept = [end and points <= MARGIN for end, points in zip(ended, lost("fml", runs), strict=True)]
    holds = True if not any(ended) else False if all(kept) else None
    low, high, share = float(all(ended)), float(any(ended)), sum(ended) / len(ended)
    what = "fml: runs that the stopping rule has ended"
    return [Comparison(what, "share of runs", "none", tuple(map(float, ended)), share, low, high, holds), *found]


def _any_rate(sets):
    """At every rate FedGH's accuracy is close to that at the default one, .01, which is ours: within ±MARGIN.

    The rates must span three decades. No training of the header, at rate 0, is none of them.
    """
    rates = {rate: runs["fedgh"] for rate, runs in sets.items() if rate > 0}
    default = FedGH().header_lr
    if default not in rates:
        return f"no runs with the default rate {default:g}"
    if (span := math.log10(max(rates) / min(rates))) < 3 - 1e-9:
        return f"the rates span {span:.2g} of at least 3 decades"
    others = {rate: runs for rate, runs in rates.items() if rate != default}
    return [close(f"fedgh, header_lr {r:g} − {default:g}", gaps(h, rates[default], POINT)) for r, h in others.items()]


def _any_classes(sets):
    """FedGH is above every other method at every number of classes per client there; "every" takes those in CLASSES."""
    found = [c for classes, runs in sets.items() for c in first("fedgh", runs, f"{classes} classes: ", POINT)]
    name = _config(next(iter(sets.values())))["dataset"]["name"]
    if found and name not in CLASSES:
        return [*found, Unchecked(EACH, f"it is about CIFAR-10 and CIFAR-100, not {name}")]
    return found and [*found, *_absent(EACH, [str(n) for n in CLASSES[name] if n not in sets])]


def _any_ratio(sets):
    """Of 100 clients: FedGH is above every other method at every participation rate there; "every" takes those in
    RATIOS. And from the lowest to the highest its accuracy falls.

    That is of the ends, as "grows" is in AH9: neighbours, among ten rates, would be within noise of each other.
    """
    if (clients := _config(next(iter(sets.values())))["clients"]) != 100:
        return f"it is about 100 clients, not {clients}"
    sets = {low: runs for (low, high), runs in sets.items() if low == high}
    if len(sets) < 2 or any("fedgh" not in runs for runs in sets.values()):
        return []
    found = [c for ratio, runs in sets.items() for c in first("fedgh", runs, f"join ratio {ratio:g}: ", POINT)]
    lacking = _absent(EVERY, [f"{ratio:g}" for ratio in RATIOS if ratio not in sets])
    if not found:
        lacking = [Unchecked(part, "no other method was run") for part in ("FedGH first", EVERY)]
    (low, before), *_, (high, after) = sets.items()
    fall = compare(f"fedgh, join ratio {low:g} − {high:g}", before["fedgh"], after["fedgh"], POINT)
    return [*found, fall, *lacking]


def _absent(part, values):
    """An Unchecked `part` for values that no set has, if there are some."""
    return [Unchecked(part, f"no runs with {', '.join(values)}")] if values else []


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
        "GH1",
        FEDGH,
        "One model for all: FedGH is ahead of FedProto by 0.54 points on CIFAR-10 and 8.87 on CIFAR-100",
        ("fedgh", "fedproto"),
        partial(_ahead, "one"),
        SAME,
        parts=(("FedGH ahead of FedProto", ("fedgh", "fedproto")), (NUMBERS, ("fedgh", "fedproto"))),
    ),
    Claim(
        "GH2",
        FEDGH,
        "CNN-1 to CNN-5 in turn: FedGH is ahead of FedProto by 1.17 points on CIFAR-10 and 1.83 on CIFAR-100",
        ("fedgh", "fedproto"),
        partial(_ahead, "five"),
        DIFFERENT,
        parts=(("FedGH ahead of FedProto", ("fedgh", "fedproto")), (NUMBERS, ("fedgh", "fedproto"))),
    ),
    Claim(
        "GH3",
        FEDGH,
        "Different models: FedGH needs the fewest rounds to the target accuracy; on CIFAR-100 it saves 85.53 % of "
        "FedProto's bytes",
        TALKING,
        _fewest,
        DIFFERENT,
        parts=(
            ("fewest rounds", ("fedgh",)),
            ("fewer bytes than FedProto", ("fedgh", "fedproto")),
            (NUMBERS, ("fedgh", "fedproto")),
        ),
        remark=OURS,
    ),
    Claim(
        "GH4",
        FEDGH,
        "Different models: FML does not converge, FedKD converges lower than FedGH",
        ("fedgh", "fml", "fedkd"),
        _unlike,
        DIFFERENT,
        parts=(("FML does not converge", ("fedgh", "fml")), ("FedKD lower than FedGH", ("fedgh", "fedkd"))),
        endless=("fml",),
        remark="FedKD is compared in its last round, converged or not",
    ),
    Claim(
        "GH5",
        FEDGH,
        "The header's learning rate does not matter, over three decades",
        ("fedgh",),
        _any_rate,
        CIFAR,
        varies=("fedgh header_lr",),
    ),
    Claim(
        "GH6",
        FEDGH,
        "FedGH is first at every number of classes per client",
        ALL,
        _any_classes,
        CIFAR,
        parts=(("FedGH first", ("fedgh",)), (EACH, ("fedgh",))),
        varies=("classes",),
        remark=OURS,
    ),
    Claim(
        "GH7",
        FEDGH,
        "With 100 clients FedGH is first at every participation rate from 0.1 to 1; its accuracy falls as that rises",
        ALL,
        _any_ratio,
        SAME,
        parts=(("FedGH first", ("fedgh",)), (EVERY, ("fedgh",)), ("accuracy falls as participation rises", ("fedgh",))),
        varies=("join_ratio",),
        remark=f"{OURS}; an accuracy after local training is of the clients that joined the last round",
    ),
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
