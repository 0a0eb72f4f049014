"""FedPer: a shared extractor under personal heads, trained together."""

import math

import pytest

from pflkit import trees
from pflkit.methods import fedper, make


def test_joint_step_on_squared_loss(by_hand, scalar_net, play, monkeypatch):
    """y = h r x, loss ½(y − 1)², x = 1, r = 1, h = 0, η = .5: both gradients at the start, so r = 1 and h = .5."""
    monkeypatch.setattr(fedper, "model_loss", lambda model, p, b: ((model.predict(p, b[0]) - 1) ** 2).mean() / 2)
    state, _ = play(by_hand(scalar_net(1, 0), [([[1.0]], [0])], rule={"lr": 0.5}), make("fedper"), 1)
    assert (state.server["weight"].tolist(), state.kept["weight"].tolist()) == ([1.0], [[0.5]])


def test_joint_step_on_cross_entropy(by_hand, scalar_net, play):
    """Logits (0, s), s = h r x, label 1: ∂L/∂s = −σ(−s). From r = 1, h = 1 at x = 1: both move by η σ(−1)."""
    state, _ = play(by_hand(scalar_net(1, 1, classes=2), [([[1.0]], [1])], rule={"lr": 0.5}), make("fedper"), 1)
    expected = pytest.approx(1 + 0.5 / (1 + math.e))
    assert (state.server["weight"].item(), state.kept["weight"].item()) == (expected, expected)


def test_two_rounds_in_plain_torch(uneven, plain, play, in_order):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    state, _ = play(fed := uneven(rule=rule), make("fedper"), 2)
    r, heads = fed.init()[0], [fed.init()[1]] * 4
    for _ in range(2):
        peers = [plain(fed, i).load(r, heads[i]) for i in range(4)]
        extractors, heads = zip(*(peer.train(peer.r, peer.h, epochs=2).state() for peer in peers), strict=True)
        r = peers[0].mean(extractors, [1, 7, 10, 11])
    assert trees.unequal(state.server, r) < 1e-12
    assert max(trees.unequal(trees.row(state.kept, i), heads[i]) for i in range(4)) < 1e-12


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_an_empty_head_gives_fedavg(digits, play, model):
    fed = digits(model, head_layers=0, join_ratio=0.5)
    per, avg = (play(fed, make(name), 2)[0] for name in ("fedper", "fedavg"))
    assert trees.unequal(per.server, avg.server[0]) == 0
    assert trees.unequal(per.server, fed.init()[0]) > 0


@pytest.mark.parametrize(("model", "all_layers"), [("mlp", 2), ("cnn-small", 4)])
def test_an_empty_extractor_gives_local(digits, play, model, all_layers):
    fed = digits(model, head_layers=all_layers)
    per, local = (play(fed, make(name), 2) for name in ("fedper", "local"))
    assert trees.unequal(per[0].kept, local[0].kept[1]) == 0
    assert per[1][0].bytes_up.tolist() == [0] * 6


def test_heads_differ_after_a_round_and_before_uses_the_last_one(digits, play):
    fed = digits()
    state, (result,) = play(fed, make("fedper"), 1)
    extractor, head = fed.deployed(make("fedper"), state, 2)
    assert trees.unequal(head, result.held[1]) == 0
    assert all(trees.unequal(trees.row(extractor, i), state.server) == 0 for i in range(6))
    assert all(trees.unequal(trees.row(head, 0), trees.row(head, i)) > 0 for i in range(1, 6))
