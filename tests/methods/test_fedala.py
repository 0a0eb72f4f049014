"""FedALA: each client starts from the global model, its top layers a learned mix with the client's own."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedah, fedala, make

REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.fixture
def two_numbers(by_hand, two_number_head, monkeypatch):
    """A function that makes a Federation of `clients` with own head (0, 0), who do not train, and the state in which
    the server's is (1, 2), with `loss` of the mixed head and features in the place of the cross-entropy.
    """

    def start(method, loss, clients=1, x=((1.0,),), batch_size=10):
        monkeypatch.setattr(fedah, "head_loss", lambda model, h, batch: loss(h["h"], batch[0]))
        fed = by_hand(two_number_head, [(x, [0] * len(x))] * clients, rule={"epochs": 0, "batch_size": batch_size})
        state = fed.start(method)
        state.server[1]["h"] = torch.tensor([1.0, 2.0], dtype=torch.float64)
        return fed, state

    return start


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize(("lr", "W", "mixed"), [(0.1, [0.95, 1.0], [0.95, 2.0]), (1.0, [0.5, 1.0], [0.5, 2.0])])
def test_one_weight_step(two_numbers, began, lr, W, mixed):
    """Own (0, 0), global (1, 2), loss ½|ĥ − (.5, 3)|², W = 1: ∂L/∂W = (.5, −1) ⊙ (1, 2) = (.5, −2), clipped at 1."""
    target = torch.tensor([0.5, 3.0], dtype=torch.float64)
    method = make("fedala", weight_lr=lr, start_epochs=1)
    fed, state = two_numbers(method, lambda h, z: ((h - target) ** 2).sum() / 2)
    state.kept["began"][:] = began
    result = fed.play(method, state, 1)
    assert state.kept["W"]["h"][0].tolist() == pytest.approx(W, abs=1e-15)
    assert result.held[1]["h"][0].tolist() == pytest.approx(mixed, abs=1e-15)
    assert state.kept["head"]["h"].tolist() == result.held[1]["h"].tolist()


def test_heads_whose_differences_cancel_are_different(two_numbers):
    """Own (0, 0), global (1, −1): the released code's sum of differences is 0, and it would not learn."""
    method = make("fedala", weight_lr=0.1, start_epochs=1)
    fed, state = two_numbers(method, lambda h, z: h.sum())
    state.server[1]["h"][:] = torch.tensor([1.0, -1.0])
    fed.play(method, state, 1)
    assert state.kept["W"]["h"][0].tolist() == pytest.approx([0.9, 1.0])
    assert state.kept["began"].tolist() == [True]


def test_differ_looks_at_every_element():
    a = {"weight": torch.zeros(3, 2, 2), "bias": torch.zeros(3, 2)}
    b = trees.clone(a)
    b["weight"][0, 1, 1] = 1e-9
    b["bias"][2] = torch.tensor([1.0, -1.0])
    assert fedala.differ(a, b).tolist() == [True, False, True]


# --- how long weights are learned ------------------------------------------------------------------------------------


def first_stable(losses):
    """The number of epochs, more than ten, after which the last ten mean losses deviate by less than .1."""
    return next(k for k in range(11, len(losses)) if np.std(losses[k - 10 : k]) < 0.1)


# With the loss s ĥ_1 and heads 1 apart, every epoch lowers the first weight by η_w s, and the loss by η_w s².


@pytest.mark.parametrize(("limit", "epochs"), [(4, 4), (10, 10), (11, 11), (100, 11)])
def test_a_loss_that_hardly_moves_is_stable_after_eleven_epochs(two_numbers, limit, epochs):
    method = make("fedala", weight_lr=0.01, start_epochs=limit)
    fed, state = two_numbers(method, lambda h, z: h[0])
    fed.play(method, state, 1)
    assert state.kept["W"]["h"][0].tolist() == pytest.approx([1 - 0.01 * epochs, 1.0], abs=1e-14)


@pytest.mark.parametrize(("scale", "lr"), [(1.0, 0.05), (2.0, 0.02), (10.0, 0.002), (30.0, 0.002)])
def test_the_first_time_lasts_until_the_loss_is_stable(two_numbers, scale, lr):
    """Its mean losses are s, s − η_w s², ... down to 0 at W = 0; the last ten must deviate by less than .1."""
    method = make("fedala", weight_lr=lr)
    fed, state = two_numbers(method, lambda h, z: scale * h[0])
    fed.play(method, state, 1)
    losses = np.maximum(scale - lr * scale**2 * np.arange(100), 0)
    epochs = first_stable(losses)
    assert state.kept["W"]["h"][0, 0].item() == pytest.approx(max(0, 1 - lr * scale * epochs), abs=1e-12)


def test_stability_is_of_the_mean_loss_over_samples(two_numbers, in_order):
    """Batches of 2 and 1, losses 1.5 ĥ_1 and 0, so the mean is ĥ_1, which falls by .04: not stable in eleven epochs.

    The mean over batches, .75 ĥ_1, and the last batch's loss, 0, would be.
    """
    method = make("fedala", weight_lr=0.04 / 1.5, share=1.0)
    fed, state = two_numbers(method, lambda h, z: 1.5 * z.mean() * h[0], x=[[1.0], [1.0], [0.0]], batch_size=2)
    fed.play(method, state, 1)
    epochs = first_stable(np.maximum(1 - 0.04 * np.arange(100), 0))
    assert epochs > 20 and first_stable(0.75 * np.maximum(1 - 0.04 * np.arange(100), 0)) == 11
    assert state.kept["W"]["h"][0, 0].item() == pytest.approx(max(0, 1 - 0.04 * epochs), abs=1e-12)


def test_a_loss_that_never_settles_stops_at_the_limit(two_numbers):
    """½(ĥ − .4)² with huge steps: W goes 0, 1, 0, ..., the loss .08, .18, ...; scaled by 10, the deviation is .5."""
    for limit, end in ((12, 1.0), (15, 0.0)):
        method = make("fedala", weight_lr=1e6, start_epochs=limit)
        fed, state = two_numbers(method, lambda h, z: 5 * (h[0] - 0.4) ** 2)
        fed.play(method, state, 1)
        assert state.kept["W"]["h"][0, 0].item() == end


def test_later_weights_are_learned_for_one_epoch(two_numbers):
    """Each in its own time: client 1 has begun before client 0 does. Per round, heads are set 1 apart again."""
    method = make("fedala", weight_lr=0.01)
    fed, state = two_numbers(method, lambda h, z: h[0], clients=2)
    state.kept["began"][1] = True
    for epochs in ([11, 1], [12, 2], [13, 3]):
        state.server[1]["h"][:] = torch.tensor([1.0, 2.0])
        state.kept["head"]["h"][:] = 0
        fed.play(method, state, 3)
        assert state.kept["W"]["h"][:, 0].tolist() == pytest.approx([1 - 0.01 * k for k in epochs], abs=1e-14)
        assert state.kept["began"].tolist() == [True, True]


def test_nothing_is_learned_while_own_and_global_head_agree(two_numbers):
    """Neither counts as a beginning: W as it was, whatever it is, and ĥ the global head to the bit."""
    method = make("fedala", weight_lr=1e6)
    fed, state = two_numbers(method, lambda h, z: h[0] ** 2, clients=2)
    state.kept["head"]["h"][:] = state.server[1]["h"]
    trees.put(state.kept["W"], [0, 1], trees.full_like(state.kept["W"], 0.3))
    result = fed.play(method, state, 1)
    assert trees.unequal(state.kept["W"], trees.full_like(state.kept["W"], 0.3)) == 0
    assert state.kept["began"].tolist() == [False, False]
    assert result.held[1]["h"].tolist() == [[1.0, 2.0]] * 2
    assert "weights" not in result.log()


def test_round_1_is_idle(digits, play):
    """All start from one model. In round 2 those that trained in round 1 have another head, and so have the others."""
    fed, method = digits(join_ratio=0.5), make("fedala")
    state, (first,) = play(fed, method, 1)
    avg, (plain,) = play(fed, make("fedavg"), 1)
    assert trees.unequal(state.server, avg.server) == 0
    assert trees.unequal(first.held, plain.held) == 0
    assert not state.kept["began"].any()
    assert trees.unequal(state.kept["W"], trees.full_like(state.kept["W"], 1.0)) == 0
    second = fed.play(method, state, 2)
    assert state.kept["began"].nonzero().flatten().tolist() == second.ids.tolist()


# --- the released code's step, and the paper's rounds ----------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """Inputs and outputs recorded from released code (reference/README.md): layer 0, ReLU, layer 1 is the head."""
    with np.load(REFERENCE / "fedala_one_epoch.npz") as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file}

    def layer(name, at):
        return {k: arrays[f"{name}_{2 * at + j}"] for j, k in enumerate(("weight", "bias"))}

    layers = {name: [layer(name, 0), layer(name, 1)] for name in ("local", "global", "init")}
    return arrays["x"], arrays["y"], layers, layer("W0", 0), layer("W", 0)


def test_mixing_gives_the_recorded_weights(recorded):
    x, y, layers, W, expected = recorded
    own, top = layers["local"][1], layers["global"][1]
    z = torch.relu(nn.functional.linear(x, layers["global"][0]["weight"], layers["global"][0]["bias"]))
    for rows in torch.arange(len(y)).split(10):
        W = fedah.weight_step(W, own, top, z[rows], y[rows], lr=1.0)
    assert trees.unequal(W, recorded[3]) > 1e-2
    assert trees.unequal(W, expected) < 1e-14
    assert trees.unequal(fedah.aggregate_head(own, top, W), layers["init"][1]) < 1e-14
    assert trees.unequal(layers["global"][0], layers["init"][0]) == 0


@pytest.mark.parametrize("settings", [{"start_epochs": 1}, {}])
def test_the_method_gives_the_recorded_weights(recorded, by_hand, in_order, settings):
    """As a first time that is limited to one epoch, and as a later one."""
    x, y, layers, W0, expected = recorded
    net = models.from_modules(nn.Sequential(nn.Linear(6, 7), nn.ReLU()), nn.Linear(7, 4), (6,), 4)
    fed, method = by_hand(net, [(x, y.tolist())], rule={"epochs": 0}), make("fedala", share=1.0, **settings)
    state = fed.start(method)
    state.server = ({f"0.{k}": v for k, v in layers["global"][0].items()}, layers["global"][1])
    trees.put(state.kept["head"], [0], trees.repeat(layers["local"][1], 1))
    trees.put(state.kept["W"], [0], trees.repeat(W0, 1))
    state.kept["began"][:] = not settings
    before = fed.deployed(method, state, 1)
    result = fed.play(method, state, 1)
    assert trees.unequal(trees.row(state.kept["W"], 0), expected) < 1e-14
    for extractor, head in (before, result.held, (trees.expand(state.server[0], 1), state.kept["head"])):
        assert trees.unequal(trees.row(head, 0), layers["init"][1]) < 1e-14
        assert trees.unequal({k[2:]: v[0] for k, v in extractor.items()}, layers["init"][0]) == 0


@pytest.mark.parametrize(("weight_lr", "limit"), [(2.0, 100), (2.0, 5), (300.0, 13)])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, weight_lr, limit):
    """Steps 1 to 6 by autograd and torch.optim: round 2 is everybody's first time, round 3 a later one.

    In order, a share of .8 is each client's first samples: 1, 6, 8 and 9 of 1, 7, 10 and 11, in batches of 4.
    """
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
    method = make("fedala", weight_lr=weight_lr, start_epochs=limit)
    state, _ = play(fed := uneven(rule=rule), method, 3)
    (r, h), own = fed.init(), [fed.init()[1]] * 4
    W = [{k: torch.ones_like(v) for k, v in h.items()} for _ in range(4)]
    lengths = []
    for t in (1, 2, 3):
        peers = [plain(fed, i).load(r) for i in range(4)]
        for i, (peer, some) in enumerate(zip(peers, (1, 6, 8, 9), strict=True)):
            losses = []
            while t > 1:
                total = 0.0
                for x, y in zip(peer.x[:some].split(4), peer.y[:some].split(4), strict=True):
                    mixed = {k: (own[i][k] + (h[k] - own[i][k]) * W[i][k]).requires_grad_() for k in h}
                    logits = peer.r(x).detach() @ mixed["weight"].T + mixed["bias"]
                    loss = nn.functional.cross_entropy(logits, y)
                    loss.backward()
                    W[i] = {k: (W[i][k] - weight_lr * mixed[k].grad * (h[k] - own[i][k])).clamp(0, 1) for k in h}
                    total += loss.item() * len(y)
                losses.append(total / some)
                if t > 2 or len(losses) == limit or (len(losses) > 10 and np.std(losses[-10:]) < 0.1):
                    break
            lengths.append(len(losses))
            peer.load(h={k: own[i][k] + (h[k] - own[i][k]) * W[i][k] for k in h})
            peer.train(peer.r, peer.h, epochs=2)
        extractors, own = zip(*(peer.state() for peer in peers), strict=True)
        r, h = (peers[0].mean(part, [1, 7, 10, 11]) for part in (extractors, own))
    assert lengths[:4] + lengths[8:] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert min(float(W[i]["weight"].min()) for i in range(4)) < 0.5  # weights have really been learned
    assert trees.unequal(state.server, (r, h)) < 1e-11
    for i in range(4):
        kept = {name: trees.row(state.kept[name], i) for name in ("head", "W")}
        assert trees.unequal(kept, {"head": own[i], "W": W[i]}) < 1e-11


def test_the_step_of_w_has_no_momentum_decay_or_clipping(uneven):
    """Whatever the optimizer of the model; `drop_last`, which says what a batch is, holds for it too."""
    weights = []
    for rule in ({}, {"momentum": 0.9, "weight_decay": 0.5, "clip": 1e-3}):
        fed, method = uneven(rule={"lr": 0.1, "epochs": 0, **rule}), make("fedala", weight_lr=0.5, start_epochs=3)
        state = fed.start(method)
        trees.put(state.kept["head"], range(4), trees.full_like(state.kept["head"], 0.1))
        fed.play(method, state, 1)
        weights.append(state.kept["W"])
    assert trees.unequal(*weights) == 0
    assert all(trees.unequal(trees.row(weights[0], i), trees.full_like(fed.init()[1], 1.0)) > 0 for i in range(4))


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "layers"), [("mlp", 1), ("mlp", 2), ("cnn-small", 2)])
def test_w_one_is_fedavg(digits, play, model, layers):
    """W = 1 and η_w = 0, to the bit, whatever the share."""
    fed = digits(model, head_layers=layers, join_ratio=0.5, rule={"momentum": 0.9})
    (ala, rounds), (avg, others) = (play(fed, m, 3) for m in (make("fedala", weight_lr=0.0), make("fedavg")))
    assert trees.unequal(ala.server, avg.server) == 0
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held, theirs.held) == 0
    assert trees.unequal(ala.server, fed.init()) > 0


@pytest.mark.parametrize(("model", "all_layers"), [("mlp", 2), ("cnn-small", 4)])
def test_w_zero_on_all_layers_is_local(digits, play, model, all_layers):
    """p = all, W = 0 and η_w = 0: nobody takes anything from the server, which averages what it gets in vain."""
    fed, method = digits(model, head_layers=all_layers), make("fedala", weight_lr=0.0)
    state = fed.start(method)
    trees.put(state.kept["W"], range(6), trees.full_like(state.kept["W"], 0.0))
    local, others = play(fed, make("local"), 3)
    for theirs in others:
        assert trees.unequal(fed.play(method, state, 3).held, theirs.held) == 0
    assert trees.unequal(state.kept["head"], local.kept[1]) == 0
    assert trees.unequal(fed.deployed(method, state, 4), local.kept) == 0
    assert all(trees.unequal(trees.row(local.kept, 0), trees.row(local.kept, i)) > 0 for i in range(1, 6))


def test_w_zero_and_one_layer_is_fedper(digits, play):
    """W = 0 and η_w = 0 on the last layer: shared extractors under own heads, trained jointly."""
    fed, method = digits(join_ratio=0.5), make("fedala", weight_lr=0.0)
    state = fed.start(method)
    trees.put(state.kept["W"], range(6), trees.full_like(state.kept["W"], 0.0))
    per, others = play(fed, make("fedper"), 3)
    for theirs in others:
        assert trees.unequal(fed.play(method, state, 3).held, theirs.held) == 0
    assert trees.unequal((state.server[0], state.kept["head"]), (per.server, per.kept)) == 0


@pytest.mark.parametrize(("model", "layers", "top"), [("mlp", 1, 1), ("cnn-small", 1, 1), ("cnn-small", 2, 2)])
def test_only_the_top_layers_are_mixed(digits, play, model, layers, top):
    """`head_layers` says how many: two tensors of W for each of them, of its shapes; the rest is the server's."""
    fed, method = digits(model, head_layers=layers), make("fedala", start_epochs=2)
    state, _ = play(fed, method, 2)
    whole = fed.model.init()
    assert len(trees.leaves(whole)) == (4 if model == "mlp" else 8)
    last = [tuple(t.shape) for t in trees.leaves(whole)[-2 * top :]]
    assert [tuple(t.shape[1:]) for t in trees.leaves(state.kept["W"])] == last
    extractor, head = fed.deployed(method, state, 3)
    assert trees.unequal(extractor, trees.expand(state.server[0], 6)) == 0
    for name in head:
        assert trees.unequal(head[name], trees.expand(state.server[1][name], 6)) > 0  # in each of the layers


def test_a_head_with_batch_norm(by_hand, linear, play):
    """Its running statistics and its counter are no elements to weigh: they are taken from the server."""
    net = models.from_modules(linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), linear(4, 2)), (3,), 2)
    g = torch.Generator().manual_seed(0)
    clients = [(3 + 5 * torch.randn(8, 3, generator=g), [0, 1] * 4) for _ in range(2)]
    fed, method = by_hand(net, clients, rule={"lr": 0.1, "batch_size": 4}), make("fedala", start_epochs=3)
    state, _ = play(fed, method, 3)
    _, head = fed.deployed(method, state, 4)
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert trees.unequal(head[name], trees.expand(state.server[1][name], 2)) == 0
        assert (state.kept["W"][name] == 1).all()
    assert state.server[1]["0.num_batches_tracked"].item() == 6
    assert (state.kept["W"]["0.weight"] < 1).any() and (state.kept["W"]["1.weight"] < 1).any()


@pytest.mark.parametrize("weight_lr", [0.1, 1.0, 1e4])
def test_w_stays_within_0_and_1(digits, play, weight_lr):
    state, _ = play(digits(), make("fedala", weight_lr=weight_lr, start_epochs=3), 4)
    W = torch.cat([leaf.flatten() for leaf in trees.leaves(state.kept["W"])])
    assert (W.min() >= 0) and (W.max() <= 1) and (W < 1).any()


# --- the share, and what a round may touch ---------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "counts"), [(0.8, [1, 6, 8, 9]), (0.5, [1, 4, 5, 6]), (1.0, [1, 7, 10, 11])])
def test_the_share_is_of_each_clients_own_samples(uneven, share, counts):
    """Rounded, halves to even, and at least one; distinct samples with their own labels."""
    fed = uneven()
    some = fed.clients(np.arange(4), 2, 2).part(share, "weights")
    assert some.n.tolist() == [len(y) for _, y in some.data] == counts
    for (x, y), (all_x, all_y) in zip(some.data, fed.train, strict=True):
        rows = [int((all_x == sample).all(1).nonzero()) for sample in x]
        assert len(set(rows)) == len(rows)
        assert all_y[rows].tolist() == y.tolist()


def test_the_share_is_drawn_at_random_and_anew_each_round(digits):
    """Not a run of neighbours; other clients and another seed draw otherwise."""

    def drawn(t, ids=range(6), seed=0):
        fed = digits(seed=seed)
        parts = zip(ids, fed.clients(np.array(ids), t, 9).part(0.5, "weights").data, strict=True)
        return [[int((fed.train[i][0] == s).flatten(1).all(1).nonzero()[0]) for s in x] for i, (x, _) in parts]

    assert drawn(2) == drawn(2)
    assert drawn(2, ids=[4]) == [drawn(2)[4]]
    for i in range(6):
        assert len({tuple(drawn(t)[i]) for t in range(1, 9)}) > 1
        assert drawn(2)[i] != drawn(2, seed=1)[i]
    assert any(np.ptp(rows) >= len(rows) for rows in drawn(2))
    samples = range(digits().n[0])
    assert {r for t in range(1, 20) for r in drawn(t, ids=[0])[0]} == set(samples)  # each has its turn


def test_clients_of_one_size_draw_differently(by_hand, linear):
    same = torch.linspace(-1, 1, 60).reshape(20, 3), [0, 1] * 10
    fed = by_hand(models.from_modules(nn.Identity(), linear(3, 2), (3,), 2), [same] * 2)
    (one, _), (other, _) = fed.clients(np.arange(2), 2, 2).part(0.5, "weights").data
    assert not torch.equal(one, other)


def test_weights_are_learned_on_the_share_only(by_hand, linear):
    """Wiping what a round does not draw changes no weight; wiping what it draws does."""
    net, g = models.from_modules(nn.Identity(), linear(3, 2), (3,), 2), torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 3, generator=g, dtype=torch.float64), [0, 1] * 10
    method, ends = make("fedala", share=0.5, start_epochs=3), []
    some = by_hand(net, [(x, y)]).clients(np.array([0]), 1, 1).part(0.5, "weights").data[0][0]
    chosen = torch.stack([(x == sample).all(1) for sample in some]).any(0)
    assert chosen.sum() == 10
    for scale in (torch.ones(20, 1), 1.0 * chosen[:, None], 1.0 * ~chosen[:, None]):
        fed = by_hand(net, [(scale * x, y)], rule={"epochs": 0})
        state = fed.start(method)
        state.server[1]["weight"] += torch.linspace(-1, 1, 6).view(2, 3)
        fed.play(method, state, 1)
        ends.append(state.kept["W"])
    assert trees.unequal(ends[0], ends[1]) == 0
    assert trees.unequal(ends[0], ends[2]) > 1e-3


def test_before_is_the_mix_that_training_starts_from(digits, play):
    """`deploy` and `local` of a round draw one share, and learn the same: a first time and a later one."""
    method, still, moving = make("fedala", start_epochs=4), digits(rule={"epochs": 0}), digits(join_ratio=0.5)
    for rounds in (1, 3):
        state, _ = play(moving, method, rounds)
        assert state.kept["began"].any() == (rounds > 1)
        deployed = still.deployed(method, state, 5)
        assert trees.unequal(deployed[1], trees.expand(state.server[1], 6)) > 0
        assert trees.unequal(still.play(method, state, 5).held, deployed) == 0


def test_absent_clients_keep_head_weights_and_beginning(digits):
    """Released code mixes absent clients' models too, round after round."""
    fed, method = digits(join_ratio=0.3), make("fedala", start_epochs=2)
    state = fed.start(method)
    for t in range(5):
        before = trees.clone(state.kept)
        fed.deployed(method, state, 5)
        ids = fed.play(method, state, 5).ids
        absent = [i for i in range(6) if i not in ids]
        assert trees.unequal(trees.take(state.kept, absent), trees.take(before, absent)) == 0
        for part in ("head", "W") if t else ("head",):
            assert trees.unequal(trees.take(state.kept[part], ids), trees.take(before[part], ids)) > 0


def test_clients_weights_and_heads_do_not_mix(digits, play):
    """FL-bench's clients share one worker's: the second starts from what the first one left. Here all differ."""
    state, _ = play(digits(), make("fedala", start_epochs=2), 3)
    for part in ("head", "W"):
        rows = [trees.row(state.kept[part], i) for i in range(6)]
        assert all(trees.unequal(a, b) > 0 for k, a in enumerate(rows) for b in rows[:k])


def test_an_unchanged_client_starts_in_the_round_in_which_it_joins(digits):
    """A client's first learning is in the first round in which the global head is not its own, so once t > 1."""
    fed, method = digits(join_ratio=0.3), make("fedala", weight_lr=0.1, start_epochs=3)
    state, joined = fed.start(method), set()
    for t in range(1, 6):
        ids = fed.play(method, state, 5).ids.tolist()
        joined |= set(ids) if t > 1 else set()
        assert state.kept["began"].nonzero().flatten().tolist() == sorted(joined)


def test_without_top_layers_it_is_fedavg(digits, play):
    fed = digits(head_layers=0, join_ratio=0.5)
    assert trees.unequal(play(fed, make("fedala"), 2)[0].server, play(fed, make("fedavg"), 2)[0].server) == 0
