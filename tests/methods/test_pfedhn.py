"""pFedHN: a hypernetwork that generates all models, and learns from how far training takes them."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, trees
from pflkit.methods import make, pfedhn

STILL = {"momentum": 0.0, "weight_decay": 0.0, "clip": None}  # the server's step is its gradient alone


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def numbers(tree):
    return sum(leaf.numel() for leaf in trees.leaves(tree))


# --- shapes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lenets(by_hand):
    """A function that makes a Federation of 50 clients with the released code's target network, of 16/32 filters."""

    def make_lenets(classes):
        pooled = [nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Flatten(), nn.Linear(800, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()]
        net = models.from_modules(nn.Sequential(*pooled, *dense), nn.Linear(84, classes), (3, 32, 32), classes)
        g = torch.Generator().manual_seed(0)
        images = [(torch.randn(1, 3, 32, 32, generator=g), [0]) for _ in range(50)]
        return by_hand(net, images, rule={"epochs": 0}, dtype=torch.float32)

    return make_lenets


@pytest.mark.parametrize(
    ("classes", "pc", "target", "whole"),
    [(10, False, 121_182, 12_271_732), (100, False, 128_832, 13_044_382), (10, True, 121_182, 12_271_732 - 101 * 850)],
)
def test_a_lenets_hypernetwork_has_as_many_numbers_as_the_released_one(lenets, classes, pc, target, whole):
    """50·13 embeddings, 14·100 and 3·101·100 of the MLP, 101 for each number of the target: 84·10 + 10 of it heads."""
    fed, method = lenets(classes), make("pfedhn", pc=pc)
    server = fed.start(method).server
    assert fed.model.size() == target
    assert server["v"].shape == (50, 13)
    assert numbers((server["phi"], server["v"])) == numbers(server["velocity"]) == whole
    assert [layer["weight"].shape for layer in server["phi"]["mlp"]] == [(100, 13), *[(100, 100)] * 3]


def test_what_is_generated_loads_strictly_into_the_modules(lenets):
    fed, method = lenets(10), make("pfedhn")
    server = fed.start(method).server
    generated, x = method.download(server, np.array([3, 40])), fed.train[0][0]
    for k in (0, 1):
        body, head = (copy.deepcopy(part.module) for part in (fed.model.extractor, fed.model.head))
        body.load_state_dict(trees.row(generated[0], k), strict=True)
        head.load_state_dict(trees.row(generated[1], k), strict=True)
        torch.testing.assert_close(head(body(x)), fed.model.predict(trees.row(generated, k), x))
    assert trees.unequal(trees.row(generated, 0), trees.row(generated, 1)) > 0


@pytest.mark.parametrize(("clients", "settings", "size"), [(10, {}, 3), (100, {}, 26), (10, {"embedding_size": 7}, 7)])
def test_embeddings_have_1_plus_n_over_4_numbers(by_hand, linear, clients, settings, size):
    """FL-bench: 2 and 25."""
    fed = by_hand(models.from_modules(linear(2, 3), linear(3, 2), (2,), 2), [(torch.zeros(1, 2), [0])] * clients)
    assert fed.start(make("pfedhn", **settings)).server["v"].shape == (clients, size)


def test_initial_values_are_torchs(uneven):
    """Uniform on ±1/√(inputs), of which the largest of many is near the end; normal embeddings; from the seed alone."""
    method = make("pfedhn", embedding_size=64)
    server = uneven().start(method).server
    phi, v = server["phi"], server["v"]
    layers = [(layer["weight"], layer["bias"]) for layer in phi["mlp"]]
    layers += zip(trees.leaves(phi["weight"]), trees.leaves(phi["bias"]), strict=True)
    assert [weight.shape[-1] for weight, _ in layers] == [64] + [100] * 7
    for weight, bias in layers:
        inputs = weight.shape[-1]
        assert 0.97 < weight.abs().max() * inputs**0.5 <= 1
        assert 0.5 < bias.abs().max() * inputs**0.5 <= 1
    assert v.std().item() == pytest.approx(1, abs=0.1) and v.abs().max() > 2
    assert trees.unequal(server, uneven().start(method).server) == 0
    assert min(trees.leaves(trees.tree_map(trees.unequal, phi, uneven(seed=1).start(method).server["phi"]))) > 0.01
    assert trees.unequal(server["velocity"], trees.full_like((phi, v), 0)) == 0
    assert {leaf.dtype for leaf in trees.leaves(server)} == {torch.float64}


def test_generation_is_a_linear_layer_a_tensor_on_an_mlps_features(uneven):
    """As modules, client by client; no ReLU behind the MLP's last layer, of which some features are below 0."""
    server = uneven().start(make("pfedhn")).server
    phi, generated = server["phi"], pfedhn.generate(server["phi"], server["v"])
    H = Hyper(phi)
    for i in range(4):
        with torch.no_grad():
            assert trees.unequal(trees.row(generated, i), H(server["v"][i])) < 1e-14
    e = server["v"]
    for k, layer in enumerate(phi["mlp"]):
        e = (e if k == 0 else e.clamp(min=0)) @ layer["weight"].T + layer["bias"]
    assert (e < 0).any()
    assert trees.unequal(e @ phi["weight"][1]["bias"].T + phi["bias"][1]["bias"], generated[1]["bias"]) < 1e-14


# --- hand numbers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def scalar(by_hand, scalar_net, monkeypatch):
    """A function that plays rounds of θ = u v with u = 3, v = 2, where training makes θ a 5: (φ, v, next θ)."""
    monkeypatch.setattr(pfedhn, "generate", lambda phi, v: ({"weight": phi * v}, {}))
    monkeypatch.setattr(pfedhn, "model_loss", lambda model, p, batch: ((p[0]["weight"] - 5) ** 2).sum() / 2)

    def play(rounds=1, **settings):
        fed, method = by_hand(scalar_net(1, 1), [([[1.0]], [0])], rule={"lr": 1.0}), make("pfedhn", pc=True, **settings)
        state = fed.start(method)
        state.server = {"phi": tensor(3.0), "v": tensor([[2.0]]), "velocity": (tensor(0.0), tensor([[0.0]]))}
        for _ in range(rounds):
            assert fed.play(method, state, rounds).held[0]["weight"].item() == 5
        theta = fed.deployed(method, state, rounds)[0]["weight"]
        return [state.server["phi"].item(), state.server["v"].item(), theta.item()]

    return play


def test_one_step_of_a_scalar_hypernetwork(scalar):
    """θ = 6, θ̃ = 5: g_u = 2 and g_v = 3. At .1 the next θ is past 5, at .01 nearer to it; by the other sign 6.1306."""
    delta = {"w": tensor(1.0)}
    assert pfedhn.pulled_back(lambda u, v: {"w": u * v}, tensor(3.0), tensor(2.0), delta) == (2, 3)
    assert scalar(server_lr=0.1, **STILL) == pytest.approx([2.8, 1.7, 4.76], abs=1e-14)
    assert scalar(server_lr=0.01, **STILL) == pytest.approx([2.98, 1.97, 5.8706], abs=1e-14)
    assert scalar(server_lr=0.01, embedding_lr=0.1, **STILL) == pytest.approx([2.98, 1.7, 5.066], abs=1e-14)
    assert scalar(server_lr=0.01, embedding_lr=0.0, **STILL) == pytest.approx([2.98, 2.0, 5.96], abs=1e-14)


def test_clip_decay_and_momentum_by_hand(scalar):
    """The norm of (2, 3) is √13 = 3.6056; the decay comes after clipping, the velocity holds both."""
    half = 13**0.5 / 2
    assert scalar(server_lr=0.1, **STILL | {"clip": half}) == pytest.approx([2.9, 1.85, 5.365], abs=1e-14)
    assert scalar(server_lr=0.1, **STILL | {"clip": 4.0}) == scalar(server_lr=0.1, **STILL)
    decay = STILL | {"clip": half, "weight_decay": 0.5}  # g + λp: 1 + 1.5 and 1.5 + 1
    assert scalar(server_lr=0.1, **decay)[:2] == pytest.approx([2.75, 1.75], abs=1e-14)
    # From (2.8, 1.7, 4.76): θ − θ̃ = −.24, g = (−.408, −.672), u = (.9·2 − .408, .9·3 − .672) = (1.392, 2.028).
    assert scalar(2, server_lr=0.1, **STILL | {"momentum": 0.9})[:2] == pytest.approx([2.6608, 1.4972], abs=1e-14)


def test_what_comes_back_as_it_went_gives_no_gradient(uneven, play):
    """θ̃ = θ: to the bit; then only the weight decay moves what takes part."""
    phi, v = (server := uneven().start(make("pfedhn")).server)["phi"], server["v"]
    delta = trees.full_like(pfedhn.generate(phi, v), 0)
    assert trees.unequal(pfedhn.pulled_back(pfedhn.generate, phi, v, delta), trees.full_like((phi, v), 0)) == 0
    fed = uneven(rule={"epochs": 0}, join_ratio=0.25)
    state, (result,) = play(fed, make("pfedhn", server_lr=0.5, weight_decay=0.1), 1)
    ((i,), expected) = result.ids, trees.clone(v)
    expected[i] *= 1 - 0.05
    assert trees.unequal(state.server["phi"], trees.tree_map(lambda t: 0.95 * t, phi)) < 1e-15
    assert trees.unequal(state.server["v"], expected) < 1e-15


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequential", [True, False])
def test_all_clients_have_one_model_where_h_is_constant_in_v(uneven, sequential):
    """The MLP's first layer is 0 but for its bias, and embeddings stand still: after training, too, while that is 0."""
    fed, method = uneven(rule={"lr": 0.1}), make("pfedhn", sequential=sequential, embedding_lr=0.0)
    state = fed.start(method)
    state.server["phi"]["mlp"][0]["weight"].zero_()
    first = fed.deployed(method, state, 2)
    assert trees.unequal(first, trees.expand(trees.row(first, 0), 4)) < 1e-14
    state.server["v"].zero_()  # or the layer would learn what v says
    for _ in range(2):
        fed.play(method, state, 2)
    last = fed.deployed(method, state, 2)
    assert trees.unequal(last, trees.expand(trees.row(last, 0), 4)) < 1e-14
    assert trees.unequal(last, first) > 1e-4


def test_biases_alone_are_fedavg(by_hand, linear, play):
    """H = b for all, α = 1: b − Σ (b − θ̃_i) / C is the mean of models, here of clients of one size."""
    net, g = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3), torch.Generator()
    data = [(torch.randn(7, 4, generator=g), torch.randint(3, (7,), generator=g).tolist()) for _ in range(4)]
    fed = by_hand(net, data, rule={"lr": 0.1, "epochs": 2, "batch_size": 3}, join_ratio=0.5)
    method = make("pfedhn", sequential=False, server_lr=1.0, **STILL)
    state = fed.start(method)
    state.server["phi"] = trees.full_like(state.server["phi"], 0) | {"bias": fed.init()}
    average, others = play(fed, make("fedavg"), 3)
    for theirs in others:
        assert trees.unequal(fed.play(method, state, 3).held, theirs.held) < 1e-13
    assert trees.unequal(state.server["phi"]["bias"], average.server) < 1e-13
    assert trees.unequal(average.server, fed.init()) > 0.1


def test_one_client_and_the_identity_are_local_training(by_hand, linear, play):
    """θ = v, of which α = 1 takes the whole way: v − (θ − θ̃) = θ̃. φ stands still."""
    net, g = models.from_modules(nn.Sequential(linear(4, 2), nn.ReLU()), linear(2, 3), (4,), 3), torch.Generator()
    clients = [(torch.randn(9, 4, generator=g), torch.randint(3, (9,), generator=g).tolist())]
    fed, P = by_hand(net, clients, rule={"lr": 0.1, "momentum": 0.9, "batch_size": 4}), net.size()
    sizes = {"embedding_size": P, "hidden_size": P, "hidden_layers": 0}
    method = make("pfedhn", server_lr=0.0, embedding_lr=1.0, **sizes, **STILL)
    state, start = fed.start(method), trees.leaves(fed.init())
    identity = torch.eye(P, dtype=torch.float64)
    rows = iter(identity.split([t.numel() for t in start]))
    weight = trees.tree_map(lambda t: next(rows).view(*t.shape, P), fed.init())
    layer = {"weight": identity, "bias": 0 * identity[0]}
    state.server["phi"] = {"mlp": (layer,), "weight": weight, "bias": trees.full_like(fed.init(), 0)}
    state.server["v"] = torch.cat([t.flatten() for t in start])[None]
    alone, others = play(fed, make("local"), 3)
    for theirs in others:
        assert trees.unequal(fed.play(method, state, 3).held, theirs.held) < 1e-13
    assert trees.unequal(fed.deployed(method, state, 3), alone.kept) < 1e-13
    assert trees.unequal(alone.kept, trees.expand(fed.init(), 1)) > 0.1


# --- rounds, written out ---------------------------------------------------------------------------------------------


class Hyper(nn.Module):
    """H as torch's modules, with the values of φ."""

    def __init__(self, phi):
        super().__init__()
        self.mlp = nn.Sequential(*(part for one in phi["mlp"] for part in (layer(**one), nn.ReLU())))[:-1]
        self.tree, tensors = phi["bias"], trees.leaves(phi["bias"])
        self.heads = nn.ModuleList(map(layer, trees.leaves(phi["weight"]), tensors))
        self.shapes = [t.shape for t in tensors]

    def forward(self, v):
        e = self.mlp(v)
        return self.as_tree([head(e) for head in self.heads])

    def as_tree(self, values, *more):
        return trees.like(self.tree, [t.view(*shape, *more) for t, shape in zip(values, self.shapes, strict=True)])

    def phi(self):
        mlp = tuple({"weight": one.weight.detach(), "bias": one.bias.detach()} for one in self.mlp[::2])
        weight = self.as_tree([head.weight.detach() for head in self.heads], -1)
        return {"mlp": mlp, "weight": weight, "bias": self.as_tree([head.bias.detach() for head in self.heads])}


def layer(weight, bias):
    weight = weight.reshape(-1, weight.shape[-1])
    made = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    made.load_state_dict({"weight": weight, "bias": bias.flatten()})
    return made


def by_autograd(fed, plain, method, state, rounds, kept):
    """Rounds in plain torch: (φ, v, what clients keep), by modules, torch.optim.SGD and `kept` of each client.

    Each embedding has an optimizer of its own, which steps when its client joins: the others' decay and momentum wait.
    """
    H = Hyper(state.server["phi"])
    rule = {"momentum": method.momentum, "weight_decay": method.weight_decay}
    vs = [nn.Parameter(v.clone()) for v in state.server["v"]]
    rate = method.server_lr if method.embedding_lr is None else method.embedding_lr
    own = [torch.optim.SGD([v], lr=rate, **rule) for v in vs]
    of_phi = torch.optim.SGD(H.parameters(), lr=method.server_lr, **rule)
    for t in range(1, rounds + 1):
        ids = fed.sample(t).tolist()
        for cohort in [[i] for i in ids] if method.sequential else [ids]:
            of_phi.zero_grad()
            for i in cohort:
                own[i].zero_grad()
                theta = H(vs[i])
                parts = [{k: p.detach() for k, p in part.items()} | k for part, k in zip(theta, kept[i], strict=True)]
                peer = plain(fed, i).load(*parts)
                end = peer.train(peer.r, peer.h, epochs=fed.training.epochs).state()
                kept[i] = tuple({k: one[k] for k in rest} for one, rest in zip(end, kept[i], strict=True))
                named = [(p, end[k][name]) for k, part in enumerate(theta) for name, p in part.items()]
                sum((p * (p.detach() - e) / len(cohort)).sum() for p, e in named).backward()
            nn.utils.clip_grad_norm_([*H.parameters(), *(vs[i] for i in cohort)], method.clip)
            for optimizer in (of_phi, *(own[i] for i in cohort)):
                optimizer.step()
    return H.phi(), torch.stack([v.detach() for v in vs]), kept


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("pc", [False, True])
@pytest.mark.parametrize("clip", [50.0, 0.02])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, pc, sequential, clip):
    """clip_grad_norm_ adds 1e-6 to the norm that it divides by."""
    fed = uneven(rule={"lr": 0.1, "epochs": 2, "momentum": 0.5, "weight_decay": 0.01}, join_ratio=0.5)
    rates = {"server_lr": 0.1, "embedding_lr": 0.3, "weight_decay": 0.05, "embedding_size": 3, "hidden_size": 6}
    method = make("pfedhn", pc=pc, sequential=sequential, clip=clip, **rates)
    start = fed.start(method)
    heads = fed.init()[1] if pc else {}
    phi, v, kept = by_autograd(fed, plain, method, start, 3, [({}, heads)] * 4)
    state, rounds = play(fed, method, 3)
    near = 1e-4 if clip < 1 else 1e-12
    assert trees.unequal(state.server["phi"], phi) < near
    assert trees.unequal(state.server["v"], v) < near
    assert trees.unequal(state.kept, trees.stack(kept)) < near
    assert trees.unequal(state.server["phi"], start.server["phi"]) > 1e-2 * min(clip, 1)
    assert sorted({len(result.ids) for result in rounds}) == [2]


def test_clips_are_felt_and_not_at_50(uneven, play):
    ends = [play(uneven(rule={"lr": 0.1}), make("pfedhn", clip=clip), 2)[0].server for clip in (None, 50.0, 0.02)]
    assert trees.unequal(ends[0], ends[1]) == 0
    assert trees.unequal(ends[0], ends[2]) > 1e-4


@pytest.mark.parametrize("pc", [False, True])
def test_two_rounds_with_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread, pc):
    """φ has nothing for buffers, and none travels: each client has its own statistics, and an integer counter."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "epochs": 4, "momentum": 0.5}, join_ratio=0.67)
    method = make("pfedhn", pc=pc, server_lr=0.1)
    start, buffers = fed.start(method), {k: fed.init()[0][k] for k in net.buffers}
    phi, v, kept = by_autograd(fed, plain, method, start, 2, [(buffers, fed.init()[1] if pc else {})] * 3)
    state, rounds = play(fed, method, 2)
    assert trees.unequal(state.server["phi"], phi) < 1e-12
    assert trees.unequal(state.server["v"], v) < 1e-12
    assert trees.unequal(state.kept, trees.stack(kept)) < 1e-12
    count, joined = state.kept[0]["1.num_batches_tracked"], np.bincount(np.concatenate([r.ids for r in rounds]))
    assert count.dtype == torch.int64 and count.tolist() == (4 * joined).tolist() and len(set(joined)) > 1
    assert set(state.server["phi"]["bias"][0]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(rounds[0].bytes_up) == set(rounds[0].bytes_down) == {8 * (24 if pc else 24 + 10)}
    held = fed.deployed(method, state, 3)
    assert all(torch.equal(held[0][k], state.kept[0][k]) for k in net.buffers)


# --- what a round may touch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequential", [True, False])
def test_only_the_embeddings_of_sampled_clients_move(digits, sequential):
    """With decay and momentum, which in both released codes move all of them, in all steps; to the bit."""
    fed, method = digits(join_ratio=0.5), make("pfedhn", sequential=sequential, weight_decay=0.1)
    state, absences = fed.start(method), set()
    for _ in range(4):
        before = trees.clone(state.server)
        ids = fed.play(method, state, 4).ids
        absent = np.setdiff1d(range(6), ids)
        absences |= set(absent.tolist())
        for now, was in ((state.server["v"], before["v"]), (state.server["velocity"][1], before["velocity"][1])):
            assert torch.equal(now[absent], was[absent])
            assert ((now[ids] - was[ids]).abs().amax(1) > 1e-6).all()
        assert trees.unequal(state.server["phi"], before["phi"]) > 1e-5
    assert (state.server["velocity"][1][sorted(absences)] != 0).any()  # so momentum was there to be withheld


def test_embeddings_move_by_their_gradient_only_if_sampled(digits, play):
    """Without decay and momentum, as the chain rule alone has it."""
    fed = digits(join_ratio=0.5)
    start = fed.start(method := make("pfedhn", **STILL)).server["v"]
    state, (result,) = play(fed, method, 1)
    moved = (state.server["v"] != start).any(1)
    assert moved.nonzero().flatten().tolist() == result.ids.tolist()


def test_clients_in_a_row_see_what_the_one_before_has_left(digits, play):
    """Sequentially the first gets what it would get at once, the second does not; at once all get one φ's models."""
    first = {}
    for sequential in (True, False):
        fed, method = digits(rule={"epochs": 0}), make("pfedhn", sequential=sequential, weight_decay=0.1)
        start = fed.deployed(method, fed.start(method), 1)
        _, (result,) = play(fed, method, 1)
        first[sequential] = [trees.unequal(trees.row(result.held, i), trees.row(start, i)) for i in range(6)]
    assert first[True][0] < 1e-6 and min(first[True][1:]) > 1e-5
    assert max(first[False]) == 0


# --- the personal classifier, what travels, what is scored -----------------------------------------------------------


def test_a_personal_head_stays_and_nothing_of_it_is_generated(digits, play):
    """FL-bench generates it all the same. `before`: the generated extractor under the client's own head."""
    fed, method = digits(join_ratio=0.5), make("pfedhn", pc=True)
    state, rounds = play(fed, method, 3)
    assert state.server["phi"]["weight"][1] == state.server["phi"]["bias"][1] == {}
    assert list(state.server["phi"]["bias"][0]) == list(fed.init()[0])
    for result in rounds:
        assert (result.bytes_up == 4 * 4160).all() and (result.bytes_down == 4 * 4160).all()  # 64·64 + 64
    assert trees.unequal(trees.take(state.kept, rounds[-1].ids), ({}, rounds[-1].held[1])) == 0
    extractor, head = fed.deployed(method, state, 4)
    assert trees.unequal(({}, head), state.kept) == 0
    assert trees.unequal(extractor, pfedhn.generate(state.server["phi"], state.server["v"])[0]) == 0
    assert trees.unequal(trees.row(head, rounds[0].ids[0]), fed.init()[1]) > 1e-3
    assert trees.unequal(fed.start(method).kept[1], trees.expand(fed.init()[1], 6)) == 0


def test_before_is_the_generated_model_for_those_who_never_joined_too(digits, play):
    fed, method = digits(join_ratio=0.5), make("pfedhn")
    state, rounds = play(fed, method, 2)
    assert state.kept == ({}, {})
    assert len(set(np.concatenate([result.ids for result in rounds]).tolist())) < 6
    generated = pfedhn.generate(state.server["phi"], state.server["v"])
    assert trees.unequal(fed.deployed(method, state, 3), generated) == 0
    assert trees.unequal(trees.row(generated, 0), trees.row(generated, 1)) > 0


@pytest.mark.parametrize("pc", [False, True])
def test_it_learns(digits, pc):
    """From a tenth, which is chance, to most of the digits of unseen images, with no local training before scoring."""
    fed = digits(rule={"epochs": 3, "momentum": 0.5})
    history = experiment.run(make("pfedhn", pc=pc, server_lr=0.05), fed, 12, eval_every=12)
    assert history.product == "before"
    assert history.rounds["before"].iloc[0] < 0.25 and history.summary()["accuracy"] > 0.6


# --- pads ------------------------------------------------------------------------------------------------------------


class Pad(nn.Embedding):
    """An embedding as a whole extractor: its weight's name has no prefix."""

    def forward(self, x):
        return super().forward(x).flatten(1)


@pytest.mark.parametrize("nested", [False, True])
def test_a_pads_vector_is_zeros(nested):
    """In the row of `padding_idx`, and in no other."""
    body = Pad(5, 2, padding_idx=3)
    body = nn.Sequential(body, nn.Linear(6, 4)) if nested else body
    net = models.from_modules(body, nn.Linear(4 if nested else 6, 2), (3,), 2, vocabulary=5)

    class Fed:
        model, num_clients, seed, device, dtype = net, 4, 0, "cpu", torch.float32
        init = staticmethod(lambda: net.init())

    server = make("pfedhn").server(Fed)
    words = pfedhn.generate(server["phi"], server["v"])[0]["0.weight" if nested else "weight"]
    assert words.any(2).any(0).tolist() == [True, True, True, False, True]


# --- refused ---------------------------------------------------------------------------------------------------------


def test_pc_without_an_extractor_is_refused(digits):
    with pytest.raises(ValueError, match="model='mlp': pFedHN-PC generates extractors; this one has no parameters"):
        digits(head_layers=2).start(make("pfedhn", pc=True))
    digits(head_layers=2).start(make("pfedhn"))


def test_pc_without_a_head_is_pfedhn(digits, play):
    ends = [play(digits(head_layers=0), make("pfedhn", pc=pc), 2)[0].server for pc in (False, True)]
    assert trees.unequal(*ends) == 0


WRONG = [{"hidden_size": 0}, {"hidden_layers": 1.5}, {"embedding_size": -1}, {"server_lr": -0.1}, {"clip": 0.0}]
WRONG += [{"embedding_lr": -0.1}, {"momentum": 1.1}, {"weight_decay": -1.0}, {"pc": 1}, {"sequential": 0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_impossible_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*must be"):
        make("pfedhn", **wrong)
