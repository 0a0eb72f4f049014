"""The bench: its plain loop trains what we train, and its table says what it should."""

import pandas as pd
import pytest
from click.testing import CliRunner

from pflkit import bench, data
from pflkit.__main__ import main


@pytest.fixture
def short(monkeypatch):
    """One comparison of two methods, one round that counts."""
    digits = data.load("digits")
    small = data.Dataset("digits-300", digits.x[:300], digits.y[:300], digits.classes)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    cases = [(small, "mlp", 10, ("loop", "threads", "stacked", "auto"), ("fedavg", "fedah", "fedrep"))]
    monkeypatch.setattr(bench, "cases", lambda full: cases)


def test_the_plain_loop_and_all_engines_end_with_the_same_weights(short):
    table = bench.bench(say=lambda line: None)
    engines = {m: [e.partition(" ")[0] for e in rows["engine"]] for m, rows in table.groupby("method")}
    ours = ["loop", "threads", "stacked", "auto"]
    assert engines == {"fedavg": ["plain", *ours], "fedah": ["plain", *ours], "fedrep": ours}
    assert (table["difference"] < 1e-6).all()  # two rounds of float32
    assert (table["seconds"] > 0).all()
    of_loop = table.groupby("method")["seconds"].transform(lambda s: s[table.loc[s.index, "engine"] == "loop"].item())
    assert table["ratio"].tolist() == pytest.approx((table["seconds"] / of_loop).tolist())


def test_a_difference_shows(short, monkeypatch):
    step = bench.Plain.train
    monkeypatch.setattr(bench.Plain, "train", lambda self, i, *rest: i and step(self, i, *rest))  # client 0 is left out
    table = bench.bench(say=lambda line: None)
    plain = table["engine"].str.startswith("plain")
    assert (table[plain]["difference"] > 1e-4).all() and (table[~plain]["difference"] < 1e-6).all()


def test_a_table_on_the_screen_and_a_csv(short, tmp_path):
    result = CliRunner().invoke(main, ["bench", "--out", str(tmp_path / "new")])
    assert result.exit_code == 0
    lines, table = result.output.splitlines(), pd.read_csv(tmp_path / "new" / "bench.csv")
    assert len(lines) == 2 + len(table) == 2 + 14
    columns = ["method", "model", "data", "clients", "engine", "seconds", "ratio", "difference"]
    assert table.columns.tolist() == columns
    assert [line.split()[0] for line in lines[2:]] == table["method"].tolist()


def test_its_cases_are_what_they_say():
    """Every engine is one that exists; noise has the shapes of the models; by default FedAvg and FedAH."""
    for full in (False, True):
        for dataset, model, clients, engines, methods in bench.cases(full):
            assert engines[0] == "loop" and {"fedavg", "fedah"} <= set(methods)
            assert len(dataset.y) == len(dataset.x) >= 10 * clients
            assert bench.models.build(model, dataset.shape, 10, vocabulary=dataset.vocabulary)
