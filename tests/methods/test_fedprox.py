"""FedProx: FedAvg whose local training is held near the global model."""

import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedprox, make


@pytest.fixture
def quadratic(by_hand, scalar_net, monkeypatch):
    """A function that plays one round on f(w) = ½(w − 4)² from w^t = `start`: the extractor's one number at its end."""
    monkeypatch.setattr(fedprox, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean() / 2)

    def play(mu, epochs, lr, start=0.0):
        fed, method = (
            by_hand(scalar_net(start, 1), [([[4.0]], [0])], rule={"lr": lr, "epochs": epochs}),
            make("fedprox", mu=mu),
        )
        state = fed.start(method)
        fed.play(method, state, 1)
        return state.server[0]["weight"].item()

    return play


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mu", "expected"), [(1.0, [0.4, 0.72]), (0.0, [0.4, 0.76])])
def test_two_steps_on_a_quadratic(quadratic, mu, expected):
    """η = .1: .4, then .4 + .1·(3.6 − .4μ). The anchor is w^t, not the last step."""
    assert [quadratic(mu, epochs, 0.1) for epochs in (1, 2)] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("mu", "start", "expected"), [(1.0, 0.0, 2.0), (3.0, 0.0, 1.0), (1.0, -2.0, 1.0), (0.0, 9.0, 4.0)]
)
def test_the_minimum_lies_between_data_and_global_model(quadratic, mu, start, expected):
    """(4 + μ w^t) / (1 + μ)."""
    assert quadratic(mu, 400, 0.1, start) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mu", [1e3, 1e6, 1e9])
def test_a_large_mu_holds_the_model_where_it_was(quadratic, mu):
    """η μ = 1.5 < 2, so steps shrink, by −.5 each: w ends at (4 + 0) / (1 + μ) and was never further than 1.5·4/μ."""
    assert quadratic(mu, 1, 1.5 / mu) == pytest.approx(6 / mu, rel=1e-12)
    assert quadratic(mu, 100, 1.5 / mu) == pytest.approx(4 / (1 + mu), rel=1e-9)
    free = 4 - 4 * (1 - 1.5 / mu) ** 100  # without μ
    assert quadratic(0.0, 100, 1.5 / mu) == pytest.approx(free, rel=1e-5)


def test_a_rate_above_2_over_mu_leaves(quadratic):
    """η (1 + μ) = 2.1 turns each error by −1.1."""
    assert quadratic(1.0, 3, 1.05) == pytest.approx(2 - 2 * (-1.1) ** 3, rel=1e-12)


# --- a round, written out --------------------------------------------------------------------------------------------


def train(peer, mu, epochs):
    """SGD of a Plain client on f + μ/2 Σ (p − p^t)² over its parameters; the mean of f alone, over all samples seen."""
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    peer.r.train(), peer.h.train()
    params = [*peer.r.parameters(), *peer.h.parameters()]
    anchor, optimizer, total = [p.detach().clone() for p in params], torch.optim.SGD(params, **rule), 0.0
    for x, y in peer.batches() * epochs:
        optimizer.zero_grad()
        apart = sum(((p - a) ** 2).sum() for p, a in zip(params, anchor, strict=True))
        loss = nn.functional.cross_entropy(peer.h(peer.r(x)), y)
        (loss + mu / 2 * apart).backward()
        if peer.rule.clip is not None:
            nn.utils.clip_grad_norm_(params, peer.rule.clip)
        optimizer.step()
        total += loss.item() * len(y)
    return total / (epochs * len(peer.y))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_two_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, clip):
    """The term is part of the gradient that is clipped; clip_grad_norm_ adds 1e-6 to the norm that it divides by."""
    rule = {"lr": 0.1, "epochs": 3, "momentum": 0.9, "weight_decay": 0.01, "clip": clip}
    state, rounds = play(fed := uneven(rule=rule), make("fedprox", mu=0.7), 2)
    r, h = fed.init()
    for result in rounds:
        peers = [plain(fed, i).load(r, h) for i in range(4)]
        losses = [train(peer, 0.7, epochs=3) for peer in peers]
        r, h = (peers[0].mean(part, [1, 7, 10, 11]) for part in zip(*(p.state() for p in peers), strict=True))
        assert result.log()["train"].tolist() == pytest.approx(losses, rel=1e-5 if clip else 1e-12)
    assert trees.unequal(state.server, (r, h)) < (1e-5 if clip else 1e-12)
    free, _ = play(fed, make("fedavg"), 2)
    assert trees.unequal(state.server, free.server) > 1e-2


def test_two_rounds_with_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread):
    """The buffers, of which one is an integer, run freely and are averaged; the term holds back parameters only."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "epochs": 4, "momentum": 0.5})
    state, rounds = play(fed, make("fedprox", mu=0.7), 2)
    r, h = fed.init()
    for result in rounds:
        peers = [plain(fed, i).load(r, h) for i in range(3)]
        losses = [train(peer, 0.7, epochs=4) for peer in peers]
        r, h = (peers[0].mean(part, sizes) for part in zip(*(p.state() for p in peers), strict=True))
        assert result.log()["train"].tolist() == pytest.approx(losses, rel=1e-12)
    assert trees.unequal(state.server, (r, h)) < 1e-12
    assert state.server[0]["1.num_batches_tracked"].item() == 8


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_mu_zero_is_fedavg(digits, play, model):
    """To the bit, with momentum, decay and clipping about."""
    rule = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    fed = digits(model, join_ratio=0.5, rule=rule)
    (prox, rounds), (avg, others) = (play(fed, method, 2) for method in (make("fedprox", mu=0.0), make("fedavg")))
    assert trees.unequal(prox.server, avg.server) == 0
    assert trees.unequal(rounds[-1].held, others[-1].held) == 0
    assert trees.unequal(prox.server, fed.init()) > 0


def test_the_first_local_step_does_not_depend_on_mu(digits, play):
    """There θ = w^t, and so the term's gradient is 0; it is not at the second step."""
    one, two = (digits(rule={"batch_size": 1000, "epochs": epochs}) for epochs in (1, 2))
    for fed, same in ((one, True), (two, False)):
        ends = [play(fed, make("fedprox", mu=mu), 1)[0].server for mu in (0.0, 1.0, 10.0)]
        assert [trees.unequal(ends[0], other) == 0 for other in ends[1:]] == [same, same]


def test_more_mu_less_drift(digits, play):
    """The distance that clients go from w^t falls as μ grows; η μ is at most .5."""
    fed = digits(rule={"epochs": 3})
    start = trees.expand(fed.init(), 6)
    drift = [trees.unequal(play(fed, make("fedprox", mu=mu), 1)[1][0].held, start) for mu in (0.0, 1.0, 10.0)]
    assert drift == sorted(drift, reverse=True)
    assert drift[-1] < drift[0] / 2


def test_clients_are_stateless_and_the_global_model_is_deployed(digits, play):
    fed = digits(join_ratio=0.5)
    state, _ = play(fed, make("fedprox"), 2)
    assert state.kept == ()
    assert trees.unequal(fed.deployed(make("fedprox"), state, 3), trees.expand(state.server, 6)) == 0
