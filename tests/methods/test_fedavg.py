"""FedAvg: the weighted average of what sampled clients trained from the global model."""

import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedavg, make


@pytest.mark.parametrize(("sizes", "expected"), [((1, 1), 1.5), ((1, 3), 2.0)])
def test_one_step_on_two_quadratics(by_hand, scalar_net, play, monkeypatch, sizes, expected):
    """f_1 = ½w², f_2 = ½(w − 4)², η = .5 from w = 1: θ = (.5, 2.5), whose mean is 1.5, and with n = (1, 3) 2."""
    monkeypatch.setattr(fedavg, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean() / 2)
    clients = [([[c]] * n, [0] * n) for c, n in zip((0.0, 4.0), sizes, strict=True)]
    state, rounds = play(by_hand(scalar_net(1, 1), clients, rule={"lr": 0.5}), make("fedavg"), 1)
    assert rounds[0].held[0]["weight"].tolist() == [[0.5], [2.5]]
    assert state.server[0]["weight"].tolist() == [expected]


def test_merge_weights_by_training_samples():
    """n = (1, 3), θ = (2, 6): (1·2 + 3·6) / 4 = 5."""
    upload = {"w": torch.tensor([[2.0], [6.0]])}
    assert make("fedavg").merge(None, [0, 1], None, upload, [1, 3])["w"].tolist() == [5.0]


def test_one_full_batch_step_is_gradient_descent_on_all_data(uneven, play):
    """E = 1 and B = n: w' = w − η ∇F(w), F = Σ n_i/n f_i the mean loss over everybody's samples (FedSGD)."""
    fed = uneven(rule={"lr": 0.3, "batch_size": 11})
    state, _ = play(fed, make("fedavg"), 1)
    start = fed.init()
    for leaf in trees.leaves(start):
        leaf.requires_grad_()
    x, y = (torch.cat(parts) for parts in zip(*fed.train, strict=True))
    nn.functional.cross_entropy(fed.model.predict(start, x), y).backward()
    descended = trees.tree_map(lambda w: (w - 0.3 * w.grad).detach(), start)
    assert trees.unequal(state.server, descended) < 1e-12


def test_two_rounds_in_plain_torch(uneven, plain, play, in_order):
    """Rounds of 1, 7, 10 and 11 samples in batches of 10; the second round starts from the first one's average."""
    rule = {"lr": 0.1, "epochs": 3, "momentum": 0.9, "weight_decay": 0.01}
    state, _ = play(fed := uneven(rule=rule), make("fedavg"), 2)
    r, h = fed.init()
    for _ in range(2):
        peers = [plain(fed, i).load(r, h) for i in range(4)]
        ends = [peer.train(peer.r, peer.h, epochs=3).state() for peer in peers]
        r, h = (peers[0].mean(part, [1, 7, 10, 11]) for part in zip(*ends, strict=True))
    assert trees.unequal(state.server, (r, h)) < 1e-12


def test_identical_clients_are_one_client(by_hand, linear, play, in_order):
    """Equal data in an equal order: the average is what a single client does, to the bit."""
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.ReLU()), linear(3, 2), (2,), 2)
    same = torch.linspace(-1, 1, 46).reshape(23, 2), [0, 1] * 11 + [1]
    feds = [by_hand(net, [same] * k, rule={"lr": 0.1}, dtype=torch.float32) for k in (1, 3)]
    one, three = (play(fed, make("fedavg"), 3)[0].server for fed in feds)
    assert trees.unequal(one, three) == 0


def test_only_sampled_clients_are_averaged(digits, play):
    fed = digits(join_ratio=0.3)
    state, (result,) = play(fed, make("fedavg"), 1)
    n = torch.tensor([len(fed.train[i][1]) for i in result.ids])
    assert len(result.ids) == 2
    for new, held in zip(trees.leaves(state.server), trees.leaves(result.held), strict=True):
        torch.testing.assert_close(new, (held[0] * n[0] + held[1] * n[1]) / n.sum())


def test_batch_norm_statistics_are_averaged(by_hand, linear, play):
    """Batch-norm on the raw inputs, one batch a client: running mean .9·0 + .1·mean, variance .9·1 + .1·var (n − 1).

    Client 0 holds (1, 3): mean 2, var 2; client 1 holds (10, 12, 14, 16, 18, 20): mean 15, var 14. n = (2, 6).
    """
    net = models.from_modules(nn.BatchNorm1d(1), linear(1, 2), (1,), 2)
    clients = [([[1.0], [3.0]], [0, 1]), ([[10.0], [12], [14], [16], [18], [20]], [0, 1] * 3)]
    fed = by_hand(net, clients)
    state, (result,) = play(fed, make("fedavg"), 1)
    assert result.held[0]["running_mean"].flatten().tolist() == pytest.approx([0.2, 1.5])
    assert state.server[0]["running_mean"].item() == pytest.approx((2 * 0.2 + 6 * 1.5) / 8)
    assert state.server[0]["running_var"].item() == pytest.approx((2 * (0.9 + 0.2) + 6 * (0.9 + 1.4)) / 8)
    assert state.server[0]["num_batches_tracked"].dtype == torch.int64
    assert state.server[0]["num_batches_tracked"].item() == 1
    deployed = fed.deployed(make("fedavg"), state, 2)
    assert trees.unequal(trees.row(deployed, 0), trees.row(deployed, 1)) == 0  # to the last buffer


def test_batch_norm_counter_stays_an_integer(by_hand, linear, play):
    """Batches of 2: client 0 (2 samples) runs 1, client 1 (6 samples) 3; (2·1 + 6·3) / 8 = 2.5 is rounded to even."""
    net = models.from_modules(nn.BatchNorm1d(1), linear(1, 2), (1,), 2)
    clients = [([[1.0], [3.0]], [0, 1]), ([[float(i)] for i in range(6)], [0, 1] * 3)]
    state, (result,) = play(by_hand(net, clients, rule={"batch_size": 2}), make("fedavg"), 1)
    assert result.held[0]["num_batches_tracked"].tolist() == [1, 3]
    assert state.server[0]["num_batches_tracked"].tolist() == 2
