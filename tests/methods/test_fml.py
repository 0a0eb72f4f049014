"""FML: every client's own model and the shared meme teach each other."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, one_hot, softmax

from pflkit import data, experiment, models, partition, trees
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.methods.fml import divergence, mutual_loss

RULE = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 0.5}
NAMES, SMALLEST = ("mlp-1", "mlp", "mlp-4"), "mlp"  # 4,810 parameters; mlp-4 has 4,842
MLPS, CNNS = ([f"{kind}-{i}" for i in range(1, 6)] for kind in ("mlp", "cnn"))


@pytest.fixture(scope="module")
def mixed(digits):
    """A function that makes a Federation of 6 unequal clients with different models."""

    def make(names=NAMES, **options):
        return digits([models.build(name, (1, 8, 8), 10) for name in names], **options)

    return make


@pytest.fixture(scope="module")
def linear_pair():
    """A function that makes a Pair of linear models [inputs -> K], and params (w, v) of the weights W [K, inputs]."""

    def make(*weights):
        nets = [models.from_modules(nn.Identity(), nn.Linear(W.shape[1], len(W)), W.shape[1:], len(W)) for W in weights]
        return models.Pair(*nets), tuple(({}, {"weight": W, "bias": W.new_zeros(len(W))}) for W in weights)

    return make


def own(whole, i, groups=3):
    """Client i's part of a whole of three groups."""
    return trees.row(whole[i % groups], i // groups)


# --- hand numbers ----------------------------------------------------------------------------------------------------


def test_hand_numbers(linear_pair):
    """Logits (1, 2, 3) and (3, 2, 1), label 2: KL 1.150421 either way, CE .407606 and 2.407606."""
    w, v, y = torch.tensor([[1.0, 2, 3]]).double(), torch.tensor([[3.0, 2, 1]]).double(), torch.tensor([2])
    p = softmax(w, 1)[0]
    assert p.tolist() == pytest.approx([0.0900, 0.2447, 0.6652], abs=5e-5)
    for kl in (divergence(v, w), divergence(w, v), 2 * (p[2] - p[0])):
        assert kl.item() == pytest.approx(1.150421, abs=5e-7)
    assert cross_entropy(w, y).item() == pytest.approx(0.407606, abs=5e-7)
    assert cross_entropy(v, y).item() == pytest.approx(2.407606, abs=5e-7)
    pair, params = linear_pair(w.T, v.T)
    total, parts = mutual_loss(pair, params, (torch.ones(1, 1).double(), y), 0.5, 0.5)
    assert parts["private"].item() == pytest.approx(0.779013, abs=1e-6)
    assert parts["meme"].item() == pytest.approx(1.779013, abs=1e-6)
    assert total.item() == pytest.approx(0.779013 + 1.779013, abs=1e-6)
    _, parts = mutual_loss(pair, params, (torch.ones(1, 1).double(), y), 0.9, 0.2)
    assert parts["private"].item() == pytest.approx(0.9 * 0.407606 + 0.1 * 1.150421, abs=1e-6)
    assert parts["meme"].item() == pytest.approx(0.2 * 2.407606 + 0.8 * 1.150421, abs=1e-6)


def test_the_divergence_is_summed_over_classes_and_averaged_over_samples():
    """Other code averages over classes too, which is 1/K of it. KL(p ‖ q) is not KL(q ‖ p)."""
    g = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, 5, generator=g, dtype=torch.float64) for _ in range(2))
    found = divergence(p, q).item()
    assert found == pytest.approx(kl_div(log_softmax(q, 1), softmax(p, 1), reduction="batchmean").item(), rel=1e-12)
    assert found == pytest.approx(np.mean([divergence(p[[i]], q[[i]]).item() for i in range(7)]), rel=1e-12)
    assert abs(found - divergence(q, p).item()) > 1e-2


def test_extreme_logits_are_finite():
    """Sure and wrong: KL(p ‖ q) = 2000, and 0 log 0 = 0."""
    p, q = torch.tensor([[1000.0, -1000.0]]), torch.tensor([[-1000.0, 1000.0]]).requires_grad_()
    value = divergence(p, q)
    assert value.item() == 2000
    assert torch.autograd.grad(value, q)[0].tolist() == [[-1.0, 1.0]]


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.9, 0.2), (0.0, 1.0)])
def test_each_loss_moves_its_own_model_only(linear_pair, alpha, beta):
    """∂L_w/∂logits = (α (p_w − y) + (1 − α) (p_w − p_v)) / B, as of a teacher that is a constant; so for v."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=g).double(), torch.tensor([0, 1, 2, 2, 0, 1])
    pair, params = linear_pair(*(torch.randn(3, 4, generator=g).double() for _ in range(2)))
    weights = [part[1]["weight"].requires_grad_() for part in params]
    total, parts = mutual_loss(pair, params, (x, y), alpha, beta)
    p = [softmax(x @ W.T, 1).detach() for W in weights]
    pure = [
        (share * (p[k] - one_hot(y, 3)) + (1 - share) * (p[k] - p[1 - k])) / 6 for k, share in ((0, alpha), (1, beta))
    ]
    for loss in (total, parts["private"] + parts["meme"]):
        for found, logits in zip(torch.autograd.grad(loss, weights, retain_graph=True), pure, strict=True):
            assert (found - logits.T @ x).abs().max() < 1e-15
    for k, name in enumerate(("private", "meme")):
        found = torch.autograd.grad(parts[name], weights, retain_graph=True, allow_unused=True)
        assert (found[k] - pure[k].T @ x).abs().max() < 1e-15
        assert found[1 - k] is None  # not even 0: no path leads there


def test_equal_models_have_nothing_to_teach(linear_pair):
    """Both KL and their gradients are 0, but for rounding."""
    W, x = torch.linspace(-1, 2, 12).double().view(3, 4), torch.linspace(-2, 1, 20).double().view(5, 4)
    pair, params = linear_pair(W.clone(), W.clone())
    weights = [part[1]["weight"].requires_grad_() for part in params]
    total, _ = mutual_loss(pair, params, (x, torch.tensor([0, 1, 2, 0, 1])), 0.0, 0.0)
    assert abs(total.item()) < 1e-15
    assert all(g.abs().max() < 1e-15 for g in torch.autograd.grad(total, weights))


def test_in_round_1_equal_models_train_as_one_at_half_the_rate(uneven, play):
    """One architecture, one start, α = β = ½: w_i = v_i = Local's, at half its rate; afterwards they differ."""
    _, (first, second) = play(fed := uneven(rule={"lr": 0.1}), make("fml"), 2)
    state, _ = play(fed, make("fml"), 1)
    _, (local,) = play(uneven(rule={"lr": 0.05}), make("local"), 1)
    assert trees.unequal(first.held, local.held) < 1e-14
    assert trees.unequal(state.server, trees.average(local.held, [1] * 4)) < 1e-14
    _, rounds = play(uneven(rule={"lr": 0.05}), make("local"), 2)
    assert all(trees.unequal(trees.row(second.held, i), trees.row(rounds[1].held, i)) > 1e-4 for i in range(4))


# --- a round, written out --------------------------------------------------------------------------------------------


def train(peer, meme, alpha, beta):
    """SGD of a Plain client's own model and of the module `meme`, each with its own loss and optimizer."""
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    private = [*peer.r.parameters(), *peer.h.parameters()]
    optimizers = [torch.optim.SGD(params, **rule) for params in (private, meme.parameters())]
    for x, y in peer.batches() * peer.rule.epochs:
        logits = peer.h(peer.r(x)), meme(x)
        for k, (params, share) in enumerate(((private, alpha), (list(meme.parameters()), beta))):
            optimizers[k].zero_grad()
            mine, teacher = logits[k], logits[1 - k].detach()
            kl = kl_div(log_softmax(mine, 1), softmax(teacher, 1), reduction="batchmean")
            (share * cross_entropy(mine, y) + (1 - share) * kl).backward()
            nn.utils.clip_grad_norm_(params, peer.rule.clip)
        for optimizer in optimizers:  # both at once: neither has learned from the other's step
            optimizer.step()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.8, 0.3)])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, alpha, beta, weighted):
    """A meme of another architecture. Each round's fork is the server's meme, and its momentum starts anew."""
    fed = uneven(rule=RULE | {"lr": 0.1})
    settings = {"alpha": alpha, "beta": beta, "student": "mlp-5", "weighted": weighted}
    state, rounds = play(fed, make("fml", **settings), 3)
    student = fed.second("mlp-5")
    private, meme = [fed.init()] * 4, fed.init(student)
    for result in rounds:
        forks = []
        for i in range(4):
            peer = plain(fed, i).load(*private[i])
            fork = nn.Sequential(*(copy.deepcopy(part.module).double() for part in (student.extractor, student.head)))
            for module, values in zip(fork, meme, strict=True):
                module.load_state_dict(values)
            train(peer, fork, alpha, beta)
            private[i] = peer.state()
            forks.append(tuple({k: t.clone() for k, t in module.state_dict().items()} for module in fork))
            assert trees.unequal(trees.row(result.held, i), private[i]) < 1e-6  # torch clips at c + 10^-6
        n = fed.n if weighted else [1] * 4
        meme = tuple(plain.mean([fork[k] for fork in forks], n) for k in (0, 1))
    assert trees.unequal(state.server, meme) < 1e-6
    assert all(trees.unequal(trees.row(state.kept, i), private[i]) < 1e-6 for i in range(4))
    assert trees.unequal(meme, fed.init(student)) > 1e-2


def test_the_mean_is_uniform_or_weighted_over_the_rounds_clients(uneven, play):
    """Of 3 of the clients, 4 and 11 samples apart, with one of whom nothing is averaged."""
    ends = []
    for weighted in (False, True):
        fed, method = uneven(rule={"lr": 0.1}, join_ratio=0.75), make("fml", weighted=weighted)
        state = fed.start(method)
        ids = fed.sample(1)
        _, memes, _ = method.local(fed.clients(ids, 1, 1), trees.take(state.kept, ids), trees.expand(state.server, 3))
        fed.play(method, state, 1)
        n = torch.tensor(fed.n[ids] if weighted else [1.0] * 3, dtype=torch.float64)
        mean = trees.tree_map(lambda t, n=n: torch.einsum("c,c...->...", n / n.sum(), t), memes)
        assert trees.unequal(state.server, mean) < 1e-14
        ends.append(state.server)
    assert trees.unequal(*ends) > 1e-4


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "threads"])
@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
@pytest.mark.parametrize(("beta", "student"), [(1.0, ""), (0.0, "mlp-5"), (0.3, "mlp-1")])
def test_alpha_1_is_local(digits, play, model, engine, beta, student):
    """Bit for bit, with momentum, decay and clipping, whatever the meme is and does."""
    fed = digits(model, rule=RULE, engine=engine)
    state, rounds = play(fed, make("fml", alpha=1.0, beta=beta, student=student), 3)
    local, others = play(fed, make("local"), 3)
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held, theirs.held) == 0
    assert trees.unequal(state.kept, local.kept) == 0
    assert trees.unequal(local.kept, fed.groups[0].each_client(fed.init())) > 0


@pytest.mark.parametrize("alpha", [1.0, 0.4])
@pytest.mark.parametrize(("names", "student"), [(NAMES, ""), (("mlp", "mlp-1"), "cnn-small")])
def test_beta_1_is_fedavg_of_the_meme(mixed, digits, play, names, student, alpha):
    """Bit for bit, as if all had the meme for their model; with α = 1 too, private models are Local's."""
    method, rule = make("fml", alpha=alpha, beta=1.0, student=student, weighted=True), RULE
    for join_ratio in (0.5, 1.0):
        fed = mixed(names, rule=rule, engine="loop", join_ratio=join_ratio)
        alike = digits(student or SMALLEST, rule=rule, engine="loop", join_ratio=join_ratio)
        (state, _), (avg, _) = play(fed, method, 3), play(alike, make("fedavg"), 3)
        assert trees.unequal(state.server, avg.server) == 0
        assert trees.unequal(state.server, alike.init()) > 0
    local, _ = play(fed, make("local"), 3)
    assert (trees.unequal(state.kept, local.kept) == 0) == (alpha == 1)


def test_without_labels_nothing_depends_on_them(by_hand, linear, play):
    """α = β = 0, bit for bit; the models differ, so they do move."""
    net, g = models.from_modules(nn.Identity(), linear(4, 3), (4,), 3), torch.Generator().manual_seed(0)
    x, ends = torch.randn(12, 4, generator=g), []
    for y in ([0, 1, 2] * 4, [2, 2, 0] * 4):
        fed = by_hand(net, [(x, y)], rule={"lr": 0.1})
        ends.append(play(fed, make("fml", alpha=0.0, beta=0.0, student="mlp-5"), 2)[0])
    assert trees.unequal(*((end.server, end.kept) for end in ends)) == 0
    assert trees.unequal(trees.row(ends[0].kept, 0), fed.init()) > 1e-3
    assert trees.unequal(ends[0].server, fed.init(fed.second("mlp-5"))) > 1e-3


# --- who learns from whom --------------------------------------------------------------------------------------------


def test_clients_learn_from_each_other_through_the_meme(by_hand, linear, play):
    """The authors' last commits neither fork nor merge. Here another's data matter from round 2 on, and not before."""
    net, g = models.from_modules(nn.Identity(), linear(4, 3), (4,), 3), torch.Generator().manual_seed(0)
    x, others = torch.randn(12, 4, generator=g), [torch.randn(12, 4, generator=g) for _ in range(2)]
    for student in ("", "mlp-5"):
        for alpha, learns in ((0.5, True), (1.0, False)):
            feds = [by_hand(net, [(x, [0, 1, 2] * 4), (other, [0, 1, 2] * 4)], rule={"lr": 0.1}) for other in others]
            rounds = [play(fed, make("fml", alpha=alpha, student=student), 2)[1] for fed in feds]
            gaps = [trees.unequal(*(trees.row(r[t].held, 0) for r in rounds)) for t in (0, 1)]
            assert gaps[0] == 0 and (gaps[1] > 1e-5) == learns and (gaps[1] == 0) == (not learns)


def test_private_models_stay_and_memes_travel(mixed, play):
    """`before` is the kept model, to the bit; what the server sends is its meme, of the smallest model, to all."""
    fed = mixed(join_ratio=0.5)
    state, rounds = play(fed, make("fml"), 3)
    assert trees.unequal(fed.deployed(make("fml"), state, 4), state.kept) == 0
    smallest = models.build(SMALLEST, (1, 8, 8), 10)
    assert trees.unequal(trees.full_like(state.server, 0), trees.full_like(smallest.init(), 0)) == 0
    for result in rounds:
        assert set(result.bytes_down) == set(result.bytes_up) == {4 * smallest.size()}
    for (g, _, rows), held in zip(fed.by_group(rounds[-1].ids), fed.parts(rounds[-1].held), strict=True):
        assert trees.unequal(held, trees.take(state.kept[g], rows)) == 0  # what it was scored with is what it keeps


@pytest.mark.parametrize("student", ["", "mlp-5", "mlp-1"])
def test_all_begin_with_the_initial_values_of_every_method(mixed, student):
    fed = mixed()
    state = fed.start(make("fml", student=student))
    for i, group in enumerate(fed.groups * 2):
        assert trees.unequal(own(state.kept, i), group.init()) == 0
    assert trees.unequal(state.server, models.build(student or SMALLEST, (1, 8, 8), 10).init()) == 0


def test_batch_norm_of_the_meme_is_averaged_with_it(by_hand, linear, play):
    """The authors' server leaves the old statistics in the sum. Counters 2, 3 and 2 of 4 clients' round, and 2: 2."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g = torch.Generator().manual_seed(0)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2)) for n in (8, 12, 6, 8)]
    fed, method = by_hand(net, clients, rule={"lr": 0.1, "batch_size": 4}), make("fml")
    state, everyone = fed.start(method), np.arange(4)
    for t in (1, 2):
        kept, message = trees.clone(state.kept), trees.repeat(state.server, 4)
        _, memes, _ = method.local(fed.clients(everyone, t, 2), kept, message)
        result = fed.play(method, state, 2)
        for name in ("1.running_mean", "1.running_var"):
            assert trees.unequal(state.server[0][name], memes[0][name].mean(0)) < 1e-14
        counters = memes[0]["1.num_batches_tracked"]
        assert counters.tolist() == [2 * (t - 1) + b for b in (2, 3, 2, 2)]
        assert state.server[0]["1.num_batches_tracked"].dtype == torch.int64
        assert state.server[0]["1.num_batches_tracked"].item() == 2 * t
    assert result.held[0]["1.num_batches_tracked"].tolist() == [4, 6, 4, 4]  # the private ones': each client's own


def test_a_single_sample_is_left_out_for_both_where_either_has_batch_norm(by_hand, linear):
    """5 samples in batches of 4: one is skipped in each epoch, for a private model without batch-norm too."""
    normed = models.from_modules(nn.BatchNorm1d(3), nn.Linear(3, 2), (3,), 2)
    net = models.from_modules(nn.Sequential(linear(3, 9), nn.ReLU()), linear(9, 2), (3,), 2)
    fed = by_hand(net, [(torch.linspace(-1, 1, 15).view(5, 3), [0, 1, 0, 1, 1])], rule={"batch_size": 4})
    fed.second = lambda name: normed
    clients, method = fed.clients(np.array([0]), 1, 1), make("fml")
    state = fed.start(method)
    _, (meme, _), _ = method.local(clients, state.kept, trees.expand(state.server, 1))
    assert clients.log["skipped"].tolist() == [1] and meme["num_batches_tracked"].tolist() == [1]


# --- engines, records, sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
def test_stacked_is_the_loop(mixed, play, clip):
    """But for rounding; a refusal by torch.vmap would warn, which fails a test."""
    ends = []
    for engine in ("loop", "stacked"):
        fed = mixed(join_ratio=0.7, engine=engine, rule={"momentum": 0.9, "clip": clip})
        ends.append(play(fed, make("fml"), 2)[0])
        assert all(bool(group.engine.known) == (engine == "stacked") for group in fed.groups)
    assert trees.unequal(*((end.server, end.kept) for end in ends)) < 1e-5


def test_both_losses_are_recorded(digits):
    history = experiment.run(make("fml", alpha=0.7, beta=0.4), digits(), 2)
    both = history.rounds["loss.train.private"] + history.rounds["loss.train.meme"]
    assert history.rounds["loss.train"].dropna().tolist() == pytest.approx(both.dropna().tolist(), rel=1e-6)
    assert (history.rounds["loss.train.private"].dropna() != history.rounds["loss.train.meme"].dropna()).all()


@pytest.mark.parametrize("names", [MLPS, CNNS], ids=["mlp", "cnn"])
def test_five_models_at_half_the_clients(names, play):
    """FedGH's CNN-1 to CNN-5, and MLPs: the fifth is the smallest, so the meme."""
    x, y = torch.randn(60, 1, 16, 16, generator=torch.Generator().manual_seed(0)), np.arange(60) % 3
    rows = np.split(np.arange(60), 10)
    split = partition.custom(y, [own[:4] for own in rows], [own[4:] for own in rows])
    nets = [models.build(name, (1, 16, 16), 3) for name in names]
    fed = Federation(data.Dataset("random", x, y, (0, 1, 2)), split, nets, join_ratio=0.5, device="cpu")
    state, rounds = play(fed, make("fml"), 2)
    assert all(len(result.ids) == 5 and set(result.bytes_up) == {4 * nets[4].size()} for result in rounds)
    assert all(leaf.isfinite().all() for leaf in trees.leaves((state.server, state.kept)))
    joined = {i for result in rounds for i in result.ids.tolist()}
    moved = {i for i in range(10) if trees.unequal(own(state.kept, i, 5), fed.groups[i % 5].init()) > 0}
    assert moved == joined and len(joined) < 10
    assert trees.unequal(state.server, nets[4].init()) > 0


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_shares_go_from_0_to_1(name):
    for fine in (0, 1, 0.25):
        make("fml", **{name: fine})
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=rf"^{name}={wrong}: must be a finite number from 0 to 1$"):
            make("fml", **{name: wrong})


def test_other_settings_are_refused_by_name(digits, monkeypatch):
    with pytest.raises(ValueError, match=r"^student='nosuch': must be one of '', 'cnn', "):
        make("fml", student="nosuch")
    with pytest.raises(ValueError, match=r"^weighted=1: must be of type bool$"):
        make("fml", weighted=1)
    with pytest.raises(ValueError, match=r"^weighted='no': must be True or False$"):
        METHODS["fml"](weighted="no")
    monkeypatch.setattr(Federation, "play", None)  # before anything is trained
    for student in ("cnn-1", "resnet18", "fasttext"):
        with pytest.raises(ValueError, match=f"^model='{student}': does not fit inputs of shape "):
            experiment.run(make("fml", student=student), digits(), 1)


def test_defaults():
    """The authors' shares, not PFLlib's α = 1, β = 0, with which the one learns nothing, and the other no labels."""
    method = make("fml")
    assert (method.alpha, method.beta, method.student, method.weighted) == (0.5, 0.5, "", False)
    assert (method.product, method.heterogeneous) == ("after", True)
