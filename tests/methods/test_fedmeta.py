"""FedMeta: the server descends by the gradients of clients' losses after adaptation."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, training, trees
from pflkit.messages import received
from pflkit.methods import fedmeta, make, perfedavg
from pflkit.training import Clients

VARIANTS = ("maml", "fomaml", "metasgd")
every_variant = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture
def two_parabolas(by_hand, scalar_net, monkeypatch, in_order):
    """A Federation of one client: L_S = (θ − 1)², L_Q = (θ − 2)², θ the extractor's number, 3 at first."""

    def loss(model, params, batch):
        return (params[0]["weight"] - batch[0]).square().mean()

    for module in (fedmeta, perfedavg):
        monkeypatch.setattr(module, "model_loss", loss)
    return by_hand(scalar_net(3, 1), [([[1.0], [2.0]], [0, 0])])


@pytest.fixture
def normed(by_hand, linear):
    """A function that makes a Federation of clients with so many samples, whose model has batch-norm."""

    def make(sizes, **options):
        g = torch.Generator().manual_seed(1)
        layers = nn.Sequential(linear(4, 5), nn.BatchNorm1d(5), nn.ReLU())
        clients = [
            (3 + 5 * torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g).tolist()) for n in sizes
        ]
        return by_hand(models.from_modules(layers, linear(5, 3), (4,), 3), clients, **options)

    return make


def local(fed, method, state):
    """What `local` gives in the next round, everybody joining."""
    everyone = np.arange(fed.num_clients)
    message = received(method.download(state.server, everyone), fed.num_clients)
    return method.local(fed.clients(everyone, state.round + 1, 9), state.kept, message)


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "expected"), [("maml", 0.96), ("fomaml", 1.2), ("metasgd", 0.96)])
def test_a_round_on_two_parabolas(two_parabolas, variant, expected):
    """α = .1: g_S = 4, θ' = 2.6, ∇L_Q(θ') = 1.2, times 1 − .1·2 unless of first order; ∂/∂α = −1.2·4. β = .5."""
    fed, method = two_parabolas, make("fedmeta", variant=variant, inner_lr=0.1, server_lr=0.5)
    state = fed.start(method)
    _, (g, slopes, statistics), held = local(fed, method, state)
    assert g[0]["weight"].item() == pytest.approx(expected, abs=1e-14)
    assert g[1]["weight"].item() == 0
    assert statistics == ({}, {})
    assert held[0]["weight"].item() == fed.deployed(method, state, 1)[0]["weight"].item() == pytest.approx(2.6)
    fed.play(method, state, 1)
    assert state.server[0][0]["weight"].item() == pytest.approx(3 - 0.5 * expected)
    if variant == "metasgd":
        assert slopes[0]["weight"].item() == pytest.approx(-4.8)
        assert state.server[1][0]["weight"].item() == pytest.approx(0.1 + 0.5 * 4.8)
        assert state.server[1][1]["weight"].item() == 0.1  # the loss does not depend on this parameter
    else:
        assert slopes == state.server[1] == ()


# --- rounds, written out ---------------------------------------------------------------------------------------------


def loss_at(peer, params, rows):
    """The loss of a Plain client on these rows, with `params` [name, tensor] in its modules, in training mode."""
    parts = [{n: params[f"{k}{n}"] for n, _ in m.named_parameters()} for k, m in (("r", peer.r), ("h", peer.h))]
    z = torch.func.functional_call(peer.r.train(), parts[0], (peer.x[rows],))
    return nn.functional.cross_entropy(torch.func.functional_call(peer.h.train(), parts[1], (z,)), peer.y[rows])


def names(fed):
    """Those of all parameters, "r..." or "h..."."""
    return [k + n for k, part in zip("rh", fed.init(), strict=True) for n in part if n not in fed.model.buffers]


def value(tree, name):
    return tree["rh".index(name[0])][name[1:]]


def client_round(peer, cut, variant, rates):
    """Steps 2 to 4 by autograd through the inner step: θ', the gradients in θ and in the rates, and the state, whose
    buffers move with the pass over S, then with that over Q. In order, S is the first `cut` samples.
    """
    params = {f"{k}{n}": p for k, part in (("r", peer.r), ("h", peer.h)) for n, p in part.named_parameters()}
    theta = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
    alpha, first = {n: rates[n].clone().requires_grad_() for n in theta}, copy.deepcopy(peer)
    S, Q = (slice(0, cut), slice(cut, None)) if cut else (slice(None), slice(None))
    g_S = torch.autograd.grad(loss_at(first, theta, S), theta.values(), create_graph=variant != "fomaml")
    peer.load(*first.state())
    adapted = {n: p - alpha[n] * g for (n, p), g in zip(theta.items(), g_S, strict=True)}
    g = torch.autograd.grad(loss_at(peer, adapted, Q), [*theta.values(), *alpha.values()])
    slopes = dict(zip(alpha, g[len(theta) :], strict=True))
    return adapted, dict(zip(theta, g, strict=False)), slopes, peer.state()


@every_variant
@pytest.mark.parametrize("norm", [False, True])
def test_three_rounds_in_plain_torch(uneven, normed, plain, play, in_order, one_thread, variant, norm):
    """Autograd through the inner step, which knows no formula for a meta-gradient. 1, 7, 10 and 11 samples, a share of
    .3 of them: 0 (that is, all), 2, 3 and 3. With batch-norm 7, 10 and 11; its statistics are uniform means.
    """
    fed = normed((7, 10, 11)) if norm else uneven()
    cuts = (2, 3, 3) if norm else (0, 2, 3, 3)
    method = make("fedmeta", variant=variant, inner_lr=0.3, server_lr=0.4, support=0.3)
    state, rounds = play(fed, method, 3)
    C, (r, h) = fed.num_clients, fed.init()
    rates = {n: torch.full_like(value((r, h), n), 0.3) for n in names(fed)}
    for _ in range(3):
        results = [client_round(plain(fed, i).load(r, h), cut, variant, rates) for i, cut in enumerate(cuts)]
        adapted, g, slopes, ends = zip(*results, strict=True)
        r, h = (dict(part) for part in (r, h))
        for n in names(fed):
            (r, h)["rh".index(n[0])][n[1:]] = value((r, h), n) - 0.4 * sum(gi[n] for gi in g) / C
            if variant == "metasgd":
                rates[n] = rates[n] - 0.4 * sum(s[n] for s in slopes) / C
        for n in fed.model.buffers:
            r[n] = sum(end[0][n].double() for end in ends) / C
            r[n] = r[n].round().long() if n.endswith("tracked") else r[n]
    assert trees.unequal(state.server[0], (r, h)) < 1e-12
    for n in names(fed):
        assert (value(rounds[-1].held, n) - torch.stack([own[n] for own in adapted])).abs().max() < 1e-12
        if variant == "metasgd":
            assert (value(state.server[1], n) - rates[n]).abs().max() < 1e-12
    if norm:
        assert state.server[0][0]["1.num_batches_tracked"].dtype == torch.int64
        assert state.server[0][0]["1.num_batches_tracked"].item() == 6
    others = [play(fed, make("fedmeta", variant=v, inner_lr=0.3, server_lr=0.4, support=0.3), 3)[0] for v in VARIANTS]
    away = [trees.unequal(state.server[0], other.server[0]) for other in others]
    assert [distance > 1e-4 for distance in away] == [v != variant for v in VARIANTS]


@every_variant
def test_sets_larger_than_a_forward_pass(by_hand, linear, plain, in_order, monkeypatch, one_thread, variant):
    """120 and 280 samples, taken in pieces: the gradient through the whole of both sets, whatever the pieces."""
    g = torch.Generator().manual_seed(0)
    net = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3)
    fed = by_hand(net, [(torch.randn(400, 4, generator=g), torch.randint(3, (400,), generator=g).tolist())])
    method = make("fedmeta", variant=variant, inner_lr=0.5, support=0.3)
    rates = {n: torch.full_like(value(fed.init(), n), 0.5) for n in names(fed)}
    _, expected, slopes, _ = client_round(plain(fed, 0), 120, variant, rates)
    for rows in (100, 7, 1000):
        monkeypatch.setattr(training, "ROWS", rows)
        _, (ours, of_rates, _), _ = local(fed, method, fed.start(method))
        for n in names(fed):
            assert (value(ours, n)[0] - expected[n]).abs().max() < 1e-14
            assert not of_rates or (value(of_rates, n)[0] - slopes[n]).abs().max() < 1e-14


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["maml", "fomaml"])
def test_without_an_inner_step_it_is_sgd_on_query_losses(uneven, plain, play, in_order, one_thread, variant):
    """α = 0: θ − β · the uniform mean of ∇L_Q(θ). All use θ as it is received."""
    fed, method = uneven(), make("fedmeta", variant=variant, inner_lr=0.0, server_lr=0.7, support=0.3)
    state, (result,) = play(fed, method, 1)
    r, h = fed.init()
    peers = [plain(fed, i) for i in range(4)]
    for peer, cut in zip(peers, (0, 2, 3, 3), strict=True):
        nn.functional.cross_entropy(peer.h(peer.r(peer.x[cut:])), peer.y[cut:]).backward()
    for part, modules in ((r, [p.r for p in peers]), (h, [p.h for p in peers])):
        for n, own in zip(part, zip(*(m.parameters() for m in modules), strict=True), strict=True):
            part[n] = part[n] - 0.7 * sum(p.grad for p in own) / 4
    assert trees.unequal(state.server[0], (r, h)) < 1e-14
    assert trees.unequal(result.held, trees.expand(fed.init(), 4)) == 0


def test_meta_sgd_with_rates_held_is_maml(digits, play):
    """To the bit, where α is set to its first value before each round; and it learns where it is not."""
    fed = digits(join_ratio=0.5)
    sgd, maml = make("fedmeta", variant="metasgd"), make("fedmeta")
    state, fixed = fed.start(sgd), fed.start(maml)
    first = trees.clone(state.server[1])
    assert trees.unequal(first, trees.full_like(fed.init(), 0.1)) == 0
    for _ in range(3):
        state.server = state.server[0], trees.clone(first)
        ours, theirs = fed.play(sgd, state, 3), fed.play(maml, fixed, 3)
        assert trees.unequal(state.server[0], fixed.server[0]) == 0
        assert trees.unequal(ours.held, theirs.held) == 0
        assert trees.unequal(state.server[1], first) > 1e-3
    free, _ = play(fed, sgd, 3)
    assert trees.unequal(free.server[0], fixed.server[0]) > 1e-3


@pytest.mark.parametrize(("variant", "other"), [("fo", "fomaml"), ("exact", "maml")])
@pytest.mark.parametrize("norm", [False, True])
def test_with_one_local_step_per_fedavg_is_this(uneven, normed, play, monkeypatch, variant, other, norm):
    """Where D, D' and D'', S and Q are all samples: one step at rate β there is the server's step at rate β here."""
    monkeypatch.setattr(Clients, "split", lambda self, share, name: (self, self))
    fed = normed((7, 10, 11), rule={"batch_size": 20}) if norm else uneven(rule={"batch_size": 20})
    per, _ = play(fed, make("perfedavg", variant=variant, inner_lr=0.3, outer_lr=0.4), 3)
    meta, _ = play(fed, make("fedmeta", variant=other, inner_lr=0.3, server_lr=0.4), 3)
    trained = [perfedavg.only(fed.model, theta) for theta in (per.server, meta.server[0])]
    assert trees.unequal(*trained) < 1e-12
    assert trees.unequal(per.server, fed.init()) > 0.1


def test_training_rates_epochs_and_batches_do_not_matter(uneven, play):
    method = make("fedmeta")
    ends = []
    for rule in ({}, {"lr": 0.0, "epochs": 0}, {"batch_size": 2, "momentum": 0.9, "clip": 0.1, "drop_last": True}):
        state, rounds = play(fed := uneven(rule=rule), method, 2)
        ends.append((state.server, rounds[-1].held, fed.deployed(method, state, 3)))
    assert trees.unequal(ends[0], ends[1]) == trees.unequal(ends[0], ends[2]) == 0
    assert trees.unequal(ends[0][0][0], fed.init()) > 0


# --- support and query sets ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "cut"), [(0.2, 2), (0.5, 6), (0.9, 10), (1.0, 10), (0.01, 1)])
def test_the_sets_are_the_same_in_every_round_and_in_use(by_hand, scalar_net, monkeypatch, share, cut):
    """Of 11 samples each is in one set; adaptation sees the same support set in training and in use, and no query."""
    seen = []

    def loss(model, params, batch):
        seen.append(batch[0].flatten().tolist())
        return (params[0]["weight"] - batch[0]).square().mean()

    for module in (fedmeta, perfedavg):
        monkeypatch.setattr(module, "model_loss", loss)
    fed = by_hand(scalar_net(1, 1), [(torch.arange(11.0)[:, None], [0] * 11)])
    method = make("fedmeta", support=share)
    state = fed.start(method)
    for _ in range(3):
        fed.play(method, state, 3)
        fed.deployed(method, state, 3)
    S, Q = seen[:2]
    assert len(S) == cut and sorted(S + Q) == list(range(11))
    assert seen == [S, Q, S, S] * 3  # g_S, v, the product with the Hessian; in use


def test_the_only_sample_is_in_both_sets(by_hand, scalar_net):
    """Logits (0, h r x) with r = 1, h = 0 and x = 2, of class 1: ∂L/∂h = −½·2, so at α = .5 h' = .5 and r' = r; there
    ∂L/∂h = −2 (1 − σ(.5·2)).
    """
    fed, method = (
        by_hand(scalar_net(1, 0, classes=2), [([[2.0]], [1])]),
        make("fedmeta", variant="fomaml", inner_lr=0.5),
    )
    state = fed.start(method)
    assert fed.deployed(method, state, 1)[1]["weight"].item() == pytest.approx(0.5)
    _, (g, _, _), _ = local(fed, method, state)
    assert g[1]["weight"].item() == pytest.approx(-2 * (1 - 1 / (1 + np.exp(-1))))


# --- what travels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "times"), [("maml", 1), ("fomaml", 1), ("metasgd", 2)])
def test_bytes(uneven, normed, play, variant, times):
    """Of p = 43 parameters of float64: p down and up, for Meta-SGD 2p; with batch-norm's 10 parameters, and once, not
    twice, its 10 statistics and a counter.
    """
    _, (result,) = play(uneven(), make("fedmeta", variant=variant), 1)
    assert set(result.bytes_down) == set(result.bytes_up) == {8 * 43 * times}
    _, (result,) = play(normed((7, 10)), make("fedmeta", variant=variant), 1)
    assert set(result.bytes_down) == set(result.bytes_up) == {8 * 53 * times + 8 * 11}


def test_a_client_without_variance_sends_no_slope(normed):
    """One sample, and batch-norm: a gradient of 0, the statistics as received, and θ as it is."""
    fed, method = normed((1, 8)), make("fedmeta")
    state = fed.start(method)
    _, (g, _, statistics), held = local(fed, method, state)
    assert all((t[0] == 0).all() for t in trees.leaves(g)) and any((t[1] != 0).any() for t in trees.leaves(g))
    assert set(statistics[0]) == fed.model.buffers and statistics[1] == {}
    assert statistics[0]["1.num_batches_tracked"].tolist() == [0, 2]
    assert trees.unequal(trees.row(held, 0), fed.init()) == 0


def test_statistics_in_use(normed):
    """Those received, moved by the one pass over the support set, at θ."""
    fed, method = normed((10,)), make("fedmeta", support=0.4)
    state = fed.start(method)
    fed.play(method, state, 1)
    theta = state.server[0]
    S, _ = fed.clients([0], 1, 1).split(0.4, "support")
    z = S.data[0][0] @ theta[0]["0.weight"].T + theta[0]["0.bias"]
    used = fed.deployed(method, state, 1)
    assert theta[0]["1.num_batches_tracked"].item() == 2 and used[0]["1.num_batches_tracked"].item() == 3
    expected = 0.9 * theta[0]["1.running_mean"] + 0.1 * z.mean(0)
    torch.testing.assert_close(used[0]["1.running_mean"][0], expected, atol=1e-12, rtol=1e-12)


@every_variant
@pytest.mark.parametrize("norm", [False, True])
def test_what_a_client_has_after_a_round_is_what_it_had_before(digits, normed, variant, norm):
    """There is no more local training than the adaptation."""
    fed = normed((7, 8, 9, 10), join_ratio=0.5) if norm else digits(join_ratio=0.5)
    method = make("fedmeta", variant=variant)
    state = fed.start(method)
    for _ in range(2):
        before = fed.deployed(method, state, 2)
        result = fed.play(method, state, 2)
        assert trees.unequal(result.held, trees.take(before, result.ids)) == 0
        assert trees.unequal(trees.row(result.held, 0), trees.row(result.held, 1)) > 0


# --- runs, settings --------------------------------------------------------------------------------------------------


@every_variant
def test_a_run(digits, variant):
    """Join ratio .5, a CNN, all of it extractor or head too; α is watched where it is learned."""
    for layers in (0, 1, 4):
        fed = digits("cnn-small", layers, join_ratio=0.5)
        history = experiment.run(make("fedmeta", variant=variant), fed, 2)
        assert history.clients.loc[history.clients["joined"], ["before", "after", "flops"]].notna().all(axis=None)
        assert set(history.watch.get("name", [])) == ({"alpha"} if variant == "metasgd" else set())


@pytest.mark.parametrize(
    "bad", [{"variant": "exact"}, {"inner_lr": -1}, {"server_lr": -0.1}, {"support": 0.0}, {"support": 1.1}]
)
def test_impossible_settings_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}=.*must be"):
        make("fedmeta", **bad)
