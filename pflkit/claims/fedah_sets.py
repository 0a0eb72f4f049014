"""The claims of FedAH, arXiv 2412.01295, that compare sets of runs, each of another value of one key.

Beside each check stands how its vague words were made checkable. These readings are ours, all of them; "most" is more
than half of the methods that were run in every set. Accuracies of different sets are subtracted seed by seed, although
beta, clients or data that differ make another split.
"""

from dataclasses import replace
from functools import partial

from pflkit.claims.comparisons import Unchecked, above, ahead, close, compare, first, gaps, most, spread
from pflkit.claims.fedah import COLUMNS, ELEVEN, FEDAH, PERSONAL, TINY_STAR
from pflkit.claims.scale import NUMBERS, Claim

CNN100 = ("cifar100", "cnn")
TINY = ("tiny-imagenet", "cnn")
LARGE = (CNN100, TINY, TINY_STAR)  # "the larger data sets and model"; its other columns are the small ones
ALL, SOME = (1.0, 1.0), (0.1, 1.0)  # join ratios: all, and drawn anew each round
LOST = {"pfedme": 6.65, "ditto": 2.26}  # the paper's, from ALL to SOME
ONLY = "only FedALA and FedAH above FedAvg on TINY at beta 0.5"


def _falls(methods, before, after, text):
    """A comparison a method: that its accuracy in the set `before` is above that in `after`."""
    return [compare(f"{name}, {text}", before[name], after[name]) for name in methods if name in before]


def _by_beta(sets):
    """Most personalized methods lose accuracy from the smallest beta to the largest, 0.1 and 0.5 being among them.

    Only FedALA and FedAH are above FedAvg: these two are above it, and it is above every other personalized method.
    """
    if absent := [f"{beta:g}" for beta in (0.1, 0.5) if beta not in sets]:
        return f"no runs with beta {' and '.join(absent)}"
    (low, before), *_, (high, after) = sets.items()
    text = f"beta {low:g} − {high:g}"
    found = most(f"personalized methods that lose, {text}", _falls(PERSONAL, before, after, text))
    at = sets[0.5]
    one = next(iter(at.values()))[0].config
    if (one["dataset"]["name"], one["model"]["name"]) != TINY:
        return [*found, Unchecked(ONLY, "these are other data or another model")]
    others = [("fedavg", name) for name in PERSONAL if name not in ("fedah", "fedala")]
    return found + ahead([("fedah", "fedavg"), ("fedala", "fedavg"), *others], at, "beta 0.5: ")


def _at_each(reference, values, noun, sets):
    """At each of `values` most methods have lost accuracy, from that at `reference`; and FedAH is above all others."""
    if reference not in sets:
        return f"no runs with {reference} {noun}"
    found = []
    for value in values:
        if value not in sets:
            found.append(Unchecked(f"{value} {noun}", "no such runs"))
            continue
        text = f"{reference} − {value} {noun}"
        found += most(f"methods that lose, {text}", _falls(ELEVEN, sets[reference], sets[value], text))
        found += first("fedah", sets[value], f"{value} {noun}: ")
    return found


def _by_join_ratio(sets):
    """From everybody joining to [0.1, 1] pFedMe and Ditto lose accuracy, at full scale the paper's points ± MARGIN; the
    standard deviation over seeds is above 1 point for three methods, and for FedAH, who is "steady", below 1; and FedAH
    is above every other method.

    The deviation is that of the differences, of runs that share a split: that of the accuracies would be mostly the
    splits', which ours draw anew for each seed. An accuracy of the last round is of the clients that joined it.
    """
    if absent := [ratio for ratio in (ALL, SOME) if ratio not in sets]:
        return f"no runs with join ratio {' and '.join(map(str, absent))}"
    lost = {name: gaps(sets[ALL][name], group) for name, group in sets[SOME].items()}
    found = [above(f"{name}, join ratio 1 − [0.1, 1]", lost[name]) for name in LOST if name in lost]
    numbers = [(f"{name}, join ratio 1 − [0.1, 1]", lost[name], to) for name, to in LOST.items() if name in lost]
    found += [replace(close(what, values, to=to), full=True) for what, values, to in numbers]
    rules = {"perfedavg": "above", "pfedme": "above", "ditto": "above", "fedah": "below"}
    found += [spread(f"{n}: standard deviation", lost[n], rule, 1.0) for n, rule in rules.items() if n in lost]
    return found + first("fedah", sets[SOME], "join ratio [0.1, 1]: ")


def _by_data(sets):
    """On every large column FedAH's gain is above that on every small one.

    Its gain is what it is ahead of the best other method (by the mean over seeds) of those that were run in every set.
    """
    if any("fedah" not in runs or len(runs) < 2 for runs in sets.values()):
        return []
    gains = {column: _gain(runs) for column, runs in sets.items() if column in COLUMNS}
    pairs = [(a, b) for a in gains if a in LARGE for b in gains if b not in LARGE]
    if not pairs:
        return "it takes a large and a small data set or model of its tables"
    name = {column: f"{' '.join(column)} (over {best})" for column, (best, _) in gains.items()}
    values = {column: value for column, (_, value) in gains.items()}
    return [
        above(f"gain on {name[a]} − on {name[b]}", [x - y for x, y in zip(values[a], values[b], strict=True)])
        for a, b in pairs
    ]


def _gain(runs):
    """(the best other method, the points that FedAH is ahead of it, one a seed)."""
    ahead_of = {name: gaps(runs["fedah"], group) for name, group in runs.items() if name != "fedah"}
    return min(ahead_of.items(), key=lambda pair: sum(pair[1]))


CLAIMS = (
    Claim(
        "AH9",
        FEDAH,
        "Most personalized methods lose accuracy as beta grows; on TINY at 0.5 only FedALA and FedAH are above FedAvg",
        (*PERSONAL, "fedavg"),
        _by_beta,
        (TINY, ("agnews", "fasttext")),
        parts=(("most lose", ()), (ONLY, ("fedah", "fedala", "fedavg"))),
        varies=("beta",),
    ),
    Claim(
        "AH10",
        FEDAH,
        "With 100 and 200 clients on Cifar100 most methods lose accuracy, FedAH stays first",
        ELEVEN,
        partial(_at_each, 20, (100, 200), "clients"),
        (CNN100,),
        parts=(("100 clients", ()), ("200 clients", ()), ("FedAH first", ("fedah",))),
        varies=("clients", "min_size"),  # of a part of the data many clients can be sure of few samples each
    ),
    Claim(
        "AH14",
        FEDAH,
        "With a join ratio drawn from [0.1, 1] on Cifar100 pFedMe loses 6.65 points and Ditto 2.26; they and "
        "Per-FedAvg have a standard deviation above 1; FedAH stays first and steady",
        ELEVEN,
        _by_join_ratio,
        (CNN100,),
        parts=(
            ("pFedMe and Ditto lose", ("pfedme", "ditto")),
            (NUMBERS, ("pfedme", "ditto")),
            ("standard deviations", ("pfedme", "ditto", "perfedavg")),
            ("FedAH first and steady", ("fedah",)),
        ),
        varies=("join_ratio",),
    ),
    Claim(
        "AH15",
        FEDAH,
        "More local epochs (5, 10, 20, 40) lower the accuracy of most methods, FedAH stays first",
        ELEVEN,
        partial(_at_each, 1, (5, 10, 20, 40), "epochs"),
        (("cifar10", "cnn"),),
        parts=(*((f"{epochs} epochs", ()) for epochs in (5, 10, 20, 40)), ("FedAH first", ("fedah",))),
        varies=("epochs", "rounds"),
        remark="sets of more epochs may have had fewer rounds, as in the released script",
    ),
    Claim(
        "AH17",
        FEDAH,
        "FedAH's gain is largest on the larger data sets and model (Cifar100, TINY, ResNet-18)",
        ELEVEN,
        _by_data,
        COLUMNS,
        varies=("dataset", "model", "lr", "classes", "min_size"),  # what follows from the data set and model
    ),
)
