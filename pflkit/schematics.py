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


def panel(ax, x, y, width, height, colour):
    """A box with round corners: a place, such as the server."""
    shape = mpl.patches.FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=0.2", fc=colour, ec="0.6")
    ax.add_patch(shape)


def block(ax, x, y, text):
    """An extractor: a trapezium from wide (inputs) to narrow (features)."""
    corners = [(x, y), (x, y + 0.9), (x + 1.2, y + 0.7), (x + 1.2, y + 0.2)]
    ax.add_patch(mpl.patches.Polygon(corners, fc="0.82", ec="0.4"))
    ax.text(x + 0.55, y + 0.45, text, ha="center", va="center")


def cells(ax, x, y, colours, above="", below="", side=0.3):
    """A matrix as coloured cells [rows, columns, 3], its lower left corner at (x, y), with text above and below."""
    rows, columns, _ = colours.shape
    for row, column in np.ndindex(rows, columns):
        corner = x + side * column, y + side * (rows - 1 - row)
        ax.add_patch(mpl.patches.Rectangle(corner, side, side, fc=colours[row, column], ec="w", linewidth=1))
    for text, at in ((above, y + side * rows + 0.3), (below, y - 0.3)):
        ax.text(x + side * columns / 2, at, text, ha="center", va="center")


def arrow(ax, start, end, text, at):
    """An arrow, and its text centred at `at`."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "0.25", "linewidth": 1.3})
    ax.text(*at, text, ha="center", va="center", fontsize=9, linespacing=1.2)
