"""FedAPA: the server mixes each client's extractor by weights that follow the gradient of a proxy loss."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import models, trees
from pflkit.methods import fedapa, make

REFERENCE = Path(__file__).parents[1] / "reference"


class Pair(nn.Module):
    """An extractor of two numbers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x + 0 * self.w


@pytest.fixture
def pairs(by_hand, linear, monkeypatch):
    """A function that makes a Federation of clients whose extractor is, after local training, what `ends` says, and a
    state with given extractors and A: the loss is ½‖θ − end‖², and one step at rate 1 does it.
    """
    monkeypatch.setattr(fedapa, "model_loss", lambda model, p, batch: ((p[0]["w"] - batch[0][0]) ** 2).sum() / 2)

    def make_pairs(method, theta, A, ends, **options):
        net = models.from_modules(Pair(), linear(2, 2), (2,), 2)
        fed = by_hand(net, [([list(end)], [0]) for end in ends], rule={"lr": 1.0}, **options)
        state = fed.start(method)
        state.server["extractors"]["w"] = tensor(theta)
        state.server["A"] = tensor(A)
        return fed, state

    return make_pairs


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def exactly(*values):
    return pytest.approx(list(values), abs=1e-15, rel=0)


# --- the table of the hand numbers -----------------------------------------------------------------------------------

THETA = [[1.0, 0.0], [0.0, 2.0]]
TABLE = {  # of client 0's row: A, θ̄, θ after training, η, slopes, A − η slopes, clipped
    "init": ((1.0, 0.0), (1.0, 0.0), (0.5, 1.0), 0.1, (0.5, -2.0), (0.95, 0.2), (0.95, 0.2)),
    "mid": ((0.6, 0.4), (0.6, 0.8), (0.2, 1.4), 0.1, (0.4, -1.2), (0.56, 0.52), (0.56, 0.52)),
    "clip": ((0.6, 0.4), (0.6, 0.8), (1.6, -1.2), 0.25, (-1.0, 4.0), (0.85, -0.6), (0.85, 0.0)),
}
ROWS = {  # the row of sum 1 by self weight and kind of normalization
    ("init", 0.5, "sum"): (5 / 7, 2 / 7),
    ("mid", 0.5, "sum"): (25 / 51, 26 / 51),
    ("clip", 0.5, "sum"): (1.0, 0.0),
    ("init", 0.5, "others"): (0.5, 0.5),
    ("mid", 0.5, "others"): (0.5, 0.5),
    ("clip", 0.5, "others"): (1.0, 0.0),
    ("init", 1.0, "sum"): (5 / 6, 1 / 6),
    ("mid", 1.0, "sum"): (25 / 38, 13 / 38),
    ("clip", 1.0, "sum"): (1.0, 0.0),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_table_by_functions(case):
    A, sent, returned, lr, slope, raw, clipped = TABLE[case]
    theta, trained = {"w": tensor(THETA)}, {"w": torch.tensor(True)}
    mixed = fedapa.mixed(tensor([A]), theta)
    assert mixed["w"][0].tolist() == exactly(*sent)
    slopes = fedapa.slopes(theta, mixed, {"w": tensor([returned])}, trained)
    assert slopes[0].tolist() == exactly(*slope)
    stepped = tensor([A]) - lr * slopes
    assert stepped[0].tolist() == exactly(*raw)
    assert stepped[0].clamp(0, 1).tolist() == exactly(*clipped)
    for (name, own, normalize), row in ROWS.items():
        if name == case:
            assert fedapa.normalized(stepped, [0], own, normalize)[0].tolist() == exactly(*row)
            assert fedapa.normalized(stepped.flip(1), [1], own, normalize)[0].tolist() == exactly(*row[::-1])
    assert stepped[0].tolist() == exactly(*raw)  # an argument is not written to


@pytest.mark.parametrize(("case", "own", "normalize"), ROWS)
def test_the_table_by_the_method(pairs, case, own, normalize):
    """A whole round; the other client does not move."""
    A, sent, returned, lr, *_ = TABLE[case]
    method = make("fedapa", server_lr=lr, self_weight=own, normalize=normalize)
    fed, state = pairs(method, THETA, [A, (0.0, 1.0)], [returned, THETA[1]])
    assert fed.deployed(method, state, 1)[0]["w"].tolist() == [exactly(*sent), exactly(*THETA[1])]
    result = fed.play(method, state, 1)
    assert result.held[0]["w"].tolist() == [exactly(*returned), exactly(*THETA[1])]
    assert state.server["extractors"]["w"].tolist() == result.held[0]["w"].tolist()
    assert state.server["A"].tolist() == [exactly(*ROWS[case, own, normalize]), [0.0, 1.0]]


@pytest.mark.parametrize(
    ("sign", "raw", "after"), [("descent", (0.95, 0.2), 0.28125), ("paper", (1.05, -0.2), 1.13125)]
)
def test_descent_lowers_the_proxy_loss_and_the_printed_sign_raises_it(pairs, sign, raw, after):
    """Case init: P = ½(.5² + 1²) = .625; then ½(.45² + .6²), or ½(.55² + 1.4²). Before clipping and the self weight."""
    A, sent, returned, lr, *_ = TABLE["init"]
    theta, trained = {"w": tensor(THETA)}, {"w": torch.tensor(True)}
    end = {"w": tensor([returned])}
    assert fedapa.proxy({"w": tensor([sent])}, end, trained).tolist() == exactly(0.625)
    assert fedapa.proxy(fedapa.mixed(tensor([raw]), theta), end, trained).tolist() == exactly(after)
    method = make("fedapa", server_lr=lr, sign=sign)
    fed, state = pairs(method, THETA, [A, (0.0, 1.0)], [returned, THETA[1]])
    fed.play(method, state, 1)
    watched = method.watch(state.server, state.kept)
    assert watched["proxy change"].tolist() == exactly(after / 0.625 - 1, 0.0)
    assert state.server["A"][0].tolist() == (exactly(5 / 7, 2 / 7) if sign == "descent" else [1.0, 0.0])
    assert watched["a_ii"].tolist() == state.server["A"].diag().tolist()
    assert watched["a_ij"].tolist() == [state.server["A"][0, 1].item(), 0.0]


def test_the_slope_is_the_proxy_loss_gradient():
    """Autograd's: leaves of any shape, a single number's too, several clients and a leaf that does not count."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    theta = {"a": randn(4, 3, 2), "b": randn(4, 5), "c": randn(4, 2), "d": randn(4)}
    trained = {name: torch.tensor(name != "c") for name in theta}
    end, A = trees.tree_map(lambda t: randn(3, *t.shape[1:]), theta), torch.rand(3, 4, generator=g).double()
    slope = torch.func.grad(lambda A: fedapa.proxy(fedapa.mixed(A, theta), end, trained).sum())(A)
    assert trees.unequal(fedapa.slopes(theta, fedapa.mixed(A, theta), end, trained), slope) < 1e-13


# --- single steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["sum", "others"])
def test_no_movement_leaves_the_raw_row(pairs, normalize):
    """θ_i = θ̄_i: no slope, so a row of sum 1 that holds its self weight stays, however large η is."""
    method = make("fedapa", server_lr=1e6, normalize=normalize)
    A = [[0.5, 0.25, 0.25], [0.125, 0.5, 0.375], [0.0, 0.5, 0.5]]
    theta = [[1.0, 2.0], [-4.0, 8.0], [16.0, 0.0]]
    sent = tensor(A) @ tensor(theta)
    fed, state = pairs(method, theta, A, sent.tolist())
    fed.play(method, state, 1)
    assert state.server["A"].tolist() == A
    assert state.server["extractors"]["w"].tolist() == sent.tolist()
    assert state.server["proxy_change"].tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("end", "slope", "row"),
    [((1.2, 2.1), -0.4, (0.5 / 0.58, 0.04 / 0.58, 0.04 / 0.58)), ((0.8, 1.9), 0.4, (1.0, 0.0, 0.0))],
)
def test_identical_extractors_get_equal_increments(pairs, end, slope, row):
    """θ_j = (1, 2): <θ_j, θ̄ − θ> = ∓.4 for all j. Weights rise together, or all but the own are clipped to 0."""
    theta = [[1.0, 2.0]] * 3
    trees_of = [{"w": tensor(value)} for value in (theta, [theta[0]], [end])]
    assert fedapa.slopes(*trees_of, {"w": torch.tensor(True)}).tolist() == [exactly(slope, slope, slope)]
    method = make("fedapa", server_lr=0.1)
    fed, state = pairs(method, theta, torch.eye(3).tolist(), [end, theta[0], theta[0]])
    fed.play(method, state, 1)
    assert state.server["A"].tolist() == [exactly(*row), [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_in_round_1_one_inner_product_says_which_others_matter(digits, play):
    """All start alike: in each row of A the others' weights are equal, and positive where training grew the norm."""
    fed, method = digits(dtype=torch.float64, rule={"epochs": 3}), make("fedapa", server_lr=0.01)
    state, (result,) = play(fed, method, 1)
    start, grew = fed.init()[0], 0
    for i in range(6):
        others = np.delete(state.server["A"][i].numpy(), i)
        change = sum(float((start[k] * (result.held[0][k][i] - start[k])).sum()) for k in start)
        raw = max(0.0, 0.01 * change)
        grew += raw > 0
        assert others == pytest.approx(np.full(5, raw / (0.5 + 5 * raw)), abs=1e-12)
    assert grew > 0


@pytest.mark.parametrize("normalize", ["sum", "others"])
def test_the_self_weight_is_reset_in_each_row(normalize):
    """Before the division a_ii is the self weight, whatever it was; `others` keeps it so."""
    rows = tensor([[0.9, 0.3, 0.1], [0.2, 0.0, 0.2]])
    expected = {
        "sum": [exactly(0.25 / 0.65, 0.3 / 0.65, 0.1 / 0.65), exactly(0.2 / 0.65, 0.25 / 0.65, 0.2 / 0.65)],
        "others": [exactly(0.25, 0.75 * 0.75, 0.75 * 0.25), exactly(0.375, 0.25, 0.375)],
    }
    assert fedapa.normalized(rows, [0, 1], 0.25, normalize).tolist() == expected[normalize]


def test_a_weight_is_clipped_at_1_too(pairs):
    """Case init with η = 1: .5 and 2, so 1 after clipping, and (.5, 1) / 1.5."""
    method = make("fedapa", server_lr=1.0)
    fed, state = pairs(method, THETA, torch.eye(2).tolist(), [(0.5, 1.0), THETA[1]])
    fed.play(method, state, 1)
    assert state.server["A"][0].tolist() == exactly(1 / 3, 2 / 3)


# --- the released code's step ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """A row's update recorded from released code (reference/README.md): self weight 1, no momentum carried in."""
    with np.load(REFERENCE / "fedapa_row_update.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file}


def test_functions_give_the_recorded_row(recorded):
    i, theta = int(recorded["client"]), {"w": recorded["theta"]}
    row = fedapa.normalized(recorded["A_row_before"][None], [i], self_weight=1.0)
    assert trees.unequal(row[0], recorded["A_row_used"]) < 1e-15
    sent = fedapa.mixed(row, theta)
    assert trees.unequal(sent["w"][0], recorded["sent"]) < 1e-15
    slope = fedapa.slopes(theta, sent, {"w": recorded["returned"][None]}, {"w": torch.tensor(True)})
    raw = row - recorded["lr"] * slope
    assert trees.unequal(raw[0], recorded["A_row_raw"]) < 1e-15
    assert trees.unequal(raw[0].clamp(0, 1), recorded["A_row_clipped"]) < 1e-15
    assert (recorded["A_row_raw"] < 0).any()


def test_the_method_gives_the_recorded_row(recorded):
    """`download` sends what it sent, `merge` makes of the row used what it would use next: own weight 1, sum 1."""
    i, theta = int(recorded["client"]), recorded["theta"]
    method = make("fedapa", server_lr=float(recorded["lr"]), self_weight=1.0)
    A = torch.eye(4, dtype=torch.float64)
    A[i] = recorded["A_row_used"]
    server = {"extractors": {"w": theta}, "A": A, "velocity": 0 * A, "proxy_change": 0 * A[0]}
    server |= {"trained": {"w": torch.tensor(True)}}
    message = method.download(server, np.array([i]))
    assert trees.unequal(message["w"][0], recorded["sent"]) < 1e-15
    after = method.merge(server, np.array([i]), message, {"w": recorded["returned"][None]}, [10])
    expected = recorded["A_row_clipped"].clone()
    expected[i] = 1
    assert trees.unequal(after["A"][i], expected / expected.sum()) < 1e-15
    assert trees.unequal(after["extractors"]["w"][i], recorded["returned"]) == 0
    others = [j for j in range(4) if j != i]
    assert trees.unequal(after["A"][others], A[others]) == 0
    assert trees.unequal(after["extractors"]["w"][others], theta[others]) == 0


# --- rounds, written out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"self_weight": 0.7, "normalize": "others"}, {"sign": "paper"}, {"momentum": 0.9}]
)
def test_three_rounds_in_plain_torch(uneven, plain, in_order, one_thread, sequential, settings):
    """Steps 1 to 6 in loops over clients. In parallel all see the extractors of the round's beginning."""
    rule = {"lr": 0.1, "epochs": 2, "momentum": 0.9, "weight_decay": 0.01}
    method = make("fedapa", server_lr=0.1, sequential=sequential, **settings)
    fed = uneven(rule=rule)
    state, start, heads = fed.start(method), fed.init()[0], [fed.init()[1]] * 4
    theta, A = (
        [start] * 4,
        [[0.5, 0.25, 0.125, 0.125], [0.1, 0.5, 0.2, 0.2], [0.0, 0.4, 0.6, 0.0], [0.0, 0.0, 0.0, 1.0]],
    )
    state.server["A"], first = tensor(A), tensor(A)
    up, own = settings.get("sign") == "paper", settings.get("self_weight", 0.5)
    velocity, momentum = [[0.0] * 4 for _ in range(4)], settings.get("momentum", 0.0)
    for _ in range(3):
        fed.play(method, state, 3)
        seen = list(theta)
        for i in range(4):
            now = theta if sequential else seen
            sent = {k: sum(A[i][j] * now[j][k] for j in range(4)) for k in start}
            peer = plain(fed, i).load(sent, heads[i])
            end, heads[i] = peer.train(peer.r, peer.h, epochs=2).state()
            slopes = [sum(float((now[j][k] * (sent[k] - end[k])).sum()) for k in start) for j in range(4)]
            velocity[i] = [momentum * v + slope for v, slope in zip(velocity[i], slopes, strict=True)]
            raw = [min(1.0, max(0.0, a + 0.1 * (v if up else -v))) for a, v in zip(A[i], velocity[i], strict=True)]
            raw[i], rest = own, sum(raw[j] for j in range(4) if j != i)
            if "normalize" in settings and rest > 0:
                raw = [own if j == i else (1 - own) * raw[j] / rest for j in range(4)]
            A[i] = [a / sum(raw) for a in raw]
            theta[i] = end
    A = tensor(A)
    assert ((A - first).abs() > 0.01).any(1).sum() >= 2  # rows have really been learned
    assert trees.unequal(state.server["A"], A) < 1e-11
    for i in range(4):
        assert trees.unequal(trees.row(state.server["extractors"], i), theta[i]) < 1e-11
        assert trees.unequal(trees.row(state.kept, i), heads[i]) < 1e-11


# --- one client after the other --------------------------------------------------------------------------------------


class Spy:
    """A method that remembers what was sent to whom."""

    def __init__(self, method):
        self.method, self.sent = method, []

    def __getattr__(self, name):
        return getattr(self.method, name)

    def merge(self, server, ids, message, upload, n):
        self.sent += zip(ids.tolist(), message["w"].tolist(), strict=True)
        return self.method.merge(server, ids, message, upload, n)


def test_in_sequence_a_client_mixes_what_the_one_before_returned(pairs):
    """Rows (½, ½), θ = (1, 0), (0, 2). Client 0 returns (1.5, 1), so client 1 gets (.75, 1.5); in parallel (.5, 1)."""
    for sequential, second in ((True, (0.75, 1.5)), (False, (0.5, 1.0))):
        method = make("fedapa", server_lr=0.1, sequential=sequential)
        fed, state = pairs(method, THETA, [[0.5, 0.5]] * 2, [(1.5, 1.0), (2.0, 3.0)])
        spy = Spy(method)
        fed.play(spy, state, 1)
        assert spy.sent == [(0, exactly(0.5, 1.0)), (1, exactly(*second))]
        theta = [[1.5, 1.0], [0.0, 2.0]] if sequential else THETA  # that client 1's slopes are with
        slopes = tensor(theta) @ (tensor(second) - tensor([2.0, 3.0]))
        raw = (0.5 - 0.1 * slopes).clamp(0, 1)
        raw[1] = 0.5
        assert state.server["A"][1].tolist() == exactly(*(raw / raw.sum()).tolist())
        assert state.server["extractors"]["w"].tolist() == [exactly(1.5, 1.0), exactly(2.0, 3.0)]


def test_order_matters_in_sequence_only_where_rows_mix(digits, play):
    """With η = 0 all rows stay e_i, and one client a round has nobody before it: to the bit what is in parallel."""
    for settings, options in (({"server_lr": 0.0}, {"join_ratio": 0.5}), ({"server_lr": 1.0}, {"join_ratio": 0.1})):
        (one, rounds), (other, others) = (
            play(digits(**options), make("fedapa", sequential=s, **settings), 4) for s in (True, False)
        )
        ends = [(state.server["extractors"], state.server["A"], state.kept) for state in (one, other)]
        assert trees.unequal(*ends) == 0
        assert all(trees.unequal(a.held, b.held) == 0 for a, b in zip(rounds, others, strict=True))
    mixing = [play(digits(), make("fedapa", server_lr=1.0, sequential=s), 3)[0].server for s in (True, False)]
    assert trees.unequal(*mixing) > 0


def test_a_sequential_round_reports_as_a_parallel_one(digits, play):
    """Ids, bytes, models held, log and FLOPs are in the order of ids, however many exchanges there were."""
    (state, rounds), (_, others) = (
        play(digits(join_ratio=0.5), make("fedapa", sequential=s), 3) for s in (True, False)
    )
    r = sum(t.numel() for t in trees.leaves(digits().init()[0]))
    for a, b in zip(rounds, others, strict=True):
        assert a.ids.tolist() == b.ids.tolist() == sorted(a.ids.tolist())
        assert (len(a.calls), len(b.calls)) == (3, 1)
        assert a.bytes_up.tolist() == b.bytes_up.tolist() == a.bytes_down.tolist() == [4 * r] * 3
        assert (a.flops() == b.flops()).all() and len(set(a.flops().tolist())) > 1
        assert a.log()["train"].shape == (3,)
    first = rounds[0].log()["train"], others[0].log()["train"]
    assert (first[0] == first[1]).all()  # in round 1 all rows are e_i
    last = rounds[-1]
    held = trees.take(state.server["extractors"], last.ids), trees.take(state.kept, last.ids)
    assert trees.unequal(last.held, held) == 0


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("cnn-small", {}),
        *[("mlp", settings) for settings in ({"normalize": "others"}, {"self_weight": 1.0}, {"sequential": True})],
    ],
)
def test_a_server_rate_of_zero_is_local_training(digits, play, model, settings):
    """Rows stay e_i, as a_ii is .5/.5: to the bit."""
    fed = digits(model)
    (apa, rounds), (local, others) = (
        play(fed, method, 2) for method in (make("fedapa", server_lr=0.0, **settings), make("local"))
    )
    assert trees.unequal(apa.server["A"], torch.eye(6)) == 0
    assert trees.unequal((apa.server["extractors"], apa.kept), local.kept) == 0
    assert all(trees.unequal(a.held, b.held) == 0 for a, b in zip(rounds, others, strict=True))


@pytest.mark.parametrize(("clients", "most"), [(2, 0.0), (4, 1e-13)])
def test_uniform_weights_are_fedper(by_hand, linear, play, clients, most):
    """a_ij = 1/N, held by η = 0 and a self weight of 1/N; equal sizes. To the bit for two, as ½a + ½b rounds once."""
    net, g = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3), torch.Generator()
    data = [(torch.randn(7, 4, generator=g), torch.randint(3, (7,), generator=g).tolist()) for _ in range(clients)]
    fed = by_hand(net, data, rule={"lr": 0.1, "epochs": 2, "batch_size": 3})
    method = make("fedapa", server_lr=0.0, self_weight=1 / clients)
    state = fed.start(method)
    state.server["A"][:] = 1 / clients
    per, others = play(fed, make("fedper"), 3)
    for theirs in others:
        assert trees.unequal(fed.play(method, state, 3).held, theirs.held) <= most
        assert trees.unequal(state.server["A"], torch.full((clients, clients), 1 / clients).double()) == 0
    assert trees.unequal(fed.deployed(method, state, 4), fed.deployed(make("fedper"), per, 4)) <= most
    assert trees.unequal(state.kept, per.kept) <= most
    assert trees.unequal(trees.row(state.kept, 0), trees.row(state.kept, 1)) > 0


def test_weights_kept_uniform_are_a_mean_of_all(digits, play):
    """A stays at 1/N to the bit and the step is none; absent clients' extractors count as they were last uploaded."""
    fed, method = digits(join_ratio=0.5), make("fedapa", weights="uniform", server_lr=1e3)
    state, _ = play(fed, method, 3)
    assert trees.unequal(state.server["A"], torch.full((6, 6), 1 / 6)) == 0
    assert trees.unequal(state.server["proxy_change"], torch.zeros(6)) == 0
    sent = fed.deployed(method, state, 4)[0]
    mean = trees.average(state.server["extractors"], np.ones(6))
    assert all(trees.unequal(trees.row(sent, i), mean) < 1e-6 for i in range(6))


@pytest.mark.parametrize(("clients", "most"), [(2, 0.0), (4, 1e-13)])
def test_whole_models_under_uniform_weights_are_fedavg(by_hand, linear, play, clients, most):
    """Equal sizes, all join: the mean of all models is sent to all. To the bit for two."""
    net, g = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3), torch.Generator()
    data = [(torch.randn(7, 4, generator=g), torch.randint(3, (7,), generator=g).tolist()) for _ in range(clients)]
    fed, method = by_hand(net, data, rule={"lr": 0.1}), make("fedapa", weights="uniform", share="model")
    (state, rounds), (avg, others) = play(fed, method, 3), play(fed, make("fedavg"), 3)
    assert all(trees.unequal(a.held, b.held) <= most for a, b in zip(rounds, others, strict=True))
    assert trees.unequal(fed.deployed(method, state, 4), fed.deployed(make("fedavg"), avg, 4)) <= most
    assert [r.bytes_up.tolist() for r in rounds] == [r.bytes_up.tolist() for r in others]
    assert not trees.leaves(state.kept)


def test_whole_models_are_mixed_as_extractors_are(digits, play):
    """A model that is all extractor, and `share="model"` of the same network cut in two: one and the same, but for
    rounding in the order of sums."""
    (whole, rounds), (cut, others) = (
        play(fed, make("fedapa", server_lr=0.1, **settings), 3)
        for fed, settings in (
            (digits(head_layers=0, dtype=torch.float64), {}),
            (digits(dtype=torch.float64), {"share": "model"}),
        )
    )
    assert trees.unequal(whole.server["A"], cut.server["A"]) < 1e-12
    assert trees.unequal(whole.server["A"], torch.eye(6)) > 0.01
    ends = [[leaf for r in of for leaf in trees.leaves(r.held)] for of in (rounds, others)]
    assert all(trees.unequal(a, b) < 1e-12 for a, b in zip(*ends, strict=True))


def test_momentum_is_of_each_row_alone(pairs):
    """v <- .5 v + g, g = (.5, −2) in each round: steps of .1 (.5, −2), then .1 (.75, −3). The absent row's stays 0."""
    method = make("fedapa", server_lr=0.1, momentum=0.5)
    fed, state = pairs(method, THETA, [(1.0, 0.0), (0.0, 1.0)], [(0.5, 1.0), THETA[1]])
    fed.play(method, state, 2)
    assert state.server["velocity"].tolist() == [exactly(0.5, -2.0), exactly(0.0, 0.0)]
    state.server["extractors"]["w"], state.server["A"] = tensor(THETA), torch.eye(2).double()
    fed.play(method, state, 2)
    assert state.server["velocity"].tolist() == [exactly(0.75, -3.0), exactly(0.0, 0.0)]
    assert state.server["A"][0].tolist() == exactly(0.5 / 0.8, 0.3 / 0.8)  # clipped: (.925, .3), then ½ for itself


# --- what a round may touch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{}, {"sign": "paper"}, {"normalize": "others"}, {"self_weight": 1.0}, {"momentum": 0.9}, {"share": "model"}],
)
def test_rows_sum_to_1_and_absent_ones_stay(digits, settings, sequential):
    """Entries in [0, 1]. The released code's momentum, and its clipping, move all rows in each step."""
    fed = digits(join_ratio=0.5)
    method = make("fedapa", server_lr=1.0, sequential=sequential, **settings)
    state, moved = fed.start(method), False
    for _ in range(4):
        before = trees.clone(state.server)
        ids = fed.play(method, state, 4).ids
        absent, A = np.setdiff1d(range(6), ids), state.server["A"]
        for name in ("A", "extractors", "proxy_change", "velocity"):
            rows = [trees.take(server[name], absent) for server in (state.server, before)]
            assert trees.unequal(*rows) == 0
        assert trees.unequal(A.sum(1), torch.ones(6)) < 1e-6
        assert (A >= 0).all() and (A <= 1).all()
        moved |= trees.unequal(A[ids], before["A"][ids]) > 0.01
    assert moved


def test_before_is_the_mix_under_the_clients_head(digits, play):
    """(θ̄_i, φ_i), for clients that were never sampled too: θ̄_i = Σ_j a_ij θ_j."""
    fed, method = digits(join_ratio=0.5), make("fedapa", server_lr=1.0)
    state, (*_, result) = play(fed, method, 3)
    extractor, head = fed.deployed(method, state, 4)
    assert trees.unequal(head, state.kept) == 0
    for name, theta in state.server["extractors"].items():
        expected = torch.einsum("ij,j...->i...", state.server["A"].double(), theta.double())
        assert trees.unequal(extractor[name], expected) < 1e-6
    assert trees.unequal(trees.take(state.kept, result.ids), result.held[1]) == 0
    assert trees.unequal(extractor, state.server["extractors"]) > 1e-3


# --- batch-norm ------------------------------------------------------------------------------------------------------


def test_counters_and_statistics_do_not_enter_slope_or_proxy():
    """A counter of 1000 that returns as 1020 would add 1000·(1000 − 1020) = −20,000 to every slope, and 200 to P."""
    theta = {"w": tensor(THETA), "n": torch.tensor([[1000], [1000]])}
    sent, end = ({"w": tensor([w]), "n": torch.tensor([[n]])} for w, n in (((1.0, 0.0), 1000), ((0.5, 1.0), 1020)))
    for counts, extra, more in ((False, 0.0, 0.0), (True, -20_000.0, 200.0)):
        trained = {"w": torch.tensor(True), "n": torch.tensor(counts)}
        theirs = [{k: v.double() for k, v in tree.items()} for tree in (theta, sent, end)]
        assert fedapa.slopes(*theirs, trained).tolist() == [exactly(0.5 + extra, -2.0 + extra)]
        assert fedapa.proxy(*theirs[1:], trained).tolist() == exactly(0.625 + more)


@pytest.mark.parametrize("count", [0, 1000])
def test_rows_with_batch_norm_in_plain_torch(by_hand, linear, plain, play, in_order, one_thread, count):
    """20 batches a round: counters go from 1000 to 1020. A follows the trained parameters; buffers are mixed by it."""
    net = models.from_modules(nn.Sequential(linear(3, 4), nn.BatchNorm1d(4)), linear(4, 2), (3,), 2)
    g = torch.Generator().manual_seed(0)
    clients = [(3 + 5 * torch.randn(8, 3, generator=g), [0, 1] * 4) for _ in range(3)]
    fed, method = (
        by_hand(net, clients, rule={"lr": 0.05, "epochs": 10, "batch_size": 4}),
        make("fedapa", server_lr=0.01),
    )
    state = fed.start(method)
    state.server["extractors"]["1.num_batches_tracked"] += count
    theta, heads = [trees.row(trees.clone(state.server["extractors"]), i) for i in range(3)], [fed.init()[1]] * 3
    A, names = torch.eye(3, dtype=torch.float64), ["0.weight", "0.bias", "1.weight", "1.bias"]
    for t in (1, 2):
        fed.play(method, state, 2)
        old, theta = theta, []
        for i in range(3):
            sent = {k: sum(a * x[k] for a, x in zip(A[i], old, strict=True)) for k in old[0]}
            sent["1.num_batches_tracked"] = sent["1.num_batches_tracked"].round().long()
            peer = plain(fed, i).load(sent, heads[i])
            end, heads[i] = peer.train(peer.r, peer.h, epochs=10).state()
            A[i] -= 0.01 * tensor([sum(float((x[k] * (sent[k] - end[k])).sum()) for k in names) for x in old])
            A[i] = A[i].clamp(0, 1)
            A[i, i] = 0.5
            A[i] /= A[i].sum()
            theta.append(end)
        assert state.server["extractors"]["1.num_batches_tracked"].tolist() == [count + 20 * t] * 3
        assert state.server["extractors"]["1.num_batches_tracked"].dtype == torch.int64
        assert trees.unequal(state.server["A"], A) < 1e-10
        for i in range(3):
            assert trees.unequal(trees.row(state.server["extractors"], i), theta[i]) < 1e-10
    assert ((A > 0) & (A < 0.4)).any()  # not saturated


def test_buffers_are_mixed_by_the_row(pairs):
    """Statistics as they are, counters rounded: .6·10 + .4·11 = 10.4."""
    theta = {"mean": tensor([1.0, 3.0]), "n": torch.tensor([10, 11])}
    mixed = fedapa.mixed(tensor([[0.6, 0.4], [0.25, 0.75]]), theta)
    assert mixed["mean"].tolist() == exactly(1.8, 2.5)
    assert (mixed["n"].tolist(), mixed["n"].dtype) == ([10, 11], torch.int64)


# --- refused ---------------------------------------------------------------------------------------------------------


def test_a_model_without_an_extractor_is_refused(digits):
    with pytest.raises(ValueError, match="model='mlp': FedAPA mixes extractors, and this one has no parameters"):
        digits(head_layers=2).start(make("fedapa"))


@pytest.mark.parametrize(
    "wrong",
    [
        *[{"sign": "up"}, {"normalize": "softmax"}, {"self_weight": 0.0}, {"self_weight": 1.1}, {"sequential": 1}],
        *[{"momentum": -0.1}, {"momentum": 1.1}, {"weights": "equal"}, {"share": "head"}],
    ],
)
def test_impossible_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}=.*must be"):
        make("fedapa", **wrong)


def test_a_row_that_could_never_leave_itself_is_refused():
    with pytest.raises(ValueError, match=r"self_weight=1\.0: must be below 1 with normalize"):
        make("fedapa", self_weight=1.0, normalize="others")


def test_what_is_only_watched_ends_no_run(digits, play):
    """The proxy loss of a raw row beyond float32's range is no number; the row itself is clipped."""
    state, _ = play(digits(), make("fedapa", server_lr=1e30), 2)
    assert all(leaf.isfinite().all() for leaf in trees.leaves((state.server, state.kept)))
