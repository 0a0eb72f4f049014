"""Local: everyone trains alone."""

import pytest
import torch

from pflkit import models, trees
from pflkit.methods import local, make


def test_three_steps_on_a_quadratic(by_hand, scalar_net, play, monkeypatch):
    """f = ½(w − c)² with rate η: w_k = c + (1 − η)^k (w_0 − c); η = .5, c = 4, w_0 = 0, k = 3 gives 3.5."""
    monkeypatch.setattr(local, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean() / 2)
    fed = by_hand(scalar_net(0, 1), [([[4.0]], [0])], rule={"lr": 0.5})
    state, rounds = play(fed, make("local"), 3)
    assert [result.held[0]["weight"].item() for result in rounds] == [2.0, 3.0, 3.5]
    assert state.kept[0]["weight"].tolist() == [[3.5]]
    assert fed.deployed(make("local"), state, 3)[0]["weight"].tolist() == [[3.5]]


def test_everyone_trains_at_any_join_ratio(digits, play):
    (all_join, _), (few_join, rounds) = (play(digits(join_ratio=ratio), make("local"), 2) for ratio in (1.0, 0.2))
    assert rounds[0].ids.tolist() == list(range(6))
    assert trees.unequal(all_join.kept, few_join.kept) == 0


def test_those_who_are_sampled_train_alone_if_told_so(digits, play):
    fed = digits(join_ratio=0.5)
    (state, rounds), whole = play(fed, make("local", everyone=False), 1), play(fed, make("local"), 1)[0]
    (ids,) = (result.ids.tolist() for result in rounds)
    assert ids == fed.sample(1).tolist() and len(ids) == 3
    for i in range(6):
        want = trees.row(whole.kept, i) if i in ids else fed.init()
        assert trees.unequal(trees.row(state.kept, i), want) == 0


def test_one_client_is_fedavg_of_one(by_hand, scalar_net, play):
    samples = [(torch.linspace(-2, 2, 23)[:, None], [0, 1] * 11 + [1])]
    fed = by_hand(scalar_net(0.7, 0.3, classes=2), samples, rule={"lr": 0.1})
    alone, averaged = (play(fed, make(name), 3)[0] for name in ("local", "fedavg"))
    assert trees.unequal(trees.row(alone.kept, 0), averaged.server) == 0


def test_a_client_does_not_depend_on_others_data(by_hand, linear, play):
    """The same client 0, beside another with other data and another size."""
    net = models.from_modules(linear(2, 3), linear(3, 2), (2,), 2)
    mine = torch.linspace(-1, 1, 34).reshape(17, 2), [0, 1] * 8 + [1]
    feds = [by_hand(net, [mine, (torch.full((n, 2), float(n)), [0] * n)]) for n in (5, 31)]
    ends = [play(fed, make("local"), 2)[0].kept for fed in feds]
    assert trees.unequal(trees.row(ends[0], 0), trees.row(ends[1], 0)) == 0
    assert trees.unequal(trees.row(ends[0], 1), trees.row(ends[1], 1)) > 0


def test_all_start_where_fedavg_does(digits):
    fed = digits()
    kept = fed.start(make("local")).kept
    assert all(trees.unequal(trees.row(kept, i), fed.start(make("fedavg")).server) == 0 for i in range(6))


@pytest.mark.parametrize("drop_last", [False, True])
def test_one_round_in_plain_torch(uneven, plain, play, in_order, drop_last):
    fed = uneven(rule={"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "drop_last": drop_last})
    state, _ = play(fed, make("local"), 1)
    for i in range(4):
        peer = plain(fed, i)
        peer.train(peer.r, peer.h, epochs=2)
        assert trees.unequal(trees.row(state.kept, i), peer.state()) < 1e-12
    moved = [trees.unequal(trees.row(state.kept, i), fed.init()) > 0 for i in range(4)]
    assert moved == [not drop_last, not drop_last, True, True]  # of 1, 7, 10 and 11 samples in batches of 10
