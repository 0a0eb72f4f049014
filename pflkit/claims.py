"""The papers' claims as checks on results: measured runs in, a verdict and the numbers behind it out.

    check("AH7", {"fedavg": [History, one a seed], "fedper": [...], ...}) -> Verdict

    reproduced / not reproduced        the claim's own data set, model, split and protocol, full data, at least 5 seeds,
                                       and every run converged by the paper's stopping rule
    agrees / disagrees at reduced scale  a real data set and at least 3 seeds
    not tested                         anything less, and every tie within noise

Three rules decide what a comparison says. Its values are differences of runs that share seed, split and initial model,
in percentage points, and its interval is the 95 % t interval of their mean over seeds.

    above   a − b:  holds if the interval lies above 0, is contradicted if it lies below; else it is within noise
    close   a − b:  holds if the interval lies within ± margin, is contradicted if it lies wholly outside; else open
    bytes           an identity of the ledger: must be exact in every run, so neither scale nor seeds matter

An interval that contains 0 does not show that two methods are close: few seeds make it wide. So `close` asks for a
narrow one. Its margin of 1 point is ours; a 95 % interval is stricter than the usual test of equivalence, which takes
90 %. A claim of several comparisons holds if all do, and is contradicted if one is; with many of them the latter
happens by chance more often than 2.5 % of the time, so read the numbers.

A claim is checked with those of its methods that were run. The verdict then says how many of them there were, and
speaks of no others. Accuracy is a History's one number: mean over clients, last round, at the method's own point.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pandas as pd
from scipy import stats

from pflkit import costs
from pflkit.checks import choice, integer, real

PATIENCE = 100  # evaluations without a new best, the stopping rule of the FedAH paper's code
MARGIN = 1.0  # points: ours
SIZES = {  # samples of the real data sets, training and test together
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
class Claim:
    """What a paper says, and what it takes to reproduce it.

    methods: all it speaks of. compare(runs, margin): the comparisons that the runs there are allow. settings: the
    (data set, model) pairs of the paper. parts: where it says several things, each as (text, methods it takes). Claims
    about strong heterogeneity are `skewed`, about what follows convergence `settled`, about the ledger `exact`.
    """

    id: str
    paper: str
    text: str
    methods: tuple
    compare: Callable
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


def check(claim_id, runs, patience=PATIENCE, margin=MARGIN):
    """The Verdict on a claim of CLAIMS by `runs`: {method: [History, one a seed]}, seeds in one order for all methods.

    patience: evaluations without a new best after which a run counts as converged; below the paper's 100 nothing is
    reproduced. margin: points within which accuracies are close. Methods that the claim does not name are ignored.
    Raises ValueError for an unknown claim and for runs under another method's name.
    """
    claim = CLAIMS[choice("claim_id", claim_id, CLAIMS)]
    integer("patience", patience, 1)
    real("margin", margin, above=0)
    there = {name: list(runs[name]) for name in claim.methods if runs.get(name)}
    for name, histories in there.items():
        for history in histories:
            if history.config["method"] != name:
                raise ValueError(f"runs[{name!r}]: holds a run of {history.config['method']!r}")
    mismatch = _mismatch(there)
    numbers = () if mismatch else tuple(claim.compare(there, margin))
    if not mismatch and not numbers:
        mismatch = ["too few of its methods"]
    lacking = mismatch or ([] if claim.exact else _reduced(claim, there, patience))
    short = [] if claim.exact or lacking else _full(claim, there, patience)
    verdict, why = _decide(numbers, lacking, short)
    unchecked = [text for text, needs in claim.parts if not there.keys() >= set(needs)]
    missing = [name for name in claim.methods if name not in there]
    why += [f"not checked: {text}" for text in unchecked] + ([f"without {', '.join(missing)}"] if missing else [])
    coverage = [f"{len(claim.parts) - len(unchecked)} of {len(claim.parts)} parts"] if unchecked else []
    coverage += [f"{len(there)} of {len(claim.methods)} methods"] if missing else []
    return Verdict(claim.id, claim.text, verdict, "; ".join(why), ", ".join(coverage), numbers)


def table(verdicts):
    """A row per verdict: the claim, the verdict with its coverage, and why it is no better (or what it rests on)."""
    rows = [{"id": v.id, "claim": v.text, "verdict": str(v), "why": v.why} for v in verdicts]
    return pd.DataFrame(rows, columns=["id", "claim", "verdict", "why"]).set_index("id")


def numbers(verdicts):
    """A row per comparison behind `verdicts`: its mean over seeds, 95 % interval and rule, and whether that is met."""
    rows = [{"id": v.id, **_row(c), "met": _word(c.holds)} for v in verdicts for c in v.numbers]
    columns = ["id", "comparison", "unit", "seeds", "mean", "low", "high", "rule", "met"]
    return pd.DataFrame(rows, columns=columns).set_index("id")


def differences(runs, reference):
    """A row per other method: the points that `reference` is ahead of it in the last round, with the 95 % t interval
    over seeds and what that says. Columns: at each method's own point, before, and after local training.

    runs: {name: [History, one a seed]}, seeds in one order.
    """
    points = {"own": None, "before": "before", "after": "after"}
    others = [name for name in runs if name != reference]
    rows = [[_gap(compare(n, runs[reference], runs[n], point)) for point in points.values()] for n in others]
    return pd.DataFrame(rows, others, list(points)).rename_axis(f"{reference} against")


def _gap(c):
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
    return above(what, [100 * (_last(a, point) - _last(b, point)) for a, b in zip(ours, theirs, strict=True)])


def above(what, values):
    """Holds if the interval of `values` lies above 0, is contradicted if it lies below."""
    mean, low, high = interval(values)
    holds = True if low > 0 else False if high < 0 else None
    return Comparison(what, "points", "above 0", tuple(values), mean, low, high, holds)


def close(what, values, margin):
    """Holds if the interval of `values` lies within ± `margin`, is contradicted if it lies wholly outside."""
    mean, low, high = interval(values)
    outside = low > margin or high < -margin
    holds = True if -margin < low and high < margin else False if outside else None
    return Comparison(what, "points", f"within ±{margin:g}", tuple(values), mean, low, high, holds)


def traffic(what, ours, theirs, rule):
    """Bytes a client sends and receives a round, ours − theirs: "below 0", "equal 0" or "above 0" in every run."""
    values = [_bytes(a) - _bytes(b) for a, b in zip(ours, theirs, strict=True)]
    fits = {"below 0": lambda v: v < 0, "equal 0": lambda v: v == 0, "above 0": lambda v: v > 0}[rule]
    mean = sum(values) / len(values)
    return Comparison(what, "bytes", rule, tuple(values), mean, min(values), max(values), all(map(fits, values)))


def _last(history, point):
    return history.curve(point).iloc[-1]


def _bytes(history):
    cost = costs.per_round(history)
    return cost["bytes down / client"] + cost["bytes up / client"]


# --- preconditions ---------------------------------------------------------------------------------------------------


def _decide(numbers, lacking, short):
    """(verdict, why) of comparisons, what is lacking for any verdict, and what is short of the full scale."""
    if lacking:
        return "not tested", lacking
    against = [c.what for c in numbers if c.holds is False]
    undecided = [_tie(c) for c in numbers if c.holds is None]
    if undecided and not against:
        return "not tested", undecided
    why = [f"contradicted by {', '.join(against)}"] if against else []
    if short:
        return f"{'disagrees' if against else 'agrees'} at reduced scale", why + short
    return "not reproduced" if against else "reproduced", why


def _tie(c):
    """Why the comparison `c` is open."""
    noise = "within noise" if c.low <= 0 <= c.high else "not 0"
    return f"{noise}: {c.what}" if c.rule == "above 0" else f"{noise}, but not shown to be {c.rule}: {c.what}"


def _mismatch(there):
    """Why these runs cannot be compared seed by seed, as a list; empty if they can."""
    if not there:
        return ["none of its methods was run"]
    configs = {name: [h.config for h in histories] for name, histories in there.items()}
    first = next(iter(configs))
    seeds = [config["seed"] for config in configs[first]]
    if len(set(seeds)) < len(seeds):
        return [f"a seed occurs twice: {', '.join(map(str, seeds))}"]
    for name, own in configs.items():
        if [config["seed"] for config in own] != seeds:
            return [f"{name} and {first} were not run on the same seeds"]
        for config, other in zip(own, configs[first], strict=True):
            differ = [key for key in DESIGN if config[key] != other[key]]
            differ += [key for key in DESIGN if _undrawn(config[key]) != _undrawn(configs[first][0][key])]
            if differ:
                return [f"the runs differ in more than method and seed: {', '.join(dict.fromkeys(differ))}"]
        if any(config["settings"] != own[0]["settings"] for config in own):
            return [f"{name} was run with different settings"]
    return []


DESIGN = ("dataset", "clients", "training", "join_ratio", "rounds", "eval_every", "dtype", "partition", "model")


def _undrawn(part):
    """Part of a configuration without what depends on the seed."""
    drawn = ("seed", "redraws", "moved", "fingerprint", "weights")
    return {k: v for k, v in part.items() if k not in drawn} if isinstance(part, dict) else part


def _reduced(claim, there, patience):
    """What these runs lack for any verdict, as a list."""
    histories = [h for group in there.values() for h in group]
    config = histories[0].config
    seeds = min(len(group) for group in there.values())
    lacking = []
    if config["dataset"]["name"] not in SIZES:
        lacking.append(f"{config['dataset']['name']} is not known to be a real data set")
    if seeds < 3:
        lacking.append(f"{seeds} of at least 3 seeds")
    if claim.skewed and not _skewed(config["partition"]):
        lacking.append("clients are not strongly heterogeneous (pathological, or Dirichlet with beta up to 0.1)")
    if claim.settled:
        lacking += _unsettled(histories, patience)
    return lacking


def _full(claim, there, patience):
    """What these runs lack to reproduce the claim, or not, as a list."""
    histories = [h for group in there.values() for h in group]
    config, held = histories[0].config, histories[0].clients.drop_duplicates("client")
    name, model = config["dataset"]["name"], config["model"]["name"]
    short = []
    if (name, model) not in claim.settings:
        one = len(claim.settings) == 1
        short.append(f"{name} with {model}, the paper: {' with '.join(claim.settings[0]) if one else 'others'}")
    if config["partition"].get("beta") != 0.1 and not config["partition"].get("grouped"):
        short.append("another partition than the paper's")
    if held[["n_train", "n_test"]].to_numpy().sum() < SIZES[name]:
        short.append("a part of the data")
    protocol = {"clients": config["clients"], "join ratio": tuple(config["join_ratio"])}
    protocol |= {"batch size": config["training"]["batch_size"], "epochs": config["training"]["epochs"]}
    papers = PROTOCOLS[claim.paper]
    short += [f"{key} {protocol[key]}, the paper: {value}" for key, value in papers.items() if protocol[key] != value]
    if (seeds := min(len(group) for group in there.values())) < 5:
        short.append(f"{seeds} of at least 5 seeds")
    if patience < PATIENCE:
        short.append(f"stopping rule of {patience} evaluations, the paper: {PATIENCE}")
    return short + _unsettled(histories, patience)


def _unsettled(histories, patience):
    left = sum(costs.rounds_to_convergence(h, patience) is None for h in histories)
    rule = f"no {patience} evaluations without a new best"
    return [f"{left} of {len(histories)} runs not converged ({rule})"] if left else []


def _skewed(partition):
    return partition["name"] == "pathological" or (partition["name"] == "dirichlet" and partition["beta"] <= 0.1)


def _row(c):
    digits = 0 if c.unit == "bytes" else 2
    ends = {key: round(getattr(c, key), digits) for key in ("mean", "low", "high")}
    return {"comparison": c.what, "unit": c.unit, "seeds": len(c.values), **ends, "rule": c.rule}


def _word(holds):
    return {True: "yes", False: "no", None: "open"}[holds]


# --- the claims of FedAH, arXiv 2412.01295 ---------------------------------------------------------------------------

PROTOCOLS = {"FedAH": {"clients": 20, "join ratio": (1.0, 1.0), "batch size": 10, "epochs": 1}}
TINY_STAR = ("tiny-imagenet", "resnet18")
COLUMNS = (*((name, "cnn") for name in ("mnist", "cifar10", "cifar100", "tiny-imagenet")), TINY_STAR)
COLUMNS = (*COLUMNS, ("agnews", "fasttext"))
PERSONAL = ("fedah", "fedala", "fedrep", "fedper", "ditto", "fedamp", "fedfomo", "pfedme", "perfedavg")
ELEVEN = (*PERSONAL, "fedavg", "fedprox")


def _close(a, b, runs, margin):
    """Accuracies of `a` and `b` are close."""
    if a not in runs or b not in runs:
        return []
    gaps = [100 * (_last(x, None) - _last(y, None)) for x, y in zip(runs[a], runs[b], strict=True)]
    return [close(f"{a} − {b}", gaps, margin)]


def _all_above(names, reference, runs, margin):
    """Each of `names` that was run is above `reference`."""
    here = [name for name in names if name in runs and reference in runs]
    return [compare(f"{name} − {reference}", runs[name], runs[reference]) for name in here]


def _kept(name, runs, margin):
    """The last round is close to the best one. Never below 0, and above it by luck alone: the best is picked."""
    curves = [history.curve() for history in runs.get(name, [])]
    values = [100 * (curve.max() - curve.iloc[-1]) for curve in curves]
    return [close(f"{name}: best − last", values, margin)] if values else []


def _traffic(runs, margin):
    """FedAH = FedAvg; FedPer and FedRep below all others; FedFomo above all others."""
    small = ("fedper", "fedrep")
    pairs = [("fedah", "fedavg", "equal 0")]
    pairs += [(name, other, "below 0") for name in small for other in runs if other not in small]
    pairs += [("fedfomo", other, "above 0") for other in runs if other not in ("fedfomo", *small)]
    return [traffic(f"{a} − {b}", runs[a], runs[b], rule) for a, b, rule in pairs if a in runs and b in runs]


CLAIMS = {
    claim.id: claim
    for claim in (
        Claim(
            "AH6",
            "FedAH",
            "FedPer and FedRep are close to each other",
            ("fedper", "fedrep"),
            partial(_close, "fedper", "fedrep"),
            (TINY_STAR,),
        ),
        Claim(
            "AH7",
            "FedAH",
            "Personalized methods beat FedAvg's global model under strong heterogeneity",
            (*PERSONAL, "fedavg"),
            partial(_all_above, PERSONAL, "fedavg"),
            COLUMNS,
            skewed=True,
        ),
        Claim(
            "AH8",
            "FedAH",
            "FedAH keeps its accuracy after convergence",
            ("fedah",),
            partial(_kept, "fedah"),
            COLUMNS,
            settled=True,
        ),
        Claim(
            "AH12",
            "FedAH",
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
    )
}
