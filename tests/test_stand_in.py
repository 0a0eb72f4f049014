"""All methods on a device that is no CPU, and by steps that are really recorded, on a machine without a GPU.

Whatever the stand-in refuses ends a test: where pflkit goes on without recording or stacking, it warns.
"""

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from stand_in import CaptureError, Device
from torch import nn

from pflkit import data, models, partition, training, trees
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.methods.fedavg import FedAvg
from pflkit.training import Training

pytestmark = pytest.mark.usefixtures("one_thread")
HETEROGENEOUS = [name for name, method in METHODS.items() if getattr(method, "heterogeneous", False)]
NOT_RECORDED = {"fedmeta"}  # its gradients are over all of a client's samples, by Clients.gradient, and no steps


@pytest.fixture
def gpu(monkeypatch):
    """The stand-in, and what pflkit asks of torch.cuda; `with gpu:` it can be used."""
    device = Device()
    monkeypatch.setattr(training, "record", device.record)
    for name, given in (("mem_get_info", (10**11, 10**11)), ("memory_reserved", 0), ("memory_allocated", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda device, given=given: given)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    return device


@pytest.fixture(scope="module")
def digits():
    return data.load("digits").some(120, 0)


def build(name):
    if name != "normed":
        return models.build(name, (1, 8, 8), 10)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten())
    return models.from_modules(body, nn.Linear(12, 10), (1, 8, 8), 10)


def federation(digits, names, device, engine="stacked", clients=4, **options):
    split = partition.dirichlet(digits.y, clients, beta=0.1)
    nets = [build(name) for name in names.split("+")]
    rule = Training(**({"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0, "batch_size": 5} | options))
    about = {"device": device, "dtype": torch.float64, "engine": engine}
    return Federation(digits, split, nets, training=rule, join_ratio=0.75, **about)


def end(fed, method, rounds=3):
    """All that is kept after some rounds, and what was told meanwhile, on the CPU."""
    state, told = fed.start(method), []
    for _ in range(rounds):
        result = fed.play(method, state, rounds)
        told += [fed.score(fed.kinds(result.held)[""], result.ids), list(result.log().values())]
    for held in fed.kinds(fed.deployed(method, state, rounds)).values():
        told.append(fed.score(held, np.arange(fed.num_clients)))
    if hasattr(method, "watch"):
        told += [[t.cpu() for t in trees.leaves(method.watch(state.server, kept))] for kept in fed.parts(state.kept)]
    return trees.tree_map(torch.Tensor.cpu, (state.server, state.kept)), [x for values in told for x in values]


def check(gpu, digits, method, names, engine="stacked"):
    """As the CPU's loop; and whether steps were replayed."""
    want, told = end(federation(digits, names, "cpu", "loop"), make(method))
    with gpu:
        got, told_there = end(federation(digits, names, "meta", engine), make(method))
    assert trees.unequal(want, got) < 1e-10
    for a, b in zip(told, told_there, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)
    assert bool(gpu.replays) == (engine == "stacked" and method not in NOT_RECORDED)


# The stand-in


def test_tensors_of_two_devices_do_not_meet_and_numpy_has_none(gpu):
    with gpu:
        here, there, rows = torch.ones(3), torch.ones(3, device="meta"), torch.zeros(2, dtype=torch.int64)
        for meet in (
            lambda: here + there,
            lambda: here[rows.to("meta")],
            lambda: there.index_add(0, rows, there[:2]),
            lambda: torch.stack([there[0], torch.tensor(1.0)]),
            lambda: there.index_put_((rows.to("meta"),), here[:2]),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                meet()
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="numpy"):
            np.asarray(there)
        assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]  # as in CUDA, a number may
        assert there[[0, 2]].tolist() == [1, 1] and there.device.type == "meta"
        assert torch.empty_like(there).isnan().all()
    with pytest.raises(NotImplementedError):
        torch.ones(3, device="meta").tolist()  # outside, nothing is changed


WAITS = {
    "a value": lambda x: float(x[0]),
    "a comparison": lambda x: bool((x > 0).all()),
    "all values": lambda x: x.tolist(),
    "a copy from the device": lambda x: x.cpu(),
    "a copy to the device": lambda x: torch.ones(3).to("meta"),
    "copied into": lambda x: x.copy_(torch.ones(3)),
    "rows that the CPU names": lambda x: x[[0, 2]],
    "a boolean index": lambda x: x[x > 0],
    "a boolean index to write": lambda x: x.__setitem__(x > 0, x.clone()),
    "a size": lambda x: x.nonzero(),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_counted_and_refused_in_a_recorded_step(gpu, what):
    with gpu:
        x = torch.ones(3, device="meta")
        gpu.waits.clear()
        WAITS[what](x)
        assert gpu.waits.total() == 1
        with pytest.raises(CaptureError, match="not permitted when stream is capturing"):
            gpu.record(lambda: WAITS[what](x.add_(1)))
        assert x.tolist() == [1, 1, 1]
        WAITS[what](x)  # nothing is being recorded any more


def test_a_copy_that_is_not_waited_for_cannot_be_recorded_either(gpu):
    with gpu:
        there = trees.on("meta", [1.0])
        assert there.tolist() == [1] and gpu.waits == {"copy": 1}
        with pytest.raises(CaptureError):
            gpu.record(lambda: trees.on("meta", [1.0]))


def test_a_replay_repeats_what_the_device_did_in_the_same_memory_and_no_python(gpu):
    with gpu:
        x, w, number, calls = torch.zeros(2, device="meta"), torch.ones(2, device="meta"), torch.tensor(3.0), []

        def step():
            calls.append(1)
            tall = w.detach().requires_grad_()
            (slope,) = torch.autograd.grad((tall * tall).sum(), [tall])
            x.add_(slope * len(calls) * number)
            return {"sum": x.sum()}

        replay, result = gpu.record(step)
        assert x.tolist() == [0, 0]
        for total in (12, 24):
            replay()
            number.fill_(100.0)  # was passed by value
            assert float(result["sum"]) == total
        w.copy_(2 * w)
        replay()
        assert x.tolist() == [24, 24] and len(calls) == 1 and gpu.replays == 3


def test_a_replay_must_find_the_memory_it_was_recorded_with(gpu):
    with gpu:
        held = [torch.ones(2, device="meta")]
        replay, result = gpu.record(lambda: 2 * held[0])
        held[0] = held[0][:1]  # a part of it keeps all of it
        replay()
        assert result.tolist() == [2, 2]
        held.clear()
        with pytest.raises(RuntimeError, match="memory that was freed"):
            replay()


def test_what_the_stand_in_refuses_is_told_by_a_warning(gpu, digits, monkeypatch):
    """So that other tests here, in which warnings are errors, would fail."""

    def waiting(model, params, batch):
        loss = F.cross_entropy(model.predict(params, batch[0]), batch[1])
        return loss * float(loss.detach() < 100)

    class Waiting(FedAvg):
        def local(self, clients, kept, message):
            model = clients.sgd(waiting, message)
            return (), model, model

    monkeypatch.setattr(training, "ALONE", 0)
    with gpu, pytest.warns(UserWarning, match="one by one: operation not permitted when stream is capturing: values"):
        end(federation(digits, "cnn-small", "meta"), Waiting(), 1)


# Methods on it


@pytest.mark.parametrize("method", METHODS)
def test_methods_train_as_on_a_cpu(gpu, digits, method):
    check(gpu, digits, method, "mlp")


ALONE = ["fedavg", "perfedavg", "ditto", "fedala", "fedah", "fedgh", "fedapa", "fedpac"]


@pytest.mark.parametrize(
    ("names", "method"), [("cnn-small", name) for name in ALONE] + [("normed", name) for name in ALONE[:3]]
)
def test_methods_train_one_client_after_the_other(gpu, digits, names, method, monkeypatch):
    """As a GPU does with large models with convolutions."""
    monkeypatch.setattr(training, "ALONE", 0)
    check(gpu, digits, method, names)


@pytest.mark.parametrize("method", ["fedavg", "perfedavg", "fedah", "fedkd"])
def test_methods_train_in_a_loop_on_the_device(gpu, digits, method):
    check(gpu, digits, method, "mlp", "loop")


@pytest.mark.parametrize("method", HETEROGENEOUS)
def test_methods_train_different_models(gpu, digits, method):
    check(gpu, digits, method, "mlp-1+mlp-2")


@pytest.mark.parametrize(("method", "most"), [("fedavg", 3), ("fedrep", 5), ("ditto", 5), ("perfedavg", 3)])
def test_a_round_waits_a_few_times_whatever_its_steps_and_clients(gpu, digits, method, most):
    """For each phase's losses and whether all is finite, and for the server's new model to be."""

    def waits(epochs, clients):
        fed, one = federation(digits, "mlp", "meta", clients=clients, epochs=epochs), make(method)
        state = fed.start(one)
        fed.play(one, state, 2)  # in which stacked losses are compared with those of each client
        gpu.waits.clear()
        fed.play(one, state, 2)
        return gpu.waits.total()

    with gpu:
        assert waits(1, 3) == waits(3, 3) == waits(1, 6) == most


def test_models_of_all_clients_are_scored_with_one_wait(gpu, digits):
    with gpu:
        fed = federation(digits, "mlp", "meta")
        held = trees.repeat(fed.init(), 4)
        gpu.waits.clear()
        fed.score(held, np.arange(4))
        assert gpu.waits.total() == 1
