"""FedAH: each client starts its head from a learned mix of its own head and the global one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedah, fedrep, make

REFERENCE = Path(__file__).parents[1] / "reference"


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lr", "W", "mixed"), [(1.0, [0.5, 1.0], [0.5, 2.0]), (0.1, [0.95, 1.0], [0.95, 2.0])])
def test_one_weight_step(by_hand, two_number_head, monkeypatch, lr, W, mixed):
    """Own head (0, 0), global head (1, 2), loss ½|ĥ − (.5, 3)|², W = 1: ∂L/∂W = (.5, −1) ⊙ (1, 2) = (.5, −2)."""
    target = torch.tensor([0.5, 3.0], dtype=torch.float64)
    monkeypatch.setattr(fedah, "head_loss", lambda model, h, batch: ((h["h"] - target) ** 2).sum() / 2)
    fed = by_hand(two_number_head, [([[1.0]], [0])], rule={"epochs": 0})
    method = make("fedah", weight_lr=lr, head_epochs=0)
    state = fed.start(method)
    state.server = ({}, {"h": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    result = fed.play(method, state, 1)
    torch.testing.assert_close(state.kept["W"]["h"][0], torch.tensor(W, dtype=torch.float64))
    torch.testing.assert_close(result.held[1]["h"][0], torch.tensor(mixed, dtype=torch.float64))
    assert state.kept["head"]["h"].tolist() == result.held[1]["h"].tolist()


def test_a_round_on_one_number(by_hand, scalar_net):
    """Logits (0, h r), r = 1, label 0: ∂L/∂s = σ(s). Own head −1, global head 1, W = 1, all rates .5.

    W = 1 − .5·σ(1)·2, ĥ = −1 + 2W, then h = ĥ − .5·σ(ĥ)·r, then r = 1 − .5·σ(h)·h.
    """

    def sigma(s):
        return 1 / (1 + math.exp(-s))

    fed = by_hand(scalar_net(1, -1, classes=2), [([[1.0]], [0])], rule={"lr": 0.5})
    method = make("fedah", weight_lr=0.5)
    state = fed.start(method)
    state.server = (fed.init()[0], {"weight": torch.ones(1, dtype=torch.float64)})
    W = 1 - sigma(1)
    mixed = 2 * W - 1
    head = mixed - 0.5 * sigma(mixed)
    extractor = 1 - 0.5 * sigma(head) * head
    assert fed.deployed(method, state, 1)[1]["weight"].item() == pytest.approx(mixed, abs=1e-12)
    fed.play(method, state, 1)
    assert state.kept["W"]["weight"].item() == pytest.approx(W, abs=1e-12)
    assert state.kept["head"]["weight"].item() == pytest.approx(head, abs=1e-12)
    assert state.server[0]["weight"].item() == pytest.approx(extractor, abs=1e-12)
    assert state.server[1]["weight"].item() == pytest.approx(head, abs=1e-12)


# --- the released code's steps, and the paper's rounds ---------------------------------------------------------------


@pytest.fixture(params=["1", "0.05"])
def recorded(request):
    """Inputs and outputs recorded from released code (reference/README.md), and the rate of W they were made with."""
    with np.load(REFERENCE / f"fedah_head_eta{request.param}.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file}
    heads = {name: {k: arrays[f"{name}_{k}"] for k in ("weight", "bias")} for name in ("local", "global", "W0")}
    expected = {name: {k: arrays[f"{name}_{k}"] for k in ("weight", "bias")} for name in ("W", "head")}
    return arrays["z"], arrays["y"], heads, expected, float(request.param), int(arrays["epochs"])


def test_weight_step_gives_the_recorded_weights(recorded):
    z, y, heads, expected, lr, epochs = recorded
    W = heads["W0"]
    for _ in range(epochs):
        for rows in torch.arange(len(y)).split(10):
            W = fedah.weight_step(W, heads["local"], heads["global"], z[rows], y[rows], lr)
    assert trees.unequal(W, heads["W0"]) > 1e-3
    assert trees.unequal(W, expected["W"]) < 1e-12
    assert trees.unequal(fedah.aggregate_head(heads["local"], heads["global"], W), expected["head"]) < 1e-12


def test_the_method_gives_the_recorded_weights(recorded, by_hand, in_order):
    z, y, heads, expected, lr, epochs = recorded
    fed = by_hand(models.from_modules(nn.Identity(), nn.Linear(8, 5), (8,), 5), [(z, y.tolist())], rule={"epochs": 0})
    clients, one = fed.clients(np.array([0]), 1, 1), {name: trees.repeat(head, 1) for name, head in heads.items()}
    fed.train = [(z, y)]
    method = make("fedah", weight_lr=lr, weight_epochs=epochs, head_epochs=0)
    kept, _, held = method.local(clients, {"head": one["local"], "W": one["W0"]}, ({}, one["global"]))
    assert trees.unequal(trees.row(kept["W"], 0), expected["W"]) < 1e-12
    assert trees.unequal(trees.row(held[1], 0), expected["head"]) < 1e-12


def test_three_rounds_in_plain_torch(uneven, plain, play, in_order):
    """Steps 1 to 7 by autograd and torch.optim; from round 2 on own and global heads differ, so W moves."""
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    method = make("fedah", weight_lr=2.0, weight_epochs=2, head_epochs=3)
    state, _ = play(fed := uneven(rule=rule), method, 3)
    (r, h), own = fed.init(), [fed.init()[1]] * 4
    W = [{k: torch.ones_like(v) for k, v in h.items()} for _ in range(4)]
    for _ in range(3):
        peers = [plain(fed, i).load(r) for i in range(4)]
        for i, peer in enumerate(peers):
            for x, y in peer.batches() * 2:
                mixed = {k: (own[i][k] + (h[k] - own[i][k]) * W[i][k]).requires_grad_() for k in h}
                logits = peer.r(x).detach() @ mixed["weight"].T + mixed["bias"]
                nn.functional.cross_entropy(logits, y).backward()
                W[i] = {k: (W[i][k] - 2.0 * mixed[k].grad * (h[k] - own[i][k])).clamp(0, 1) for k in h}
            peer.load(h={k: own[i][k] + (h[k] - own[i][k]) * W[i][k] for k in h})
            peer.train(peer.h, epochs=3).train(peer.r, epochs=2)
        extractors, own = zip(*(peer.state() for peer in peers), strict=True)
        r, h = (peers[0].mean(part, [1, 7, 10, 11]) for part in (extractors, own))
    assert min(float(W[i]["weight"].min()) for i in range(4)) < 0.5  # weights have really been learned
    assert trees.unequal(state.server, (r, h)) < 1e-11
    for i in range(4):
        assert trees.unequal(trees.row(state.kept, i), {"head": own[i], "W": W[i]}) < 1e-11


# --- limits ----------------------------------------------------------------------------------------------------------


def test_w_zero_is_fedrep(digits, play):
    """W = 0 and η_w = 0: r and all heads go FedRep's way, to the bit; the global head is averaged but unused."""
    fed = digits(join_ratio=0.5)
    (ah, rounds), (rep, others) = (
        play(fed, method, 4) for method in (make("fedah", weight_init=0.0, weight_lr=0.0), make("fedrep"))
    )
    assert trees.unequal(ah.server[0], rep.server) == 0
    assert trees.unequal(ah.kept["head"], rep.kept) == 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held, theirs.held) == 0
    assert trees.unequal(rep.server, fed.init()[0]) > 0


def test_w_one_takes_the_global_head(digits, play):
    """W = 1 and η_w = 0: ĥ = h^t to the bit, though the client's own head is another."""
    fed, method = digits(join_ratio=0.5), make("fedah", weight_lr=0.0)
    state, _ = play(fed, method, 3)
    extractor, head = fed.deployed(method, state, 4)
    for i in range(6):
        assert trees.unequal(trees.row(head, i), state.server[1]) == 0
        assert trees.unequal(trees.row(extractor, i), state.server[0]) == 0
        assert trees.unequal(trees.row(state.kept["head"], i), state.server[1]) > 0


def test_no_training_is_an_identity_round(digits, play):
    """E_h = E = 0 and W = 1."""
    fed = digits(join_ratio=0.5, rule={"epochs": 0})
    state, _ = play(fed, make("fedah", weight_lr=1.0, head_epochs=0), 3)
    assert trees.unequal(state.server, fed.init()) == 0


def test_w_unchanged_where_own_and_global_head_agree(digits, play):
    """The first round: h^0 = h_i, so ∂L/∂W = 0 whatever the rate and the start."""
    fed = digits()
    for start in (1.0, 0.3):
        state, _ = play(fed, make("fedah", weight_lr=1e6, weight_init=start), 1)
        assert trees.unequal(state.kept["W"], trees.full_like(state.kept["W"], start)) == 0


@pytest.mark.parametrize("weight_lr", [0.005, 1.0, 1e4])
def test_w_stays_within_0_and_1(digits, play, weight_lr):
    fed = digits()
    state, _ = play(fed, make("fedah", weight_lr=weight_lr, weight_epochs=2), 4)
    W = torch.cat([leaf.flatten() for leaf in trees.leaves(state.kept["W"])])
    assert (W.min() >= 0) and (W.max() <= 1) and (W < 1).any()
    if weight_lr == 1e4:  # steps that large end at either bound
        assert (W == 0).any() and (W == 1).any()


def test_a_larger_weight_rate_moves_w_more(digits, play):
    """The paper's rate, .005, hardly moves W; the released code's, 1, does: 200 times as far in the first steps."""
    fed = digits(rule={"batch_size": 1000}, dtype=torch.float64)
    moved = [1 - play(fed, make("fedah", weight_lr=lr), 2)[0].kept["W"]["bias"] for lr in (1e-6, 2e-6)]
    inside = (moved[0] > 0) & (moved[1] > 0)
    assert inside.any()
    torch.testing.assert_close(moved[1][inside], 2 * moved[0][inside], rtol=1e-6, atol=1e-12)


def test_the_extractor_stands_still_until_its_own_phase(by_hand, linear, play):
    """Steps 1 to 3, with momentum, decay and batch-norm about: what is uploaded is r^t, to the last buffer."""
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.BatchNorm1d(3)), linear(3, 2), (2,), 2)
    clients = [(torch.linspace(-1, k, 24).reshape(12, 2), [0, 1] * 6) for k in (1, 5)]
    fed = by_hand(net, clients, rule={"epochs": 0, "momentum": 0.9, "weight_decay": 0.1, "lr": 0.1})
    state, rounds = play(fed, make("fedah", weight_lr=1.0), 3)
    for result in rounds:
        assert all(trees.unequal(trees.row(result.held[0], i), fed.init()[0]) == 0 for i in range(2))
    assert trees.unequal(state.server[0], fed.init()[0]) == 0
    assert trees.unequal(state.kept["W"], trees.full_like(state.kept["W"], 1.0)) > 0


def test_weight_learning_has_no_momentum_decay_or_clipping(uneven):
    """W's rule is the paper's plain step, whatever the optimizer of the model's parts."""
    weights = []
    for rule in ({}, {"momentum": 0.9, "weight_decay": 0.5, "clip": 1e-3}):
        fed, everyone = uneven(rule={"lr": 0.1, **rule}), np.arange(4)
        extractor, top = trees.repeat(fed.init(), 4)
        kept = {"head": trees.full_like(top, 0.1), "W": trees.full_like(top, 0.9)}
        behind = fed.clients(everyone, 2, 2).through(extractor)
        weights.append(make("fedah", weight_lr=0.5, weight_epochs=3).mix(behind, kept, top)[0])
    assert trees.unequal(*weights) == 0
    assert trees.unequal(weights[0], trees.full_like(top, 0.9)) > 0


@pytest.mark.parametrize(("model", "layers"), [("mlp", 0), ("mlp", 2), ("cnn-small", 0), ("cnn-small", 4)])
def test_any_cut_of_the_model_works(digits, play, in_order, model, layers):
    """No head at all: FedAvg. No extractor: a FedAvg whose clients start from a mix, for W = 1 FedAvg itself."""
    fed = digits(model, head_layers=layers, join_ratio=0.5)
    ah, avg = (play(fed, method, 2)[0] for method in (make("fedah", weight_lr=0.0), make("fedavg")))
    assert trees.unequal(ah.server, avg.server) == 0


def test_absent_clients_keep_head_and_weights(digits, play):
    """Released code mixes absent clients' heads too, round after round."""
    fed, method = digits(join_ratio=0.3), make("fedah", weight_lr=1.0)
    state = fed.start(method)
    for _ in range(5):
        before = trees.clone(state.kept)
        fed.deployed(method, state, 5)
        ids = fed.play(method, state, 5).ids
        absent = [i for i in range(6) if i not in ids]
        assert trees.unequal(trees.take(state.kept, absent), trees.take(before, absent)) == 0
        assert trees.unequal(trees.take(state.kept, ids), trees.take(before, ids)) > 0


def test_before_is_the_mix_that_training_starts_from(digits, play):
    """`deploy` for the next round and steps 2 and 3 of that round are one computation, on the same batches."""
    fed, method = digits(rule={"epochs": 0}), make("fedah", weight_lr=1.0, head_epochs=0)
    moving = digits()
    state, _ = play(moving, make("fedah", weight_lr=1.0), 2)
    deployed = fed.deployed(method, state, 3)
    assert trees.unequal(fed.play(method, state, 3).held, deployed) == 0
    assert trees.unequal(deployed[1], trees.expand(state.server[1], 6)) > 0


def test_heads_of_different_clients_do_not_mix(digits, play):
    """FL-bench's clients share one worker's head and W: the second starts from the first one's. Here both differ."""
    state, _ = play(digits(), make("fedah", weight_lr=1.0), 3)
    for part in ("head", "W"):
        rows = [trees.row(state.kept[part], i) for i in range(6)]
        assert all(trees.unequal(rows[0], other) > 0 for other in rows[1:])


def test_both_losses_are_one_function_of_the_head(linear):
    """weights_loss(W) is head_loss at the mixed head; its slope is ∂L/∂ĥ ⊙ (h^t − h_i), what weight_step uses."""
    net = models.from_modules(nn.Identity(), linear(4, 3), (4,), 3)
    own, top = net.init()[1], trees.tree_map(lambda t: t.flip(0), net.init()[1])
    W, batch = trees.full_like(own, 0.5), (torch.linspace(-1, 1, 8).reshape(2, 4), torch.tensor([0, 2]))
    loss = fedah.weights_loss(net, W, batch, own, top)
    assert loss == fedrep.head_loss(net, fedah.aggregate_head(own, top, W), batch)
    slope = torch.func.grad(lambda w: fedah.weights_loss(net, w, batch, own, top))(W)
    stepped = fedah.weight_step(W, own, top, *batch, lr=0.01)
    assert trees.unequal(stepped, trees.tree_map(lambda w, g: w - 0.01 * g, W, slope)) < 1e-6
