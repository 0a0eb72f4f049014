"""Figures in one house style: legible, colour-blind-safe, units on the axes.

Every function draws on the axes `ax` if given, else on a new figure, and returns the figure. New figures are not kept
by pyplot: as the last expression of a notebook cell they are shown once, and a loop that makes many leaks none.
"""

import re
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from pflkit import tables

COLOURS = sns.color_palette("colorblind").as_hex()
STYLE = {
    **sns.plotting_context("notebook", font_scale=0.9),
    **sns.axes_style("whitegrid", {"grid.color": "0.92", "axes.edgecolor": "0.6", "axes.axisbelow": True}),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.prop_cycle": mpl.cycler(color=COLOURS),
    "legend.frameon": False,
    "figure.dpi": 110,
}

# One colour and marker a method in every figure of the project, whoever else is in it.
METHODS = (
    *("fedavg", "fedrep", "fedah", "fedgh", "fedper", "fedapa", "fedala", "local", "fedprox", "fedavg_ft"),
    *("perfedavg", "fedmeta", "pfedme", "ditto", "fedfomo", "moon", "fedamp", "apple", "fedproto", "lgfedavg"),
    *("fd", "fml", "fedkd", "pfedhn", "fedphp", "fedpac", "dbe"),  # in an order that gives a family different colours
)

# And of an engine of the bench.
ENGINES = {
    "plain": {"color": "0.4", "marker": "s"},
    "loop": {"color": COLOURS[0], "marker": "o"},
    "threads": {"color": COLOURS[4], "marker": "^"},
    "stacked": {"color": COLOURS[2], "marker": "D"},
    "auto": {"color": COLOURS[1], "marker": "o"},
}


def style():
    """A context that gives figures of your own the house style: `with plots.style(): fig, axs = plt.subplots(1, 2)`."""
    return mpl.rc_context(STYLE)


@contextmanager
def axes(ax=None, width=7.0, height=4.0):
    """In the house style: `ax`, or the axes of a new figure of width x height inches."""
    with style():
        if ax is None:
            ax = panels(1, 1, width, height)[1]
        yield ax
        ax.figure.canvas.figure.draw_without_rendering()  # ticks are made on drawing, and must be made in this style


def bubbles(partition, ax=None):
    """Who holds what: a disc for each client (x) and class (y), its area in proportion to their samples."""
    counts = partition.counts()
    clients, classes = counts.shape
    with axes(ax, np.clip(2.5 + 0.28 * clients, 5, 11), np.clip(1.2 + 0.28 * classes, 3.2, 8)) as ax:
        ax.set(title=_title(partition), xlabel="client", ylabel="class")
        ax.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
        _whole_ticks(ax.xaxis, clients)
        _whole_ticks(ax.yaxis, classes)
        unit = _disc_area(ax, clients, classes) / counts.max()  # square points for one sample
        client, label = np.nonzero(counts)
        discs = {"color": COLOURS[0], "alpha": 0.85, "linewidths": 0}
        ax.scatter(client, label, np.maximum(unit * counts[client, label], 2), **discs)  # one sample is still seen
        for count in _round_counts(counts.max()):
            ax.scatter([], [], max(unit * count, 2), label=f"{count:,}", **discs)
        ax.legend(title="samples", loc="center left", bbox_to_anchor=(1, 0.5), labelspacing=0.9)
    return ax.figure


def sizes(partition, ax=None):
    """How much each client holds: training and test samples, stacked."""
    table = partition.describe()
    with axes(ax, np.clip(2.5 + 0.28 * len(table), 5, 11), 3.2) as ax:
        ax.bar(table.client, table.train, 0.8, color=COLOURS[0], linewidth=0, label="train")
        ax.bar(table.client, table.test, 0.8, bottom=table.train, color=COLOURS[1], linewidth=0, label="test")
        ax.set(title=_title(partition), xlabel="client", ylabel="samples", xlim=(-0.7, len(table) - 0.3))
        _whole_ticks(ax.xaxis, len(table))
        ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.grid(axis="x", visible=False)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure


def look(name):
    """Colour, marker and line of a method; a variant of it, such as "fedah, weight_lr=1", has its line dashed, and one
    that has something switched off, such as "fedgh, header_lr=0", dotted.
    """
    base = re.split(r"[ ,(]", name)[0]
    i = METHODS.index(base) if base in METHODS else len(METHODS)
    line = "-" if name == base else ":" if name.endswith("=0") else "--"
    return {"color": COLOURS[i % len(COLOURS)], "marker": "osD^vPX<>"[i % 9], "linestyle": line}


def curves(runs, point=None, ax=None):
    """Accuracy by rounds of training: the mean over seeds, in a band of one standard deviation.

    `runs` is {name: a History, or a list of them, one a seed}; `point` is "before" or "after" local training, or
    "before_global" or "after_global" for methods with a global model beside the personal ones (others are refused by
    name); by default each method's own, which the legend then names. Methods are listed in the order of their last
    values.
    """
    stats = tables.curves(runs, point).groupby(["method", "rounds"])["accuracy"].agg(["mean", "std"]).fillna(0) * 100
    with axes(ax) as ax:
        for name, label in _legend(runs, point, stats).items():
            line = stats.loc[name]
            _band(ax, line, label=label, markevery=max(1, len(line) // 8), **look(name))
        ax.set(xlabel="rounds of training", ylabel="accuracy, mean over clients (%)")
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure


def against_bytes(runs, point=None, ax=None):
    """Accuracy by all bytes sent so far, down and up and by all clients: the mean over seeds, in a band of one standard
    deviation. `runs` and `point` as in `curves`. A method that sends nothing is a level line at its last accuracy; on
    the logarithmic axis there is no place for what others have before they send anything.
    """
    groups = tables.against_bytes(runs, point).groupby(["method", "rounds"])
    stats = 100 * groups["accuracy"].agg(["mean", "std"]).fillna(0)
    stats["MB"] = groups["bytes"].mean() / 1e6
    with axes(ax) as ax:
        for name, label in _legend(runs, point, stats).items():
            line = stats.loc[name].set_index("MB")
            if line.index.max() == 0:
                free = {k: v for k, v in look(name).items() if k != "marker"}
                ax.axhline(line["mean"].iloc[-1], label=f"{label}: no bytes", linewidth=1.6, **free)
            else:
                line = line[line.index > 0]
                _band(ax, line, label=label, markevery=max(1, len(line) // 8), **look(name))
        ax.set(xscale="log", xlabel="sent so far, all clients, both ways (MB)")
        ax.set(ylabel="accuracy, mean over clients (%)")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure


def families(runs, groups, point=None):
    """Accuracy by rounds of training, a panel for each of `groups`, {its title: methods}: their means over seeds, in
    front of everybody's. `runs` and `point` as in `curves`; methods without runs are left out.
    """
    stats = 100 * tables.curves(runs, point).groupby(["method", "rounds"])["accuracy"].mean()
    columns, rows = 3, -(-len(groups) // 3)
    figure, axs = panels(rows, columns, 10.5, 2.5 * rows, sharex=True, sharey=True, squeeze=False)
    with style():
        for ax, (title, methods) in zip(axs.flat, groups.items(), strict=False):
            for name in stats.index.unique("method"):
                ax.plot(stats[name].index, stats[name], color="0.85", linewidth=0.8, zorder=1)
            for name in [m for m in methods if m in runs]:
                marks = {"markersize": 4, "markevery": max(1, len(stats[name]) // 6)}
                ax.plot(stats[name].index, stats[name], linewidth=1.6, label=name, **marks, **look(name))
            ax.set_title(title, fontsize=10)
            ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            ax.legend(loc="lower right", fontsize=7)
        for ax in axs.flat[len(groups) :]:
            ax.set_axis_off()
        for ax in axs[:, 0]:
            ax.set_ylabel("accuracy (%)")
        for ax in axs.flat[max(0, len(groups) - columns) : len(groups)]:
            ax.set_xlabel("rounds of training")
            ax.tick_params(labelbottom=True)
    return figure


def pareto(table, cost, gain, ax=None):
    """`gain` against `cost`, columns of `table`, a dot for each row; those on the Pareto front (`tables.front`) stand
    out and are joined by steps. A cost of 0 stands at the left end of the logarithmic axis.
    """
    on = tables.front(table, cost, gain)
    positive = table[cost][table[cost] > 0]
    x = table[cost].where(table[cost] > 0, positive.min() / 3 if len(positive) else 1.0)
    with axes(ax) as ax:
        ax.scatter(x[~on], table[gain][~on], s=22, color="0.6", linewidths=0, label="beaten by another in both")
        best = pd.DataFrame({"x": x[on], "y": table[gain][on]}).sort_values(["x", "y"])
        ax.step(best["x"], best["y"], where="post", color=COLOURS[0], linewidth=1)
        ax.scatter(best["x"], best["y"], s=40, color=COLOURS[0], linewidths=0, zorder=3, label="on the front")
        for name, at in best.iterrows():
            ax.annotate(name, at, (4, 5), textcoords="offset points", fontsize=9)
        ax.set(xscale="log", xlabel=cost, ylabel=gain)
        _few_log_ticks(ax.xaxis)
        ax.legend(loc="best", fontsize=8)
        beaten = pd.DataFrame({"x": x[~on], "y": table[gain][~on]})
        ax.figure.draw_without_rendering()  # lays it out, so that places on the page are known
        for name, at, down in zip(beaten.index, beaten.to_numpy(), _spread(ax, beaten), strict=True):
            ax.annotate(name, at, (4, down), textcoords="offset points", fontsize=6, color="0.45", va="center")
    return ax.figure


def _spread(ax, points, width=36, height=7):
    """How many points of type below its dot each label of this size stands, lest it cover one that begins near by."""
    at, down, taken = ax.transData.transform(points) * 72 / ax.figure.dpi, np.zeros(len(points)), []
    for i in np.argsort(-at[:, 1], kind="stable"):
        lowest = min((y for x, y in taken if abs(x - at[i, 0]) < width), default=np.inf)
        taken.append((at[i, 0], min(at[i, 1], lowest - height)))
        down[i] = taken[-1][1] - at[i, 1]
    return down


def overview(table, titles):
    """A row for each row of `table`, in its order, and a panel for each of `titles`, {column: (its title, "linear" or
    "log")}: a dot at its value. Zeros on a logarithmic axis stand at its left end, hollow.
    """
    figure, axs = panels(1, len(titles), 11, 0.8 + 0.26 * len(table), sharey=True, squeeze=False)
    with style():
        for ax, (column, (title, scale)) in zip(axs.flat, titles.items(), strict=True):
            values, places = table[column].to_numpy(dtype=float), np.arange(len(table))
            none = (values <= 0) & (scale == "log")
            end = 0 if scale == "linear" else values[~none].min() / 3
            ax.set_xscale(scale)
            ax.hlines(places, end, values, color="0.85", zorder=1)
            ax.scatter(values[~none], places[~none], s=26, color=COLOURS[0], zorder=2)
            ax.scatter(np.full(none.sum(), end), places[none], s=26, facecolor="w", edgecolor=COLOURS[0])
            ax.set_title(title, fontsize=9)
            ax.set_ylim(len(table) - 0.5, -0.5)
            ax.set_yticks(places, table.index)
    return figure


def per_client(runs, ax=None):
    """Each client's accuracy in the last round at the method's own point: a dot a client, a bar at their mean.

    `runs` as in `curves`; of several seeds the first is shown. For a personalized method at a join ratio below 1 these
    are the clients that joined the last round.
    """
    firsts = {name: histories[0] for name, histories in tables.lists(runs).items()}
    with axes(ax, 7, 0.9 + 0.45 * len(firsts)) as ax:
        for row, (name, history) in enumerate(firsts.items()):
            values = 100 * tables.last_per_client(history)
            ax.scatter(values, np.full(len(values), row), s=28, color=look(name)["color"], alpha=0.6, linewidths=0)
            ax.plot([values.mean()] * 2, [row - 0.3, row + 0.3], color="0.15", linewidth=2)
        ax.set(xlabel="accuracy of each client (%); bars: mean over clients", ylim=(len(firsts) - 0.5, -0.5))
        ax.set_yticks(range(len(firsts)), firsts)
    return ax.figure


def save(figure, path, table=None):
    """Writes `figure` as `path`.png, and the numbers behind it, `table`, as `path`.csv."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{path}.png", dpi=110, metadata={"Software": None})
    if table is not None:
        table.to_csv(f"{path}.csv", index=False)


def _legend(runs, point, stats):
    """{method: its label}, in the order of the last of its means; where `point` is None, labels name each one's own."""
    products = {name: histories[0].product for name, histories in tables.lists(runs).items()}
    last = stats["mean"].groupby("method").last().sort_values(ascending=False)
    return {name: name if point else f"{name} ({products[name]})" for name in last.index}


def _band(ax, stats, **look_of):
    """The line of `mean` over the index of `stats`, in a band of one `std`."""
    ax.plot(stats.index, stats["mean"], markersize=5, linewidth=1.6, **look_of)
    low, high = stats["mean"] - stats["std"], stats["mean"] + stats["std"]
    ax.fill_between(stats.index, low, high, color=look_of["color"], alpha=0.15, linewidth=0)


def _title(partition):
    """The scheme with the settings that tell it from its siblings, such as `dirichlet, beta=0.1`."""
    shown = {k: v for k, v in partition.settings.items() if k in ("beta", "classes")}
    shown |= {k: True for k in ("grouped", "balanced", "capped") if partition.settings.get(k)}
    words = [k if v is True else f"{k}={v}" for k, v in shown.items()]
    return ", ".join([partition.name.replace("_", " "), *words])


def _few_log_ticks(axis):
    """1, 2 and 5 times powers of ten on a logarithmic axis, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _whole_ticks(axis, n):
    """Ticks at whole numbers of 0..n-1: all of them up to 20, else about ten."""
    if n <= 20:
        axis.set_ticks(range(n))
    else:
        axis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))


def _disc_area(ax, columns, rows):
    """Area in square points (as scatter wants it) of a disc about as large as a cell of a columns x rows grid."""
    ax.figure.canvas.figure.draw_without_rendering()  # lays the figure out
    box = ax.get_window_extent()
    cell = 72 / ax.figure.dpi * np.sqrt(box.width / columns * box.height / rows)
    return np.clip(1.1 * cell, 4, 24) ** 2


def _round_counts(largest):
    """Up to three round numbers for a legend: the last of 1, 2, 5, 10, 20, ... up to `largest`, its 5th and 25th part.

    >>> _round_counts(1797), _round_counts(60), _round_counts(1)
    ([40, 200, 1000], [2, 10, 50], [1])
    """
    top = max(m * 10**e for e in range(len(str(largest))) for m in (1, 2, 5) if m * 10**e <= largest)
    return sorted({top // 25, top // 5, top} - {0})


def images(dataset, rows, ax=None):
    """Samples as pictures, a row for each of `rows`: {its label: indices into `dataset`, as many in every row}."""
    pictures = dataset.x[np.stack(list(rows.values()))].numpy()  # [rows, columns, C, H, W]
    lines, columns, channels, height, width = pictures.shape
    edge = max(1, height // 14)
    framed = np.ones((lines, height + edge, columns, width + edge, channels))
    framed[:, :height, :, :width] = pictures.transpose(0, 3, 1, 4, 2) / 2 + 0.5
    mosaic = framed.reshape(lines * (height + edge), columns * (width + edge), channels)[..., :3]
    with axes(ax, 1.5 + 0.45 * columns, 0.3 + 0.45 * lines) as ax:
        ax.imshow(mosaic.squeeze(), cmap="gray", vmin=0, vmax=1)
        ax.set_yticks(np.arange(lines) * (height + edge) + height / 2, rows)
        ax.tick_params(left=False)
        ax.set_xticks([])
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
    return ax.figure


def lines(table, x, y, by=None, ax=None):
    """`y` against the positive numbers `x` on a logarithmic axis: the mean of rows with equal `x`, in a band of one
    standard deviation; with `by`, a line for each of that column's values, which are methods or variants of them.
    """
    parts = {None: table} if by is None else dict(list(table.groupby(by, sort=False)))
    with axes(ax) as ax:
        for name, part in parts.items():
            stats = part.groupby(x)[y].agg(["mean", "std"]).fillna(0)
            _band(ax, stats, label=name, **(look(name) if by else {"color": COLOURS[0], "marker": "o"}))
        ax.set(xscale="log", xlabel=x, ylabel=y)
        ax.set_xticks(values := sorted(set(table[x])), [f"{value:g}" for value in values])
        ax.set_xticks([], minor=True)
        if by:
            ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure


def watched(runs, name="W", ax=None):
    """A watched value over rounds: above, how its elements are spread; below, the shares that are exactly 0 and 1.

    `runs` is {label: a History, or a list of them, one a seed}, a column each; all numbers are means over seeds.
    `ax`, if given, is an array of axes [2, columns].
    """
    table, labels = tables.watched(runs, name), list(runs)
    with style():
        if ax is None:
            shared = {"sharex": True, "sharey": "row", "squeeze": False, "height_ratios": (2.2, 1)}
            ax = panels(2, len(labels), 4.6 * len(labels) + 1.4, 4.6, **shared)[1]
        for label, (top, low) in zip(labels, ax.T, strict=True):
            t = table[table["method"] == label].set_index("round")
            top.fill_between(t.index, t["q05"], t["q95"], color=COLOURS[2], alpha=0.18, linewidth=0, label="5 to 95 %")
            top.fill_between(t.index, t["q25"], t["q75"], color=COLOURS[2], alpha=0.4, linewidth=0, label="25 to 75 %")
            top.plot(t.index, t["q50"], color=COLOURS[2], linewidth=1.8, label="median")
            top.plot(t.index, t["mean"], color="0.15", linewidth=1.6, linestyle="--", label="mean")
            top.set(title=label, ylim=(-0.03, 1.03))
            for share, colour, line in (("share_1", COLOURS[0], "-"), ("share_0", COLOURS[1], "--")):
                text = f"exactly {share[-1]}"
                low.plot(t.index, 100 * t[share], color=colour, linestyle=line, linewidth=1.6, label=text)
            low.set(xlabel="round", ylim=(0, None))
            low.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax[0, 0].set_ylabel(f"elements of ${name}$")
        ax[1, 0].set_ylabel("share (%)")
        for last in ax[:, -1]:
            last.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        ax[0, 0].figure.canvas.figure.draw_without_rendering()
    return ax[0, 0].figure


def by_setting(runs, xlabel, fixed=(), ax=None):
    """Accuracy in the last round before and after local training, for each setting: mean over seeds ± one standard
    deviation. `runs` is {label: a History, or a list of them}; labels in `fixed` are set apart at the right.
    """
    table = tables.by_setting(runs)
    labels = [label for label in runs if label not in fixed] + list(fixed)
    place = {label: i + 0.4 * (i + 1 - len(labels) + len(fixed)) * (label in fixed) for i, label in enumerate(labels)}
    with axes(ax) as ax:
        for point, colour, marker, shift in (("before", COLOURS[0], "o", -0.05), ("after", COLOURS[1], "s", 0.05)):
            stats = (100 * table.groupby("setting")[point].agg(["mean", "std"]).fillna(0)).loc[labels]
            for part in ([x for x in labels if x not in fixed], list(fixed)):
                x, rows = [place[label] + shift for label in part], stats.loc[part]
                line = {"color": colour, "marker": marker, "linestyle": "-" if part and part[0] not in fixed else ""}
                named = {"label": f"{point} local training"} if line["linestyle"] else {}
                ax.errorbar(x, rows["mean"], rows["std"], capsize=3, linewidth=1.5, markersize=6, **line, **named)
        if fixed:
            ax.axvline(place[fixed[0]] - 0.7, color="0.7", linewidth=1)
        ax.set_xticks(list(place.values()), labels)
        ax.set(xlabel=xlabel, ylabel="accuracy, mean over clients (%)")
        ax.grid(axis="x", visible=False)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return ax.figure


def heat(values, ax=None, low=None, high=None, label=None):
    """A matrix over pairs of clients, [N, N] (a tensor, or an array), as colours from `low` to `high`, by default those
    that occur; NaN is grey. With `label`, a bar beside it tells what the colours mean.
    """
    values = np.ma.masked_invalid(np.asarray(values))
    with axes(ax, 5.2, 4.2) as ax:
        colours = mpl.colormaps["viridis"].with_extremes(bad="0.85")
        image = ax.imshow(values, cmap=colours, vmin=low, vmax=high)
        ax.set(xlabel="client $j$", ylabel="client $i$")
        for axis, n in ((ax.xaxis, values.shape[1]), (ax.yaxis, values.shape[0])):
            axis.set_major_locator(MaxNLocator(min(n, 5), integer=True))
        ax.grid(visible=False)
        ax.spines[:].set_visible(False)
        if label:
            ax.figure.colorbar(image, ax=ax, label=label).outline.set_visible(False)
    return ax.figure


def loglog(table, x, y, by, ax=None, slopes=True):
    """`y` against `x`, both logarithmic, a line for each value of the column `by`, an engine or anything else; with
    `slopes` the legend tells the exponent that fits it: at 1, or -1, in proportion, as the dotted line; 0: no matter.
    """
    with axes(ax, 5, 4) as ax:
        for i, (name, part) in enumerate(table.groupby(by, sort=False)):
            look_of = ENGINES.get(name, {"color": COLOURS[i % len(COLOURS)], "marker": "osD^vPX"[i % 7]})
            label = f"{name}: {slope(part[x], part[y]):.2f}" if slopes else f"{name}"
            ax.plot(part[x], part[y], label=label, markersize=5, linewidth=1.6, **look_of)
        ax.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        if slopes:
            ends, start = np.array([table[x].min(), table[x].max()]), part.iloc[0]
            power = np.sign(slope(part[x], part[y]))
            until = np.clip(table[y].max() / start[y], 1, None) if power > 0 else start[y] / table[y].min()
            ends[1] = min(ends[1], ends[0] * until)
            ax.plot(ends, start[y] * (ends / ends[0]) ** power, color="0.5", linewidth=1, linestyle=":")
        ax.set_xticks(values := sorted(set(table[x])), [f"{value:,}" for value in values], fontsize=8)
        ax.set_xticks([], minor=True)
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1)} if slopes else {}
        ax.legend(title="exponent" if slopes else by, fontsize=8, title_fontsize=8, alignment="left", **place)
    return ax.figure


def slope(x, y):
    """The exponent p of the power law y = c x^p that fits best, by least squares of the logarithms.

    >>> round(slope([1, 10, 100], [2, 20, 200]), 6)
    1.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def scaling(table, title):
    """What `bench.scaling` found: the quickest round's seconds against each thing that grows, a panel each."""
    groups = dict(list(table.groupby("grows", sort=False)))
    figure, axs = panels(1, len(groups), 3.2 * len(groups), 4.4, sharey=True, squeeze=False)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    for ax, (what, part) in zip(axs.flat, groups.items(), strict=True):
        named = part.drop(columns="seconds").rename(columns={"value": what, "quickest": "seconds a round"})
        loglog(named, what, "seconds a round", "engine", ax)
        ax.set_ylabel("seconds a round" if ax is axs[0, 0] else "")
    return figure


def engines(table, title):
    """What `bench.bench` found: the quickest round's seconds, a panel for each data set, model, number of clients, and
    with evaluation and without; a row for each method, a mark for each engine.
    """
    table = table.assign(kind=table["engine"].str.partition(" ")[0])
    groups = dict(list(table.groupby(["model", "data", "clients", "evaluation"], sort=False)))
    columns, counts = min(3, len(groups)), [part["method"].nunique() for part in groups.values()]
    heights = [1.6 + 0.22 * max(counts[k : k + columns]) for k in range(0, len(counts), columns)]
    shape = {"squeeze": False, "height_ratios": heights}
    figure, axs = panels(len(heights), columns, 4 * columns + 1, sum(heights) + 0.3, **shape)
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    with style():
        for ax, ((model, name, clients, scored), part) in zip(axs.flat, groups.items(), strict=False):
            methods = list(dict.fromkeys(part["method"]))
            for kind, own in part.groupby("kind", sort=False):
                ring = {"facecolor": "none", "s": 90} if kind == "auto" else {"s": 28, "alpha": 0.8, "linewidths": 0}
                ax.scatter(own["quickest"], [methods.index(m) for m in own["method"]], **ENGINES[kind], **ring)
            ax.set_title(f"{model}, {name}, {clients} clients{', with evaluation' * scored}", fontsize=9)
            ax.set(xscale="log", xlabel="seconds a round", ylim=(len(methods) - 0.5, -0.5))
            ax.set_yticks(range(len(methods)), methods, fontsize=8)
            _few_log_ticks(ax.xaxis)
            ax.tick_params(axis="x", labelsize=8)
        for ax in axs.flat[len(groups) :]:
            ax.set_axis_off()
        for kind in [kind for kind in ENGINES if kind in set(table["kind"])]:  # for the legend of all
            ring = {"facecolor": "none", "s": 90} if kind == "auto" else {"s": 28, "linewidths": 0}
            axs[0, 0].scatter([], [], label=kind, **ENGINES[kind], **ring)
        figure.legend(loc="outside right upper", fontsize=9)
    return figure


def stacks(batches, size, ax=None, fill=True):
    """Which clients' batches are one call, of samples [clients, calls] that are 0 where there is none: a row a client,
    a column a call; blue are samples, orange is what fills a batch up to its `size`, if they are filled up.
    """
    with axes(ax, 6, 4) as ax:
        clients, calls = batches.shape
        for j, k in zip(*np.nonzero(batches), strict=True):
            left, own = k + 0.58, 0.84 * batches[j, k] / size
            ax.barh(j, own, 0.84, left=left, color=COLOURS[0], linewidth=0)
            if fill:
                ax.barh(j, 0.84 - own, 0.84, left=left + own, color=COLOURS[1], alpha=0.5, linewidth=0)
        ax.set(xlim=(0.4, calls + 0.6), ylim=(clients - 0.4, -0.6), xlabel="call", ylabel="client, most batches on top")
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.grid(visible=False)
    return ax.figure


def panels(rows, columns, width, height, title=None, **options):
    """A new figure of rows x columns axes in the house style, and its axes; `options` are those of plt.subplots."""
    with style():
        figure, axs = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)
        if title:
            figure.suptitle(title, x=0.01, ha="left")
        plt.close(figure)  # pyplot forgets it; the figure itself lives as long as the caller holds it
    return figure, axs
