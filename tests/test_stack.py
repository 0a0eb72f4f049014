"""Stacked training in turns, and by recorded steps, which on a CPU are stood in for by what they would do."""

import contextlib
import functools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import data, graphs, models, partition, training, trees
from pflkit import federation as federation_module
from pflkit.federation import Federation
from pflkit.graphs import WARM, Graphs
from pflkit.methods import make
from pflkit.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")
RULE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0}
FOUR = ("fedavg", "fedah", "ditto", "perfedavg")  # losses for many, by vmap, with a pull, and steps of another kind


def federation(sizes=(61, 1, 7, 10, 30, 30), join_ratio=1.0, **options):
    """Clients of given sizes on noise, in float64."""
    g, n = torch.Generator().manual_seed(0), sum(sizes) + len(sizes)
    x, y = torch.randn(n, 1, 8, 8, generator=g), torch.randint(4, (n,), generator=g).numpy()
    ends = np.cumsum([size + 1 for size in sizes])
    parts = np.split(np.arange(n), ends[:-1])
    split = partition.custom(y, [part[:-1] for part in parts], [part[-1:] for part in parts])
    net = options.pop("model", None) or models.build("mlp", (1, 8, 8), 4, seed=0)
    options = {"training": Training(**RULE), "dtype": torch.float64, "engine": "stacked"} | options
    return Federation(data.Dataset("noise", x, y, tuple(range(4))), split, net, join_ratio=join_ratio, **options)


def end(fed, method, rounds=3):
    method = make(method) if isinstance(method, str) else method
    state = fed.start(method)
    logs = [fed.play(method, state, rounds).log() for _ in range(rounds)]
    return (state.server, state.kept), logs


def replayed(step):
    """Stands in for a recorded step: it runs the step that was recorded, on the memory that this one held."""
    result = {}
    return lambda: result.update(step()), result


class Watched(Graphs):
    def __init__(self, capture=replayed):
        super().__init__(capture)
        self.replays = 0

    def __call__(self, place, width, step):
        self.replays += (place, width) in self.recorded
        return super().__call__(place, width, step)


@pytest.mark.parametrize("join_ratio", [1.0, 0.5])
@pytest.mark.parametrize("method", FOUR)
def test_replayed_steps_are_the_steps(method, join_ratio):
    """Other clients and samples in each round, and widths that come again, so memory is used anew."""
    plain, fed = federation(join_ratio=join_ratio), federation(join_ratio=join_ratio)
    fed.groups[0].engine.graphs = graphs = Watched()
    want, got = end(plain, method, 4), end(fed, method, 4)
    assert graphs.replays > 10
    assert trees.unequal(want[0], got[0]) < 1e-12
    for a, b in zip(want[1], got[1], strict=True):
        assert a.keys() == b.keys() and all(np.allclose(a[k], b[k], atol=1e-12, equal_nan=True) for k in a)


def test_what_cannot_be_recorded_is_launched_with_one_warning():
    def fails(step):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    fed = federation()
    fed.groups[0].engine.graphs = Watched(fails)
    with pytest.warns(UserWarning, match="one by one: operation not permitted when stream is capturing$") as told:
        got = end(fed, "fedah")
    assert len(told) == 1
    assert trees.unequal(got[0], end(federation(), "fedah")[0]) == 0


def test_without_memory_to_record_one_more_what_was_recorded_is_freed_and_the_true_reason_told():
    def full(step):
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")  # as torch's capture_end does

    graphs = Watched()
    for _ in range(WARM + 1):
        graphs("here", 2, dict)
    assert graphs.recorded
    graphs.capture = full
    with pytest.warns(UserWarning, match="one by one: CUDA out of memory"):
        for _ in range(WARM + 1):
            assert graphs("there", 2, dict) == {}
    assert not graphs.recorded


def test_a_step_is_recorded_after_a_few_and_forgotten_when_its_place_grows():
    graphs, seen = Watched(), []

    def step(held):
        seen.append(held.tolist())
        return {"sum": held.sum()}

    for k in range(WARM + 3):
        (held,) = graphs.hold("here", "x", [torch.full((2,), float(k))])
        assert float(graphs("here", 2, functools.partial(step, held))["sum"]) == 2 * k
    assert graphs.replays == 3 and seen[-1] == [WARM + 2.0] * 2
    (held,) = graphs.hold("here", "x", [torch.ones(1)])  # fewer: the same place
    assert graphs.recorded and len(held) == 1
    graphs.hold("here", "x", [torch.ones(3)])
    assert not graphs.recorded


def test_a_step_is_recorded_on_its_own_gpu_and_a_failure_leaves_the_stream(monkeypatch):
    """Torch's calls, stood in for: a second GPU's step must not be recorded on a stream of the first."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    now = {"device": first, 0: SimpleNamespace(device=first), 1: SimpleNamespace(device=second)}

    def set_stream(stream):
        now[stream.device.index] = stream

    @contextlib.contextmanager
    def on(device):
        before, now["device"] = now["device"], torch.device(device)
        yield
        now["device"] = before

    @contextlib.contextmanager
    def capturing(graph, stream):
        set_stream(stream)
        yield  # what fails leaves the stream, as in torch
        set_stream(usual)

    usual = now[1]
    stand_ins = {"set_stream": set_stream, "device": on, "graph": capturing}
    stand_ins["CUDAGraph"] = lambda: SimpleNamespace(replay=None)
    stand_ins["current_stream"] = lambda device=None: now[torch.device(device or now["device"]).index]
    stand_ins["Stream"] = lambda device=None: SimpleNamespace(device=torch.device(device or now["device"]))
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    capture = training.Engine("auto", None, "cuda:1").graphs.capture

    def step():
        return now["device"], now[1] is usual

    def fails():
        raise RuntimeError("not while capturing")

    assert capture(step)[1] == (second, False)
    with pytest.raises(RuntimeError, match="not while"):
        capture(fails)
    assert now[1] is usual
    graphs._beside.cache_clear()


def test_the_oldest_places_are_forgotten(monkeypatch):
    """APPLE's λ, a number that stands still, is another one in every round, and so is the place."""
    monkeypatch.setattr("pflkit.graphs.PLACES", 3)
    plain, fed = federation(sizes=(60, 60, 60)), federation(sizes=(60, 60, 60))
    fed.groups[0].engine.graphs = kept = Watched()
    want, got = end(plain, type(make("apple"))(L=1.0), 6), end(fed, type(make("apple"))(L=1.0), 6)
    assert kept.replays and trees.unequal(want[0], got[0]) < 1e-12
    assert all(len({place for place, _ in part}) <= 3 for part in (kept.held, kept.taken, kept.recorded))


def test_places_tell_apart_what_a_recorded_step_has_in_it(monkeypatch):
    """Rates, numbers that stand still, pulls and batch sizes are part of a recorded step."""
    fed = federation()
    fed.groups[0].engine.graphs = graphs = Watched()
    net, N = fed.model, 6

    def scaled(model, params, batch, by):
        return by * training.F.cross_entropy(model.predict(params, batch[0]), batch[1])

    def sgd(engine_of, by, **options):
        clients = engine_of.clients(np.arange(N), 1, 1)
        start = trees.repeat(trees.tree_map(torch.Tensor.double, net.init()), N)
        pull = (trees.full_like(start, 0.0), options.pop("mu", 0.0))
        return clients.sgd(scaled, start, by, pull=pull, **options)

    plain = federation()
    for options in ({}, {"lr": 0.01}, {"batch_size": 5}, {"mu": 0.5}, {"lr": (0.01, 0.02)}, {"epochs": 2}):
        for by in (1.0, 2.0):
            for _ in range(2):
                assert trees.unequal(sgd(fed, by, **options), sgd(plain, by, **options)) < 1e-12
    assert graphs.replays


@pytest.mark.parametrize("most", [1, 2, 4, 5])
@pytest.mark.parametrize("method", FOUR)
def test_clients_that_do_not_fit_are_trained_in_turns(method, most, monkeypatch):
    want = end(federation(), method)
    monkeypatch.setattr(training.Engine, "room", lambda self, numbers: most)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = end(federation(), method)
    assert trees.unequal(want[0], got[0]) < 1e-12
    for a, b in zip(want[1], got[1], strict=True):
        assert a.keys() == b.keys() and all(np.allclose(a[k], b[k], atol=1e-12, equal_nan=True) for k in a)


def normed():
    """A convolution and batch-norm, by a module of one's own."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten())
    return models.from_modules(body, nn.Linear(12, 4), (1, 8, 8), 4)


@pytest.mark.parametrize("net", [normed, lambda: models.build("cnn-small", (1, 8, 8), 4)], ids=["norm", "cnn-small"])
@pytest.mark.parametrize("method", FOUR)
def test_one_client_after_the_other_is_recorded_without_vmap(method, net, monkeypatch):
    """As a GPU trains ResNet-18: one client's step, replayed for all; the numbers of a loop."""
    want = end(federation(model=net(), engine="loop"), method, 4)
    monkeypatch.setattr(training.Engine, "room", lambda self, numbers: 1)
    by_vmap, vmap, fed = set(), torch.vmap, federation(model=net())
    monkeypatch.setattr(torch, "vmap", lambda f: (by_vmap.add(f.__name__), vmap(f))[1])
    fed.groups[0].engine.graphs = graphs = Watched()
    got = end(fed, method, 4)
    assert graphs.replays > 10 and len(graphs.recorded) < 12 and by_vmap <= {"clip01"}
    assert trees.unequal(want[0], got[0]) < 1e-12
    for a, b in zip(want[1], got[1], strict=True):
        assert a.keys() == b.keys() and all(np.allclose(a[k], b[k], atol=1e-12, equal_nan=True) for k in a)


def test_only_large_models_with_convolutions_train_alone_on_a_gpu(monkeypatch):
    for name, given in (("mem_get_info", (56 * 10**9, 10**12)), ("memory_reserved", 50e9), ("memory_allocated", 10e9)):
        monkeypatch.setattr(torch.cuda, name, lambda device, given=given: given)  # 96 GB in all
    for name, numbers, most in (("cnn", 1_000_000, 1000), ("cnn", 10_000_000, 1), ("mlp", 10_000_000, 100)):
        engine = training.Engine("auto", models.build(name, (3, 32, 32), 10), "cpu", 20)
        assert engine.room(numbers) >= 2**31
        engine.on_cpu = False
        assert engine.room(numbers) == most


# Looking at results later, as on a GPU


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", FOUR)
def test_what_is_looked_at_later_is_the_same(method, engine, monkeypatch):
    want, fed = end(federation(engine=engine), method), federation(engine=engine)
    fed.groups[0].engine.waits, looks, settle = True, [], training.Clients._settle
    monkeypatch.setattr(training.Clients, "_settle", lambda self: (looks.append(len(self._pending)), settle(self)))
    got = end(fed, method)
    assert max(looks) == {"fedavg": 1, "fedah": 3, "ditto": 2, "perfedavg": 1}[method]
    assert trees.unequal(want[0], got[0]) == 0
    for a, b in zip(want[1], got[1], strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[k], b[k], equal_nan=True) for k in a)


@pytest.mark.parametrize("later", [False, True])
def test_divergence_names_the_first_phase_even_if_another_fails_on_it(later):
    """The head phase diverges; then a method's own check fails on what came of it."""

    class Checking(type(make("fedrep"))):
        def local(self, clients, kept, message):
            given = super().local(clients, kept, message)
            if not all(leaf.isfinite().all() for leaf in trees.leaves(given)):
                raise ValueError("not finite")
            return given

    fed = federation(training=Training(lr=3e38, momentum=0.9), dtype=torch.float32)
    fed.groups[0].engine.waits = later
    state = fed.start(Checking())
    before = trees.clone((state.server, state.kept))
    with pytest.raises(FloatingPointError, match="round 1, client 0, phase 'head': training diverged"):
        fed.play(Checking(), state, 1)
    assert trees.unequal(before, (state.server, state.kept)) == 0 and state.round == 0


# Precision on a GPU


@pytest.mark.parametrize("precision", ["tf32", "bf16", "half"])
def test_less_than_full_precision_needs_a_gpu(precision):
    with pytest.raises(ValueError, match=f"precision='{precision}': must be"):
        federation(precision=precision, device="cpu")


@pytest.mark.parametrize(
    ("precision", "flag", "dtype"), [("full", "ieee", 32), ("tf32", "tf32", 32), ("bf16", "ieee", 16)]
)
def test_arithmetic_is_set_within_and_restored(precision, flag, dtype):
    kinds, x = (torch.backends.cuda.matmul, torch.backends.cudnn.conv), torch.randn(2, 2)
    before = [kind.fp32_precision for kind in kinds]
    with pytest.raises(ZeroDivisionError), graphs.arithmetic(precision, torch.device("cpu")):
        assert [kind.fp32_precision for kind in kinds] == [flag] * 2
        assert (x @ x).element_size() * 8 == dtype
        raise ZeroDivisionError
    assert [kind.fp32_precision for kind in kinds] == before and (x @ x).dtype == torch.float32


def test_a_trained_weight_is_rounded_to_bf16_anew_after_each_step():
    w, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with graphs.arithmetic("bf16", torch.device("cpu")):
        for want in (1.0, 2.0, 3.0):
            assert float((x @ w).detach()) == want
            w.data.add_(1)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", ["fedphp", "fd", "pfedhn", "dbe", "fedpac", "fedavg"])
def test_bf16_is_the_clients_alone_and_no_tensor_that_is_kept_has_it(method, engine, monkeypatch):
    """By autocast on the CPU: features, logits and losses are bfloat16, and the server's products are not."""
    within, kind = graphs.arithmetic, type(make(method))

    class Told(kind):
        def download(self, server, ids):
            assert not torch.is_autocast_enabled("cpu")
            return super().download(server, ids)

        def merge(self, *args):
            assert not torch.is_autocast_enabled("cpu")
            return super().merge(*args)

        def local(self, *args):
            assert torch.is_autocast_enabled("cpu")
            return super().local(*args)

    monkeypatch.setattr(federation_module, "arithmetic", lambda precision, device: within("bf16", device))
    fed, method = federation(engine=engine, dtype=torch.float32), Told()
    state = fed.start(method)
    for _ in range(2):
        result = fed.play(method, state, 2)
        fed.deployed(method, state, 2)
    assert all(np.isfinite(values).all() for values in result.log().values())
    assert torch.bfloat16 not in {t.dtype for t in trees.leaves((state.server, state.kept, result.held))}


@pytest.mark.parametrize("what", ["play", "deployed", "score"])
def test_rounds_and_scores_have_full_precision_by_default(what, monkeypatch):
    seen, within = [], graphs.arithmetic

    def told(precision, device):
        seen.append(precision)
        return within(precision, device)

    monkeypatch.setattr(federation_module, "arithmetic", told)
    fed, method = federation(), make("fedavg")
    state = fed.start(method)
    {
        "play": lambda: fed.play(method, state, 1),
        "deployed": lambda: fed.deployed(method, state, 1),
        "score": lambda: fed.score(trees.repeat(fed.init(), 6), np.arange(6)),
    }[what]()
    assert seen == ["full"]
