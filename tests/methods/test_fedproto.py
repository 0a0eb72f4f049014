"""FedProto: any models, which share class means only, hold their features near these, and answer by the nearest."""

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, training, trees
from pflkit.messages import Rows
from pflkit.methods import fedproto, make


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def rows(values, *present):
    return Rows(tensor(values), torch.tensor(present))


@pytest.fixture
def features(by_hand):
    """A function that makes a Federation of clients whose features are their samples, and which do not train."""

    def make(clients, classes, test=None, **options):
        r = len(clients[0][0][0])
        net = models.from_modules(nn.Identity(), nn.Linear(r, classes), (r,), classes)
        return by_hand(net, clients, test, rule={"epochs": 0}, **options)

    return make


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [1.0, 0.5, 3.0])
def test_the_regulariser_and_its_slope(linear, lam):
    """z = (1, 3), C̄ = (0, 1): (1 + 4)/2, and λ (1, 2). Its head's part, apart from it, is that of cross-entropy."""
    z, known = tensor([[1.0, 3.0]]).requires_grad_(), rows([[0, 1]], True)
    value = lam * fedproto.distance(z, torch.tensor([0]), known)
    value.backward()
    assert (value.item(), z.grad.tolist()) == (2.5 * lam, [[lam, 2 * lam]])
    net = models.from_modules(nn.Identity(), linear(2, 2), (2,), 2)
    head = trees.tree_map(torch.Tensor.double, net.init()[1])
    batch, known = (z.detach(), torch.tensor([0])), rows([[0, 1], [5, 5]], True, True)
    loss, extras = fedproto.regularised_loss(net, ({}, head), batch, known, lam)
    plain = nn.functional.cross_entropy(z.detach() @ head["weight"].T + head["bias"], torch.tensor([0]))
    assert loss.item() == pytest.approx(plain.item() + 2.5 * lam, rel=1e-14)
    assert extras["distance"].item() == 2.5


def test_a_sample_without_prototype_gives_nothing_and_is_counted():
    """Beside one of squares 1 and 4: their sum over 2·2, and half the slope; alone: nothing."""
    z, known = tensor([[1.0, 3.0], [7.0, 7.0]]).requires_grad_(), rows([[0, 1], [0, 0]], True, False)
    value = fedproto.distance(z, torch.tensor([0, 1]), known)
    value.backward()
    assert (value.item(), z.grad.tolist()) == (1.25, [[0.5, 1.0], [0.0, 0.0]])
    assert fedproto.distance(z, torch.tensor([1, 1]), known).item() == 0


@pytest.mark.parametrize(("weighted", "expected"), [(False, [2.5, 0.0]), (True, [2.0, 0.0])])
def test_local_and_global_prototypes(features, play, weighted, expected):
    """Class 0: (0, 0), (2, 0) -> (1, 0), and (4, 0); class 1: client 2's (0, 3) alone; class 2: nobody's."""
    clients = [([[0.0, 0], [2, 0]], [0, 0]), ([[4.0, 0], [0, 3]], [0, 1])]
    state, _ = play(features(clients, 3), make("fedproto", weighted=weighted), 1)
    assert state.server.values.tolist() == [expected, [0.0, 3.0], [0.0, 0.0]]
    assert state.server.present.tolist() == [True, True, False]


@pytest.mark.parametrize("batch_size", [1, 2, 10])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_a_prototype_is_the_mean_over_samples(by_hand, play, monkeypatch, batch_size, size):
    """Class 0: (1, 0), (3, 0), (8, 0) -> (4, 0), not the 5 of batches {1, 3}, {8}; a short last batch counts too."""
    monkeypatch.setattr(training, "ROWS", size)  # samples a forward pass
    net = models.from_modules(nn.Identity(), nn.Linear(2, 3), (2,), 3)
    x, y = [[1.0, 0], [3, 0], [1, 5], [8, 0], [3, 5]], [0, 0, 2, 0, 2]
    rule = {"epochs": 0, "batch_size": batch_size, "drop_last": True}
    state, _ = play(by_hand(net, [(x, y)], rule=rule), make("fedproto"), 1)
    assert state.server.values.tolist() == [[4.0, 0.0], [0.0, 0.0], [2.0, 5.0]]


def test_the_nearest_prototype_is_answered(features):
    """(0, 0) and (4, 0): z = (1.9, 0) is of class 0, (2.1, 0) of 1. A class that has none is never answered: not even
    where its place in memory, (0, 0), is near, and not far away from all.
    """
    net = features([([[0.0, 0.0]], [0])], 3).model
    head = fedproto.nearest_head(rows([[0, 0], [4, 0], [0, 0]], True, True, False))
    assert net.classify(head, tensor([[1.9, 0.0], [2.1, 0.0]])).argmax(1).tolist() == [0, 1]
    head = fedproto.nearest_head(rows([[0, 0], [3, 0], [7, 0]], False, True, True))
    z = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert [(net.classify(head, scale * z).argmax(1) == 0).sum() for scale in (0, 1, 1e6)] == [0, 0, 0]


def test_logits_are_squared_distances_but_for_a_constant():
    """So their softmax is that of −‖z − C̄‖², and their order that of the distances."""
    g = torch.Generator().manual_seed(0)
    z, centres = (3 + torch.randn(n, 6, generator=g, dtype=torch.float64) for n in (50, 4))
    head = fedproto.nearest_head(Rows(centres, torch.ones(4, dtype=torch.bool)))
    logits, gaps = nn.functional.linear(z, head["weight"], head["bias"]), torch.cdist(z, centres)
    torch.testing.assert_close(logits.softmax(1), (-gaps.square()).softmax(1), atol=1e-12, rtol=1e-9)
    assert (logits.argmax(1) == gaps.argmin(1)).all()
    assert len(set(gaps.argmin(1).tolist())) == 4


def test_the_loss_of_a_class_without_prototype_is_finite(features, play):
    """In float32, for a test set of such samples only; it is counted as wrong."""
    test = [(torch.ones(500, 2), [2] * 500)]
    fed = features([([[0.0, 0], [4, 0]], [0, 1])], 3, test, dtype=torch.float32)
    state, _ = play(fed, make("fedproto"), 1)
    correct, loss = fed.score(fed.deployed(make("fedproto"), state, 2), np.arange(1))
    assert correct.tolist() == [0] and loss.tolist() == pytest.approx([1e30], rel=1e-5)


def test_features_meet(by_hand, play, monkeypatch):
    """z = w x, x = 1 and 3, w = 1, R alone, η λ = .1: C̄ = (1 + 3)/2; then w = 1 + .2·1 = 1.2 and 1 − .2·1·3 = .4, so z
    is 1.2 for both, and so is C̄. From then on nothing moves.
    """
    monkeypatch.setattr(fedproto, "cross_entropy", lambda logits, y: 0)
    monkeypatch.setattr(fedproto, "model_loss", lambda model, p, b: 0 * model.predict(p, b[0]).sum())
    body = nn.Linear(1, 1, bias=False)
    nn.init.ones_(body.weight)
    net = models.from_modules(body, nn.Linear(1, 2), (1,), 2)
    fed, method = by_hand(net, [([[1.0]], [0]), ([[3.0]], [0])], rule={"lr": 0.05}), make("fedproto", lam=2.0)
    state, ends = fed.start(method), []
    for _ in range(4):
        result = fed.play(method, state, 4)
        apart = result.log().get("train.distance", np.zeros(2))
        ends.append((state.server.values[0].item(), *state.kept[0]["weight"].flatten().tolist(), *apart))
    expected = [(2, 1, 1, 0, 0), (1.2, 1.2, 0.4, 1, 1), (1.2, 1.2, 0.4, 0, 0), (1.2, 1.2, 0.4, 0, 0)]
    np.testing.assert_allclose(ends, expected, atol=1e-15)


# --- rounds, written out ---------------------------------------------------------------------------------------------


def train(peer, known, lam, epochs):
    """SGD of a Plain client on CE + λ R; known: {class: prototype}. The means over samples of the loss and of R."""
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    optimizer = torch.optim.SGD([*peer.r.parameters(), *peer.h.parameters()], **rule)
    peer.r.train(), peer.h.train()
    totals = np.zeros(2)
    for x, y in peer.batches() * epochs:
        optimizer.zero_grad()
        z = peer.r(x)
        target = torch.stack([known.get(int(c), own.detach()) for c, own in zip(y, z, strict=True)])
        apart = nn.functional.mse_loss(z, target)
        loss = nn.functional.cross_entropy(peer.h(z), y) + lam * apart
        loss.backward()
        optimizer.step()
        totals += loss.item() * len(y), apart.item() * len(y)
    return totals / (epochs * len(peer.y))


def class_means(x, y, extractor):
    """{class: (mean, number)} of each class among y."""
    with torch.no_grad():
        z = extractor.eval()(x)
    return {c: (z[y == c].mean(0), int((y == c).sum())) for c in set(y.tolist())}


def near(z, known):
    """The class of the nearest prototype for each z."""
    classes = sorted(known)
    return torch.tensor(classes)[torch.cdist(z, torch.stack([known[c] for c in classes])).argmin(1)]


@pytest.fixture
def owners(by_hand, linear):
    """A function that makes a Federation of 5 clients with 4 to 11 samples of some of 5 classes, and batch-norm."""

    def make(**options):
        g, owned = torch.Generator().manual_seed(0), ([0], [1, 2, 2], [3, 0], [1, 4], [2, 0, 3])
        layers = nn.Sequential(linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        net = models.from_modules(layers, linear(6, 5), (4,), 5)
        clients = [
            (torch.randn(n, 4, generator=g), (c * n)[:n]) for n, c in zip((4, 7, 10, 11, 10), owned, strict=True)
        ]
        test = [(torch.randn(20, 4, generator=g), [0, 1, 2, 3, 4] * 4) for _ in owned]
        return by_hand(net, clients, test, **options)

    return make


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ratio", [0.4, 1.0])
def test_four_rounds_in_plain_torch(owners, plain, play, in_order, one_thread, ratio, weighted):
    """Training, losses, prototypes, bytes and answers; at ratio .4 a class is met that has no prototype, and one is
    known that no sampled client owns.
    """
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
    fed, method = owners(rule=rule, join_ratio=ratio), make("fedproto", lam=0.7, weighted=weighted)
    state, own, known, met = fed.start(method), [fed.init()] * 5, {}, set()
    last = state.server
    for t in range(4):
        result = fed.play(method, state, 4)
        before, uploads = dict(known), []
        for k, i in enumerate(result.ids):
            peer = plain(fed, i).load(*own[i])
            losses = train(peer, before, 0.7, epochs=2)
            own[i] = peer.state()
            uploads.append(class_means(peer.x, peer.y, peer.r))
            assert trees.unequal(trees.row(state.kept, i), own[i]) < 1e-11
            assert trees.unequal(trees.row(result.held[0], k), own[i][0]) < 1e-11
            assert result.log()["train"][k] == pytest.approx(losses[0], rel=1e-11)
            assert ("train.distance" in result.log()) == (t > 0)
            answers = fed.model.predict(trees.row(result.held, k), fed.test[i][0]).argmax(1)
            peer.h.eval()
            z = peer.r.eval()(fed.test[i][0])
            assert answers.tolist() == (near(z, before) if before else peer.h(z).argmax(1)).tolist()
            if t > 0:
                assert result.log()["train.distance"][k] == pytest.approx(losses[1], rel=1e-11) and losses[1] > 0
                met |= {"unknown" for c in uploads[-1] if c not in before}
            assert result.bytes_down[k] == 8 * 6 * len(before) + 4 * len(before)
            assert result.bytes_up[k] == (8 * 6 + 4 + 4 * weighted) * len(uploads[-1])
        for c in range(5):
            found = [upload[c] for upload in uploads if c in upload]
            if found:
                weights = [n if weighted else 1 for _, n in found]
                known[c] = sum(w * mean for w, (mean, _) in zip(weights, found, strict=True)) / sum(weights)
            elif c in known:
                met.add("kept")
                assert torch.equal(state.server.values[c], last.values[c])
        last = state.server
        assert last.present.tolist() == [c in known for c in range(5)]
        assert all((last.values[c] - known.get(c, torch.zeros(6))).abs().max() < 1e-11 for c in range(5))
    assert met == (set() if ratio == 1 else {"unknown", "kept"})


def test_prototypes_are_of_the_final_extractor_in_evaluation_mode(by_hand, linear, play):
    """By its running statistics; batches' would give other means, and so would extractors on the way."""
    layers = nn.Sequential(linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    net = models.from_modules(layers, linear(3, 2), (2,), 2)
    x, y = torch.linspace(-1, 5, 24).reshape(12, 2).double(), torch.tensor([0, 1] * 6)
    state, (result,) = play(by_hand(net, [(x, y.tolist())], rule={"lr": 0.5}), make("fedproto"), 1)
    extractor = layers.double()
    extractor.load_state_dict(trees.row(result.held[0], 0))
    means = class_means(x, y, extractor)
    assert all((state.server.values[c] - means[c][0]).abs().max() < 1e-12 for c in (0, 1))
    with torch.no_grad():
        moving = extractor.train()(x)
    assert (moving[y == 0].mean(0) - means[0][0]).abs().max() > 0.1


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_lambda_zero_is_local(digits, play, model):
    """Bit for bit, in every round, whatever prototypes say; the distance to them is recorded all the same."""
    fed = digits(model, rule={"momentum": 0.9})
    (proto, rounds), (local, others) = (play(fed, m, 3) for m in (make("fedproto", lam=0.0), make("local")))
    assert trees.unequal(proto.kept, local.kept) == 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held[0], theirs.held[0]) == 0
        assert ours.log()["train"].tolist() == theirs.log()["train"].tolist()


def test_round_1_is_local_whatever_lambda(digits, play):
    """Model held and scores too, for there are no prototypes; round 2 is not, unless λ = 0."""
    fed = digits()
    (_, local), *ends = (play(fed, m, 2) for m in (make("local"), *(make("fedproto", lam=v) for v in (0, 1e-3, 10))))
    for (state, rounds), same in zip(ends, (True, False, False), strict=True):
        assert trees.unequal(rounds[0].held, local[0].held) == 0
        assert (trees.unequal(state.kept, local[1].held) == 0) == same
    assert trees.unequal(ends[1][0].kept, ends[2][0].kept) > 0


def test_the_distance_is_recorded_from_round_2_on_and_lambda_lowers_it(digits, play):
    fed, ends = digits(rule={"epochs": 2}), []
    for lam in (0.0, 10.0):
        _, rounds = play(fed, make("fedproto", lam=lam), 4)
        assert "train.distance" not in rounds[0].log()
        assert all((result.log()["train.distance"] > 0).all() for result in rounds[1:])
        ends.append(rounds[-1].log()["train.distance"])
    assert (ends[1] < ends[0] / 2).all()


def test_a_rate_of_zero_gives_the_initial_extractors_means(digits, play):
    state, _ = play(fed := digits(rule={"epochs": 0}, dtype=torch.float64), make("fedproto"), 3)
    assert trees.unequal(state.kept, trees.expand(fed.init(), 6)) == 0
    x, y = torch.cat([x for x, _ in fed.train]), torch.cat([y for _, y in fed.train])
    z = fed.model.extract(fed.init()[0], x)
    for c in range(10):
        means = [fed.model.extract(fed.init()[0], own[k == c]).mean(0) for own, k in fed.train if (k == c).any()]
        torch.testing.assert_close(state.server.values[c], torch.stack(means).mean(0), atol=1e-12, rtol=1e-12)
    pooled, _ = play(digits(rule={"epochs": 0}, dtype=torch.float64), make("fedproto", weighted=True), 3)
    for c in range(10):  # weighted by numbers of samples, it is the mean of all samples
        torch.testing.assert_close(pooled.server.values[c], z[y == c].mean(0), atol=1e-12, rtol=1e-12)


def test_stacked_as_in_the_loop(digits, play):
    ends = [play(digits(engine=e, dtype=torch.float64), make("fedproto", lam=2.0), 3)[0] for e in ("loop", "stacked")]
    assert trees.unequal(*((state.server, state.kept) for state in ends)) < 1e-10


# --- which model answers ---------------------------------------------------------------------------------------------


def test_all_known_classes_can_be_answered_and_clients_are_counted_by_themselves(features, play):
    """The released code looks among a client's own classes, and goes on counting from client to client. Here client 0,
    which owns class 0 alone, knows 10 of 10 samples of class 1, and client 1, with another label on all, none.
    """
    near_1 = torch.tensor([[4.0, 1.0]] * 10)
    fed = features([([[0.0, 0]], [0]), ([[4.0, 0]], [1])], 2, [(near_1, [1] * 10), (near_1, [0] * 10)])
    state, _ = play(fed, make("fedproto"), 1)
    correct, loss = fed.score(fed.deployed(make("fedproto"), state, 2), np.arange(2))
    assert correct.tolist() == [10, 0]
    assert loss.tolist() == pytest.approx([np.log1p(np.exp(-16)), 16 + np.log1p(np.exp(-16))])  # ‖·‖²: 1 and 17


def test_before_has_the_newest_prototypes_and_after_those_it_was_trained_by(digits, play):
    """Both with the client's own extractor; in round 1, and before it, with its own head."""
    fed, method = digits(join_ratio=0.5), make("fedproto")
    state = fed.start(method)
    assert trees.unequal(fed.deployed(method, state, 3), trees.expand(fed.init(), 6)) == 0
    for t in range(3):
        last = state.server
        result = fed.play(method, state, 3)
        kept = trees.take(state.kept, result.ids)
        after = trees.expand(fedproto.nearest_head(last), 3) if t else kept[1]
        assert trees.unequal(result.held, (kept[0], after)) == 0
        newest = trees.expand(fedproto.nearest_head(state.server), 6)
        assert trees.unequal(fed.deployed(method, state, 3), (state.kept[0], newest)) == 0


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_are_of_owned_and_of_known_classes(by_hand, play):
    """4 K_i (r + 1) up, K_i = 1, 2, 3 and r = 3; down nothing at first, then 4·(r + 1) for each of 4 of 5 classes."""
    net = models.from_modules(nn.Linear(2, 3), nn.Linear(3, 5), (2,), 5)
    clients = [(torch.zeros(n, 2), y) for n, y in ((2, [1, 1]), (3, [0, 3, 3]), (4, [0, 1, 2, 2]))]
    for weighted in (False, True):
        _, rounds = play(by_hand(net, clients, dtype=torch.float32), make("fedproto", weighted=weighted), 2)
        assert [r.bytes_up.tolist() for r in rounds] == [[4 * k * (3 + 1 + weighted) for k in (1, 2, 3)]] * 2
        assert [r.bytes_down.tolist() for r in rounds] == [[0] * 3, [4 * 4 * (3 + 1)] * 3]


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "features", "says"),
    [
        (nn.Linear(32, 10), 32, "FedProto needs equally many features of all models; this one gives 32, 'mlp' 64"),
        (nn.Linear(64, 10, bias=False), 64, "FedProto needs one linear layer with a bias as the head, not Linear"),
        (nn.Sequential(nn.ReLU(), nn.Linear(64, 10)), 64, "FedProto needs one linear layer .* not Sequential"),
    ],
)
def test_models_without_features_in_common_are_refused(digits, monkeypatch, head, features, says):
    """By one line, before any training."""
    monkeypatch.setattr(training.Clients, "sgd", lambda *args, **named: pytest.fail("trained"))
    other = models.from_modules(nn.Sequential(nn.Flatten(), nn.Linear(64, features)), head, (1, 8, 8), 10)
    with pytest.raises(ValueError, match=f"^model='custom': {says}") as refused:
        experiment.run(make("fedproto"), digits([models.build("mlp", (1, 8, 8), 10), other]), 1)
    assert "\n" not in str(refused.value)
