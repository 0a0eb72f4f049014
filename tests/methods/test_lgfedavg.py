"""LG-FedAvg: private extractors under one averaged head, trained together."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, training, trees
from pflkit.methods import lgfedavg, make


@pytest.mark.parametrize(("weighted", "mean"), [(True, 2.5), (False, 2.0)])
def test_heads_are_averaged(weighted, mean):
    """1 and 3 with n = (1, 3)."""
    heads, ids, n = {"weight": torch.tensor([[1.0], [3.0]])}, np.arange(2), np.array([1, 3])
    assert make("lgfedavg", weighted=weighted).merge({}, ids, {}, heads, n)["weight"].tolist() == [mean]


def test_joint_step_on_squared_loss(by_hand, scalar_net, play, monkeypatch):
    """y = h r x, loss ½(y − 1)², x = 1, r = 1, h = 0, η = .5: both gradients at the start, so r = 1 and h = .5."""
    monkeypatch.setattr(lgfedavg, "model_loss", lambda model, p, b: ((model.predict(p, b[0]) - 1) ** 2).mean() / 2)
    state, _ = play(by_hand(scalar_net(1, 0), [([[1.0]], [0])], rule={"lr": 0.5}), make("lgfedavg"), 1)
    assert (state.kept["weight"].tolist(), state.server["weight"].tolist()) == ([[1.0]], [0.5])


@pytest.mark.parametrize(("weighted", "shares"), [(True, (1 / 4, 3 / 4)), (False, (1 / 2, 1 / 2))])
def test_one_round_on_cross_entropy(by_hand, scalar_net, play, weighted, shares):
    """Logits (0, h r x), r = h = 1, x = 1, η = .5; labels 1 and 0: r_i and h_i move by .5 σ(−1) up and .5 σ(1) down."""
    clients = [([[1.0]], [1]), ([[1.0]] * 3, [0] * 3)]
    fed = by_hand(scalar_net(1, 1, classes=2), clients, rule={"lr": 0.5})
    state, _ = play(fed, make("lgfedavg", weighted=weighted), 1)
    ends = 1 + 0.5 / (1 + math.e), 1 - 0.5 / (1 + math.exp(-1))
    assert state.kept["weight"].flatten().tolist() == pytest.approx(ends)
    assert state.server["weight"].item() == pytest.approx(shares[0] * ends[0] + shares[1] * ends[1])


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, ratio, weighted):
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    fed = uneven(rule=rule, join_ratio=ratio)
    state, rounds = play(fed, make("lgfedavg", weighted=weighted), 3)
    extractors, g = [fed.init()[0]] * 4, fed.init()[1]
    for result in rounds:
        heads = []
        for k, i in enumerate(result.ids):
            peer = plain(fed, i).load(extractors[i], g)
            extractors[i], head = peer.train(peer.r, peer.h, epochs=2).state()
            heads.append(head)
            assert trees.unequal(trees.row(result.held, k), (extractors[i], head)) < 1e-12
        g = peer.mean(heads, [fed.n[i] if weighted else 1 for i in result.ids])
    assert trees.unequal(state.server, g) < 1e-12
    assert all(trees.unequal(trees.row(state.kept, i), extractors[i]) < 1e-12 for i in range(4))


def test_two_rounds_with_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread):
    """The head's statistics are averaged with it, its counter rounded; the extractor's stay with the client."""
    head = nn.Sequential(nn.BatchNorm1d(4), linear(4, 2))
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), head, (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "batch_size": 4, "epochs": 2})
    state, _ = play(fed, make("lgfedavg"), 2)
    extractors, h = [fed.init()[0]] * 3, fed.init()[1]
    for _ in range(2):
        peers = [plain(fed, i).load(extractors[i], h) for i in range(3)]
        extractors, heads = zip(*(p.train(p.r, p.h, epochs=2).state() for p in peers), strict=True)
        h = peers[0].mean(heads, sizes)
        h["0.num_batches_tracked"] = h["0.num_batches_tracked"].round().long()
    assert trees.unequal(state.server, h) < 1e-12
    assert all(trees.unequal(trees.row(state.kept, i), extractors[i]) < 1e-12 for i in range(3))
    assert state.server["0.num_batches_tracked"].dtype == torch.int64
    assert state.kept["1.num_batches_tracked"].tolist() == [4, 8, 12]  # 1, 2 and 3 batches, 2 epochs, 2 rounds


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "layers"), [("mlp", 2), ("cnn-small", 4)])
def test_all_global_is_fedavg(digits, play, model, layers):
    """To the bit."""
    fed = digits(model, head_layers=layers, join_ratio=0.5, rule={"momentum": 0.9})
    (lg, rounds), (avg, others) = (play(fed, make(name), 3) for name in ("lgfedavg", "fedavg"))
    assert trees.unequal(lg.server, avg.server[1]) == 0
    assert trees.unequal(lg.server, fed.init()[1]) > 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held, theirs.held) == 0
        assert ours.bytes_up.tolist() == theirs.bytes_up.tolist()


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_nothing_global_is_local(digits, play, model):
    """To the bit, and nothing travels."""
    fed = digits(model, head_layers=0, rule={"momentum": 0.9})
    (lg, rounds), (local, others) = (play(fed, make(name), 3) for name in ("lgfedavg", "local"))
    assert trees.unequal(lg.kept, local.kept[0]) == 0
    assert trees.unequal(lg.kept, trees.expand(fed.init()[0], 6)) > 0
    assert all(trees.unequal(ours.held, theirs.held) == 0 for ours, theirs in zip(rounds, others, strict=True))
    assert not sum(r.bytes_up.sum() + r.bytes_down.sum() for r in rounds)


def test_one_client_is_local(by_hand, linear, play):
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.ReLU()), linear(3, 2), (2,), 2)
    fed = by_hand(net, [(torch.linspace(-1, 1, 46).reshape(23, 2), [0, 1] * 11 + [1])], rule={"lr": 0.1})
    lg, local = (play(fed, make(name), 3)[0] for name in ("lgfedavg", "local"))
    assert trees.unequal((trees.row(lg.kept, 0), lg.server), trees.row(local.kept, 0)) == 0


# --- what is private, and what is global -----------------------------------------------------------------------------


def test_extractors_are_private(by_hand, linear, play):
    """Client 0's is untouched by the server, and in round 1 by what others train on; in round 2 the head tells."""
    net, g = models.from_modules(linear(2, 3), linear(3, 2), (2,), 2), torch.Generator().manual_seed(0)
    mine = torch.randn(17, 2, generator=g), [0, 1] * 8 + [1]
    feds = [by_hand(net, [mine, (torch.full((n, 2), float(n)), [0] * n)], rule={"lr": 0.1}) for n in (5, 31)]
    for rounds, same in ((1, True), (2, False)):
        ends = [play(fed, make("lgfedavg"), rounds)[0] for fed in feds]
        assert (trees.unequal(*(trees.row(state.kept, 0) for state in ends)) == 0) == same
        assert trees.unequal(ends[0].server, ends[1].server) > 0


def test_before_is_the_own_extractor_under_the_servers_head(digits, play):
    """For those that were not sampled too; and training starts from it."""
    fed, method = digits(join_ratio=0.5), make("lgfedavg")
    state, _ = play(fed, method, 2)
    extractor, head = fed.deployed(method, state, 3)
    assert trees.unequal(extractor, state.kept) == 0
    assert trees.unequal(head, trees.expand(state.server, 6)) == 0
    still = digits(rule={"epochs": 0})
    assert trees.unequal(still.play(method, state, 3).held, (extractor, head)) == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_only_the_top_layers_travel(digits, play, layers):
    """Not the first layers, as in FL-bench, nor the convolutions, as in the released CIFAR network."""
    state, (result,) = play(fed := digits("cnn-small", head_layers=layers, join_ratio=0.5), make("lgfedavg"), 1)
    top = list(fed.model.head.module.named_parameters())
    assert {id(m) for m in fed.model.head.module.modules()}.isdisjoint(map(id, fed.model.extractor.module.modules()))
    assert state.server.keys() == {name for name, _ in top}
    count = sum(p.numel() for _, p in top)
    assert count == (64 * 10 + 10 if layers == 1 else 64 * 10 + 10 + 128 * 64 + 64)
    assert result.bytes_down.tolist() == result.bytes_up.tolist() == [4 * count] * 3


def test_stacked_as_in_the_loop(digits, play):
    ends = [play(digits(engine=e, dtype=torch.float64), make("lgfedavg"), 3)[0] for e in ("loop", "stacked")]
    assert trees.unequal(*((state.server, state.kept) for state in ends)) < 1e-10


# --- different models ------------------------------------------------------------------------------------------------


def test_all_models_start_under_one_head(five):
    fed = five("mlp")
    for g, (_, head) in enumerate(fed.deployed(make("lgfedavg"), fed.start(make("lgfedavg")), 1)):
        assert trees.unequal(head, trees.repeat(fed.init()[1], len(fed.groups[g].ids))) == 0


def test_the_mean_is_over_all_models(five, play):
    fed = five("mlp")
    state, (result,) = play(fed, make("lgfedavg"), 1)
    heads = [None] * 6
    for (_, at, _), (_, head) in zip(fed.by_group(result.ids), result.held, strict=True):
        for k, j in enumerate(at):
            heads[j] = trees.row(head, k)
    assert trees.unequal(state.server, trees.average(trees.stack(heads), fed.n)) == 0


def test_heads_of_two_layers_on_different_extractors(five, by_hand):
    """CNN-1 and CNN-2 differ below their last two layers: 2000 units, 500 features."""
    clients = five("cnn").train
    nets = [models.build(f"cnn-{k}", (1, 16, 16), 3, head_layers=2) for k in (1, 2)]
    fed = by_hand(nets[0], [(x, y.tolist()) for x, y in clients], dtype=torch.float32)
    fed = type(fed)(fed.dataset, fed.partition, nets, training=fed.training, join_ratio=0.5)
    history = experiment.run(make("lgfedavg"), fed, 1)
    assert history.summary()["bytes_up"] == 4 * 4 * (2000 * 500 + 500 + 500 * 3 + 3)


def narrow(bias=True, features=64):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, features))
    return models.from_modules(body, nn.Linear(features, 10, bias=bias), (1, 8, 8), 10)


@pytest.mark.parametrize(
    "nets",
    [
        [models.build(f"mlp-{k}", (1, 8, 8), 10, head_layers=2) for k in (1, 2)],
        [models.build("mlp", (1, 8, 8), 10), models.build("mlp", (1, 8, 8), 10, head_layers=0)],
        [models.build("mlp", (1, 8, 8), 10), narrow(features=32)],
        [models.build("mlp", (1, 8, 8), 10), narrow(bias=False)],
    ],
)
def test_different_heads_are_refused(digits, monkeypatch, nets):
    """By one line, before any training."""
    monkeypatch.setattr(training.Clients, "sgd", lambda *args, **named: pytest.fail("trained"))
    says = rf"^model='{nets[1].name}': LGFedAvg needs heads of the same shapes in all models; this one's is {{.*"
    with pytest.raises(ValueError, match=says) as refused:
        experiment.run(make("lgfedavg"), digits(nets), 1)
    assert "\n" not in str(refused.value)
