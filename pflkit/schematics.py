"""The methods' rounds as pictures: what travels, what a client keeps, what is computed where; drawn, not measured."""

import matplotlib as mpl
import numpy as np

from pflkit.plots import COLOURS, axes


def fedah(ax=None):
    """FedAH's round as a picture: what travels, what a client keeps, and its head as a mix of two, cell by cell."""
    blue, orange = (np.array(mpl.colors.to_rgb(COLOURS[i])) for i in (0, 1))
    share = np.array([[1.0, 0.8, 1.0, 0.3], [0.0, 1.0, 0.6, 1.0], [0.9, 0.1, 1.0, 0.5]])
    glob, own = (np.broadcast_to(0.35 + 0.65 * colour, (3, 4, 3)) for colour in (blue, orange))
    mix = own + (glob - own) * share[..., None]
    with axes(ax, 10, 5.4) as ax:
        ax.set(xlim=(0, 13.3), ylim=(0, 7.1), aspect="equal")
        ax.set_axis_off()
        for shift in (0.36, 0.18, 0):
            panel(ax, 4.2 + shift, 0.1 + shift, 8.6, 6.3, "0.99" if shift == 0 else "0.95")
        panel(ax, 0.1, 1.5, 2.3, 4.9, "0.97")
        ax.text(1.25, 6.0, "server", ha="center", weight="bold")
        ax.text(4.5, 6.0, "client $i$; all clients work at the same time", weight="bold")
        block(ax, 0.65, 4.75, "$r^t$")
        cells(ax, 0.65, 3.4, glob, below="$h^t$")
        ax.text(1.25, 2.15, "7  average\nall $r_i$, $h_i$", ha="center", va="center", fontsize=9)
        cells(ax, 5.1, 4.2, glob, above="$h^t$  global head")
        cells(ax, 8.0, 4.2, np.repeat(1 - 0.75 * share[..., None], 3, 2), above="2  learn $W_i$")
        cells(ax, 10.8, 4.2, own, above="$h_i$  own head")
        for row, column in np.ndindex(3, 4):
            at = 8.15 + 0.3 * column, 4.35 + 0.3 * (2 - row)
            text, colour = f"{share[row, column]:g}".lstrip("0") or "0", "w" if share[row, column] > 0.55 else "k"
            ax.text(*at, text, ha="center", va="center", fontsize=6, color=colour)
        block(ax, 5.1, 1.6, "$r_i$")
        ax.text(5.7, 1.3, "trained extractor", ha="center", va="center")
        cells(ax, 8.0, 1.6, mix, below=r"$\hat{h}_i$  mixed head")
        cells(ax, 10.8, 1.6, mix * 0.9, below="$h_i$  trained head")
        ax.plot([11.4, 11.4, 5.7], [1.0, 0.4, 0.4], color="0.25", linewidth=1.3)
        for start, end, text, at in (
            ((2.4, 5.0), (4.2, 5.0), "1  send\n$r^t$, $h^t$", (3.3, 5.5)),
            ((6.3, 4.15), (7.9, 2.6), "", (0, 0)),
            ((10.7, 4.15), (9.3, 2.6), "", (0, 0)),
            ((8.6, 4.1), (8.6, 2.6), "3  mix", (9.05, 3.6)),
            ((9.3, 2.05), (10.7, 2.05), "4  train\nthe head", (10.0, 1.6)),
            ((5.7, 0.4), (5.7, 1.1), "5  train the extractor under that head", (8.6, 0.62)),
            ((11.4, 2.6), (11.4, 4.1), "6  keep for\nnext round", (12.1, 3.35)),
            ((4.2, 2.05), (2.4, 2.05), "6  upload\n$r_i$, $h_i$", (3.3, 1.55)),
        ):
            arrow(ax, start, end, text, at)
    return ax.figure


def fedapa(ax=None):
    """FedAPA's round as a picture: the server's extractors mixed by a row of A, and how that row learns."""
    A = np.array([[0.5, 0.3, 0.1, 0.1], [0.25, 0.5, 0.05, 0.2], [0.1, 0.0, 0.5, 0.4], [0.1, 0.1, 0.3, 0.5]])
    green, orange = (0.35 + 0.65 * np.array(mpl.colors.to_rgb(COLOURS[i])) for i in (2, 1))
    with axes(ax, 10, 5.4) as ax:
        ax.set(xlim=(0, 13.3), ylim=(0, 7.1), aspect="equal")
        ax.set_axis_off()
        panel(ax, 0.1, 0.1, 7.3, 6.8, "0.97")
        for shift in (0.36, 0.18, 0):
            panel(ax, 8.8 + shift, 0.1 + shift, 4.1, 6.3, "0.99" if shift == 0 else "0.95")
        ax.text(0.4, 6.5, "server", weight="bold")
        ax.text(9.1, 6.0, "client $i$; all work at once", weight="bold")
        cells(ax, 0.7, 4.2, 1 - 1.5 * A[..., None] * (1 - green), above="$A$: a row a client", side=0.4)
        for row, column in np.ndindex(4, 4):
            text = f"{A[row, column]:g}".lstrip("0") or "0"
            ax.text(0.9 + 0.4 * column, 4.4 + 0.4 * (3 - row), text, ha="center", va="center", fontsize=7)
        ax.add_patch(mpl.patches.Rectangle((0.7, 5.0), 1.6, 0.4, fill=False, ec="k", linewidth=1.5))
        ax.text(0.5, 5.2, "$i$", ha="center", va="center")
        for j, (x, y) in enumerate(((2.65, 5.1), (4.0, 5.1), (2.65, 4.1), (4.0, 4.1)), 1):
            block(ax, x, y, rf"$\theta_{j}$")
        block(ax, 5.9, 4.6, r"$\bar{\theta}_i$")
        ax.text(3.9, 3.3, r"1  mix all extractors by row $i$:  $\bar{\theta}_i = \sum_j a_{ij} \theta_j$", ha="center")
        steps = (
            r"4  one step down  $P(A_i) = \frac{1}{2} \Vert \bar{\theta}_i(A_i) - \theta'_i \Vert^2$",
            r"5  clip to [0, 1],  reset  $a_{ii} \leftarrow \frac{1}{2}$",
            r"6  divide the row by its sum;  store $\theta'_i$",
        )
        for y, text in zip((2.2, 1.5, 0.8), steps, strict=True):
            ax.text(0.8, y, text, va="center")
        block(ax, 9.2, 4.6, r"$\bar{\theta}_i$")
        own = np.broadcast_to(orange, (3, 4, 3))
        cells(ax, 10.75, 4.6, own, below=r"$\varphi_i$  own head")
        block(ax, 9.2, 1.6, r"$\theta'_i$")
        cells(ax, 10.75, 1.6, own * 0.9, below=r"$\varphi_i$  trained")
        ax.plot([0.7, 0.45, 0.45], [2.2, 2.2, 4.7], color="0.25", linewidth=1.3)
        for start, end, text, at in (
            ((5.25, 5.05), (5.85, 5.05), "", (0, 0)),
            ((7.2, 5.05), (9.1, 5.05), "1  send", (8.1, 5.35)),
            ((10.4, 4.2), (10.4, 2.8), "2  train both\ntogether", (9.6, 3.5)),
            ((11.95, 2.55), (11.95, 4.1), "3  keep", (12.4, 3.3)),
            ((9.1, 2.05), (7.4, 2.05), "3  upload", (8.1, 2.35)),
            ((0.45, 4.3), (0.45, 5.0), "", (0, 0)),
        ):
            arrow(ax, start, end, text, at)
    return ax.figure


def fedgh(ax=None):
    """FedGH's round as a picture: two extractors of different sizes, one header, and the class means that train it."""
    blue, orange = (np.array(mpl.colors.to_rgb(COLOURS[i])) for i in (0, 1))
    pale = {s: 0.35 + 0.65 * np.array(mpl.colors.to_rgb(COLOURS[i])) for s, i in ((0, 2), (1, 4), (2, 8))}
    glob, step = (np.broadcast_to(0.35 + 0.65 * colour, (3, 4, 3)) for colour in (blue, 0.8 * blue))
    own = np.broadcast_to(0.35 + 0.65 * (0.6 * blue + 0.4 * orange), (3, 4, 3))
    with axes(ax, 10, 5.6) as ax:
        ax.set(xlim=(0, 13.3), ylim=(0, 7.4), aspect="equal")
        ax.set_axis_off()
        panel(ax, 0.1, 0.1, 3.6, 7.1, "0.97")
        ax.text(1.9, 6.8, "server", ha="center", weight="bold")
        cells(ax, 1.3, 5.2, glob, above=r"$\varphi^t$  header")
        pairs(ax, 1.3, 2.75, [(s, pale[s]) for s in (0, 2, 1, 2)])
        ax.text(1.9, 4.3, "class means", ha="center", fontsize=9)
        cells(ax, 1.3, 0.75, step, below=r"$\varphi^{t+1}$")
        for y, who, size, classes in ((3.8, "client 1", (2.0, 2.1), (0, 2)), (0.1, "client 2", (1.1, 1.2), (1, 2))):
            panel(ax, 5.4, y, 7.7, 3.4, "0.99")
            i = who[-1]
            ax.text(5.6, y + 3.0, f"{who}: {'a large' if i == '1' else 'a small'} extractor", weight="bold")
            block(ax, 5.8, y + 1.6 - size[1] / 2, rf"$\theta_{i}$", *size)
            arrow(ax, (5.8 + size[0], y + 1.6), (8.9, y + 1.6), "$z$", (8.35, y + 1.8))
            cells(ax, 10.3, y + 2.1, own)
            ax.text(11.7, y + 2.55, rf"$\varphi_{i}$", va="center")
            arrow(ax, (8.9, y + 1.6), (10.2, y + 2.5), "2  train both\nby the loss", (8.9, y + 2.5))
            pairs(ax, 10.3, y + 0.55, [(s, pale[s]) for s in classes])
            ax.text(12.0, y + 0.9, rf"$\bar{{z}}_{i}^s$", va="center")
            arrow(ax, (8.9, y + 1.6), (10.2, y + 0.9), "3  mean over\neach class $s$", (8.9, y + 0.75))
            arrow(ax, (3.7, y + 2.6), (5.4, y + 2.6), r"1  send $\varphi^t$", (4.55, y + 2.85))
            arrow(ax, (5.4, y + 0.6), (3.7, y + 0.6), "4  upload\nclass means", (4.55, y + 1.05))
            ax.text(6.5, y + 0.2, rf"4  keep $\theta_{i}$", ha="center", fontsize=9)
        arrow(ax, (1.0, 5.2), (1.0, 1.65), "5  SGD,\npair\nafter\npair", (0.52, 3.4))
    return ax.figure


def panel(ax, x, y, width, height, colour):
    """A box with round corners: a place, such as the server."""
    shape = mpl.patches.FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.2", fc=colour, ec="0.6")
    ax.add_patch(shape)


def block(ax, x, y, text, wide=1.2, high=0.9):
    """An extractor: a trapezium, `high` at the inputs; its narrow end, the features, is the same for all."""
    middle = y + high / 2
    corners = [(x, y), (x, y + high), (x + wide, middle + 0.25), (x + wide, middle - 0.25)]
    ax.add_patch(mpl.patches.Polygon(corners, fc="0.82", ec="0.4"))
    ax.text(x + 0.46 * wide, middle, text, ha="center", va="center")


def cells(ax, x, y, colours, above="", below="", side=0.3):
    """A matrix as coloured cells [rows, columns, 3], its lower left corner at (x, y), with text above and below."""
    rows, columns, _ = colours.shape
    for row, column in np.ndindex(rows, columns):
        corner = x + side * column, y + side * (rows - 1 - row)
        ax.add_patch(mpl.patches.Rectangle(corner, side, side, fc=colours[row, column], ec="w", linewidth=1))
    for text, at in ((above, y + side * rows + 0.3), (below, y - 0.3)):
        ax.text(x + side * columns / 2, at, text, ha="center", va="center")


def pairs(ax, x, y, of_classes):
    """Class means with their labels: a row of cells for each (label, colour), upwards from (x, y)."""
    for row, (label, colour) in enumerate(of_classes):
        cells(ax, x, y + 0.35 * row, np.broadcast_to(colour, (1, 4, 3)))
        ax.text(x + 1.35, y + 0.35 * row + 0.15, f"{label}", va="center", fontsize=8)


def arrow(ax, start, end, text, at):
    """An arrow, and its text centred at `at`."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "0.25", "linewidth": 1.3})
    ax.text(*at, text, ha="center", va="center", fontsize=9, linespacing=1.2)
