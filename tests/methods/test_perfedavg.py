"""Per-FedAvg: a model to take one own step from; its three variants, and the step that every user of it takes."""

import copy
import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, training, trees
from pflkit.descent import slope
from pflkit.methods import make, perfedavg
from pflkit.methods.fedavg import model_loss
from pflkit.training import _order

VARIANTS = ("fo", "hf", "exact")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture
def parabolas(by_hand, scalar_net, monkeypatch):
    """A function that makes a Federation of clients with one sample (a, c): f_i(w) = a/p |w − c|^p, a 1 or 2, w the
    extractor's number, `start` at first. p = 2, unless `power` says another even number.
    """

    def start(clients, w, power=2, **rule):
        def loss(model, params, batch):
            return ((1 + batch[1]) * (params[0]["weight"] - batch[0][:, 0]) ** power).mean() / power

        monkeypatch.setattr(perfedavg, "model_loss", loss)
        return by_hand(scalar_net(w, 1, classes=2), [([[c]], [a - 1]) for a, c in clients], rule=rule)

    return start


def normed(linear):
    """Two layers with batch-norm between them."""
    layers = nn.Sequential(linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
    return models.from_modules(layers, linear(5, 3), (4,), 3)


def batch_normed(by_hand, linear, sizes, **options):
    """A Federation of clients with so many samples, whose model has batch-norm."""
    g = torch.Generator().manual_seed(1)
    clients = [(3 + 5 * torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g).tolist()) for n in sizes]
    return by_hand(normed(linear), clients, **options)


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"variant": "fo"}, 1.4), ({"variant": "exact"}, 1.72)]
    + [({"variant": "hf", "delta": delta}, 1.72) for delta in (1e-3, 0.1, 10.0)],
)
def test_one_step_on_a_parabola(parabolas, settings, expected):
    """f = (w − 1)², w = 3, α = .1, β = .5: w̃ = 2.6, v = 3.2, and 3 − .5·3.2 or 3 − .5·.8·3.2. On a parabola δ is of
    no account. The client then uses w − .1·2 (w − 1): 1.32 from 1.4.
    """
    fed, method = parabolas([(2, 1.0)], 3.0), make("perfedavg", inner_lr=0.1, outer_lr=0.5, **settings)
    state = fed.start(method)
    result = fed.play(method, state, 1)
    assert state.server[0]["weight"].item() == pytest.approx(expected, abs=1e-10)
    assert result.held[0]["weight"].item() == state.server[0]["weight"].item()  # w_{i,τ}, without a step of its own
    assert result.log()["train"].tolist() == pytest.approx([1.6**2])  # f(w̃; D')
    assert fed.deployed(method, state, 1)[0]["weight"].item() == pytest.approx(expected - 0.2 * (expected - 1))


@pytest.mark.parametrize(("variant", "product"), [("fo", 0.0), ("exact", 20.736), ("hf", 20.736 + 0.25 * 1.728**3)])
def test_one_step_on_a_quartic(parabolas, variant, product):
    """f = ¼ w⁴, w = 2, α = .1: w̃ = 2 − .1·8, v = w̃³, ∇²f v = 3 w² v; the difference of gradients adds δ² v³."""
    fed = parabolas([(1, 0.0)], 2.0, power=4)
    method = make("perfedavg", inner_lr=0.1, outer_lr=0.5, variant=variant, delta=0.5)
    fed.play(method, state := fed.start(method), 1)
    assert state.server[0]["weight"].item() == pytest.approx(2 - 0.5 * (1.728 - 0.1 * product), rel=1e-12)


@pytest.mark.parametrize(("variant", "rests"), [("fo", 4 / 7), ("hf", 8 / 17), ("exact", 8 / 17)])
def test_where_it_comes_to_rest(parabolas, play, variant, rests):
    """a = (1, 2), c = (0, 1), α = .25: at Σ a (1 − αa)² (w − c) = 0, first order at Σ a (1 − αa) (w − c) = 0."""
    method = make("perfedavg", inner_lr=0.25, outer_lr=0.5, variant=variant)
    state, _ = play(parabolas([(1, 0.0), (2, 1.0)], 3.0), method, 100)
    assert state.server[0]["weight"].item() == pytest.approx(rests, abs=1e-10)


# --- a round, written out --------------------------------------------------------------------------------------------


@pytest.fixture
def rolled(monkeypatch):
    """Every order of samples is their own, rolled by 1 + draw + 2·epoch: known, and no two draws' are the same."""

    class Rolled:
        def __init__(self, *names):
            self.by = 1 + (names[6] if len(names) > 6 else 0) + 2 * names[5]

        def permutation(self, n):
            return np.roll(np.arange(n), self.by)

    monkeypatch.setattr(training, "rng", Rolled)
    return lambda n, epoch, draw: np.roll(np.arange(n), 1 + draw + 2 * epoch)


def grads(peer, params, batch, graph=False):
    """∇f of a Plain client's modules at `params`, a list of tensors in the order of the modules' own."""
    names = [[n for n, _ in m.named_parameters()] for m in (peer.r, peer.h)]
    with_r, with_h = (
        dict(zip(names[0], params, strict=False)),
        dict(zip(names[1], params[len(names[0]) :], strict=True)),
    )
    z = torch.func.functional_call(peer.r, with_r, (batch[0],))
    loss = nn.functional.cross_entropy(torch.func.functional_call(peer.h, with_h, (z,)), batch[1])
    return torch.autograd.grad(loss, params, create_graph=graph)


def walk(peer, order, variant, alpha, beta, delta, epochs):
    """Step 2 by autograd on a Plain client, in place: its parameters move, and buffers with the pass over D' only."""
    params, n, size = [*peer.r.parameters(), *peer.h.parameters()], len(peer.y), peer.rule.batch_size
    still = copy.deepcopy(peer)  # whose batch-norm may move as it likes
    peer.r.train(), still.r.train()
    for epoch, start in itertools.product(range(epochs), range(0, n, size)):
        D1, D, D2 = ((peer.x[o], peer.y[o]) for o in (order(n, epoch, k)[start : start + size] for k in range(3)))
        w = [p.detach().clone().requires_grad_() for p in params]
        w_tilde = [p - alpha * g for p, g in zip(w, grads(still, w, D), strict=True)]
        v = grads(peer, w_tilde, D1)
        if variant == "exact":
            product = torch.autograd.grad(grads(still, w, D2, graph=True), w, v)
        else:
            up, down = (grads(still, [p + s * d for p, d in zip(w, v, strict=True)], D2) for s in (delta, -delta))
            product = [(a - b) / (2 * delta) * (variant == "hf") for a, b in zip(up, down, strict=True)]
        with torch.no_grad():
            for p, d, h in zip(params, v, product, strict=True):
                p -= beta * (d - alpha * h)
    return peer.state()


@every_variant
@pytest.mark.parametrize("norm", [False, True])
def test_two_rounds_in_plain_torch(uneven, by_hand, linear, plain, play, rolled, one_thread, variant, norm):
    """Two epochs, uneven clients, short batches, a batch for each of D, D', D''; the server's mean is uniform."""
    rule = {"lr": 0.3, "epochs": 2, "batch_size": 4}
    fed = batch_normed(by_hand, linear, (4, 7, 10, 11), rule=rule) if norm else uneven(rule=rule)
    method = make("perfedavg", inner_lr=0.2, variant=variant, delta=0.1)
    state, rounds = play(fed, method, 2)
    r, h = fed.init()
    for _ in range(2):
        peers = [walk(plain(fed, i).load(r, h), rolled, variant, 0.2, 0.3, 0.1, 2) for i in range(4)]
        r, h = (plain.mean(part, [1] * 4) for part in zip(*peers, strict=True))
    if norm:  # a step each, of 2·(1 + 2 + 3 + 3) in a round, by four clients: 4.5, rounded to 4; then 8.5, to 8
        assert r["1.num_batches_tracked"] == 8.5 and state.server[0]["1.num_batches_tracked"].item() == 8
        assert state.server[0]["1.num_batches_tracked"].dtype == torch.int64
        r["1.num_batches_tracked"] = torch.tensor(8)
    assert trees.unequal(state.server, (r, h)) < 1e-12
    for i in range(4):
        assert trees.unequal(trees.row(rounds[-1].held, i)[1], peers[i][1]) < 1e-12
    for other in set(VARIANTS) - {variant}:
        away, _ = play(fed, dataclasses.replace(method, variant=other), 2)
        assert trees.unequal(state.server[1], away.server[1]) > 1e-4


def test_three_exact_steps_descend_the_objective(uneven, plain, play, one_thread):
    """Where a batch is all samples: gradient descent on f_i(w − α ∇f_i(w)), by autograd through the inner step."""
    fed = uneven(rule={"lr": 0.3, "epochs": 3, "batch_size": 20})
    _, (result,) = play(fed, make("perfedavg", inner_lr=0.2, variant="exact"), 1)
    for i in range(4):
        peer, batch = plain(fed, i), fed.train[i]
        w = [p.detach() for p in (*peer.r.parameters(), *peer.h.parameters())]
        for _ in range(3):
            w = [p.requires_grad_() for p in w]
            w_tilde = [p - 0.2 * g for p, g in zip(w, grads(peer, w, batch, graph=True), strict=True)]
            z = nn.functional.linear(batch[0], *w_tilde[:2]).relu()
            loss = nn.functional.cross_entropy(nn.functional.linear(z, *w_tilde[2:]), batch[1])
            w = [(p - 0.3 * g).detach() for p, g in zip(w, torch.autograd.grad(loss, w), strict=True)]
        for ours, expected in zip(trees.leaves(trees.row(result.held, i)), w, strict=True):
            assert (ours - expected).abs().max() < 1e-12


@every_variant
def test_the_batches_of_a_step_are_drawn_independently(by_hand, scalar_net, monkeypatch, variant):
    """Each of them goes through all samples, once an epoch, in an order of its own; D' in that of FedAvg's batches."""
    seen = []

    def loss(model, params, batch):
        seen.append(batch[0].flatten().tolist())
        return (params[0]["weight"] - batch[0]).square().mean()

    monkeypatch.setattr(perfedavg, "model_loss", loss)
    x = torch.arange(12.0)[:, None]
    fed = by_hand(scalar_net(1, 1), [(x, [0] * 12)], rule={"batch_size": 3, "epochs": 2})
    method = make("perfedavg", variant=variant)
    fed.play(method, fed.start(method), 1)
    passes = {"fo": 2, "hf": 4, "exact": 3}[variant]  # in the order D, D', and D'' once or twice
    D, D1, *D2 = ([x for batch in seen[k::passes] for x in batch] for k in range(passes))
    assert all(order == D2[0] for order in D2)
    clients = fed.clients([0], 1, 1)
    for draw, order in enumerate([D1, D, *D2[:1]]):
        of_epoch = functools.partial(_order, fed.seed, 1, clients.ids, clients.n, "train", 0)
        assert order == [*of_epoch(0, draw), *of_epoch(1, draw)]
        assert sorted(order[:12]) == sorted(order[12:]) == x.flatten().tolist()
    assert len({tuple(order) for order in (D, D1, *D2)}) == len([D, D1, *D2[:1]])


# --- the product with the Hessian ------------------------------------------------------------------------------------


def test_the_slope_along_a_direction_gives_the_hessian(uneven, one_thread):
    """Against all of torch.autograd.functional.hessian on a small net, 43 by 43."""
    fed = uneven()
    w, (x, y), model = fed.init(), fed.train[3], fed.model

    def f(flat):
        parts = flat.split([t.numel() for t in trees.leaves(w)])
        own = [p.view_as(t) for p, t in zip(parts, trees.leaves(w), strict=True)]
        return model_loss(model, trees.like(w, own), (x, y))

    flat = torch.cat([t.flatten() for t in trees.leaves(w)])
    H = torch.autograd.functional.hessian(f, flat)
    assert H.shape == (43, 43) and H.abs().max() > 0.1
    g = torch.Generator().manual_seed(0)
    for _ in range(3):
        v = trees.tree_map(lambda t: torch.randn(t.shape, generator=g, dtype=t.dtype), w)
        product, _ = slope(model, perfedavg.slope_along, w, (x, y), v)
        ours, direction = (torch.cat([t.flatten() for t in trees.leaves(tree)]) for tree in (product, v))
        torch.testing.assert_close(ours, H @ direction, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", ["cnn-small", "resnet18"])
def test_the_product_on_convolutions_and_batch_norm(name, one_thread):
    """Against two backward passes through torch's own modules."""
    shape = (1, 8, 8) if name == "cnn-small" else (3, 32, 32)
    model, g = models.build(name, shape, 3), torch.Generator().manual_seed(0)
    double = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
    w = trees.tree_map(double, model.init())
    x, y = torch.randn(6, *shape, generator=g, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    v, _ = slope(model, model_loss, w, (x, y))
    product, _ = slope(model, perfedavg.slope_along, w, (x, y), v)
    r, h = (copy.deepcopy(part.module).double().train() for part in (model.extractor, model.head))
    params = [*r.named_parameters(), *h.named_parameters()]
    first = torch.autograd.grad(nn.functional.cross_entropy(h(r(x)), y), [p for _, p in params], create_graph=True)
    second = torch.autograd.grad(first, [p for _, p in params], [t.detach() for t in first])
    largest = max(t.abs().max() for t in second)
    for (key, _), expected in zip(params, second, strict=True):
        ours = product[0].get(key, product[1].get(key))
        assert (ours - expected).abs().max() < 1e-9 * largest
    assert not any(product[0][key].any() for key in model.buffers)


# --- limits ----------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("norm", [False, True])
def test_without_an_inner_step_it_is_fedavg(by_hand, linear, play, variant, norm):
    """α = 0, clients of one size: to the bit, batch-norm's statistics and counters too, and used as it is received."""
    rule, sizes = {"lr": 0.1, "epochs": 2, "batch_size": 4}, (7, 7, 7)
    if norm:
        fed = batch_normed(by_hand, linear, sizes, rule=rule)
    else:
        g = torch.Generator().manual_seed(0)
        net = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3)
        fed = by_hand(net, [(torch.randn(n, 4, generator=g), [0, 1, 2, 0, 1, 2, 0]) for n in sizes], rule=rule)
    method = make("perfedavg", inner_lr=0.0, variant=variant)
    (per, rounds), (avg, others) = play(fed, method, 2), play(fed, make("fedavg"), 2)
    assert trees.unequal(per.server, avg.server) == 0
    assert trees.unequal(rounds[-1].held, others[-1].held) == 0
    assert trees.unequal(fed.deployed(method, per, 3)[1], trees.expand(avg.server[1], 3)) == 0
    assert trees.unequal(per.server, fed.init()) > 0


def test_every_client_counts_the_same(uneven, play):
    """1, 7, 10 and 11 samples; also a client that took no step, for its batch was short and left out."""
    for drop_last in (False, True):
        fed = uneven(rule={"lr": 0.1, "drop_last": drop_last})
        state, (result,) = play(fed, make("perfedavg"), 1)
        uniform, by_n = (trees.average(result.held, weights) for weights in ([1] * 4, [1, 7, 10, 11]))
        assert trees.unequal(state.server, uniform) == 0
        assert trees.unequal(state.server, by_n) > 1e-3


def test_rates_are_the_local_one_unless_given(uneven, play):
    """Momentum, decay and clipping, which the steps have none of, change nothing."""
    fed = uneven(rule={"lr": 0.3})
    plain, method = make("perfedavg"), make("perfedavg", inner_lr=0.3, outer_lr=0.3)
    ends = [play(fed, m, 2)[0] for m in (plain, method)]
    assert trees.unequal(ends[0].server, ends[1].server) == 0
    assert trees.unequal(*(fed.deployed(m, ends[0], 3) for m in (plain, method))) == 0
    for rule in ({"lr": 0.01}, {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.1, "clip": 0.01}):
        other = uneven(rule=rule)
        state, _ = play(other, method, 2)
        assert trees.unequal(state.server, ends[0].server) == 0
        assert trees.unequal(other.deployed(method, state, 3), fed.deployed(method, ends[0], 3)) == 0
    for setting in ("inner_lr", "outer_lr"):
        away, _ = play(fed, make("perfedavg", **{setting: 0.2}), 2)
        assert trees.unequal(away.server, ends[0].server) > 1e-4


# --- the step of those who use the model -----------------------------------------------------------------------------


def test_the_model_that_clients_use_in_plain_torch(uneven, plain, play, one_thread):
    """One step of gradient descent over all of a client's training samples: no batch, seed or round matters."""
    fed, method = uneven(rule={"lr": 0.1}), make("perfedavg", inner_lr=0.2)
    state, _ = play(fed, method, 1)
    used = fed.deployed(method, state, 1)
    for i in range(4):
        peer = plain(fed, i).load(*state.server)
        nn.functional.cross_entropy(peer.h(peer.r(peer.x)), peer.y).backward()
        with torch.no_grad():
            for p in [*peer.r.parameters(), *peer.h.parameters()]:
                p -= 0.2 * p.grad
        assert trees.unequal(trees.row(used, i), peer.state()) < 1e-12
    state.round = 6
    other = uneven(rule={"lr": 0.1, "batch_size": 2, "epochs": 5, "drop_last": True}, seed=9)
    assert trees.unequal(other.deployed(method, state, 7), used) == 0


def test_more_samples_than_a_forward_pass_takes(by_hand, linear, monkeypatch):
    """250 samples are one gradient, in pieces of any size."""
    g = torch.Generator().manual_seed(0)
    net = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3)
    fed = by_hand(net, [(torch.randn(250, 4, generator=g), torch.randint(3, (250,), generator=g).tolist())])
    method = make("perfedavg", inner_lr=1.0)
    ends = []
    for rows in (100, 1000, 7):
        monkeypatch.setattr(training, "ROWS", rows)
        ends.append(fed.deployed(method, fed.start(method), 1))
    assert max(trees.unequal(ends[0], end) for end in ends) < 1e-13
    assert trees.unequal(trees.row(ends[0], 0), fed.init()) > 1e-2


def test_statistics_in_use(by_hand, linear, play):
    """The step moves them once more; a client of one sample, which has no variance, uses what it gets."""
    fed, method = batch_normed(by_hand, linear, (1, 8)), make("perfedavg", inner_lr=0.2)
    state, rounds = play(fed, method, 1)
    used = fed.deployed(method, state, 1)
    assert rounds[0].log()["skipped"].tolist() == [1, 0]
    assert trees.unequal(trees.row(used, 0), state.server) == 0
    assert used[0]["1.num_batches_tracked"].tolist() == [0, 1]  # the mean of 0 and 1 passes is rounded to 0
    z = fed.train[1][0] @ state.server[0]["0.weight"].T + state.server[0]["0.bias"]
    expected = 0.9 * state.server[0]["1.running_mean"] + 0.1 * z.mean(0)
    torch.testing.assert_close(used[0]["1.running_mean"][1], expected, atol=1e-12, rtol=1e-12)


# --- costs, engines, settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "times"), [("fo", 2), ("hf", 4)])
def test_flops_are_those_of_its_gradients(digits, play, variant, times):
    """Of two, or four, where FedAvg has one a step; using the model is not training."""
    _, (ours,) = play(digits(), make("perfedavg", variant=variant), 1)
    _, (avg,) = play(digits(), make("fedavg"), 1)
    assert ours.flops().tolist() == (times * avg.flops()).tolist()


@every_variant
@pytest.mark.parametrize("model", ["mlp", "cnn-small", "norm"])
def test_stacked_is_the_loop(digits, by_hand, linear, play, variant, model):
    """All variants can be stacked, without a warning; float64, so that differences are rounding."""
    ends = []
    for engine in ("loop", "stacked"):
        if model == "norm":
            fed = batch_normed(by_hand, linear, (3, 7, 10), rule={"lr": 0.1, "batch_size": 4}, engine=engine)
        else:
            fed = digits(model, join_ratio=0.5, engine=engine, dtype=torch.float64)
        state, rounds = play(fed, make("perfedavg", variant=variant), 2)
        ends.append((state.server, rounds[-1].held))
    assert fed.groups[0].engine.known.keys() == {(perfedavg.STEPS[variant][0], fed.model)}
    assert trees.unequal(*ends) < 1e-11


@pytest.mark.parametrize(
    "bad", [{"inner_lr": -0.1}, {"outer_lr": -1}, {"variant": "maml"}, {"delta": 0}, {"delta": -1}, {"inner_lr": 1e39}]
)
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}=.*must be"):
        make("perfedavg", **bad)
