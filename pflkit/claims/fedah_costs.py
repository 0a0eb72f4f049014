"""The claims of FedAH, arXiv 2412.01295, about what a round costs, and what convergence does.

Beside each check stands how its vague words were made checkable. These readings are ours, all of them.
"""

from itertools import pairwise

from pflkit import costs
from pflkit.claims import scale
from pflkit.claims.comparisons import NOISY, Unchecked, above, always, most, traffic
from pflkit.claims.fedah import COLUMNS, ELEVEN, FEDAH
from pflkit.claims.scale import Claim

SLOWEST = (("pfedme",), ("ditto", "perfedavg"), ("fedah",))  # then the rest


def _slow(runs):
    """Each method costs more a round than each of the next lower group of those that were run: SLOWEST, then the rest.

    In seconds, as measured, `above` 0 over seeds; in FLOPs of the clients' training, as counted, in every run.
    """
    rest = tuple(name for name in runs if name not in sum(SLOWEST, ()))
    groups = [here for group in (*SLOWEST, rest) if (here := [name for name in group if name in runs])]
    pairs = [(a, b) for higher, lower in pairwise(groups) for a in higher for b in lower]
    cost = {name: [costs.per_round(h) for h in group] for name, group in runs.items()}

    def more(what, a, b):
        return [float(x[what] - y[what]) for x, y in zip(cost[a], cost[b], strict=True)]

    found = [always(f"FLOPs: {a} − {b}", more("FLOPs", a, b), "above 0", "FLOPs") for a, b in pairs]
    where = {(h.config.get("engine"), h.config.get("device")) for group in runs.values() for h in group}
    if len(where) > 1:
        return found and [*found, Unchecked("in seconds", "the runs' engines or devices differ")]
    return found + [above(f"seconds: {a} − {b}", more("seconds", a, b), "seconds") for a, b in pairs]


def _traffic(runs):
    """FedAH = FedAvg; FedPer and FedRep below all others; FedFomo above all others."""
    small = ("fedper", "fedrep")
    pairs = [("fedah", "fedavg", "equal 0")]
    pairs += [(name, other, "below 0") for name in small for other in runs if other not in small]
    pairs += [("fedfomo", other, "above 0") for other in runs if other not in ("fedfomo", *small)]
    return [traffic(f"{a} − {b}", runs[a], runs[b], rule) for a, b, rule in pairs if a in runs and b in runs]


def _soon(runs):
    """FedAH's rounds, bytes and seconds until it has converged are fewer than those of most others that were run."""
    others = [name for name in runs if name != "fedah"]
    if "fedah" not in runs or not others:
        return []
    if why := scale.unsettled([h for group in runs.values() for h in group]):
        return why[0]
    spent = {name: [costs.to_convergence(h, scale.PATIENCE) for h in group] for name, group in runs.items()}
    found = []
    for what in ("rounds", "bytes", "seconds"):
        pairs = {name: zip(spent[name], spent["fedah"], strict=True) for name in others}
        less = [above(f"{what}: {n} − fedah", [float(a[what] - b[what]) for a, b in p], what) for n, p in pairs.items()]
        found += most(f"methods that need more {what} than fedah", less)
    return found


CLAIMS = (
    Claim(
        "AH11",
        FEDAH,
        "Time a round: pFedMe highest, then Ditto and Per-FedAvg, then FedAH, then the rest",
        ELEVEN,
        _slow,
        COLUMNS,
        parts=(("in FLOPs", ()), ("in seconds", ())),
        remark=NOISY,
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
        "AH13",
        FEDAH,
        "FedAH needs few rounds to converge, so its bytes and time in all are low",
        ELEVEN,
        _soon,
        COLUMNS,
        settled=True,
        remark=NOISY,
    ),
)
