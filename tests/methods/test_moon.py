"""MOON: FedAvg with a loss that pulls representations to the global model's and pushes them from the client's last."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import make, moon


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_the_contrast_and_its_slope():
    """sim = 1 and 0, τ = ½: log(1 + e^−2) = .126928; in z = (1, 0) its slope is (0, σ(−2)/τ) = (0, .2384)."""
    z = tensor([[1.0, 0.0]]).requires_grad_()
    value = moon.contrast(z, tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]]), 0.5)
    assert value.item() == pytest.approx(0.126928, abs=5e-7)
    value.backward()
    assert z.grad[0].tolist() == pytest.approx([0, 2 / (1 + math.e**2)], abs=1e-15)
    assert z.grad[0, 1].item() == pytest.approx(0.2384, abs=5e-5)


def test_without_difference_it_is_ln_2_and_flat():
    z, same = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = moon.contrast(z.requires_grad_(), same, same, 0.1)
    assert value.item() == pytest.approx(math.log(2), abs=1e-15)
    value.backward()
    assert z.grad.abs().max() < 1e-15


@pytest.mark.parametrize("tau", [0.5, 2.0, 1e-3, 1e-30])
def test_its_bounds(tau):
    """From −log σ(2/τ) to −log σ(−2/τ), which is 2/τ for small τ: exp alone would overflow."""
    a, b = tensor([[3.0, 4.0]]), tensor([[-6.0, -8.0]])
    low, high = (math.log1p(math.exp(-2 / tau)) + away * 2 / tau for away in (0, 1))
    assert moon.contrast(a, a, b, tau).item() == pytest.approx(low, rel=1e-12, abs=1e-15)
    assert moon.contrast(a, b, a, tau).item() == pytest.approx(high, rel=1e-12)


def test_a_mean_over_samples_of_any_shape():
    g = torch.Generator().manual_seed(0)
    z, z_g, z_p = torch.randn(3, 6, 2, 4, generator=g, dtype=torch.float64)
    each = [moon.contrast(*(t[i : i + 1].reshape(1, 8) for t in (z, z_g, z_p)), 0.5).item() for i in range(6)]
    assert moon.contrast(z, z_g, z_p, 0.5).item() == pytest.approx(np.mean(each), rel=1e-14)
    assert np.ptp(each) > 0.1


def test_a_representation_of_zeros_has_a_finite_slope():
    """As behind a ReLU that is off for all; its cosine is 0."""
    z = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    value = moon.contrast(z, torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64), 0.5)
    assert value.item() == pytest.approx(math.log(2))
    value.backward()
    assert z.grad.isfinite().all()


# --- rounds, written out ---------------------------------------------------------------------------------------------


def train(peer, r_previous, mu, tau, epochs):
    """SGD of a Plain client on ℓ + μ ℓ_con, exp and log as the paper has them; the means of both over all samples."""
    fixed = [copy.deepcopy(peer.r), copy.deepcopy(peer.r)]
    fixed[1].load_state_dict(r_previous)
    [module.eval() for module in fixed]
    peer.r.train(), peer.h.train()
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    optimizer, sums = torch.optim.SGD([*peer.r.parameters(), *peer.h.parameters()], **rule), np.zeros(2)
    for x, y in peer.batches() * epochs:
        optimizer.zero_grad()
        z, (z_g, z_p) = peer.r(x), (module(x).detach() for module in fixed)
        near, far = (torch.exp((z * f).sum(1) / z.norm(dim=1) / f.norm(dim=1) / tau) for f in (z_g, z_p))
        apart = -torch.log(near / (near + far)).mean()
        loss = nn.functional.cross_entropy(peer.h(z), y) + mu * apart
        loss.backward()
        optimizer.step()
        sums += len(y) * np.array([loss.item(), apart.item()])
    return sums / (epochs * len(peer.y))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_rounds_in_plain_torch(by_hand, linear, plain, in_order, one_thread, batch_norm):
    """Two of three clients join a round; the third keeps what it had. With batch-norm z_g and z_p do not move it, and
    are in evaluation mode.
    """
    layers = [linear(3, 4), nn.BatchNorm1d(4), linear(4, 4, seed=1)] if batch_norm else [linear(3, 4), nn.Tanh()]
    net = models.from_modules(nn.Sequential(*layers), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(1 + 2 * torch.randn(n, 3, generator=g), ([0, 1] * n)[:n]) for n in sizes]
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01, "batch_size": 5}
    fed, method = by_hand(net, clients, rule=rule, join_ratio=0.67), make("moon", mu=2.0, tau=0.4)
    state, (r, h) = fed.start(method), fed.init()
    previous, seen = [r] * 3, []
    for _ in range(4):
        result = fed.play(method, state, 4)
        peers = {i: plain(fed, i).load(r, h) for i in result.ids.tolist()}
        means = np.array([train(peer, previous[i], 2.0, 0.4, epochs=2) for i, peer in peers.items()])
        seen += [abs(apart - math.log(2)) for apart in means[:, 1]]
        ends = [peer.state() for peer in peers.values()]
        for i, end in zip(peers, ends, strict=True):
            previous[i] = end[0]
        r, h = (peers[result.ids[0]].mean(part, [sizes[i] for i in peers]) for part in zip(*ends, strict=True))
        r = {k: v.round().long() if k.endswith("tracked") else v for k, v in r.items()}
        assert result.log()["train"].tolist() == pytest.approx(means[:, 0], rel=1e-10)
        assert result.log()["train.contrast"].tolist() == pytest.approx(means[:, 1], rel=1e-10)
        assert trees.unequal(state.server, (r, h)) < 1e-10
        for i in range(3):
            assert trees.unequal(trees.row(state.kept, i), previous[i]) < 1e-10
    assert max(seen) > 0.01  # there is something to contrast


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_mu_zero_is_fedavg(digits, play, model):
    """To the bit, and to the FLOP: nothing is computed in vain."""
    rule = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    fed = digits(model, join_ratio=0.5, rule=rule)
    (ours, rounds), (avg, others) = (play(fed, method, 3) for method in (make("moon", mu=0.0), make("fedavg")))
    assert trees.unequal(ours.server, avg.server) == 0
    assert trees.unequal(rounds[-1].held, others[-1].held) == 0
    assert rounds[-1].flops().tolist() == others[-1].flops().tolist()
    assert set(rounds[-1].log()) == {"train"}


def test_an_extractor_without_parameters_is_fedavg(digits, play):
    fed = digits(head_layers=2, join_ratio=0.5)
    (ours, rounds), (avg, _) = (play(fed, method, 2) for method in (make("moon", mu=5.0), make("fedavg")))
    assert trees.unequal(ours.server, avg.server) == 0
    assert set(rounds[-1].log()) == {"train"}


def test_the_first_round_is_fedavg(uneven, play):
    """z_g = z_p, so ℓ_con is ln 2 and has no slope; in the second it has."""
    fed = uneven(rule={"lr": 0.1, "epochs": 2})
    ends = []
    for rounds in (1, 2):
        (ours, played), (avg, _) = (play(fed, method, rounds) for method in (make("moon", mu=5.0), make("fedavg")))
        ends.append(trees.unequal(ours.server, avg.server))
        contrast = played[-1].log()["train.contrast"]
        assert (np.abs(contrast - math.log(2)) < 1e-12).all() == (rounds == 1)
    assert ends[0] < 1e-13 and ends[1] > 1e-3


@pytest.mark.parametrize("change", [{"mu": 5.0}, {"tau": 0.1}])
def test_mu_and_tau_matter(digits, play, change):
    ends = [play(digits(), make("moon", **settings), 2)[0].server for settings in ({}, change)]
    assert trees.unequal(*ends) > 1e-3


def test_more_mu_nearer_to_the_global_representations(digits):
    """From one state, the contrast that is seen in training falls as μ grows."""
    fed, means = digits(rule={"epochs": 5}), []
    state = fed.start(make("moon"))
    for _ in range(2):
        fed.play(make("moon"), state, 3)
    for mu in (0.01, 1.0, 10.0):
        means.append(fed.play(make("moon", mu=mu), copy.deepcopy(state), 3).log()["train.contrast"].mean())
    assert means == sorted(means, reverse=True)


# --- what a client keeps ---------------------------------------------------------------------------------------------


def test_the_previous_model_is_the_clients_own_last_one(digits):
    """Not the global one, and at first the initial one, also for a client that joins late."""
    fed, method = digits(join_ratio=0.5), make("moon")
    state, joined = fed.start(method), set()
    for t in range(4):
        kept = trees.clone(state.kept)
        result = fed.play(method, state, 4)
        for i in set(result.ids.tolist()) - joined:
            assert trees.unequal(trees.row(kept, i), fed.init()[0]) == 0
        assert trees.unequal(trees.take(state.kept, result.ids), result.held[0]) == 0
        absent = np.setdiff1d(np.arange(6), result.ids)
        assert trees.unequal(trees.take(state.kept, absent), trees.take(kept, absent)) == 0
        joined |= set(result.ids.tolist())
        if t == 0:
            assert len(joined) < 6
    assert trees.unequal(state.kept, trees.expand(state.server[0], 6)) > 1e-3


def test_what_stands_still_matters_and_is_not_changed(digits, play):
    """Another previous extractor is another result; the trees themselves are as they were."""
    fed, method = digits(), make("moon", mu=5.0)
    state, _ = play(fed, method, 2)
    other = copy.deepcopy(state)
    other.kept["fc1.weight"].neg_()
    sent = trees.clone(state.server)
    ends = [fed.play(method, s, 3).held for s in (copy.deepcopy(state), other)]
    assert trees.unequal(*ends) > 1e-3
    assert trees.unequal(state.server, sent) == 0
    assert trees.unequal(fed.deployed(method, state, 3), trees.expand(state.server, 6)) == 0


def test_stacked_as_in_the_loop(uneven, play):
    ends = [play(uneven(engine=engine, rule={"lr": 0.1}), make("moon"), 3) for engine in ("loop", "stacked")]
    assert trees.unequal(ends[0][0].server, ends[1][0].server) < 1e-11
    assert trees.unequal(ends[0][0].kept, ends[1][0].kept) < 1e-11
    logs = [rounds[-1].log()["train.contrast"].tolist() for _, rounds in ends]
    assert logs[0] == pytest.approx(logs[1], rel=1e-11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mu": -1.0}, "mu=-1.0: must be a finite number, at least 0"),
        ({"tau": 0.0}, "tau=0.0: must be a finite number above 0"),
        ({"tau": math.inf}, "tau=inf: must be a finite number above 0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make("moon", **settings)
