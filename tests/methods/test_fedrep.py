"""FedRep: a shared extractor under personal heads, trained in turns."""

import math

import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedrep, make


def test_head_then_extractor_on_squared_loss(by_hand, scalar_net, play, monkeypatch):
    """y = h r x, loss ½(y − 1)², x = 1, r = 1, h = 0, η = .5: first h = .5, then r = 1 + .5·.5·.5 = 1.125."""
    monkeypatch.setattr(fedrep, "head_loss", lambda model, h, b: ((model.classify(h, b[0]) - 1) ** 2).mean() / 2)
    monkeypatch.setattr(
        fedrep, "extractor_loss", lambda model, r, b, h: ((model.predict((r, h), b[0]) - 1) ** 2).mean() / 2
    )
    state, _ = play(by_hand(scalar_net(1, 0), [([[1.0]], [0])], rule={"lr": 0.5}), make("fedrep"), 1)
    assert (state.server["weight"].tolist(), state.kept["weight"].tolist()) == ([1.125], [[0.5]])


def test_head_then_extractor_on_cross_entropy(by_hand, scalar_net, play):
    """Logits (0, h r), label 1: h = 0 + .5·½·r = .25, then r = 1 + .5·σ(−.25)·.25."""
    state, _ = play(by_hand(scalar_net(1, 0, classes=2), [([[1.0]], [1])], rule={"lr": 0.5}), make("fedrep"), 1)
    assert state.kept["weight"].tolist() == [[0.25]]
    assert state.server["weight"].item() == pytest.approx(1 + 0.5 * 0.25 / (1 + math.exp(0.25)))


@pytest.mark.parametrize("head_epochs", [1, 3])
def test_two_rounds_in_plain_torch(uneven, plain, play, in_order, head_epochs):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    state, _ = play(fed := uneven(rule=rule), make("fedrep", head_epochs=head_epochs), 2)
    r, heads = fed.init()[0], [fed.init()[1]] * 4
    for _ in range(2):
        peers = [plain(fed, i).load(r, heads[i]) for i in range(4)]
        ends = [peer.train(peer.h, epochs=head_epochs).train(peer.r, epochs=2).state() for peer in peers]
        extractors, heads = zip(*ends, strict=True)
        r = peers[0].mean(extractors, [1, 7, 10, 11])
    assert trees.unequal(state.server, r) < 1e-12
    assert max(trees.unequal(trees.row(state.kept, i), heads[i]) for i in range(4)) < 1e-12


RULE = {"momentum": 0.9, "weight_decay": 0.1}  # either would move a part that is frozen in name only


def test_the_extractor_stands_still_while_the_head_trains(digits, play):
    fed = digits(rule=RULE | {"epochs": 0})
    state, _ = play(fed, make("fedrep"), 2)
    assert trees.unequal(state.server, fed.init()[0]) == 0
    assert all(trees.unequal(trees.row(state.kept, i), fed.init()[1]) > 0 for i in range(6))


def test_heads_stand_still_while_the_extractor_trains(digits, play):
    """E_h = 0: FedAvg on r under fixed heads."""
    fed = digits(rule=RULE)
    state, _ = play(fed, make("fedrep", head_epochs=0), 2)
    assert trees.unequal(state.server, fed.init()[0]) > 0
    assert all(trees.unequal(trees.row(state.kept, i), fed.init()[1]) == 0 for i in range(6))


def test_one_epoch_trains_the_head(digits, play):
    """FL-bench's FedRep with one local epoch leaves the head as it was."""
    fed = digits(rule={"epochs": 1})
    state, _ = play(fed, make("fedrep"), 1)
    assert all(trees.unequal(trees.row(state.kept, i), fed.init()[1]) > 0 for i in range(6))


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_an_empty_head_gives_fedavg(digits, play, in_order, model):
    """To the bit where the batches come in the same order: FedRep's extractor phase has a stream of its own."""
    fed = digits(model, head_layers=0, join_ratio=0.5)
    rep, avg = (play(fed, make(name), 2)[0] for name in ("fedrep", "fedavg"))
    assert trees.unequal(rep.server, avg.server[0]) == 0
    assert trees.unequal(rep.server, fed.init()[0]) > 0


def test_a_frozen_batch_norm_stands_still(by_hand, linear, play):
    """While heads train, the extractor runs in evaluation mode: running statistics 0 and 1, features its inputs.

    So the head's step is that of a linear layer on x / √(1 + ε): from h = 0, η · mean((onehot − ½) zᵀ).
    """
    head = nn.Linear(1, 2)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    net = models.from_modules(nn.BatchNorm1d(1), head, (1,), 2)
    fed = by_hand(net, [([[3.0], [5.0]], [1, 1])], rule={"lr": 0.1, "epochs": 0})
    state, _ = play(fed, make("fedrep"), 1)
    assert trees.unequal(state.server, fed.init()[0]) == 0
    step = 0.1 * 0.5 * 4 / math.sqrt(1 + 1e-5)
    torch.testing.assert_close(state.kept["weight"][0].flatten(), torch.tensor([-step, step], dtype=torch.float64))


def test_the_trained_extractors_batch_norm_moves(by_hand, linear, play):
    """Phase B runs it in training mode: one batch of mean 4 takes the running mean to .1·4."""
    net = models.from_modules(nn.BatchNorm1d(1), linear(1, 2), (1,), 2)
    state, _ = play(by_hand(net, [([[3.0], [5.0]], [1, 1])]), make("fedrep"), 1)
    assert state.server["running_mean"].item() == pytest.approx(0.4)
