"""FedKD: teacher and student teach each other; the student's updates travel as factors, and nobody's copy drifts."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pflkit import data, models, partition, trees
from pflkit.federation import Federation
from pflkit.messages import nbytes, received
from pflkit.methods import fedkd, make
from pflkit.methods.fedkd import compress, mutual_losses, pack, rank, restore, unpack

SHAPES = [(10, 10), (32, 3, 5, 5), (64, 32, 5, 5), (16, 3, 3, 3), (5, 40), (40, 5), (3, 1), (1, 7), (2, 2)]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def decaying(*shape):
    """A tensor [m, ...] whose singular values, as a matrix [m, n], are 1, 1/2, 1/4, ..."""
    m, n = shape[0], math.prod(shape[1:])
    U, V = (torch.linalg.qr(random(side, min(m, n), seed=side))[0] for side in (m, n))
    return ((U * 0.5 ** torch.arange(min(m, n))) @ V.T).reshape(shape)


def factors_needed(t, energy):
    """k by a loop over numpy's singular values."""
    squares = np.linalg.svd(t.reshape(len(t), -1).double().numpy(), compute_uv=False) ** 2
    k = 0
    while squares[:k].sum() < energy * squares.sum():
        k += 1
    return k


def weight(packed):
    return int(nbytes(trees.stack([packed]), 1)[0])


def diag(*values):
    return torch.diag(torch.tensor(values, dtype=torch.float64))


# --- compression -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matrix", "energy", "k"),
    [
        (diag(3, 1), 0.9, 1),  # energies 9, 10
        (diag(3, 1), 0.901, 2),
        (diag(3, 1), 0.95, 2),  # the released code finds none, and sends zeros
        (diag(10, 1), 0.95, 1),  # 100 / 101 = .990
        (diag(1, 10), 0.95, 1),
        (diag(10, 1), 0.995, 2),
        (torch.eye(10), 0.95, 10),  # so here
        (torch.eye(10), 0.5, 5),
        (torch.eye(10), 1.0, 10),
        (diag(0, 0), 0.95, 0),
        (diag(0, 0), 1.0, 0),
        (diag(4, 0), 1.0, 1),
        (diag(1, 1e-10), 1.0, 2),  # 1 + 1e-20 is 1
    ],
)
def test_how_many_factors(matrix, energy, k):
    s = torch.linalg.svdvals(matrix)
    assert rank(s, energy) == k
    factors = compress(matrix, energy)
    assert len(factors) == k
    kept = matrix if k == len(matrix) else matrix * (matrix == matrix.max())
    if not torch.equal(matrix, torch.eye(10)) or k == 10:
        torch.testing.assert_close(restore(factors, len(matrix)), kept, atol=1e-15, rtol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_energy_one_is_lossless(shape, dtype):
    """As factors, and as they travel: of a random, a flat and a rank-1 matrix, and of the identity."""
    m, n = shape[0], math.prod(shape[1:])
    eye = torch.eye(m, n, dtype=torch.float64).reshape(shape)
    for t in (random(*shape), eye, torch.outer(random(m), random(n, seed=1)).reshape(shape), decaying(*shape)):
        t = t.to(dtype)
        for got in (restore(compress(t.reshape(m, n), 1.0), m).view_as(t), unpack(pack(t, 1.0), t.shape)):
            assert float((got - t).norm()) <= (5e-6 if dtype == torch.float32 else 1e-14) * float(t.norm())
    t = random(*shape).to(dtype)
    assert torch.equal(unpack(pack(t, 1.0), t.shape), t)  # dense: to the bit


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 0.99999])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_lost_and_what_it_weighs(shape, energy):
    """The best matrix of rank k, by numpy; its bytes; and the dense one where k factors are no shorter."""
    m, n = shape[0], math.prod(shape[1:])
    for t in (random(*shape), decaying(*shape)):
        k, packed = factors_needed(t, energy), pack(t, energy)
        U, s, V = np.linalg.svd(t.reshape(m, n).numpy(), full_matrices=False)
        low = torch.from_numpy((U[:, :k] * s[:k]) @ V[:k]).reshape(shape)
        shorter = k * (m + n + 1) < m * n
        got = unpack(packed, t.shape)
        torch.testing.assert_close(got, low if shorter else t, atol=1e-12, rtol=0)
        assert weight(packed) == 8 * min(k * (m + n + 1), m * n)
        assert float((t - got).square().sum() / t.square().sum()) <= 1 - energy + 1e-12


@pytest.mark.parametrize(("shape", "inflated"), [((32, 3, 5, 5), 4224), ((16, 3, 3, 3), 674), ((64, 32, 5, 5), 67_584)])
def test_a_kernel_is_one_matrix_and_never_grows(shape, inflated):
    """PFLlib's factors of each slice weigh more than the kernel."""
    t = decaying(*shape).float()
    m, n = shape[0], math.prod(shape[1:])
    assert weight(pack(t, 0.95)) == 4 * 3 * (m + n + 1) < 4 * m * n < 4 * inflated  # 1, 1/4, 1/16: .984
    assert weight(pack(random(*shape).float(), 0.98)) <= 4 * m * n
    moved = t.contiguous(memory_format=torch.channels_last)  # as kernels are laid out in training
    assert trees.unequal(pack(moved, 0.95), pack(t, 0.95)) == 0


def test_factors_have_the_same_signs_by_any_library(monkeypatch):
    """A GPU's library may choose others than a CPU's."""
    matrix, svd = torch.randn(5, 7, dtype=torch.float64), torch.linalg.svd
    want, flip = compress(matrix, 0.9), torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0], dtype=torch.float64)

    def flipped(matrix, full_matrices):
        U, s, V = svd(matrix, full_matrices=full_matrices)
        return U * flip, s, V * flip[:, None]

    monkeypatch.setattr(torch.linalg, "svd", flipped)
    assert torch.equal(compress(matrix, 0.9), want)


def test_what_is_no_matrix_of_reals_travels_as_it_is():
    """Biases, of three classes too, which the released code takes for factors; scalars; counters, which stay integers;
    and zeros of them travel, while a matrix of zeros weighs nothing.
    """
    for t in (random(3), random(1), random(1)[0], random(100), torch.tensor(7), torch.arange(40).reshape(4, 10)):
        for value in (t, 0 * t):
            packed = pack(value, 0.5)
            assert torch.equal(unpack(packed, t.shape), value) and unpack(packed, t.shape).dtype == value.dtype
            assert weight(packed) == value.numel() * value.element_size()
    for shape in ((3, 4), (3, 3, 3), (3, 2)):
        assert torch.equal(unpack(pack(random(*shape), 1.0), random(*shape).shape), random(*shape))
    for shape in SHAPES:
        packed = pack(torch.zeros(shape), 0.95)
        assert weight(packed) == 0 and not unpack(packed, torch.Size(shape)).any()


def test_unpacking_changes_nothing_and_gives_the_same_bits_from_any_copy():
    for t in (decaying(40, 60).float(), random(40, 60), random(7)):
        packed = pack(t, 0.9999)
        before, first = trees.clone(packed), unpack(packed, t.shape)
        for offset in (1, 2, 3):  # in memory that starts elsewhere
            shifted = trees.tree_map(
                lambda x, o=offset: torch.cat([x.new_zeros(o), x.flatten()])[o:].view_as(x), packed
            )
            assert torch.equal(unpack(shifted, t.shape), first)
        unpack(packed, t.shape).fill_(7)
        assert trees.unequal(packed, before) == 0


# --- the losses ------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch():
    """Logits of teacher and student, hidden states of both, and labels, of 4 samples, 3 classes and 5 features."""
    tensors = [random(4, 3), random(4, 3, seed=1), random(4, 5, seed=2), random(4, 5, seed=3)]
    return [t.requires_grad_() for t in tensors], torch.tensor([0, 2, 1, 1])


def test_each_loss_moves_its_own_model_and_counts_everything_once(batch):
    """By hand, with p, q = softmax: ∂/∂logits_t = (p − y + (p − q) / A) / B, ∂/∂hidden_t = 2 (h_t − h_s) / (B r A).

    A KL with the mean over classes, H twice, an A or a taught distribution that learns would give others.
    """
    (lt, ls, ht, hs), y = batch
    loss_t, loss_s = mutual_losses(lt, ls, ht, hs, y)
    p, q, onehot = lt.softmax(1), ls.softmax(1), F.one_hot(y, 3)
    p, q = p.detach(), q.detach()
    ce = [float(-(v.log() * onehot).sum() / 4) for v in (p, q)]
    A, H = sum(ce), float((ht - hs).detach().square().sum() / 20)
    assert loss_t.item() == pytest.approx(ce[0] + (float((q * (q / p).log()).sum()) / 4 + H) / A, rel=1e-12)
    assert loss_s.item() == pytest.approx(ce[1] + (float((p * (p / q).log()).sum()) / 4 + H) / A, rel=1e-12)
    found = torch.autograd.grad(loss_t, [lt, ls, ht, hs], retain_graph=True, allow_unused=True)
    assert found[1] is None and found[3] is None
    torch.testing.assert_close(found[0], (p - onehot + (p - q) / A) / 4)
    torch.testing.assert_close(found[2], 2 * (ht - hs) / (20 * A))
    found = torch.autograd.grad(loss_s, [lt, ls, ht, hs], allow_unused=True)
    assert found[0] is None and found[2] is None
    torch.testing.assert_close(found[1], (q - onehot + (q - p) / A) / 4)
    torch.testing.assert_close(found[3], 2 * (hs - ht) / (20 * A))


def test_the_map_learns_with_the_student(uneven):
    """∂/∂W = 2 (W z_s − z_t) z_sᵀ / (B r_t A), and the student's extractor gets Wᵀ's share; the teacher H once."""
    fed = uneven(rule={"epochs": 0})
    student = models.build("mlp", (4,), 3)
    pair = models.Pair(fed.model, student)
    teacher, shared = fed.init(), trees.tree_map(torch.Tensor.double, student.init())
    params = teacher, shared, random(5, 64)
    for leaf in trees.leaves(params):
        leaf.requires_grad_()
    x, y = fed.train[2]
    loss, parts = fedkd.fedkd_loss(pair, params, (x, y))
    assert loss.item() == (parts["teacher"] + parts["student"]).item()
    z_t, z_s = fed.model.extract(teacher[0], x), student.extract(shared[0], x)
    A = (F.cross_entropy(fed.model.predict(teacher, x), y) + F.cross_entropy(student.predict(shared, x), y)).item()
    (got,) = torch.autograd.grad(loss, [params[2]], retain_graph=True)
    torch.testing.assert_close(got, 2 * (z_s @ params[2].T - z_t).T @ z_s / (z_t.numel() * A))
    only_t = torch.autograd.grad(parts["teacher"], trees.leaves(teacher), retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(loss, trees.leaves(teacher), retain_graph=True), only_t))
    assert all(float(g.abs().max()) > 0 for g in torch.autograd.grad(parts["student"], trees.leaves(shared)))


def test_perfect_models_do_not_divide_by_zero():
    """Both cross-entropies are 0 in float32."""
    logits, hidden, y = torch.tensor([[100.0, 0.0]]), torch.ones(1, 2, requires_grad=True), torch.tensor([0])
    for other in (torch.ones(1, 2), torch.zeros(1, 2)):
        losses = mutual_losses(logits, logits, hidden, other, y)
        (slope,) = torch.autograd.grad(sum(losses), [hidden])
        assert all(loss.isfinite() for loss in losses) and slope.isfinite().all()
    assert losses[0].item() == pytest.approx(1 / fedkd.LEAST)


# --- rounds, written out ---------------------------------------------------------------------------------------------


def low_rank(t, energy):
    """What arrives of a change, by numpy."""
    if t.ndim < 2:
        return t
    m, n = t.reshape(len(t), -1).shape
    k = factors_needed(t, energy)
    if k * (m + n + 1) >= m * n:
        return t
    U, s, V = np.linalg.svd(t.reshape(m, n).numpy(), full_matrices=False)
    return torch.from_numpy((U[:, :k] * s[:k]) @ V[:k]).view_as(t)


@pytest.mark.parametrize("least", [1e-8, math.inf])
@pytest.mark.parametrize("energies", [(0.6, 0.9), (0.9, 0.6), (1.0, 1.0)])
def test_three_rounds_in_plain_torch(uneven, plain, play, in_order, one_thread, monkeypatch, least, energies):
    """Another architecture for a student, 3 classes, up to eleven batches; A = ∞: FedAvg with compression."""
    monkeypatch.setattr(fedkd, "LEAST", least)
    fed = uneven(rule={"lr": 0.1, "momentum": 0.5, "weight_decay": 0.01, "batch_size": 1})
    method = make("fedkd", student="mlp-5", energy_start=energies[0], energy_end=energies[1])
    state, rounds = play(fed, method, 3)
    net = models.build("mlp-5", (4,), 3)
    teachers, maps, shared = [fed.init()] * 4, [torch.eye(5, 64).double()] * 4, fed.init(net)
    for t in (1, 2, 3):
        T, changes = energies[0] + (energies[1] - energies[0]) * t / 3, []
        for i in range(4):
            peer, W = plain(fed, i).load(*teachers[i]), maps[i].clone().requires_grad_()
            r, h = (part.module.double() for part in (net.extractor, net.head))
            r.load_state_dict(shared[0]), h.load_state_dict(shared[1])
            parameters = [*peer.r.parameters(), *peer.h.parameters(), *r.parameters(), *h.parameters(), W]
            optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.5, weight_decay=0.01)
            for x, y in peer.batches():
                z_t, z_s = peer.r(x), r(x)
                log_t, log_s = peer.h(z_t).log_softmax(1), h(z_s).log_softmax(1)
                ce_t, ce_s = F.nll_loss(log_t, y), F.nll_loss(log_s, y)
                A = max(least, ce_t.item() + ce_s.item())
                kd_t = F.kl_div(log_t, log_s.detach(), reduction="batchmean", log_target=True)
                kd_s = F.kl_div(log_s, log_t.detach(), reduction="batchmean", log_target=True)
                kd_t = kd_t + F.mse_loss(z_t, (z_s @ W.T).detach())
                kd_s = kd_s + F.mse_loss(z_s @ W.T, z_t.detach())
                optimizer.zero_grad()
                (ce_t + ce_s + (kd_t + kd_s) / A).backward()
                optimizer.step()
            teachers[i], maps[i] = peer.state(), W.detach()
            trained = tuple({k: v.detach().clone() for k, v in m.state_dict().items()} for m in (r, h))
            change = trees.tree_map(torch.sub, trained, shared)
            changes.append(trees.tree_map(lambda t, T=T: low_rank(t, T), change))
        mean = trees.tree_map(lambda a, b, c, d: (a + 7 * b + 10 * c + 11 * d) / 29, *changes)
        shared = trees.tree_map(lambda w, t, T=T: w + low_rank(t, T), shared, mean)
    assert trees.unequal(state.server["student"], shared) < 1e-10
    assert trees.unequal(shared, fed.init(net)) > 0.01
    for i in range(4):
        kept = trees.row(state.kept, i)
        assert trees.unequal((kept["teacher"], kept["W"]), (teachers[i], maps[i])) < 1e-10
        assert trees.unequal(trees.row(rounds[-1].held, i), teachers[i]) < 1e-10


def test_the_energy_grows_with_the_rounds_for_clients_and_server_alike(uneven, monkeypatch):
    """T = .95 + .03 t / R, from t = 1; at the end it is T_end."""
    seen, real = [], fedkd.compress
    monkeypatch.setattr(fedkd, "compress", lambda matrix, energy: seen.append(energy) or real(matrix, energy))
    fed, method = uneven(rule={"lr": 0.1}), make("fedkd")
    state = fed.start(method)
    for t in (1, 2, 3, 4):
        seen.clear()
        fed.play(method, state, 4)
        assert set(seen) == {0.95 + (0.98 - 0.95) * t / 4} and len(seen) >= 5  # four clients and the server
    assert seen[-1] == pytest.approx(0.98, abs=1e-15)


# --- everyone's copy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_no_copy_of_the_student_drifts(digits, model, engine):
    """To the bit, in float32, whoever joins: what clients train from is the server's student, and it weighs what the
    server's update does, or the dense student for those who missed the last round.
    """
    fed, method = digits(model, join_ratio=0.5, engine=engine), make("fedkd", energy_start=0.3, energy_end=0.9)
    state, last, kinds = fed.start(method), np.arange(6), set()
    dense = 4 * fed.model.size()
    for t in range(7):
        student, update = state.server["student"], weight(state.server["update"])
        assert update < dense / 2
        result = fed.play(method, state, 7)
        for i, down in zip(result.ids, result.bytes_down, strict=True):
            assert trees.unequal(trees.row(state.kept["student"], i), student) == 0
            assert down == (update if i in last else dense)
            kinds.add((bool(i in last), t > 0))
        last = result.ids
        applied = trees.tree_map(lambda w, p: w + unpack(p, w.shape), student, state.server["update"])
        assert trees.unequal(applied, state.server["student"]) == 0
        assert trees.unequal(student, state.server["student"]) > 1e-4
    assert kinds == {(True, False), (True, True), (False, True)}


def test_a_copy_that_is_wrong_is_followed_not_mended(digits, play):
    """So the copy is really what a client kept, and only an update travels; who missed a round gets it whole."""
    fed, method = digits(), make("fedkd")
    state, _ = play(fed, method, 2)
    state.server["joined"][3] = False
    for leaf in trees.leaves(state.kept["student"]):
        leaf += 1
    student = state.server["student"]
    result = fed.play(method, state, 3)
    for i in range(6):
        off = trees.tree_map(lambda a, b: a - b, trees.row(state.kept["student"], i), student)
        for leaf in trees.leaves(off):
            torch.testing.assert_close(leaf, torch.full_like(leaf, float(i != 3)), atol=1e-5, rtol=0)
    assert state.server["joined"].all()
    assert (result.bytes_down == 4 * fed.model.size()).tolist() == [i == 3 for i in range(6)]


def test_an_update_of_zero_weighs_only_biases_whatever_the_student_is(digits, play):
    """Updates travel, not parameters, which are not 0 by now."""
    fed, method = digits("cnn-small", join_ratio=0.5), make("fedkd")
    state, _ = play(fed, method, 2)
    before = trees.clone(state.server["student"])
    fed.training = type(fed.training)(lr=0.0)
    result = fed.play(method, state, 3)
    assert result.bytes_up.tolist() == [4 * (16 + 32 + 64 + 10)] * 3
    assert trees.unequal(state.server["student"], before) == 0
    assert not any(
        packed.any() for packed in trees.leaves(trees.tree_map(lambda _, p: p.values, before, state.server["update"]))
    )


def test_bytes_are_those_of_what_travelled(digits):
    """Up and down, never more than the dense student; less where updates are of low rank."""
    for energies in ((0.95, 0.98), (0.3, 0.3), (1.0, 1.0)):
        fed, method = digits("cnn-small"), make("fedkd", energy_start=energies[0], energy_end=energies[1])
        state, dense = fed.start(method), 4 * fed.model.size()
        for _ in range(3):
            down, result = weight(state.server["update"]), fed.play(method, state, 3)
            assert set(result.bytes_down) == {down}
            assert (result.bytes_up <= dense).all() and down <= dense
            assert (result.bytes_up == dense).all() == (energies == (1.0, 1.0))


def test_a_message_takes_no_more_memory_than_a_student_and_its_mask(digits):
    """A client gets an update or the student, never both, in one place of the student's size."""
    fed, method = digits("cnn-small", join_ratio=0.5), make("fedkd")
    state = fed.start(method)
    fed.play(method, state, 2)
    _, message = received(method.download(state.server, np.arange(6)), 6)
    assert 0 < state.server["joined"].sum() < 6
    assert sum(t.numel() * t.element_size() for t in trees.leaves(message)) == 6 * 5 * fed.model.size()


def test_batch_norms_statistics_follow_and_counters_stay_whole(by_hand, linear):
    """Statistics and counters travel as differences: the mean of 1, 2 and 2 steps is 5/3, rounded 2."""
    net = models.from_modules(nn.Sequential(linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()), linear(8, 3), (4,), 3)
    clients = [(random(n, 4, seed=n) + 2, ([0, 1, 2] * n)[:n]) for n in (8, 15, 20)]
    fed, method = by_hand(net, clients, rule={"lr": 0.1}), make("fedkd", energy_start=0.5, energy_end=0.5)
    state = fed.start(method)
    for t in (1, 2, 3):
        student = state.server["student"]
        result = fed.play(method, state, 3)
        assert trees.unequal(trees.row(state.kept["student"], 1), student) == 0
        counter = state.server["student"][0]["1.num_batches_tracked"]
        assert counter.dtype == torch.int64 and int(counter) == 2 * t
        assert state.kept["teacher"][0]["1.num_batches_tracked"].tolist() == [t, 2 * t, 2 * t]
        assert result.bytes_up.min() >= 8 * (8 + 3 + 4 * 8 + 1)  # biases, batch-norm's vectors, the counter
    assert float(state.server["student"][0]["1.running_mean"].abs().max()) > 0.1


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mlp", "cnn-small"])
def test_without_distillation_it_is_local_and_fedavg(digits, play, monkeypatch, model):
    """A = ∞: teachers as in Local, to the bit, though clipped, for each model's gradient is by itself; the student as
    FedAvg's model, at T = 1 but for rounding.
    """
    monkeypatch.setattr(fedkd, "LEAST", math.inf)
    fed = digits(model, rule={"momentum": 0.9, "clip": 0.5}, dtype=torch.float64)
    state, rounds = play(fed, make("fedkd", energy_start=1.0, energy_end=1.0), 3)
    local, alone = play(fed, make("local"), 3)
    average, _ = play(fed, make("fedavg"), 3)
    assert trees.unequal(state.kept["teacher"], local.kept) == 0
    assert trees.unequal(rounds[-1].held, alone[-1].held) == 0
    assert trees.unequal(fed.deployed(make("fedkd"), state, 4), local.kept) == 0
    assert trees.unequal(state.server["student"], average.server) < 1e-12
    lossy, _ = play(fed, make("fedkd", energy_start=0.5, energy_end=0.5), 3)
    assert trees.unequal(lossy.kept["teacher"], local.kept) == 0
    assert trees.unequal(lossy.server["student"], average.server) > 1e-3
    fed.join_ratio = (0.5, 0.5)
    state, _ = play(fed, make("fedkd", energy_start=1.0, energy_end=1.0), 4)
    average, _ = play(fed, make("fedavg"), 4)
    assert trees.unequal(state.server["student"], average.server) < 1e-12


def test_two_equal_models_have_nothing_to_teach_each_other(digits, play):
    """In round 1 the student is the teacher's twin and W the identity: KL = H = 0, and all train as if alone."""
    fed = digits(dtype=torch.float64)
    _, (result,) = play(fed, make("fedkd"), 1)
    _, (alone,) = play(fed, make("local"), 1)
    assert trees.unequal(result.held, alone.held) < 1e-9
    _, rounds = play(fed, make("fedkd"), 2)
    _, others = play(fed, make("local"), 2)
    assert trees.unequal(rounds[-1].held, others[-1].held) > 1e-4  # the student is now of all clients


def test_engines_agree(digits, play):
    ends = []
    for engine in ("loop", "threads", "stacked"):
        fed = digits(
            [models.build(name, (1, 8, 8), 10) for name in ("mlp-1", "mlp")], engine=engine, dtype=torch.float64
        )
        state, rounds = play(fed, make("fedkd"), 2)
        ends.append((state.server["student"], state.kept, rounds[-1].held))
    assert trees.unequal(ends[0], ends[1]) == 0
    assert trees.unequal(ends[0], ends[2]) < 1e-8


# --- who is the student ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("student", "name"), [("", "mlp-4"), ("mlp-5", "mlp-5"), ("cnn-small", "cnn-small")])
def test_which_model_is_shared(digits, play, student, name):
    """By default the smallest of the clients'; W maps its representations to each teacher's."""
    fed = digits([models.build(n, (1, 8, 8), 10) for n in ("mlp-1", "cnn-small", "mlp-4")])
    state, _ = play(fed, make("fedkd", student=student), 1)
    net = models.build(name, (1, 8, 8), 10)
    shapes = trees.tree_map(lambda t: torch.tensor(t.shape), net.init())
    assert trees.unequal(trees.tree_map(lambda t: torch.tensor(t.shape), state.server["student"]), shapes) == 0
    for kept, group in zip(state.kept, fed.groups, strict=True):
        assert kept["W"].shape == (2, group.model.features, net.features)


@pytest.mark.parametrize("family", ["mlp", "cnn"])
def test_five_architectures(family):
    """Half of ten clients a round: all copies of the one student (the smallest, number 5) follow; all is finite."""
    y = np.arange(80) % 4
    rows = np.split(np.arange(80), 20)
    dataset = data.Dataset("random", random(80, 1, 16, 16).float(), y, (0, 1, 2, 3))
    nets = [models.build(f"{family}-{j}", dataset.shape, 4) for j in (1, 2, 3, 4, 5)]
    fed = Federation(dataset, partition.custom(y, rows[:10], rows[10:]), nets, join_ratio=0.5)
    method = make("fedkd")
    state = fed.start(method)
    assert trees.unequal(state.server["student"], nets[4].init()) == 0
    for _ in range(3):
        student, result = state.server["student"], fed.play(method, state, 3)
        for i in result.ids:
            assert trees.unequal(trees.row(state.kept[i % 5]["student"], i // 5), student) == 0
        assert (result.bytes_up < 4 * nets[4].size() / 2).all()  # ranks of one step on four samples
    assert all(leaf.isfinite().all() for leaf in trees.leaves((state.server, state.kept)))


def test_the_map_is_the_identity_at_first(digits):
    fed = digits([models.build(n, (1, 8, 8), 10, head_layers=h) for n, h in (("mlp-1", 2), ("mlp", 1))])
    first, second = fed.start(make("fedkd", student="mlp-5")).kept
    assert torch.equal(first["W"], torch.eye(256, 64).expand(3, 256, 64))
    assert torch.equal(second["W"], torch.eye(64).expand(3, 64, 64))


def test_the_teacher_is_evaluated_and_no_message_changes_it(digits, play):
    fed, method = digits(join_ratio=0.5), make("fedkd")
    state, rounds = play(fed, method, 2)
    assert trees.unequal(fed.deployed(method, state, 3), state.kept["teacher"]) == 0
    assert trees.unequal(rounds[-1].held, trees.take(state.kept["teacher"], rounds[-1].ids)) == 0


def test_impossible_settings_are_refused(by_hand):
    for settings, line in (
        ({"student": "resnet"}, "student='resnet': must be one of '', 'cnn'"),
        ({"energy_start": 0.0}, "energy_start=0.0: must be a finite number above 0, at most 1"),
        ({"energy_end": 1.01}, "energy_end=1.01: must be a finite number above 0, at most 1"),
    ):
        with pytest.raises(ValueError, match=line):
            make("fedkd", **settings)
    fed = by_hand(models.build("mlp", (1, 8, 8), 10), [(torch.zeros(2, 1, 8, 8), [0, 1])])
    with pytest.raises(ValueError, match=r"^model='cnn': .*8"):
        fed.start(make("fedkd", student="cnn"))


def test_ids_are_no_hidden_states():
    """Of a text model that is all head; of one that has a layer of words in its extractor they are vectors."""
    x, y = torch.arange(48).reshape(8, 6) % 9, np.arange(8) % 2
    split, dataset = partition.custom(y, [[0, 1, 2, 3]], [[4, 5, 6, 7]]), data.Dataset("ids", x, y, (0, 1))
    for head_layers, refused in ((3, True), (2, False)):
        net = models.build("fasttext", (6,), 2, vocabulary=9, head_layers=head_layers)
        fed = Federation(dataset, split, net)
        if refused:
            with pytest.raises(ValueError, match="model='fasttext': FedKD needs layers in the extractor of a model of"):
                fed.start(make("fedkd"))
        else:
            fed.play(make("fedkd"), fed.start(make("fedkd")), 1)
