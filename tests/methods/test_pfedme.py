"""pFedMe: personal models near w, and w moving towards them."""

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, trees
from pflkit.methods import fedavg, make, pfedme
from pflkit.methods.pfedme import PFedMe, inner_step, outer_step
from pflkit.training import _order


def solve(a, c, w, lam, s, K, theta=None):
    """K inner steps on f = ½ a (θ − c)²."""
    theta = w if theta is None else theta
    for _ in range(K):
        theta = inner_step(theta, a * (theta - c), w, s, lam)
    return theta


@pytest.fixture
def quadratic(by_hand, scalar_net, monkeypatch):
    """A function that plays one round on f(θ) = ½ (θ − c)² from w^t = 2, a mini-batch for each c: θ̃ and the new w."""
    monkeypatch.setattr(pfedme, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean() / 2)

    def play(*c, **settings):
        rule = {"lr": 0.1, "batch_size": 1}
        fed = by_hand(scalar_net(2.0, 1), [([[float(x)] for x in c], [0] * len(c))], rule=rule)
        state = fed.start(method := make("pfedme", **{"lam": 1.0, "inner_lr": 0.1} | settings))
        fed.play(method, state, 1)
        return state.kept[0]["weight"].item(), state.server["w"][0]["weight"].item()

    return play


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_a_round_by_hand(quadratic):
    """a = λ = 1, c = 0, w = 2, s = .1: θ* = 1, θ_5 = 1 + .8^5, and with η = .1 w' = 2 − .1 (2 − θ_5)."""
    assert quadratic(0) == pytest.approx((1.32768, 1.932768), abs=1e-14)
    assert quadratic(0, inner_steps=400) == pytest.approx((1.0, 1.9), abs=1e-14)
    assert quadratic(0, inner_steps=1) == pytest.approx((1.8, 1.98), abs=1e-14)  # no decay of θ: not 1.7998
    assert quadratic(0, inner_steps=400, outer_lr=0.5) == pytest.approx((1.0, 1.5), abs=1e-14)


@pytest.mark.parametrize(("a", "c", "w", "lam"), [(1.0, 0.0, 2.0, 1.0), (3.0, -1.0, 2.0, 0.5), (0.5, 4.0, -1.0, 15.0)])
def test_the_solution_of_a_quadratic(a, c, w, lam):
    """θ* = (a c + λ w) / (a + λ), reached by (1 − s (a + λ))^K; λ (w − θ*) = ∇F = a λ / (a + λ) (w − c)."""
    best, s = (a * c + lam * w) / (a + lam), 0.1
    for K in (1, 2, 5):
        assert solve(a, c, w, lam, s, K) - best == pytest.approx((1 - s * (a + lam)) ** K * (w - best), abs=1e-14)
    assert solve(a, c, w, lam, 1 / (a + lam), 1) == pytest.approx(best, abs=1e-14)  # in one step
    assert outer_step(w, best, 0.3, lam) == pytest.approx(w - 0.3 * a * lam / (a + lam) * (w - c), abs=1e-14)


def test_two_mini_batches_by_hand(quadratic, in_order):
    """The first solution is sought from w^t, the second from the first, about the w that has moved meanwhile."""
    theta = solve(1, 0, 2.0, 1, 0.1, 5)
    w = 2 - 0.1 * (2 - theta)
    second = solve(1, 4, w, 1, 0.1, 5, theta)
    assert quadratic(0, 4) == pytest.approx((second, w - 0.1 * (w - second)), abs=1e-14)
    assert abs(second - solve(1, 4, w, 1, 0.1, 5)) > 0.1  # what a start from w would give


@pytest.mark.parametrize("lam", [1e3, 1e6, 1e9])
def test_a_large_lambda_holds_theta_at_w(quadratic, lam):
    """s (1 + λ) = 1 solves exactly: θ = (0 + 2 λ) / (1 + λ)."""
    theta, _ = quadratic(0, lam=lam, inner_lr=1 / (1 + lam), outer_lr=0.0)
    assert theta == pytest.approx(2 * lam / (1 + lam), rel=1e-14)
    assert abs(theta - 2) < 3 / lam


def test_steps_that_cannot_converge_are_refused():
    """From s λ = 2, |1 − s (a + λ)| > 1 for every curvature a > 0: errors grow. Below they shrink, for a small a."""
    for lam, inner_lr in ((200.0, 0.01), (1.0, 2.0), (15.0, 0.14)):
        with pytest.raises(ValueError, match=r"^inner_lr=.*must be below 2 / lam = "):
            PFedMe(lam=lam, inner_lr=inner_lr)
        best = lam / (0.01 + lam)
        assert abs(solve(0.01, 0.0, 1.0, lam, inner_lr, 1000) - best) > 1.01 * (1 - best)
    method = PFedMe(lam=199.0, inner_lr=0.01)
    best = method.lam / (0.01 + method.lam)
    assert abs(solve(0.01, 0.0, 1.0, method.lam, method.inner_lr, 1000) - best) < 0.01 * (1 - best)
    for wrong in ({"inner_steps": 0}, {"inner_steps": 2.5}, {"outer_lr": -0.1}, {"server_lr": -1.0}, {"lam": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}=.*must be"):
            PFedMe(**wrong)


# --- rounds, written out ---------------------------------------------------------------------------------------------


def train(peer, w, method, epochs=1):
    """Steps 2 and 3 by autograd on a Plain client's modules, which hold θ: w_{i,R} and the mean loss before K steps."""
    peer.load(*w).r.train(), peer.h.train()
    theta = [*peer.r.parameters(), *peer.h.parameters()]
    outer, total, lr = [p.detach().clone() for p in theta], 0.0, peer.rule.lr
    for x, y in peer.batches() * epochs:
        for k in range(method.inner_steps):
            loss = nn.functional.cross_entropy(peer.h(peer.r(x)), y)
            total += loss.item() * len(y) if k == 0 else 0.0
            apart = sum(((p - a) ** 2).sum() for p, a in zip(theta, outer, strict=True))
            for p, g in zip(theta, torch.autograd.grad(loss + method.lam / 2 * apart, theta), strict=True):
                p.data -= method.inner_lr * g
        for a, p in zip(outer, theta, strict=True):
            a -= lr * method.lam * (a - p.data)
    outer, state = iter(outer), peer.state()  # statistics are those of θ's passes
    names = [{k for k, _ in m.named_parameters()} for m in (peer.r, peer.h)]
    moved = tuple({k: next(outer) if k in n else v for k, v in s.items()} for s, n in zip(state, names, strict=True))
    return moved, total / (epochs * len(peer.y))


def test_two_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread):
    """Steps 1 to 5; the mean is uniform, though clients have 1, 7, 10 and 11 samples; momentum, decay and clipping of
    the local optimizer are not pFedMe's.
    """
    rule = {"lr": 0.03, "epochs": 2, "batch_size": 4, "momentum": 0.9, "weight_decay": 0.5, "clip": 1e-3}
    method = make("pfedme", inner_lr=0.05, inner_steps=3, server_lr=1.5)
    state, rounds = play(fed := uneven(rule=rule), method, 2)
    w = fed.init()
    for _ in range(2):
        peers = [plain(fed, i) for i in range(4)]
        moved, losses = zip(*(train(peer, w, method, epochs=2) for peer in peers), strict=True)
        mean = [peers[0].mean(part, [1, 1, 1, 1]) for part in zip(*moved, strict=True)]
        w = tuple({k: -0.5 * old[k] + 1.5 * new[k] for k in old} for old, new in zip(w, mean, strict=True))
    assert trees.unequal(state.server["w"], w) < 1e-12
    for i in range(4):
        assert trees.unequal(trees.row(state.kept, i), peers[i].state()) < 1e-12
        assert trees.unequal(trees.row(rounds[-1].held, i), {"personal": peers[i].state(), "global": moved[i]}) < 1e-12
    assert rounds[-1].log()["train"].tolist() == pytest.approx(losses, rel=1e-11)
    assert trees.unequal(w, fed.init()) > 0.02


@pytest.fixture(scope="module")
def batch_norm(by_hand, linear):
    """A function that makes a Federation of 3 clients, whose model has batch-norm in both of its parts."""
    net = models.from_modules(
        nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4), linear(4, 2)), (3,), 2
    )
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    return lambda **options: by_hand(net, clients, rule={"lr": 0.03, "batch_size": 5}, **options)


@pytest.mark.parametrize("server_lr", [0.0, 0.5, 1.0, 3.0])
def test_batch_norm_in_plain_torch(batch_norm, plain, play, in_order, one_thread, server_lr):
    """θ's K passes make the statistics; nothing pulls them, and the server's are the clients' mean whatever β is."""
    method = make("pfedme", inner_steps=3, server_lr=server_lr)
    state, _ = play(fed := batch_norm(), method, 2)
    w, buffers = fed.init(), fed.model.buffers
    for _ in range(2):
        peers = [plain(fed, i) for i in range(3)]
        moved, _ = zip(*(train(peer, w, method) for peer in peers), strict=True)
        mean = [peers[0].mean(part, [1, 1, 1]) for part in zip(*moved, strict=True)]
        mean = [
            {k: v if state.server["w"][0].get(k, v).is_floating_point() else v.round().long() for k, v in part.items()}
            for part in mean
        ]
        w = tuple(
            {k: new[k] if k in buffers else old[k] + server_lr * (new[k] - old[k]) for k in old}
            for old, new in zip(w, mean, strict=True)
        )
    assert trees.unequal(state.server["w"], w) < 1e-11
    for i in range(3):
        assert trees.unequal(trees.row(state.kept, i), peers[i].state()) < 1e-11
    assert state.server["w"][0]["1.running_var"].min() > 0
    # Batches of 4; 5 and 2; 5 and 5: 3, 6, 6 passes a round. The mean is 5, and again 5 later: 8, 11, 11, so 10.
    assert state.kept[0]["1.num_batches_tracked"].tolist() == [8, 11, 11]
    assert state.server["w"][0]["1.num_batches_tracked"].item() == 10
    assert state.server["w"][0]["1.num_batches_tracked"].dtype == torch.int64
    means = state.kept[0]["1.running_mean"]
    assert trees.unequal(means[0], means[1]) > 0.1  # each has its own


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 3])
def test_lambda_zero_trains_theta_alone(uneven, play, K):
    """w stays, to the bit; θ is plain SGD from w^t at the rate s, each mini-batch K times in a row."""
    rule = {"lr": 0.1, "batch_size": 4}
    fed = uneven(rule=rule)
    state, _ = play(fed, make("pfedme", lam=0.0, inner_lr=0.2, inner_steps=K), 3)
    assert trees.unequal(state.server["w"], fed.init()) == 0
    clients = fed.clients(np.arange(4), 3, 3)
    for i in range(4):
        order, (x, y) = _order(fed.seed, 3, clients.ids, clients.n, "train", i, 0, 0), fed.train[i]
        theta = [t.clone().requires_grad_() for t in trees.leaves(fed.init())]
        for at in np.split(order, range(4, len(y), 4)):
            for _ in range(K):
                loss = fedavg.model_loss(fed.model, trees.like(fed.init(), theta), (x[at], y[at]))
                with torch.no_grad():
                    for t, g in zip(theta, torch.autograd.grad(loss, theta), strict=True):
                        t -= 0.2 * g
        assert trees.unequal(trees.row(state.kept, i), trees.like(fed.init(), theta)) < 1e-12
    local = clients.sgd(fedavg.model_loss, trees.repeat(fed.init(), 4), lr=0.2)
    assert (trees.unequal(state.kept, local) < 1e-12) == (K == 1)


def test_beta_is_how_far_the_server_goes(uneven, play):
    """β = 0: nowhere, to the bit. β = 1: to the uniform mean, to the bit. β = 3: three times as far."""
    ends = {}
    for beta in (0.0, 1.0, 3.0):
        state, (result,) = play(fed := uneven(rule={"lr": 0.05}), make("pfedme", server_lr=beta), 1)
        ends[beta] = state.server["w"]
        mean = trees.tree_map(lambda t: t.mean(0), result.held["global"])
        assert trees.unequal(result.held["global"], trees.expand(fed.init(), 4)) > 1e-2
    assert trees.unequal(ends[0.0], fed.init()) == 0
    assert trees.unequal(ends[1.0], mean) < 1e-15
    assert trees.unequal(ends[3.0], trees.add(trees.add(mean, mean, 2.0), fed.init(), -2.0)) < 1e-14
    weighted = trees.average(result.held["global"], fed.n)
    assert trees.unequal(ends[1.0], weighted) > 1e-3


def test_the_rate_of_w_is_the_local_one_unless_given(uneven, play):
    def end(lr, **settings):
        return play(uneven(rule={"lr": lr}), make("pfedme", **settings), 1)[0].server["w"]

    assert trees.unequal(end(0.05), end(0.01, outer_lr=0.05)) == 0
    assert trees.unequal(end(0.05), end(0.01)) > 1e-3


# --- the personal model ----------------------------------------------------------------------------------------------


def test_the_personal_model_is_neither_w_nor_the_initial_one(digits, play):
    """Elsewhere it was overwritten by w_{i,R} or w^t, or never written. It is kept until the client joins again."""
    fed, method = digits(join_ratio=0.5), make("pfedme")
    state = fed.start(method)
    last = trees.repeat(fed.init(), 6)
    for _ in range(4):
        deployed = fed.deployed(method, state, 4)
        assert trees.unequal(deployed["personal"], last) == 0
        assert trees.unequal(deployed["global"], trees.expand(state.server["w"], 6)) == 0
        result = fed.play(method, state, 4)
        trees.put(last, result.ids, result.held["personal"])
        for j in range(3):
            personal, moved = (trees.row(result.held[kind], j) for kind in ("personal", "global"))
            for other in (moved, state.server["w"], fed.init()):
                assert trees.unequal(personal, other) > 1e-4


def test_training_starts_from_w_not_from_what_was_kept(digits):
    ends = []
    for value in (0.0, 7.0):
        fed = digits()
        state = fed.start(method := make("pfedme"))
        trees.put(state.kept, range(6), trees.full_like(state.kept, value))
        ends.append(fed.play(method, state, 1).held)
    assert trees.unequal(*ends) == 0


def test_scores_of_both_models_are_apart(digits):
    fed, method = digits(join_ratio=0.5), make("pfedme", inner_lr=0.05)
    history = experiment.run(method, fed, 4)
    held = fed.deployed(method, history.state, 4)
    last = history.clients[history.clients["round"] == 5].set_index("client")
    for kind, column in (("personal", "before_loss"), ("global", "before_global_loss")):
        assert last[column].tolist() == fed.score(held[kind], np.arange(6))[1].tolist()
    assert (last["before_loss"] != last["before_global_loss"]).all()


# --- engines and costs -----------------------------------------------------------------------------------------------


def test_stacked_as_in_the_loop(uneven, batch_norm, play):
    for make_fed, options in ((uneven, {"rule": {"lr": 0.05, "epochs": 2, "batch_size": 4}}), (batch_norm, {})):
        ends = [play(make_fed(engine=engine, **options), make("pfedme"), 2) for engine in ("loop", "stacked")]
        (loop, rounds), (stacked, others) = ends
        assert trees.unequal((loop.server, loop.kept), (stacked.server, stacked.kept)) < 1e-11
        assert rounds[-1].log()["train"].tolist() == pytest.approx(others[-1].log()["train"].tolist(), rel=1e-11)


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_k_steps_cost_k_times_fedavgs(digits, play, model):
    """On one federation, which remembers what a step costs: a step of another K is another one."""
    fed = digits(model)
    one = play(fed, make("fedavg"), 1)[1][0].flops()
    for K in (5, 2):
        assert play(fed, make("pfedme", inner_steps=K), 1)[1][0].flops().tolist() == (K * one).tolist()
