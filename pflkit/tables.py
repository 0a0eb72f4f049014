"""Tables of results: accuracies and costs of several methods, as CSV and Markdown."""

from pathlib import Path

import numpy as np
import pandas as pd

from pflkit import costs


def accuracy(runs):
    """A row per method: accuracies in %, mean over clients, and mean ± standard deviation over seeds where there are
    several. `runs`: {name: a History, or a list of them, one a seed}.

    own: after all rounds, at the method's own point; best: its best round on test data (optimistic); before: on
    receiving what all rounds led to, before training on it; after: after the last round's local training, without the
    step or tuning of its own that Per-FedAvg and FedAvg-FT take `before`; global: as before, of the global model, where
    a method has personal ones too (the column is there if any has); range: from the worst client to the best at the
    method's own point; clients: how many `own` and `range` are about, for `after` is known of the clients that joined
    the last round only.
    """
    rows = {}
    for name, histories in lists(runs).items():
        seeds = pd.DataFrame([h.summary() for h in histories])
        clients = pd.concat([last_per_client(h) for h in histories])
        rows[name] = {
            "own": _spread(seeds["accuracy"]),
            "best": _spread(seeds["best"]),
            "before": _spread(seeds["before"]),
            "after": _spread(seeds["after"]),
            "global": _spread(seeds["global"]) if "global" in seeds else "",
            "range": f"{100 * clients.min():.0f} to {100 * clients.max():.0f}",
            "clients": round(len(clients) / len(histories)),
        }
    table = pd.DataFrame(rows).T.rename_axis("method")
    return table if table["global"].any() else table.drop(columns="global")


def across(sets, point="own"):
    """A row per method, a column per set of {name: runs}: accuracy in % at the method's own point, or at another that
    is a column of `accuracy`.
    """
    columns = {name: accuracy(runs)[point] for name, runs in sets.items() if runs}
    methods = list(dict.fromkeys(method for column in columns.values() for method in column.index))
    return pd.DataFrame(columns, index=methods).fillna("").rename_axis("method")


def budget(runs, patience):
    """A row per method: bytes a client and round, FLOPs and seconds of a round of all clients, as in `cost` and
    `seconds`; and until it has converged (`costs.to_convergence`): rounds, seconds, and MB of all clients both ways.
    Means over the seeds that have; "" where none has, with their number beside it.
    """
    rows = {}
    for name, histories in lists(runs).items():
        one, ends = costs.per_round(histories[0]), [costs.to_convergence(h, patience) for h in histories]
        ends = [end for end in ends if end is not None]
        mean = pd.DataFrame(ends).mean()
        rows[name] = {
            "MB down": f"{one['bytes down / client'] / 1e6:.3f}",
            "MB up": f"{one['bytes up / client'] / 1e6:.3f}",
            "MFLOP": f"{one['FLOPs'] / 1e6:,.0f}",
            "seconds": f"{np.mean([costs.per_round(h)['seconds'] for h in histories]):.3f}",
            "converged": f"{len(ends)} of {len(histories)}",
            "rounds": f"{mean['rounds']:.0f}" if ends else "",
            "seconds in all": f"{mean['seconds']:.1f}" if ends else "",
            "MB in all": f"{mean['bytes'] / 1e6:,.1f}" if ends else "",
        }
    return pd.DataFrame(rows).T.rename_axis("method")


def to_targets(runs, targets, point=None):
    """A row per method: rounds, and KB of all clients both ways, until its mean accuracy is first seen to reach each of
    `targets` (0 to 1), as means over seeds; "not reached" unless it is in all of them.
    """
    rows = {}
    for name, histories in lists(runs).items():
        rows[name] = {}
        for target in targets:
            spent = [costs.bytes_to_target(h, target, point) for h in histories]
            found = ["not reached"] * 2
            if None not in spent:
                rounds = [costs.rounds_to_target(h, target, point) for h in histories]
                found = [f"{np.mean(rounds):.1f}", f"{np.mean(spent) / 1e3:,.1f}"]
            rows[name] |= {f"{what} to {100 * target:g} %": n for what, n in zip(("rounds", "KB"), found, strict=True)}
    return pd.DataFrame(rows).T.rename_axis("method")


def overview(runs):
    """A row per method, numbers, means over seeds: accuracy (%), at the method's own point, and its standard deviation
    "±"; before, after (%); MB of all clients both ways, GFLOP and (median) seconds of all training, a round.
    """
    rows = {}
    for name, histories in lists(runs).items():
        seeds = pd.DataFrame([h.summary() for h in histories])
        rounds = np.array([h.rounds["joined"].count() for h in histories])
        rows[name] = {f"{point} (%)": 100 * seeds[point].mean() for point in ("accuracy", "before", "after")}
        rows[name] |= {"±": 100 * seeds["accuracy"].std(ddof=1)}
        rows[name] |= {"MB": ((seeds["bytes_down"] + seeds["bytes_up"]) / rounds).mean() / 1e6}
        rows[name] |= {"GFLOP": (seeds["flops"] / rounds).mean() / 1e9}
        rows[name] |= {"s": np.mean([costs.per_round(h)["seconds"] for h in histories])}
    columns = ["accuracy (%)", "±", "before (%)", "after (%)", "MB", "GFLOP", "s"]
    return pd.DataFrame(rows).T.rename_axis("method")[columns]


def front(table, cost, gain):
    """Which rows of `table` are on the Pareto front: no other is as cheap and better, or as good and cheaper; bools.

    >>> front(pd.DataFrame({"MB": [1, 2, 3, 3], "%": [50, 70, 60, 90]}), "MB", "%").tolist()
    [True, True, False, True]
    """
    x, y = (table[column].to_numpy() for column in (cost, gain))
    beaten = [((x <= a) & (y >= b) & ((x < a) | (y > b))).any() for a, b in zip(x, y, strict=True)]
    return pd.Series(~np.array(beaten, dtype=bool), table.index)


def by_value(sets, what, point="accuracy"):
    """Accuracies behind `plots.lines`: method, `what`, seed (0, 1, ...) and "accuracy (%)", a run's number `point`, of
    sets {value of `what`: {method: a History, or a list of them}}.
    """
    rows = [
        {"method": method, what: float(value), "seed": seed, "accuracy (%)": 100 * history.summary()[point]}
        for value, runs in sets.items()
        for method, histories in lists(runs).items()
        for seed, history in enumerate(histories)
    ]
    return pd.DataFrame(rows)


def cost(runs):
    """A row per method: bytes per sampled client and round, FLOPs of a round, of the first seed's run."""
    rows = {name: costs.per_round(histories[0]) for name, histories in lists(runs).items()}
    table = pd.DataFrame(rows).T.drop(columns="seconds").rename_axis("method")
    return table.astype("int64")


def seconds(runs):
    """A row per method: seconds of training of the median round, of the first seed's run. Kept apart: they change from
    run to run.
    """
    rows = {name: costs.per_round(histories[0])["seconds"] for name, histories in lists(runs).items()}
    return pd.DataFrame({"seconds a round": rows}).rename_axis("method")


def curves(runs, point=None):
    """Accuracies behind a plot of curves: method, seed (0, 1, ...), rounds of training, accuracy (client mean)."""
    parts = [
        _curve(name, history, point).assign(method=name, seed=seed)
        for name, histories in lists(runs).items()
        for seed, history in enumerate(histories)
    ]
    return pd.concat(parts)[["method", "seed", "rounds", "accuracy"]].reset_index(drop=True)


def against_bytes(runs, point=None):
    """Numbers behind `plots.against_bytes`: method, seed, rounds of training, bytes of all clients so far, down and up,
    accuracy (client mean). An accuracy `before` is after so many rounds' messages; the next one is not counted yet.
    """
    parts = []
    for name, histories in lists(runs).items():
        for seed, history in enumerate(histories):
            sent = costs.played(history)[["bytes_down", "bytes_up"]].sum(axis=1)
            curve = _curve(name, history, point)
            so_far = sent.cumsum().reindex(curve["rounds"], fill_value=0).astype("int64").to_numpy()
            parts.append(curve.assign(method=name, seed=seed, bytes=so_far))
    return pd.concat(parts)[["method", "seed", "rounds", "bytes", "accuracy"]].reset_index(drop=True)


def per_client(runs):
    """Accuracies behind `plots.per_client`: method, client, n_train, n_test, accuracy in the last round; first seed."""
    parts = []
    for name, histories in lists(runs).items():
        sizes = histories[0].clients.drop_duplicates("client").set_index("client")[["n_train", "n_test"]]
        accuracy = last_per_client(histories[0]).rename("accuracy")
        parts.append(sizes.join(accuracy, how="inner").reset_index().assign(method=name))
    return pd.concat(parts)[["method", "client", "n_train", "n_test", "accuracy"]].reset_index(drop=True)


def last_per_client(history):
    """Accuracies in the last scored round at the method's own point: a Series by client, of those that were scored."""
    scored = history.clients.dropna(subset=history.product)
    last = scored[scored["round"] == scored["round"].max()]
    return last.set_index("client")[history.product]


def save(table, path, title):
    """Writes `table` as `path`.csv and, under `title`, as `path`.md; returns the latter for a notebook to show."""
    from IPython.display import Markdown  # here: only notebooks save tables

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = f"**{title}**\n\n{markdown(table)}"
    table.to_csv(f"{path}.csv")
    Path(f"{path}.md").write_text(text)
    return Markdown(text)


def markdown(table):
    """`table` with its index, as a Markdown table."""
    rows = table.reset_index().astype(str)
    lines = [rows.columns, ["---"] * len(rows.columns), *rows.to_numpy()]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def watched(runs, name):
    """A watched value behind `plots.watched`: method, round, mean, quantiles, shares of exact 0 and 1; over seeds."""
    parts = {}
    for method, histories in lists(runs).items():
        table = pd.concat(h.watch for h in histories)
        parts[method] = table[table["name"] == name].groupby("round").mean(numeric_only=True)
    return pd.concat(parts, names=["method"]).reset_index()


def by_setting(runs):
    """Accuracies behind `plots.by_setting`: setting, seed (0, 1, ...), before, after, in the last round."""
    rows = [
        {"setting": label, "seed": seed} | {point: history.summary()[point] for point in ("before", "after")}
        for label, histories in lists(runs).items()
        for seed, history in enumerate(histories)
    ]
    return pd.DataFrame(rows)


def lists(runs):
    """{name: [History, one a seed]} of {name: a History, or a list of them}."""
    if not isinstance(runs, dict):
        raise ValueError(f"runs: must be {{name: History, ...}}, not a {type(runs).__name__}")
    return {name: h if isinstance(h, list) else [h] for name, h in runs.items()}


def _curve(name, history, point):
    """A History's curve as columns rounds, accuracy. Raises ValueError naming the method that has no such point."""
    try:
        return history.curve(point).rename_axis("rounds").rename("accuracy").reset_index()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _spread(values):
    text = f"{100 * values.mean():.1f}"
    return text if len(values) == 1 else f"{text} ± {100 * values.std():.1f}"
