"""FedPAC: class means that all share, and heads that are mixed for each client by a quadratic program."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, training, trees
from pflkit.messages import Rows, received
from pflkit.methods import fedpac, make


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def alphas(h, V, least=1e-3):
    """α_i of all clients i: [C, C]."""
    return torch.stack([fedpac.combining_weights(fedpac.objective(h, V, i), least) for i in range(len(V))])


# --- the quadratic program -------------------------------------------------------------------------------------------


def test_equal_h_weigh_by_the_inverse_variance():
    """V = (1, 3): (3/4, 1/4) for both."""
    found = alphas(torch.ones(2, 3, 4), torch.tensor([1.0, 3.0]))
    torch.testing.assert_close(found, tensor([[0.75, 0.25], [0.75, 0.25]]), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("V1", "V2"), [*itertools.product([0, 1e-6, 1e-3, 1, 1e3], repeat=2)])
@pytest.mark.parametrize("delta", [1e-6, 1e-3, 1, 1e3])
def test_two_clients_have_a_closed_form(V1, V2, delta):
    """α_11 = (V2 + δ) / (V1 + V2 + δ), so 2/3 for V = (1, 1), δ = 1; with V = 0 it is e_i. h differs in two classes."""
    h, V = torch.zeros(2, 2, 3, dtype=torch.float64), tensor([V1, V2])
    h[0] += 1  # only differences count
    h[1] += 1 + (delta / 6) ** 0.5
    one, two = (V2 + delta) / (V1 + V2 + delta), (V1 + delta) / (V1 + V2 + delta)
    torch.testing.assert_close(alphas(h, V, 0.0), tensor([[one, 1 - one], [1 - two, two]]), atol=1e-9, rtol=0)
    if V1 == V2 == 0:
        assert alphas(h, V).tolist() == [[1, 0], [0, 1]]


def exhaustive(M):
    """The least αᵀ M α over the simplex: of each support the stationary point, where it is one of positive weights."""
    best, q = None, np.inf
    for size in range(1, len(M) + 1):
        for support in map(list, itertools.combinations(range(len(M)), size)):
            alpha = np.zeros(len(M))
            alpha[support] = np.linalg.solve(M[np.ix_(support, support)], np.ones(size))
            alpha /= alpha.sum()
            if alpha.min() >= 0 and alpha @ M @ alpha < q:
                best, q = alpha, alpha @ M @ alpha
    return best


def test_the_weights_are_those_of_an_exhaustive_search():
    """The objective here is summed as it is printed: α² V, and the squared norm of Σ α (h_i − h_j) class by class."""
    g, seen = torch.Generator().manual_seed(0), set()
    for trial in range(40):
        h = torch.randn(5, 3, 2, generator=g, dtype=torch.float64)
        V = (10.0 ** (trial % 5 - 3)) * torch.rand(5, generator=g, dtype=torch.float64)
        for i in range(5):
            M = fedpac.objective(h, V, i)
            alpha = fedpac.combining_weights(M, 0.0)
            bias = sum((alpha[:, None] * (h[i, c] - h[:, c])).sum(0).square().sum() for c in range(3))
            assert float(alpha @ M @ alpha) == pytest.approx(float((alpha**2 * V).sum() + bias), rel=1e-10)
            np.testing.assert_allclose(alpha, exhaustive(M.numpy()), atol=1e-8)
            seen.add(int((alpha > 0).sum()))
    assert len(seen) > 3


@pytest.mark.parametrize("N", [1, 2, 50])
@pytest.mark.parametrize("V", [0.0, 1e-8, 1e-2, 1e6])
@pytest.mark.parametrize("kind", ["random", "one class each", "few directions", "twins", "identical"])
def test_singular_problems_have_an_answer(N, V, kind):
    """C7. Nonnegative, of sum 1, and optimal: no slope is below αᵀ M α, and those of positive weights are it."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(N, 10, 4, generator=g, dtype=torch.float64)
    if kind == "one class each":
        h *= torch.nn.functional.one_hot(torch.arange(N) % 10, 10).unsqueeze(2)
    elif kind == "few directions":
        h[:, 1:] = 0
    elif kind == "twins":
        h = h[torch.arange(N) // 2]
    elif kind == "identical":
        h = h[:1].expand(N, 10, 4)
    variances = V * torch.rand(N, generator=g, dtype=torch.float64)
    for i in range(0, N, 7):
        M = fedpac.objective(h, variances, i)
        alpha = fedpac.combining_weights(M, 0.0)
        assert float(alpha.min()) >= 0 and float(alpha.sum()) == pytest.approx(1, abs=1e-12)
        slope, scale = M @ alpha, float(M.abs().max())
        least = float(alpha @ slope)
        assert least <= float(slope.min()) + 1e-7 * scale
        assert float((slope - least)[alpha > 0].abs().max()) <= 1e-7 * scale
    if V == 0 and kind == "identical":  # all are as good: all alike
        assert alphas(h[:3], variances[:3]).tolist() == pytest.approx(np.full((min(N, 3),) * 2, 1 / min(N, 3)))


def test_a_factor_changes_no_weight():
    g = torch.Generator().manual_seed(0)
    h, V = torch.randn(6, 4, generator=g, dtype=torch.float64), torch.rand(6, generator=g, dtype=torch.float64)
    for factor in (1e-9, 1e-3, 1e9):
        M = fedpac.objective(h, V, 2)
        found, expected = fedpac.combining_weights(factor * M), fedpac.combining_weights(M)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_float32_statistics_are_weighed_in_float64():
    """To the bit as if they were float64 to begin with."""
    g = torch.Generator().manual_seed(0)
    h, V = torch.randn(6, 10, 4, generator=g), torch.rand(6, generator=g)
    assert torch.equal(alphas(h, V), alphas(h.double(), V.double()))


def test_small_weights_are_dropped_and_the_rest_divided_by_their_sum():
    """PFLlib does not divide. V = (1, 1, 4000): (4000, 4000, 1)/8001 -> (1/2, 1/2, 0), and V3 = 400: nothing is."""
    h = torch.ones(3, 1, 2)
    assert alphas(h, tensor([1.0, 1.0, 4000.0]))[0].tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-12)
    assert alphas(h, tensor([1.0, 1.0, 4000.0]))[0, 2] == 0
    assert alphas(h, tensor([1.0, 1.0, 400.0]))[0].tolist() == pytest.approx([400 / 801, 400 / 801, 1 / 801])
    assert alphas(h, tensor([1.0, 1.0, 400.0]), 0.01)[0, 2] == 0
    found = alphas(h[:2], tensor([1.0, 1.4]), 0.4)  # weights of sum 1 are judged, not β
    assert found.tolist() == pytest.approx(np.array([[1.4 / 2.4, 1 / 2.4]] * 2))


def test_where_all_weights_are_small_none_is_dropped():
    """As of 2000 clients that are alike, each of whom is worth 1/2000."""
    assert alphas(torch.ones(4, 1, 2), torch.ones(4), 0.3)[0].tolist() == pytest.approx([0.25] * 4)


# --- statistics ------------------------------------------------------------------------------------------------------

SAMPLES = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]], [0, 1, 0]


@pytest.fixture
def features(by_hand, linear):
    """A function that makes a Federation of clients whose features are their samples."""

    def make(clients, classes=2, **options):
        r = len(clients[0][0][0])
        net = models.from_modules(nn.Identity(), linear(r, classes), (r,), classes)
        return by_hand(net, clients, **options)

    return make


def uploads(fed, method, state, ids=None):
    """What the clients `ids` send in the next round, by name."""
    ids = np.arange(fed.num_clients) if ids is None else ids
    message = received(method.download(state.server, ids), len(ids))
    sent = method.local(fed.clients(ids, state.round + 1, 9), trees.take(state.kept, ids), message)[1]
    return dict(zip(("extractor", "head", "prototypes", "counts", "h", "V"), sent, strict=True))


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 10])
def test_statistics_by_hand(features, monkeypatch, size, batch_size):
    """Class 0: (1, 0), (3, 0), class 1: (0, 2). h = ((4/3, 0), (0, 2/3)), 3 V = 2/3·5 + 1/3·4 − 16/9 − 4/9 = 22/9: over
    all samples, whatever the batches, and whichever of them training drops.
    """
    monkeypatch.setattr(training, "ROWS", size)  # samples a forward pass
    rule = {"lr": 0.1, "batch_size": batch_size, "drop_last": True}
    fed, method = features([SAMPLES], rule=rule), make("fedpac")
    sent = uploads(fed, method, fed.start(method))
    torch.testing.assert_close(sent["h"], tensor([[[4 / 3, 0], [0, 2 / 3]]]))
    torch.testing.assert_close(sent["V"], tensor([22 / 27]))
    assert sent["prototypes"].values.tolist() == [[[2, 0], [0, 2]]]
    assert sent["counts"].values.tolist() == [[2, 1]] and sent["counts"].values.dtype == torch.int32


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_variance_is_never_negative(features, scale):
    """Clients with a single sample, or a single value, have none, in float32 too; then its own head is the best."""
    g = torch.Generator().manual_seed(0)
    points = scale * torch.randn(6, 50, generator=g)
    clients = [(x.expand(n, 50), [k % 2] * n) for k, x in enumerate(points) for n in (1, k + 2)]
    fed, method = features(clients, rule={"lr": 1e-3 / scale**2}, dtype=torch.float32), make("fedpac", head_lr=0.0)
    V = uploads(fed, method, fed.start(method))["V"]
    assert V.min() >= 0 and V.max() <= 1e-12 * scale**2


def test_a_small_variance_beside_a_large_mean(features):
    """In float32, where ‖z‖² of 5·10⁵ is known to .03: of one class V = E‖z − μ‖² / n, about 50·.01 / 20."""
    x = 100 + 0.1 * torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    fed, method = features([(x, [1] * 20)], dtype=torch.float32, rule={"lr": 1e-6}), make("fedpac", head_lr=0.0)
    expected = (x.double() - x.double().mean(0)).square().sum(1).mean() / 20
    assert uploads(fed, method, fed.start(method))["V"].item() == pytest.approx(float(expected), rel=1e-6)


def test_statistics_are_of_the_received_extractor_in_evaluation_mode(by_hand, linear):
    """By its running statistics, without dropout, before any step; prototypes are of the trained one, likewise."""
    layers = nn.Sequential(linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    net = models.from_modules(layers, linear(3, 2), (2,), 2)
    x, y = torch.linspace(-1, 5, 24).reshape(12, 2).double(), torch.tensor([0, 1] * 6)
    fed, method = by_hand(net, [(x, y.tolist())], rule={"lr": 0.5}), make("fedpac")
    sent, layers = uploads(fed, method, fed.start(method)), layers.double()
    with torch.no_grad():
        z = layers.eval()(x)
        torch.testing.assert_close(sent["h"][0], torch.stack([z[y == c].mean(0) / 2 for c in (0, 1)]))
        assert (layers.train()(x)[y == 0].mean(0) / 2 - sent["h"][0, 0]).abs().max() > 0.1
        layers.load_state_dict(trees.row(sent["extractor"], 0))
        after = torch.stack([layers.eval()(x)[y == c].mean(0) for c in (0, 1)])
    torch.testing.assert_close(sent["prototypes"].values[0], after)
    assert (after / 2 - sent["h"][0]).abs().max() > 0.01


# --- rounds, written out ---------------------------------------------------------------------------------------------


def client(peer, known, lam, head_lr, head_epochs, epochs):
    """One round of a Plain client: (h, V, prototypes {class: (mean, number)}, mean losses of both phases and of R).

    V is written as that of a mixture: Σ_c p_c (E‖z − μ_c‖² + (1 − p_c) ‖μ_c‖²) / n.
    """
    x, y, rule = peer.x, peer.y, {"momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    peer.r.eval()
    h, V, own = torch.zeros(5, 6, dtype=torch.float64), 0, {}
    with torch.no_grad():
        z = peer.r(x)
        for c in set(y.tolist()):
            p, of_class = (y == c).double().mean(), z[y == c]
            own[c] = of_class.mean(0)
            h[c] = p * own[c]
            V += p * ((of_class - own[c]).square().sum(1).mean() + (1 - p) * own[c].square().sum()) / len(y)
    losses = np.zeros(3)
    optimizer = torch.optim.SGD(peer.h.parameters(), lr=head_lr, **rule)
    for bx, by in peer.batches() * head_epochs:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(peer.h(peer.r(bx).detach()), by)
        loss.backward()
        optimizer.step()
        losses[0] += loss.item() * len(by) / len(y) / head_epochs
    peer.r.train()
    optimizer = torch.optim.SGD(peer.r.parameters(), lr=peer.rule.lr, **rule)
    for bx, by in peer.batches() * epochs:
        optimizer.zero_grad()
        bz = peer.r(bx)
        target = torch.stack([known.get(c, own[c]) for c in by.tolist()]) if known else bz.detach()
        apart = nn.functional.mse_loss(bz, target)
        loss = nn.functional.cross_entropy(peer.h(bz), by) + lam * apart
        loss.backward()
        optimizer.step()
        losses[1:] += np.array([loss.item(), apart.item()]) * len(by) / len(y) / epochs
    with torch.no_grad():
        z = peer.r.eval()(x)
    return h, V, {c: (z[y == c].mean(0), int((y == c).sum())) for c in own}, losses


def combine(h, V, states):
    """φ_i = Σ_j α_ij φ_j of all i, by an exhaustive search over α."""
    heads, n = [], len(V)
    for i in range(n):
        M = np.array([[float(((h[i] - h[j]) * (h[i] - h[k])).sum()) for k in range(n)] for j in range(n)])
        alpha = exhaustive(M + np.diag([float(v) for v in V]))
        alpha = np.where(alpha < 1e-3, 0, alpha)
        alpha = alpha / alpha.sum()
        heads.append({name: sum(a * s[name] for a, s in zip(alpha, states, strict=True)) for name in states[0]})
    return heads


@pytest.fixture
def owners(by_hand, linear):
    """A function that makes a Federation of 5 clients with 4 to 11 samples of some of 5 classes, and batch-norm."""

    def make(**options):
        g, owned = torch.Generator().manual_seed(0), ([0, 1], [1, 2, 2], [3, 0], [1, 4], [2, 0])
        layers = nn.Sequential(linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        net = models.from_modules(layers, linear(6, 5), (4,), 5)
        clients = [
            (torch.randn(n, 4, generator=g), (c * n)[:n]) for n, c in zip((4, 7, 10, 11, 10), owned, strict=True)
        ]
        return by_hand(net, clients, **options)

    return make


@pytest.mark.parametrize("ratio", [0.6, 1.0])
def test_four_rounds_in_plain_torch(owners, plain, in_order, one_thread, ratio):
    """Models, losses, prototypes, mixed heads and bytes. At ratio .6 a class is met that has no prototype; absent
    clients keep their heads, and get them when they come back.
    """
    rule = {"lr": 0.05, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
    fed, method = owners(rule=rule, join_ratio=ratio), make("fedpac", lam=0.7, head_lr=0.03, head_epochs=3)
    state, (r, head), known, met, last_joined = fed.start(method), fed.init(), {}, set(), {}
    heads = [head] * 5
    size = sum(t.numel() * t.element_size() for t in trees.leaves(fed.init()))
    for t in range(4):
        deployed = fed.deployed(method, state, 4)
        assert max(trees.unequal(trees.row(deployed, i), (r, heads[i])) for i in range(5)) < 1e-10
        result, before = fed.play(method, state, 4), dict(known)
        ends, told = [], []
        for k, i in enumerate(result.ids.tolist()):
            peer = plain(fed, i).load(r, heads[i])
            told.append(client(peer, before, 0.7, 0.03, 3, 2))
            ends.append(peer.state())
            assert trees.unequal(trees.row(result.held, k), ends[-1]) < 1e-10
            log, losses = result.log(), told[-1][3]
            found = [log["head"][k], log["extractor"][k], log["extractor.distance"][k] if t else 0.0]
            np.testing.assert_allclose(found, losses, rtol=1e-9, atol=1e-12)
            owned = told[-1][2]
            assert result.bytes_down[k] == size + 8 * 6 * len(before)
            assert result.bytes_up[k] == size + (8 * 6 + 4) * len(owned) + 8 * (5 * 6 + 1)
            met |= {"unknown" for c in owned if before and c not in before}
            met |= {"back"} if last_joined.get(i, t - 1) < t - 1 else set()
            last_joined[i] = t
        mixed = combine([one[0] for one in told], [one[1] for one in told], [end[1] for end in ends])
        for k, i in enumerate(result.ids.tolist()):
            assert trees.unequal(mixed[k], ends[k][1]) > 1e-3  # of others' heads too
            heads[i] = mixed[k]
        n = fed.n[result.ids]
        r = {k: v.round().long() if "tracked" in k else v for k, v in plain.mean([e[0] for e in ends], n).items()}
        for c in range(5):
            if found := [one[2][c] for one in told if c in one[2]]:
                known[c] = sum(m * mean for mean, m in found) / sum(m for _, m in found)
        assert state.server["prototypes"].present.tolist() == [c in known for c in range(5)]
        for c, mean in known.items():
            torch.testing.assert_close(state.server["prototypes"].values[c], mean, atol=1e-10, rtol=0)
        assert trees.unequal(state.server["extractor"], r) < 1e-10
        assert max(trees.unequal(trees.row(state.server["heads"], i), heads[i]) for i in range(5)) < 1e-7
        heads = [trees.row(state.server["heads"], i) for i in range(5)]  # its rounding, not ours, trains on
    assert met == (set() if ratio == 1 else {"unknown", "back"})


# --- combining heads -------------------------------------------------------------------------------------------------


def upload_of(net, values, V, h=None, counts=None):
    """An upload of clients whose heads are constant, by their `values`, with given statistics: K = r = 2."""
    C = len(values)
    extractor, head = trees.repeat(net.init(), C)
    for leaf in trees.leaves(head):
        leaf.copy_(torch.tensor(values).view(C, *[1] * (leaf.ndim - 1)).expand_as(leaf))
    here = torch.ones(C, 2, dtype=torch.bool) if counts is None else torch.tensor(counts) > 0
    means = torch.arange(1.0, C + 1).view(C, 1, 1).expand(C, 2, 2).clone()
    counts = torch.ones(C, 2, dtype=torch.int32) if counts is None else torch.tensor(counts, dtype=torch.int32)
    h = torch.zeros(C, 2, 2) if h is None else torch.tensor(h).view(C, 1, 1).expand(C, 2, 2).clone()
    return extractor, head, Rows(means, here), Rows(counts, here), h, torch.tensor(V)


@pytest.fixture
def server(features):
    """A function that makes (a Federation of `clients`, the start's server), all heads 0."""

    def make_server(clients):
        fed = features([([[1.0, 0.0]], [0])] * clients, dtype=torch.float32)
        start = make("fedpac").server(fed)
        return fed, start | {"heads": trees.full_like(start["heads"], 0)}

    return make_server


def test_a_combined_head_is_no_other_clients_ingredient(server):
    """PFLlib makes 0.5 and 0.75 of heads 0 and 1 with weights of a half."""
    fed, start = server(2)
    upload = upload_of(fed.model, [0.0, 1.0], [1.0, 1.0])
    new = make("fedpac").merge(start, np.arange(2), (), upload, np.ones(2))
    for leaf in trees.leaves(new["heads"]):
        torch.testing.assert_close(leaf, torch.full_like(leaf, 0.5))
    before = trees.clone(new)  # and what clients then do with what they sent moves nothing
    for leaf in trees.leaves(upload):
        leaf.zero_()
    assert trees.unequal(new, before) == 0


def test_weights_meet_the_heads_of_their_own_clients(server):
    """PFLlib mixes them up. Clients 1, 3, 4 of 5; h are alike, V = (1, 2, 4): weights (4, 2, 1)/7 for heads 10, 20, 40,
    so 120/7. Then client 3 alone is far away, and V = 0: it keeps its own head. Clients 0 and 2 keep theirs to the bit.
    """
    fed, start = server(5)
    start["heads"] = trees.tree_map(lambda t: torch.rand_like(t), start["heads"])
    before, ids = trees.clone(start), np.array([1, 3, 4])
    for order in itertools.permutations(range(3)):
        values, V = ([a[k] for k in order] for a in ([10.0, 20.0, 40.0], [1.0, 2.0, 4.0]))
        new = make("fedpac").merge(start, ids, (), upload_of(fed.model, values, V), np.ones(3))
        for leaf, old in zip(trees.leaves(new["heads"]), trees.leaves(before["heads"]), strict=True):
            torch.testing.assert_close(leaf[ids], torch.full_like(leaf[ids], 120 / 7))
            assert torch.equal(leaf[[0, 2]], old[[0, 2]])
    upload = upload_of(fed.model, [10.0, 20.0, 40.0], [0.0, 0.0, 0.0], h=[0.0, 9.0, 0.0])
    new = make("fedpac").merge(start, ids, (), upload, np.ones(3))
    for leaf in trees.leaves(new["heads"]):
        assert (leaf[3] == 20).all()
        torch.testing.assert_close(leaf[[1, 4]], torch.full_like(leaf[[1, 4]], 25.0))
    assert trees.unequal(start, before) == 0


def test_the_least_weight_is_the_settings(server):
    """V = (1, 2, 4): (4, 2, 1)/7. Without those below .2, (2, 1)/3 of heads 10 and 20; below .3, 10 itself."""
    fed, start = server(3)
    for least, head in ((0.1, 120 / 7), (0.2, 40 / 3), (0.3, 10.0)):
        upload = upload_of(fed.model, [10.0, 20.0, 40.0], [1.0, 2.0, 4.0])
        new = make("fedpac", least_weight=least).merge(start, np.arange(3), (), upload, np.ones(3))
        for leaf in trees.leaves(new["heads"]):
            torch.testing.assert_close(leaf, torch.full_like(leaf, head))


def test_prototypes_are_weighted_by_samples(server):
    """PFLlib's are not. Means 1 and 2: of (3, 1) samples 1.25, of (0, 1) 2; what nobody has stays, known or not."""
    fed, start = server(2)
    upload = upload_of(fed.model, [0.0, 1.0], [1.0, 1.0], counts=[[3, 0], [1, 1]])
    new = make("fedpac").merge(start, np.arange(2), (), upload, np.ones(2))["prototypes"]
    assert (new.values.tolist(), new.present.tolist()) == ([[1.25, 1.25], [2, 2]], [True, True])
    upload = upload_of(fed.model, [0.0, 1.0], [1.0, 1.0], counts=[[1, 0], [1, 0]])
    later = make("fedpac").merge(start | {"prototypes": new}, np.arange(2), (), upload, np.ones(2))["prototypes"]
    assert (later.values.tolist(), later.present.tolist()) == ([[1.5, 1.5], [2, 2]], [True, True])
    first = make("fedpac").merge(start, np.arange(2), (), upload, np.ones(2))["prototypes"]
    assert first.present.tolist() == [True, False]


def test_absent_clients_keep_their_heads_and_get_them_back(digits):
    """To the bit; who joins for the first time gets the initial head."""
    fed, method = digits(join_ratio=0.34), make("fedpac")
    state, joined = fed.start(method), set()
    for _ in range(5):
        before = trees.clone(state.server["heads"])
        ids = fed.play(method, state, 5).ids
        absent = np.setdiff1d(np.arange(6), ids)
        assert len(ids) == 2
        assert trees.unequal(trees.take(state.server["heads"], absent), trees.take(before, absent)) == 0
        assert all(trees.unequal(trees.row(state.server["heads"], i), trees.row(before, i)) > 0 for i in ids)
        joined |= set(ids.tolist())
        heads = method.download(state.server, np.arange(6))[1]
        assert trees.unequal(heads, state.server["heads"]) == 0
        for i in set(range(6)) - joined:
            assert trees.unequal(trees.row(heads, i), fed.init()[1]) == 0
    assert 2 < len(joined) < 6


# --- training --------------------------------------------------------------------------------------------------------

RULE = {"momentum": 0.9, "weight_decay": 0.1}  # either would move a part that is frozen in name only


def test_the_extractor_stands_still_while_the_head_trains(owners):
    """Its batch-norm's statistics and counter included. The head's rate is η_h, not the extractor's."""
    fed = owners(rule=RULE | {"epochs": 0, "lr": 0.0})
    method = make("fedpac")
    sent = uploads(fed, method, fed.start(method))
    assert trees.unequal(sent["extractor"], trees.expand(fed.init()[0], 5)) == 0
    assert all(trees.unequal(trees.row(sent["head"], i), fed.init()[1]) > 1e-3 for i in range(5))


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("still", [{"head_epochs": 0}, {"head_lr": 0.0}])
def test_the_head_stands_still_while_the_extractor_trains(owners, play, rounds, still):
    """With and without prototypes."""
    fed, method = owners(rule=RULE), make("fedpac", **still)
    state, _ = play(fed, method, rounds)
    sent = uploads(fed, method, state)
    assert trees.unequal(sent["head"], trees.expand(fed.init()[1], 5)) < 1e-14  # mixed from equal ones
    assert all(trees.unequal(trees.row(sent["extractor"], i), state.server["extractor"]) > 1e-3 for i in range(5))


@pytest.mark.parametrize("head_epochs", [0, 1, 3])
def test_the_heads_epochs_are_none_of_the_extractors(owners, head_epochs):
    """FL-bench's are. E = 2, batches of 4: batch-norm counts 2 steps for each of 1, 2, 3, 3, 3 batches."""
    fed, method = owners(rule={"epochs": 2, "batch_size": 4}), make("fedpac", head_epochs=head_epochs)
    sent = uploads(fed, method, fed.start(method))
    assert sent["extractor"]["1.num_batches_tracked"].tolist() == [2, 4, 6, 6, 6]


def test_what_holds_a_class_that_the_server_does_not_know(by_hand, play, monkeypatch):
    """z = w x, R alone, ηλ = .1, w = 1. C̄^0 = 5 is known. Class 0, x = 1: w = 1 + .2·4 = 1.8. Class 1, x = 2: its
    μ = 2 holds it, so the second step, from w = 1 + .2·d, leads back; PFLlib lets go of it, and it would drift.
    """
    monkeypatch.setattr(fedpac, "cross_entropy", lambda logits, y: -logits.sum() * (y[0] == 1))
    body, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2)
    nn.init.ones_(body.weight), nn.init.constant_(head.weight, 0.25)
    net = models.from_modules(body, head, (1,), 2)
    fed = by_hand(net, [([[1.0]], [0]), ([[2.0]], [1])], rule={"lr": 0.05, "epochs": 2})
    method = make("fedpac", lam=2.0, head_epochs=0)
    state = fed.start(method)
    state.server["prototypes"] = Rows(tensor([[5.0], [0.0]]), torch.tensor([True, False]))
    sent = uploads(fed, method, state)
    first = 1.8 + 0.2 * (5 - 1.8)
    drift = 0.05 * 0.5 * 2  # of one step on −(z/4 + z/4) at x = 2
    second = 1 + drift + drift - 0.2 * 2 * (2 * (1 + drift) - 2)
    assert sent["extractor"]["weight"].flatten().tolist() == pytest.approx([first, second], rel=1e-12)


def test_no_alignment_in_round_1(digits, play):
    """Whatever λ; and from round 2 on there is."""
    fed = digits()
    weak, strong = (play(fed, make("fedpac", lam=lam), 1) for lam in (0.0, 5.0))
    assert trees.unequal(weak[0].server, strong[0].server) == 0
    assert "extractor.distance" not in weak[1][0].log()
    weak, strong = (play(fed, make("fedpac", lam=lam), 2) for lam in (0.0, 5.0))
    assert trees.unequal(weak[0].server, strong[0].server) > 1e-3
    assert (strong[1][1].log()["extractor.distance"] < weak[1][1].log()["extractor.distance"]).all()


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
def test_without_alignment_and_collaboration_it_is_fedrep(by_hand, linear, play, engine):
    """λ = 0 and V = 0, so α = e_i, as each client has a single sample: bit for bit FedRep, at one rate."""
    net, g = models.from_modules(nn.Sequential(linear(3, 4), nn.ReLU()), linear(4, 3), (3,), 3), torch.Generator()
    clients = [(torch.randn(1, 3, generator=g.manual_seed(k)), [k % 3]) for k in range(5)]
    fed = by_hand(net, clients, rule={"lr": 0.05, "epochs": 2, "momentum": 0.9}, join_ratio=0.6, engine=engine)
    pac, rounds = play(fed, make("fedpac", lam=0.0, head_lr=0.05, head_epochs=2), 4)
    rep, others = play(fed, make("fedrep", head_epochs=2), 4)
    assert trees.unequal((pac.server["extractor"], pac.server["heads"]), (rep.server, rep.kept)) == 0
    assert [trees.unequal(a.held, b.held) for a, b in zip(rounds, others, strict=True)] == [0] * 4


def test_one_client_alone_is_fedrep(owners, play):
    """Bit for bit, batch-norm included, at λ = 0; nobody's head is there to mix."""
    fed = owners(rule={"lr": 0.05, "batch_size": 4}, join_ratio=0.2)
    (pac, rounds), (rep, _) = play(fed, make("fedpac", lam=0.0, head_lr=0.05), 4), play(fed, make("fedrep"), 4)
    assert all(len(r.ids) == 1 for r in rounds)
    assert trees.unequal((pac.server["extractor"], pac.server["heads"]), (rep.server, rep.kept)) == 0


def test_a_head_with_batch_norm(by_hand, linear, play):
    """Its statistics are mixed with the same weights, its counter stays an integer."""
    net = models.from_modules(linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), linear(4, 2)), (3,), 2)
    g = torch.Generator().manual_seed(0)
    clients = [(3 + 5 * torch.randn(8, 3, generator=g), [0, 1] * 4) for _ in range(2)]
    fed, method = by_hand(net, clients, rule={"lr": 0.1, "batch_size": 4}), make("fedpac")
    state = fed.start(method)
    sent = uploads(fed, method, state)
    fed.play(method, state, 3)
    weights = alphas(sent["h"], sent["V"])
    mean = torch.einsum("ij,jk->ik", weights, sent["head"]["0.running_mean"])
    torch.testing.assert_close(state.server["heads"]["0.running_mean"], mean)
    assert (weights > 0.01).all() and trees.unequal(mean, sent["head"]["0.running_mean"]) > 1e-3
    assert state.server["heads"]["0.num_batches_tracked"].tolist() == [2, 2]


@pytest.mark.parametrize("model", ["cnn-small", "mlp"])
def test_features_of_any_shape(digits, play, model):
    """Cut after one, two, three layers, and none of them: what is left are vectors to it, of maps too."""
    for head_layers in range(4 if model == "cnn-small" else 3):
        fed, method = digits(model, head_layers=head_layers), make("fedpac")
        state, _ = play(fed, method, 2)
        assert state.server["prototypes"].values.shape == (10, fed.model.features)
        assert uploads(fed, method, state)["h"].shape == (6, 10, fed.model.features)
        assert all(leaf.isfinite().all() for leaf in trees.leaves(state.server))


# --- bytes, and what is refused --------------------------------------------------------------------------------------


def test_bytes_are_of_owned_and_of_known_classes(by_hand, play):
    """Up |θ| + |φ| + K_i r + K_i + 1 + K r, of K = 5, r = 3 and K_i = 1, 2, 3; down |θ| + |φ|, and r for 4 classes."""
    net = models.from_modules(nn.Linear(2, 3), nn.Linear(3, 5), (2,), 5)
    clients = [(torch.zeros(n, 2), y) for n, y in ((2, [1, 1]), (3, [0, 3, 3]), (4, [0, 1, 2, 2]))]
    _, rounds = play(by_hand(net, clients, dtype=torch.float32), make("fedpac"), 2)
    model = 2 * 3 + 3 + 3 * 5 + 5
    assert [r.bytes_up.tolist() for r in rounds] == [[4 * (model + k * 3 + k + 1 + 15) for k in (1, 2, 3)]] * 2
    assert [r.bytes_down.tolist() for r in rounds] == [[4 * model] * 3, [4 * (model + 4 * 3)] * 3]


@pytest.mark.parametrize(
    ("setting", "value"), [("lam", -0.1), ("head_lr", -1.0), ("head_epochs", 1.5), ("least_weight", 1.01)]
)
def test_impossible_settings_are_refused(setting, value):
    with pytest.raises(ValueError, match=f"^{setting}={value}: must be"):
        make("fedpac", **{setting: value})
