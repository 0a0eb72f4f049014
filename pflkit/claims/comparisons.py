"""Numbers of paired runs, one a seed, and what they say: ahead, close, always, or within noise."""

import math
import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd
from scipy import stats

from pflkit import costs
from pflkit.checks import choice

MARGIN = 1.0  # points: ours
NOISY = "seconds of runs that shared their machine, as runs made several at a time do, are noisy"


@dataclass(frozen=True)
class Comparison:
    """One number a seed, the 95 % t interval of their mean, and what that says: holds is True, False or None (open).

    counted: decides nothing itself, but counts towards another one. full: decides at full scale, left out below it.
    """

    what: str
    unit: str
    rule: str
    values: tuple
    mean: float
    low: float
    high: float
    holds: bool | None
    counted: bool = False
    full: bool = False


class Unchecked(NamedTuple):
    """A part of a claim that these runs cannot check, and why."""

    part: str
    why: str


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


def above(what, values, unit="points", than=0):
    """Holds if the interval of `values` lies above `than`, is contradicted if it lies below."""
    mean, low, high = interval(values)
    holds = True if low > than else False if high < than else None
    return Comparison(what, unit, f"above {than:g}", tuple(values), mean, low, high, holds)


def ahead(pairs, runs, text="", point=None):
    """ "above" for each pair (a, b) of methods that both were run: a − b, by default each at its own point."""
    here = [(a, b) for a, b in pairs if a in runs and b in runs]
    return [compare(f"{text}{a} − {b}", runs[a], runs[b], point) for a, b in here]


def first(name, runs, text="", point=None):
    """`name` is above every other method that was run."""
    return ahead([(name, other) for other in runs if other != name], runs, text, point)


def count(what, comparisons, least, unit="methods"):
    """At least so many of `comparisons`, all of them "above 0", hold; each is decided by its own interval.

    Holds if so many do, is contradicted if too few would even if all that are open did, else is open. low: how many
    hold; high: how many may; a run's value: in how many of them it is above 0. They follow, counted. A list among them
    counts as one, which holds if all in it do and is contradicted if one is.
    """
    if not comparisons:
        return []
    ones = [one if isinstance(one, list) else [one] for one in comparisons]
    low = sum(all(c.holds is True for c in one) for one in ones)
    high = sum(all(c.holds is not False for c in one) for one in ones)
    up = [[all(v > 0 for v in seed) for seed in zip(*(c.values for c in one), strict=True)] for one in ones]
    values = tuple(map(sum, zip(*up, strict=True)))
    holds = True if low >= least else False if high < least else None
    rule, mean = f"at least {least} of {len(ones)}", sum(values) / len(values)
    whole = Comparison(what, unit, rule, values, mean, low, high, holds)
    return [whole, *(replace(c, counted=True) for one in ones for c in one)]


def most(what, comparisons, unit="methods"):
    """More than half of `comparisons` hold."""
    return count(what, comparisons, len(comparisons) // 2 + 1, unit)


def spread(what, values, rule, than):
    """The standard deviation of `values` is "above" or "below" `than`, as `rule` says: by its 95 % χ² interval."""
    n, (deviation, low, high) = len(values), (math.nan, 0.0, math.inf)
    if n > 1:
        deviation = statistics.stdev(values)
        low, high = (deviation * math.sqrt((n - 1) / float(stats.chi2.ppf(q, n - 1))) for q in (0.975, 0.025))
    over = True if low > than else False if high < than else None
    holds = None if over is None else over is (rule == "above")
    return Comparison(what, "points", f"{rule} {than:g}", tuple(values), deviation, low, high, holds)


def close(what, values, margin=MARGIN, to=0.0, unit="points"):
    """Holds if the interval of `values` lies within `to` ± `margin`, is contradicted if it lies wholly outside."""
    mean, low, high = interval(values)
    outside = low > to + margin or high < to - margin
    holds = True if to - margin < low and high < to + margin else False if outside else None
    rule = f"within {f'{to:g} ' if to else ''}±{margin:g}"
    return Comparison(what, unit, rule, tuple(values), mean, low, high, holds)


def kept(name, runs):
    """The last round is close to the best one: within ±MARGIN, ours, for "within noise".

    Never below 0, and above it by luck alone: the best is picked.
    """
    return [close(f"{name}: best − last", lost(name, runs))] if name in runs else []


def lost(name, runs):
    """Points by which the last round is below the best one."""
    curves = [history.curve() for history in runs[name]]
    return [100 * (curve.max() - curve.iloc[-1]) for curve in curves]


def always(what, values, rule, unit="bytes"):
    """Holds if all `values` are "below 0", "equal 0" or "above 0", as `rule` says; else is contradicted."""
    fits = {"below 0": lambda v: v < 0, "equal 0": lambda v: v == 0, "above 0": lambda v: v > 0}[rule]
    mean = sum(values) / len(values)
    return Comparison(what, unit, rule, tuple(values), mean, min(values), max(values), all(map(fits, values)))


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


def mismatch_of_sets(sets, varies):
    """Why sets {name: runs}, of the same methods, cannot be compared, as a list; empty if they can.

    They must differ in what `varies` names, as Claim.varies does, and nothing else, and each in the first of them.
    """
    if lacking := [f"{name}: {why}" for name, runs in sets.items() for why in mismatch(runs)]:
        return lacking
    (first, own), *others = sets.items()
    seeds = [h.config["seed"] for h in next(iter(own.values()))]
    for name, runs in others:
        if [h.config["seed"] for h in next(iter(runs.values()))] != seeds:
            return [f"{name} and {first} were not run on the same seeds"]
        for method in own:
            a, b = (group[method][0].config for group in (runs, own))
            differ = [k for k, v in fixed(a, varies).items() if v != fixed(b, varies)[k]]
            if differ:
                return [f"{name} and {first} differ in more than {' and '.join(varies)}: {', '.join(differ)}"]
            if settings_of(a, varies) != settings_of(b, varies):
                return [f"{method} has other settings in {name} than in {first}"]
    return []


def fixed(config, varies=()):
    """The design in a configuration, without what depends on the seed and without the keys `varies`."""
    return {k: _undrawn(config[k], varies) for k in DESIGN if k not in varies}


def settings_of(config, varies=()):
    """The method's settings in a configuration, as {"method setting": value}, without those in `varies`."""
    named = {f"{config['method']} {key}": value for key, value in config["settings"].items()}
    return {k: v for k, v in named.items() if k not in varies}


def _undrawn(part, more=()):
    """Part of a configuration without what depends on the seed, and without `more`."""
    left_out = ("seed", "redraws", "moved", "fingerprint", "weights", *more)
    return {k: v for k, v in part.items() if k not in left_out} if isinstance(part, dict) else part
