"""Figures: what they show is what the partition holds, they are legible, and they leave nothing behind."""

import io
from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest

from pflkit import partition, plots

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
