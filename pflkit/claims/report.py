"""All claims by all that lies in a folder of evidence."""

import json
from pathlib import Path

import pandas as pd

from pflkit import evidence
from pflkit.checks import choice
from pflkit.claims import CLAIMS, Verdict, check
from pflkit.claims import numbers as numbers_of
from pflkit.claims import table as table_of
from pflkit.claims.comparisons import DESIGN, fixed, settings_of
from pflkit.claims.scale import config_of, departures, values_of, varied

VARIED = ("partition", "beta", "classes", "clients", "join_ratio", "epochs")  # what the papers' tables vary


def report(folder=evidence.FOLDER, ids=()):
    """[(the sets' names, Verdict)]: each claim of `ids`, without any all, by each set that it can be checked with.

    Where there are sets of a claim's own data set, model, partition, clients, join ratio and epochs, it is checked with
    them alone, else with all there are. A claim that compares sets is checked with each group of them that differ in
    what it varies; where that is a method's setting, all runs of one value, of whatever folder, are a set of theirs.
    A claim without sets, or without a group, is "not tested", once, but a single set for it is told by name; sets
    without numbers of which the same is said are told together, and those that lack a method without which the paper's
    claims say nothing are not told at all.
    """
    ids = [choice("id", claim_id, CLAIMS) for claim_id in ids] or list(CLAIMS)
    sets, found = read(folder), []
    for claim in (CLAIMS[claim_id] for claim_id in dict.fromkeys(ids)):
        here = {name: runs for name, runs in _by_setting(claim, sets).items() if _says_something(claim, runs)}
        if claim.varies:
            here = {name: runs for name, runs in here.items() if varied(claim, runs) is not None}
        groups = _groups(claim, here) if claim.varies and len(here) > 1 else [[name] for name in here]
        groups = [group for group in groups if _own(claim, group, here)] or groups
        told = {}
        for group in groups:
            runs = {name: here[name] for name in group}
            verdict = check(claim.id, runs if claim.varies else runs[group[0]])
            alike = (verdict.why, group[0] if verdict.numbers else None)
            told.setdefault(alike, (verdict, []))[1].append(", ".join(group))
        found += [("; ".join(names), verdict) for verdict, names in told.values()]
        if not groups:
            found.append(("", Verdict(claim.id, claim.text, "not tested", _nothing(claim, sets), "", ())))
    return found


def read(folder):
    """{name: the set's runs} of all sets under `folder`, by name; {} where there is no such folder."""
    folder, sets = Path(folder), {}
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={str(folder)!r}: is not a folder")
    for path in sorted(folder.rglob("runs.jsonl")):
        runs = evidence.load(path.parent)
        for history in (h for group in runs.values() for h in group):
            if lacking := {"method", "settings", "seed", *DESIGN} - history.config.keys():
                raise ValueError(f"{path}: cannot be read: a run's configuration has no {min(lacking)!r}")
        sets[path.parent.relative_to(folder).as_posix()] = runs
    return sets


def table(found):
    """A row a claim and set: the verdict, how many of the comparisons that decide are met, not, or open, and why."""
    rows = table_of([verdict for _, verdict in found])
    deciding = [[c.holds for c in verdict.numbers if not c.counted] for _, verdict in found]
    words = {True: "met", False: "not met", None: "open"}
    counts = [", ".join(f"{holds.count(v)} {word}" for v, word in words.items() if v in holds) for holds in deciding]
    rows.insert(1, "sets", [names for names, _ in found])
    rows.insert(3, "numbers", counts)
    return rows


def numbers(found):
    """A row a comparison behind the verdicts, with the sets' names."""
    tables = [numbers_of([verdict]) for _, verdict in found]
    for (names, _), one in zip(found, tables, strict=True):
        one.insert(0, "sets", names)
    return pd.concat([one for one in tables if not one.empty] or tables)


def lines(found):
    """All of it as lines of text."""
    told = None
    for names, verdict in found:
        if told != verdict.id:
            yield f"{verdict.id}  {verdict.text}"
        told = verdict.id
        yield f"  {names or 'no sets'}: {verdict}{f'; {verdict.why}' if verdict.why else ''}"
        for n in numbers_of([verdict]).itertuples():
            yield f"    {n.comparison}: {n.mean:g} [{n.low:g}, {n.high:g}] {n.unit}, {n.rule}: {n.met}"


def _own(claim, group, sets):
    """Whether one of the group's sets is of the claim's own design."""
    configs = [config_of(claim, sets[name]) for name in group]
    return any(values_of(c)["dataset"] in claim.settings and not departures(claim, c).keys() & VARIED for c in configs)


def _says_something(claim, runs):
    """Whether a set has a method of the claim and, where its paper needs one, that one, and another if it names any."""
    there, needs = {name for name in claim.methods if runs.get(name)}, {claim.paper.needs} - {""}
    return there > needs or (bool(there) and needs >= set(claim.methods))


def _nothing(claim, sets):
    """Why the claim can be checked with none of the sets."""
    if not any(runs.get(name) for runs in sets.values() for name in claim.methods):
        return "no runs"
    if not any(_says_something(claim, runs) for runs in sets.values()):
        return f"no set with {claim.paper.needs} and another of its {claim.kind}"
    return f"no sets that differ in {claim.varies[0]} alone"


def _by_setting(claim, sets):
    """The sets themselves; for a claim that varies a method's setting, a set for each of its labels in each of them.

    Folders may repeat each other's runs: of sets that are one but for their seeds, the first with most seeds is left.
    """
    if not claim.varies or " " not in claim.varies[0]:
        return sets
    method, found = claim.varies[0].split()[0], {}
    for name, labels in sets.items():
        for label, histories in labels.items():
            if (config := histories[0].config)["method"] == method:
                same = json.dumps([fixed(config), settings_of(config)], sort_keys=True)
                found.setdefault(same, []).append((f"{name} ({label})", histories))
    most = [max(group, key=lambda named: len(named[1])) for group in found.values()]
    return {name: {method: histories} for name, histories in most}


def _groups(claim, sets):
    """Lists of sets that differ in what the claim varies and nothing else, two values of it at least."""
    alike = {}
    for name, runs in sets.items():
        config, value = config_of(claim, runs), varied(claim, runs)
        settings = settings_of(config, claim.varies) if claim.varies[0] in settings_of(config) else {}
        alike.setdefault(json.dumps([fixed(config, claim.varies), settings], sort_keys=True), {})[name] = value
    return [list(group) for group in alike.values() if len(set(group.values())) > 1]
