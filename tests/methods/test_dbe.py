"""DBE: FedAvg with a private bias on each client's representations, whose mean is held near one that all agree on."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pflkit import models, trees
from pflkit.methods import dbe, make

EVERYTHING = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}
SIZES = (1, 7, 10, 11)

# --- hand numbers ----------------------------------------------------------------------------------------------------


def layer(weight):
    made = nn.Linear(len(weight[0]), len(weight))
    made.weight.data, made.bias.data = torch.tensor(weight), torch.zeros(len(weight))
    return made


@pytest.mark.parametrize(("W", "p"), [([[1.0, 0.0], [0.0, 1.0]], [0.5, -0.5]), ([[1.0, 0.0], [0.0, 2.0]], [0.5, -1.0])])
def test_one_step_of_the_bias(by_hand, play, W, p):
    """z = 0, so logits are 0; label 0; η = 1: p = −Wᵀ (½ − 1, ½). With W = diag(1, 2), logits move by (.5, −2)."""
    net = models.from_modules(layer([[0.0], [0.0]]), layer(W), (1,), 2)
    fed, method = by_hand(net, [([[0.0]] * 4, [0] * 4)], rule={"lr": 1.0}), make("dbe", kappa=0.0)
    state, (result,) = play(fed, method, 1)
    assert state.kept["p"].tolist() == [p]
    assert state.server["model"][1]["bias"].tolist() == [0.5, -0.5]  # b learns, too; W's gradient is that of z + p = 0
    assert state.server["model"][1]["weight"].tolist() == W
    shift = [0.5 + W[0][0] * p[0], -0.5 + W[1][1] * p[1]]
    assert result.held[1]["bias"].tolist() == [shift]
    assert fed.deployed(method, state, 2)[1]["bias"].tolist() == [shift]


def test_the_bias_acts_through_the_head_only(uneven):
    """W (z + p) + b, of each client's own p; it is no more than a private b + W p."""
    fed, g = uneven(), torch.Generator().manual_seed(1)
    r, h = fed.init()
    p = torch.randn(4, 5, generator=g, dtype=torch.float64)
    folded = dbe.folded(trees.expand((r, h), 4), p)
    for i, (x, _) in enumerate(fed.train):
        logits = fed.model.classify(h, fed.model.extract(r, x) + p[i])
        assert (fed.model.predict(trees.row(folded, i), x) - logits).abs().max().item() < 1e-13


def test_mean_regularization_by_hand():
    """m = (1, 3), z̄ = (0, 1), κ = 2: 2 · mean(½, 2) = 2.5, with the gradient κ (m − z̄) / r = (1, 2)."""
    m, target = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.0, 1.0])
    loss = 2 * dbe.regularization(m, target)
    loss.backward()
    assert loss.item() == 2.5 and m.grad.tolist() == [1.0, 2.0]


def test_a_moving_mean_is_a_mean():
    """Of equal batches it is what they are, from the first on. Elsewhere it was .651 of it after ten, with μ = .1."""
    m, s = torch.zeros(2, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for k in range(1, 11):
        m, s = dbe.moving_mean(m, s, torch.tensor([3.0, -1.0], dtype=torch.float64), 0.1)
        assert m.tolist() == pytest.approx([3, -1], abs=1e-14)
        assert s.item() == pytest.approx(1 - 0.9**k, abs=1e-15)
    assert s.item() == pytest.approx(0.6513, abs=1e-4)
    newest = torch.tensor([7.0, 0.1], dtype=torch.float64)
    assert dbe.moving_mean(m, torch.ones_like(s), newest, 1.0)[0].tolist() == newest.tolist()


# --- the round for statistics ----------------------------------------------------------------------------------------


def plain_means(fed, plain, epochs):
    """The clients' mean representations after SGD of a copy of the initial model."""
    means = []
    for i in range(fed.num_clients):
        peer = plain(fed, i).load(*fed.init())
        peer.train(peer.r, peer.h, epochs=epochs)
        peer.r.eval()
        means.append(peer.r(peer.x).detach().mean(0))
    return torch.stack(means)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_mean_that_all_agree_on(uneven, plain, play, in_order, one_thread, drop_last):
    """Σ n_i z̄_i / Σ n_i over all clients, whatever the join ratio, those without a full batch too."""
    rule = {"lr": 0.1, "epochs": 3, "momentum": 0.9, "drop_last": drop_last}
    fed = uneven(rule=rule, join_ratio=0.25)
    state, (result,) = play(fed, make("dbe"), 1)
    n = torch.tensor(SIZES, dtype=torch.float64)
    expected = n @ plain_means(fed, plain, 3) / n.sum()
    assert (state.server["mean"] - expected).abs().max().item() < 1e-13
    assert result.ids.tolist() == [0, 1, 2, 3]
    assert trees.unequal(state.server["model"], fed.init()) == 0
    assert not state.kept["p"].any() and not state.kept["mean"].any()


@pytest.mark.parametrize("batch_size", [1, 4, 20])
def test_that_mean_is_over_samples_and_not_over_the_last_batch(uneven, play, batch_size):
    """Without training it is the mean of the initial representations, whatever the batches."""
    fed = uneven(rule={"lr": 0.0, "batch_size": batch_size})
    state, _ = play(fed, make("dbe"), 1)
    z = fed.model.extract(fed.init()[0], torch.cat([x for x, _ in fed.train]))
    assert (state.server["mean"] - z.mean(0)).abs().max().item() < 1e-14


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_the_round_for_statistics_is_fedavgs_first_and_is_forgotten(digits, play, model):
    """Its training is FedAvg's of round 1, to the bit. Without κ and p, rounds 2 and 3 are FedAvg's from w^1."""
    fed, method = digits(model, rule=EVERYTHING), make("dbe", bias=False)
    state = fed.start(method)
    first = fed.play(method, state, 3)
    (_, (theirs,)), avg = play(fed, make("fedavg"), 1), fed.start(make("fedavg"))
    assert trees.unequal(first.held, theirs.held) == 0
    assert first.log()["train"].tolist() == theirs.log()["train"].tolist()
    assert trees.unequal(state.server["model"], fed.init()) == 0
    avg.round = 1
    for _ in range(2):
        ours = fed.play(dataclasses.replace(method, kappa=0.0), state, 3)
        assert trees.unequal(ours.held, fed.play(make("fedavg"), avg, 3).held) == 0
    assert trees.unequal(state.server["model"], avg.server) == 0
    assert trees.unequal(avg.server, fed.init()) > 0


def test_what_travels(digits):
    """Round 1: the model down, r numbers up, for all. Then the model both ways, and z̄ once to each client."""
    fed, method = digits(join_ratio=0.5), make("dbe")
    state, whole, r = fed.start(method), 4 * fed.model.size(), 4 * 64
    first = fed.play(method, state, 9)
    assert first.bytes_down.tolist() == [whole] * 6 and first.bytes_up.tolist() == [r] * 6
    target, told, times = state.server["mean"].clone(), set(), 0
    for _ in range(5):
        result = fed.play(method, state, 9)
        assert result.ids.tolist() == fed.sample(state.round).tolist()
        assert result.bytes_down.tolist() == [whole + (i not in told) * r for i in result.ids.tolist()]
        assert result.bytes_up.tolist() == [whole] * 3
        times += sum(i in told for i in result.ids.tolist())
        told |= set(result.ids.tolist())
        assert trees.unequal(state.server["mean"], target) == 0
        for i in range(6):
            assert state.kept["mean"][i].tolist() == (target.tolist() if i in told else [0] * 64)
    assert times and len(told) > 3


# --- rounds, written out ---------------------------------------------------------------------------------------------


def train(peer, p, target, kappa, mu, epochs):
    """SGD of a Plain client and its p on CE + κ MR; p, and its mean loss and MR over all samples seen."""
    peer.r.train(), peer.h.train()
    p = p.clone().requires_grad_()
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    optimizer, means = torch.optim.SGD([*peer.r.parameters(), *peer.h.parameters(), p], **rule), []
    seen = np.zeros(2)
    for x, y in peer.batches() * epochs:
        z = peer.r(x)
        means = [m.detach() for m in means] + [z.mean(0)]
        weights = torch.tensor([(1 - mu) ** (len(means) - 1 - j) for j in range(len(means))], dtype=torch.float64)
        m = (weights[:, None] * torch.stack(means)).sum(0) / weights.sum()
        MR = ((m - target) ** 2 / 2).sum() / len(target)
        loss = cross_entropy(peer.h(z + p), y) + kappa * MR
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += np.array([loss.item(), MR.item()]) * len(y)
    return p.detach(), seen / (epochs * len(peer.y))


def check_rounds(fed, method, plain, play, sizes):
    """Two rounds after the one for statistics, of everybody."""
    state, rounds = play(fed, method, 3)
    n = torch.tensor(sizes, dtype=torch.float64)
    w, target = fed.init(), n @ plain_means(fed, plain, 2) / n.sum()
    ps = torch.zeros(len(sizes), len(target), dtype=torch.float64)
    for result in rounds[1:]:
        peers = [plain(fed, i).load(*w) for i in range(len(sizes))]
        ends = [train(peer, p, target, method.kappa, method.mu, 2) for peer, p in zip(peers, ps, strict=True)]
        ps = torch.stack([p for p, _ in ends])
        w = tuple(peers[0].mean(part, sizes) for part in zip(*(p.state() for p in peers), strict=True))
        log = result.log()
        assert log["train"].tolist() == pytest.approx([seen[0] for _, seen in ends], rel=1e-10)
        assert log["train.apart"].tolist() == pytest.approx([seen[1] for _, seen in ends], rel=1e-10)
    assert trees.unequal(state.server["model"], w) < 1e-12
    assert (state.kept["p"] - ps).abs().max().item() < 1e-12
    assert (ps.abs().amax(1) > 1e-2).all()
    held = trees.stack([peer.state() for peer in peers])
    assert trees.unequal(rounds[-1].held, dbe.folded(held, ps)) < 1e-12
    free, _ = play(fed, dataclasses.replace(method, kappa=1e-9), 3)
    assert trees.unequal(state.server, free.server) > 1e-3
    return state


@pytest.mark.parametrize(("kappa", "mu"), [(3.0, 1.0), (3.0, 0.3)])
def test_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, kappa, mu):
    """Of clients with 1, 7, 10 and 11 samples in batches of 4: m begins anew in each round, and goes on over epochs."""
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
    check_rounds(uneven(rule=rule), make("dbe", kappa=kappa, mu=mu), plain, play, SIZES)


def test_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread):
    """Its statistics are averaged with w; a client's mean is taken in evaluation mode, m while training."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "epochs": 2, "momentum": 0.5})
    state = check_rounds(fed, make("dbe", kappa=3.0, mu=0.3), plain, play, sizes)
    counter = state.server["model"][0]["1.num_batches_tracked"]
    assert counter.dtype == torch.int64 and counter.item() == 4


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_without_kappa_and_bias_it_is_fedavg(digits, play, model):
    """To the bit, from round 1 on: who needs no mean takes no statistics, and sends none."""
    fed, method = digits(model, join_ratio=0.5, rule=EVERYTHING), make("dbe", kappa=0.0, bias=False)
    (state, rounds), (avg, others) = (play(fed, m, 3) for m in (method, make("fedavg")))
    assert trees.unequal(state.server["model"], avg.server) == 0
    assert trees.unequal(fed.deployed(method, state, 4), fed.deployed(make("fedavg"), avg, 4)) == 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held, theirs.held) == 0
        assert ours.ids.tolist() == theirs.ids.tolist()
        assert ours.log()["train"].tolist() == theirs.log()["train"].tolist()
        assert [ours.bytes_up.tolist(), ours.bytes_down.tolist()] == [
            theirs.bytes_up.tolist(),
            theirs.bytes_down.tolist(),
        ]
    assert not state.kept["p"].any()


def test_no_effect_where_the_mean_is_right(by_hand, linear, play):
    """One step on all samples, from w^1 whose mean representation is z̄: m = z̄, so MR and its gradient are 0; not so in
    the next epoch, nor with another z̄.
    """
    net = models.from_modules(nn.Sequential(linear(2, 4), nn.Tanh()), linear(4, 2), (2,), 2)
    x, y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), [0, 1] * 4
    ends = {}
    for epochs in (1, 2):
        for off in (0.0, 1.0):
            for kappa in (0.0, 50.0):
                fed = by_hand(net, [(x, y)], rule={"lr": 0.1, "epochs": epochs})
                state = fed.start(make("dbe"))
                state.round = 1
                state.server["mean"] = fed.model.extract(fed.init()[0], fed.train[0][0]).mean(0) + off
                state.server["owed"][:] = True
                fed.play(make("dbe", kappa=kappa), state, 2)
                ends[epochs, off, kappa] = state.server["model"], state.kept["p"]
    assert trees.unequal(ends[1, 0.0, 50.0], ends[1, 0.0, 0.0]) < 1e-14
    assert trees.unequal(ends[1, 1.0, 50.0], ends[1, 1.0, 0.0]) > 1e-2
    assert trees.unequal(ends[2, 0.0, 50.0], ends[2, 0.0, 0.0]) > 1e-4


def test_mr_does_not_reach_what_has_no_part_in_the_mean(by_hand, linear, play):
    """Without an extractor's parameters κ changes neither head nor p: MR is of f(θ; x), not of f(θ; x) + p."""
    net = models.from_modules(nn.Identity(), linear(2, 2), (2,), 2)
    x, y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), [0, 1] * 4
    fed = by_hand(net, [(x, y)], rule={"lr": 0.1})
    ends = []
    for kappa in (1.0, 1e3):
        state, rounds = play(fed, make("dbe", kappa=kappa), 3)
        ends.append((state.server["model"], state.kept["p"]))
        assert rounds[-1].log()["train.apart"][0] >= 0
    assert trees.unequal(*ends) < 1e-15
    assert ends[0][1].abs().min().item() > 1e-3


def test_more_kappa_less_shift_of_the_mean(digits, play):
    """With everybody's samples in one batch, the mean representation after training is nearer to z̄ as κ grows."""
    apart = []
    for kappa in (1e-6, 5.0, 50.0):
        fed, method = digits(rule={"batch_size": 1000, "epochs": 20}), make("dbe", kappa=kappa)
        state, (_, result) = play(fed, method, 2)
        mean = state.server["mean"]
        z = [fed.model.extract(trees.row(result.held[0], i), x).mean(0) - mean for i, (x, _) in enumerate(fed.train)]
        apart.append(torch.stack(z).square().sum(1))
    assert (apart[0] > apart[1]).all() and (apart[1] > apart[2]).all()


# --- whose bias it is ------------------------------------------------------------------------------------------------


def test_the_bias_stays_at_home(digits, monkeypatch):
    """Uploads are models, and z̄_i once; who has another p has another model under the same w."""
    fed, method, sent = digits(join_ratio=0.5), make("dbe"), []
    merge = dbe.DBE.merge
    monkeypatch.setattr(dbe.DBE, "merge", lambda *args: sent.append(args[-2]) or merge(*args))
    state = fed.start(method)
    for _ in range(4):
        fed.play(method, state, 4)
    assert [list(upload) for upload in sent] == [["mean"], ["model"], ["model"], ["model"]]
    shapes = [t.shape for t in trees.leaves(fed.init())]
    assert all([t.shape[1:] for t in trees.leaves(upload["model"])] == shapes for upload in sent[1:])
    r, h = fed.deployed(method, state, 5)
    w, p = state.server["model"], state.kept["p"]
    assert trees.unequal((r, h["weight"]), trees.expand((w[0], w[1]["weight"]), 6)) == 0
    assert (h["bias"] - (w[1]["bias"] + p @ w[1]["weight"].T)).abs().max().item() < 1e-6
    assert all(not torch.equal(p[i], p[j]) for i in range(6) for j in range(i) if p[i].any() or p[j].any())


def test_equal_data_other_bias_other_predictions(by_hand, linear):
    net = models.from_modules(nn.Sequential(linear(2, 4), nn.ReLU()), linear(4, 2), (2,), 2)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    fed, method = by_hand(net, [(x, [0, 1] * 3)] * 2), make("dbe")
    state = fed.start(method)
    for p in (0.0, 1.0):
        state.kept["p"][1] = p
        own = [fed.model.predict(trees.row(fed.deployed(method, state, 2), i), fed.train[0][0]) for i in range(2)]
        assert torch.equal(*own) == (p == 0)


def test_a_bias_lasts_until_the_client_joins_again(digits):
    fed, method = digits(join_ratio=0.5), make("dbe")
    state = fed.start(method)
    for t in range(1, 6):
        before = state.kept["p"].clone()
        ids = fed.play(method, state, 6).ids
        changed = [not torch.equal(a, b) for a, b in zip(before, state.kept["p"], strict=True)]
        assert changed == [t > 1 and i in ids for i in range(6)]


@pytest.mark.parametrize("mu", [1.0, 0.3])
def test_stacked_as_in_the_loop(uneven, play, mu):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "batch_size": 4}
    method = make("dbe", kappa=3.0, mu=mu)
    (loop, rounds), (stacked, others) = (
        play(uneven(rule=rule, engine=engine), method, 3) for engine in ("loop", "stacked")
    )
    assert trees.unequal((loop.server, loop.kept), (stacked.server, stacked.kept)) < 1e-12
    assert rounds[-1].flops().tolist() == others[-1].flops().tolist()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [{"kappa": -0.1}, {"mu": 0.0}, {"mu": 1.1}, {"bias": 0}])
def test_impossible_settings_are_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r}: must be"):
        make("dbe", **setting)


@pytest.mark.parametrize("head", [nn.Sequential(nn.Linear(4, 2)), nn.Linear(4, 2, bias=False)])
def test_heads_that_no_bias_folds_into_are_refused(by_hand, linear, head):
    net = models.from_modules(linear(2, 4), head, (2,), 2)
    with pytest.raises(ValueError, match=r"^model='custom': DBE needs one linear layer with a bias as the head, not"):
        by_hand(net, [([[0.0, 1.0]], [0])]).start(make("dbe"))
