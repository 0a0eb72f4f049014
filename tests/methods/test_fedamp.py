"""FedAMP and HeurFedAMP: the server mixes for each client the models of all, and the client is held near the mix."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedamp, make


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def gram(*vectors):
    w = tensor(vectors)
    return w @ w.T


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scalars(by_hand, scalar_net, monkeypatch):
    """A function that makes a Federation of clients with f_i(w) = ½ w², and the state in which their w are given."""
    monkeypatch.setattr(fedamp, "model_loss", lambda model, p, batch: (p[0]["weight"] ** 2).mean() / 2)

    def start(method, *w, **rule):
        fed = by_hand(scalar_net(0, 1), [([[1.0]], [0])] * len(w), rule=rule)
        state = fed.start(method)
        for tree in (state.server["models"], state.kept):
            tree[0]["weight"][:, 0] = tensor(w)
        return fed, state

    return start


def test_two_numbers(scalars):
    """w = (0, 1), σ = 1, α = ½: A'(1) = .3679, ξ_12 = .1839, u = (.1839, .8161), which sum up to 1 as w does."""
    method = make("fedamp", alpha=0.5, sigma=1.0)
    fed, state = scalars(method, 0.0, 1.0)
    far = 0.5 * math.exp(-1)
    assert far == pytest.approx(0.1839, abs=5e-5)
    assert method.xi(state.server).flatten().tolist() == pytest.approx([1 - far, far, far, 1 - far], abs=1e-15)
    u = fed.deployed(method, state, 1)[0]["weight"].flatten()
    assert u.tolist() == pytest.approx([far, 1 - far], abs=1e-15)


@pytest.mark.parametrize("start", ["sent", "own"])
def test_the_proximal_minimum(scalars, start):
    """f_1 = ½ w², κ = λ/α = 2: w_1 = κ u_1 / (1 + κ) = .1226, wherever SGD starts; w_2 = .5441."""
    method = make("fedamp", alpha=0.5, lam=1.0, sigma=1.0, start=start)
    fed, state = scalars(method, 0.0, 1.0, lr=0.1, epochs=200)
    held = fed.play(method, state, 1).held[0]["weight"].flatten().tolist()
    u = 0.5 * math.exp(-1)
    assert held == pytest.approx([2 * u / 3, 2 * (1 - u) / 3], abs=1e-12)
    assert held[0] == pytest.approx(0.1226, abs=5e-5)
    assert state.server["models"][0]["weight"].flatten().tolist() == held
    assert state.kept[0]["weight"].flatten().tolist() == held


@pytest.mark.parametrize(("start", "expected"), [("sent", 0.81), ("own", 0.88)])
def test_one_step_is_from_the_start_and_towards_the_mix(scalars, start, expected):
    """w_2 = 1, u_2 = .9, η = .1, κ = 2: .9 − .1·.9, where nothing pulls yet; or 1 − .1·(1 + 2·.1)."""
    method = make("fedamp", alpha=0.1 * math.e, lam=0.2 * math.e, sigma=1.0, start=start)  # ξ_21 = .1
    fed, state = scalars(method, 0.0, 1.0, lr=0.1)
    assert fed.play(method, state, 1).held[0]["weight"][1].item() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("alpha", [1e-3, 1e-9])
def test_a_small_alpha_mixes_nothing(scalars, alpha):
    method = make("fedamp", alpha=alpha, lam=0.0, sigma=1.0)
    fed, state = scalars(method, 0.0, 1.0, 3.0)
    u = fed.deployed(method, state, 1)[0]["weight"].flatten()
    assert 0 < (u - tensor([0.0, 1.0, 3.0])).abs().max() < 2 * alpha


def test_equal_models(digits):
    """ξ_ij = α/σ for all others, and u_i = w_i to the bit."""
    fed, method = digits(), make("fedamp", alpha=0.3, sigma=2.0)
    state = fed.start(method)
    xi = method.xi(state.server)
    assert xi[~torch.eye(6, dtype=torch.bool)].tolist() == pytest.approx([0.15] * 30, rel=1e-9)
    assert xi.diag().tolist() == pytest.approx([0.25] * 6, rel=1e-9)
    assert trees.unequal(fed.deployed(method, state, 1), trees.expand(fed.init(), 6)) == 0


def test_the_least_own_weight_by_default():
    """1 − (N − 1)/30 where models are equal: 11/30 for 20 clients, and from 31 on nothing."""
    method = make("fedamp")
    for N, least in ((20, 11 / 30), (30, 1 / 30), (31, 0), (100, 0)):
        xi = fedamp.attention(torch.ones(N, N, dtype=torch.float64), method.alpha, method.sigma)
        assert xi.diag().tolist() == pytest.approx([least] * N, abs=1e-14)


def test_a_row_above_one_is_scaled():
    """20 equal models and α = σ = 1: the formula says ξ_ii = −18. Here 0, and each of the others has 1/19."""
    xi = fedamp.attention(torch.ones(20, 20, dtype=torch.float64), 1.0, 1.0)
    assert (xi.diag() == 0).all()
    assert xi[0, 1:].tolist() == pytest.approx([1 / 19] * 19)
    assert xi.min() >= 0
    # Only rows whose sum is above 1 are: w = 0, 1, 9 with σ = 1, α = 5, so that 5/e = 1.84 is, and 5/e^64 is not.
    xi = fedamp.attention(gram([0.0], [1.0], [9.0]), 5.0, 1.0)
    assert xi[0].tolist() == pytest.approx([0, 1, 0], abs=1e-12)
    assert xi[2].tolist() == pytest.approx([0, 5 * math.exp(-64), 1], abs=1e-15)
    assert xi[2, 1] > 0


@pytest.mark.parametrize(("alpha", "sigma"), [(0.1, 3.0), (1e4, 25.0), (1.0, 1e-30), (1e-30, 1e4), (1e30, 1.0)])
@pytest.mark.parametrize("weights", ["attention", "heuristic"])
def test_rows_are_averages(weights, alpha, sigma):
    G = gram(*torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).tolist())
    xi = fedamp.attention(G, alpha, sigma) if weights == "attention" else fedamp.heuristic(G, sigma, 0.3)
    assert xi.isfinite().all() and xi.min() >= 0
    assert xi.sum(1).tolist() == pytest.approx([1.0] * 7, abs=1e-12)


def test_the_heuristic():
    """(1, 0), (0, 1), (3, 3): cosines 0, 1/√2, whatever the lengths; (1 − ξ_ii) softmax_j(σ cos)."""
    xi = fedamp.heuristic(gram([1.0, 0.0], [0.0, 1.0], [3.0, 3.0]), 2.0, 0.4)
    e = math.exp(2 / math.sqrt(2))
    assert xi[0].tolist() == pytest.approx([0.4, 0.6 / (1 + e), 0.6 * e / (1 + e)], abs=1e-15)
    assert xi[2].tolist() == pytest.approx([0.3, 0.3, 0.4], abs=1e-15)


def test_the_heuristic_of_one_client_and_of_zeros():
    assert fedamp.heuristic(gram([1.0, 2.0]), 1.0, 0.4).tolist() == [[1.0]]
    assert fedamp.attention(gram([1.0, 2.0]), 1.0, 1.0).tolist() == [[1.0]]
    assert fedamp.heuristic(gram([0.0], [0.0], [1.0]), 1.0, 0.5)[0].tolist() == pytest.approx([0.5, 0.25, 0.25])


def test_the_method_uses_the_heuristic(scalars):
    """All w are on one line through the origin with a head of 1: cos = (1 + w_i w_j) / √(1 + w_i²) √(1 + w_j²)."""
    method = make("fedamp", weights="heuristic", sigma=3.0, self_weight=0.2)
    fed, state = scalars(method, 0.0, 1.0, -2.0)
    e = np.exp(3 * np.array([1 / math.sqrt(2), 1 / math.sqrt(5)]))
    row = [0.2, *(0.8 * e / e.sum())]
    assert method.xi(state.server)[0].tolist() == pytest.approx(row, abs=1e-14)
    u = fed.deployed(method, state, 1)[0]["weight"][0].item()
    assert u == pytest.approx(row[1] - 2 * row[2], abs=1e-14)


# --- rounds, written out ---------------------------------------------------------------------------------------------


def flat(state):
    return torch.cat([t.flatten() for part in state for t in part.values()])


def train(peer, anchor, pull, epochs):
    """SGD of a Plain client on f + pull/2 Σ (p − u)²."""
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    peer.r.train(), peer.h.train()
    params = [*peer.r.named_parameters(), *peer.h.named_parameters()]
    parts = zip(anchor, (peer.r, peer.h), strict=True)
    fixed = [part[name] for part, module in parts for name, _ in module.named_parameters()]
    optimizer = torch.optim.SGD([p for _, p in params], **rule)
    for x, y in peer.batches() * epochs:
        optimizer.zero_grad()
        apart = sum(((p - a) ** 2).sum() for (_, p), a in zip(params, fixed, strict=True))
        (nn.functional.cross_entropy(peer.h(peer.r(x)), y) + pull / 2 * apart).backward()
        optimizer.step()
    return peer.state()


@pytest.mark.parametrize("start", ["sent", "own"])
@pytest.mark.parametrize("weights", ["attention", "heuristic"])
def test_rounds_in_plain_torch(uneven, plain, in_order, one_thread, weights, start):
    """Half of the clients join: u_i is over all four models, those of absent clients as they last were."""
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
    fed = uneven(rule=rule, join_ratio=0.5)
    settings = {"alpha": 0.6, "lam": 0.9, "sigma": 2.5, "self_weight": 0.3}
    method = make("fedamp", weights=weights, start=start, **settings)
    state, own, joined, scaled = fed.start(method), [fed.init()] * 4, set(), []
    for _ in range(4):
        w, u = torch.stack([flat(model) for model in own]), []
        for i in range(4):
            xi = torch.zeros(4, dtype=torch.float64)
            for j in set(range(4)) - {i}:
                cosine = w[i] @ w[j] / w[i].norm() / w[j].norm()
                xi[j] = 0.6 / 2.5 * torch.exp(-((w[i] - w[j]) ** 2).sum() / 2.5) if weights == "attention" else 0
                xi[j] = torch.exp(2.5 * cosine) if weights == "heuristic" else xi[j]
            xi = 0.7 * xi / xi.sum() if weights == "heuristic" else xi
            scaled.append(float(xi.sum()) > 1)
            xi[i] = 1 - xi.sum()
            u.append(tuple({k: sum(xi[j] * own[j][p][k] for j in range(4)) for k in own[0][p]} for p in (0, 1)))
        expected = u if start == "sent" else own
        for i in range(4):
            assert trees.unequal(trees.row(fed.deployed(method, state, 4), i), expected[i]) < 1e-12
        result = fed.play(method, state, 4)
        assert len(result.ids) == 2
        joined |= set(result.ids.tolist())
        for k, i in enumerate(result.ids.tolist()):
            peer = plain(fed, i).load(*expected[i])
            own[i] = train(peer, u[i], 1.5, epochs=2)
            assert trees.unequal(trees.row(result.held, k), own[i]) < 1e-11
        for i in range(4):
            assert trees.unequal(trees.row(state.kept, i), own[i]) < 1e-11
            assert trees.unequal(trees.row(state.server["models"], i), own[i]) < 1e-11
    assert not any(scaled)  # the formula as printed
    assert len(joined) > 2


def test_batch_norm(by_hand, linear, play):
    """Statistics have no say in the weights, and are mixed by them; counters are rounded and stay integers."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 40)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), ([0, 1] * n)[:n]) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "batch_size": 4})
    for weights in ("attention", "heuristic"):
        method = make("fedamp", weights=weights)
        state, _ = play(fed, method, 2)
        xi, (r, _) = method.xi(state.server), state.server["models"]
        u = fed.deployed(method, state, 3)[0]
        assert len(set(r["1.num_batches_tracked"].tolist())) > 1
        for key in ("1.running_mean", "1.running_var", "1.weight"):
            assert (u[key] - xi @ r[key]).abs().max() < 1e-12
        assert u["1.num_batches_tracked"].dtype == torch.int64
        assert torch.equal(u["1.num_batches_tracked"].double(), (xi @ r["1.num_batches_tracked"].double()).round())
        changed = copy.deepcopy(state.server)
        for key in fed.model.buffers:
            changed["models"][0][key] += 7
        assert torch.equal(method.xi(changed), xi)
        changed["models"][0]["1.weight"][0] += 7
        assert not torch.allclose(method.xi(changed), xi)


# --- what it is not, and what it is in the limit ---------------------------------------------------------------------


@pytest.mark.parametrize("start", ["sent", "own"])
def test_alpha_lambda_and_sigma_matter_and_it_is_not_local(digits, play, start):
    """PFLlib's clients train the same whatever these are, as if alone."""
    base = {"alpha": 0.5, "lam": 0.5, "sigma": 3.0}
    changes = ({}, {"lam": 1.0}, {"alpha": 0.25}, {"sigma": 1.0}, {"weights": "heuristic"})
    ends = [play(digits(), make("fedamp", start=start, **(base | c)), 2)[0].kept for c in changes]
    ends.append(play(digits(), make("local"), 2)[0].kept)
    for k, one in enumerate(ends):
        for other in ends[:k]:
            gaps = [trees.unequal(trees.row(one, i), trees.row(other, i)) for i in range(6)]
            assert min(gaps) > 1e-4


@pytest.mark.parametrize(
    "settings", [{"start": "own", "lam": 0.0}, {"weights": "heuristic", "self_weight": 1.0, "lam": 0.0}]
)
def test_without_pull_from_its_own_model_it_is_local(digits, play, settings):
    """To the bit: from the kept w_i, or from a u_i in which w_i has all the weight."""
    fed = digits(rule={"momentum": 0.9})
    (amp, rounds), (local, others) = (play(fed, m, 3) for m in (make("fedamp", **settings), make("local")))
    assert trees.unequal(amp.kept, local.kept) == 0
    assert trees.unequal(rounds[-1].held, others[-1].held) == 0


def test_a_strong_pull_ends_at_the_mix(digits, play):
    """From w_i with η λ/α = 1, each step is to u_i − η ∇f_i: near u_i, and ten times nearer with a tenth of η."""
    fed, rule = digits(dtype=torch.float64), {"alpha": 1e-2, "sigma": 1.0}
    method = make("fedamp", start="own", lam=0.0, **rule)
    state, _ = play(fed, method, 2)
    u, gaps = fedamp.mix(method.xi(state.server), state.server["models"], np.arange(6)), []
    for lr in (1e-4, 1e-5):
        fed.training = dataclasses.replace(fed.training, lr=lr)
        near = make("fedamp", start="own", lam=1e-2 / lr, **rule)
        gaps.append(trees.unequal(fed.play(near, copy.deepcopy(state), 3).held, u))
    assert gaps[0] < 0.1 * trees.unequal(state.kept, u)
    assert gaps[1] == pytest.approx(gaps[0] / 10, rel=0.01)


def test_equal_weights_are_an_unweighted_mean(digits, play):
    """σ -> 0 in the heuristic and ξ_ii = 1/N: all receive the same."""
    fed, method = digits(), make("fedamp", weights="heuristic", sigma=1e-12, self_weight=1 / 6)
    state, _ = play(fed, method, 2)
    mean = trees.average(state.server["models"], np.ones(6))
    assert trees.unequal(fed.deployed(method, state, 3), trees.expand(mean, 6)) < 1e-6


# --- who is mixed, and with what -------------------------------------------------------------------------------------


def test_a_varying_number_of_clients_mixes_all(digits):
    """The weights are [N, N] in each round; an absent client's model counts, as it last was."""
    fed, method = digits(join_ratio=(0.2, 0.9)), make("fedamp")
    state, sizes = fed.start(method), set()
    for _ in range(5):
        absent = np.setdiff1d(np.arange(6), fed.sample(state.round + 1))
        message, kept = method.download(state.server, fed.sample(state.round + 1)), trees.clone(state.kept)
        other = copy.deepcopy(state.server)
        other["models"][1]["bias"][absent[0]] += 1
        assert trees.unequal(method.download(other, fed.sample(state.round + 1)), message) > 1e-3
        sizes.add(len(fed.play(method, state, 5).ids))
        assert method.xi(state.server).shape == (6, 6)
        assert trees.unequal(trees.take(state.kept, absent), trees.take(kept, absent)) == 0
        assert trees.unequal(state.server["models"], state.kept) == 0  # the server knows what the clients have
    assert len(sizes) > 1


@pytest.mark.parametrize("start", ["sent", "own"])
def test_before_is_what_training_starts_from(digits, play, start):
    method, moving, still = make("fedamp", start=start), digits(), digits(rule={"epochs": 0})
    state, _ = play(moving, method, 2)
    deployed = still.deployed(method, state, 3)
    u = fedamp.mix(method.xi(state.server), state.server["models"], np.arange(6))
    assert trees.unequal(deployed, u if start == "sent" else state.kept) == 0
    assert trees.unequal(u, state.kept) > 1e-3
    assert trees.unequal(still.play(method, state, 3).held, deployed) == 0


def test_nearer_models_weigh_more(digits, play):
    """And what is watched are the weights."""
    fed, method = digits(), make("fedamp")
    state, _ = play(fed, method, 3)
    xi, w = method.xi(state.server), torch.cat([t.reshape(6, -1) for t in trees.leaves(state.kept)], 1).double()
    apart = torch.cdist(w, w)
    for i in range(6):
        order = [j for j in apart[i].argsort().tolist() if j != i]
        assert (xi[i, order].diff() < 0).all()
    watched = method.watch(state.server, state.kept)
    assert torch.equal(watched["ξ_ii"], xi.diag().float())
    assert watched["ξ_ij"].shape == (30,)
    assert watched["ξ_ii"].sum() + watched["ξ_ij"].sum() == pytest.approx(6)


def test_stacked_as_in_the_loop(uneven, play):
    ends = [
        play(uneven(engine=engine, rule={"lr": 0.1}), make("fedamp", lam=0.3), 3)[0] for engine in ("loop", "stacked")
    ]
    assert trees.unequal(ends[0].kept, ends[1].kept) < 1e-11


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.0}, "alpha=0.0: must be a finite number above 0"),
        ({"sigma": 0.0}, "sigma=0.0: must be a finite number above 0"),
        ({"lam": -0.1}, "lam=-0.1: must be a finite number, at least 0"),
        ({"self_weight": 1.5}, "self_weight=1.5: must be a finite number from 0 to 1"),
        ({"weights": "cosine"}, "weights='cosine': must be one of 'attention', 'heuristic'"),
        ({"start": "server"}, "start='server': must be one of 'sent', 'own'"),
        ({"alpha": 2.0**-60, "lam": 2.0**80}, "lam / alpha=1.39.*e\\+42: must be a finite number"),
        ({"alpha": 2.0**80, "sigma": 2.0**-60}, "alpha / sigma=1.39.*e\\+42: must be a finite number"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make("fedamp", **settings)
