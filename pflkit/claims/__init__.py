"""The papers' claims as checks on results: measured runs in, a verdict and the numbers behind it out.

    check("AH7", {"fedavg": [History, one a seed], "fedper": [...], ...}) -> Verdict
    check("AH9", {"a set's name": {"fedavg": [...], ...}, "another's": {...}}) -> Verdict    it compares sets

    reproduced / not reproduced        the claim's own data set and model, full data, the split and protocol of the
                                       paper or of its released code, every method's settings at their defaults, at
                                       least 5 seeds, and every run converged by the stopping rule of FedAH's released
                                       code (what we read of the papers names none)
    agrees / disagrees at reduced scale  a real data set and at least 3 seeds
    not tested                         anything less, and every tie within noise

These rules decide what a comparison says. Its values, one a seed, are mostly differences of runs that share seed, split
and initial model, in percentage points, and its interval is the 95 % t interval of their mean over seeds. Runs of
different sets share the seed's number and mostly not the split: pairing them makes no interval too narrow.

    above   a − b:  holds if the interval lies above 0, is contradicted if it lies below; else it is within noise
    close   a − b:  holds if the interval lies within ± MARGIN, is contradicted if it lies wholly outside; else open.
                    Where it is no difference in points, within a margin of its own of what is claimed
    always          must hold in every run. An identity of the ledger is exact: neither scale nor seeds matter
    most            "most methods" are more than half of those that were run, each decided by `above`. Holds if so many
                    hold; is contradicted if too few would even if all within noise did; else open. So are PA1's "most
                    scenarios", each of which holds if FedAPA is above all others there
    spread          AH14 alone: a standard deviation over seeds is above or below a bound if its 95 % χ² interval is
    none            GH4 alone: no run of FML has converged; contradicted if all have and keep their best; else open
    at most, below  PA6 alone. In every run, over all its updates, the largest change must be at most a bound of
                    rounding, else the claim is contradicted; and the smallest must be below minus it, else open

An interval that contains 0 does not show that two methods are close: few seeds make it wide. So `close` asks for a
narrow one. Its margin of 1 point is ours; a 95 % interval is stricter than the usual test of equivalence, which takes
90 %. A claim of several comparisons holds if all do, and is contradicted if one is; with many of them the latter
happens by chance more often than 2.5 % of the time, so read the numbers.

A claim about a method's variants knows them by labels as `evidence.label` makes them, such as "fedapa share=model".
A claim is checked with those of its methods that were run (in every set, where it compares sets), on the seeds that all
of these have, in those of its parts that the runs can check. The verdict then says how many of them there were, and
speaks of no others. A paper's absolute numbers are compared at full scale only, each by `close`; below it only the
signs count. Accuracy is a History's one number: mean over clients, last round, at the method's own point, but for
FedGH's claims (the papers report the best round on test data, which flatters).
"""

from dataclasses import dataclass

import pandas as pd

from pflkit import evidence
from pflkit.checks import choice
from pflkit.claims import fedah, fedah_costs, fedah_sets, fedapa, fedgh
from pflkit.claims.comparisons import Unchecked, compare, differences, mismatch, mismatch_of_sets
from pflkit.claims.fedapa import label_similarity
from pflkit.claims.scale import NUMBERS, falls_short, lacks, named, varied

__all__ = ["CLAIMS", "Verdict", "check", "compare", "differences", "label_similarity", "numbers", "table"]

_FEDAH = sorted((*fedah.CLAIMS, *fedah_costs.CLAIMS, *fedah_sets.CLAIMS), key=lambda claim: int(claim.id[2:]))
CLAIMS = {claim.id: claim for claim in (*_FEDAH, *fedgh.CLAIMS, *fedapa.CLAIMS)}


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

    For a claim that compares sets (it `varies` a key of the configuration, or a method's setting): {any name: such
    runs}, a set for a value.

    A seed that one of the methods, or of the sets, lacks is left out of all.
    Methods that the claim does not name are ignored. Raises ValueError for an unknown claim and for runs under another
    method's name, or under a label whose settings they do not have.
    """
    claim = CLAIMS[choice("claim_id", claim_id, CLAIMS)]
    sets, without = _sets(claim, runs)
    sets, seeds = _on_shared_seeds(sets)
    there = {name for runs in sets.values() for name in runs}
    none = f"none of its methods was run{' in every set' if claim.varies else ''}"
    lacking = _lacking(claim, sets) if there else [none]
    found = () if lacking else _measured(claim, sets) or "too few of its methods"
    found, lacking = ((), [found]) if isinstance(found, str) else (found, lacking)
    unchecked = {c.part: f" ({c.why})" for c in found if isinstance(c, Unchecked)}
    comparisons = tuple(c for c in found if not isinstance(c, Unchecked))
    lacking = lacking or ([] if claim.exact else _asked(lacks, claim, sets))
    short = [] if claim.exact or lacking else _asked(falls_short, claim, sets)
    if (short or lacking) and any(c.full for c in comparisons):
        comparisons = tuple(c for c in comparisons if not c.full)
        unchecked[NUMBERS] = " (compared at full scale only)"
    unchecked |= {text: "" for text, needs in claim.parts if needs is None or not there >= set(needs)}
    verdict, why = _decide(comparisons, lacking, short)
    missing = [name for name in claim.methods if name not in there]
    why += [f"not checked: {part}{reason}" for part, reason in unchecked.items()]
    why += [f"without {', '.join(missing)}"] if missing else []
    why += [f"left out, of no {claim.varies[0]}: {', '.join(without)}"] if without else []
    why += [seeds] if seeds else []
    why += [claim.remark] if claim.remark and comparisons else []
    why += [ours for name, ours in fedah.OURS.items() if name in there and comparisons and not claim.exact]
    coverage = [f"{len(claim.parts) - len(unchecked)} of {len(claim.parts)} parts"] if unchecked else []
    coverage += [f"{len(there)} of {len(claim.methods)} {claim.kind}"] if missing else []
    return Verdict(claim.id, claim.text, verdict, "; ".join(why), ", ".join(coverage), comparisons)


def _sets(claim, runs):
    """({set's name: {method: [History]}} of the claim's methods that were run in every set, the names of sets that have
    some but no value of what it varies, which are left out); the name of one set is "".
    """
    sets = runs if claim.varies else {"": runs}
    for name, group in sets.items():
        if not isinstance(group, dict):
            raise ValueError(f"runs[{name!r}]: must be a set, {{method: [History, ...]}}; {claim.id} compares sets")
    mine = {name: group for name, group in sets.items() if any(map(group.get, claim.methods))}
    without = [name for name, group in mine.items() if claim.varies and varied(claim, group) is None]
    sets = {name: group for name, group in sets.items() if name not in without}
    here = [m for m in claim.methods if sets and all(group.get(m) for group in sets.values())]
    sets = {name: {m: list(group[m]) for m in here} for name, group in sets.items()}
    for label, group in sets.items():
        for name, histories in group.items():
            for history in histories:
                if (held := _label(history.config, name)) != name:
                    where = f"[{label!r}]" if claim.varies else ""
                    raise ValueError(f"runs{where}[{name!r}]: holds a run of {held!r}")
    return sets, without


def _label(config, name):
    """The label of a configuration: its method, and those of its settings that the label `name` of the method has."""
    method, settings = named(name)
    own = {k: config["settings"].get(k) for k in settings} if config["method"] == method else {}
    return evidence.label({"method": config["method"], "settings": own})


def _on_shared_seeds(sets):
    """The sets without runs of seeds that some method lacks, if any seed is left; and that in words, "" if all are."""
    seeds = [{h.config["seed"] for h in group} for runs in sets.values() for group in runs.values()]
    shared, every = (set.intersection(*seeds), set.union(*seeds)) if seeds else (set(), set())
    if not shared or shared == every:
        return sets, ""

    def keep(group):
        return [h for h in group if h.config["seed"] in shared]

    kept = {name: {m: keep(group) for m, group in runs.items()} for name, runs in sets.items()}
    return kept, f"on {len(shared)} of {len(every)} seeds: the others are not there for all"


def _lacking(claim, sets):
    """Why these runs cannot be compared, as a list."""
    if not claim.varies:
        return mismatch(sets[""])
    if lacking := mismatch_of_sets(sets, claim.varies):
        return lacking
    key, named = claim.varies[0], {}
    for name, value in _values(claim, sets).items():
        named.setdefault(value, []).append(name)
    twice = [f"{' and '.join(names)} have one {key}: {value}" for value, names in named.items() if len(names) > 1]
    return twice or ([f"one {key} only: {next(iter(named))}"] if len(named) < 2 else [])


def _values(claim, sets):
    """{set's name: its value of the key that the claim varies}."""
    return {name: varied(claim, runs) for name, runs in sets.items()}


def _measured(claim, sets):
    if not claim.varies:
        return claim.measure(sets[""])
    values = _values(claim, sets)
    return claim.measure({values[name]: sets[name] for name in sorted(sets, key=values.get)})


def _asked(ask, claim, sets):
    """What `ask` says of the sets, each text once, with the sets' names where it is not about all of them."""
    about = {}
    for name, runs in sets.items():
        for text in ask(claim, runs):
            about.setdefault(text, []).append(name)
    return [text if len(names) == len(sets) else f"{text} ({', '.join(names)})" for text, names in about.items()]


def table(verdicts):
    """A row per verdict: the claim, the verdict with its coverage, and why it is no better (or what it rests on)."""
    rows = [{"id": v.id, "claim": v.text, "verdict": str(v), "why": v.why} for v in verdicts]
    return pd.DataFrame(rows, columns=["id", "claim", "verdict", "why"]).set_index("id")


def numbers(verdicts):
    """A row per comparison behind `verdicts`: its mean over seeds, 95 % interval and rule, and whether that is met.

    A rule with "(counted)" decides nothing by itself: it counts towards the row above it that says how many must hold.
    """
    met, rows = {True: "yes", False: "no", None: "open"}, []
    shown = {"bytes": lambda x: round(x, 0)} | dict.fromkeys(("points", "%"), lambda x: round(x, 2))
    for v in verdicts:
        for c in v.numbers:
            ends = map(shown.get(c.unit, lambda x: float(f"{x:.3g}")), (c.mean, c.low, c.high))
            rule = f"{c.rule} (counted)" if c.counted else c.rule
            rows.append([v.id, c.what, c.unit, len(c.values), *ends, rule, met[c.holds]])
    columns = ["id", "comparison", "unit", "seeds", "mean", "low", "high", "rule", "met"]
    return pd.DataFrame(rows, columns=columns).set_index("id")


def _decide(comparisons, lacking, short):
    """(verdict, why) of comparisons, what is lacking for any verdict, and what is short of the full scale."""
    if lacking:
        return "not tested", lacking
    comparisons = [c for c in comparisons if not c.counted]
    if not comparisons:
        return "not tested", []
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
