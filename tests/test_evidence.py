"""Evidence: runs are recorded once, read back as they were, and a cut loses nothing."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest
from click.testing import CliRunner

from pflkit import claims, evidence, experiment, models, partition, protocols
from pflkit.__main__ import main
from pflkit.data import LOADERS
from pflkit.methods import METHODS, make

SMALL = {"dataset": "digits", "samples": 200, "clients": 4, "rounds": 2, "model": "mlp", "partition": "iid"}


def arguments(*methods, seeds=1, **more):
    return [{"method": m, **SMALL, **more, "seed": seed} for seed in range(seeds) for m in methods]


@pytest.fixture
def quiet(tmp_path):
    """A function that collects sets in a folder, in this process, and returns (failures, what was said)."""

    def run(sets):
        said = []
        return evidence.collect(sets, tmp_path, jobs=1, say=said.append), said

    return run


def test_what_is_read_is_what_was_run(quiet, tmp_path):
    sets = {"a/digits": arguments("fedavg", "fedah", seeds=2)}
    assert quiet(sets)[0] == 0
    found = evidence.load(tmp_path / "a/digits")
    assert list(found) == ["fedavg", "fedah"] and [len(runs) for runs in found.values()] == [2, 2]
    for run in sets["a/digits"]:
        read, now = found[run["method"]][run["seed"]], experiment.experiment(**run)
        assert read.product == now.product and read.summary() == pytest.approx(
            now.summary() | {"seconds": read.summary()["seconds"]}
        )
        steady = [c for c in now.rounds if not c.startswith("seconds")]
        pd.testing.assert_frame_equal(read.rounds[steady], now.rounds[steady], rtol=1e-5, check_dtype=False)
        last = now.clients[now.clients["round"] >= 2].reset_index(drop=True)
        pd.testing.assert_frame_equal(read.clients[last.columns], last, rtol=1e-5, check_dtype=False)
        assert read.config == {k: v for k, v in now.config.items() if k != "code"} | {"model": read.config["model"]}


def test_runs_that_are_there_are_not_run_again(quiet, tmp_path, monkeypatch):
    quiet({"a": arguments("fedavg")})
    before = (tmp_path / "a" / "rounds.csv").read_text()
    monkeypatch.setattr(evidence, "experiment", lambda **_: pytest.fail("was run again"))
    assert quiet({"a": arguments("fedavg")}) == (0, ["0 experiments to run, 1 are there"])
    assert (tmp_path / "a" / "rounds.csv").read_text() == before


def test_a_notebook_plays_sets_and_is_told_what_failed(tmp_path):
    found = evidence.play({"a": arguments("fedavg"), "b": arguments("local", seeds=2)}, tmp_path, jobs=1)
    assert {name: {label: len(runs) for label, runs in of.items()} for name, of in found.items()} == {
        "a": {"fedavg": 1},
        "b": {"local": 2},
    }
    with pytest.raises(RuntimeError, match=r"(?s)^1 experiments failed:.*c  local.*Traceback.*classes=99"):
        evidence.play({"c": arguments("local", partition="pathological", classes=99)}, tmp_path, jobs=1)


def test_a_tuple_is_read_as_the_list_that_it_became(quiet, tmp_path):
    drawn = arguments("fedavg", join_ratio=(0.5, 1.0))
    quiet({"a": drawn})
    assert quiet({"a": drawn}) == (0, ["0 experiments to run, 1 are there"])
    assert evidence.missing(tmp_path / "a", drawn + arguments("fedavg", "fedavg")) == arguments("fedavg")


def test_several_that_record_at_once_lose_nothing_and_leave_nothing_twice(tmp_path):
    """Four record two runs each; all of them the first one, too."""
    history = experiment.experiment(**arguments("local")[0])

    def runs(i):
        for seed in (0, 2 * i + 1, 2 * i + 2):
            own = replace(history, config=history.config | {"seed": seed})
            evidence.record(tmp_path, {"method": "local", "seed": seed}, own)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(runs, range(4)))
    found = evidence.load(tmp_path)["local"]
    assert [h.config["seed"] for h in found] == list(range(9))
    assert all(len(h.rounds) == len(history.rounds) for h in found)
    assert len(pd.read_csv(tmp_path / "rounds.csv")) == 9 * len(history.rounds)


def test_bad_input_is_refused_before_anything_runs(quiet, tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "experiment", lambda **_: pytest.fail("was run"))
    with pytest.raises(ValueError, match="jobs=0: must be"):
        evidence.collect({"a": arguments("fedavg")}, tmp_path, jobs=0)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        quiet({"file/a": arguments("fedavg")})


def test_runs_without_tables_are_named(quiet, tmp_path):
    quiet({"a": arguments("fedavg", "local")})
    path = tmp_path / "a/rounds.csv"
    pd.read_csv(path).query("run == 0").to_csv(path, index=False)
    with pytest.raises(ValueError, match="a: cannot be read: run 1 is not in its tables"):
        evidence.load(tmp_path / "a")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"a/rounds\.csv"):
        evidence.load(tmp_path / "a")


def test_the_default_method_has_its_name(quiet, tmp_path):
    quiet({"a": [SMALL]})
    (own,) = evidence.load(tmp_path / "a").items()
    assert own[0] == own[1][0].config["method"]


def test_one_that_fails_loses_no_other(quiet, tmp_path):
    failed, said = quiet({"a": [*arguments("fedavg", clients=10_000), *arguments("local")]})
    assert failed == 1 and list(evidence.load(tmp_path / "a")) == ["local"]
    assert "clients=10000" in said[1]


def test_what_a_cut_left_half_recorded_is_forgotten(quiet, tmp_path):
    """Killed between the tables and runs.jsonl: the run is run again, and its first rows are not left twice."""
    quiet({"a": arguments("fedavg")})
    runs = tmp_path / "a" / "runs.jsonl"
    runs.unlink()
    quiet({"a": arguments("fedavg", "local")})
    runs.write_text(runs.read_text().splitlines()[0] + "\n")
    assert quiet({"a": arguments("fedavg", "local")})[0] == 0
    table = pd.read_csv(tmp_path / "a" / "rounds.csv")
    assert table.groupby("run")["round"].apply(list).tolist() == [[1, 2, 3]] * 2
    assert [json.loads(line)["run"] for line in runs.read_text().splitlines()] == [0, 1]


def test_settings_are_part_of_the_label(quiet, tmp_path):
    quiet({"a": arguments("fedah") + arguments("fedah", settings={"weight_lr": 1.0})})
    assert list(evidence.load(tmp_path / "a")) == ["fedah", "fedah weight_lr=1.0"]


def test_the_label_does_not_depend_on_the_order_in_which_settings_are_given():
    """A claim's variants are known by it."""
    one, other = {"weights": "uniform", "share": "model"}, {"share": "model", "weights": "uniform"}
    labels = {evidence.label({"method": "fedapa", "settings": settings}) for settings in (one, other)}
    assert labels == {"fedapa weights=uniform share=model"} <= set(claims.CLAIMS["PA4"].methods)
    assert evidence.label({"method": "mine", "settings": {"b": 1, "a": 2}}) == "mine b=1 a=2"


def test_claims_take_what_is_read(quiet, tmp_path):
    quiet({"a": arguments("fedper", "fedrep", "fedavg", seeds=3)})
    verdict = claims.check("AH12", evidence.load(tmp_path / "a"))
    assert verdict.numbers and verdict.numbers[0].holds


def test_no_evidence(tmp_path):
    assert evidence.load(tmp_path / "nothing") == {}


@pytest.mark.parametrize("scale", protocols.SCALES)
def test_protocols_name_what_there_is(scale):
    sets = protocols.fedah(scale)
    assert {name.partition("/")[0] for name in sets} == {"table1", "table2", "table4", "table5"}
    for group in sets.values():
        assert len({run["seed"] for run in group}) == (5 if scale == "paper" else 3)
        for run in group:
            assert run["dataset"] in LOADERS and run["partition"] in partition.SCHEMES
            assert run.get("model", "cnn") in models.MODELS
            assert run["method"] in protocols.FEDAH
    assert METHODS.keys() >= set(protocols.FEDAH)


def test_the_papers_scale_is_the_papers():
    for name, group in protocols.fedah("paper").items():
        for run in group:
            assert "samples" not in run and "lr" not in run  # all data; each model's own rate
            assert run["rounds"] == 2000 or name.startswith("table5")
            assert run["clients"] == 20 or name.startswith("table2/cifar100-clients")
            assert run.get("beta", 0.1) == 0.1 or name.startswith("table2/")


@pytest.mark.parametrize("scale", protocols.SCALES)
def test_fedghs_protocols_name_what_there_is(scale):
    sets = protocols.fedgh(scale)
    assert len(sets) == 12 + 4 + 5 + 5 + 3 and all(name.startswith("fedgh/") for name in sets)
    for name, group in sets.items():
        assert len({run["seed"] for run in group}) == (5 if scale == "paper" else 3)
        mixed = {"same": "cnn-1"}.get(name.split("/")[1], protocols.MIXED)
        for run in group:
            assert run["model"] == mixed and run["dataset"] in LOADERS
            assert run["clients"] * run["join_ratio"] == pytest.approx(10) or name.startswith("fedgh/join/")
            assert run["method"] in protocols.FEDGH and (run["method"] != "fedavg" or mixed == "cnn-1")
            assert (run["rounds"] == 500 and "samples" not in run) == (scale == "paper")
            assert run["weight_decay"] == 1e-3 if scale == "paper" else run["samples"] == 1600
    rates = {
        name: {run["settings"]["header_lr"] for run in sets[f"fedgh/rates/cifar10-{name}"]} for name in ("0.001", "1")
    }
    assert rates == {"0.001": {0.001}, "1": {1.0}}


@pytest.mark.parametrize("scale", protocols.SCALES)
def test_fedapas_protocols_name_what_there_is(scale):
    sets = protocols.fedapa(scale)
    assert len(sets) == (18 if scale == "paper" else 12) and all(name.startswith("fedapa/") for name in sets)
    for name, group in sets.items():
        assert len({run["seed"] for run in group}) == (5 if scale == "paper" else 3)
        for run in group:
            made = make(run["method"], **run.get("settings", {}))  # no impossible setting
            assert made == make("fedapa", **run.get("settings", {})) or "ablation" not in name
            assert run["dataset"] in LOADERS and run["model"] == "lenet5" and run["join_ratio"] == (0.6, 1.0)
            assert (run["rounds"], run["batch_size"]) == ((50, 64) if scale == "paper" else (30, 16))
            assert (run.get("grouped", True), "beta" in run) == ("random" not in name, "dirichlet" in name)
    assert {run["method"] for run in sets["fedapa/cifar100-random"]} == set(protocols.FEDAPA)
    assert len({str(run.get("settings")) for run in sets["fedapa/ablation/cifar10-grouped"]}) == 11


def test_the_command_lists_and_runs(tmp_path, monkeypatch):
    sets = {"table1/digits": arguments("fedavg", "local"), "table2/digits": arguments("fedah")}
    monkeypatch.setattr(protocols, "fedah", lambda scale: sets)
    monkeypatch.setattr(protocols, "fedgh", lambda scale: {"fedgh/digits": arguments("fedgh")})
    monkeypatch.setattr(protocols, "fedapa", lambda scale: {"fedapa/digits": arguments("fedapa")})
    run = ["evidence", "--folder", str(tmp_path), "--jobs", "1"]
    assert "table1/digits" in CliRunner().invoke(main, run).output
    result = CliRunner().invoke(main, [*run, "table1"])
    assert result.exit_code == 0 and list(evidence.load(tmp_path / "table1/digits")) == ["local", "fedavg"]
    assert evidence.load(tmp_path / "table2/digits") == {}
    listed = CliRunner().invoke(main, run).output
    assert "2 of 2" in listed and "0 of 1" in listed and "fedgh/digits" in listed and "fedapa/digits" in listed
    refused = CliRunner().invoke(main, [*run, "table9"])
    assert refused.exit_code == 2 and "table9" in refused.output
    (tmp_path / "table1/digits/runs.jsonl").write_text('{"run": 0}')
    refused = CliRunner().invoke(main, run)
    assert refused.exit_code == 2 and "table1/digits/runs.jsonl: cannot be read" in refused.stderr


def test_the_scale_in_words(quiet, tmp_path):
    quiet({"a": arguments("fedavg", seeds=2, partition="dirichlet", beta=0.5, join_ratio=(0.5, 1.0), epochs=3)})
    assert evidence.scale(evidence.load(tmp_path / "a")) == (
        "digits, mlp, 150 training samples, 4 clients, Dirichlet(0.5), lr 0.05, join ratio 0.5 to 1, 3 local epochs, "
        "2 rounds, 2 seeds"
    )
    pairs = {"partition": "pathological", "classes": 5}
    quiet({"b": arguments("local", **pairs), "c": arguments("local", grouped=False, **pairs)})
    told = [evidence.scale(evidence.load(tmp_path / name)) for name in "bc"]
    assert "pathological (5 classes each)" in told[0] and "pathological (5 random classes each)" in told[1]


def test_the_code_has_a_name(monkeypatch, tmp_path):
    before = evidence.code()
    assert before == evidence.code() and len(before) == 12
    assert len({before, evidence.code({"rounds": 2}, 3), evidence.code({"rounds": 2}, 4)}) == 3
    monkeypatch.setattr(evidence, "__file__", str(tmp_path / "evidence.py"))
    (tmp_path / "evidence.py").write_text("other")
    assert evidence.code() != before
