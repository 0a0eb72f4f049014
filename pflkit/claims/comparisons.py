"""Numbers of paired runs, one a seed, and what they say: ahead, close, always, or within noise."""

import math
from dataclasses import dataclass

import pandas as pd
from scipy import stats

from pflkit import costs
from pflkit.checks import choice

MARGIN = 1.0  # points: ours


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


def differences(runs, reference):
    """A row per other method: the points that `reference` is ahead of it in the last round, with the 95 % t interval
    over seeds and what that says. Columns: at each method's own point, before, and after local training.

    runs: {label: [History, one a seed]}, seeds in one order. Raises ValueError where they cannot be paired by seed.
    """
    choice("reference", reference, runs)
    if why := mismatch(runs):
        raise ValueError(f"runs: {'; '.join(why)}")
    points = {"own": None, "before": "before", "after": "after"}
    others = [label for label in runs if label != reference]
    rows = [[_ahead(compare(o, runs[reference], runs[o], point)) for point in points.values()] for o in others]
    return pd.DataFrame(rows, others, list(points)).rename_axis(f"{reference} against")


def _ahead(c):
    word = {True: "ahead", False: "behind", None: "within noise"}[c.holds]
    return f"{c.mean:+.1f} [{c.low:.1f}, {c.high:.1f}] {word}"


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
    return above(what, gaps(ours, theirs, point))


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


def gaps(ours, theirs, point=None):
    """Accuracies of the last round, paired: ours − theirs, in points."""
    pairs = zip(ours, theirs, strict=True)
    return [100 * (a.curve(point).iloc[-1] - b.curve(point).iloc[-1]) for a, b in pairs]


def _bytes(history, ways):
    cost = costs.per_round(history)
    return sum(cost[f"bytes {way} / client"] for way in ways)


def joined(history):
    """The rows of a History's clients where they joined the round."""
    return history.clients[history.clients["joined"].astype(bool)]


DESIGN = ("dataset", "clients", "training", "join_ratio", "rounds", "eval_every", "dtype", "partition", "model")


def mismatch(runs):
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
