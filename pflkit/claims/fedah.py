"""The claims of FedAH, arXiv 2412.01295."""

from dataclasses import asdict
from functools import partial

from pflkit.claims.comparisons import close, compare, gaps, traffic
from pflkit.claims.scale import Claim, Paper
from pflkit.training import Training

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


FEDAH = Paper(_fedah, 40)


def _pulled(runs):
    """FedProx is close to FedAvg in the last round, and wherever their curves are farthest apart.

    The verdict rests on FedProx's mu, which what we read of the paper does not name: it stands beside the numbers.

    The curves' number is the size of their largest gap over the scored rounds, without its sign, lest gaps to either
    side cancel over seeds. The largest of many gaps of chance is not 0, so this asks for more than a mean would.
    """
    if not ("fedprox" in runs and "fedavg" in runs):
        return []
    prox, avg = runs["fedprox"], runs["fedavg"]
    mu = f" (mu {prox[0].config['settings']['mu']:g}, ours)"
    apart = [100 * float((a.curve() - b.curve()).abs().max()) for a, b in zip(prox, avg, strict=True)]
    last = close(f"fedprox − fedavg{mu}", gaps(prox, avg))
    return [last, close(f"largest gap of fedprox's and fedavg's curves{mu}", apart)]


def _close(a, b, runs):
    """Accuracies of `a` and `b` are close."""
    return [close(f"{a} − {b}", gaps(runs[a], runs[b]))] if a in runs and b in runs else []


def _all_above(names, reference, runs):
    """Each of `names` that was run is above `reference`."""
    here = [name for name in names if name in runs and reference in runs]
    return [compare(f"{name} − {reference}", runs[name], runs[reference]) for name in here]


def _kept(name, runs):
    """The last round is close to the best one: within ±MARGIN, ours, for "within noise".

    Never below 0, and above it by luck alone: the best is picked.
    """
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


CLAIMS = (
    Claim(
        "AH3",
        FEDAH,
        "FedProx is close to FedAvg in accuracy and in its curve",
        ("fedprox", "fedavg"),
        _pulled,
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
)
