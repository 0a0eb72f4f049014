"""FedFomo: each client mixes the models that gain most, per distance, on its validation data."""

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import experiment, models, trees
from pflkit.messages import received
from pflkit.methods import fedfomo, make
from pflkit.streams import rng


@pytest.fixture
def numbers(by_hand, scalar_net, monkeypatch):
    """A function that makes a Federation of clients whose models are one number each, with L(θ) = (θ − target)², who do
    not train, and a state with the numbers `theta`.
    """
    monkeypatch.setattr(fedfomo, "model_loss", lambda model, p, batch: ((p[0]["weight"] - batch[0]) ** 2).mean())

    def start(method, theta, targets, rule=None, **options):
        clients = [([[float(t)]] * 5, [0] * 5) for t in targets]
        fed = by_hand(scalar_net(0.0, 1.0), clients, rule={"epochs": 0, **(rule or {})}, **options)
        state = fed.start(method)
        for models_of in (state.server["models"], state.kept):
            models_of[0]["weight"][:, 0] = torch.tensor(theta, dtype=torch.float64)
        return fed, state

    return start


def greedy(**settings):
    return make("fedfomo", epsilon=0.0, **settings)


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_three_candidates_for_one_client(numbers):
    """θ = 0, candidates 1, 3, −1, target 2: w = (3, 1, −5), so θ̂ = ¾·1 + ¼·3, and P gets w signed."""
    fed, state = numbers(method := greedy(), [0, 1, 3, -1], [2, 1, 3, -1])
    assert fed.deployed(method, state, 2)[0]["weight"].flatten().tolist() == [1.5, 1, 3, -1]  # the others are at home
    result = fed.play(method, state, 2)
    assert result.held[0]["weight"].flatten().tolist() == [1.5, 1, 3, -1]
    assert state.kept[0]["weight"].flatten().tolist() == [1.5, 1, 3, -1]
    assert state.server["models"][0]["weight"].flatten().tolist() == [1.5, 1, 3, -1]
    assert state.server["affinity"].tolist() == [[0, 3, 1, -5], [-1, 0, -2, -2], [-3, -2, 0, -4], [-1, -2, -4, 0]]
    fed.play(method, state, 2)  # (2 − 1.5)² = ¼; the others' losses 1, 1 and 9 at distances ½, 1½ and 2½
    assert state.server["affinity"][0].tolist() == pytest.approx([0, 3 - 0.75 / 0.5, 1 - 0.75 / 1.5, -5 - 8.75 / 2.5])
    assert state.kept[0]["weight"][0] == 1.5


def test_the_only_better_candidate_is_taken_as_it_is(numbers):
    """To the bit, as θ + (θ_n − θ) would not be."""
    theta = [1e9, 1 / 3, -1e10]
    assert theta[0] + (theta[1] - theta[0]) != theta[1]
    fed, state = numbers(greedy(), theta, [1 / 3, 1 / 3, -1e10])
    assert fed.deployed(greedy(), state, 1)[0]["weight"].flatten().tolist() == [1 / 3, 1 / 3, -1e10]


def test_the_own_model_stays_where_none_is_better(numbers):
    """To the bit; equally good is not better."""
    fed, state = numbers(greedy(), [0.5, 1.5, 7.1], [1, 1.5, 7.1])
    assert fed.play(greedy(), state, 1).held[0]["weight"].flatten().tolist() == [0.5, 1.5, 7.1]
    assert state.server["affinity"][0, :2].tolist() == [0, 0] and state.server["affinity"][0, 2] < 0


def test_identical_models_are_no_cause_for_nan(numbers):
    """0/0 is 0: in round 1 all models are the initial one."""
    fed, state = numbers(greedy(), [0.1] * 4, [1, 2, 3, 4])
    assert fed.play(greedy(), state, 1).held[0]["weight"].flatten().tolist() == [0.1] * 4
    assert not state.server["affinity"].any()


def test_models_that_differ_in_statistics_only_have_no_distance(by_hand, linear):
    """Other losses at a distance of 0: no weight, not an infinite one. Counters count for no distance either."""
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.BatchNorm1d(3)), linear(3, 2), (2,), 2)
    fed = by_hand(net, [(torch.randn(6, 2), [0, 1] * 3) for _ in range(2)], rule={"epochs": 0})
    state = fed.start(greedy())
    state.server["models"][0]["1.running_mean"][1] += 9
    state.server["models"][0]["1.num_batches_tracked"][1] += 9
    result = fed.play(greedy(), state, 1)
    assert not state.server["affinity"].any()
    assert trees.unequal(result.held, trees.expand(fed.init(), 2)) == 0


def test_distances_are_over_trained_parameters_of_all_leaves(by_hand, linear):
    net = models.from_modules(nn.Sequential(linear(2, 3), nn.BatchNorm1d(3)), linear(3, 2), (2,), 2)
    own = net.init()
    far = trees.tree_map(lambda t: torch.stack([t, t + 2, t - 1]), own)
    parameters = sum(p.numel() for part in (net.extractor, net.head) for p in part.module.parameters())
    assert parameters == 9 + 6 + 8
    assert fedfomo.distances(net, own, far).tolist() == pytest.approx([0, 2 * parameters**0.5, parameters**0.5])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_has_no_weight(bad):
    w = fedfomo.weights(torch.tensor(4.0), torch.tensor([bad, 1.0]), torch.tensor([1.0, 3.0]))
    assert w.tolist() == [0, 1]
    assert fedfomo.weights(torch.tensor(bad), torch.tensor([1.0]), torch.tensor([1.0])).tolist() == [0]


def test_mixed_keeps_counters_whole():
    own = {"w": torch.tensor([0.0]), "n": torch.tensor(1)}
    candidates = {"w": torch.tensor([[1.0], [3.0]]), "n": torch.tensor([2, 5])}
    mixed = fedfomo.mixed(own, candidates, torch.tensor([3.0, 1.0]))
    assert mixed["w"].tolist() == [1.5] and mixed["n"].dtype == torch.int64 and mixed["n"] == 3  # 2.75
    assert trees.unequal(fedfomo.mixed(own, candidates, torch.tensor([-1.0, 0.0])), own) == 0


# --- whose models a client gets --------------------------------------------------------------------------------------


class Draw:
    """A generator whose numbers are known: no shuffling, the given numbers in [0, 1), the last of what is asked."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def permutation(self, items):
        return np.array(items)

    def random(self, n):
        return np.array(self.numbers)

    def integers(self, n):
        return n - 1


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [  # ε = .3, client 2 of six, P = (1, 0, 9, −1, 0, 2): by affinity 5, 0, then 1 and 4, who are unknown, then 3
        ((0.9, 0.9, 0.3), [5, 0, 1]),  # .3 < .3 is not true
        ((0.2, 0.9, 0.9), [4, 5, 0]),  # the first place explores
        ((0.9, 0.2, 0.2), [5, 4, 1]),
        ((0.2, 0.2, 0.2), [4, 1, 3]),  # none unknown is left for the third place: any, here the last
        ((0.2, 0.2, 0.9), [4, 1, 5]),
        ((0.2,) * 5, [4, 1, 3, 0, 5]),  # nobody twice, all but oneself
    ],
)
def test_each_place_explores_by_itself(drawn, expected):
    assert fedfomo.choose([1, 0, 9, -1, 0, 2], 2, len(drawn), 0.3, Draw(*drawn)) == expected


def test_ties_are_drawn_by_lot():
    """Who is unknown is not asked in the order of client numbers; the known order stays."""
    firsts = {tuple(fedfomo.choose([0, 0, 0, 5, 0], 0, 2, 0.0, rng(0, k))) for k in range(50)}
    assert firsts == {(3, 1), (3, 2), (3, 4)}


def test_epsilon_falls_each_round_to_0(digits, monkeypatch):
    seen, method = [], make("fedfomo", candidates=2, epsilon=0.4, epsilon_decrease=0.15)
    choose = fedfomo.choose
    monkeypatch.setattr(fedfomo, "choose", lambda P, i, M, e, draw: seen.append((M, e)) or choose(P, i, M, e, draw))
    fed = digits(rule={"epochs": 0})
    state = fed.start(method)
    for expected in (0.4, 0.25, 0.1, 0.0, 0.0):
        seen.clear()
        fed.play(method, state, 5)
        assert {M for M, _ in seen} == {2}
        assert [e for _, e in seen] == pytest.approx([expected] * len(seen))


def test_draws_are_of_seed_round_and_client(digits):
    """The same in `deployed`, `play` and `merge`; of nobody else's business; anew each round."""
    method, everyone = make("fedfomo", candidates=2), np.arange(6)

    def lists(seed=0, round=0, ids=everyone):
        server = digits(seed=seed).start(method).server
        return method.chosen({**server, "round": torch.tensor(round)}, ids).tolist()

    assert lists() == lists()
    assert lists(ids=np.array([1, 4])) == [lists()[1], lists()[4]]
    assert lists() != lists(seed=1)
    assert len({str(lists(round=t)) for t in range(5)}) == 5
    places = [[other - (other > i) for other in row] for i, row in enumerate(lists())]
    assert len({str(row) for row in places}) > 1  # each client draws for itself
    assert all(i not in row and len(set(row)) == 2 for t in range(5) for i, row in enumerate(lists(round=t)))


def test_weights_go_to_those_whose_models_were_sent(digits):
    """Row by row, for the sampled clients only; what is sent are the server's last models of those, best first."""
    fed, method = digits(join_ratio=0.5), make("fedfomo", candidates=2)
    state = fed.start(method)
    for t in range(1, 6):
        server, ids = trees.clone(state.server), fed.sample(t)
        message = method.download(state.server, ids)
        chosen = method.chosen(state.server, ids)
        for j in range(len(ids)):
            assert trees.unequal(trees.row(message, j), trees.take(server["models"], chosen[j])) == 0
        message = received(message, len(ids))
        _, upload, _ = method.local(fed.clients(ids, t, 5), trees.take(state.kept, ids), message)
        result = fed.play(method, state, 5)
        expected = server["affinity"]
        for j, i in enumerate(ids):
            for m, other in enumerate(chosen[j].tolist()):
                expected[i, other] += upload["w"][j, m]
        assert torch.equal(state.server["affinity"], expected)
        assert trees.unequal(trees.take(state.server["models"], ids), result.held) == 0
        absent = np.setdiff1d(np.arange(6), ids)
        assert trees.unequal(trees.take(state.server["models"], absent), trees.take(server["models"], absent)) == 0
    assert (state.server["affinity"] != 0).any() and not state.server["affinity"].diagonal().any()


def test_without_epsilon_the_best_known_are_sent(digits):
    method = greedy(candidates=2)
    server = digits().start(method).server
    server["affinity"][:] = torch.tensor([9.0, -1.0, 3.0, 2.0, -7.0, 5.0])
    expected = [[5, 2], [0, 5], [0, 5], [0, 5], [0, 5], [0, 2]]
    assert method.chosen({**server, "round": torch.tensor(7)}, np.arange(6)).tolist() == expected


@pytest.mark.parametrize(("M", "sent"), [(0, 0), (1, 1), (3, 3), (5, 5), (6, 5), (1000, 5)])
def test_at_most_all_others_are_sent(digits, M, sent):
    """However few clients join; PFLlib's M is at most their number. 4 bytes a scalar."""
    fed, method = digits(join_ratio=0.17), make("fedfomo", candidates=M)
    history = experiment.run(method, fed, 2)
    P, joined = sum(t.numel() for t in trees.leaves(fed.init())), history.clients[history.clients["joined"]]
    assert joined["bytes_down"].tolist() == [4 * sent * P] * 2
    assert joined["bytes_up"].tolist() == [4 * (P + sent)] * 2


# --- validation data -------------------------------------------------------------------------------------------------


def test_nobody_trains_on_validation_data_in_any_round(uneven, play):
    """Other values there change no model that is trained alone; other values elsewhere do."""
    method, everyone = make("fedfomo", candidates=0), np.arange(4)
    start, _ = play(uneven(rule={"lr": 0.1}), method, 3)
    for which, same in ((0, True), (1, False)):
        fed = uneven(rule={"lr": 0.1})
        for i, (part, _) in enumerate(fed.clients(everyone, 1, 3).split(0.2, "validation")[which].data):
            rows = (fed.train[i][0][:, None] == part).all(2).any(1)
            fed.train[i][0][rows] += 1.0
        state, _ = play(fed, method, 3)
        alike = [trees.unequal(trees.row(state.kept, i), trees.row(start.kept, i)) == 0 for i in range(4)]
        assert alike == [same and i > 0 for i in range(4)]  # client 0 has one sample, for both


def test_candidates_are_measured_on_validation_data_only(uneven):
    """Wiping all other samples changes no weight."""
    ends = []
    for which in (None, 1, 0):
        fed, method = uneven(rule={"epochs": 0}), make("fedfomo")
        state = fed.start(method)
        for leaf in trees.leaves(state.server["models"]):
            leaf += torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).view(leaf.shape)
        if which is not None:
            for i, (part, _) in enumerate(fed.clients(np.arange(4), 1, 3).split(0.2, "validation")[which].data):
                fed.train[i][0][(fed.train[i][0][:, None] == part).all(2).any(1)] = 0
        fed.play(method, state, 1)
        ends.append(state.server["affinity"][1:])  # client 0 has one sample, for both
    assert torch.equal(ends[0], ends[1])
    assert (ends[0] != ends[2]).any(1).all()


# --- a round, written out --------------------------------------------------------------------------------------------


def loss(net, x, y):
    net.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(net(x), y)


def by_hand_round(fed, thetas, plain):
    """What the clients with state dicts `thetas` hold after a round in which each is sent all others, and each's w."""
    held, gains = [], []
    for i, own in enumerate(thetas):
        peer = plain(fed, i)
        n = len(peer.y)
        cut = min(max(1, round(0.2 * n)), n - 1)
        x, y = peer.x[: max(cut, 1)], peer.y[: max(cut, 1)]  # `in_order`: the validation part is the first fifth
        net, w = nn.Sequential(peer.r, peer.h), {}
        net.load_state_dict(own)
        trained, base = {name for name, _ in net.named_parameters()}, loss(net, x, y)
        for j, other in enumerate(thetas):
            if j != i:
                net.load_state_dict(other)
                apart = sum(((other[k] - own[k]) ** 2).sum() for k in trained).sqrt()
                w[j] = float((base - loss(net, x, y)) / apart) if apart > 0 else 0.0
        better = {j: v for j, v in w.items() if v > 0}
        mix = {k: sum(v * thetas[j][k] for j, v in better.items()) / sum(better.values()) for k in own if better}
        start = {k: t.round().long() if own[k].dtype == torch.int64 else t for k, t in mix.items()} or own
        net.load_state_dict(start)
        peer.x, peer.y = peer.x[cut:], peer.y[cut:]
        peer.train(peer.r, peer.h, epochs=fed.training.epochs)
        held.append({k: t.detach().clone() for k, t in net.state_dict().items()})
        gains.append(w)
    return held, gains


@pytest.mark.parametrize("norm", [False, True])
def test_four_rounds_in_plain_torch(by_hand, linear, plain, in_order, one_thread, norm):
    """The baseline is what a client's last training has left; candidates are everybody's last upload."""
    layers = [linear(4, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.ReLU()]
    net, g = models.from_modules(nn.Sequential(*layers), linear(5, 3), (4,), 3), torch.Generator().manual_seed(0)
    sizes = (4, 7, 10, 9) if norm else (1, 7, 10, 11)
    clients = [(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g).tolist()) for n in sizes]
    fed, method = by_hand(net, clients, rule={"lr": 0.2, "momentum": 0.5, "epochs": 2}), make("fedfomo")
    state, expected = fed.start(method), np.zeros((4, 4))
    peer = plain(fed, 0)
    thetas, mixing = [nn.Sequential(peer.r, peer.h).state_dict()] * 4, 0
    for _ in range(4):
        thetas, gains = by_hand_round(fed, thetas, plain)
        result = fed.play(method, state, 4)
        for i, w in enumerate(gains):
            expected[i, list(w)] += list(w.values())
            mixing += len({v for v in w.values() if v > 0}) > 1
            ours = trees.row(result.held, i)
            named = {**{f"0.{k}": t for k, t in ours[0].items()}, **{f"1.{k}": t for k, t in ours[1].items()}}
            assert trees.unequal(named, {k: thetas[i][k] for k in named}) < 1e-12
        np.testing.assert_allclose(state.server["affinity"].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert mixing  # it was more than taking one or none


# --- limits ----------------------------------------------------------------------------------------------------------


def test_without_candidates_it_is_local_training(digits, play, monkeypatch):
    """To the bit, where validation data are trained on too."""
    monkeypatch.setattr("pflkit.training.Clients.split", lambda clients, share, name: (clients, clients))
    fed = digits(rule={"momentum": 0.9})
    fomo, local = (play(fed, method, 3)[0].kept for method in (make("fedfomo", candidates=0), make("local")))
    assert trees.unequal(fomo, local) == 0


def test_a_client_alone_trains_alone(by_hand, linear, play, monkeypatch):
    monkeypatch.setattr("pflkit.training.Clients.split", lambda clients, share, name: (clients, clients))
    net = models.from_modules(linear(2, 3), linear(3, 2), (2,), 2)
    fed = by_hand(net, [(torch.linspace(-1, 1, 14).view(7, 2), [0, 1] * 3 + [0])], rule={"lr": 0.1})
    fomo, local = (play(fed, make(name), 3)[0].kept for name in ("fedfomo", "local"))
    assert trees.unequal(fomo, local) == 0
    assert trees.unequal(fomo, trees.expand(fed.init(), 1)) > 1e-3


def test_before_is_the_mix_that_training_starts_from(digits, play):
    method, still = make("fedfomo"), digits(rule={"epochs": 0})
    state, _ = play(digits(join_ratio=0.5), method, 3)
    deployed = still.deployed(method, state, 5)
    assert trees.unequal(deployed, state.kept) > 1e-3
    assert trees.unequal(still.play(method, state, 5).held, deployed) == 0


def test_stacked_clients_end_where_the_loop_does(digits, play):
    ends = []
    for engine in ("loop", "stacked"):
        state, _ = play(digits(engine=engine, dtype=torch.float64, join_ratio=0.5), make("fedfomo"), 3)
        ends.append((state.server["models"], state.kept))
    assert trees.unequal(*ends) < 1e-10


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *[("candidates", -1), ("epsilon", 1.01), ("epsilon", -0.1), ("epsilon_decrease", -0.1)],
        *[("share", 0.0), ("share", 1.1)],
    ],
)
def test_impossible_settings(setting, value):
    with pytest.raises(ValueError, match=f"^{setting}={value}: must be "):
        make("fedfomo", **{setting: value})


@pytest.mark.parametrize("value", [2.5, None])
def test_candidates_are_a_number(value):
    with pytest.raises(ValueError, match=f"^candidates={value}: must be "):
        make("fedfomo", candidates=value)
