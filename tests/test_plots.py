"""Figures: what they show is what the partition holds, they are legible, and they leave nothing behind."""

import io
from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch

from pflkit import data, partition, plots, tables
from pflkit.experiment import History
from pflkit.methods import FAMILIES

HAND = partition.custom([0, 0, 1, 1, 2, 2, 2, 0], train=[[0, 1], [4, 5]], test=[[2], [6, 3]])
SETTINGS = [(10, 10), (20, 10), (100, 10), (20, 100), (100, 100)]
BOTH = pytest.mark.parametrize("draw", [plots.bubbles, plots.sizes])


@pytest.fixture(autouse=True)
def agg():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def big(clients, classes):
    return partition.dirichlet(np.arange(20_000) % classes, clients, beta=0.3)


def test_bubble_areas_are_in_proportion_to_the_samples():
    ax = plots.bubbles(HAND).axes[0]
    discs, *legend = ax.collections
    assert discs.get_offsets().tolist() == [[0, 0], [0, 1], [1, 1], [1, 2]]
    assert discs.get_sizes() / discs.get_sizes()[1] == pytest.approx([2, 1, 1, 3])
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["2"]
    assert legend[0].get_sizes()[0] == pytest.approx(discs.get_sizes()[0])


@pytest.mark.parametrize(("clients", "classes"), [(10, 10), (20, 10), (100, 100)])
def test_the_largest_disc_fills_its_cell_but_little_more(clients, classes):
    fig = plots.bubbles(big(clients, classes))
    box = fig.axes[0].get_window_extent()
    cell = 72 / fig.dpi * np.sqrt(box.width / (clients + 0.4) * box.height / (classes + 0.4))  # side in points
    assert 0.6 < np.sqrt(fig.axes[0].collections[0].get_sizes().max()) / cell < 1.25


def test_a_single_sample_beside_many_is_still_seen():
    ax = plots.bubbles(partition.iid([0] + [1] * 5000, 1)).axes[0]
    assert ax.collections[0].get_sizes().min() >= 2


def test_bars_stack_training_and_test_samples():
    ax = plots.sizes(HAND).axes[0]
    train, test = ax.containers
    assert [bar.get_height() for bar in train] == [2, 2]
    assert [(bar.get_y(), bar.get_height()) for bar in test] == [(2, 1), (2, 2)]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["train", "test"]


@BOTH
@pytest.mark.parametrize(("clients", "classes"), SETTINGS)
def test_labels_are_whole_numbers_that_do_not_overlap(draw, clients, classes):
    fig = draw(big(clients, classes))
    fig.savefig(io.BytesIO())
    ax = fig.axes[0]
    for axis, side in ((ax.xaxis, 0), (ax.yaxis, 1)):
        low, high = sorted(axis.get_view_interval())
        ticks = [t for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
        assert len(ticks) >= 4
        assert all(float(t.get_loc()).is_integer() for t in ticks)
        boxes = [t.label1.get_window_extent().get_points()[:, side] for t in ticks]
        assert all(a[1] < b[0] for a, b in pairwise(boxes))
    inside = fig.bbox.get_points()
    for artist in (ax.get_legend(), ax.xaxis.label, ax.yaxis.label, ax.title):
        box = artist.get_window_extent().get_points()
        assert (box[0] >= inside[0] - 1).all() and (box[1] <= inside[1] + 1).all()


@BOTH
def test_no_figure_is_left_open_and_no_setting_changed(draw):
    with mpl.rc_context({"figure.dpi": 77, "axes.spines.top": True, "axes.grid": False}):
        before = dict(mpl.rcParams)
        figures = [draw(HAND) for _ in range(25)]  # pyplot warns at more than 20 open ones
        assert plt.get_fignums() == [] and len(set(map(id, figures))) == 25
        assert dict(mpl.rcParams) == before


@BOTH
def test_draws_on_given_axes(draw):
    fig, (left, right) = plt.subplots(1, 2)
    assert draw(HAND, ax=right) is fig
    assert right.get_xlabel() == "client" and not left.has_data()
    assert plt.get_fignums() == [fig.number]


@BOTH
def test_draws_on_a_subfigure(draw):
    sub = plt.figure().subfigures(1, 2)[0]
    assert draw(HAND, ax=sub.subplots()) is sub


def test_titles_name_the_scheme_and_its_variant():
    y = np.arange(400) % 10
    cases = [
        (partition.dirichlet(y, 4, 0.5, capped=True), "dirichlet, beta=0.5, capped"),
        (partition.pathological(y, 5), "pathological, classes=2, grouped"),
        (partition.classes_per_client(y, 5), "classes per client, classes=2"),
        (partition.iid(y, 4), "iid"),
    ]
    for p, title in cases:
        assert plots.bubbles(p).axes[0].get_title(loc="left") == title


def test_style_is_a_context():
    before = mpl.rcParams["axes.spines.top"]
    with plots.style():
        assert not plt.figure().subplots().spines["top"].get_visible()
    assert mpl.rcParams["axes.spines.top"] == before


def test_pictures_lie_in_rows_with_a_frame_between():
    x = torch.stack([torch.full((1, 2, 3), value) for value in (-1.0, 0.0, 1.0)])
    pool = data.Dataset("three", x, np.array([0, 1, 0]), (0, 1))
    ax = plots.images(pool, {"first": [0, 1], "second": [2, 0]}).axes[0]
    black, grey, white = [[0.0] * 3], [[0.5] * 3], [[1.0] * 3]
    edge = [[1.0]]
    rows = [np.hstack([black * 2, edge * 2, grey * 2, edge * 2]), np.ones((1, 8))]
    rows += [np.hstack([white * 2, edge * 2, black * 2, edge * 2]), np.ones((1, 8))]
    assert ax.images[0].get_array().tolist() == np.vstack(rows).tolist()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "second"]


def test_pictures_in_colour():
    x = torch.rand(2, 3, 20, 20, generator=torch.Generator().manual_seed(0)) * 2 - 1
    shown = plots.images(data.Dataset("two", x, np.array([0, 1]), (0, 1)), {"a": [0], "b": [1]}).axes[0].images[0]
    np.testing.assert_allclose(shown.get_array()[21:41, :20], x[1].permute(1, 2, 0) / 2 + 0.5, rtol=1e-6)


def test_lines_show_mean_and_spread_at_each_value():
    table = pd.DataFrame({"beta": [0.1, 0.1, 10, 10], "accuracy": [60.0, 80.0, 90.0, 90.0], "method": "local"})
    for by in (None, "method"):
        ax = plots.lines(table, "beta", "accuracy", by).axes[0]
        (line,) = ax.lines
        assert line.get_xydata().tolist() == [[0.1, 70], [10, 90]]
        band = ax.collections[0].get_paths()[0].vertices
        edges = {y for x, y in band if x == 0.1}
        assert (min(edges), max(edges)) == pytest.approx((70 - np.sqrt(200), 70 + np.sqrt(200)))
        assert {y for x, y in band if x == 10} == {90}
        assert [label.get_text() for label in ax.get_xticklabels()] == ["0.1", "10"]
        assert ax.get_xscale() == "log"
    assert line.get_color() == plots.look("local")["color"]


def test_heat_shows_the_matrix_and_leaves_out_what_is_not_a_number():
    values = torch.tensor([[float("nan"), 2.0], [0.5, float("nan")]])
    figure = plots.heat(values, low=0, high=4, label="share")
    ax, bar = figure.axes
    shown = ax.images[0]
    assert shown.get_array().mask.tolist() == [[True, False], [False, True]]
    assert shown.get_array().compressed().tolist() == [2.0, 0.5]
    assert shown.get_clim() == (0, 4)
    assert bar.get_ylabel() == "share"
    colours = shown.to_rgba(shown.get_array())
    assert colours[0, 0] == pytest.approx([0.85, 0.85, 0.85, 1])
    assert len(plots.heat(values.nan_to_num().numpy()).axes) == 1


def test_variants_of_a_method_are_told_apart_by_their_lines():
    looks = [plots.look(name) for name in ("fedgh", "fedgh, header_lr=0.1", "fedgh, header_lr=0", "fedgh, epochs=10")]
    assert [look["linestyle"] for look in looks] == ["-", "--", ":", "--"]
    assert {(look["color"], look["marker"]) for look in looks} == {(looks[0]["color"], looks[0]["marker"])}


def bytes_history(rounds, up, down, accuracies):
    """Rounds of `up` and `down` bytes; accuracies after 1, 2, ... rounds, None where none was taken."""
    table = pd.DataFrame({"round": range(1, rounds + 2), "joined": [*[2.0] * rounds, np.nan]})
    table["bytes_up"], table["bytes_down"] = [*[up] * rounds, np.nan], [*[down] * rounds, np.nan]
    table["after"], table["before"] = [*accuracies, np.nan], [0.1, *accuracies]
    return History({}, "after", table.astype(float), pd.DataFrame(), pd.DataFrame(), None, None)


def test_accuracy_against_bytes():
    """Two seeds that send 1 + 3 and 2 + 6 MB a round: 6 MB on average; what sends nothing is a level line."""
    runs = {"fedgh": [bytes_history(2, k * 1e6, k * 3e6, [0.5 + 0.1 * k, 0.8]) for k in (1, 2)]}
    runs["local"] = bytes_history(2, 0, 0, [0.4, 0.9])
    table = tables.against_bytes(runs)
    assert table[table.method == "fedgh"].bytes.tolist() == [4e6, 8e6, 8e6, 16e6]
    assert table.columns.tolist() == ["method", "seed", "rounds", "bytes", "accuracy"]
    ax = plots.against_bytes(runs).axes[0]
    level, line = ax.lines
    np.testing.assert_allclose(line.get_xydata(), [[6, 65], [12, 80]])
    assert set(level.get_ydata()) == {90}
    assert ax.get_xscale() == "log"
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == ["local (after): no bytes", "fedgh (after)"]
    assert line.get_color() == plots.look("fedgh")["color"]


def test_before_anything_was_sent_there_is_an_accuracy_but_no_place_for_it():
    run = bytes_history(2, 1e6, 3e6, [0.5, 0.8])
    run.rounds.loc[1, "before"] = np.nan  # a round that was not scored: its bytes count all the same
    table = tables.against_bytes({"fedgh": run}, "before")
    assert table[["rounds", "bytes", "accuracy"]].to_numpy().tolist() == [[0, 0, 0.1], [2, 8e6, 0.8]]
    ax = plots.against_bytes({"fedgh": run}, "before").axes[0]
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[8, 80]])
    assert ax.get_legend().get_texts()[0].get_text() == "fedgh"


def test_panels_are_one_figure_that_pyplot_does_not_hold():
    figure, axs = plots.panels(1, 2, 8, 3, "Title", sharey=True)
    assert figure.axes == list(axs)
    assert figure.get_size_inches().tolist() == [8, 3]
    assert figure.get_suptitle() == "Title"
    assert plt.get_fignums() == []


def test_curves_of_global_models():
    """Before round 1, 2 and at the end; methods that have none are refused by name, and nothing is drawn."""
    runs = {name: bytes_history(2, 1e6, 3e6, [0.5, 0.8]) for name in ("ditto", "fedavg")}
    runs["ditto"].rounds["before_global"] = [0.1, 0.3, 0.4]
    ax = plots.curves({"ditto": runs["ditto"]}, "before_global").axes[0]
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[0, 10], [1, 30], [2, 40]])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ditto"]
    assert len(plots.curves(runs).axes[0].lines) == 2  # each at its own point
    level = plots.against_bytes({"ditto": runs["ditto"]}, "before_global").axes[0].lines[0]
    np.testing.assert_allclose(level.get_xydata(), [[4, 30], [8, 40]])
    for draw in (plots.curves, plots.against_bytes):
        ax = plt.figure().subplots()
        with pytest.raises(ValueError, match=r"^fedavg: point='before_global': must be one of 'before', 'after'$"):
            draw(runs, "before_global", ax=ax)
        assert not ax.has_data()


# --- all methods -----------------------------------------------------------------------------------------------------


TABLE = pd.DataFrame({"MB": [0.0, 2.0, 3.0, 3.0], "%": [50.0, 70.0, 60.0, 90.0]}, ["none", "some", "worse", "most"])


def test_the_front_is_what_nothing_beats():
    assert tables.front(TABLE, "MB", "%").tolist() == [True, True, False, True]
    alike = pd.concat([TABLE, TABLE.rename(index=str.upper)])  # of equals none beats the other
    assert tables.front(alike, "MB", "%").tolist() == [True, True, False, True] * 2


def test_pareto_names_everyone_and_joins_the_front():
    ax = plots.pareto(TABLE, "MB", "%").axes[0]
    assert [text.get_text() for text in ax.texts] == ["none", "some", "most", "worse"]
    (steps,) = ax.lines
    assert steps.get_ydata().tolist() == [50, 70, 90] and steps.get_xdata().tolist() == pytest.approx([2 / 3, 2, 3])
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "MB", "%")


def test_pareto_of_those_that_cost_nothing():
    ax = plots.pareto(TABLE[["%"]].assign(MB=0.0), "MB", "%").axes[0]
    assert ax.texts[0].get_text() == "most" and ax.get_xscale() == "log"


def test_names_of_a_crowd_stand_below_each_other():
    """Nine below the front that cost the same and gain nearly so, and one far off, which is named at its dot."""
    crowd = pd.DataFrame({"MB": [1.0] * 10 + [30.0], "%": [50 + 0.1 * i for i in range(10)] + [40.0]})
    ax = plots.pareto(pd.concat([crowd, TABLE]), "MB", "%").axes[0]
    names = {int(text.get_text()): text for text in ax.texts if text.get_text().isdigit()}
    heights = [ax.transData.transform(names[i].xy)[1] * 72 / ax.figure.dpi + names[i].xyann[1] for i in range(9)]
    assert min(np.diff(heights)) > 6.99 and names[8].xyann[1] == names[10].xyann[1] == 0


def test_an_overview_has_every_value_in_its_row_and_zeros_hollow_on_a_logarithm():
    left, right = plots.overview(TABLE, {"%": ("accuracy", "linear"), "MB": ("sent", "log")}).axes
    assert [label.get_text() for label in left.get_yticklabels()] == list(TABLE.index)
    dots = left.collections[1].get_offsets().tolist()
    assert dots == [[50, 0], [70, 1], [60, 2], [90, 3]]
    _, full, hollow = right.collections
    assert full.get_offsets().tolist() == [[2, 1], [3, 2], [3, 3]]
    assert hollow.get_offsets().tolist() == [[pytest.approx(2 / 3), 0]]
    assert hollow.get_facecolor()[0].tolist() == [1, 1, 1, 1]


def test_methods_of_a_family_have_different_colours():
    for methods in FAMILIES.values():
        assert len({plots.look(name)["color"] for name in methods}) == len(methods)


def run_of(values):
    rounds = pd.DataFrame({"round": range(1, len(values) + 1), "joined": 2, "after": values})
    return History({}, "after", rounds, pd.DataFrame(), pd.DataFrame(), None, None)


def test_families_show_their_own_in_front_of_all():
    runs = {"local": run_of([0.1, 0.2]), "fedper": [run_of([0.3, 0.5]), run_of([0.5, 0.5])]}
    figure = plots.families(runs, {"alone": ("local", "ditto"), "parts": ("fedper",)})
    alone, parts, *rest = figure.axes
    assert alone.get_title(loc="left") == "alone" and [t.get_text() for t in alone.get_legend().get_texts()] == [
        "local"
    ]
    (grey, also, own), (_, _, other) = alone.lines, parts.lines
    for line, values in ((own, (10, 20)), (other, (40, 50)), (also, (10, 20)), (grey, (40, 50))):
        assert line.get_ydata() == pytest.approx(values)
    assert not any(ax.axison for ax in rest) and alone.get_ylim() == parts.get_ylim()
