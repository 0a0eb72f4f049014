"""FD: any models, which learn from the mean outputs of the others for each class."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.messages import Rows, received
from pflkit.methods import fd, make


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def own(fed, whole, i):
    """Client i's part of a whole over all clients."""
    return trees.row(fed.parts(whole)[i % len(fed.groups)], i // len(fed.groups))


def owned(fed, i):
    return sorted(set(fed.train[i][1].tolist()))


# --- the mean over the others ----------------------------------------------------------------------------------------


def test_a_client_is_left_out_of_its_own_targets():
    """1, 3 and 8 give 5.5, 4.5 and 2; the plain mean, 4, is nobody's."""
    targets = fd.leave_one_out(Rows(numbers(1, 3, 8).view(3, 1, 1), torch.ones(3, 1, dtype=torch.bool)))
    assert targets.values.flatten().tolist() == [5.5, 4.5, 2.0]
    assert targets.present.all()


def test_others_are_those_that_own_the_class():
    """Class 0: all; 1: clients 0 and 2; 2: client 1 alone, so it has no target, and the others have its own; 3: none.

    What stands where nothing is present counts for nothing.
    """
    present = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 0]]).bool()
    values = numbers([1, 2, 99, 99], [3, 99, 5, 99], [8, 4, 99, 99])[..., None]
    targets = fd.leave_one_out(Rows(values, present))
    assert targets.present.int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert targets.values[..., 0].tolist() == [[5.5, 4, 5, 0], [4.5, 3, 0, 0], [2, 2, 5, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_are_distributions(dtype):
    """Of outputs as sharp as softmax gives them: none below 0, all sums 1; a single other's are its own outputs."""
    g = torch.Generator().manual_seed(0)
    for clients in (2, 3, 50):
        values = torch.softmax(torch.randn(clients, 4, 4, generator=g, dtype=dtype) * 20, 2)
        everyone = torch.ones(clients, 4, dtype=torch.bool)
        targets = fd.leave_one_out(Rows(values, everyone)).values
        assert targets.dtype == dtype
        assert targets.min() >= 0
        assert (targets.sum(2) - 1).abs().max() < (1e-6 if dtype == torch.float32 else 1e-14)
        expected = torch.stack([values[np.arange(clients) != i].double().mean(0) for i in range(clients)])
        assert (targets.double() - expected).abs().max() < (3e-8 if dtype == torch.float32 else 1e-15)


def test_messages_are_distributions(digits, play):
    """Also of outputs learned from real data, for the classes that are there; each with its label."""
    fed = digits(join_ratio=0.5)
    state, _ = play(fed, make("fd"), 1)
    targets, labels = received(make("fd").download(state.server, np.arange(6)), 6)
    assert targets.present.any() and not targets.present.all()
    assert targets.values.min() >= 0
    assert (targets.values.sum(2) - targets.present.float()).abs().max() < 1e-6
    assert labels.values.dtype == torch.int32
    assert (labels.values[labels.present] == labels.present.nonzero()[:, 1]).all()
    assert (labels.present == targets.present).all()


def test_own_outputs_are_not_among_own_targets(uneven):
    """Whatever client 2 sends, its own targets are the same, and everyone else's are not."""
    fed, method = uneven(), make("fd")
    g = torch.Generator().manual_seed(0)
    server = Rows(torch.softmax(torch.randn(4, 3, 3, generator=g, dtype=torch.float64), 2), torch.ones(4, 3).bool())
    other = trees.clone(server)
    other.values[2] = torch.eye(3, dtype=torch.float64)
    one, two = (method.download(s, np.arange(4))[0].values for s in (server, other))
    assert [(one[i] - two[i]).abs().max().item() > 1e-3 for i in range(4)] == [True, True, False, True]
    assert (one[2] - two[2]).abs().max() < 1e-15
    assert trees.unequal(received(method.download(fed.start(method).server, np.arange(4)), 4)[0].values, 0 * one) == 0


# --- the term --------------------------------------------------------------------------------------------------------


def slope_of(z, targets):
    z = z.clone().requires_grad_()
    value = fd.distillation(z, targets)
    return value.item(), torch.autograd.grad(value, z)[0]


def test_agreement_moves_nothing():
    """z = (2, 0, −1) with softmax(z) for the target. z itself as a target gives −2.830 and (−1.156, .114, 1.042)."""
    z = numbers([2, 0, -1])
    value, slope = slope_of(z, torch.softmax(z, 1))
    entropy = -(torch.softmax(z, 1) * torch.log_softmax(z, 1)).sum().item()
    assert value == pytest.approx(entropy, abs=1e-15)
    assert slope.abs().max() < 1e-16
    wrong = slope_of(z, z)
    assert wrong[0] == pytest.approx(-2.830, abs=5e-4)
    assert wrong[1][0].tolist() == pytest.approx([-1.156, 0.114, 1.042], abs=5e-4)


def test_the_terms_gradient():
    """(softmax(z) − t) / B; at z = 0 with t = (.75, .25), alone in the batch: (−.25, .25), of the loss ln 2."""
    value, slope = slope_of(numbers([0, 0]), numbers([0.75, 0.25]))
    assert (value, slope[0].tolist()) == (pytest.approx(math.log(2)), [-0.25, 0.25])
    z, t = numbers([1, -2, 0.5], [0, 3, 1]), numbers([0.2, 0.5, 0.3], [1, 0, 0])
    assert (slope_of(z, t)[1] - (torch.softmax(z, 1) - t) / 2).abs().max() < 1e-16


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_a_step_by_hand(by_hand, two_number_head, play, gamma):
    """Logits are two numbers, 0. Client 0 has four samples, three of class 0 with t = (.7, .3), one of class 1, which
    nobody else owns: its cross-entropy alone counts. Over all four, the denominator of both terms:
    ∇ = (½ − ¾, ½ − ¼) + γ ¾ (½ − .7, ½ − .3).
    """
    fed = by_hand(two_number_head, [([[0.0]] * 4, [0, 1, 0, 0]), ([[0.0]], [0])], rule={"lr": 1.0})
    method = make("fd", gamma=gamma)
    state = fed.start(method)
    state.server.values[1, 0], state.server.present[1, 0] = numbers(0.7, 0.3), True
    result = fed.play(method, state, 1)
    assert result.held[1]["h"][0].tolist() == pytest.approx([0.25 + 0.15 * gamma, -0.25 - 0.15 * gamma], abs=1e-15)
    log = result.log()
    assert log["train.distillation"].tolist() == pytest.approx([0.75 * math.log(2), 0])
    assert log["train"].tolist() == pytest.approx([(1 + 0.75 * gamma) * math.log(2), math.log(2)])


def test_outputs_are_of_the_trained_model_and_over_samples(by_hand, two_number_head, play):
    """One step from 0 with rate 1 gives h = (½, −½), for batches of 1, 1 or of 2 of class 0; F̄ = softmax(h)."""
    fed = by_hand(two_number_head, [([[0.0]] * 2, [0, 0]), ([[0.0]] * 2, [1, 1])], rule={"lr": 1.0})
    state, (result,) = play(fed, make("fd"), 1)
    assert result.held[1]["h"].tolist() == [[0.5, -0.5], [-0.5, 0.5]]
    s = 1 / (1 + math.exp(-1))
    assert state.server.present.tolist() == [[True, False], [False, True]]
    assert state.server.values[0].flatten().tolist() == pytest.approx([s, 1 - s, 0, 0], abs=1e-15)
    assert state.server.values[1].flatten().tolist() == pytest.approx([0, 0, 1 - s, s], abs=1e-15)


# --- rounds, written out ---------------------------------------------------------------------------------------------


def train(peer, targets, gamma, epochs):
    """SGD of a Plain client on each sample's cross-entropy and its term, by a loop over samples; the mean term."""
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    peer.r.train(), peer.h.train()
    optimizer, total = torch.optim.SGD([*peer.r.parameters(), *peer.h.parameters()], **rule), 0.0
    for x, y in peer.batches() * epochs:
        optimizer.zero_grad()
        log_p, loss = torch.log_softmax(peer.h(peer.r(x)), 1), 0.0
        for j, label in enumerate(y.tolist()):
            loss = loss - log_p[j, label] / len(y)
            if label in targets:
                term = -(targets[label] * log_p[j]).sum()
                loss, total = loss + gamma * term / len(y), total + term.item()
        loss.backward()
        optimizer.step()
    return total / (epochs * len(peer.y))


@torch.no_grad()
def mean_outputs(peer):
    """{class: mean of the softmax outputs}, in evaluation mode, by a loop over samples."""
    peer.r.eval(), peer.h.eval()
    found = {}
    for x, label in zip(peer.x, peer.y.tolist(), strict=True):
        found.setdefault(label, []).append(torch.softmax(peer.h(peer.r(x[None])), 1)[0])
    return {label: sum(of) / len(of) for label, of in found.items()}


def by_a_loop(fed, plain, rounds, gamma, epochs):
    """Models, what the server has, and bytes and mean terms of every round."""
    state, latest, seen = [fed.init()] * fed.num_clients, [{} for _ in fed.train], []
    for result in rounds:
        sent, before = [dict(of) for of in latest], state[:]
        for i in result.ids.tolist():
            others = [of for j, of in enumerate(sent) if j != i]
            owners = {label: [of[label] for of in others if label in of] for label in range(fed.model.classes)}
            targets = {label: sum(of) / len(of) for label, of in owners.items() if of}
            peer = plain(fed, i).load(*before[i])
            term = train(peer, targets, gamma, epochs)
            state[i], latest[i] = peer.state(), mean_outputs(peer)
            row = 8 * fed.model.classes + 4  # float64 and an int32
            seen.append((row * len(targets), row * len(latest[i]), term))
    return state, latest, seen


@pytest.mark.parametrize("gamma", [1.0, 0.3])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_five_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, ratio, gamma):
    """With a client of a single sample, and with half of them away: the latest outputs count."""
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    fed = uneven(rule=rule, join_ratio=ratio, seed=3)
    state, rounds = play(fed, make("fd", gamma=gamma), 5)
    expected, latest, seen = by_a_loop(fed, plain, rounds, gamma, epochs=2)
    for i in range(4):
        assert trees.unequal(trees.row(state.kept, i), expected[i]) < 1e-12
        assert state.server.present[i].nonzero().flatten().tolist() == sorted(latest[i])
        for label, mean in latest[i].items():
            assert (state.server.values[i, label] - mean).abs().max() < 1e-12
    down, up, term = zip(*seen, strict=True)
    assert np.concatenate([r.bytes_down for r in rounds]).tolist() == list(down)
    assert np.concatenate([r.bytes_up for r in rounds]).tolist() == list(up)
    assert np.concatenate([r.log()["train.distillation"] for r in rounds]).tolist() == pytest.approx(term, abs=1e-12)
    assert min(term) == 0 < max(term)
    assert len({tuple(r.ids.tolist()) for r in rounds}) >= (1 if ratio == 1 else 3)


def test_three_rounds_with_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread):
    """Outputs are those of evaluation mode, by running statistics: in training mode they would be far from them."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "epochs": 2, "momentum": 0.5})
    state, rounds = play(fed, make("fd"), 3)
    expected, latest, _ = by_a_loop(fed, plain, rounds, 1.0, epochs=2)
    for i in range(3):
        assert trees.unequal(trees.row(state.kept, i), expected[i]) < 1e-12
        assert all((state.server.values[i, label] - mean).abs().max() < 1e-12 for label, mean in latest[i].items())
        peer = plain(fed, i).load(*expected[i])
        in_training = torch.softmax(peer.h.train()(peer.r.train()(peer.x)), 1)
        assert (in_training[peer.y == 0].mean(0) - latest[i][0]).abs().max() > 1e-2
    assert state.kept[0]["1.num_batches_tracked"].tolist() == [6, 6, 6]


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
def test_gamma_zero_is_local(digits, play, engine):
    """To the bit, with momentum, decay and clipping about, and in the losses logged; γ = 1 is Local in round 1 only.

    Stacked, but for rounding: FD's loss goes by torch.vmap, Local's is for many.
    """
    rule = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
    fed = digits(rule=rule, engine=engine)
    (local, others), (zero, rounds), (one, ones) = (
        play(fed, method, 3) for method in (make("local"), make("fd", gamma=0.0), make("fd"))
    )
    most = 1e-6 if engine == "stacked" else 0
    assert trees.unequal(zero.kept, local.kept) <= most
    assert trees.unequal(rounds[-1].held, others[-1].held) <= most
    for a, b in zip(rounds, others, strict=True):
        assert a.log()["train"].tolist() == pytest.approx(b.log()["train"].tolist(), rel=most, abs=0)
    assert [trees.unequal(a.held, b.held) > most for a, b in zip(ones, others, strict=True)] == [False, True, True]
    assert trees.unequal(one.kept, local.kept) > 1e-3
    assert [(r.log()["train.distillation"] > 0).all() for r in ones] == [False, True, True]


@pytest.mark.parametrize("model", ["cnn-small", "batch-norm"])
def test_gamma_zero_is_local_for_other_models(digits, linear, play, model):
    if model == "batch-norm":
        body = nn.Sequential(nn.Flatten(), linear(64, 8), nn.BatchNorm1d(8))
        model = models.from_modules(body.float(), linear(8, 10).float(), (1, 8, 8), 10)
    fed = digits(model)
    (local, _), (zero, _), (one, _) = (
        play(fed, method, 2) for method in (make("local"), make("fd", gamma=0.0), make("fd"))
    )
    assert trees.unequal(zero.kept, local.kept) == 0
    assert trees.unequal(one.kept, local.kept) > 1e-3


def test_a_client_whose_classes_nobody_else_owns_learns_alone(by_hand, linear, play):
    """To the bit as Local, in every round; the other two, who share a class, do not. Nothing is NaN on the way."""
    net = models.from_modules(nn.Sequential(linear(2, 6), nn.ReLU()), linear(6, 4), (2,), 4)
    g = torch.Generator().manual_seed(0)
    clients = [(torch.randn(len(y), 2, generator=g), y) for y in ([0, 2] * 6, [1] * 8 + [3], [1, 1, 1])]
    fed = by_hand(net, clients, rule={"lr": 0.1})
    (state, rounds), (local, _) = (play(fed, make(name), 4) for name in ("fd", "local"))
    gaps = [trees.unequal(trees.row(state.kept, i), trees.row(local.kept, i)) for i in range(3)]
    assert gaps[0] == 0 and min(gaps[1:]) > 1e-3
    assert rounds[-1].log()["train.distillation"].tolist()[0] == 0


def test_one_client_alone_is_local(by_hand, linear, play):
    net = models.from_modules(nn.Sequential(linear(2, 6), nn.ReLU()), linear(6, 2), (2,), 2)
    fed = by_hand(net, [(torch.randn(7, 2, generator=torch.Generator().manual_seed(0)), [0, 1] * 3 + [0])])
    (state, rounds), (local, _) = (play(fed, make(name), 3) for name in ("fd", "local"))
    assert trees.unequal(state.kept, local.kept) == 0
    assert [r.bytes_down.tolist() for r in rounds] == [[0]] * 3


def test_engines_agree(digits, play):
    """Stacked but for rounding, and without a warning that the loss cannot be."""
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in ("loop", "threads", "stacked"):
            fed = digits(engine=engine, dtype=torch.float64)
            ends.append(play(fed, make("fd"), 3)[0])
            assert not fed.groups[0].engine.refused
    assert fed.groups[0].engine.known.keys() == {(fd.distilled_loss, fed.model)}
    assert trees.unequal(ends[0].kept, ends[1].kept) == 0
    assert trees.unequal(ends[0].kept, ends[2].kept) < 1e-10
    assert trees.unequal(ends[0].server, ends[2].server) < 1e-10


def test_more_gamma_more_agreement(digits, play):
    """The mean distance of a client's outputs from those of the others falls."""

    def gap(gamma):
        state, _ = play(digits(rule={"epochs": 3}), make("fd", gamma=gamma), 6)
        targets = fd.leave_one_out(state.server)
        both = targets.present & state.server.present
        return (state.server.values - targets.values)[both].abs().sum(1).mean().item()

    gaps = [gap(gamma) for gamma in (0.0, 1.0, 10.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[2] < gaps[0] / 2


# --- who has what ----------------------------------------------------------------------------------------------------


def test_the_server_keeps_the_latest_of_everyone(digits):
    """Those sampled are replaced, the others' stay, bit for bit; nobody's is there before its first round."""
    fed, method = digits(join_ratio=0.5), make("fd")
    state, met = fed.start(method), set()
    for _ in range(4):
        before = state.server
        ids = fed.play(method, state, 4).ids.tolist()
        met |= set(ids)
        for i in range(6):
            assert (trees.unequal(trees.row(state.server, i), trees.row(before, i)) > 0) == (i in ids)
            assert state.server.present[i].nonzero().flatten().tolist() == (owned(fed, i) if i in met else [])
    assert len(met) > 3


def test_before_training_is_what_the_client_kept(digits, play):
    fed, method = digits(join_ratio=0.5), make("fd")
    state, (*_, last) = play(fed, method, 2)
    assert trees.unequal(fed.deployed(method, state, 3), state.kept) == 0
    assert trees.unequal(last.held, trees.take(state.kept, last.ids)) == 0


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_class_means(by_hand, play):
    """CIFAR-100 with 10 classes a client: 4·10·101 up; 4·100·101 down from round 2, where others own all classes.

    A network of 10 million numbers sends no more than one of 300 thousand.
    """
    clients = [(torch.zeros(10, 3, 32, 32), range(10 * k, 10 * k + 10)) for k in range(10)] * 2
    for name in ("cnn-1", "cnn-5"):
        net = models.build(name, (3, 32, 32), 100)
        fed = by_hand(net, clients, rule={"epochs": 0}, dtype=torch.float32)
        _, (first, second) = play(fed, make("fd"), 2)
        assert first.bytes_up.tolist() == second.bytes_up.tolist() == [4_040] * 20
        assert first.bytes_down.tolist() == [0] * 20
        assert second.bytes_down.tolist() == [40_400] * 20


# --- different models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_different_models_teach_each_other(five, kind):
    """Sampled models train, others stay, bit for bit; the bytes are of classes, whatever the model."""
    fed, method = five(kind, join_ratio=0.5), make("fd")
    state, K, known = fed.start(method), fed.model.classes, {}
    for _ in range(3):
        before = trees.clone(state.kept)
        result = fed.play(method, state, 3)
        for at, i in enumerate(result.ids.tolist()):
            others = set().union(*(classes for j, classes in known.items() if j != i))
            assert result.bytes_down[at] == 4 * len(others) * (K + 1)
            assert result.bytes_up[at] == 4 * len(owned(fed, i)) * (K + 1)
        known |= {i: owned(fed, i) for i in result.ids.tolist()}
        for i in range(fed.num_clients):
            assert (trees.unequal(own(fed, state.kept, i), own(fed, before, i)) > 0) == (i in result.ids)
    assert (result.log()["train.distillation"] > 0).any()
    assert np.isfinite(fed.score(result.held, result.ids)[1]).all()


@pytest.mark.parametrize("groups", [2, 6])
def test_equal_models_in_groups_are_one_group(digits, play, groups):
    """To the bit."""
    net = models.build("mlp", (1, 8, 8), 10)
    one, many = digits(net, join_ratio=0.5), digits([net] * groups, join_ratio=0.5)
    (state, _), (other, _) = (play(fed, make("fd"), 4) for fed in (one, many))
    assert trees.unequal(state.server, other.server) == 0
    assert all(trees.unequal(own(one, state.kept, i), own(many, other.kept, i)) == 0 for i in range(6))


def test_models_without_a_common_representation(digits, play):
    """32 features and a head without a bias, 64 and a head of one layer, of two, of none: they share outputs alone."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
    nets = [models.from_modules(body, nn.Linear(32, 10, bias=False), (1, 8, 8), 10)]
    nets += [models.build("mlp", (1, 8, 8), 10, head_layers=layers) for layers in (0, 1, 2)]
    state, _ = play(digits(nets, join_ratio=0.7), make("fd"), 3)
    assert all(leaf.isfinite().all() for leaf in trees.leaves((state.server, state.kept)))


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [-0.1, math.nan, math.inf, True, "1", 1e39])
def test_impossible_weights_are_refused(gamma):
    with pytest.raises(ValueError, match=r"^gamma=.*must be"):
        fd.FD(gamma=gamma)
