"""A newcomer's own method: one file, and one line in METHODS. Here LG-FedAvg, shared heads on personal extractors."""

import importlib.util
import sys

import pytest
import torch

from pflkit import experiment, identity, trees
from pflkit.methods import METHODS, make

FILE = '''
"""LG: a shared head on personal extractors."""

from dataclasses import dataclass

from pflkit.messages import Shared
from pflkit.methods.fedavg import model_loss
from pflkit.trees import average


@dataclass(frozen=True)
class LG:
    epochs: int = 1

    def server(self, fed):
        return fed.init()[1]

    def client(self, group):
        return group.each_client(group.init()[0])

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        extractor, head = clients.sgd(model_loss, (kept, message), epochs=self.epochs)
        return extractor, head, (extractor, head)

    def merge(self, server, ids, message, upload, n):
        return average(upload, n)

    def deploy(self, clients, kept, message):
        return kept, message
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The newcomer's module, in a folder of his own."""
    path = tmp_path / "own_lg.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("own_lg", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_lg", module)
    spec.loader.exec_module(module)
    monkeypatch.setitem(METHODS, "lg", module.LG)  # the one line
    return module


def test_it_runs_by_name_with_settings_and_costs(own, tmp_path):
    history = experiment.experiment(
        "lg", clients=8, join_ratio=0.5, rounds=2, settings={"epochs": 2}, out=tmp_path / "runs", engine="loop"
    )
    assert history.config["method"] == "lg"
    assert history.config["settings"] == {"epochs": 2}
    joined = history.clients[history.clients["joined"]]
    assert len(joined) == 8
    assert set(joined["bytes_up"]) == set(joined["bytes_down"]) == {4 * 650}  # the head of 64 x 10 weights, 10 biases
    assert joined[["before", "after"]].notna().all(axis=None)
    with pytest.raises(ValueError, match="rate=1: lg has no such setting; its settings: epochs"):
        make("lg", rate=1)
    for wrong in (True, 1.5, "1"):  # refused by its type alone: the class has no checks of its own
        with pytest.raises(ValueError, match=r"epochs=.*: must be of type int"):
            make("lg", epochs=wrong)


def test_it_runs_without_the_line_too(own, digits):
    history = experiment.run(own.LG(), digits(join_ratio=0.5), 1)
    assert history.rounds["after"].notna().any()


def test_its_round_is_exact(own, by_hand, scalar_net, play):
    """Logits (0, h r x), r = h = 1, x = 1, η = .5; labels 1 and 0: r_i and h_i move by ±.5 σ(∓1), n = (1, 3)."""
    fed = by_hand(scalar_net(1, 1, classes=2), [([[1.0]], [1]), ([[1.0]] * 3, [0] * 3)], rule={"lr": 0.5})
    state, _ = play(fed, own.LG(), 1)
    up, down = (0.5 * torch.sigmoid(torch.tensor(s, dtype=torch.float64)).item() for s in (-1.0, 1.0))
    assert state.kept["weight"].flatten().tolist() == pytest.approx([1 + up, 1 - down])
    assert state.server["weight"].item() == pytest.approx((1 + up + 3 * (1 - down)) / 4)


def test_changed_source_never_reads_old_results(own, tmp_path, digits):
    """The method's code is part of what a result depends on, wherever its file lies."""
    before = identity.describe(own.LG(), digits(), 1)["code"]
    exec(compile(FILE.replace("average(upload, n)", "average(upload, 2 * n)"), "own_lg.py", "exec"), vars(own))
    assert identity.describe(own.LG(), digits(), 1)["code"] != before


def test_absent_clients_extractors_stay(own, digits):
    fed = digits(join_ratio=0.5)
    state = fed.start(own.LG())
    ids = fed.play(own.LG(), state, 1).ids
    moved = [trees.unequal(trees.row(state.kept, i), fed.init()[0]) > 0 for i in range(6)]
    assert moved == [i in ids for i in range(6)]
