"""What names a run: any change of code, settings or data that could change its result, and nothing else."""

import functools
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pflkit import data, identity, models, partition
from pflkit.experiment import run
from pflkit.federation import Federation
from pflkit.identity import describe, digest
from pflkit.methods import make
from pflkit.methods.fedavg import FedAvg

X, Y = torch.linspace(-1, 1, 80).reshape(40, 2), np.arange(40) % 2


def federation(model=None, x=X):
    tiny = data.Dataset("tiny", x.clone(), Y, (0, 1))
    return Federation(tiny, partition.iid(Y, 4), model or models.build("mlp", (2,), 2))


def in_a_notebook(source):
    """The method that a cell with `source` defines: its code has no file."""
    cell = {"__name__": "__main__", "FedAvg": FedAvg, "dataclass": dataclass, "nn": nn, "torch": torch}
    exec(compile(source, "<cell>", "exec"), cell)
    return cell


CELL = """
RATE = 0.5
def my_loss(model, params, batch, factor={factor}):
    inner = lambda z: z * {inner}
    return inner(factor * RATE * model.predict(params, batch[0]).square().mean())
class Mine(FedAvg):
    power = {power}
    def local(self, clients, kept, message):
        model = clients.sgd(my_loss, message, {arguments})
        return (), model, model
"""
SAME = {"factor": 1, "inner": 1, "power": 2, "arguments": "lr=0.1"}


@pytest.mark.parametrize("change", [{"factor": 2}, {"inner": 2}, {"power": 3}, {"arguments": "lr=0.2"}])
def test_a_method_changed_in_a_notebook_is_another(change):
    name = [digest(describe(in_a_notebook(CELL.format(**c))["Mine"](), federation(), 2)) for c in (SAME, SAME | change)]
    again = digest(describe(in_a_notebook(CELL.format(**SAME))["Mine"](), federation(), 2))
    assert name[0] == again != name[1]


def test_a_constant_that_a_function_reads_counts():
    cell = in_a_notebook(CELL.format(**SAME))
    before = digest(describe(cell["Mine"](), federation(), 2))
    cell["RATE"] = 0.25
    assert digest(describe(cell["Mine"](), federation(), 2)) != before


def test_attributes_of_a_method_without_fields_count():
    names = []
    for mu in (0.0, 0.5):
        method = in_a_notebook(CELL.format(**SAME))["Mine"]()
        object.__setattr__(method, "mu", mu)
        names.append(digest(describe(method, federation(), 2)))
    plain = type("Plain", (), {"__init__": lambda self, mu: setattr(self, "mu", mu)})
    assert describe(plain(0.5), federation(), 2)["settings"] == {"mu": "0.5"}


class Scaled(nn.Module):
    """Its scale shows neither in str() nor in its weights."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale


def test_attributes_of_a_module_count():
    names = set()
    for scale in (1.0, 100.0):
        torch.manual_seed(0)
        model = models.from_modules(nn.Sequential(Scaled(scale), nn.Linear(2, 3)), nn.Linear(3, 2), (2,), 2)
        names.add(digest(describe(make("fedavg"), federation(model), 2)))
    assert len(names) == 2


def test_data_changed_in_place_count_for_federations_made_later():
    tiny = data.Dataset("tiny", X.clone(), Y, (0, 1))
    model, split = models.build("mlp", (2,), 2), partition.iid(Y, 4)
    first = Federation(tiny, split, model)
    tiny.x.mul_(-3)
    second = Federation(tiny, split, model)
    assert digest(describe(make("fedavg"), first, 2)) != digest(describe(make("fedavg"), second, 2))


def test_numpy_numbers_are_numbers(tmp_path):
    fed = federation()
    assert digest(describe(make("fedrep", head_epochs=np.int64(2)), fed, 2)) == digest(
        describe(make("fedrep", head_epochs=2), fed, 2)
    )
    run(make("fedavg"), fed, np.int64(2), out=tmp_path)
    assert run(make("fedavg"), fed, 2, out=tmp_path).loaded is not None


def mixed(*names):
    return federation([models.build(name, (2,), 2) for name in names])


def test_which_clients_have_which_model_counts():
    """Their order and number too: clients get them in turn."""
    feds = [mixed(*n) for n in (("mlp",), ("mlp-1", "mlp"), ("mlp", "mlp-1"), ("mlp", "mlp-1", "mlp-1"), ("mlp",) * 2)]
    names = [digest(describe(make("local"), fed, 2)) for fed in feds]
    assert len(set(names)) == 5
    assert [describe(make("local"), fed, 2)["model"]["name"] for fed in feds[:3]] == ["mlp", "mlp-1+mlp", "mlp+mlp-1"]


def test_a_list_of_one_model_is_that_model():
    assert describe(make("local"), mixed("mlp"), 2) == describe(make("local"), federation(), 2)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_initial_weights_of_every_model_count(changed):
    names = set()
    for seed in (0, 1):
        seeds = [seed if k == changed else 0 for k in range(3)]
        nets = [models.build(n, (2,), 2, seed=s) for n, s in zip(("mlp", "mlp-2", "mlp-3"), seeds, strict=True)]
        names.add(digest(describe(make("local"), federation(nets), 2)))
    assert len(names) == 2


def test_code_and_attributes_of_every_model_count():
    """Of the second one, of a class that only it has."""
    names = set()
    for scale in (1.0, 100.0):
        torch.manual_seed(0)
        own = models.from_modules(nn.Sequential(Scaled(scale), nn.Linear(2, 3)), nn.Linear(3, 2), (2,), 2)
        names.add(digest(describe(make("local"), federation([models.build("mlp", (2,), 2), own]), 2)))
    codes = {describe(make("local"), fed, 2)["code"] for fed in (mixed("mlp", "mlp-1"), federation([own, own]))}
    assert len(names) == len(codes) == 2


def test_all_the_code_that_a_federation_runs_counts():
    code = "import sys, pflkit.federation; print(*(name for name in sys.modules if name.startswith('pflkit.')))"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert set(names) <= {module.__name__ for module in identity.PACKAGE}


def test_engines_of_all_models_are_named():
    net = models.from_modules(nn.Sequential(nn.Unflatten(1, (1, 1, 2)), nn.Conv2d(1, 2, 1)), nn.Flatten(), (2,), 4)
    tiny = data.Dataset("tiny", X.clone(), np.arange(40) % 4, (0, 1, 2, 3))
    split = partition.iid(tiny.y, 4)
    for engine, name in (("auto", "loop+threads"), ("loop", "loop"), ("threads", "threads")):
        fed = Federation(tiny, split, [models.build("mlp", (2,), 4), net], engine=engine, device="cpu")
        assert describe(make("local"), fed, 2)["engine"] == name
    stacked = Federation(tiny, split, [models.build("mlp", (2,), 4), net], engine="stacked", device="cpu")
    assert describe(make("local"), stacked, 2)["engine"] == "all stacked"  # whose rounding differs


# --- a user's module, and all it holds -------------------------------------------------------------------------------


class Holds(nn.Module):
    """A network with something of the user's own in it."""

    def __init__(self, own):
        super().__init__()
        self.linear, self.own = nn.Linear(2, 8), own

    def forward(self, x):
        return self.linear(x.flatten(1))


def twice(x):
    return 2 * x


def thrice(x):
    return 3 * x


def times(k):
    return lambda x: k * x


HELD = {
    "builtins": (torch.relu, torch.tanh),
    "torch's functions": (F.relu, F.elu),
    "own functions": (twice, thrice),
    "what a function remembers": (times(1), times(2)),
    "partials": (
        functools.partial(F.leaky_relu, negative_slope=0.1),
        functools.partial(F.leaky_relu, negative_slope=0.2),
    ),
    "lists": ([1.0], [9.0]),
    "dicts": ({"a": 1}, {"a": 2}),
    "functions in dicts": ({"a": twice}, {"a": thrice}),
    "tensors": (torch.ones(2), 9 * torch.ones(2)),
    "arrays": (np.ones(2), np.zeros(2)),
    "classes": (nn.ReLU, nn.GELU),
    "objects": (slice(0, 1), slice(0, 2)),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_users_module_holds_names_the_run(kind):
    def name(own):
        torch.manual_seed(0)
        net = models.from_modules(Holds(own), nn.Linear(8, 2), (2,), 2)
        return digest(describe(make("fedavg"), federation(net), 2))

    one, other = HELD[kind]
    assert name(one) == name(one)
    assert name(one) != name(other)


def test_a_hook_names_the_run():
    def name(hook):
        torch.manual_seed(0)
        net = nn.Linear(2, 8)
        if hook:
            net.register_forward_hook(hook)
        net = models.from_modules(net, nn.Linear(8, 2), (2,), 2)
        return digest(describe(make("fedavg"), federation(net), 2))

    hooks = (None, lambda module, x, y: 2 * y, lambda module, x, y: 3 * y)
    assert len({name(hook) for hook in hooks}) == 3
