"""The bench: its plain loop trains and scores what we do, its tables say what they should; no time is judged."""

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from pflkit import bench, data, partition, plots, trees
from pflkit.__main__ import main
from pflkit.federation import Federation
from pflkit.methods.fedavg import FedAvg, model_loss
from pflkit.training import Training

PLAIN = ("fedavg", "fedrep", "ditto", "fedah")
OURS = ["loop", "threads", "stacked", "auto"]


@pytest.fixture
def case(monkeypatch, one_thread):
    digits = data.load("digits")
    small = data.Dataset("digits-300", digits.x[:300], digits.y[:300], digits.classes)
    monkeypatch.setitem(bench.DATA, "few", lambda: small)
    return bench.Case("few", "mlp", 10, tuple(OURS), (*PLAIN, "fedala"))


@pytest.fixture
def short(case, monkeypatch):
    """One comparison, one round that counts."""
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setattr(bench, "cases", lambda full: [case])


def test_the_plain_loop_and_all_engines_end_with_the_same_weights(short):
    table = bench.bench(say=lambda line: None)
    engines = {m: [e.partition(" ")[0] for e in rows["engine"]] for m, rows in table.groupby("method")}
    assert engines == {m: OURS if m == "fedala" else ["plain", *OURS] for m in (*PLAIN, "fedala")}
    assert (table["difference"] < 1e-6).all()  # two rounds of float32
    assert (table["quickest"] > 0).all() and (table["quickest"] <= table["seconds"]).all()
    for method, rows in table.groupby("method"):
        quickest = rows.set_index(rows["engine"].str.partition(" ")[0])["quickest"]
        assert rows["ratio"].tolist() == pytest.approx((quickest / quickest["loop"]).tolist())
        if method in PLAIN:
            assert rows["speedup"].tolist() == pytest.approx((quickest["plain"] / quickest).tolist())
    assert table[table["method"] == "fedala"]["speedup"].isna().all()


@pytest.mark.parametrize("method", PLAIN)
def test_the_plain_loop_scores_what_we_score(method, case):
    run = case.runs()
    plain, ours = run(method, "plain", scored=True), run(method, "loop", scored=True)
    for _ in range(2):
        plain.play()
        ours.play()
    assert trees.unequal(plain.held, ours.held) < 1e-6
    assert plain.correct == ours.correct > 0


def test_the_plain_loop_leaves_out_batches_of_one_where_there_is_batch_norm(case):
    """As we do; its frozen extractor and its tests take the running statistics."""
    dataset = bench.DATA["few"]()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU()
        head = torch.nn.Linear(8, 10)
    model = bench.models.from_modules(torch.nn.Sequential(*layers), head, dataset.shape, 10)
    split = partition.custom(dataset.y, [np.arange(11), np.arange(20, 32)], [np.arange(11, 20), np.arange(32, 40)])
    about = {"training": Training(lr=0.1), "engine": "loop", "device": "cpu"}
    runs = [
        kind("fedah", Federation(dataset, split, model, **about), scored=True) for kind in (bench.Plain, bench.Ours)
    ]
    for run in runs:
        run.play()
    assert trees.unequal(*(run.held for run in runs)) < 1e-6
    assert runs[0].correct == runs[1].correct


def test_a_difference_shows(short, monkeypatch):
    step = bench.Plain.train
    monkeypatch.setattr(bench.Plain, "train", lambda self, i, *rest: i and step(self, i, *rest))  # client 0 is left out
    table = bench.bench(say=lambda line: None)
    plain = table["engine"].str.startswith("plain")
    assert (table[plain]["difference"] > 1e-4).all() and (table[~plain]["difference"] < 1e-6).all()


def test_a_table_on_the_screen_a_csv_and_a_plot(short, tmp_path):
    result = CliRunner().invoke(main, ["bench", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0
    lines, table = result.output.splitlines(), pd.read_csv(tmp_path / "new" / "bench.csv")
    assert len(lines) == 4 + len(table) == 4 + 24
    about = ["method", "model", "data", "clients", "evaluation", "engine"]
    assert table.columns.tolist() == [*about, "seconds", "quickest", "ratio", "speedup", "difference"]
    assert [line.split()[0] for line in lines[4:]] == table["method"].tolist()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bench.csv", "bench.png"]


def test_in_full_it_tells_of_growth_and_memory_too(short, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "GROW", {"clients": (2, 4)})
    monkeypatch.setattr(bench, "BASE", bench.BASE | {"samples": 200})
    monkeypatch.setattr(bench, "memory", lambda cases: pd.DataFrame({"engine": ["loop"], "peak (MB)": [1.0]}))
    lines = []
    bench.bench(full=True, out=tmp_path, say=lines.append)
    left = {"bench.csv", "bench.png", "memory.csv", "scaling.csv", "scaling.png"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert pd.read_csv(tmp_path / "scaling.csv")["value"].tolist() == [2, 2, 2, 4, 4, 4]
    assert any("peak (MB)" in line for line in lines)


def test_runs_are_timed_in_turn_and_the_first_is_not_counted():
    called, before = [], torch.get_num_threads()
    runs = {
        name: (threads, lambda n=name: called.append((n, torch.get_num_threads())))
        for name, threads in [("a", 1), ("b", 2)]
    }
    seconds = bench.timed(runs, rounds=4)
    assert called == [("a", 1), ("b", 2)] * 5
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4}
    assert torch.get_num_threads() == before
    assert len(bench.timed(runs, rounds=9, enough=0)["a"]) == 3


def test_its_cases_are_what_they_say():
    """Every engine is one that exists; noise has the shapes of the models; in full all methods, and evaluation."""
    for full in (False, True):
        cases = list(bench.cases(full))
        for case in cases:
            dataset = bench.DATA[case.data]()
            assert case.engines[0] == "loop" and "fedavg" in case.methods
            assert len(dataset.y) == len(dataset.x) >= 10 * case.clients
            assert bench.models.build(case.model, dataset.shape, 10, vocabulary=dataset.vocabulary)
    assert any(set(case.methods) == set(bench.METHODS) for case in cases)
    assert all(any(m in case.methods and True in case.scored for case in cases) for m in bench.EIGHT)


def test_scaling_has_a_row_for_each_value_and_engine():
    table = bench.scaling({"samples": (80, 160), "hidden units": (4,)}, engines=("plain", "stacked"), rounds=1)
    assert table["grows"].tolist() == ["samples"] * 4 + ["hidden units"] * 2
    assert table["value"].tolist() == [80, 80, 160, 160, 4, 4]
    assert table["engine"].tolist() == ["plain", "stacked"] * 3
    assert (table["quickest"] > 0).all()


def test_exponents_stand_in_the_legend():
    rows = [("samples", n, e, s, s) for n in (10, 100) for e, s in (("loop", n / 50), ("stacked", (n / 10) ** 0.5))]
    figure = plots.scaling(pd.DataFrame(rows, columns=["grows", "value", "engine", "seconds", "quickest"]), "a title")
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["loop: 1.00", "stacked: 0.50"]
    assert figure.axes[0].get_xscale() == figure.axes[0].get_yscale() == "log"


def test_wide_is_the_bundled_mlp_with_other_units():
    assert bench.wide(64, (1, 8, 8), 10).size() == bench.models.build("mlp", (1, 8, 8), 10).size()
    assert bench.wide(5, (1, 8, 8), 10).plain


def test_steps_and_speed():
    table = bench.steps((1, 2), (3,), repeats=2)
    assert table["FLOPs"].tolist() == [3 * (4 * 64 + 6 * 10), 2 * 3 * (4 * 64 + 6 * 10)]
    assert (table["seconds"] > 0).all() and bench.speed(side=8, repeats=2) > 0


def test_schedule_by_hand():
    """Clients of 25, 20 and 7 samples, batches of 10."""
    ways = bench.schedule([7, 25, 20], 10)
    assert ways["filled up"].tolist() == [[10, 10, 5], [10, 10, 0], [7, 0, 0]]
    assert ways["grouped"].tolist() == [[10, 10, 5, 0], [10, 10, 0, 0], [0, 0, 0, 7]]


def test_schedule_is_what_the_stacked_engine_does():
    """It counts the calls of a loss for many."""
    widths = []

    def loss(model, params, batch):
        widths.append(batch[1].shape[:-1])
        return model_loss(model, params, batch)

    class Counted(FedAvg):
        def local(self, clients, kept, message):
            model = clients.sgd(bench.models.for_many(loss), message)
            return (), model, model

    dataset = bench.noise(200, 1, 8, 8)
    split = partition.dirichlet(dataset.y, 6, beta=0.5, seed=0)
    fed = Federation(dataset, split, bench.wide(4, dataset.shape, 10), engine="stacked", device="cpu")
    run = bench.Ours(Counted(), fed)
    run.play()  # asks whether it is for many, and compares each client at its first step with itself alone
    widths.clear()
    run.play()
    filled = bench.schedule(fed.n, 10)["filled up"]
    assert [width[0] for width in widths] == (filled > 0).sum(0).tolist()
    assert filled.sum() == fed.n.sum() == bench.schedule(fed.n, 10)["grouped"].sum()


def test_memory_of_a_process_of_its_own():
    """Not of this one: it holds half a gigabyte meanwhile."""
    held = np.ones(2**26)
    table = bench.memory([bench.Case("digits", "mlp", 10, ("loop", "auto"), ("fedavg",))] * 2)
    assert table["engine"].tolist() == ["plain", "loop"]
    assert (table["start (MB)"] > 50).all() and (table["peak (MB)"] >= table["start (MB)"]).all()
    assert (table["start (MB)"] < bench.peak("digits", "mlp", 10, "loop", "fedavg")[0]).all()
    assert held.nbytes == 2**29
