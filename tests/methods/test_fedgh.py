"""FedGH: any extractors, one header, which the server trains on the clients' class means."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, messages, models, training, trees
from pflkit.methods import METHODS, fedgh, make

EYE, ORDER = torch.eye(2, dtype=torch.float64), torch.tensor([0, 1])


def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.float64)


@pytest.fixture
def two_classes(by_hand):
    """A Federation without training: client A owns class 0 with the feature (1, 0), B class 1 with (0, 1); φ = 0."""
    head = nn.Linear(2, 2)
    for p in head.parameters():
        p.data.zero_()
    net = models.from_modules(nn.Identity(), head, (2,), 2)
    return by_hand(net, [([[1.0, 0.0]], [0]), ([[0.0, 1.0]], [1])], rule={"epochs": 0, "lr": 1.0})


def own(fed, whole, i):
    """Client i's part of what clients keep: its group's tree, its row there."""
    return trees.row(fed.parts(whole)[i % len(fed.groups)], i // len(fed.groups))


def held_by(fed, result, i):
    """The model that client i held after a round that it joined."""
    for (_, at, _), held in zip(fed.by_group(result.ids), fed.parts(result.held), strict=True):
        if i in result.ids[at]:
            return trees.row(held, result.ids[at].tolist().index(i))


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_one_full_batch_step(two_classes, play):
    """∇W = [[−.25, .25], [.25, −.25]], ∇b = 0."""
    state, _ = play(two_classes, make("fedgh", header_lr=1.0, header_batch_size=2), 1)
    assert state.server["weight"].tolist() == [[0.25, -0.25], [-0.25, 0.25]]
    assert state.server["bias"].tolist() == [0.0, 0.0]


def test_one_pair_after_the_other(two_classes, play):
    """A: W = [[.5, 0], [−.5, 0]], b = (.5, −.5). Then B's logits are b, and δ = ±σ(1) = ±.731059."""
    state, _ = play(two_classes, make("fedgh", header_lr=1.0), 1)
    s = 1 / (1 + math.exp(-1))
    assert s == pytest.approx(0.731059, abs=5e-7)
    assert state.server["weight"].flatten().tolist() == pytest.approx([0.5, -s, -0.5, s], abs=1e-15)
    assert state.server["bias"].tolist() == pytest.approx([0.5 - s, s - 0.5], abs=1e-15)
    assert state.server["bias"].tolist() == pytest.approx([-0.231059, 0.231059], abs=5e-7)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_header_tells_classes_apart_that_nobody_saw_together(two_classes, by_hand, play, batch):
    """And each client's own, trained on its one class, cannot: it calls everything that."""
    state, _ = play(two_classes, make("fedgh", header_lr=1.0, header_batch_size=batch), 1)
    assert two_classes.model.classify(state.server, EYE).argmax(1).tolist() == [0, 1]
    clients = [(x, y.tolist()) for x, y in two_classes.train]
    _, (result,) = play(by_hand(two_classes.model, clients, rule={"lr": 1.0}), make("fedgh"), 1)
    answers = [two_classes.model.classify(trees.row(result.held[1], i), EYE).argmax(1).tolist() for i in (0, 1)]
    assert answers == [[0, 0], [1, 1]]


def test_a_step_follows_the_gradient_of_the_mean_cross_entropy(linear):
    """At φ = 0 the loss is ln 2 with the gradient of the hand numbers; at any φ it is autograd's."""

    def loss(header, z, y):
        return nn.functional.cross_entropy(z @ header["weight"].T + header["bias"], y)

    zero = {"weight": zeros(2, 2), "bias": zeros(2)}
    assert loss(zero, EYE, ORDER).item() == pytest.approx(math.log(2), abs=1e-15)
    assert torch.func.grad(loss)(zero, EYE, ORDER)["weight"].tolist() == [[-0.25, 0.25], [0.25, -0.25]]
    header = trees.tree_map(torch.Tensor.double, dict(linear(4, 3).state_dict()))
    z, y = torch.linspace(-1, 2, 20).double().view(5, 4), torch.tensor([2, 0, 1, 1, 2], dtype=torch.int32)
    slope = torch.func.grad(loss)(header, z, y.long())
    expected = trees.tree_map(lambda w, g: w - 0.3 * g, header, slope)
    assert trees.unequal(fedgh.header_step(header, z, y, 0.3), expected) < 1e-15


def test_batches_and_epochs_of_the_header(linear):
    """Five pairs in batches of two: 2, 2 and 1 in their order, each epoch the same."""
    header = trees.tree_map(torch.Tensor.double, dict(linear(4, 3).state_dict()))
    z, y = torch.linspace(-1, 2, 20).double().view(5, 4), torch.tensor([2, 0, 1, 1, 2])
    expected = header
    for rows in ([0, 1], [2, 3], [4]) * 3:
        expected = fedgh.header_step(expected, z[rows], y[rows], 0.3)
    assert trees.unequal(fedgh.train_header(header, z, y, 0.3, batch_size=2, epochs=3), expected) == 0


@pytest.mark.parametrize("batch_size", [1, 2, 10])
@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_a_prototype_is_the_mean_over_samples(by_hand, play, monkeypatch, batch_size, rows):
    """Class 0: (1, 0), (3, 0), (8, 0) -> (4, 0), not the 5 of batches {1, 3}, {8}; class 2: (1, 5), (3, 5): (2, 5)."""
    monkeypatch.setattr(training, "ROWS", rows)  # samples a forward pass
    seen = []
    monkeypatch.setattr(fedgh, "train_header", lambda header, z, y, *rest: seen.append((z, y)) or header)
    x, y = [[1.0, 0], [3, 0], [1, 5], [8, 0], [3, 5]], [0, 0, 2, 0, 2]
    net = models.from_modules(nn.Identity(), nn.Linear(2, 3), (2,), 3)
    play(by_hand(net, [(x, y)], rule={"epochs": 0, "batch_size": batch_size}), make("fedgh"), 1)
    ((z, labels),) = seen
    assert z.tolist() == [[4.0, 0.0], [2.0, 5.0]]
    assert labels.tolist() == [0, 2]


# --- a round, written out --------------------------------------------------------------------------------------------


def prototypes(x, y, extractor):
    """(mean, class) of each class among y, by a loop."""
    with torch.no_grad():
        z = extractor(x)
    return [(sum(z[j] for j in range(len(y)) if y[j] == c) / int((y == c).sum()), c) for c in sorted(set(y.tolist()))]


@pytest.mark.parametrize(("batch", "epochs"), [(1, 1), (3, 2), (100, 1)])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, batch, epochs):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    method = make("fedgh", header_lr=0.5, header_batch_size=batch, header_epochs=epochs)
    state, rounds = play(fed := uneven(rule=rule), method, 3)
    extractors, header = [fed.init()[0]] * 4, fed.init()[1]
    for result in rounds:
        peers = [plain(fed, i).load(extractors[i], header) for i in range(4)]
        extractors, heads = zip(*(peer.train(peer.r, peer.h, epochs=2).state() for peer in peers), strict=True)
        pairs = [pair for peer in peers for pair in prototypes(peer.x, peer.y, peer.r)]
        z, y = torch.stack([z for z, _ in pairs]), torch.tensor([y for _, y in pairs])
        server = plain(fed, 0).load(h=header).h
        optimizer = torch.optim.SGD(server.parameters(), lr=0.5)
        for s in [*range(0, len(y), batch)] * epochs:
            optimizer.zero_grad()
            nn.functional.cross_entropy(server(z[s : s + batch]), y[s : s + batch]).backward()
            optimizer.step()
        header = {k: v.detach().clone() for k, v in server.state_dict().items()}
        for i in range(4):
            assert trees.unequal(trees.row(result.held, i), (extractors[i], heads[i])) < 1e-11
    assert trees.unequal(state.server, header) < 1e-11
    assert all(trees.unequal(trees.row(state.kept, i), extractors[i]) < 1e-11 for i in range(4))


def test_prototypes_are_taken_in_evaluation_mode_after_training(by_hand, linear, play, monkeypatch):
    """By the trained extractor and its running statistics, which differ a lot from a batch's after one epoch."""
    seen = []
    monkeypatch.setattr(fedgh, "train_header", lambda header, z, y, *rest: seen.append((z, y)) or header)
    layers = nn.Sequential(linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    net = models.from_modules(layers, linear(3, 2), (2,), 2)
    x = torch.linspace(-1, 5, 24).reshape(12, 2).double()
    fed = by_hand(net, [(x, [0, 1] * 6)], rule={"lr": 0.5})
    _, (result,) = play(fed, make("fedgh"), 1)
    extractor = layers.double()
    extractor.load_state_dict(trees.row(result.held[0], 0))
    assert extractor[1].num_batches_tracked.item() == 2
    (z, y), ends = seen[0], {}
    for mode in (False, True):  # in this order, for the other one moves the statistics
        expected, labels = zip(*prototypes(x, torch.tensor([0, 1] * 6), extractor.train(mode)), strict=True)
        ends[mode] = float((z - torch.stack(expected)).abs().max())
        assert y.tolist() == list(labels)
    assert ends[False] < 1e-12 < 0.1 < ends[True]


# --- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"header_batch_size": 4, "header_epochs": 3}, {"header_batch_size": 1000}])
def test_the_header_moves(digits, play, settings):
    """In every round, in weight and bias; with η_φ = 0 never. The released code's optimizer does not own it."""
    fed, method = digits(join_ratio=0.5), make("fedgh", **settings)
    state = fed.start(method)
    for _ in range(3):
        before = trees.clone(state.server)
        fed.play(method, state, 3)
        assert all(trees.unequal(state.server[name], before[name]) > 0 for name in ("weight", "bias"))
    still, _ = play(fed, make("fedgh", header_lr=0.0, **settings), 3)
    assert trees.unequal(still.server, fed.init()[1]) == 0


def test_no_clients_header_is_the_servers(digits, play):
    """PFLlib's is client 0's own: training that client moves it. Here its φ_i moves away, and wiping it is harmless."""
    fed, method = digits(), make("fedgh", header_lr=0.0)
    state, (result,) = play(fed, method, 1)
    assert trees.unequal(trees.row(result.held[1], 0), fed.init()[1]) > 0
    for leaf in trees.leaves(result.held):
        leaf.fill_(7.0)
    for leaf in trees.leaves(fed.deployed(method, state, 2)[1]):
        leaf.untyped_storage().fill_(7)
    assert trees.unequal(state.server, fed.init()[1]) == 0


def test_the_header_replaces_the_clients_and_nothing_else(digits, play):
    """`before` is (θ_i, φ^t): θ_i bit-identical to what the client kept, φ^t the server's for all."""
    fed, method = digits(join_ratio=0.5), make("fedgh")
    state, (result, *_) = play(fed, method, 2)
    extractor, header = fed.deployed(method, state, 3)
    assert trees.unequal(extractor, state.kept) == 0
    assert trees.unequal(header, trees.expand(state.server, 6)) == 0
    still = digits(rule={"epochs": 0})
    kept = trees.clone(state.kept)
    held = still.play(method, state, 3).held
    assert trees.unequal(state.kept, kept) == 0
    assert trees.unequal(held, (extractor, header)) == 0
    assert [trees.unequal(trees.row(result.held[1], k), trees.row(result.held[1], 0)) > 0 for k in (1, 2)] == [True] * 2


def test_both_parts_are_trained_together(by_hand, scalar_net, play, monkeypatch):
    """y = h r x, loss ½(y − 1)², x = 1, r = 1, h = 0, η = .5: both gradients at the start, so r = 1 and h = .5."""
    monkeypatch.setattr(fedgh, "model_loss", lambda model, p, b: ((model.predict(p, b[0]) - 1) ** 2).mean() / 2)
    monkeypatch.setattr(fedgh.FedGH, "server", lambda self, fed: fed.init()[1])
    monkeypatch.setattr(fedgh, "train_header", lambda header, *rest: header)
    state, (result,) = play(by_hand(scalar_net(1, 0), [([[1.0]], [0])], rule={"lr": 0.5}), make("fedgh"), 1)
    assert (result.held[0]["weight"].tolist(), result.held[1]["weight"].tolist()) == ([[1.0]], [[0.5]])
    assert (state.kept["weight"].tolist(), state.server["weight"].tolist()) == ([[1.0]], [0.0])


# --- equal clients, and their order ----------------------------------------------------------------------------------


def pairs_of(fed, method, state, ids):
    """What clients `ids` of one group upload: Rows of prototypes and of labels."""
    ids = np.array(ids)
    message = messages.received(method.download(state.server, ids), len(ids))
    rows = ids // len(fed.groups)
    kept = trees.take(fed.parts(state.kept)[ids[0] % len(fed.groups)], rows)
    return method.local(fed.clients(ids, state.round + 1, 9), kept, message)[1]


def test_identical_clients_have_identical_prototypes(by_hand, linear, in_order):
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.ReLU()), linear(3, 2), (2,), 2)
    same = torch.linspace(-1, 1, 46).reshape(23, 2), [0, 1] * 11 + [1]
    fed, method = by_hand(net, [same] * 3, rule={"lr": 0.1}, dtype=torch.float32), make("fedgh")
    prototypes, _ = pairs_of(fed, method, fed.start(method), [0, 1, 2])
    assert trees.unequal(prototypes.values, trees.expand(prototypes.values[0], 3)) == 0
    assert trees.unequal(prototypes.values[0, 0], prototypes.values[0, 1]) > 0


def test_with_one_batch_the_order_of_clients_does_not_matter(by_hand, linear, play, in_order):
    """Up to rounding; pair after pair, it does."""
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.ReLU()), linear(3, 3), (2,), 3)
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 2, generator=g), y) for y in ([0, 1] * 3, [2] * 6, [1, 2] * 3, [0, 1, 2] * 2)]
    for batch, least, most in ((1000, 0, 1e-13), (1, 1e-4, 10)):
        method = make("fedgh", header_lr=1.0, header_batch_size=batch)
        one, other = (
            play(by_hand(net, [clients[i] for i in order], rule={"lr": 0.1}), method, 3)[0]
            for order in ([0, 1, 2, 3], [2, 0, 3, 1])
        )
        assert least <= trees.unequal(one.server, other.server) <= most
        gap = trees.unequal(trees.take(one.kept, [2, 0, 3, 1]), other.kept)
        assert least <= gap <= most


def test_pairs_come_client_after_client_and_class_after_class(by_hand, play, monkeypatch):
    seen = []
    monkeypatch.setattr(fedgh, "train_header", lambda header, z, y, *rest: seen.append((z, y)) or header)
    net = models.from_modules(nn.Identity(), nn.Linear(1, 4), (1,), 4)
    clients = [([[3.0], [1.0]], [3, 1]), ([[10.0]], [0]), ([[22.0], [20.0], [23.0]], [2, 0, 3])]
    play(by_hand(net, clients, rule={"epochs": 0}), make("fedgh"), 1)
    ((z, y),) = seen
    assert (z.flatten().tolist(), y.tolist()) == ([1.0, 3.0, 10.0, 20.0, 22.0, 23.0], [1, 3, 0, 0, 2, 3])


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_are_of_owned_classes(by_hand, play):
    """(S + S r) · 4 up, with S = 1, 2, 4 and r = 3; (4 r + 4) · 4 down for everybody."""
    net = models.from_modules(nn.Linear(2, 3), nn.Linear(3, 4), (2,), 4)
    clients = [(torch.zeros(n, 2), y) for n, y in ((2, [1, 1]), (3, [0, 3, 3]), (4, [0, 1, 2, 3]))]
    _, (result,) = play(by_hand(net, clients, dtype=torch.float32), make("fedgh"), 1)
    assert result.bytes_up.tolist() == [4 * (s + s * 3) for s in (1, 2, 4)] == [16, 32, 64]
    assert result.bytes_down.tolist() == [4 * (4 * 3 + 4)] * 3


@pytest.mark.parametrize(("classes", "owned", "up", "down"), [(10, 2, 4_008, 20_040), (100, 10, 20_040, 200_400)])
def test_bytes_are_the_papers(by_hand, play, classes, owned, up, down):
    """CIFAR-10 with 2 classes a client, CIFAR-100 with 10, by networks with 500 representations."""
    net = models.build("cnn-5", (3, 32, 32), classes)
    clients = [(torch.zeros(owned, 3, 32, 32), range(owned)) for _ in range(2)]
    _, (result,) = play(by_hand(net, clients, rule={"epochs": 0}, dtype=torch.float32), make("fedgh"), 1)
    assert result.bytes_up.tolist() == [up] * 2
    assert result.bytes_down.tolist() == [down] * 2


# --- different models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ratio", "joined"), [("mlp", 0.1, 1), ("mlp", 0.5, 3), ("mlp", 1.0, 6), ("cnn", 0.5, 4)]
)
def test_different_models_share_a_header(five, kind, ratio, joined):
    """Sampled extractors train, others stay, bit for bit; each client's shapes are its own model's; bytes are alike."""
    fed, method = five(kind, join_ratio=ratio), make("fedgh")
    assert [len(group.ids) for group in fed.groups] == ([2, 1, 1, 1, 1] if kind == "mlp" else [2, 2, 1, 1, 1])
    assert len({group.model.init()[0]["fc1.weight"].shape for group in fed.groups}) >= 4
    state = fed.start(method)
    for _ in range(3 if kind == "mlp" else 2):
        before, header = trees.clone(state.kept), state.server
        result = fed.play(method, state, 3)
        fed.deployed(method, state, 3)
        assert len(result.ids) == joined
        assert trees.unequal(state.server, header) > 0
        for i in range(fed.num_clients):
            gap = trees.unequal(own(fed, state.kept, i), own(fed, before, i))
            assert (gap > 0) == (i in result.ids)
            if i in result.ids:
                assert trees.unequal(held_by(fed, result, i)[0], own(fed, state.kept, i)) == 0
        classes = [len(set(fed.train[i][1].tolist())) for i in result.ids]
        r = fed.model.features
        assert result.bytes_up.tolist() == [4 * (s + s * r) for s in classes]
        assert result.bytes_down.tolist() == [4 * (fed.model.classes * (r + 1))] * joined
        assert np.isfinite(fed.score(result.held, result.ids)[1]).all()


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_among_other_models_a_client_is_what_it_is_alone(five, play, kind):
    """The model it holds, and the pairs it sends, which the server trains on in the order of ids, to the bit."""
    fed, method = five(kind), make("fedgh", header_lr=0.3)
    state, _ = play(fed, method, 2)
    header, alone, pairs = state.server, {}, []
    for i in range(fed.num_clients):
        message = messages.received(method.download(state.server, np.array([i])), 1)
        kept = trees.repeat(own(fed, state.kept, i), 1)
        _, (prototypes, labels), alone[i] = method.local(fed.clients(np.array([i]), 3, 3), kept, message)
        here = prototypes.present[0]
        pairs += zip(prototypes.values[0, here], labels.values[0, here], strict=True)
    result = fed.play(method, state, 3)
    for i in range(fed.num_clients):
        assert trees.unequal(held_by(fed, result, i), trees.row(alone[i], 0)) == 0
    for z, y in pairs:
        header = fedgh.header_step(header, z[None], y[None], 0.3)
    assert trees.unequal(state.server, header) == 0


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("groups", [2, 6])
def test_equal_models_in_groups_are_one_group(digits, play, ratio, groups):
    """To the bit: header, extractors, models held, bytes, scores."""
    net = models.build("mlp", (1, 8, 8), 10)
    one, many = digits(net, join_ratio=ratio), digits([net] * groups, join_ratio=ratio)
    (state, rounds), (other, others) = (play(fed, make("fedgh"), 3) for fed in (one, many))
    assert trees.unequal(state.server, other.server) == 0
    for i in range(6):
        assert trees.unequal(own(one, state.kept, i), own(many, other.kept, i)) == 0
    for a, b in zip(rounds, others, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert all(trees.unequal(held_by(one, a, i), held_by(many, b, i)) == 0 for i in a.ids)
        assert (a.bytes_up.tolist(), a.bytes_down.tolist()) == (b.bytes_up.tolist(), b.bytes_down.tolist())
        assert (a.flops() == b.flops()).all()
        (correct, loss), (same_correct, same_loss) = one.score(a.held, a.ids), many.score(b.held, b.ids)
        assert (correct.tolist(), loss.tolist()) == (same_correct.tolist(), same_loss.tolist())
        assert (a.log()["train"] == b.log()["train"]).all()


def test_a_convolution_and_an_mlp_with_equally_many_features(digits):
    history = experiment.run(make("fedgh"), digits([models.build(m, (1, 8, 8), 10) for m in ("mlp", "cnn-small")]), 2)
    assert history.clients[["before", "before_loss"]].notna().all(axis=None)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def untrained(monkeypatch):
    """Fails where a client is trained."""
    monkeypatch.setattr(training.Clients, "sgd", lambda *args, **named: pytest.fail("trained"))


def headless():
    return models.from_modules(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64)), nn.Linear(64, 10, bias=False), (1, 8, 8), 10
    )


def normed():
    """Its head has a weight and a bias, and is not linear."""
    return models.from_modules(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.LayerNorm(10), (1, 8, 8), 10)


def narrow():
    return models.from_modules(nn.Sequential(nn.Flatten(), nn.Linear(64, 32)), nn.Linear(32, 10), (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (
            lambda: [narrow()],
            "model='custom': FedGH needs equally many features of all models; this one gives 32, 'mlp' 64",
        ),
        (lambda: [models.build("mlp", (1, 8, 8), 10, head_layers=2)], "model='mlp': FedGH needs one linear layer"),
        (lambda: [models.build("mlp", (1, 8, 8), 10, head_layers=0)], "model='mlp': FedGH needs one linear layer"),
        (lambda: [headless()], "model='custom': FedGH needs one linear layer with a bias as the head"),
        (lambda: [normed()], "model='custom': FedGH needs one linear layer with a bias as the head"),
    ],
)
def test_models_without_a_common_linear_head_are_refused(digits, untrained, others, says):
    """By one line, before any training."""
    mlp = models.build("mlp", (1, 8, 8), 10)
    with pytest.raises(ValueError, match=says) as refused:
        experiment.run(make("fedgh"), digits([mlp, *others()]), 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layers", [0, 2])
def test_one_model_with_another_head_is_refused(digits, untrained, layers):
    with pytest.raises(ValueError, match="model='mlp': FedGH needs one linear layer with a bias as the head"):
        experiment.run(make("fedgh"), digits(head_layers=layers), 1)


@pytest.mark.parametrize("name", [name for name, m in METHODS.items() if not getattr(m, "heterogeneous", False)])
def test_methods_of_one_model_refuse_several(digits, untrained, name):
    fed = digits([models.build(f"mlp-{k}", (1, 8, 8), 10) for k in (1, 2)])
    says = f"model=mlp-1, mlp-2: {METHODS[name].__name__} needs one model for all clients"
    with pytest.raises(ValueError, match=says) as refused:
        experiment.run(make(name), fed, 1)
    assert "\n" not in str(refused.value)
