"""Ditto: FedAvg, and beside it models that are drawn towards the global one."""

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, trees
from pflkit.methods import ditto, make


@pytest.fixture
def quadratic(by_hand, scalar_net, monkeypatch):
    """A function that plays one round on f(v) = ½(v − 4)² from w^t = 0 and v = `start`: both models' one number."""
    monkeypatch.setattr(ditto, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean() / 2)

    def play(lam, start, epochs, lr=0.1):
        fed = by_hand(scalar_net(0.0, 1), [([[4.0]], [0])], rule={"lr": lr})
        method = make("ditto", lam=lam, personal_epochs=epochs)
        state = fed.start(method)
        state.kept[0]["weight"][:] = start
        fed.play(method, state, 1)
        return state.kept[0]["weight"].item(), state.server[0]["weight"].item()

    return play


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_a_step_by_hand(quadratic):
    """η = .1, λ = 1, from v = 4: 4 − .1·(0 + 4). Drawn to w in training, which is .4 by then, it would be 3.64."""
    assert quadratic(1.0, 4.0, 1) == pytest.approx((3.6, 0.4), abs=1e-15)


@pytest.mark.parametrize(("lam", "expected"), [(0.0, 4.0), (1.0, 2.0), (3.0, 1.0)])
def test_the_minimum_lies_between_data_and_global_model(quadratic, lam, expected):
    """(4 + λ·0) / (1 + λ), from either side; the global model takes its one step whatever v does."""
    for start in (4.0, -3.0):
        assert quadratic(lam, start, 400) == pytest.approx((expected, 0.4), abs=1e-12)


@pytest.mark.parametrize("lam", [1e3, 1e6])
def test_a_large_lambda_solved_exactly_gives_what_was_received(quadratic, lam):
    """η (1 + λ) = 1 solves it in one step: v = 4 / (1 + λ), from wherever."""
    assert quadratic(lam, 4.0, 1, lr=1 / (1 + lam))[0] == pytest.approx(4 / (1 + lam), abs=1e-12)


# --- rounds, written out ---------------------------------------------------------------------------------------------


def train(peer, epochs, lam=0.0, anchor=None):
    """SGD of a Plain client on f + λ/2 Σ (p − anchor)² over its parameters; f's mean over all samples seen."""
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    peer.r.train(), peer.h.train()
    named = [*peer.r.named_parameters(), *peer.h.named_parameters()]
    params = [p for _, p in named]
    where = anchor and [
        part[k] for part, m in zip(anchor, (peer.r, peer.h), strict=True) for k, _ in m.named_parameters()
    ]
    optimizer, total = torch.optim.SGD(params, **rule), 0.0
    for x, y in peer.batches() * epochs:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(peer.h(peer.r(x)), y)
        apart = sum(((p - a) ** 2).sum() for p, a in zip(params, where, strict=True)) if anchor else 0.0
        (loss + lam / 2 * apart).backward()
        optimizer.step()
        total += loss.item() * len(y)
    return total / (epochs * len(peer.y))


def in_plain_torch(fed, plain, sizes, lam, epochs, personal_epochs, rounds):
    """(w, every v_i, losses of w, losses of v_i) after so many rounds of everybody."""
    w, own = fed.init(), [fed.init()] * len(sizes)
    for _ in range(rounds):
        peers, mine = ([plain(fed, i).load(*start) for i, start in enumerate(s)] for s in ([w] * len(sizes), own))
        losses = [train(peer, epochs) for peer in peers]
        personal = [train(peer, personal_epochs, lam, w) for peer in mine]
        own = [peer.state() for peer in mine]
        w = tuple(peers[0].mean(part, sizes) for part in zip(*(p.state() for p in peers), strict=True))
    return w, own, losses, personal


def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
    state, rounds = play(fed := uneven(rule=rule), make("ditto", lam=0.7, personal_epochs=3), 3)
    w, own, losses, personal = in_plain_torch(fed, plain, (1, 7, 10, 11), 0.7, 2, 3, 3)
    assert trees.unequal(state.server, w) < 1e-12
    for i in range(4):
        assert trees.unequal(trees.row(state.kept, i), own[i]) < 1e-12
        assert trees.unequal(own[i], w) > 1e-2
    log = rounds[-1].log()
    assert log.keys() == {"train", "personal"}
    assert log["train"].tolist() == pytest.approx(losses, rel=1e-11)
    assert log["personal"].tolist() == pytest.approx(personal, rel=1e-11)


def test_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread):
    """v_i's statistics are its own, w's are averaged, and λ draws neither: they are no parameters."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "epochs": 2, "momentum": 0.5})
    state, _ = play(fed, make("ditto", lam=0.7, personal_epochs=3), 2)
    w, own, _, _ = in_plain_torch(fed, plain, sizes, 0.7, 2, 3, 2)
    assert trees.unequal(state.server, w) < 1e-12
    for i in range(3):
        assert trees.unequal(trees.row(state.kept, i), own[i]) < 1e-12
    counters = state.server[0]["1.num_batches_tracked"], *state.kept[0]["1.num_batches_tracked"]
    assert [c.item() for c in counters] == [4, 6, 6, 6]


# --- limits ----------------------------------------------------------------------------------------------------------

EVERYTHING = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_lambda_zero_is_local(digits, play, model):
    """To the bit, with momentum, decay and clipping about: v_i sees Local's batches."""
    fed = digits(model, rule=EVERYTHING)
    state, rounds = play(fed, make("ditto", lam=0.0, personal_epochs=2), 3)
    local, others = play(fed, make("local"), 3)
    assert trees.unequal(state.kept, local.kept) == 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held["personal"], theirs.held) == 0
        assert ours.log()["personal"].tolist() == theirs.log()["train"].tolist()


@pytest.mark.parametrize("lam", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_the_global_model_is_fedavgs(digits, play, model, lam):
    """To the bit, whatever λ and however long the clients' own models train."""
    fed = digits(model, join_ratio=0.5, rule=EVERYTHING)
    state, rounds = play(fed, make("ditto", lam=lam, personal_epochs=1), 3)
    avg, others = play(fed, make("fedavg"), 3)
    assert trees.unequal(state.server, avg.server) == 0
    assert trees.unequal(fed.deployed(make("ditto"), state, 4)["global"], fed.deployed(make("fedavg"), avg, 4)) == 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held["global"], theirs.held) == 0
        assert ours.log()["train"].tolist() == theirs.log()["train"].tolist()


def test_more_lambda_nearer_to_the_global_model(digits, play):
    """The distance from v_i to the w^t that it was drawn to falls as λ grows; η λ is at most .5."""
    fed, apart = digits(rule={"epochs": 3}), []
    for lam in (0.0, 1.0, 10.0):
        state, _ = play(fed, method := make("ditto", lam=lam, personal_epochs=5), 2)
        received = trees.expand(state.server, 6)
        apart.append(trees.unequal(fed.play(method, state, 3).held["personal"], received))
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < apart[0] / 2


# --- both models, apart ----------------------------------------------------------------------------------------------


def test_a_client_uses_what_it_kept(digits, play):
    """`before` of a round is `after` of the last one a client joined; at first it is w^0."""
    fed, method = digits(join_ratio=0.5), make("ditto")
    state = fed.start(method)
    last = trees.repeat(fed.init(), 6)
    for _ in range(4):
        assert trees.unequal(fed.deployed(method, state, 4)["personal"], last) == 0
        result = fed.play(method, state, 4)
        trees.put(last, result.ids, result.held["personal"])
        assert trees.unequal(*result.held.values()) > 0


def test_scores_of_both_models_are_apart(digits):
    """Elsewhere they went into one list, twice as long as there were rounds, and its maximum was the result."""
    fed, method = digits(join_ratio=0.5), make("ditto", lam=0.1, personal_epochs=3)
    history = experiment.run(method, fed, 4)
    assert len(history.rounds) == 5
    held = fed.deployed(method, history.state, 4)
    last = history.clients[history.clients["round"] == 5].set_index("client")
    for kind, column in (("personal", "before"), ("global", "before_global")):
        correct, _ = fed.score(held[kind], np.arange(6))
        assert last[column].tolist() == (correct / last["n_test"]).tolist()
    assert history.rounds["before"].tolist() != history.rounds["before_global"].tolist()
    assert history.summary()["best"] == history.rounds["after"].max()


def test_stacked_as_in_the_loop(uneven, play):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "batch_size": 4}
    ends = [play(uneven(rule=rule, engine=engine), make("ditto", lam=0.7), 2) for engine in ("loop", "stacked")]
    (loop, rounds), (stacked, others) = ends
    assert trees.unequal((loop.server, loop.kept), (stacked.server, stacked.kept)) < 1e-12
    assert rounds[-1].flops().tolist() == others[-1].flops().tolist()


def test_the_personal_epochs_cost_as_much_again(digits, play):
    """Training w costs FedAvg's FLOPs; v_i's three epochs cost three times them."""
    fed = digits()
    costs = [
        play(fed, make(name, **s), 1)[1][0].flops() for name, s in (("ditto", {"personal_epochs": 3}), ("fedavg", {}))
    ]
    assert costs[0].tolist() == (4 * costs[1]).tolist()
