"""The papers' claims as checks on results: measured runs in, a verdict and the numbers behind it out.

    check("AH7", {"fedavg": [History, one a seed], "fedper": [...], ...}) -> Verdict

    reproduced / not reproduced        the claim's own data set and model, full data, the split and protocol of the
                                       paper or of its released code, every method's settings at their defaults, at
                                       least 5 seeds, and every run converged by the stopping rule of FedAH's released
                                       code (no paper names one)
    agrees / disagrees at reduced scale  a real data set and at least 3 seeds
    not tested                         anything less, and every tie within noise

Three rules decide what a comparison says. Its values, one a seed, are mostly differences of runs that share seed, split
and initial model, in percentage points, and its interval is the 95 % t interval of their mean over seeds.

    above   a − b:  holds if the interval lies above 0, is contradicted if it lies below; else it is within noise
    close   a − b:  holds if the interval lies within ± MARGIN, is contradicted if it lies wholly outside; else open
    always          must hold in every run. An identity of the ledger is exact: neither scale nor seeds matter

An interval that contains 0 does not show that two methods are close: few seeds make it wide. So `close` asks for a
narrow one. Its margin of 1 point is ours; a 95 % interval is stricter than the usual test of equivalence, which takes
90 %. A claim of several comparisons holds if all do, and is contradicted if one is; with many of them the latter
happens by chance more often than 2.5 % of the time, so read the numbers.

A claim is checked with those of its methods that were run, in those of its parts that a run can check. The verdict then
says how many of them there were, and speaks of no others. Accuracy is a History's one number: mean over clients, last
round, at the method's own point.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

from pflkit import costs
from pflkit.checks import choice
from pflkit.methods import METHODS
from pflkit.training import Training

PATIENCE = 100  # evaluations without a new best: FedAH's released code's rule; the paper: "an early stopping mechanism"
MARGIN = 1.0  # points: ours
HALF = 0.1  # how far from 0.5 "half" may be: ours
ROUNDING = 1e-6  # a smaller relative change of FedAPA's proxy loss is float32's rounding (measured: up to 2.3e-7)
SIZES = {  # which data sets are real, and how many samples, training and test together, are full data
    "digits": 1_797,
    "mnist": 70_000,
    "fashion-mnist": 70_000,
    "cifar10": 60_000,
    "cifar100": 60_000,
    "tiny-imagenet": 100_000,
    "agnews": 127_600,
}


@dataclass(frozen=True)
class Comparison:
    """One number a seed, the 95 % t interval of their mean, and what that says: holds is True, False or None (open)."""

    what: str
    unit: str
    rule: str
    values: tuple
    mean: float
    low: float
    high: float
    holds: bool | None


@dataclass(frozen=True)
class Paper:
    """What runs must share with a paper's own to reproduce it.

    protocol(data set, model, partition): what it fixes, as it stands in a run's configuration. min_size: the most
    samples that a client of a Dirichlet split may be sure of. stopping: the rule by which a run has converged.
    """

    protocol: Callable
    min_size: float = math.inf
    stopping: str = "the stopping rule of FedAH's code"


@dataclass(frozen=True)
class Claim:
    """What a paper says, and what it takes to reproduce it.

    methods: all it speaks of. measure(runs): the comparisons that the runs there are allow, or a text: why none.
    settings: the (data set, model) pairs of the paper. parts: where it says several things, each as (text, methods it
    takes, or None if no run checks it). Claims about strong heterogeneity are `skewed`, about what follows convergence
    `settled`, about the ledger `exact`.
    """

    id: str
    paper: Paper
    text: str
    methods: tuple
    measure: Callable
    settings: tuple = ()
    parts: tuple = ()
    skewed: bool = False
    settled: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Verdict:
    """A claim's verdict on some runs; coverage: how much of the claim was checked, "" for all of it."""

    id: str
    text: str
    verdict: str
    why: str
    coverage: str
    numbers: tuple

    def __str__(self):
        """The verdict as it is to be quoted: with its coverage, where only a part of the claim was checked."""
        return f"{self.verdict} ({self.coverage})" if self.coverage and self.numbers else self.verdict


def check(claim_id, runs):
    """The Verdict on a claim of CLAIMS by `runs`: {method: [History, one a seed]}, seeds in one order for all methods.

    Methods that the claim does not name are ignored. Raises ValueError for an unknown claim and for runs under another
    method's name.
    """
    claim = CLAIMS[choice("claim_id", claim_id, CLAIMS)]
    there = {name: list(runs[name]) for name in claim.methods if runs.get(name)}
    for name, histories in there.items():
        for history in histories:
            if history.config["method"] != name:
                raise ValueError(f"runs[{name!r}]: holds a run of {history.config['method']!r}")
    lacking = _mismatch(there) if there else ["none of its methods was run"]
    found = () if lacking else claim.measure(there) or "too few of its methods"
    comparisons, lacking = ((), [found]) if isinstance(found, str) else (tuple(found), lacking)
    lacking = lacking or ([] if claim.exact else _reduced(claim, there))
    short = [] if claim.exact or lacking else _full(claim, there)
    verdict, why = _decide(comparisons, lacking, short)
    unchecked = [text for text, needs in claim.parts if needs is None or not there.keys() >= set(needs)]
    missing = [name for name in claim.methods if name not in there]
    why += [f"not checked: {text}" for text in unchecked] + ([f"without {', '.join(missing)}"] if missing else [])
    coverage = [f"{len(claim.parts) - len(unchecked)} of {len(claim.parts)} parts"] if unchecked else []
    coverage += [f"{len(there)} of {len(claim.methods)} methods"] if missing else []
    return Verdict(claim.id, claim.text, verdict, "; ".join(why), ", ".join(coverage), comparisons)


def table(verdicts):
    """A row per verdict: the claim, the verdict with its coverage, and why it is no better (or what it rests on)."""
    rows = [{"id": v.id, "claim": v.text, "verdict": str(v), "why": v.why} for v in verdicts]
    return pd.DataFrame(rows, columns=["id", "claim", "verdict", "why"]).set_index("id")


def numbers(verdicts):
    """A row per comparison behind `verdicts`: its mean over seeds, 95 % interval and rule, and whether that is met."""
    met, rows = {True: "yes", False: "no", None: "open"}, []
    shown = {"bytes": lambda x: round(x, 0), "points": lambda x: round(x, 2)}
    for v in verdicts:
        for c in v.numbers:
            ends = map(shown.get(c.unit, lambda x: float(f"{x:.3g}")), (c.mean, c.low, c.high))
            rows.append([v.id, c.what, c.unit, len(c.values), *ends, c.rule, met[c.holds]])
    columns = ["id", "comparison", "unit", "seeds", "mean", "low", "high", "rule", "met"]
    return pd.DataFrame(rows, columns=columns).set_index("id")


def differences(runs, reference):
    """A row per other method: the points that `reference` is ahead of it in the last round, with the 95 % t interval
    over seeds and what that says. Columns: at each method's own point, before, and after local training.

    runs: {label: [History, one a seed]}, seeds in one order. Raises ValueError where they cannot be paired by seed.
    """
    choice("reference", reference, runs)
    if why := _mismatch(runs):
        raise ValueError(f"runs: {'; '.join(why)}")
    points = {"own": None, "before": "before", "after": "after"}
    others = [label for label in runs if label != reference]
    rows = [[_ahead(compare(o, runs[reference], runs[o], point)) for point in points.values()] for o in others]
    return pd.DataFrame(rows, others, list(points)).rename_axis(f"{reference} against")


def _ahead(c):
    word = {True: "ahead", False: "behind", None: "within noise"}[c.holds]
    return f"{c.mean:+.1f} [{c.low:.1f}, {c.high:.1f}] {word}"


# --- comparisons -----------------------------------------------------------------------------------------------------


def interval(values):
    """(mean, low, high): the 95 % t interval of the mean; infinite for a single value.

    >>> [round(x, 3) for x in interval([1.0, 2.0, 3.0])]    # 2 ± 4.3027 · 1 / √3
    [2.0, -0.484, 4.484]
    """
    n, mean = len(values), sum(values) / len(values)
    if n < 2:
        return mean, -math.inf, math.inf
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stats.t.ppf(0.975, n - 1)) * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def compare(what, ours, theirs, point=None):
    """The Comparison "above" of two lists of Histories, paired: ours − theirs, in points."""
    return above(what, _gaps(ours, theirs, point))


def above(what, values, unit="points"):
    """Holds if the interval of `values` lies above 0, is contradicted if it lies below."""
    mean, low, high = interval(values)
    holds = True if low > 0 else False if high < 0 else None
    return Comparison(what, unit, "above 0", tuple(values), mean, low, high, holds)


def close(what, values, margin=MARGIN, to=0.0, unit="points"):
    """Holds if the interval of `values` lies within `to` ± `margin`, is contradicted if it lies wholly outside."""
    mean, low, high = interval(values)
    outside = low > to + margin or high < to - margin
    holds = True if to - margin < low and high < to + margin else False if outside else None
    rule = f"within {f'{to:g} ' if to else ''}±{margin:g}"
    return Comparison(what, unit, rule, tuple(values), mean, low, high, holds)


def always(what, values, rule):
    """Holds if all `values`, in bytes, are "below 0", "equal 0" or "above 0", as `rule` says; else is contradicted."""
    fits = {"below 0": lambda v: v < 0, "equal 0": lambda v: v == 0, "above 0": lambda v: v > 0}[rule]
    mean = sum(values) / len(values)
    return Comparison(what, "bytes", rule, tuple(values), mean, min(values), max(values), all(map(fits, values)))


def traffic(what, ours, theirs, rule, ways=("down", "up")):
    """Bytes a client receives and sends a round, ours − theirs, always as the `rule` says."""
    return always(what, [_bytes(a, ways) - _bytes(b, ways) for a, b in zip(ours, theirs, strict=True)], rule)


def _gaps(ours, theirs, point=None):
    """Accuracies of the last round, paired: ours − theirs, in points."""
    pairs = zip(ours, theirs, strict=True)
    return [100 * (a.curve(point).iloc[-1] - b.curve(point).iloc[-1]) for a, b in pairs]


def _bytes(history, ways):
    cost = costs.per_round(history)
    return sum(cost[f"bytes {way} / client"] for way in ways)


def _joined(history):
    """The rows of a History's clients where they joined the round."""
    return history.clients[history.clients["joined"].astype(bool)]


# --- preconditions ---------------------------------------------------------------------------------------------------


def _decide(comparisons, lacking, short):
    """(verdict, why) of comparisons, what is lacking for any verdict, and what is short of the full scale."""
    if lacking:
        return "not tested", lacking
    against = [c.what for c in comparisons if c.holds is False]
    undecided = [_tie(c) for c in comparisons if c.holds is None]
    if undecided and not against:
        return "not tested", undecided
    why = [f"contradicted by {', '.join(against)}"] if against else []
    if short:
        return f"{'disagrees' if against else 'agrees'} at reduced scale", why + short
    return "not reproduced" if against else "reproduced", why


def _tie(c):
    """Why the comparison `c` is open."""
    noise = "within noise" if c.low <= 0 <= c.high else "not 0"
    if c.rule == "above 0":
        return f"{noise}: {c.what}"
    return f"{f'{noise}, but ' if c.rule.startswith('within ±') else ''}not shown to be {c.rule}: {c.what}"


DESIGN = ("dataset", "clients", "training", "join_ratio", "rounds", "eval_every", "dtype", "partition", "model")


def _mismatch(runs):
    """Why the Histories of `runs` cannot be compared seed by seed, as a list; empty if they can. Its keys only name."""
    configs = {label: [h.config for h in histories] for label, histories in runs.items()}
    first, firsts = next(iter(configs.items()))
    seeds = [c["seed"] for c in firsts]
    if not seeds:
        return [f"{first} has no runs"]
    if len(set(seeds)) < len(seeds):
        return [f"a seed occurs twice: {', '.join(map(str, seeds))}"]
    for label, own in configs.items():
        if [c["seed"] for c in own] != seeds:
            return [f"{label} and {first} were not run on the same seeds"]
        differ = [k for k in ("settings", *DESIGN) if any(_undrawn(c[k]) != _undrawn(own[0][k]) for c in own)]
        if differ:
            return [f"the runs of {label} differ in more than the seed: {', '.join(differ)}"]
        differ = [k for k in DESIGN if [c[k] for c in own] != [c[k] for c in firsts]]
        if differ:
            return [f"{label} and {first} differ in more than the method: {', '.join(differ)}"]
    return []


def _undrawn(part):
    """Part of a configuration without what depends on the seed."""
    drawn = ("seed", "redraws", "moved", "fingerprint", "weights")
    return {k: v for k, v in part.items() if k not in drawn} if isinstance(part, dict) else part


def _reduced(claim, there):
    """What these runs lack for any verdict, as a list."""
    histories = [h for group in there.values() for h in group]
    name, partition = histories[0].config["dataset"]["name"], histories[0].config["partition"]
    lacking = []
    if name not in SIZES:
        lacking.append(f"{name} is not known to be a real data set")
    if (seeds := min(len(group) for group in there.values())) < 3:
        lacking.append(f"{seeds} of at least 3 seeds")
    if claim.skewed and partition["name"] != "pathological" and not partition.get("beta", math.inf) <= 0.1:
        lacking.append("clients are not strongly heterogeneous (pathological, or Dirichlet with beta up to 0.1)")
    return lacking + (_unsettled(claim, histories) if claim.settled else [])


def _full(claim, there):
    """What these runs lack to reproduce the claim, or not, as a list."""
    histories = [h for group in there.values() for h in group]
    config = histories[0].config
    name, model, partition = config["dataset"]["name"], config["model"]["name"], config["partition"]
    short = []
    if (name, model) not in claim.settings:
        one = len(claim.settings) == 1
        short.append(f"{name} with {model}, the paper: {' with '.join(claim.settings[0]) if one else 'others'}")
    held = [h.clients.drop_duplicates("client")[["n_train", "n_test"]].to_numpy().sum() for h in histories]
    if min(held) < SIZES[name]:
        short.append("a part of the data")
    have = partition | config["training"] | {"partition": partition["name"], "clients": config["clients"]}
    have |= {"join_ratio": tuple(config["join_ratio"])}
    wanted = claim.paper.protocol(name, model, partition["name"])
    short += [f"{k} {have.get(k)}, the protocol: {v}" for k, v in wanted.items() if have.get(k) != v]
    if (least := partition.get("min_size", 0)) > claim.paper.min_size:
        short.append(f"min_size {least}, the protocol: at most {claim.paper.min_size}")
    for method in [n for n in there if n in METHODS]:
        own, default = there[method][0].config["settings"], asdict(METHODS[method]())
        short += [f"{method}'s {k} {own.get(k)}, its default: {v}" for k, v in default.items() if own.get(k) != v]
    if (seeds := min(len(group) for group in there.values())) < 5:
        short.append(f"{seeds} of at least 5 seeds")
    return short + _unsettled(claim, histories)


def _unsettled(claim, histories):
    left = sum(costs.rounds_to_convergence(h, PATIENCE) is None for h in histories)
    rule = f"{claim.paper.stopping}: {PATIENCE} evaluations without a new best"
    return [f"{left} of {len(histories)} runs not converged ({rule})"] if left else []


# --- the claims of FedAH, arXiv 2412.01295 ---------------------------------------------------------------------------

TINY_STAR = ("tiny-imagenet", "resnet18")
COLUMNS = (
    ("mnist", "cnn"),
    ("cifar10", "cnn"),
    ("cifar100", "cnn"),
    ("tiny-imagenet", "cnn"),
    TINY_STAR,
    ("agnews", "fasttext"),
)
PERSONAL = ("fedah", "fedala", "fedrep", "fedper", "ditto", "fedamp", "fedfomo", "pfedme", "perfedavg")
ELEVEN = (*PERSONAL, "fedavg", "fedprox")


def _fedah(name, model, scheme):
    """What FedAH (arXiv 2412.01295) fixes, as it stands in a run's configuration.

    Ours, as it says nothing of them: no momentum, decay or clipping, short batches trained on, no stratifying. Its
    generator caps the clients of a Dirichlet split and holds them to 40 samples, its text does not say so: either will
    do. Tiny-ImageNet and AG News it splits by Dir(0.1) only; and it has no rate for other models than its three.
    """
    split = {"partition": "dirichlet", "beta": 0.1}
    if scheme == "pathological" and name not in ("tiny-imagenet", "agnews"):
        split = {"partition": "pathological", "classes": 10 if name == "cifar100" else 2}
        split |= {"grouped": True, "balanced": False}
    rates = {"cnn": 0.005, "resnet18": 0.01, "fasttext": 0.01}
    rule = {k: v for k, v in asdict(Training()).items() if k != "lr"} | ({"lr": rates[model]} if model in rates else {})
    return split | {"test_share": 0.25, "stratify": False, "clients": 20, "join_ratio": (1.0, 1.0)} | rule


FEDAH = Paper(_fedah, 40, "the released code's stopping rule")


def _alike(a, b, runs):
    """`a` and `b` are close in the last round, and wherever their curves are farthest apart.

    The curves' number is the size of their largest gap over the scored rounds, without its sign, lest gaps to either
    side cancel over seeds. The largest of many gaps of chance is not 0, so this asks for more than a mean would.
    """
    if not (a in runs and b in runs):
        return []
    pairs = zip(runs[a], runs[b], strict=True)
    apart = [100 * float((x.curve() - y.curve()).abs().max()) for x, y in pairs]
    return [*_close(a, b, runs), close(f"largest gap of {a}'s and {b}'s curves", apart)]


def _close(a, b, runs):
    """Accuracies of `a` and `b` are close."""
    return [close(f"{a} − {b}", _gaps(runs[a], runs[b]))] if a in runs and b in runs else []


def _all_above(names, reference, runs):
    """Each of `names` that was run is above `reference`."""
    here = [name for name in names if name in runs and reference in runs]
    return [compare(f"{name} − {reference}", runs[name], runs[reference]) for name in here]


def _kept(name, runs):
    """The last round is close to the best one. Never below 0, and above it by luck alone: the best is picked."""
    curves = [history.curve() for history in runs.get(name, [])]
    values = [100 * (curve.max() - curve.iloc[-1]) for curve in curves]
    return [close(f"{name}: best − last", values)] if values else []


def _traffic(runs):
    """FedAH = FedAvg; FedPer and FedRep below all others; FedFomo above all others."""
    small = ("fedper", "fedrep")
    pairs = [("fedah", "fedavg", "equal 0")]
    pairs += [(name, other, "below 0") for name in small for other in runs if other not in small]
    pairs += [("fedfomo", other, "above 0") for other in runs if other not in ("fedfomo", *small)]
    return [traffic(f"{a} − {b}", runs[a], runs[b], rule) for a, b, rule in pairs if a in runs and b in runs]


# --- the claims of FedGH, arXiv 2303.13137 ----------------------------------------------------------------------------


def _fedgh(name, model, scheme):
    """What FedGH's released code fixes: FedGH_mh.py for mixed models, FedGH.py for one.

    Classes a client: its defaults. Not asked for: its 500 rounds, for the stopping rule decides, and its test images,
    the data set's own, which our splits mix in. Ours, as nothing is known of it: short batches are trained on.
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
    up, down, beyond = zip(*map(_header, runs["fedgh"]), strict=True)
    return [
        always("fedgh: up − 4 (S + S r)", up, "equal 0"),
        always("fedgh: down − 4 (r K + K)", down, "equal 0"),
        always("fedgh: down − smallest model", beyond, "below 0"),
    ]


def _header(history):
    """(up − 4 (S + S r), down − 4 (r K + K), down − the smallest model's bytes): the worst of clients and rounds."""
    rows, model = _joined(history), history.config["model"]
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
        ours, theirs = (_joined(h).set_index(["round", "client"])["flops"] for h in both)
        if not (spent := float(theirs.loc[ours.index].sum())):
            return "local trained nothing"
        values.append(epochs * (float(ours.sum()) - spent) / spent)
    return [close("fedgh: extracting representations", values, HALF, 0.5, "epochs")]


# --- the claims of FedAPA, arXiv 2502.07456 ---------------------------------------------------------------------------


def _fedapa(name, model, scheme):
    """What FedAPA's released code fixes; its text's values were not seen.

    CIFAR-100 by Dir(0.1) only: 2 classes a client leave its split empty there, so it was another number, not known. Not
    asked for: its 50 rounds, for the stopping rule decides, and its test images, the data set's own, which our splits
    mix in. Ours, as nothing is known of it: no decay or clipping, short batches trained on.
    """
    split = {"partition": "dirichlet", "beta": 0.1, "capped": False}
    if scheme == "pathological" and name != "cifar100":
        split = {"partition": "pathological", "classes": 2, "grouped": True, "balanced": False}
    rule = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": 2}
    return split | asdict(Training()) | rule | {"clients": 20, "join_ratio": (0.6, 1.0)}


FEDAPA = Paper(_fedapa, 132)  # its code redraws until each client has over 128 samples to train and over 2 to test
THREE = tuple((name, "cnn") for name in ("fashion-mnist", "cifar10", "cifar100"))  # cnn: one of its code's four models


def _both_ways(a, b, runs):
    """`a` and `b` receive equally much, and send equally much."""
    if not (a in runs and b in runs):
        return []
    return [traffic(f"{a} − {b}, {way}", runs[a], runs[b], "equal 0", [way]) for way in ("down", "up")]


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


CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(
            "AH3",
            FEDAH,
            "FedProx is close to FedAvg in accuracy and in its curve",
            ("fedprox", "fedavg"),
            partial(_alike, "fedprox", "fedavg"),
            COLUMNS,
        ),
        Claim(
            "AH6",
            FEDAH,
            "FedPer and FedRep are close to each other",
            ("fedper", "fedrep"),
            partial(_close, "fedper", "fedrep"),
            (TINY_STAR,),
        ),
        Claim(
            "AH7",
            FEDAH,
            "Personalized methods beat FedAvg's global model under strong heterogeneity",
            (*PERSONAL, "fedavg"),
            partial(_all_above, PERSONAL, "fedavg"),
            COLUMNS,
            skewed=True,
        ),
        Claim(
            "AH8",
            FEDAH,
            "FedAH keeps its accuracy after convergence",
            ("fedah",),
            partial(_kept, "fedah"),
            COLUMNS,
            settled=True,
        ),
        Claim(
            "AH12",
            FEDAH,
            "Bytes a round: FedPer and FedRep lowest, FedFomo highest, FedAH equal to FedAvg",
            ELEVEN,
            _traffic,
            parts=(
                ("FedPer and FedRep lowest", ("fedper", "fedrep")),
                ("FedFomo highest", ("fedfomo",)),
                ("FedAH equal to FedAvg", ("fedah", "fedavg")),
            ),
            exact=True,
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
            ),
        ),
        Claim(
            "PA3",
            FEDAPA,
            "Bytes a round: only the extractor both ways, as FedPer",
            ("fedapa", "fedper"),
            partial(_both_ways, "fedapa", "fedper"),
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
            "Each raw update of the weights lowers the proxy loss P, at the run's rate (true only below 2 / λmax)",
            ("fedapa",),
            _lowers,
            THREE,
        ),
    )
}
