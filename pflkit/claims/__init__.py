"""The papers' claims as checks on results: measured runs in, a verdict and the numbers behind it out.

    check("AH7", {"fedavg": [History, one a seed], "fedper": [...], ...}) -> Verdict

    reproduced / not reproduced        the claim's own data set and model, full data, the split and protocol of the
                                       paper or of its released code, every method's settings at their defaults, at
                                       least 5 seeds, and every run converged by the stopping rule of FedAH's released
                                       code (what we read of the papers names none)
    agrees / disagrees at reduced scale  a real data set and at least 3 seeds
    not tested                         anything less, and every tie within noise

Four rules decide what a comparison says. Its values, one a seed, are mostly differences of runs that share seed, split
and initial model, in percentage points, and its interval is the 95 % t interval of their mean over seeds.

    above   a − b:  holds if the interval lies above 0, is contradicted if it lies below; else it is within noise
    close   a − b:  holds if the interval lies within ± MARGIN, is contradicted if it lies wholly outside; else open
    always          must hold in every run. An identity of the ledger is exact: neither scale nor seeds matter
    at most, below  PA6 alone. In every run, over all its updates, the largest change must be at most a bound of
                    rounding, else the claim is contradicted; and the smallest must be below minus it, else open

An interval that contains 0 does not show that two methods are close: few seeds make it wide. So `close` asks for a
narrow one. Its margin of 1 point is ours; a 95 % interval is stricter than the usual test of equivalence, which takes
90 %. A claim of several comparisons holds if all do, and is contradicted if one is; with many of them the latter
happens by chance more often than 2.5 % of the time, so read the numbers.

A claim is checked with those of its methods that were run, in those of its parts that a run can check. The verdict then
says how many of them there were, and speaks of no others. Accuracy is a History's one number: mean over clients, last
round, at the method's own point (the papers report the best round on test data, which flatters).
"""

from dataclasses import dataclass

import pandas as pd

from pflkit.checks import choice
from pflkit.claims import fedah, fedapa, fedgh
from pflkit.claims.comparisons import compare, differences, mismatch
from pflkit.claims.fedapa import label_similarity
from pflkit.claims.scale import falls_short, lacks

__all__ = ["CLAIMS", "Verdict", "check", "compare", "differences", "label_similarity", "numbers", "table"]

CLAIMS = {claim.id: claim for paper in (fedah, fedgh, fedapa) for claim in paper.CLAIMS}


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
    lacking = mismatch(there) if there else ["none of its methods was run"]
    found = () if lacking else claim.measure(there) or "too few of its methods"
    comparisons, lacking = ((), [found]) if isinstance(found, str) else (tuple(found), lacking)
    lacking = lacking or ([] if claim.exact else lacks(claim, there))
    short = [] if claim.exact or lacking else falls_short(claim, there)
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
