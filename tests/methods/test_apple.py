"""APPLE: each client learns by how much to mix in whose core model, and trains its own core within the mix."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from pflkit import experiment, models, trees
from pflkit.descent import slope
from pflkit.messages import received
from pflkit.methods import apple, make
from pflkit.methods.fedavg import model_loss


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def exactly(*values):
    return pytest.approx(list(values), abs=1e-15, rel=0)


@pytest.fixture
def numbers(by_hand, scalar_net, monkeypatch):
    """A function that makes a Federation of clients whose cores are one number each, with f(w) = `half` w², and a state
    with the numbers `cores`, weights p and p_0; one step a round.
    """

    def start(method, cores, p, p_0=None, half=0.5, rule=None, **options):
        monkeypatch.setattr(apple, "model_loss", lambda model, w, batch: half * w[0]["weight"].square().sum())
        fed = by_hand(scalar_net(0.0, 1.0), [([[1.0]], [0])] * len(cores), rule={"lr": 0.1, **(rule or {})}, **options)
        state = fed.start(method)
        state.server["cores"][0]["weight"][:, 0] = tensor(cores)
        state.kept["core"][0]["weight"][:, 0] = tensor(cores)
        if "cores" in state.kept:  # as if all had been received
            N = len(cores)
            ahead = [[cores[(i + k) % N] for k in range(1, N)] for i in range(N)]
            state.kept["cores"][0]["weight"][:, :, 0] = tensor(ahead)
        state.kept["p"][:] = tensor(p)
        state.kept["p_0"][:] = tensor(p_0 or p)
        return fed, state

    return start


def cores_of(tree):
    return tree[0]["weight"].flatten().tolist()


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_one_step_of_two_clients(numbers):
    """Cores (1, 3), p = (½, ½), f = ½w²: w^p = 2, ∂p = (2, 6), ∂w_1^c = 1. Client 1's own core is the 3."""
    method = make("apple", lr_p=0.01, mu=0.0)
    fed, state = numbers(method, [1, 3], [[0.5, 0.5]] * 2)
    assert cores_of(fed.deployed(method, state, 5)) == [2, 2]
    result = fed.play(method, state, 5)
    assert state.kept["p"].tolist() == [exactly(0.48, 0.44), exactly(0.44, 0.48)]
    assert cores_of(state.kept["core"]) == exactly(0.9, 2.9)
    assert cores_of(state.server["cores"]) == exactly(0.9, 2.9)  # cores, not personalized models
    assert cores_of(result.held) == exactly(0.48 * 0.9 + 0.44 * 3, 0.44 * 2.9 + 0.48 * 1)  # 1.752, after the last step
    assert cores_of(fed.deployed(method, state, 5)) == exactly(0.48 * 0.9 + 0.44 * 2.9, 0.44 * 2.9 + 0.48 * 0.9)


def test_the_penalty_is_in_the_step(numbers):
    """p = (.7, .3), p_0 = (½, ½), μ = 1, λ(0) = 1: w^p = 1.6, ∂p = (1.6, 4.8) + (.2, −.2), ∂w_1^c = .7 · 1.6."""
    method = make("apple", lr_p=0.01, mu=1.0)
    fed, state = numbers(method, [1, 3], [[0.7, 0.3]] * 2, [[0.5, 0.5]] * 2)
    result = fed.play(method, state, 5)
    assert state.kept["p"][0].tolist() == exactly(0.682, 0.254)
    assert state.kept["core"][0]["weight"][0].item() == pytest.approx(0.888, abs=1e-15)
    assert result.log()["train"][0] == pytest.approx(1.6**2 / 2 + 0.04, abs=1e-15)
    assert state.kept["p_0"].tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("scheduler", "strengths"), [("cos", (1, 0.5, 0, 0)), ("exp", (1, 1e-3**0.5, 1e-3, 1e-3**1.5))]
)
def test_the_focus_of_each_round(numbers, scheduler, strengths):
    """Without data p − p_0 shrinks by 1 − η_2 λ(r) μ: at full strength in round 1 of 4, with L = ½, so two rounds."""
    method = make("apple", lr_p=0.5, mu=0.4, scheduler=scheduler, L=0.5)
    fed, state = numbers(method, [1, 3], [[1.5, -0.5]] * 2, [[0.5, 0.5]] * 2, half=0.0)
    apart = 1.0
    for strength in strengths:
        fed.play(method, state, 4)
        apart *= 1 - 0.5 * strength * 0.4
        assert state.kept["p"].tolist() == [pytest.approx([0.5 + apart, 0.5 - apart], abs=1e-14)] * 2
    assert cores_of(state.kept["core"]) == [1, 3]


def test_focus():
    assert [apple.focus(r, 10, "cos") for r in (0, 5, 10, 99)] == exactly(1, 0.5, 0, 0)
    assert apple.focus(2.5, 10, "cos") == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert [apple.focus(r, 10, "exp") for r in (0, 10, 20)] == pytest.approx([1, 1e-3, 1e-6])
    assert apple.focus(1, 1e-6, "exp") == apple.focus(1, 1e-6, "cos") == 0  # L far below a round


def random_like(tree, seed, *axes):
    g = torch.Generator().manual_seed(seed)
    return trees.tree_map(lambda t: torch.randn(*axes, *t.shape, generator=g, dtype=torch.float64), tree)


def test_gradients_are_full_inner_products(uneven):
    """∂p_j = <∇f(w^p), w_j> over all elements of all tensors, + λ μ (p_j − p_0j); ∂core = p_0 ∇f(w^p)."""
    fed = uneven()
    model, batch = fed.model, fed.train[3]
    core, others, p = random_like(fed.init(), 0), random_like(fed.init(), 1, 3), tensor([0.4, -0.3, 0.7, 0.1])
    p_0, strength = tensor([0.1, 0.2, 0.3, 0.4]), 0.8
    (by_core, by_p), _ = slope(model, apple.apple_loss, (core, p), batch, others, p_0, strength)
    at = trees.tree_map(lambda own, far: 0.4 * own - 0.3 * far[0] + 0.7 * far[1] + 0.1 * far[2], core, others)
    f, _ = slope(model, model_loss, at, batch)
    assert trees.unequal(by_core, trees.tree_map(lambda t: 0.4 * t, f)) < 1e-13
    flat = [torch.cat([t.flatten() for t in trees.leaves(tree)]) for tree in (f, core)]
    far = torch.cat([t.reshape(3, -1) for t in trees.leaves(others)], 1)
    expected = torch.cat([flat[0] @ flat[1][:, None], far @ flat[0]]) + 0.8 * (p - p_0)
    torch.testing.assert_close(by_p, expected, rtol=1e-12, atol=1e-12)
    assert by_p.abs().min() > 1e-2


def test_weights_start_at_the_shares_of_all_samples(uneven):
    """n = 1, 7, 10, 11 of 29, each client's own first; PFLlib starts at 1/N."""
    kept = uneven().start(make("apple")).kept
    expected = tensor([[1, 7, 10, 11], [7, 10, 11, 1], [10, 11, 1, 7], [11, 1, 7, 10]]) / 29
    assert trees.unequal((kept["p"], kept["p_0"]), (expected, expected)) < 1e-15


def test_a_client_gets_the_others_cores_in_its_order(uneven):
    fed, method = uneven(), make("apple")
    state = fed.start(method)
    for leaf in trees.leaves(state.server["cores"]):
        leaf += torch.arange(4.0).view(4, *[1] * (leaf.ndim - 1))
    message = method.download(state.server, [1, 2])
    for row, order in enumerate([[2, 3, 0], [3, 0, 1]]):
        assert trees.unequal(trees.row(message, row), trees.take(state.server["cores"], order)) == 0


# --- rounds, written out ---------------------------------------------------------------------------------------------


def flat_state(parts):
    return {f"{k}.{name}": t for k, part in enumerate(parts) for name, t in part.items()}


def train(fed, i, core, p, p_0, others, strength, rates):
    """A client's SGD in plain torch: core, others {name: tensor}, p by client number; others[i] is not used."""
    net = nn.Sequential(fed.model.extractor.module, fed.model.head.module).double()
    core = {k: t.clone().requires_grad_() for k, t in core.items()}
    p = p.clone().requires_grad_()
    rule = {"momentum": fed.training.momentum, "weight_decay": fed.training.weight_decay}
    groups = [{"params": list(core.values()), "lr": rates[0]}, {"params": [p], "lr": rates[1]}]
    optimizer, (x, y), size = torch.optim.SGD(groups, **rule), fed.train[i], fed.training.batch_size

    def mix():
        return {
            k: sum(p[j] * (own if j == i else other[k]) for j, other in enumerate(others)) for k, own in core.items()
        }

    for _ in range(fed.training.epochs):
        for s in range(0, len(y), size):
            optimizer.zero_grad()
            loss = cross_entropy(functional_call(net, mix(), x[s : s + size]), y[s : s + size])
            (loss + strength / 2 * ((p - p_0) ** 2).sum()).backward()
            optimizer.step()
    done = {k: t.detach() for k, t in core.items()}
    return done, p.detach(), {k: t.detach() for k, t in mix().items()}


@pytest.mark.parametrize("core_lr", [None, 0.3])
def test_three_rounds_in_plain_torch(uneven, play, in_order, one_thread, core_lr):
    fed = uneven(rule={"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "epochs": 2})
    method = make("apple", lr_p=0.05, mu=2.0, L=0.8, scheduler="cos", core_lr=core_lr)
    state, rounds = play(fed, method, 3)
    cores, p_0 = [flat_state(fed.init())] * 4, tensor([1, 7, 10, 11]) / 29
    p = [p_0] * 4
    for r, result in enumerate(rounds):
        strength = 2.0 * (1 + math.cos(math.pi * r / 2.4)) / 2
        ends = [train(fed, i, cores[i], p[i], p_0, cores, strength, (core_lr or 0.2, 0.05)) for i in range(4)]
        cores, p, held = zip(*ends, strict=True)
        for i in range(4):
            assert trees.unequal(flat_state(trees.row(result.held, i)), held[i]) < 1e-12
    for i in range(4):
        assert trees.unequal(flat_state(trees.row(state.kept["core"], i)), cores[i]) < 1e-12
        assert trees.unequal(flat_state(trees.row(state.server["cores"], i)), cores[i]) < 1e-12
        assert trees.unequal(state.kept["p"][i].roll(i), p[i]) < 1e-12
        assert trees.unequal(p[i], p_0) > 1e-2
    assert trees.unequal(state.server["cores"], rounds[-1].held) > 1e-2  # cores travel, not mixes


# --- limits ----------------------------------------------------------------------------------------------------------


def test_own_core_only_is_local_training(digits, play):
    """p_i = e_i and η_2 = 0. But for rounding, for a step with two rates is not fused."""
    fed, method = digits(dtype=torch.float64, rule={"momentum": 0.9, "epochs": 2}), make("apple", lr_p=0.0)
    state = fed.start(method)
    state.kept["p"][:] = 0
    state.kept["p"][:, 0] = 1
    for _ in range(3):
        result = fed.play(method, state, 3)
    local, others = play(fed, make("local"), 3)
    assert trees.unequal(state.kept["core"], local.kept) < 1e-13
    assert trees.unequal(result.held, others[-1].held) < 1e-13


def test_a_client_alone_trains_alone(by_hand, linear, play):
    net = models.from_modules(linear(2, 3), linear(3, 2), (2,), 2)
    fed = by_hand(net, [(torch.linspace(-1, 1, 14).view(7, 2), [0, 1] * 3 + [0])], rule={"lr": 0.1})
    for settings in ({}, {"budget": 3}):
        _, rounds = play(fed, make("apple", lr_p=0.0, **settings), 3)
        assert trees.unequal(rounds[-1].held, play(fed, make("local"), 3)[0].kept) < 1e-14
        assert rounds[-1].bytes_down.tolist() == [0]


def test_fixed_weights_deploy_the_average_of_the_cores(digits, play):
    """η_2 = 0: p stays p_0, so w^p is FedAvg's average, for every client the same."""
    fed = digits(dtype=torch.float64, join_ratio=0.5)
    state, _ = play(fed, make("apple", lr_p=0.0), 4)
    average = trees.average(state.server["cores"], fed.n)
    assert trees.unequal(fed.deployed(make("apple", lr_p=0.0), state, 5), trees.expand(average, 6)) < 1e-14
    assert trees.unequal(average, fed.init()) > 1e-3


def test_mu_draws_the_weights_back(digits, play):
    """In the end p − p_0 is −∇/μ; rates η_2 μ up to ½."""
    fed = digits(rule={"epochs": 10})
    moved = []
    for mu in (0.0, 10.0, 50.0):
        kept = play(fed, make("apple", lr_p=0.01, mu=mu, L=1.0), 1)[0].kept
        moved.append(float((kept["p"] - kept["p_0"]).abs().max()))
    assert moved[0] > 2 * moved[1] > 4 * moved[2] > 0


# --- batch-norm ------------------------------------------------------------------------------------------------------


def test_statistics_are_the_clients_own_and_stay_at_home(by_hand, linear):
    """Also with negative weights, by which a mixed variance would be negative; the counter is an integer still."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g = torch.Generator().manual_seed(0)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2)) for n in (4, 8, 12)]
    fed, method = by_hand(net, clients, rule={"lr": 0.05, "batch_size": 4}), make("apple")
    state = fed.start(method)
    state.kept["p"][:] = tensor([0.6, -1.5, 0.2])
    for _ in range(3):
        result = fed.play(method, state, 3)
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert not set(names) & (state.server["cores"][0].keys() | method.download(state.server, [0])[0].keys())
    assert result.bytes_up.tolist() == [8 * (16 + 8 + 10)] * 3
    assert result.bytes_down.tolist() == [8 * 2 * (16 + 8 + 10)] * 3
    deployed = fed.deployed(method, state, 4)
    assert state.kept["core"][0]["1.num_batches_tracked"].tolist() == [3, 6, 9]
    for name in names:
        for tree in (deployed, result.held):
            assert torch.equal(tree[0][name], state.kept["core"][0][name])
    assert (state.kept["core"][0]["1.running_var"] > 0).all()
    assert all(leaf.isfinite().all() for leaf in trees.leaves((state.kept, deployed)))


def test_statistics_are_of_the_personalized_model(by_hand, scalar_net):
    """x = 2 and 4 (mean 3), cores 1 and 5, p = (½, ½): w^p x has mean 9, and the statistics go a tenth of the way."""
    net = models.from_modules(
        nn.Sequential(scalar_net(1, 1).extractor.module, nn.BatchNorm1d(1)), scalar_net(1, 1, 2).head.module, (1,), 2
    )
    fed = by_hand(net, [([[2.0], [4.0]], [0, 1])] * 2, rule={"lr": 0.0})
    state = fed.start(make("apple", lr_p=0.0))
    for tree in (state.server["cores"], state.kept["core"]):
        tree[0]["0.weight"][:, 0] = tensor([1, 5])
    fed.play(make("apple", lr_p=0.0), state, 1)
    assert state.kept["core"][0]["1.running_mean"].flatten().tolist() == exactly(0.9, 0.9)


# --- a budget --------------------------------------------------------------------------------------------------------


def test_cores_come_in_turn_and_are_remembered(numbers):
    """Five clients, M = 3: client 0 is sent 1, 2, 3, then 4, 1, 2, then 3, 4, 1; its mix has the last copies it got."""
    method = make("apple", lr_p=0.0, budget=3)
    fed, state = numbers(method, [1, 10, 100, 1000, 10000], [[1.0] * 5] * 5, rule={"epochs": 0})
    for turn, sent in enumerate([[1, 2, 3], [4, 1, 2], [3, 4, 1], [2, 3, 4], [1, 2, 3]]):
        before = state.kept["cores"][0]["weight"].clone()
        state.server["cores"][0]["weight"] += 1  # as if all others had trained
        server = state.server["cores"][0]["weight"].flatten()
        message = method.download(state.server, [0, 3])[0]["weight"].squeeze(-1)
        assert torch.equal(message, server[torch.tensor([sent, [(3 + j) % 5 for j in sent]])])
        known = before[0, :, 0].clone()
        known[[j - 1 for j in sent]] = server[sent]
        assert fed.deployed(method, state, 9)[0]["weight"][0].item() == pytest.approx(float(1 + known.sum()))
        assert torch.equal(state.kept["cores"][0]["weight"], before)
        result = fed.play(method, state, 9)
        assert state.kept["cores"][0]["weight"][0, :, 0].tolist() == known.tolist()
        assert result.held[0]["weight"][0].item() == pytest.approx(float(1 + known.sum()))
        state.server["cores"][0]["weight"][:, 0] = server  # what clients uploaded did not train
        assert state.server["turn"].tolist() == state.kept["turn"].tolist() == [(3 * (turn + 1)) % 4] * 5


def test_what_never_came_is_the_initial_model(digits, play):
    fed, method = digits(join_ratio=0.5), make("apple", budget=1)
    state, rounds = play(fed, method, 2)
    start = trees.expand(fed.init(), 6)
    joins = [sum(i in result.ids for result in rounds) for i in range(6)]
    assert {0, 2} <= set(joins)
    for i, times in enumerate(joins):
        for place in range(times, 5):
            known = trees.tree_map(lambda t, i=i, place=place: t[i, place], state.kept["cores"])
            assert trees.unequal(known, trees.row(start, i)) == 0
    assert state.server["turn"].tolist() == state.kept["turn"].tolist() == joins


def test_a_large_budget_is_none(digits, play):
    fed = digits(join_ratio=0.5)
    ends = [play(fed, make("apple", lr_p=0.01, budget=budget), 3) for budget in (None, 5, 6, 1000)]
    for state, rounds in ends[1:]:
        assert trees.unequal((state.server, state.kept), (ends[0][0].server, ends[0][0].kept)) == 0
        assert trees.unequal(rounds[-1].held, ends[0][1][-1].held) == 0
    small, _ = play(fed, make("apple", lr_p=0.01, budget=4), 3)
    assert trees.unequal(small.kept["core"], ends[0][0].kept["core"]) > 0


@pytest.mark.parametrize(("budget", "sent"), [(None, 5), (1, 1), (4, 4), (5, 5), (9, 5)])
def test_bytes_are_of_the_others_cores(digits, budget, sent):
    fed = digits(join_ratio=0.5)
    history = experiment.run(make("apple", budget=budget), fed, 2)
    P, joined = sum(t.numel() for t in trees.leaves(fed.init())), history.clients[history.clients["joined"]]
    assert joined["bytes_down"].tolist() == [4 * sent * P] * 6
    assert joined["bytes_up"].tolist() == [4 * P] * 6


def test_with_a_budget_clients_are_themselves_among_others_and_untouched_when_absent(digits, play):
    fed, method = digits(join_ratio=0.5), make("apple", lr_p=0.01, budget=2)
    state, _ = play(fed, method, 3)
    before, everyone = trees.clone(state.kept), list(range(6))
    message = received(method.download(state.server, everyone), 6)
    sent = trees.clone(message)
    together = method.local(fed.clients(everyone, 4, 5), state.kept, message)
    alone = method.local(fed.clients([4], 4, 5), trees.take(state.kept, [4]), trees.take(message, [4]))
    assert trees.unequal(alone, trees.take(together, [4])) == 0
    method.deploy(fed.clients(everyone, 4, 5), state.kept, message)
    assert trees.unequal((state.kept, message), (before, sent)) == 0
    ids = fed.play(method, state, 5).ids.tolist()
    absent = [i for i in everyone if i not in ids]
    assert trees.unequal(trees.take(state.kept, absent), trees.take(before, absent)) == 0
    assert trees.unequal(trees.take(state.kept["cores"], ids), trees.take(before["cores"], ids)) > 0


# --- engines, costs, settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 2])
def test_stacked_clients_end_where_the_loop_does(digits, play, budget):
    ends = []
    for engine in ("loop", "stacked"):
        fed = digits(engine=engine, dtype=torch.float64, join_ratio=0.5)
        state, rounds = play(fed, make("apple", lr_p=0.01, budget=budget), 3)
        ends.append((state.server, state.kept, rounds[-1].held))
    assert trees.unequal(*ends) < 1e-10


def test_flops_are_those_of_the_model(digits, play):
    """As FedAvg's: the mix is made once a step, whatever its samples, and is not counted."""
    flops = [play(digits("cnn-small"), make(name), 1)[1][0].flops() for name in ("apple", "fedavg")]
    assert flops[0].tolist() == flops[1].tolist()


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        *[("lr_p", -0.1, "-0.1"), ("mu", -1.0, "-1.0"), ("scheduler", "linear", "'linear'"), ("L", 0.0, "0.0")],
        *[("L", 1.1, "1.1"), ("core_lr", -1.0, "-1.0"), ("budget", 0, "0"), ("budget", 1.5, "1.5")],
    ],
)
def test_impossible_settings(setting, value, says):
    with pytest.raises(ValueError, match=f"^{setting}={says}: must be "):
        make("apple", **{setting: value})
