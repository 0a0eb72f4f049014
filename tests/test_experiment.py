"""Runs: what their History says, how they are saved and resumed, and when old results are not used."""

import dataclasses
import json
import sys
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch

from pflkit import data, experiment, identity, models, partition, trees
from pflkit.experiment import run
from pflkit.federation import Federation
from pflkit.identity import describe, digest
from pflkit.methods import make
from pflkit.methods.fedavg import model_loss
from pflkit.training import Training


def federation(seed=0, clients=6, **options):
    real = data.load("digits")
    digits = data.Dataset("digits-300", real.x[:300], real.y[:300], real.classes)
    split = partition.dirichlet(digits.y, clients, beta=0.5, min_size=12, seed=seed)
    model = models.build("mlp", digits.shape, 10, seed=seed)
    return Federation(digits, split, model, **{"training": Training(lr=0.05), "seed": seed} | options)


def without_seconds(history):
    rounds = history.rounds.drop(columns=["seconds", "seconds_eval"])
    return [t.reset_index(drop=True) for t in (rounds, history.clients, history.watch)]


def assert_same(a, b):
    for one, other in zip(without_seconds(a), without_seconds(b), strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
    assert trees.unequal((a.state.server, a.state.kept), (b.state.server, b.state.kept)) == 0


class Stop(Exception):
    pass


def stop_after(monkeypatch, rounds):
    """Makes the next run end with Stop as it begins the round after so many."""
    played = Federation.play

    def play(self, method, state, total):
        if state.round == rounds:
            raise Stop
        return played(self, method, state, total)

    monkeypatch.setattr(Federation, "play", play)


# --- what a History says ---------------------------------------------------------------------------------------------


def test_history_agrees_with_the_models_it_describes():
    """Accuracies are recomputed here from the final models and the test data, by plain indexing."""
    fed = federation(join_ratio=0.5)
    history = run(make("fedavg"), fed, 3)
    own = [float((fed.model.predict(history.state.server, x).argmax(1) == y).double().mean()) for x, y in fed.test]
    last = history.clients[history.clients["round"] == 4]
    assert last["before"].tolist() == own
    row = history.rounds.iloc[-1]
    sizes = np.array([len(y) for _, y in fed.test])
    assert row["before"] == pytest.approx(np.mean(own)) and row["before_pooled"] == pytest.approx(
        own @ sizes / sizes.sum()
    )
    assert history.summary()["accuracy"] == row["before"]


def test_rounds_and_clients_tell_the_same_story():
    fed = federation(join_ratio=(0.3, 1.0))
    history = run(make("fedah"), fed, 5)
    for t in range(1, 6):
        of_clients = history.clients[history.clients["round"] == t]
        row = history.rounds.set_index("round").loc[t]
        joined = of_clients[of_clients["joined"]]
        assert joined["client"].tolist() == fed.sample(t).tolist() and len(of_clients) == 6
        assert row["joined"] == len(joined) and row["after"] == pytest.approx(joined["after"].mean())
        assert of_clients.loc[~of_clients["joined"], "after"].isna().all()
        assert row["bytes_up"] == joined["bytes_up"].sum() and row["flops"] == joined["flops"].sum()
    assert (history.clients.groupby("client")["n_train"].first().to_numpy() == fed.n).all()


def test_curves_count_rounds_of_training():
    history = run(make("fedavg"), federation(), 4)
    assert history.curve("before").index.tolist() == [0, 1, 2, 3, 4]
    assert history.curve("after").index.tolist() == [1, 2, 3, 4]
    assert history.curve().equals(history.curve("before"))
    assert history.summary()["best"] == history.curve("before").max()


def test_evaluating_less_often_changes_only_what_is_recorded():
    every, third = (run(make("fedrep"), federation(), 5, eval_every=k) for k in (1, 3))
    assert third.curve("after").index.tolist() == [1, 4, 5] and third.curve("before").index.tolist() == [0, 3, 4, 5]
    assert third.curve("after").tolist() == every.curve("after").loc[[1, 4, 5]].tolist()
    assert trees.unequal(every.state.kept, third.state.kept) == 0
    assert third.summary()["bytes_up"] == every.summary()["bytes_up"]


def test_watch_records_the_distribution_of_what_a_method_shows():
    history = run(make("fedah", weight_lr=0.0, weight_init=0.25), federation(), 2)
    assert history.watch["round"].tolist() == [1, 2]
    assert (history.watch[["mean", "q00", "q50", "q100"]] == 0.25).all(axis=None)
    history = run(make("fedah", weight_lr=1.0), federation(), 2)
    W = torch.cat([t.flatten() for t in trees.leaves(history.state.kept["W"])])
    last = history.watch.iloc[-1]
    assert last["mean"] == pytest.approx(float(W.double().mean())) and last["q00"] == float(W.min())
    assert last["share_1"] == pytest.approx(float((W == 1).double().mean())) and 0 < last["share_1"] < 1


def test_progress_prints_every_so_many_rounds_and_the_last(capsys):
    run(make("local"), federation(), 5, progress=2)
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["2/5", "4/5", "5/5"]


@pytest.mark.parametrize("name, value", [("rounds", 0), ("rounds", 2.0), ("eval_every", 0), ("progress", -1)])
def test_bad_arguments_are_named_before_anything_runs(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value}: "):
        run(make("local"), federation(), **{"rounds": 2} | {name: value})


# --- saved and resumed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["local", "fedavg", "fedah"])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_run_cut_short_goes_on_to_the_same_result(method, cut, tmp_path, monkeypatch):
    whole = run(make(method), federation(join_ratio=0.5), 4)
    monkeypatch.setattr(experiment._Saver, "__call__", eager(experiment._Saver.__call__))
    with monkeypatch.context() as cutting, pytest.raises(Stop):
        stop_after(cutting, cut)
        run(make(method), federation(join_ratio=0.5), 4, out=tmp_path)
    resumed = run(make(method), federation(join_ratio=0.5), 4, out=tmp_path)
    assert resumed.loaded is None
    assert_same(resumed, whole)
    again = run(make(method), federation(join_ratio=0.5), 4, out=tmp_path)
    assert again.loaded is not None
    assert_same(again, whole)


def eager(save):
    """Saves in every round, however short the round was."""
    return lambda self, *arguments, at_once=False: save(self, *arguments, at_once=True)


def test_tables_written_ahead_of_the_state_are_cut_back(tmp_path, monkeypatch):
    """A kill between writing the tables of a round and its state: the round is played again, not counted twice."""
    whole = run(make("fedah"), federation(), 3)
    monkeypatch.setattr(experiment._Saver, "__call__", eager(experiment._Saver.__call__))
    with monkeypatch.context() as cutting, pytest.raises(Stop):
        stop_after(cutting, 2)
        run(make("fedah"), federation(), 3, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    for name in ("rounds", "history", "watch"):
        table = pd.read_csv(folder / f"{name}.csv")
        more = table[table["round"] == 2].assign(round=3)
        pd.concat([table, more, more.assign(round=4)]).to_csv(folder / f"{name}.csv", index=False)
    assert_same(run(make("fedah"), federation(), 3, out=tmp_path), whole)


def test_fresh_repeats_a_finished_run(tmp_path, monkeypatch):
    run(make("fedavg"), federation(), 2, out=tmp_path)
    calls = []
    played = Federation.play
    monkeypatch.setattr(Federation, "play", lambda *a: calls.append(1) or played(*a))
    assert run(make("fedavg"), federation(), 2, out=tmp_path, fresh=True).loaded is None
    assert len(calls) == 2


def test_no_pickle_and_no_half_written_file_is_left(tmp_path):
    run(make("fedah"), federation(), 2, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "history.csv", "rounds.csv", "state.safetensors", "watch.csv")
    ]


# --- clients with different models -----------------------------------------------------------------------------------


def mixed(names=("mlp-5", "mlp-3"), **options):
    fed = federation(**options)
    nets = [models.build(name, fed.dataset.shape, 10) for name in names]
    options = {"training": Training(lr=0.05), "join_ratio": 0.6} | options
    return Federation(fed.dataset, fed.partition, nets, **options)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_run_on_different_models_is_saved_resumed_and_read(cut, tmp_path, monkeypatch):
    """What is read is what was written, to the bit, in every group."""
    whole = run(make("fedgh", header_lr=0.5), mixed(), 4)
    monkeypatch.setattr(experiment._Saver, "__call__", eager(experiment._Saver.__call__))
    with monkeypatch.context() as cutting, pytest.raises(Stop):
        stop_after(cutting, cut)
        run(make("fedgh", header_lr=0.5), mixed(), 4, out=tmp_path)
    for loaded in (False, True):
        again = run(make("fedgh", header_lr=0.5), mixed(), 4, out=tmp_path)
        assert (again.loaded is not None) == loaded
        assert_same(again, whole)
        assert isinstance(again.state.kept, tuple) and [len(k["fc1.weight"]) for k in again.state.kept] == [3, 3]
    assert len(list(tmp_path.iterdir())) == 1


def test_history_of_different_models_agrees_with_them():
    """Recomputed by plain indexing; bytes, too, are each client's own: its classes' prototypes and labels."""
    fed = mixed(join_ratio=0.5)
    history = run(make("fedgh"), fed, 3)
    own = []
    for i, (x, y) in enumerate(fed.test):
        params = trees.row(history.state.kept[i % 2], i // 2), history.state.server
        own.append(float((fed.groups[i % 2].model.predict(params, x).argmax(1) == y).double().mean()))
    last = history.clients[history.clients["round"] == 4]
    assert last["before"].tolist() == own and last["client"].tolist() == list(range(6))
    assert history.rounds.iloc[-1]["before"] == pytest.approx(np.mean(own))
    joined = history.clients[history.clients["joined"]]
    assert joined["client"].tolist() == np.concatenate([fed.sample(t) for t in (1, 2, 3)]).tolist()
    classes = [len(set(fed.dataset.y[rows])) for rows in fed.partition.train]
    assert joined["bytes_up"].tolist() == [(64 + 1) * 4 * classes[i] for i in joined["client"]]
    assert set(joined["bytes_down"]) == {(64 + 1) * 10 * 4}
    assert history.rounds["bytes_up"].sum() == joined["bytes_up"].sum()


def test_labels_are_counted_client_by_client(tmp_path):
    fed = mixed()
    for _ in ("run", "read"):
        labels = run(make("local"), fed, 1, out=tmp_path).labels
        assert labels.tolist() == [
            [list(fed.dataset.y[rows]).count(k) for k in range(10)] for rows in fed.partition.train
        ]


def test_watched_values_of_all_groups_are_one_distribution():
    class Watched(type(make("local"))):
        def watch(self, server, kept):
            return {"b": kept[1]["bias"], "w": {"all": kept[0]["fc1.weight"]}}

    history = run(Watched(), mixed(), 2)
    last = history.watch[history.watch["round"] == 2].set_index("name")
    for name, leaf in (("b", lambda kept: kept[1]["bias"]), ("w", lambda kept: kept[0]["fc1.weight"])):
        values = torch.cat([leaf(kept).flatten() for kept in history.state.kept]).double()
        assert last.loc[name, "mean"] == pytest.approx(float(values.mean()))
        assert (last.loc[name, "q00"], last.loc[name, "q100"]) == (float(values.min()), float(values.max()))


def test_config_names_the_models(tmp_path):
    run(make("local"), mixed(("mlp-5", "mlp", "mlp-1")), 1, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    config = json.loads((folder / "config.json").read_text())["model"]
    assert config["name"] == "mlp-5+mlp+mlp-1" and config["features"] == [64, 64, 64]
    sizes = [65 * 16 + 17 * 64 + 650, 65 * 64 + 650, 65 * 256 + 257 * 64 + 650]
    assert config["parameters"] == sizes


def test_an_experiment_of_plain_values_with_different_models():
    values = {"clients": 5, "rounds": 2, "seed": 3, "settings": {"header_lr": 0.5}}
    history = experiment.experiment("fedgh", model="mlp-1+mlp-2", **values)
    digits = data.load("digits")
    nets = [models.build(name, digits.shape, 10, seed=3) for name in ("mlp-1", "mlp-2")]
    split = partition.dirichlet(digits.y, 5, seed=3)
    fed = Federation(digits, split, nets, training=Training(lr=0.05), seed=3)
    assert_same(history, run(make("fedgh", header_lr=0.5), fed, 2))
    assert history.config["model"]["name"] == "mlp-1+mlp-2"


@pytest.fixture
def images(tmp_path):
    """A data set of 16 x 16 images, large enough for the CNNs."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", x=rng.random((80, 16, 16)), y=[0, 1] * 40)
    return str(tmp_path / "images.npz")


@pytest.mark.parametrize("model", ["cnn-5+mlp-5", "mlp+cnn-5", "cnn-5+cnn-small+cnn-5"])
def test_models_of_different_default_rates_need_one_that_is_given(model, images):
    values = {"dataset": images, "partition": "iid", "clients": 4, "rounds": 1}
    with pytest.raises(ValueError, match=r"^lr=None: must be given, for .* have different rates by default$") as error:
        experiment.experiment("local", model=model, **values)
    assert model in str(error.value)


def test_default_rates_are_the_models(images):
    values = {"dataset": images, "partition": "iid", "clients": 3, "rounds": 1, "epochs": 0}
    for model, lr in (("cnn-5", 0.01), ("cnn", 0.005), ("cnn-small+mlp-5+mlp", 0.05), ("mlp-4", 0.05)):
        assert experiment.experiment("local", model=model, **values).config["training"]["lr"] == lr
    given = experiment.experiment("local", model="cnn-5+mlp-5", lr=0.02, **values)
    assert given.config["training"]["lr"] == 0.02


@pytest.mark.parametrize("model", ["mlp+", "+mlp", "mlp++mlp", "mlp+cmm", "mlp + mlp", "mlp,mlp"])
def test_unknown_models_among_others_are_named(model):
    unknown = next(name for name in model.split("+") if name not in models.MODELS)
    with pytest.raises(ValueError, match=rf"^model={unknown!r}: must be one of"):
        experiment.experiment("local", model=model)


@pytest.mark.parametrize("model", [["mlp-1", "mlp-2"], 5], ids=str)
def test_a_model_that_is_no_name_is_named(model):
    with pytest.raises(ValueError, match=r"^model="):
        experiment.experiment("local", model=model)


# --- methods that have a personal and a global model ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Both:
    """Clients train two models of their own, and call the second one, trained at another rate, the global one.

    kinds: the order in which they are named.
    """

    kinds: tuple = ("global", "personal")
    product: str = "after"
    heterogeneous: ClassVar = True

    def server(self, fed):
        return ()

    def client(self, group):
        return {kind: group.each_client(group.init()) for kind in self.kinds}

    def download(self, server, ids):
        return ()

    def local(self, clients, kept, message):
        rates = {"personal": 0.1, "global": 0.02}
        models = {kind: clients.sgd(model_loss, kept[kind], log=kind, lr=rates[kind]) for kind in self.kinds}
        return models, (), models

    def merge(self, server, ids, message, upload, n):
        return ()

    def deploy(self, clients, kept, message):
        return kept


class OnlyLater(Both):
    """Tells of the global model on receiving a message, but not after training."""

    def local(self, clients, kept, message):
        kept, upload, models = super().local(clients, kept, message)
        return kept, upload, models["personal"]


GLOBAL = {f"{when}_global{what}" for when in ("before", "after") for what in ("", "_pooled")}


@pytest.mark.parametrize("several", [False, True])
def test_both_models_are_scored(several):
    """By plain indexing, of every client; columns, pooled means, losses and summaries."""
    fed = mixed(join_ratio=0.5) if several else federation(join_ratio=0.5)
    history = run(Both(), fed, 3)
    last = history.clients[history.clients["round"] == 4].set_index("client")
    row, sizes = history.rounds.iloc[-1], np.array([len(y) for _, y in fed.test])
    for kind, column in (("personal", "before"), ("global", "before_global")):
        own, losses = [], []
        for i, (x, y) in enumerate(fed.test):
            kept = history.state.kept[i % 2] if several else history.state.kept
            params = trees.row(kept[kind], i // 2 if several else i)
            logits = fed.groups[i % len(fed.groups)].model.predict(params, x)
            own.append(float((logits.argmax(1) == y).double().mean()))
            losses.append(float(torch.nn.functional.cross_entropy(logits, y)))
        assert last[column].tolist() == own and last[f"{column}_loss"].tolist() == pytest.approx(losses, rel=1e-5)
        assert row[column] == pytest.approx(np.mean(own))
        assert row[f"{column}_pooled"] == pytest.approx(own @ sizes / sizes.sum())
    assert (last["before"] != last["before_global"]).any()
    assert set(history.rounds) >= GLOBAL and set(history.clients) >= {"before_global_loss", "after_global_loss"}
    for t in (1, 2, 3):
        joined = history.clients[(history.clients["round"] == t) & history.clients["joined"]]
        of_round, n = history.rounds.set_index("round").loc[t], joined["n_test"]
        for column in ("before", "before_global", "after", "after_global"):
            table = joined if column.startswith("after") else history.clients[history.clients["round"] == t]
            assert of_round[column] == pytest.approx(table[column].mean())
            assert of_round[f"{column}_pooled"] == pytest.approx(np.average(table[column], weights=table["n_test"]))
        assert len(n) == 3 and joined["after_global"].notna().all()
        # what those that join hold at the end they have at the start of the next round
        later = history.clients[history.clients["round"] == t + 1].set_index("client")
        assert later.loc[joined["client"], "before_global"].tolist() == joined["after_global"].tolist()
        assert later.loc[joined["client"], "before"].tolist() == joined["after"].tolist()
    assert history.curve("before_global").index.tolist() == [0, 1, 2, 3]
    assert history.curve("after_global").index.tolist() == [1, 2, 3]
    assert history.curve("before_global").iloc[-1] == history.summary()["global"] == row["before_global"]
    assert history.curve().equals(history.curve("after")) and history.summary()["before"] == row["before"]
    assert list(history.summary())[:4] == ["accuracy", "before", "after", "global"]


def test_the_order_in_which_they_are_named_does_not_matter():
    one, other = (run(Both(kinds), federation(), 2) for kinds in (("global", "personal"), ("personal", "global")))
    for table, same in zip(without_seconds(one)[1:], without_seconds(other)[1:], strict=True):
        pd.testing.assert_frame_equal(table, same, check_exact=True)
    assert one.rounds["before_global"].tolist() == other.rounds["before_global"].tolist()


def test_methods_with_one_model_have_no_such_columns():
    history = run(make("fedavg"), federation(), 1)
    assert not any("global" in name for table in (history.rounds, history.clients) for name in table)
    assert "global" not in history.summary()
    with pytest.raises(ValueError, match=r"^point='before_global': must be one of 'before', 'after'$"):
        history.curve("before_global")


def test_a_global_model_may_be_known_before_training_only():
    history = run(OnlyLater(), federation(), 2)
    assert "before_global" in history.rounds and "after_global" not in history.rounds
    assert history.summary()["global"] == history.rounds["before_global"].iloc[-1]
    with pytest.raises(ValueError, match=r"^point='after_global': must be one of 'before', 'before_global', 'after'$"):
        history.curve("after_global")


def test_both_models_scored_less_often():
    every, third = (run(Both(), federation(), 5, eval_every=k) for k in (1, 3))
    for point, rounds in (("before_global", [0, 3, 4, 5]), ("after_global", [1, 4, 5])):
        assert third.curve(point).index.tolist() == rounds
        assert third.curve(point).tolist() == every.curve(point).loc[rounds].tolist()
    assert third.summary()["global"] == every.summary()["global"]


@pytest.mark.parametrize("eval_every", [1, 3])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("cut", [1, 3])
def test_a_run_with_both_models_cut_short_goes_on_to_the_same_result(cut, several, eval_every, tmp_path, monkeypatch):
    def go(**options):
        fed = mixed(join_ratio=0.5) if several else federation(join_ratio=0.5)
        return run(Both(), fed, 4, eval_every=eval_every, **options)

    whole = go()
    monkeypatch.setattr(experiment._Saver, "__call__", eager(experiment._Saver.__call__))
    with monkeypatch.context() as cutting, pytest.raises(Stop):
        stop_after(cutting, cut)
        go(out=tmp_path)
    for loaded in (False, True):
        again = go(out=tmp_path)
        assert (again.loaded is not None) == loaded
        assert_same(again, whole)
        assert again.summary()["global"] == whole.summary()["global"]


def test_a_global_model_that_gives_nan_stops_the_run():
    class Broken(Both):
        def deploy(self, clients, kept, message):
            return kept | {"global": trees.full_like(kept["global"], float("nan"))}

    with pytest.raises(FloatingPointError, match=r"^client 0: its model gives NaN on its test data"):
        run(Broken(), federation(), 1)


# --- what a result depends on ----------------------------------------------------------------------------------------


def folder_of(method, fed, rounds=2):
    return digest(describe(method, fed, rounds))


CHANGES = {
    "setting": lambda: (make("fedah", weight_lr=0.25), federation()),
    "method": lambda: (make("fedrep"), federation()),
    "seed": lambda: (make("fedah"), federation(seed=1)),
    "clients": lambda: (make("fedah"), federation(clients=5)),
    "training": lambda: (make("fedah"), federation(training=Training(lr=0.04))),
    "join ratio": lambda: (make("fedah"), federation(join_ratio=0.5)),
    "dtype": lambda: (make("fedah"), federation(dtype=torch.float64)),
    "engine": lambda: (make("fedah"), federation(engine="stacked")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_configuration_has_another_folder(change):
    assert folder_of(*CHANGES[change]()) != folder_of(make("fedah"), federation())


def test_the_same_configuration_has_the_same_folder():
    assert folder_of(make("fedah"), federation()) == folder_of(make("fedah"), federation())
    assert folder_of(make("fedah"), federation()) != folder_of(make("fedah"), federation(), rounds=3)


def test_changed_data_have_another_folder():
    fed = federation()
    x = fed.dataset.x.clone()
    x[0, 0, 0, 0] += 0.5
    moved = dataclasses.replace(fed.dataset, x=x)
    assert folder_of(make("fedah"), Federation(moved, fed.partition, fed.model)) != folder_of(
        make("fedah"), Federation(fed.dataset, fed.partition, fed.model)
    )


@pytest.mark.parametrize(
    "module",
    ["pflkit.methods.fedah", "pflkit.methods.fedrep", "pflkit.training", "pflkit.descent", "pflkit.partition"],
)
def test_changed_code_has_another_folder(module, monkeypatch):
    """FedAH uses FedRep's losses, so a change there may change FedAH's results; FedPer's file is not used."""
    before = folder_of(make("fedah"), federation())
    source = identity.inspect.getsource
    changed = sys.modules[module]
    monkeypatch.setattr(identity.inspect, "getsource", lambda x: source(x) + "\n# changed" * (x is changed))
    assert folder_of(make("fedah"), federation()) != before
    other = sys.modules["pflkit.methods.fedper"]
    monkeypatch.setattr(identity.inspect, "getsource", lambda x: source(x) + "\n# changed" * (x is other))
    assert folder_of(make("fedah"), federation()) == before


def test_config_is_plain_and_names_what_was_run(tmp_path):
    run(make("fedah", weight_lr=0.5), federation(join_ratio=(0.5, 1.0)), 2, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert (config["method"], config["settings"]["weight_lr"], config["rounds"]) == ("fedah", 0.5, 2)
    assert config["join_ratio"] == [0.5, 1.0] and config["training"]["lr"] == 0.05
    assert config["partition"]["name"] == "dirichlet" and config["partition"]["beta"] == 0.5


# --- experiments from plain values -----------------------------------------------------------------------------------


def test_defaults_are_the_papers():
    history = experiment.experiment("local", rounds=1)
    config = history.config
    assert config["clients"] == 20 and config["join_ratio"] == [1.0, 1.0]
    assert config["partition"]["name"] == "dirichlet" and config["partition"]["beta"] == 0.1
    assert config["training"]["batch_size"] == 10 and config["training"]["epochs"] == 1
    assert [experiment.LR[name] for name in ("cnn", "resnet18", "fasttext")] == [0.005, 0.01, 0.01]


def test_how_steps_are_taken_is_what_was_asked_for():
    rule = {"lr": 0.02, "batch_size": 20, "epochs": 2, "momentum": 0.5, "weight_decay": 0.1, "clip": 3.0}
    assert experiment.experiment("local", rounds=1, **rule).config["training"] == rule | {"drop_last": False}


def test_texts_and_their_model(monkeypatch):
    """A data set of ids tells the model how many there are; a model of images is refused before anything is run."""
    x, y = torch.arange(480).reshape(60, 8) % 50, np.arange(60) % 4
    monkeypatch.setitem(data.LOADERS, "texts", lambda root, download: (x, y, tuple("abcd"), 50))
    values = {"dataset": "texts", "partition": "iid", "clients": 3, "rounds": 1}
    history = experiment.experiment("fedavg", model="fasttext", **values)
    assert history.config["training"]["lr"] == 0.01 and history.state.server[0]["embed.weight"].shape == (50, 32)
    with pytest.raises(ValueError, match=r"^model='mlp': does not fit inputs of shape \(8,\), ids of words: takes"):
        experiment.experiment("fedavg", model="mlp", **values)
    with pytest.raises(ValueError, match=r"^model='fasttext': does not fit inputs of shape \(1, 8, 8\): takes ids"):
        experiment.experiment("fedavg", model="fasttext")


@pytest.mark.parametrize(
    "argument", [{"method": "fedah2"}, {"dataset": "digit"}, {"model": "cmm"}, {"partition": "dir"}, {"clients": 0}]
)
def test_unknown_values_are_named(argument):
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: "):
        experiment.experiment(**argument)


def test_an_empty_watched_tree_is_left_out():
    """With all layers in the extractor FedAH has no head, and so no W to watch."""
    fed = federation()
    fed = Federation(fed.dataset, fed.partition, models.build("mlp", fed.dataset.shape, 10, head_layers=0))
    assert run(make("fedah"), fed, 1).watch.empty


# --- damage ----------------------------------------------------------------------------------------------------------


def cut_state(folder):
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:100])


DAMAGE = {
    "state cut": cut_state,
    "state empty": lambda folder: (folder / "state.safetensors").write_bytes(b""),
    "rounds empty": lambda folder: (folder / "rounds.csv").write_text(""),
    "history only a header": lambda folder: (folder / "history.csv").write_text("round,client\n"),
    "watch missing": lambda folder: (folder / "watch.csv").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_run_is_named_and_not_used(damage, tmp_path):
    run(make("fedah"), federation(), 2, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    DAMAGE[damage](folder)
    with pytest.raises(ValueError, match=rf"{folder.name}: this saved run is damaged .*fresh=True"):
        run(make("fedah"), federation(), 2, out=tmp_path)
    assert run(make("fedah"), federation(), 2, out=tmp_path, fresh=True).loaded is None


def test_a_fresh_repeat_cut_short_is_not_taken_for_the_finished_run(tmp_path, monkeypatch):
    whole = run(make("fedah"), federation(), 4, out=tmp_path)
    monkeypatch.setattr(experiment._Saver, "__call__", eager(experiment._Saver.__call__))
    with monkeypatch.context() as cutting, pytest.raises(Stop):
        stop_after(cutting, 1)
        run(make("fedah"), federation(), 4, out=tmp_path, fresh=True)
    again = run(make("fedah"), federation(), 4, out=tmp_path)
    assert again.loaded is None
    assert_same(again, whole)


def test_a_server_that_holds_one_tensor_twice_is_saved(tmp_path):
    class Twice(type(make("fedavg"))):
        def server(self, fed):
            model = fed.init()
            return {"now": model, "same": model}

        def download(self, server, ids):
            return super().download(server["now"], ids)

        def merge(self, server, ids, message, upload, n):
            model = super().merge(server, ids, message, upload, n)
            return {"now": model, "same": model}

    whole = run(Twice(), federation(), 2, out=tmp_path)
    assert_same(run(Twice(), federation(), 2, out=tmp_path), whole)


def test_a_server_that_is_not_finite_stops_the_run():
    class Broken(type(make("fedavg"))):
        def merge(self, server, ids, message, upload, n):
            return trees.full_like(server, float("nan"))

    with pytest.raises(FloatingPointError, match=r"round 1: what Broken\.merge made is not finite"):
        run(Broken(), federation(), 2)


@pytest.mark.parametrize("method", ["fedavg", type(make("fedavg"))])
def test_a_name_or_class_is_no_method(method):
    with pytest.raises(ValueError, match="must be a method, as make"):
        run(method, federation(), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": "rsnet18"},
        {"partition": "foo"},
        {"lr": -1},
        {"momentum": 1.5},
        {"weight_decay": -1.0},
        {"clip": 0.0},
        {"batch_size": 0},
        {"engine": "zz"},
        {"rounds": 0},
        {"settings": [1]},
    ],
    ids=str,
)
def test_what_needs_no_data_is_refused_before_they_are_loaded(wrong, monkeypatch):
    monkeypatch.setattr(experiment.data, "load", lambda *_, **__: pytest.fail("the data were loaded"))
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
        experiment.experiment("fedah", dataset="tiny-imagenet", **wrong)
