"""An experiment: rounds of one method on one federation, scored, saved, resumed, and the History they leave."""

import contextlib
import csv
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pflkit import checks, data, federation, graphs, models, training, trees
from pflkit import partition as partitions
from pflkit.checks import boolean, integer
from pflkit.identity import describe, digest
from pflkit.methods import make

# cnn, resnet18, fasttext: the FedAH paper; cnn-1 to cnn-5 and lenet5: FedGH's and FedAPA's released code; others ours.
LR = dict.fromkeys(models.MODELS, 0.05) | dict.fromkeys(models.CNNS, 0.01) | {"cnn": 0.005}
LR |= {"lenet5": 0.01, "resnet18": 0.01, "fasttext": 0.01}
IMAGES = ("fashion-mnist", "mnist", "cifar10", "cifar100", "tiny-imagenet")
DEFAULT_MODEL = {"digits": "mlp", "agnews": "fasttext"} | dict.fromkeys(IMAGES, "cnn")


@dataclass
class History:
    """What an experiment left.

    clients: a row per round and client: round, client, joined, n_train, n_test, before, after, before_loss, after_loss,
        bytes_down, bytes_up, flops. `before` is the accuracy on the client's own test data of the model it would use on
        receiving the round's message, `after` that of the model it holds after local training (sampled clients only).
        Of a method that has personal and global models these are the personal ones'; before_global and after_global
        are the global ones', in `rounds` too.
    rounds: a row per round: round, joined, before and after (means over clients), before_pooled and after_pooled (over
        test samples), bytes and flops (sums over clients), seconds (training), seconds_eval, and mean losses by phase.
        The last row, round rounds+1, has `before` only: what all the training led to.
    watch: a row per round and watched value: round, name, mean, quantiles, shares of exact zeros and ones.
    labels: training samples of each class that each client has: int [N, K].
    product: where the method's own product stands: "before" (a global model, or one step or tuning from it) or "after".
    """

    config: dict
    product: str
    rounds: pd.DataFrame
    clients: pd.DataFrame
    watch: pd.DataFrame
    labels: np.ndarray
    state: federation.State
    loaded: str | None = None  # when the results read from disk were computed

    def curve(self, point=None):
        """Accuracy (mean over clients) by rounds of training done: a Series; `before` starts at 0 rounds."""
        points = [f"{when}{suffix}" for when in ("before", "after") for suffix in federation.KINDS.values()]
        point = checks.choice("point", point or self.product, [p for p in points if p in self.rounds])
        values = self.rounds.set_index("round")[point].dropna()
        values.index = values.index - point.startswith("before")
        return values

    def summary(self):
        """One number each: accuracy (at the method's own point), before (of all clients, on receiving what all rounds
        led to), after (of the clients that joined the last round), and global (as before, of the global model where
        a method has personal ones too), all means over clients; best (largest over rounds at the own point, on test
        data: optimistic); bytes_up, bytes_down, flops, seconds in all.
        """
        own = self.curve()
        points = {"before": "before", "after": "after", "global": "before_global"}
        last = {name: float(self.curve(p).iloc[-1]) for name, p in points.items() if p in self.rounds}
        totals = {name: int(self.rounds[name].sum()) for name in ("bytes_up", "bytes_down", "flops")}
        seconds = float(self.rounds["seconds"].sum())
        return {"accuracy": float(own.iloc[-1]), **last, "best": float(own.max()), **totals, "seconds": seconds}


def run(method, fed, rounds, *, eval_every=1, out=None, fresh=False, progress=0):
    """Runs `method` on `fed` for `rounds` rounds and returns the History.

    eval_every: accuracies are taken in every so many rounds, and always in the last. progress: a line is printed every
    so many rounds (0: none). out: a folder; results go to out/<method>-<hash>/ as they come, a run that was cut short
    goes on where it stopped, and one that is finished is read instead of repeated, unless `fresh`. The hash covers
    the configuration and the source code of all that computes.
    """
    if isinstance(method, str | type):
        raise ValueError(f"method={method!r}: must be a method, as make('fedah') gives, not its name or class")
    rounds = integer("rounds", rounds, 1)
    eval_every = integer("eval_every", eval_every, 1)
    integer("progress", progress, 0)
    boolean("fresh", fresh)
    config = describe(method, fed, rounds, eval_every)
    name, product = config["method"], checks.choice("product", getattr(method, "product", "after"), ("before", "after"))
    folder = Path(out) / f"{name}-{digest(config)}" if out is not None else None
    saved = folder and folder / "state.safetensors"
    state = fed.start(method)
    labels = np.stack([np.bincount(y.cpu(), minlength=fed.dataset.num_classes) for _, y in fed.train])
    clients, watch, rows = [], [], []
    if saved and fresh:  # first, lest a repeat cut short be taken for the run that it replaces
        saved.unlink(missing_ok=True)
    if saved and saved.exists():
        rows, clients, watch = _load(folder, state, rounds)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.stat().st_mtime))
        if progress:
            print(f"{name}: {state.round} of {rounds} rounds read from {folder.name}, computed {when}", flush=True)
        if rows and rows[-1]["round"] > rounds:
            return History(config, product, *map(pd.DataFrame, (rows, clients, watch)), labels, state, loaded=when)
    save = _Saver(folder, config)
    while state.round < rounds:
        t = state.round + 1
        scored = (t - 1) % eval_every == 0 or t == rounds
        row, of_clients, of_watch = _round(method, fed, state, rounds, scored)
        rows.append(row)
        clients += of_clients
        watch += of_watch
        if progress and (t % progress == 0 or t == rounds):
            print(_line(name, row, rounds), flush=True)
        if t < rounds:
            save(state, rows, clients, watch)
    start = time.perf_counter()
    closing, of_clients = _before(method, fed, state, rounds)
    rows.append({"round": rounds + 1, **closing, "seconds_eval": time.perf_counter() - start})
    clients += of_clients
    save(state, rows, clients, watch, at_once=True)
    return History(config, product, *map(pd.DataFrame, (rows, clients, watch)), labels, state)


def experiment(
    method="fedah",
    dataset="digits",
    model=None,
    partition="dirichlet",
    beta=None,
    classes=None,
    grouped=None,
    clients=20,
    join_ratio=1.0,
    rounds=10,
    lr=None,
    batch_size=10,
    epochs=1,
    momentum=0.0,
    weight_decay=0.0,
    clip=None,
    seed=0,
    settings=None,
    engine="auto",
    device=None,
    precision="full",
    data_root=None,
    length=None,
    ngrams=None,
    samples=None,
    **options,
):
    """One experiment from plain values, as the command line and `sweep` give them; returns its History.

    model and lr are by default the data set's and the model's; a model "mlp-1+mlp-2" stands for clients that have one
    or the other, in turn; beta belongs to the Dirichlet partition, classes to the pathological ones and grouped to
    `pathological`, length and ngrams to AG News (see `text.ag_news`); samples: only so many of the data, drawn anew for
    each seed; settings are the method's own. Other `options` (out, eval_every, fresh, progress) are those of `run`. Of
    the defaults, those of clients, join ratio, batches, epochs and beta are the FedAH paper's; the rest ours.
    """
    for key in options.keys() - {"out", "eval_every", "fresh", "progress"}:
        raise ValueError(f"{key}={options[key]!r}: experiment has no such argument")
    if not isinstance(settings, dict | None):
        raise ValueError(f"settings={settings!r}: must be a dict of the method's settings")
    if not isinstance(model, str | None) or model == "":
        raise ValueError(f"model={model!r}: must be a name, or several joined by +")
    chosen = make(method, **(settings or {}))  # what can be refused without the data is, for they may take long to come
    for name in (model or "mlp").split("+"):
        checks.choice("model", name, models.MODELS)
    checks.choice("partition", partition, partitions.SCHEMES)
    # Without a rate, the model's own comes below.
    rule = training.Training(0.01 if lr is None else lr, batch_size, epochs, momentum, weight_decay, clip)
    training.Engine(engine)
    checks.choice("precision", precision, graphs.PRECISIONS)
    integer("rounds", rounds, 1)
    integer("seed", seed, 0)
    if samples is not None:
        integer("samples", samples, 1)
    loaded = data.load(dataset, root=data_root, **_given(length=length, ngrams=ngrams))
    if samples is not None:
        loaded = loaded.some(samples, seed)
    names = (model or DEFAULT_MODEL.get(dataset) or ("cnn" if _fits_cnn(loaded.shape) else "mlp")).split("+")
    about = loaded.shape, loaded.num_classes
    nets = [models.build(name, *about, vocabulary=loaded.vocabulary, seed=seed) for name in names]
    if lr is None:
        if len({LR[name] for name in names}) > 1:
            raise ValueError(f"lr=None: must be given, for {model} have different rates by default")
        rule = replace(rule, lr=LR[names[0]])
    of_split = _given(beta=beta, classes=classes, grouped=grouped)
    split = partitions.make(partition, loaded.y, clients, seed=seed, **of_split)
    fed = federation.Federation(
        loaded,
        split,
        nets,
        training=rule,
        join_ratio=join_ratio,
        seed=seed,
        engine=engine,
        device=device,
        precision=precision,
    )
    return run(chosen, fed, rounds, **options)


def _given(**values):
    return {name: value for name, value in values.items() if value is not None}


def _fits_cnn(shape):
    return len(shape) == 3 and min(shape[1:]) >= 16


def _round(method, fed, state, rounds, scored):
    """Plays and scores one round: (a row for History.rounds, rows for clients, rows for watch)."""
    t, start = state.round + 1, time.perf_counter()
    row, of_clients = _before(method, fed, state, rounds) if scored else ({}, [])
    scoring = time.perf_counter() - start
    start = time.perf_counter()
    result = fed.play(method, state, rounds)
    seconds = time.perf_counter() - start
    columns = {}
    if scored:
        start = time.perf_counter()
        columns, means = _columns(fed, _score(fed, result.held, result.ids), result.ids, "after")
        scoring += time.perf_counter() - start
        row |= means
    columns |= {"bytes_down": result.bytes_down, "bytes_up": result.bytes_up, "flops": result.flops()}
    by_client = {entry["client"]: entry for entry in of_clients}
    for j, i in enumerate(result.ids.tolist()):
        entry = by_client.setdefault(i, _client(fed, t, i))
        entry |= {"joined": True} | {name: values[j].item() for name, values in columns.items()}
    losses = {f"loss.{phase}": float(np.nanmean(v)) for phase, v in result.log().items() if not np.isnan(v).all()}
    row = {"round": t, "joined": len(result.ids)} | row
    row |= {name: int(columns[name].sum()) for name in ("bytes_down", "bytes_up", "flops")}
    row |= {"seconds": seconds, "seconds_eval": scoring} | losses
    return row, [by_client[i] for i in sorted(by_client)], _watched(method, fed, state)


def _before(method, fed, state, rounds):
    """All clients' models on receiving the next message, scored: (columns for rounds, rows for clients)."""
    everyone = np.arange(fed.num_clients)
    pieces = [_score(fed, fed.deployed(method, state, rounds, ids), ids) for ids in fed.few()]
    scores = {kind: np.concatenate([piece[kind] for piece in pieces], 1) for kind in pieces[0]}
    columns, means = _columns(fed, scores, everyone, "before")
    of_clients = [
        _client(fed, state.round + 1, i) | {name: values[i].item() for name, values in columns.items()}
        for i in everyone.tolist()
    ]
    return means, of_clients


def _score(fed, held, ids):
    """Correct answers and mean losses, [2, C], of each kind of models."""
    return {kind: np.stack(fed.score(of_kind, ids)) for kind, of_kind in fed.kinds(held).items()}


def _columns(fed, scores, ids, point):
    """(accuracies and losses [C], their means over clients and the accuracy over all samples), by column."""
    columns, means, n = {}, {}, np.array([len(fed.test[i][1]) for i in ids])
    for suffix, (correct, loss) in scores.items():
        name = point + suffix
        columns |= {name: correct / n, f"{name}_loss": loss}
        means |= {name: float((correct / n).mean()), f"{name}_pooled": float(correct.sum() / n.sum())}
    return columns, means


def _client(fed, t, i):
    n_train, n_test = len(fed.train[i][1]), len(fed.test[i][1])
    return {"round": t, "client": i, "joined": False, "n_train": n_train, "n_test": n_test}


def _watched(method, fed, state):
    """Rows for watch: one for each value that the method watches, if any; of several groups' clients together."""
    if not hasattr(method, "watch"):
        return []
    groups = [method.watch(state.server, kept) for kept in fed.parts(state.kept)]
    named = {name: tuple(values[name] for values in groups) for name in groups[0]}
    about = {name: _statistics(tree) for name, tree in named.items() if any(t.numel() for t in trees.leaves(tree))}
    return [{"round": state.round, "name": name} | numbers for name, numbers in about.items()]


def _statistics(tree):
    values = torch.cat([leaf.flatten() for leaf in trees.leaves(tree)]).double()
    levels = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    ordered = values.sort().values  # torch.quantile refuses more than 16 million values
    quantiles = {f"q{round(100 * p):02d}": float(ordered[round(p * (len(ordered) - 1))]) for p in levels}
    ends = {"share_0": float((values == 0).double().mean()), "share_1": float((values == 1).double().mean())}
    return {"mean": float(values.mean())} | quantiles | ends


def _line(name, row, rounds):
    accuracy = "".join(f"  {point} {row[point]:.4f}" for point in ("before", "after") if point in row)
    megabytes = f"up {row['bytes_up'] / 1e6:.2f} MB  down {row['bytes_down'] / 1e6:.2f} MB"
    return f"{name}  round {row['round']:>{len(str(rounds))}}/{rounds}{accuracy}  {megabytes}  {row['seconds']:.1f} s"


# --- on disk ----------------------------------------------------------------------------------------------------------


class _Saver:
    """Writes a run's results, each file in one piece, whenever that costs under a twentieth of the time since last."""

    def __init__(self, folder, config):
        self.folder, self.due = folder, 0.0
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))

    def __call__(self, state, rows, clients, watch, at_once=False):
        start = time.perf_counter()
        if self.folder is None or (start < self.due and not at_once):
            return
        for name, table in (("rounds", rows), ("history", clients), ("watch", watch)):
            write_whole(self.folder / f"{name}.csv", lambda path, t=table: pd.DataFrame(t).to_csv(path, index=False))
        # The state goes last: whatever is cut short, the tables hold at least the rounds that the state has.
        own, named = trees.owner(), trees.named_leaves((state.server, state.kept))
        tensors = {name: own(t.detach().cpu()) for name, t in named}
        # In one entry, because safetensors writes several in any order, and equal states should be equal files.
        about = json.dumps({"round": state.round, "rows": [len(rows), len(clients), len(watch)]})
        write_whole(self.folder / "state.safetensors", lambda path: save_file(tensors, path, {"about": about}))
        now = time.perf_counter()
        self.due = now + 20 * (now - start)


def write_whole(path, write):
    """Calls write(a path beside `path`), and puts what is there in its place: whole, or not at all."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(scratch)
    os.replace(scratch, path)


def _load(folder, state, rounds):
    """Fills `state` from disk; returns the rows of the tables up to its round. ValueError where they do not fit."""
    try:
        with safe_open(folder / "state.safetensors", "pt") as file:
            about = json.loads(file.metadata()["about"])
            state.round = about["round"]
            for name, leaf in trees.named_leaves((state.server, state.kept)):
                leaf.copy_(file.get_tensor(name))
        end = rounds + 1 if state.round == rounds else state.round  # the last round's state comes with the closing row
        files = [folder / f"{name}.csv" for name in ("rounds", "history", "watch")]
        tables = [[row for row in _read(file) if row["round"] <= end] for file in files]
        if [len(table) for table in tables] != about["rows"]:
            raise ValueError("its tables are not those of its state")
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{folder}: this saved run is damaged ({error}); delete it, or run with fresh=True") from error
    return tables


def _read(path):
    """The rows of a CSV file without their empty fields; numbers to the bit, as Python reads what it has written."""

    def value(text):
        if text in ("True", "False"):
            return text == "True"
        for kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
        return text

    with open(path, newline="") as file:
        return [{name: value(text) for name, text in row.items() if text} for row in csv.DictReader(file)]
