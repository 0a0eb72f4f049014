"""FedAvg + fine-tuning: FedAvg's rounds, and a tuned copy of the global model where it is used."""

import pytest
import torch

from pflkit import experiment, trees
from pflkit.methods import fedavg_ft, make


def test_two_steps_on_a_quadratic(by_hand, scalar_net, monkeypatch):
    """f = ½(w − 4)² from w = 2 at η_ft = .25, 2 steps: 4 − .75²·2 = 2.875; the local rate does not matter."""
    monkeypatch.setattr(fedavg_ft, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean() / 2)
    fed = by_hand(scalar_net(2, 1), [([[4.0]], [0])], rule={"lr": 10.0})
    method = make("fedavg_ft", finetune_epochs=2, finetune_lr=0.25)
    assert fed.deployed(method, fed.start(method), 1)[0]["weight"].tolist() == [[2.875]]


@pytest.mark.parametrize("head_only", [False, True])
def test_the_tuned_copy_in_plain_torch(uneven, plain, in_order, head_only):
    fed = uneven(rule={"lr": 0.1, "momentum": 0.9})
    method = make("fedavg_ft", finetune_epochs=3, head_only=head_only)
    tuned = fed.deployed(method, fed.start(method), 1)
    for i in range(4):
        peer = plain(fed, i)
        moved = [peer.h] if head_only else [peer.r, peer.h]
        assert trees.unequal(trees.row(tuned, i), peer.train(*moved, epochs=3).state()) < 1e-12


def test_head_only_leaves_the_extractor(digits):
    fed, method = digits(rule={"momentum": 0.5, "weight_decay": 0.1}), make("fedavg_ft", head_only=True)
    extractor, head = fed.deployed(method, fed.start(method), 1)
    for i in range(6):
        assert trees.unequal(trees.row(extractor, i), fed.init()[0]) == 0
        assert trees.unequal(trees.row(head, i), fed.init()[1]) > 0


def test_rounds_are_fedavgs_and_tuning_leaves_no_trace(digits, play):
    """Three rounds with the copies tuned and used in between end in FedAvg's global model, to the bit."""
    fed, tuning, plain = digits(join_ratio=0.5), make("fedavg_ft", finetune_epochs=2), make("fedavg")
    state = fed.start(tuning)
    for _ in range(3):
        before = trees.clone(state.server)
        tuned = fed.deployed(tuning, state, 3)
        assert trees.unequal(trees.row(tuned, 0), before) > 0
        assert trees.unequal(state.server, before) == 0
        fed.play(tuning, state, 3)
    assert trees.unequal(state.server, play(fed, plain, 3)[0].server) == 0


def test_no_epochs_is_fedavg_and_both_are_in_one_table(digits):
    """On one split: k = 0 gives FedAvg's accuracies; with k > 0 both products stand in the same column, by name."""
    fed = digits(join_ratio=0.5)
    methods = make("fedavg"), make("fedavg_ft", finetune_epochs=0), make("fedavg_ft", finetune_epochs=5)
    runs = [experiment.run(method, fed, 2) for method in methods]
    plain, untuned, tuned = (run.clients.set_index(["round", "client", "n_test"]) for run in runs)
    assert plain.equals(untuned)
    assert plain.index.equals(tuned.index)
    assert plain[["after", "after_loss", "bytes_up"]].equals(tuned[["after", "after_loss", "bytes_up"]])
    assert (plain["before_loss"] != tuned["before_loss"]).all()
    assert [(run.config["method"], run.product) for run in runs] == [
        ("fedavg", "before"),
        ("fedavg_ft", "before"),
        ("fedavg_ft", "before"),
    ]


def test_tuning_follows_clients_own_data(by_hand, scalar_net):
    """Two clients who call the same inputs by opposite labels: tuned copies move apart, by exactly opposite steps."""
    x = torch.linspace(0.5, 1, 4)[:, None]
    fed = by_hand(scalar_net(1, 0, classes=2), [(x, [1] * 4), (x, [0] * 4)], rule={"lr": 0.1})
    method = make("fedavg_ft", head_only=True)
    _, head = fed.deployed(method, fed.start(method), 1)
    assert head["weight"][0].item() == pytest.approx(0.1 * 0.5 * 0.75)  # −∂L/∂h = ½ x at h = 0, mean of x is .75
    assert head["weight"][1].item() == pytest.approx(-0.1 * 0.5 * 0.75)
