"""Costs and tables, on Histories whose numbers are made up and added by hand."""

import numpy as np
import pandas as pd
import pytest

from pflkit import costs, tables
from pflkit.experiment import History


def history(before, after, joined=2, product="after"):
    """Rounds of 100 bytes up and 300 down a client, 1,000 FLOPs and 0.5 seconds; two clients, the second 0.1 better."""
    n = len(after)
    rounds = pd.DataFrame({"round": range(1, n + 1), "joined": joined, "after": after, "seconds": 0.5})
    rounds["bytes_up"], rounds["bytes_down"], rounds["flops"] = 100 * joined, 300 * joined, 1000
    rounds = pd.concat([rounds.assign(before=before[:n]), pd.DataFrame({"round": [n + 1], "before": [before[n]]})])
    clients = pd.DataFrame(
        [
            {"round": t + 1, "client": i, "n_train": 3, "n_test": 10, "before": b + (i - 0.5) * 0.1, "after": a}
            for t, (b, a0) in enumerate(zip(before, [*after, np.nan], strict=True))
            for i, a in ((0, a0 - 0.05), (1, a0 + 0.05))
        ]
    )
    return History({}, product, rounds, clients, pd.DataFrame(), None, None)


RISING = history(before=[0.1, 0.2, 0.3, 0.3], after=[0.5, 0.7, 0.6])


def test_per_round():
    assert costs.per_round(RISING).to_dict() == {
        "bytes down / client": 300,
        "bytes up / client": 100,
        "FLOPs": 1000,
        "seconds": 0.5,
    }


def test_a_slow_first_round_leaves_the_seconds_of_a_round_as_they_are():
    slow = history(before=[0.1, 0.2, 0.3, 0.3], after=[0.5, 0.7, 0.6])
    slow.rounds.iloc[0, slow.rounds.columns.get_loc("seconds")] = 9.0
    assert costs.per_round(slow)["seconds"] == 0.5 and slow.summary()["seconds"] == 10
    assert tables.overview({"a": slow}).at["a", "s"] == 0.5


def test_summary_adds_up():
    numbers = RISING.summary()
    assert numbers == {"accuracy": 0.6, "before": 0.3, "after": 0.6, "best": 0.7} | {
        "bytes_up": 600,
        "bytes_down": 1800,
        "flops": 3000,
        "seconds": 1.5,
    }


@pytest.mark.parametrize("patience, rounds", [(1, 2), (3, 2), (4, None)])
def test_converged_when_patience_evaluations_brought_no_better(patience, rounds):
    """The best of five evaluations is the second, equalled by the last: three came after it."""
    flat = history(before=[0.1] * 6, after=[0.5, 0.7, 0.6, 0.6, 0.7])
    assert costs.rounds_to_convergence(flat, patience) == rounds


def test_what_it_took_to_converge():
    """Two rounds of two clients, 400 bytes each; a global model's best, before the third, takes two rounds as well."""
    flat = history(before=[0.1, 0.1, 0.3, 0.2, 0.2, 0.2], after=[0.5, 0.7, 0.6, 0.6, 0.7])
    expected = {"rounds": 2, "bytes": 1600, "seconds": 1.0}
    assert costs.to_convergence(flat, 3).to_dict() == expected
    assert costs.to_convergence(flat, 3, "before").to_dict() == expected
    assert costs.to_convergence(flat, 4) is None
    assert costs.to_convergence(history(before=[0.3, 0.1], after=[0.5]), 1, "before")["bytes"] == 0


def test_patience_is_checked():
    flat = history(before=[0.1] * 2, after=[0.5])
    with pytest.raises(ValueError, match="patience=0"):
        costs.rounds_to_convergence(flat, patience=0)


def test_bytes_to_target():
    assert costs.bytes_to_target(RISING, 0.5) == 800
    assert costs.bytes_to_target(RISING, 0.65) == 1600
    assert costs.bytes_to_target(RISING, 0.75) is None
    assert costs.bytes_to_target(RISING, 0.1, "before") == 0  # there from the start
    assert costs.bytes_to_target(RISING, 0.2, "before") == 800
    with pytest.raises(ValueError, match="target=75"):
        costs.bytes_to_target(RISING, 75)


def test_rounds_and_kilobytes_to_targets():
    assert [costs.rounds_to_target(RISING, t) for t in (0.5, 0.65, 0.75)] == [1, 2, None]
    assert costs.rounds_to_target(RISING, 0.1, "before") == 0
    table = tables.to_targets({"m": RISING, "both": [RISING, RISING]}, (0.5, 0.75))
    assert table.loc["m"].to_dict() == {
        **{"rounds to 50 %": "1.0", "KB to 50 %": "0.8"},
        **{"rounds to 75 %": "not reached", "KB to 75 %": "not reached"},
    }
    assert table.loc["both"].equals(table.loc["m"]) and table.index.name == "method"


def test_an_overview_in_numbers():
    other = history(before=[0.1] * 4, after=[0.5, 0.7, 0.8])
    row = tables.overview({"m": [RISING, other]}).loc["m"]
    assert row["accuracy (%)"] == pytest.approx(70) and row["±"] == pytest.approx(100 * np.std([0.6, 0.8], ddof=1))
    assert row["before (%)"] == pytest.approx(20) and row["after (%)"] == pytest.approx(70)
    assert row["MB"] == pytest.approx(800 / 1e6) and row["GFLOP"] == pytest.approx(1e-6) and row["s"] == 0.5


def test_accuracies_behind_a_plot_by_a_value():
    table = tables.by_value({"0.5": {"m": RISING}, "2": {"m": [RISING, RISING]}}, "beta")
    assert list(table.columns) == ["method", "beta", "seed", "accuracy (%)"]
    assert table["beta"].tolist() == [0.5, 2.0, 2.0] and table["seed"].tolist() == [0, 0, 1]
    assert (table["accuracy (%)"] == 100 * RISING.summary()["accuracy"]).all()
    assert tables.by_value({1: {"m": RISING}}, "beta", "before")["accuracy (%)"].tolist() == [30.0]


def test_accuracy_table_has_mean_and_spread_over_seeds():
    """Seeds end at 60 and 64 %: mean 62, standard deviation sqrt(8) = 2.83; clients are 5 points to either side."""
    other = history(before=[0.1, 0.2, 0.3, 0.4], after=[0.5, 0.6, 0.64])
    row = tables.accuracy({"m": [RISING, other]}).loc["m"]
    assert row.to_dict() == {
        "own": "62.0 ± 2.8",
        "best": "67.0 ± 4.2",
        "before": "35.0 ± 7.1",
        "after": "62.0 ± 2.8",
        "range": "55 to 69",
        "clients": 2,
    }
    assert tables.accuracy({"m": RISING}).loc["m", "own"] == "60.0"


def test_a_global_model_is_scored_before_local_training():
    row = tables.accuracy({"m": history([0.1, 0.2, 0.3, 0.3], [0.5, 0.7, 0.6], product="before")}).loc["m"]
    assert (row["own"], row["best"], row["range"]) == ("30.0", "30.0", "25 to 35")


def with_global(values):
    """RISING with accuracies of a global model before each round and at the end."""
    run = history(before=[0.1, 0.2, 0.3, 0.3], after=[0.5, 0.7, 0.6])
    run.rounds["before_global"] = values
    return run


def test_accuracy_table_has_the_global_models_only_if_there_are_any():
    """Seeds end at 40 and 44 %: mean 42, standard deviation sqrt(8) = 2.83."""
    assert "global" not in tables.accuracy({"a": RISING, "b": [RISING, RISING]})
    seeds = [with_global([0.1, 0.2, 0.3, 0.4]), with_global([0.1, 0.2, 0.3, 0.44])]
    table = tables.accuracy({"a": RISING, "b": seeds, "c": seeds[0], "d": [RISING, RISING]})
    assert table["global"].to_dict() == {"a": "", "b": "42.0 ± 2.8", "c": "40.0", "d": ""}
    assert table.columns.tolist() == ["own", "best", "before", "after", "global", "range", "clients"]
    rest = tables.accuracy({"a": RISING, "b": [RISING, RISING], "c": RISING, "d": [RISING, RISING]})
    pd.testing.assert_frame_equal(table.drop(columns="global").loc[["a", "d"]], rest.loc[["a", "d"]])
    assert "| b |" in tables.markdown(table) and "nan" not in tables.markdown(table)


def test_curves_of_global_models_and_of_methods_without():
    table = tables.curves({"b": with_global([0.1, 0.2, 0.3, 0.4])}, "before_global")
    assert table["rounds"].tolist() == [0, 1, 2, 3] and table["accuracy"].tolist() == [0.1, 0.2, 0.3, 0.4]
    sent = tables.against_bytes({"b": with_global([0.1, 0.2, 0.3, 0.4])}, "before_global")
    assert sent["bytes"].tolist() == [0, 800, 1600, 2400] and sent["accuracy"].tolist() == [0.1, 0.2, 0.3, 0.4]
    for numbers in (tables.curves, tables.against_bytes):
        with pytest.raises(ValueError, match=r"^a: point='before_global': must be one of 'before', 'after'$"):
            numbers({"b": with_global([0.1] * 4), "a": [RISING, RISING]}, "before_global")


def test_cost_and_seconds_tables():
    assert tables.cost({"m": RISING}).loc["m"].tolist() == [300, 100, 1000]
    assert tables.seconds({"m": [RISING, RISING]}).loc["m"].tolist() == [0.5]


def test_curves_and_clients_behind_the_plots():
    table = tables.curves({"m": [RISING, RISING]}, "before")
    assert table["rounds"].tolist() == [0, 1, 2, 3] * 2 and table["seed"].tolist() == [0] * 4 + [1] * 4
    clients = tables.per_client({"m": RISING})
    assert clients["client"].tolist() == [0, 1] and clients["accuracy"].tolist() == pytest.approx([0.55, 0.65])
    assert clients[["n_train", "n_test"]].to_numpy().tolist() == [[3, 10]] * 2


def test_saved_tables(tmp_path):
    shown = tables.save(tables.cost({"m": RISING}), tmp_path / "deep" / "02.cost", "Costs")
    assert (tmp_path / "deep" / "02.cost.csv").read_text().splitlines()[1] == "m,300,100,1000"
    text = (
        "**Costs**\n\n| method | bytes down / client | bytes up / client | FLOPs |\n| --- | --- | --- | --- |\n"
        "| m | 300 | 100 | 1000 |\n"
    )
    assert (tmp_path / "deep" / "02.cost.md").read_text() == shown.data == text


def test_a_column_per_set():
    falling = history(before=[0.3, 0.2, 0.1, 0.1], after=[0.5, 0.4, 0.3])
    table = tables.across({"a": {"m": RISING, "k": falling}, "b": {"k": RISING}, "none": {}})
    assert table.to_dict() == {"a": {"m": "60.0", "k": "30.0"}, "b": {"m": "", "k": "60.0"}}


def test_a_budget_until_convergence():
    """Of two seeds one has converged, in round 2 of 3: two rounds of 0.5 s, of 2 x (300 + 100) bytes."""
    other = history(before=[0.1, 0.2, 0.3, 0.4], after=[0.5, 0.6, 0.64])
    row = tables.budget({"m": [RISING, other]}, patience=1).loc["m"].to_dict()
    assert row == {
        **{"MB down": "0.000", "MB up": "0.000", "MFLOP": "0", "seconds": "0.500"},
        **{"converged": "1 of 2", "rounds": "2", "seconds in all": "1.0", "MB in all": "0.0"},
    }
    row = tables.budget({"m": other}, patience=1).loc["m"]
    assert row["converged"] == "0 of 1" and row["rounds"] == row["MB in all"] == ""
