"""FedPHP: FedAvg whose clients are taught by moving averages of their own former models."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from pflkit import experiment, models, trees
from pflkit.methods import fedphp, make

RULE = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}

# --- hand numbers: momentum and moving average -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joined", "expected", "most", "mu"),
    [
        *[(0, 100, 0.9, 0.0), (50, 100, 0.9, 0.45), (100, 100, 0.9, 0.9), (200, 100, 0.9, 0.9)],
        *[(1, 4, 0.5, 0.125), (0, 0.2, 0.9, 0.0), (1, 0.2, 0.9, 0.9), (3, 4, 0.0, 0.0), (4, 4, 1.0, 1.0)],
    ],
)
def test_momentum_grows_with_the_rounds_that_a_client_joined(joined, expected, most, mu):
    assert fedphp.momentum(torch.tensor([joined]), expected, most).tolist() == pytest.approx([mu], abs=1e-15)


@pytest.fixture
def one_number(by_hand, scalar_net, monkeypatch):
    """A function that plays rounds in which θ_i becomes the next of `ends`: each round's v_i, and w^t."""

    def play(ends, rounds, max_mu=0.9):
        fed = by_hand(scalar_net(5.0, 1), [([[0.0]], [0])], rule={"lr": 1.0})
        method, seen = make("fedphp", lam=0.0, max_mu=max_mu), []
        state = fed.start(method)
        for end in ends:

            def loss(model, p, batch, end=end):
                return ((p[0]["weight"] - end) ** 2).mean() / 2

            monkeypatch.setattr(fedphp, "model_loss", loss)
            held = fed.play(method, state, rounds).held
            assert held["global"][0]["weight"].item() == state.server[0]["weight"].item() == end
            assert held["personal"][0]["weight"].item() == state.kept["hpm"][0]["weight"].item()
            seen.append(held["personal"][0]["weight"].item())
        return seen

    return play


def test_the_moving_average_of_three_models(one_number):
    """Of two rounds, μ = 0, .45, .9: 1, then .45·1 + .55·3 = 2.1, then .9·2.1 + .1·(−8) = 1.09; then μ stays .9."""
    assert one_number([1.0, 3.0, -8.0, 0.0], 2) == pytest.approx([1, 2.1, 1.09, 0.981], abs=1e-14)
    assert one_number([1.0, 3.0, -8.0], 2, max_mu=0.0) == [1.0, 3.0, -8.0]
    assert one_number([1.0, 3.0], 1, max_mu=1.0) == [1.0, 1.0]


def test_counters_stay_integers():
    """.45·8 + .55·3 = 5.25 and .45·9 + .55·4 = 6.25, of a client that joined; the newest of one that had not."""
    old, new = torch.tensor([[8, 9], [8, 9]]), torch.tensor([[3, 4], [3, 4]])
    mean = fedphp.inherited(old, new, torch.tensor([0.45, 0.0], dtype=torch.float64))
    assert mean.dtype == torch.int64 and mean.tolist() == [[5, 6], [3, 4]]
    assert fedphp.inherited(old, new, torch.tensor([0.9, 0.5])).tolist() == [[8, 8], [6, 6]]  # 7.5, 5.5, 6.5: to even


# --- hand numbers: what the teacher says -----------------------------------------------------------------------------

OLD = (20, 30, 40, 100)  # PFLlib's kernels exp(−d² / 2a), of a = 10, 15, 20 and 50


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_mmd_by_hand():
    """{0, 1} and {1, 2}: 2 (2 + 2 e^(−1/b)) / 4 − 2 (e^(−1/b) + e^(−4/b) + 1 + e^(−1/b)) / 4 = (1 − e^(−4/b)) / 2."""
    found = fedphp.mmd(column(0, 1), column(1, 2), OLD).item()
    assert found == pytest.approx(sum((1 - np.exp(-4 / b)) / 2 for b in OLD), abs=1e-14)
    assert found == pytest.approx(0.220235, abs=5e-7)


def test_mmd_of_batches_of_two_sizes():
    """{0} and {0, 1}, b = 1: 1 + (2 + 2/e) / 4 − 2 (1 + 1/e) / 2 = (1 − 1/e) / 2."""
    assert fedphp.mmd(column(0), column(0, 1), (1.0,)).item() == pytest.approx((1 - np.exp(-1)) / 2, abs=1e-15)


def test_mmd_is_a_distance():
    """0 of a batch and itself, in another order too; symmetric; positive."""
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        x, y = torch.randn(2, 7, 3, 2, generator=g, dtype=torch.float64)
        for widths in (None, OLD):
            assert abs(fedphp.mmd(x, x, widths).item()) < 1e-14
            assert abs(fedphp.mmd(x, x.flip(0), widths).item()) < 1e-14
            assert fedphp.mmd(x, y, widths).item() == pytest.approx(fedphp.mmd(y, x, widths).item(), abs=1e-14)
            assert fedphp.mmd(x, y, widths).item() > 1e-3


def test_bandwidths_are_of_the_data():
    """{0, 1} and {1, 2}: the 12 squared distances between different rows have the sum 2 (1+1+4+0+1+1) = 16, b = 4/3."""
    x, y = column(0, 1), column(1, 2)
    b = [4 / 3 * k for k in (0.25, 0.5, 1, 2, 4)]
    assert fedphp.mmd(x, y).item() == pytest.approx(sum((1 - np.exp(-4 / w)) / 2 for w in b), abs=1e-7)
    assert fedphp.mmd(100 * x, 100 * y).item() == pytest.approx(fedphp.mmd(x, y).item(), abs=1e-7)  # of any scale
    assert fedphp.mmd(column(3, 3), column(3, 3)).item() == 0  # no distance at all


def test_bandwidths_have_no_gradient():
    """dMMD²/dx of {x} and {y} = Σ 4 (x − y) / b · e^(−d²/b), b held fixed."""
    x, y = column(0.5).requires_grad_(), column(2.0)
    fedphp.mmd(x, y).backward()
    b = 2.25 * np.array([0.25, 0.5, 1, 2, 4])
    assert x.grad.item() == pytest.approx((4 * -1.5 / b * np.exp(-2.25 / b)).sum(), rel=1e-7)


@pytest.mark.parametrize("apart", [1.0, 1e-3])
def test_mmd_far_from_the_origin_in_float32(apart):
    """‖z‖² = 5·10⁷ is known to 4 there, and distances all the same: they are of features around their mean."""
    g = torch.Generator().manual_seed(0)
    x = 1e3 + torch.randn(9, 50, generator=g)
    y = x + apart * torch.randn(9, 50, generator=g)
    slopes = []
    for kind in (torch.float32, torch.float64):
        z = x.to(kind, copy=True).requires_grad_()
        fedphp.mmd(z, y.to(kind)).backward()
        slopes.append(z.grad.double())
    assert (slopes[0] - slopes[1]).abs().max() < 1e-3 * slopes[1].abs().max()


def test_mmd_takes_no_memory_for_all_pairs_features():
    """Of two batches of 50 samples with 300 features, 100² distances and 100 · 300 features: not 100² · 300."""
    x, y = torch.randn(2, 50, 300, generator=torch.Generator().manual_seed(0))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        fedphp.mmd(x.requires_grad_(), y).backward()
    assert max(sizes) == 100 * 300


@pytest.mark.parametrize("d", [1e-2, 1e-4, 1e-8])
def test_a_single_sample_is_not_torn(by_hand, scalar_net, d):
    """Its MMD² would be 6.2 at the distances d from the teacher that are not tiny, with a gradient of 4.8 / d."""
    fed = by_hand(scalar_net(1.0, 1.0, 2), [([[1.0]], [0])], rule={"lr": 1.0})
    method, state = make("fedphp", lam=0.5), fed.start(make("fedphp"))
    state.kept["hpm"][0]["weight"] += d
    result = fed.play(method, state, 1)
    gradient = 0.5 / (1 + np.exp(-1))  # of (1 − λ) log(1 + e^(h r)), in h and in r
    assert state.server[0]["weight"].item() == pytest.approx(1 - gradient, abs=1e-14)
    assert result.log()["train.transfer"].tolist() == [0]


def test_temperature_is_the_teachers_alone():
    """Teacher 4 (ln 3, 0) at T = 4: p = (¾, ¼). Student (ln 3, 0): q = (¾, ¼): ¾ ln 4/3 + ¼ ln 4, its entropy."""
    teacher, student = torch.tensor([[4 * np.log(3), 0.0]]), torch.tensor([[np.log(3), 0.0]]).requires_grad_()
    teacher.requires_grad_()
    value = fedphp.soft_cross_entropy(teacher, student, 4.0)
    assert value.item() == pytest.approx(0.75 * np.log(4 / 3) + 0.25 * np.log(4), abs=1e-7)
    assert fedphp.soft_cross_entropy(teacher, student, 1.0).item() != pytest.approx(value.item(), abs=1e-2)
    value.backward()
    assert teacher.grad is None  # and the student, who says what the teacher says, learns nothing more
    assert student.grad.abs().max().item() < 1e-7


# --- rounds, written out ---------------------------------------------------------------------------------------------


def plain_mmd(x, y):
    both, total = torch.cat([x, y]), 0
    d2 = torch.stack([torch.stack([((a - b) ** 2).sum() for b in both]) for a in both])
    width = d2.detach().sum() / (len(both) ** 2 - len(both)) + 1e-8
    sign = torch.tensor([1.0] * len(x) + [-1.0] * len(y), dtype=torch.float64)
    for k in range(-2, 3):
        total = total + (sign[:, None] * sign * torch.exp(-d2 / (width * 2.0**k))).sum() / len(x) ** 2
    return total


def train(peer, teacher, regulariser, lam, T, epochs):
    """SGD of a Plain client on (1 − λ) ℓ + λ R; its mean loss and R over all samples seen."""
    peer.r.train(), peer.h.train(), teacher.r.eval(), teacher.h.eval()
    rule = {"lr": peer.rule.lr, "momentum": peer.rule.momentum, "weight_decay": peer.rule.weight_decay}
    optimizer, seen = torch.optim.SGD([*peer.r.parameters(), *peer.h.parameters()], **rule), np.zeros(2)
    for x, y in peer.batches() * epochs:
        z = peer.r(x)
        with torch.no_grad():
            of_teacher = teacher.r(x)
            p = (teacher.h(of_teacher) / T).softmax(1)
        R = cross_entropy(peer.h(z), p)
        if regulariser == "mmd":
            R = plain_mmd(z, of_teacher) if len(y) > 1 else torch.zeros(())
        loss = (1 - lam) * cross_entropy(peer.h(z), y) + lam * R
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += np.array([loss.item(), R.item()]) * len(y)
    return (seen / (epochs * len(peer.y))).tolist()


def average(old, new, mu):
    return tuple({k: (mu * a[k] + (1 - mu) * b[k]).to(a[k].dtype) for k in a} for a, b in zip(old, new, strict=True))


def check_rounds(fed, method, plain, play, sizes, regulariser, lam, T):
    """Three rounds of everybody: μ = 0, .3, .6."""
    state, rounds = play(fed, method, 3)
    w, hpm = fed.init(), [fed.init()] * len(sizes)
    for mu, result in zip((0.0, 0.3, 0.6), rounds, strict=True):
        peers = [plain(fed, i).load(*w) for i in range(len(sizes))]
        teachers = [plain(fed, i).load(*v) for i, v in enumerate(hpm)]
        seen = [train(*both, regulariser, lam, T, 2) for both in zip(peers, teachers, strict=True)]
        ends = [peer.state() for peer in peers]
        hpm = [average(*both, mu) for both in zip(hpm, ends, strict=True)]
        w = tuple(peers[0].mean(part, sizes) for part in zip(*ends, strict=True))
        log = result.log()
        assert log.keys() == {"train", "train.transfer"}
        assert log["train"].tolist() == pytest.approx([loss for loss, _ in seen], rel=1e-10)
        assert log["train.transfer"].tolist() == pytest.approx([R for _, R in seen], rel=1e-8, abs=1e-12)
    assert trees.unequal(state.server, w) < 1e-11
    for i in range(len(sizes)):
        assert trees.unequal(trees.row(state.kept["hpm"], i), hpm[i]) < 1e-11
        assert trees.unequal(hpm[i], ends[i]) > 1e-3 and trees.unequal(hpm[i], w) > 1e-3
    assert state.kept["joined"].tolist() == [3] * len(sizes)
    free, _ = play(fed, make("fedavg"), 3)
    assert trees.unequal(state.server, free.server) > 1e-3
    return state


@pytest.mark.parametrize(("regulariser", "lam", "T"), [("mmd", 0.3, 4.0), ("kd", 0.3, 4.0), ("kd", 0.6, 2.0)])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, regulariser, lam, T):
    """Of clients with 1, 7, 10 and 11 samples in batches of 4."""
    method = make("fedphp", regulariser=regulariser, lam=lam, temperature=T)
    check_rounds(uneven(rule=RULE), method, plain, play, (1, 7, 10, 11), regulariser, lam, T)


@pytest.mark.parametrize("regulariser", ["mmd", "kd"])
def test_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread, regulariser):
    """The teacher runs in evaluation mode, with statistics of its own: moving averages, as all of it."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g, sizes = torch.Generator().manual_seed(0), (4, 7, 10)
    clients = [(3 + 5 * torch.randn(n, 3, generator=g), [0, 1] * (n // 2) + [1] * (n % 2)) for n in sizes]
    fed = by_hand(net, clients, rule={"lr": 0.1, "epochs": 2, "momentum": 0.5})
    method = make("fedphp", regulariser=regulariser, lam=0.3)
    state = check_rounds(fed, method, plain, play, sizes, regulariser, 0.3, 4.0)
    # 2 batches a round from 0, 2, 4 on: 2, then .3·2 + .7·4 = 3.4, then .6·3 + .4·6 = 4.2
    assert state.kept["hpm"][0]["1.num_batches_tracked"].tolist() == [4, 4, 4]
    assert state.server[0]["1.num_batches_tracked"].item() == 6


# --- limits ----------------------------------------------------------------------------------------------------------

EVERYTHING = {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}


@pytest.mark.parametrize("regulariser", ["mmd", "kd"])
@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_lambda_zero_is_fedavg_and_averages_of_its_models(digits, play, model, regulariser):
    """To the bit; v_i is the moving average of what FedAvg's clients trained, each by the rounds that it joined."""
    fed = digits(model, join_ratio=0.5, rule=EVERYTHING)
    state, rounds = play(fed, make("fedphp", lam=0.0, regulariser=regulariser), 5)
    avg, others = play(fed, make("fedavg"), 5)
    assert trees.unequal(state.server, avg.server) == 0
    own, joined = trees.repeat(fed.init(), 6), [0] * 6
    for ours, theirs in zip(rounds, others, strict=True):
        assert trees.unequal(ours.held["global"], theirs.held) == 0
        assert ours.flops().tolist() == theirs.flops().tolist()
        for row, i in enumerate(ours.ids):
            mu = min(0.9 * joined[i] / 2.5, 0.9)
            new = average(trees.row(own, i), trees.row(theirs.held, row), mu)
            trees.put(own, [i], trees.tree_map(lambda t: t[None], new))
            joined[i] += 1
    assert len(set(joined)) > 1  # else it could go by rounds
    assert trees.unequal(state.kept["hpm"], own) < 1e-6
    assert state.kept["joined"].tolist() == joined


def test_rounds_that_others_join_do_not_count(digits):
    """A client's first round gives it its own model, however late that is: by the round's number μ would be above 0."""
    fed, method = digits(join_ratio=0.3), make("fedphp")
    state, first = fed.start(method), {}
    for t in range(1, 9):
        result = fed.play(method, state, 8)
        for row, i in enumerate(result.ids.tolist()):
            if i not in first:
                first[i] = t
                assert trees.unequal(*(trees.row(model, row) for model in result.held.values())) == 0
            else:
                assert trees.unequal(*(trees.row(model, row) for model in result.held.values())) > 0
    assert max(first.values()) > 1


def test_at_lambda_one_labels_teach_nothing(digits, play):
    """With λ = 1, another library's default, and without heads to be taught, cross-entropy's weight is 0."""
    (same, _), (free, _) = (play(digits(), make("fedphp", lam=lam), 2) for lam in (1.0, 0.9))
    assert trees.unequal(same.server[1], digits().init()[1]) == 0  # MMD does not reach the head
    assert trees.unequal(free.server[1], digits().init()[1]) > 1e-3
    assert 0 < make("fedphp").lam < 1


# --- what is kept and scored -----------------------------------------------------------------------------------------


def test_a_client_uses_what_it_kept(digits, play):
    """`before` of a round is `after` of the last one a client joined; at first it is w^0. It never travels."""
    fed, method = digits(join_ratio=0.5), make("fedphp")
    state = fed.start(method)
    last = trees.repeat(fed.init(), 6)
    for t in range(4):
        deployed = fed.deployed(method, state, 4)
        assert trees.unequal(deployed["personal"], last) == 0
        assert trees.unequal(deployed["global"], trees.expand(state.server, 6)) == 0
        result = fed.play(method, state, 4)
        trees.put(last, result.ids, result.held["personal"])
        assert trees.unequal(*result.held.values()) > 0 or t == 0
    assert trees.unequal(state.kept["hpm"], last) == 0


def test_v_is_scored_as_the_clients_own(digits):
    """Elsewhere the present model was, which for absent clients is the global one."""
    fed, method = digits(join_ratio=0.5), make("fedphp")
    history = experiment.run(method, fed, 4)
    last = history.clients[history.clients["round"] == 5].set_index("client")
    w = trees.expand(history.state.server, 6)
    for model, column in ((history.state.kept["hpm"], "before"), (w, "before_global")):
        correct, _ = fed.score(model, np.arange(6))
        assert last[column].tolist() == (correct / last["n_test"]).tolist()
    assert history.rounds["before"].tolist() != history.rounds["before_global"].tolist()
    assert history.product == "after"


@pytest.mark.parametrize("regulariser", ["mmd", "kd"])
def test_stacked_as_in_the_loop(uneven, play, regulariser):
    method = make("fedphp", lam=0.3, regulariser=regulariser)
    (loop, rounds), (stacked, others) = (
        play(uneven(rule=RULE, engine=engine), method, 3) for engine in ("loop", "stacked")
    )
    assert trees.unequal((loop.server, loop.kept), (stacked.server, stacked.kept)) < 1e-11
    assert rounds[-1].flops().tolist() == others[-1].flops().tolist()


def test_without_an_extractor_mmd_is_nothing(digits, play):
    """z = x = z_v: what is left is (1 − λ) ℓ, so FedAvg at a rate of (1 − λ) η."""
    state, rounds = play(digits(head_layers=2), make("fedphp", lam=0.5), 2)
    fed = digits(head_layers=2)
    assert np.abs(rounds[0].log()["train.transfer"]).max() < 1e-6
    assert trees.unequal(state.server, play(fed, make("fedavg"), 2)[0].server) > 1e-4
    fed.training = dataclasses.replace(fed.training, lr=fed.training.lr / 2)
    half, _ = play(fed, make("fedavg"), 2)
    assert trees.unequal(state.server, half.server) < 1e-6


@pytest.mark.parametrize(
    "setting", [{"lam": 1.5}, {"regulariser": "l2"}, {"temperature": 0.0}, {"max_mu": 1.01}, {"regulariser": "KD"}]
)
def test_impossible_settings_are_refused(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ValueError, match=f"^{name}={value!r}: must be"):
        make("fedphp", **setting)
