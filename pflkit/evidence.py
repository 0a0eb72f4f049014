"""What longer runs left: small files that stay, from which tables, figures and verdicts are made.

A set is one comparison: methods on the same seeds, data, model, partition and protocol. Its folder holds

    runs.jsonl    a line a run: its number, the arguments of `experiment`, and the configuration that they gave
    rounds.csv    History.rounds of every run, by its number
    clients.csv   History.clients of the last round and of what it led to, likewise

A run is told by its arguments: what is there is not run again, also if the code has changed since. Delete a folder to
run it anew.
"""

import contextlib
import hashlib
import json
import traceback
from pathlib import Path

import joblib
import numpy as np
import pandas as pd
from filelock import FileLock

from pflkit import notebook
from pflkit.experiment import History, experiment, write_whole
from pflkit.methods import METHODS
from pflkit.sweep import processes

FOLDER = "figures/evidence"


def collect(sets, folder=FOLDER, *, jobs=-1, data_root=None, say=print):
    """Runs what is missing of `sets`, {name: [arguments of `experiment`]}, recorded in folder/<name>/ as it comes.

    Each experiment is a process of its own with one thread; `jobs` of them run at once (-1: one a core), those of the
    first set first. Returns the number of experiments that failed; each is told, with its traceback. Two that collect
    the same at once may both run an experiment, but it is recorded once.
    """
    if jobs == 0:
        raise ValueError("jobs=0: must be a number of processes, or -1 for one a core")
    folder, failed = Path(folder), 0
    todo = [(name, arguments) for name, group in sets.items() for arguments in missing(folder / name, group)]
    for name, _ in todo:
        (folder / name).mkdir(parents=True, exist_ok=True)  # now, lest a bad folder be known after the first hour only
    say(f"{len(todo)} experiments to run, {sum(map(len, sets.values())) - len(todo)} are there")
    with processes():
        work = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(
            joblib.delayed(_one)(name, arguments, data_root) for name, arguments in todo
        )
        for count, (name, arguments, history, error) in enumerate(work, 1):
            if error:
                failed, verdict = failed + 1, f"failed\n{error}"
            else:
                record(folder / name, arguments, history)
                verdict = f"accuracy={history.summary()['accuracy']:.4f}"
            say(f"{count}/{len(todo)}  {name}  {label(arguments)}  seed={arguments.get('seed', 0)}  {verdict}")
    return failed


def play(sets, folder, *, jobs=-1):
    """{name: {label: [History, one a seed]}}, all that is recorded of `sets` when what they lack has been run.

    For notebooks: nothing is printed. Raises RuntimeError where experiments failed, with what `collect` says of them.
    """
    said = []
    if failed := collect(sets, folder, jobs=jobs, say=said.append):
        raise RuntimeError(f"{failed} experiments failed:\n" + "\n".join(line for line in said if "  failed\n" in line))
    return {name: load(Path(folder) / name) for name in sets}


def missing(folder, group):
    """Those of `group`, a list of arguments, that are not recorded in the set in `folder`; each of them once."""
    there, left = [run["arguments"] for run in _runs(folder)], []
    for arguments in group:
        if (plain := _plain(arguments)) not in there:
            there.append(plain)
            left.append(arguments)
    return left


def record(folder, arguments, history):
    """Adds a run to the set in `folder`, where it is not there yet."""
    folder, arguments = Path(folder), _plain(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # another process may record in this set, too
        runs = _runs(folder)
        if any(run["arguments"] == arguments for run in runs):
            return
        number = max((run["run"] for run in runs), default=-1) + 1
        last = history.clients["round"] >= history.config["rounds"]
        for name, new in (("rounds", history.rounds), ("clients", history.clients[last])):
            path, tables = folder / f"{name}.csv", [new.assign(run=number)]
            if runs:
                old = pd.read_csv(path)
                whole = old["run"].isin([run["run"] for run in runs])  # a cut may have left others, half recorded
                tables.insert(0, old[whole])
            table = pd.concat(tables)
            write_whole(path, lambda path, table=table: table.to_csv(path, index=False, float_format="%.12g"))
        config = {k: v for k, v in history.config.items() if k != "code"}
        config["model"] = {k: v for k, v in config["model"].items() if k not in ("modules", "attributes")}
        lines = [json.dumps(run) for run in [*runs, {"run": number, "arguments": arguments, "config": config}]]
        text = "\n".join(lines) + "\n"
        write_whole(folder / "runs.jsonl", lambda path: path.write_text(text))  # last: it says which runs there are


def load(folder):
    """{label: [History, one a seed]} of the set in `folder`, methods and seeds in order; {} where there is none.

    The Histories have clients' rows of the last round only, no watched values, and no state. Raises ValueError, or
    OSError for a file that is missing, where the folder holds something else.
    """
    folder, runs, found = Path(folder), _runs(folder), {}
    with _names(folder):
        tables = [pd.read_csv(folder / f"{name}.csv") for name in ("rounds", "clients")] if runs else []
        for run in sorted(runs, key=lambda run: run["config"]["seed"]):
            own = [table[table["run"] == run["run"]].drop(columns="run") for table in tables]
            if any(table.empty for table in own):
                raise ValueError(f"run {run['run']} is not in its tables")
            rounds, clients = (table.dropna(axis=1, how="all").reset_index(drop=True) for table in own)
            product = getattr(METHODS.get(run["config"]["method"]), "product", "after")
            history = History(run["config"], product, rounds, clients, pd.DataFrame(), np.empty((0, 0)), None)
            found.setdefault(label(run["arguments"]), []).append(history)
    order = list(METHODS)  # not that in which they ended
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0].split()[0]), item[0])))


def scale(runs):
    """What runs, {method: [History]}, are made of, in words for a title: data, model, split, clients, rounds, seeds."""
    histories = next(iter(runs.values()))
    config, sizes = histories[0].config, histories[0].clients.drop_duplicates("client")
    split, join = config["partition"], config["join_ratio"]
    kind = f"Dirichlet({split['beta']:g})" if "beta" in split else split["name"].replace("_", " ")
    of = "random classes" if split.get("grouped") is False else "classes"
    kind += f" ({split['classes']} {of} each)" if "classes" in split else ""
    parts = [config["dataset"]["name"], config["model"]["name"], f"{sizes['n_train'].sum():,} training samples"]
    parts += [f"{config['clients']} clients", kind, f"lr {config['training']['lr']:g}"]
    parts += [f"join ratio {join[0]:g} to {join[1]:g}"] if tuple(join) != (1.0, 1.0) else []
    parts += [f"{n} local epochs"] if (n := config["training"]["epochs"]) != 1 else []
    seeds = max(map(len, runs.values()))
    return ", ".join([*parts, f"{config['rounds']} rounds", f"{seeds} seed{'s' * (seeds > 1)}"])


def code(*about):
    """Twelve hex digits that change with any file of the package, and with `about`: to name a folder of runs that
    changed code, or other parameters, leave alone.
    """
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files) + repr(about).encode()).hexdigest()[:12]


def root():
    """The project's folder of evidence."""
    return notebook.root() / FOLDER


def label(arguments):
    """The method's name, and the settings given, in the order of its own: "fedah", "fedah weight_lr=1.0"."""
    settings = arguments.get("settings") or {}
    method = arguments.get("method", "fedah")  # as `experiment` has it
    own = getattr(METHODS.get(method), "__dataclass_fields__", {})
    settings = {name: settings[name] for name in (*own, *settings) if name in settings}
    return " ".join([method, *(f"{name}={value}" for name, value in settings.items())])


def _one(name, arguments, data_root):
    try:
        return name, arguments, experiment(**{"data_root": data_root, **arguments}), None
    except Exception:
        return name, arguments, None, traceback.format_exc()


def _runs(folder):
    path = Path(folder) / "runs.jsonl"
    if not path.exists():
        return []
    with _names(path):
        runs = [json.loads(line) for line in path.read_text().splitlines()]
        return [{"run": run["run"], "arguments": run["arguments"], "config": run["config"]} for run in runs]


def _plain(arguments):
    """Arguments as they are read back: a tuple is a list."""
    return json.loads(json.dumps(arguments))


@contextlib.contextmanager
def _names(path):
    """Within: what is wrong with a file's contents is told with its path."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
