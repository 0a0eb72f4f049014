"""Local training against torch.optim.SGD by hand, closed forms, and the promise that a client's result is its own."""

import gc
import itertools
import math
import re
import threading
import traceback
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pflkit import training, trees
from pflkit.methods.fedavg import model_loss
from pflkit.methods.fedrep import extractor_loss, head_loss
from pflkit.models import build, from_modules
from pflkit.training import Clients, Engine, Training, evaluate

CLASSES = 3
SIZES = (1, 7, 10, 11, 61)  # batches of 10: one short, one short, one full, full and single, six full and single
SHAPES = {"mlp": (6,), "cnn-small": (1, 8, 8), "norm": (1, 5, 5), "dropout": (6,)}
ENGINES = pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
EXACT = pytest.mark.parametrize("engine", ["loop", "threads"])  # those that are equal to the bit


def norm():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), nn.Linear(36, CLASSES)


def dropout():
    return nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.ReLU()), nn.Linear(50, CLASSES)


def make_model(name):
    torch.manual_seed(0)
    if name in ("norm", "dropout"):
        return from_modules(*{"norm": norm, "dropout": dropout}[name](), SHAPES[name], CLASSES)
    return build(name, SHAPES[name], CLASSES)


def samples(shape, n, id, dtype):
    """Client `id`'s own data."""
    draw = torch.Generator().manual_seed(1000 * id + n)
    return torch.randn(n, *shape, dtype=dtype, generator=draw), torch.randint(CLASSES, (n,), generator=draw)


def sampled(model, sizes=SIZES, ids=None, engine="loop", dtype=torch.float64, round=2, data=None, **rule):
    ids = np.arange(len(sizes)) if ids is None else np.array(ids)
    if data is None:
        data = [samples(model.shape, n, int(i), dtype) for n, i in zip(sizes, ids, strict=True)]
    runs = engine if isinstance(engine, Engine) else Engine(engine, model)
    return Clients(model, data, ids, round, 9, Training(**rule), 5, runs, {})


def start(model, clients=5, dtype=torch.float64):
    """Every client's own initial model: the model's, moved by a little that differs from client to client."""
    one = trees.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, model.init())
    by = torch.arange(clients, dtype=dtype) / 64
    return trees.tree_map(
        lambda t: t + by.reshape(-1, *[1] * (t.ndim - 1)) if t.is_floating_point() else t, trees.repeat(one, clients)
    )


def numbers(value, clients=1):
    return {"w": torch.full((clients,), float(value), dtype=torch.float64)}


def quadratic(model, params, batch):
    """1/2 (w - c)^2, whose gradient is w - c; every sample says c = 4."""
    return 0.5 * (params["w"] - 4) ** 2


# The same by hand


def batches_of(seed, round, id, phase, epochs, n, batch_size, drop_last):
    """The documented stream: numpy's SeedSequence over seed, 5 names: "batches", round, client, phase and epoch."""
    words = [seed, 5, zlib.crc32(b"batches"), round, id, zlib.crc32(phase.encode())]
    for epoch in range(epochs):
        order = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*words, epoch]))).permutation(n)
        for first in range(0, n, batch_size):
            batch = order[first : first + batch_size].tolist()
            if len(batch) == batch_size or not drop_last:
                yield batch


def plain_network(name):
    """The bundled models written with torch modules in the usual order."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    if name == "norm":
        return nn.Sequential(*norm())
    return nn.Sequential(
        *[nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, CLASSES)],
    )


def by_hand(network, x, y, batches, lr, momentum=0.0, weight_decay=0.0, clip=None):
    """torch.optim.SGD on a module, in place; the mean loss over the samples seen, the norms of the gradients used."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    total, seen, norms = 0.0, 0, []
    for batch in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x[batch]), y[batch])
        loss.backward()
        norm = math.sqrt(sum(float((p.grad**2).sum()) for p in network.parameters()))
        if clip is not None and norm > clip:
            for p in network.parameters():
                p.grad *= clip / norm
        norms.append(norm)
        optimizer.step()
        total, seen = total + loss.item() * len(batch), seen + len(batch)
    return total / seen if seen else math.nan, norms


def load(network, row):
    with torch.no_grad():
        for mine, theirs in zip(network.state_dict().values(), trees.leaves(row), strict=True):
            mine.copy_(theirs)


RULES = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "clip": {"clip": 0.5},
    "all": {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.5, "epochs": 3},
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
@ENGINES
def test_every_client_does_exactly_torchs_sgd(name, rule, drop_last, engine):
    model = make_model(name)
    clients = sampled(model, lr=0.1, drop_last=drop_last, **rule, engine=engine)
    params = start(model)
    given = trees.clone(params)
    got = clients.sgd(model_loss, params)
    assert trees.unequal(params, given) == 0  # arguments are values
    rest = {k: v for k, v in rule.items() if k != "epochs"}
    for i, n in enumerate(SIZES):
        network = plain_network(name).double()
        load(network, trees.row(params, i))
        batches = batches_of(5, 2, i, "train", rule.get("epochs", 1), n, 10, drop_last)
        loss, norms = by_hand(network, *clients.data[i], batches, lr=0.1, **rest)
        want = tuple(p.detach() for p in network.parameters())
        assert trees.unequal(tuple(trees.leaves(trees.row(got, i))), want) < 1e-12
        assert clients.log["train"][i] == pytest.approx(loss, abs=1e-12, nan_ok=True)
        if "clip" in rule and norms:
            assert max(norms) > 0.5  # the bound was met
        if drop_last and n < 10:  # no batch at all: nothing moves, and that is no error
            assert trees.unequal(trees.row(got, i), trees.row(params, i)) == 0 and math.isnan(clients.log["train"][i])


@ENGINES
def test_nobody_has_a_full_batch(engine):
    model = make_model("mlp")
    clients = sampled(model, sizes=(1, 7), drop_last=True, engine=engine)
    params = start(model, 2)
    assert trees.unequal(clients.sgd(model_loss, params), params) == 0
    assert clients.log == {} and clients.flops().tolist() == [0, 0]


@ENGINES
def test_the_clipped_step_has_the_bounds_length(engine):
    model = make_model("mlp")
    clients = sampled(model, sizes=(10,) * 3, lr=1.0, clip=1e-3, engine=engine)  # one step, so the step is the gradient
    params = start(model, 3)
    moved = trees.tree_map(torch.sub, params, clients.sgd(model_loss, params))
    for i in range(3):
        assert math.sqrt(sum(float((t[i] ** 2).sum()) for t in trees.leaves(moved))) == pytest.approx(1e-3, rel=1e-9)


@pytest.mark.usefixtures("one_thread")
@ENGINES
def test_batch_norm_by_hand(engine):
    model = make_model("norm")
    clients = sampled(model, epochs=2, lr=0.1, momentum=0.5, engine=engine)
    params = start(model)
    got = clients.sgd(model_loss, params)
    for i, n in enumerate(SIZES):
        network = plain_network("norm").double()
        load(network, trees.row(params, i))
        batches = [b for b in batches_of(5, 2, i, "train", 2, n, 10, False) if len(b) > 1]
        by_hand(network, *clients.data[i], batches, lr=0.1, momentum=0.5)
        for mine, theirs in zip(trees.leaves(trees.row(got, i)), network.state_dict().values(), strict=True):
            assert mine.dtype == theirs.dtype and (mine.double() - theirs.double()).abs().max() < 1e-12
        assert got[0]["1.num_batches_tracked"][i].item() == len(batches)
    assert clients.log["skipped"].tolist() == [2, 0, 0, 2, 2]  # single samples, in two epochs
    assert trees.unequal(trees.row(got, 0), trees.row(params, 0)) == 0  # has never more than one


# Closed forms


@pytest.mark.parametrize("k", [0, 1, 3, 20])
@ENGINES
def test_steps_on_a_parabola(k, engine):
    """w_k = c + (1 - eta)^k (w_0 - c); with c = 4, eta = 1/2, w_0 = 0, after three steps: 3.5."""
    clients = sampled(make_model("mlp"), sizes=(max(k, 1),), batch_size=1, lr=0.5, epochs=min(k, 1), engine=engine)
    got = clients.sgd(quadratic, numbers(0))["w"].item()
    assert got == 4 - 4 * 0.5**k and (k != 3 or got == 3.5)


@ENGINES
def test_momentum_and_decay_on_a_parabola(engine):
    # v = -4, w = 2;  v = -2 - 4/2 = -4, w = 4;  v = 0 - 2 = -2, w = 5
    clients = sampled(make_model("mlp"), sizes=(3,), batch_size=1, lr=0.5, engine=engine)
    assert clients.sgd(quadratic, numbers(0), momentum=0.5)["w"].item() == 5
    # gradient w - 4 + w:  0 + 2 = 2;  2 - 0 = 2, its fixed point
    assert clients.sgd(quadratic, numbers(0), weight_decay=1.0)["w"].item() == 2


@ENGINES
def test_project_is_applied_after_every_step(engine):
    # (0 + 2) / 2 = 1;  (1 + 1.5) / 2 = 1.25;  (1.25 + 1.375) / 2 = 1.3125
    clients = sampled(make_model("mlp"), sizes=(3,), batch_size=1, lr=0.5, engine=engine)
    assert clients.sgd(quadratic, numbers(0), project=lambda w: w / 2)["w"].item() == 1.3125


@ENGINES
def test_named_extras_are_recorded(engine):
    def loss(model, params, batch):
        n = len(batch[1])
        return quadratic(model, params, batch), {"size": torch.tensor(float(n)), "plain": n / 2}

    clients = sampled(make_model("mlp"), sizes=(4, 15), lr=0.0, engine=engine)
    clients.sgd(loss, numbers(0, 2), phase="pull")
    assert sorted(clients.log) == ["pull", "pull.plain", "pull.size"]
    assert clients.log["pull"].tolist() == [8, 8]
    assert clients.log["pull.size"].tolist() == [4, pytest.approx((10 * 10 + 5 * 5) / 15)]  # means over samples
    assert clients.log["pull.plain"].tolist() == [2, pytest.approx((10 * 5 + 5 * 2.5) / 15)]


def test_phases_rounds_clients_and_epochs_have_batches_of_their_own():
    orders = {}

    def watch(model, params, batch):
        orders.setdefault(key, []).append(tuple(batch[0].flatten().tolist()))
        return quadratic(model, params, batch)

    model = from_modules(nn.Identity(), nn.Linear(1, CLASSES), (1,), CLASSES)
    data = [(torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.int64))]
    for key in [("a", 1, 0), ("b", 1, 0), ("a", 2, 0), ("a", 1, 3)]:
        phase, round, id = key
        sampled(model, data=data, ids=[id], sizes=(10,), round=round).sgd(watch, numbers(0), phase=phase, epochs=2)
    seen = list(itertools.chain(*orders.values()))
    assert len(seen) == len(set(seen)) == 8 and all(sorted(order) == list(range(10)) for order in seen)


# Frozen parts


@pytest.mark.parametrize("rule", [RULES["plain"], RULES["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "norm"])
@ENGINES
def test_frozen_parts_stand_still_and_trained_parts_move(name, rule, engine):
    model = make_model(name)
    clients = sampled(model, lr=0.1, **rule, engine=engine)
    extractor, head = start(model)
    before = trees.clone((extractor, head))
    trained = clients.sgd(extractor_loss, extractor, head), clients.through(extractor).sgd(head_loss, head)
    for part, old in zip(trained, before, strict=True):
        assert all(trees.unequal(trees.row(part, i), trees.row(old, i)) > 1e-3 for i in (1, 2, 3, 4))
    assert trees.unequal((extractor, head), before) == 0


@pytest.mark.usefixtures("one_thread")
def test_a_frozen_extractor_runs_in_evaluation_mode():
    model = make_model("norm")
    clients = sampled(model, lr=0.1)
    extractor, head = start(model)
    extractor["1.running_mean"] += 0.3
    features = clients.through(extractor).data
    for i, (z, y) in enumerate(features):
        network = plain_network("norm").double().eval()
        load(network, trees.row((extractor, head), i))
        assert (z - network[0](clients.data[i][0])).abs().max() < 1e-12 and y is clients.data[i][1]
    assert "skipped" not in clients.log

    clients.through(extractor).sgd(head_loss, head, phase="head")
    assert "skipped" not in clients.log  # a head without batch-norm trains on single samples


@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
def test_training_behind_an_extractor_is_training_with_it_frozen(name):
    def on_inputs(model, head, batch, extractor):
        return F.cross_entropy(model.predict((extractor, head), batch[0]), batch[1])

    model, sizes = make_model(name), (7, 230)  # features come in pieces of 100
    clients = sampled(model, sizes, lr=0.1, momentum=0.9)
    extractor, head = start(model, 2)
    behind = clients.through(extractor).sgd(head_loss, head, phase="head")
    assert trees.unequal(behind, clients.sgd(on_inputs, head, extractor, phase="head")) < 1e-10
    assert list(clients.log) == ["head"]  # both have one log


class Hidden(nn.Module):
    """Has a tensor that torch does not know of, as a list of parameters would be."""

    def __init__(self):
        super().__init__()
        self.factors = [torch.ones((), requires_grad=True)]

    def forward(self, x):
        return x * self.factors[0]


@ENGINES
def test_features_and_results_carry_no_gradients(engine):
    model = from_modules(Hidden(), nn.Linear(6, CLASSES), (6,), CLASSES)
    clients, (extractor, head) = sampled(model, engine=engine), start(model)
    asking = trees.tree_map(lambda t: t.clone().requires_grad_(), head)
    behind = clients.through(extractor)
    trained = behind.sgd(head_loss, asking)
    assert not any(t.requires_grad for t in (*trees.leaves(trained), *(z for z, _ in behind.data)))
    assert trees.unequal(trained, behind.sgd(head_loss, head)) == 0
    evaluate(model, (extractor, asking), clients.data, clients.engine)


@ENGINES
def test_training_works_where_the_caller_has_gradients_off(engine):
    model = make_model("mlp")
    want = sampled(model, engine=engine).sgd(model_loss, start(model))
    with torch.no_grad():
        clients = sampled(model, engine=engine)
        assert trees.unequal(clients.sgd(model_loss, start(model)), want) == 0 and clients.flops().all()


# Nothing to do


@pytest.mark.parametrize("name", ["mlp", "cnn-small"])
@ENGINES
def test_a_rate_of_zero_moves_nothing(name, engine):
    model = make_model(name)
    params = start(model, dtype=torch.float32)
    got = params
    for round in (1, 2, 3):
        got = sampled(model, round=round, dtype=torch.float32, lr=0.0, **RULES["all"], engine=engine).sgd(
            model_loss, got
        )
    assert trees.unequal(got, params) == 0


@pytest.mark.parametrize("rule", [{"epochs": 0}, {"lr": 0.0}])
@ENGINES
def test_the_result_has_memory_of_its_own(rule, engine):
    model = make_model("mlp")
    clients = sampled(model, **rule, engine=engine)
    shared = trees.expand(trees.row(start(model), 0), len(SIZES))  # as a message is: one value for all
    got = clients.sgd(model_loss, shared)
    assert trees.unequal(got, shared) == 0 and ("train" in clients.log) == ("lr" in rule)
    got[1]["bias"][0] += 1
    assert (
        trees.unequal(trees.row(got, 1), trees.row(shared, 1)) == 0 and shared[1]["bias"][0].ne(got[1]["bias"][0]).all()
    )


@ENGINES
def test_an_empty_part_is_trained_to_itself(engine):
    model = build("mlp", (6,), CLASSES, head_layers=0)
    assert sampled(model, engine=engine).sgd(extractor_loss, {}, {}) == {}


# A client's result is its own


def everything(model, clients, params):
    """All that clients can do, as one tree."""
    whole = clients.sgd(model_loss, params)
    behind = clients.through(params[0])
    head = behind.sgd(head_loss, params[1], phase="head")
    correct, loss = evaluate(model, whole, clients.data, clients.engine)
    return whole, head, {"z": behind.data, "correct": correct, "loss": loss, "train": clients.log["train"]}


def same(all_of_it, part, rows):
    """Whether `part` has the bits of `rows` of `all_of_it`."""
    (whole, head, values), (whole_part, head_part, part_values) = all_of_it, part
    return (
        trees.unequal(trees.take((whole, head), rows), (whole_part, head_part)) == 0
        and all(torch.equal(values["z"][i][0], z) for i, (z, _) in zip(rows, part_values["z"], strict=True))
        and all(np.array_equal(values[k][rows], part_values[k], equal_nan=True) for k in ("correct", "loss", "train"))
    )


@EXACT
@pytest.mark.parametrize("name", SHAPES)
def test_a_client_alone_is_the_same_client_among_others(name, engine):
    model = make_model(name)
    options = {"dtype": torch.float32, "engine": engine, "lr": 0.1, "momentum": 0.9}
    sizes = (2, 7, 10, 12, 230)
    params = start(model, dtype=torch.float32)
    among = everything(model, sampled(model, sizes, **options), params)
    for rows in ([0], [3], [4], [4, 1, 2]):  # in any order
        clients = sampled(model, [sizes[i] for i in rows], ids=rows, **options)
        assert same(among, everything(model, clients, trees.take(params, rows)), rows)


@pytest.mark.parametrize("name", SHAPES)
def test_engines_and_numbers_of_threads_give_the_same_bits(name):
    model = make_model(name)
    params = start(model, dtype=torch.float32)
    runs = []
    for engine, threads in (("loop", 1), ("loop", 2), ("threads", 1), ("threads", 2)):
        torch.set_num_threads(threads)
        clients = sampled(model, engine=engine, dtype=torch.float32, lr=0.1, weight_decay=0.01, epochs=2)
        runs.append(everything(model, clients, params))
        assert torch.get_num_threads() == threads
    assert all(same(runs[0], run, list(range(len(SIZES)))) for run in runs[1:])


def test_where_a_client_lies_in_memory_does_not_matter():
    model, (x, y) = make_model("mlp"), samples((6,), 150, 0, torch.float32)
    params = start(model, 1, dtype=torch.float32)
    own = everything(model, sampled(model, data=[(x, y)], ids=[0]), params)
    for offset in range(1, 8):  # rows of 24 bytes, so every alignment
        wide = torch.cat([torch.zeros(offset, 6), x])[offset:]
        assert same(own, everything(model, sampled(model, data=[(wide, y)], ids=[0]), params), [0])


# Dropout


@pytest.mark.parametrize("engine", ["auto", "loop", "threads"])
def test_dropout_is_each_clients_own(engine):
    masks = {}

    def watch(model, params, batch, who):
        masks.setdefault(int(who["id"]), []).append(model.extract(params[0], torch.ones(1, 64)) != 0)
        return model_loss(model, params, batch)

    def run(ids, phase="train"):
        masks.clear()
        clients = sampled(model, sizes=[20] * len(ids), ids=ids, engine=engine, dtype=torch.float32)
        trained = clients.sgd(watch, start(model, len(ids), torch.float32), {"id": torch.tensor(ids)}, phase=phase)
        assert sorted(masks) == sorted(ids) and trees.leaves(trained)
        return {id: torch.cat(rows) for id, rows in masks.items()}

    model = from_modules(nn.Dropout(0.5), nn.Linear(64, CLASSES), (64,), CLASSES)
    before = torch.get_rng_state()
    four = run([0, 1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)
    drawn = [m for masks in four.values() for m in masks]  # 8 of 64 coins each: alike once in 2^64
    assert len(drawn) == 8 and all(not torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))
    assert 150 < sum(int(m.sum()) for m in drawn) < 362  # half of 512, by eight standard deviations or more
    alone, again = run([2]), run([3, 2])
    assert torch.equal(alone[2], four[2]) and torch.equal(again[2], four[2]) and torch.equal(again[3], four[3])
    assert not torch.equal(run([2], "other")[2], four[2])


def test_frozen_dropout_lets_everything_through():
    model = from_modules(nn.Dropout(0.5), nn.Linear(6, CLASSES), (6,), CLASSES)
    clients = sampled(model, sizes=(4,), ids=[0])
    assert torch.equal(clients.through({}).data[0][0], clients.data[0][0])


def test_dropout_leaves_the_gpus_generators_alone(monkeypatch):
    def never(seed):
        raise AssertionError("seeds the GPUs")

    model = make_model("dropout")
    monkeypatch.setattr(torch.cuda, "manual_seed_all", never)
    sampled(model).sgd(model_loss, start(model))


# Failures


@ENGINES
@pytest.mark.parametrize(("lr", "bad"), [(0.1, math.nan), (0.0, math.nan), (0.1, math.inf)])
def test_a_loss_that_is_not_finite_stops_and_names_the_client(engine, lr, bad):
    model = make_model("mlp")
    clients = sampled(model, sizes=(7, 7, 20), ids=[4, 6, 8], engine=engine, round=3, lr=lr)
    clients.data[1][0][0] = bad
    with pytest.raises(FloatingPointError, match=r"^round 3, client 6, phase 'tune': .*smaller lr"):
        clients.sgd(model_loss, start(model, 3), phase="tune")


@ENGINES
def test_parameters_that_are_not_finite_stop_too(engine):
    clients = sampled(
        make_model("mlp"), sizes=(1,), ids=[9], engine=engine
    )  # the root of 0 is finite, its slope is not
    with pytest.raises(FloatingPointError, match=r"^round 2, client 9, phase 'train'"):
        clients.sgd(lambda model, params, batch: params["w"].sqrt().sum(), numbers(0))


class Fragile(nn.Linear):
    def forward(self, x):
        if x.max() > 100:
            raise KeyError("a fault of the user's")
        return super().forward(x)


@EXACT
def test_an_error_in_a_users_forward_surfaces_as_itself(engine):
    model = from_modules(Fragile(6, 4), nn.Linear(4, CLASSES), (6,), CLASSES)
    params = start(model)
    want = sampled(model).sgd(model_loss, params)

    def behind(c):  # features are computed when they are needed
        c.through(params[0]).sgd(head_loss, params[1])

    for use in (lambda c: c.sgd(model_loss, params), behind):
        clients = sampled(model, engine=engine)
        clients.data[2][0][3] = 1000
        with pytest.raises(KeyError, match="a fault of the user's") as caught:
            use(clients)
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert (last.name, last.filename) == ("forward", __file__)
        assert torch.get_num_threads() == 2
        assert trees.unequal(sampled(model, engine=engine).sgd(model_loss, params), want) == 0  # the next call works


@pytest.mark.parametrize(
    "bad",
    [
        *[{"lr": -0.1}, {"lr": math.nan}, {"lr": math.inf}, {"lr": "0.1"}, {"lr": True}],
        *[{"batch_size": 0}, {"batch_size": 2.0}, {"epochs": -1}, {"epochs": 1.5}, {"epochs": [1, -1]}],
        *[{"momentum": -0.1}, {"momentum": 1.1}, {"weight_decay": -1e-9}, {"weight_decay": math.nan}],
        *[{"clip": 0}, {"clip": -1}, {"clip": math.inf}, {"drop_last": "false"}, {"drop_last": 0}],
    ],
    ids=str,
)
def test_impossible_values_are_refused_by_name(bad):
    (name, value), model = *bad.items(), make_model("mlp")
    for refuses in (lambda: Training(**bad), lambda: sampled(model).sgd(model_loss, start(model), **bad)):
        with pytest.raises(ValueError, match=f"^{name}={re.escape(repr(value))}: must be "):
            refuses()


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="learning_rate"):
        sampled(make_model("mlp")).sgd(model_loss, start(make_model("mlp")), learning_rate=0.1)


# Engines


def test_auto_picks_threads_for_convolutions_on_a_cpu():
    names = {name: Engine("auto", make_model(name)).name for name in SHAPES}
    assert names == {"mlp": "loop", "cnn-small": "threads", "norm": "threads", "dropout": "loop"}
    assert Engine("auto", make_model("cnn-small"), "cuda").name == "loop"
    assert Engine("threads", make_model("mlp")).name == "threads" and Engine("loop", make_model("norm")).name == "loop"
    assert Engine("threads", make_model("dropout")).name == "loop"  # drawn from one generator
    with pytest.raises(ValueError, match="engine='gpu': must be one of 'auto', 'loop', 'threads'"):
        Engine("gpu")


@ENGINES
def test_engines_run_everyone_on_one_intra_op_thread(engine):
    done = []
    Engine(engine).each(lambda i: done.append((i, torch.get_num_threads())), [3, 9, 1, 9])
    assert sorted(done) == [(i, 1) for i in range(4)]
    if engine == "loop":
        assert [i for i, _ in done] == [1, 3, 0, 2]  # the largest first


def test_threads_run_clients_at_the_same_time():
    both = threading.Barrier(2)
    Engine("threads").each(lambda i: both.wait(timeout=30), [1, 1])  # one after the other would never pass


def test_convolution_kernels_are_channels_last_even_for_one_channel():
    seen = []

    def watch(model, params, batch):
        seen.append({name: t.stride() for name, t in params[0].items() if t.ndim == 4})
        return model_loss(model, params, batch)

    model = make_model("cnn-small")
    sampled(model, sizes=(4,), ids=[0]).sgd(watch, start(model, 1))
    assert seen == [{"conv1.weight": (9, 1, 3, 1), "conv2.weight": (144, 1, 48, 16)}]  # [16, 1, 3, 3], [32, 16, 3, 3]


# FLOPs: a linear layer takes 2 in out forward, as much for its weights' gradient, and for its inputs' where needed

FC1, FC2 = 2 * 6 * 64, 2 * 64 * CLASSES


@ENGINES
@pytest.mark.parametrize(
    ("drop_last", "counted"), [(False, [1, 7, 10, 11, 61]), (True, [0, 0, 10, 10, 60])], ids=["all", "full batches"]
)
def test_flops_of_an_mlp(engine, drop_last, counted):
    model, counted = make_model("mlp"), np.array(counted)
    extractor, head = params = start(model)
    whole = sampled(model, engine=engine, epochs=3, drop_last=drop_last)
    whole.sgd(model_loss, params)
    assert whole.flops().tolist() == (3 * counted * (2 * FC1 + 3 * FC2)).tolist()
    assert whole.flops().tolist() == whole.flops().tolist()

    parts = sampled(model, engine=engine, drop_last=drop_last)
    behind = parts.through(extractor)
    behind.sgd(head_loss, head, epochs=2)
    want = np.array(SIZES) * FC1 + 2 * counted * 2 * FC2
    assert behind.flops().tolist() == parts.flops().tolist() == want.tolist()
    parts.sgd(extractor_loss, extractor, head)  # no gradient of the head's weights
    assert parts.flops().tolist() == (want + counted * (2 * FC1 + 2 * FC2)).tolist()


def test_flops_leave_values_and_random_states_alone():
    model = make_model("dropout")
    clients, params = sampled(model), start(model)
    trained = clients.sgd(model_loss, params)
    before, given, got = torch.get_rng_state(), trees.clone(params), trees.clone(trained)
    assert clients.flops().all()
    assert torch.equal(torch.get_rng_state(), before) and trees.unequal((params, trained), (given, got)) == 0


# Evaluation and memory


def test_evaluate_by_hand():
    model = from_modules(nn.Identity(), nn.Linear(2, 2), (2,), 2)
    head = {"weight": torch.eye(2).expand(2, 2, 2), "bias": torch.zeros(2, 2)}  # logits are the inputs
    right = torch.tensor([[math.log(3), 0.0]])  # probabilities 3/4 and 1/4
    data = [
        (right.repeat(250, 1), torch.zeros(250, dtype=torch.int64)),
        (right.repeat(4, 1), torch.tensor([0, 1, 1, 1])),
    ]
    for engine in ("loop", "threads"):
        correct, loss = evaluate(model, ({}, head), data, Engine(engine))
        assert correct.tolist() == [250, 1]
        assert loss == pytest.approx([math.log(4 / 3), (math.log(4 / 3) + 3 * math.log(4)) / 4], rel=1e-6)


@ENGINES
@pytest.mark.parametrize("name", ["cnn-small", "norm"])
def test_memory_does_not_grow_from_run_to_run(name, engine):
    def run():
        model = make_model(name)
        clients = sampled(model, engine=engine)
        params = start(model)
        for _ in range(2):
            params = clients.sgd(model_loss, params)
        clients.through(params[0]).sgd(head_loss, params[1])
        evaluate(model, params, clients.data, clients.engine)
        clients.flops()

    def alive():
        both = threading.Barrier(2)
        Engine("threads").each(lambda i: both.wait(timeout=30), [1, 1])  # now no thread holds its last client
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    run()
    first = alive()
    for _ in range(4):
        run()
    assert alive() == first


# Epochs of each client


@ENGINES
@pytest.mark.parametrize("rule", [{}, {"momentum": 0.9, "weight_decay": 0.1}], ids=["plain", "momentum"])
def test_each_client_has_its_own_number_of_epochs(engine, rule):
    """As if all had it; with none, nothing about a client changes, and it has no loss."""
    model, each = make_model("mlp"), [2, 0, 1, 3, 0]
    params = start(model, dtype=torch.float32)
    clients = sampled(model, engine=engine, dtype=torch.float32, lr=0.1, epochs=7, **rule)
    got = clients.sgd(model_loss, params, epochs=each)
    for i, number in enumerate(each):
        alike = sampled(model, engine=engine, dtype=torch.float32, lr=0.1, epochs=number, **rule)
        want = alike.sgd(model_loss, params)
        assert trees.unequal(trees.row(got, i), trees.row(want, i)) == 0
        assert (trees.unequal(trees.row(got, i), trees.row(params, i)) == 0) == (number == 0)
        if number:
            assert clients.log["train"][i] == alike.log["train"][i]
    assert np.isnan(clients.log["train"]).tolist() == [False, True, False, False, True]
    assert clients.flops().tolist() == (np.array(SIZES) * each * (2 * FC1 + 3 * FC2)).tolist()


@ENGINES
def test_nobody_has_an_epoch(engine):
    model = make_model("mlp")
    clients, params = sampled(model, engine=engine), start(model)
    for none in (0, [0] * 5):
        got = clients.sgd(model_loss, params, epochs=none)
        assert trees.unequal(got, params) == 0 and got[1]["bias"].data_ptr() != params[1]["bias"].data_ptr()
    assert clients.log == {} and not clients.flops().any()


def test_one_number_goes_before_the_experiments_and_none_is_the_experiments():
    model = make_model("mlp")
    params = start(model)
    two = sampled(model, epochs=2).sgd(model_loss, params)
    for epochs in (2, [2] * 5):
        assert trees.unequal(sampled(model, epochs=5).sgd(model_loss, params, epochs=epochs), two) == 0
    assert trees.unequal(sampled(model, epochs=2).sgd(model_loss, params, epochs=None), two) == 0


@pytest.mark.parametrize(
    ("epochs", "message"),
    [
        ([1, 2], r"epochs=\[1, 2\]: must be one number, or a list of one for each of 5 clients"),
        ([], r"epochs=\[\]: must be one number, or a list"),
        ([1] * 6, r"for each of 5 clients"),
        ([1, 1, -1, 1, 1], r"epochs=-1: must be a whole number, at least 0"),
        ([1, 1, 1.5, 1, 1], r"epochs=1\.5: must be a whole number"),
        ([True] * 5, r"epochs=True: must be a whole number"),
        ([1, 1, 1.0, 1, 1], r"epochs=1\.0: must be a whole number"),
        (["2"] * 5, r"epochs='2': must be a whole number"),
        ((1, 1, 1, 1, 1), r"epochs=\(1, 1, 1, 1, 1\): must be"),
    ],
    ids=str,
)
def test_impossible_numbers_of_epochs_are_refused(epochs, message):
    model = make_model("mlp")
    with pytest.raises(ValueError, match=message):
        sampled(model).sgd(model_loss, start(model), epochs=epochs)


# Until


@ENGINES
def test_until_ends_a_clients_training_by_hand(engine):
    """With eta = 1/2 and one step an epoch, w - 4 halves and the loss, seen before each step, quarters."""
    seen = {}

    def low(losses):
        seen.setdefault(losses[0], []).append(list(losses))
        return losses[-1] < 0.1

    clients = sampled(make_model("mlp"), sizes=(1,) * 3, lr=0.5, epochs=6, engine=engine)
    params = {"w": torch.tensor([0.0, 4.0, -1020.0], dtype=torch.float64)}
    got = clients.sgd(quadratic, params, until=low)["w"].tolist()
    # 8, 2, 1/2, 1/8, 1/32: five steps; 0: one step; 2^19, 2^17, ... after six steps still high
    assert got == [4 - 4 / 2**5, 4, 4 - 1024 / 2**6]
    first = [8, 2, 0.5, 0.125, 0.03125]
    assert seen[8] == [first[:k] for k in range(1, 6)] and seen[0] == [[0]]
    assert seen[2.0**19][-1] == [2.0 ** (19 - 2 * k) for k in range(6)]
    assert clients.log["train"] == pytest.approx([np.mean(first), 0, np.mean(seen[2.0**19][-1])], rel=1e-12)
    assert clients.sgd(quadratic, params, until=lambda losses: True)["w"].tolist() == [2, 4, -508]


@ENGINES
@pytest.mark.usefixtures("one_thread")
def test_until_is_the_loop_that_one_would_write(engine):
    """Epochs of torch.optim.SGD until their mean loss, over samples, has fallen by a third, or there were 9."""

    def fallen(losses):
        return losses[-1] < losses[0] * 2 / 3

    model, stops = make_model("mlp"), []
    clients = sampled(model, lr=0.1, engine=engine)
    params = start(model)
    got = clients.sgd(model_loss, params, epochs=9, until=fallen)
    for i, n in enumerate(SIZES):
        network = plain_network("mlp").double()
        load(network, trees.row(params, i))
        every, means = list(batches_of(5, 2, i, "train", 9, n, 10, False)), []
        of_epoch = len(every) // 9
        while len(means) < 9 and not (means and fallen(means)):
            batches = every[len(means) * of_epoch :][:of_epoch]
            means.append(by_hand(network, *clients.data[i], batches, lr=0.1)[0])
        want = tuple(p.detach() for p in network.parameters())
        assert trees.unequal(tuple(trees.leaves(trees.row(got, i))), want) < 1e-12
        assert clients.log["train"][i] == pytest.approx(np.mean(means), abs=1e-12)
        stops.append(len(means))
    assert len(set(stops)) > 1 and max(stops) == 9  # some stop, at different times, and some go on to the end
    assert clients.flops().tolist() == (np.array(SIZES) * stops * (2 * FC1 + 3 * FC2)).tolist()


def test_until_does_not_depend_on_the_others():
    model = make_model("mlp")
    rule = {"until": lambda losses: losses[-1] < 0.9 * losses[0], "epochs": [9, 9, 0, 9, 9]}
    params = start(model)
    among = sampled(model, lr=0.1).sgd(model_loss, params, **rule)
    alone = sampled(model, SIZES[3:4], ids=[3], lr=0.1).sgd(
        model_loss, trees.take(params, [3]), **rule | {"epochs": [9]}
    )
    assert trees.unequal(trees.take(among, [3]), alone) == 0
    assert trees.unequal(trees.row(among, 2), trees.row(params, 2)) == 0


@ENGINES
def test_until_is_not_asked_about_epochs_without_a_step(engine):
    def never(losses):
        raise AssertionError("asked")

    model = make_model("mlp")
    clients = sampled(model, sizes=(1, 7), drop_last=True, engine=engine)
    clients.sgd(model_loss, start(model, 2), until=never, epochs=3)


# Numbers that stand still


def pulled(model, params, batch, anchor, mu, power):
    return quadratic(model, params, batch) + mu / 2 * (params["w"] - anchor["w"]) ** power


@ENGINES
def test_numbers_stand_still_for_all_clients(engine):
    """The gradient is w - 4 + mu (w - anchor): from 0, mu = 3, anchor = i, eta = 1/4: 1 + 3/4 i, the fixed point."""
    clients = sampled(make_model("mlp"), engine=engine, lr=0.25, batch_size=100)
    anchors = {"w": torch.arange(5, dtype=torch.float64)}
    for mu in (3, 3.0, np.float64(3)):
        got = clients.sgd(pulled, numbers(0, 5), anchors, mu, 2)["w"]
        assert got.tolist() == [1 + 0.75 * i for i in range(5)]
    assert clients.sgd(pulled, numbers(0, 5), anchors, False, 2)["w"].tolist() == [1] * 5
    as_trees = {"mu": torch.full((5,), 3.0, dtype=torch.float64)}

    def with_tree(model, params, batch, anchor, mu):
        return pulled(model, params, batch, anchor, mu["mu"], 2)

    assert trees.unequal(clients.sgd(with_tree, numbers(0, 5), anchors, as_trees), {"w": got}) == 0
    assert clients.flops().tolist() == [0] * 5  # counted, with numbers too: no matrix product here


@pytest.mark.parametrize("number", [np.float32(3), np.int64(3)], ids=["float32", "int64"])
@ENGINES
def test_numpys_numbers_are_numbers(number, engine):
    clients = sampled(make_model("mlp"), sizes=(1,), lr=0.25, engine=engine)
    assert clients.sgd(pulled, numbers(0), numbers(0), number, 2)["w"].tolist() == [1]


# The mean of each class


def representations(model, extractor, x):
    return model.extract(extractor, x)


def logits(model, params, x):
    return model.predict(params, x)


def test_class_counts():
    x = torch.zeros(4, 6)
    data = [(x, torch.tensor([2, 0, 2, 2])), (x[:1], torch.tensor([1]))]
    counts = sampled(make_model("mlp"), data=data, sizes=(4, 1)).class_counts
    assert counts.tolist() == [[1, 0, 3], [0, 1, 0]] and counts.dtype == torch.int64


def test_class_mean_by_hand():
    model = from_modules(nn.Identity(), nn.Linear(2, CLASSES), (2,), CLASSES)
    x = torch.tensor([[1.0, 10], [2, 20], [6, 60], [3, 30]])
    data = [(x, torch.tensor([0, 0, 2, 0])), (x[:1], torch.tensor([1])), (x, torch.tensor([2, 2, 2, 2]))]
    means = sampled(model, data=data, sizes=(4, 1, 4)).class_mean(representations, {})
    assert means.present.tolist() == [[True, False, True], [False, True, False], [False, False, True]]
    assert means.values.tolist() == [
        *[[[2, 20], [0, 0], [6, 60]], [[0, 0], [1, 10], [0, 0]], [[0, 0], [0, 0], [3, 30]]]
    ]


@pytest.mark.usefixtures("one_thread")
@EXACT
@pytest.mark.parametrize("name", ["mlp", "norm", "dropout"])
def test_class_mean_is_over_samples_and_in_evaluation_mode(name, engine):
    """Against torch's own modules after eval(), sample by sample: batches of 10 and pieces of 100 leave no trace."""
    model, sizes = make_model(name), (1, 7, 61, 230)
    clients, params = sampled(model, sizes, engine=engine), start(model, 4)
    if name == "norm":
        params[0]["1.running_mean"] += 0.3
    before, state = trees.clone(params), torch.get_rng_state()
    means = clients.class_mean(logits, params)
    assert torch.equal(torch.get_rng_state(), state) and trees.unequal(params, before) == 0
    assert means.values.shape == (4, CLASSES, CLASSES) and means.present.shape == (4, CLASSES)
    absent = 0
    for i, (x, y) in enumerate(clients.data):
        network = nn.Sequential(*{"norm": norm, "dropout": dropout}[name]()) if name != "mlp" else plain_network(name)
        network = network.double().eval()
        load(network, trees.row(params, i))
        for k in range(CLASSES):
            own = [network(x[j : j + 1])[0].detach() for j in range(len(y)) if y[j] == k]
            assert bool(means.present[i, k]) == bool(own)
            absent += not own
            if own:
                assert (means.values[i, k] - sum(own) / len(own)).abs().max() < 1e-12
    assert absent >= 2


@pytest.mark.parametrize("rows", [1, 7, 61, 1000])
def test_class_mean_does_not_depend_on_the_pieces(rows, monkeypatch):
    model, sizes = make_model("mlp"), (7, 61, 230)
    params = start(model, 3)
    want = sampled(model, sizes).class_mean(representations, params[0])
    monkeypatch.setattr(training, "ROWS", rows)
    got = sampled(model, sizes, batch_size=3).class_mean(representations, params[0])
    assert (got.values - want.values).abs().max() < 1e-12 and torch.equal(got.present, want.present)


def test_class_mean_of_equal_samples_is_that_sample_to_the_bit():
    model = from_modules(nn.Identity(), nn.Linear(1, CLASSES), (1,), CLASSES)
    for n in (3, 10, 1001):
        data = [(torch.full((n, 1), 0.1), torch.ones(n, dtype=torch.int64))]
        means = sampled(model, data=data, sizes=(n,)).class_mean(representations, {})
        assert means.values.dtype == torch.float32 and torch.equal(means.values[0, 1], torch.tensor([0.1]))


@ENGINES
def test_class_mean_of_a_client_is_its_own(engine):
    model, sizes = make_model("cnn-small"), (2, 230, 10)
    params = start(model, 3, torch.float32)
    among = sampled(model, sizes, engine=engine, dtype=torch.float32).class_mean(representations, params[0])
    alone = sampled(model, sizes[1:2], ids=[1], engine=engine, dtype=torch.float32)
    assert trees.unequal(alone.class_mean(representations, trees.take(params[0], [1])), trees.take(among, [1])) == 0
    assert not among.values.requires_grad


def test_class_mean_counts_its_flops():
    model = make_model("mlp")
    clients, (extractor, head) = sampled(model), start(model)
    clients.class_mean(representations, extractor)
    assert clients.flops().tolist() == (np.array(SIZES) * FC1).tolist() and clients.log == {}
    clients.class_mean(logits, (extractor, head))
    assert clients.flops().tolist() == (np.array(SIZES) * (2 * FC1 + FC2)).tolist()
    clients.sgd(model_loss, (extractor, head))
    assert clients.flops().tolist() == (np.array(SIZES) * (4 * FC1 + 4 * FC2)).tolist()


# A part of the samples


def counted(sizes, ids=None, **options):
    """Clients whose x are 0, 1, 2, ... and whose labels are x mod 3."""
    model = from_modules(nn.Identity(), nn.Linear(1, CLASSES), (1,), CLASSES)
    data = [(torch.arange(float(n))[:, None], torch.arange(n) % CLASSES) for n in sizes]
    return sampled(model, sizes, ids, data=data, **options)


def drawn(clients):
    return [tuple(x.flatten().int().tolist()) for x, _ in clients.data]


@pytest.mark.parametrize(
    ("share", "sizes"),
    [
        (0.8, [1, 6, 8, 9, 49]),  # .8, 5.6, 8, 8.8, 48.8
        (0.5, [1, 4, 5, 6, 30]),  # .5: one is kept; 3.5, 5.5 and 30.5: halves to even
        (0.1, [1, 1, 1, 1, 6]),
        (1e-9, [1, 1, 1, 1, 1]),
        (1, list(SIZES)),
        (1.0, list(SIZES)),
    ],
)
def test_a_part_has_the_rounded_share_and_at_least_one(share, sizes):
    clients = counted(SIZES)
    for round in (1, 2):
        some = counted(SIZES, round=round).part(share, "weights")
        assert some.n.tolist() == sizes == [len(y) for _, y in some.data]
        for (x, y), rows, n in zip(some.data, drawn(some), SIZES, strict=True):
            assert list(rows) == sorted(set(rows)) and set(rows) <= set(range(n))  # each at most once, in their order
            assert torch.equal(y, x[:, 0].long() % CLASSES)  # with its own label
    assert clients.n.tolist() == list(SIZES) and drawn(clients) == [tuple(range(n)) for n in SIZES]  # stand untouched
    assert clients.part(0.8, "weights").class_counts.sum(1).tolist() == [1, 6, 8, 9, 49]


def test_parts_differ_from_round_to_round_and_by_name_and_client():
    """61 samples, half of them: two draws are alike once in 10^17."""
    draws = {
        (round, name, i): draw
        for round in (1, 2, 3)
        for name in ("weights", "validation")
        for i, draw in enumerate(drawn(counted((61, 61, 61), round=round).part(0.5, name)))
    }
    assert len(set(draws.values())) == len(draws) == 18
    clients = counted((61,))
    assert drawn(clients.part(0.5, "weights")) == drawn(clients.part(0.5, "weights"))  # drawn once a round
    clients.seed += 1
    assert drawn(clients.part(0.5, "weights")) != drawn(counted((61,)).part(0.5, "weights"))


def test_every_sample_has_its_turn():
    seen = [set(drawn(counted((20,), round=t).part(0.5, "w"))[0]) for t in range(1, 40)]
    assert set.union(*seen) == set(range(20)) and not set.intersection(*seen)  # else by a chance of 20 / 2^39


def test_a_part_does_not_depend_on_who_else_joins():
    among = drawn(counted(SIZES).part(0.5, "weights"))
    for ids in ([4], [1, 3], [3, 1, 2]):
        sizes = [SIZES[i] for i in ids]
        assert drawn(counted(sizes, ids).part(0.5, "weights")) == [among[i] for i in ids]


def test_a_part_behind_an_extractor_is_the_same_part():
    model = make_model("mlp")
    clients, (extractor, head) = sampled(model), start(model)
    one = clients.part(0.8, "w").through(extractor)
    other = clients.through(extractor).part(0.8, "w")
    for (z, y), (a, b) in zip(one.data, other.data, strict=True):
        assert torch.allclose(z, a, rtol=0, atol=1e-12) and torch.equal(y, b)
    assert trees.unequal(one.sgd(head_loss, head), other.sgd(head_loss, head)) < 1e-12


@ENGINES
def test_training_on_a_part_is_training_of_clients_with_just_that(engine):
    """One log and one count of FLOPs for all that the clients did."""
    model = make_model("mlp")
    clients, params = sampled(model, lr=0.1, engine=engine), start(model)
    some = clients.part(0.5, "w")
    assert some.log is clients.log
    got = some.sgd(model_loss, params, phase="part")
    same = sampled(model, lr=0.1, sizes=some.n, data=some.data, engine=engine)
    assert trees.unequal(got, same.sgd(model_loss, params, phase="part")) == 0
    assert clients.log["part"].tolist() == same.log["part"].tolist()
    clients.sgd(model_loss, params)
    assert list(clients.log) == ["part", "train"]
    counted = some.n + np.array(SIZES)
    assert clients.flops().tolist() == some.flops().tolist() == (counted * (2 * FC1 + 3 * FC2)).tolist()


# What does not fit the clients is refused, and belongs by name


def swapped(tree):
    return {name: tree[name] for name in reversed(tree)}


@ENGINES
def test_an_anchor_belongs_by_name(engine):
    """Two layers of one shape: an anchor whose parts come in another order pulls each to its own."""
    torch.manual_seed(0)
    net = from_modules(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), nn.Linear(6, CLASSES), (6,), CLASSES)
    clients, params = sampled(net, engine=engine), start(net)
    anchor = trees.tree_map(lambda t: t + 1, params)
    right = clients.sgd(model_loss, params, pull=(anchor, 1.0))
    assert trees.unequal(clients.sgd(model_loss, params, pull=((swapped(anchor[0]), anchor[1]), 1.0)), right) == 0
    assert trees.unequal(clients.sgd(model_loss, params, pull=(params, 1.0)), right) > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c, m, p: c.sgd(model_loss, trees.take(p, [0, 1, 2])),
            r"^params, '0/.*', is \[3, .*, must be \[5, \.\.\.\]",
        ),
        (lambda c, m, p: c.sgd(model_loss, trees.take(p, [0] * 9)), r"^params, .*must be \[5, \.\.\.\]"),
        (lambda c, m, p: c.sgd(extractor_loss, p[0], m.init()[1]), r"^fixed, .*must be \[5, \.\.\.\]"),
        (lambda c, m, p: c.sgd(model_loss, p, torch.tensor(1.0)), r"^fixed, '', is \[\], must be \[5, \.\.\.\]"),
        (lambda c, m, p: c.sgd(model_loss, p, "text"), r"^fixed, '', is str, must be"),
        (lambda c, m, p: c.sgd(model_loss, p, pull=(m.init(), 1.0)), r"^pull, .*must be \[5, \.\.\.\]"),
        (lambda c, m, p: c.sgd(model_loss, p, pull=(p[::-1], 1.0)), r"different structure|^pull"),
        (lambda c, m, p: c.sgd(model_loss, p, pull=(p, "1")), r"^mu='1': must be a finite number"),
        (lambda c, m, p: c.sgd(model_loss, p, pull=(p, float("nan"))), r"^mu=nan"),
        (lambda c, m, p: c.sgd(model_loss, p, pull=(p, -1.0)), r"^mu=-1.0"),
        (lambda c, m, p: c.sgd(model_loss, p, until=3), r"^until=3: must be a function"),
        (lambda c, m, p: c.through(m.init()[0]), r"^params, .*must be \[5, \.\.\.\]"),
    ],
)
def test_trees_that_do_not_fit_the_clients_are_refused_by_name(call, message):
    model = make_model("mlp")
    with pytest.raises(ValueError, match=message):
        call(sampled(model), model, start(model))


def test_means_of_whole_numbers_are_not_cut():
    """The mean of 1 and 2 is 1.5, though both are integers."""
    data = [(torch.tensor([[1.0], [2.0]], dtype=torch.float64), torch.tensor([0, 0]))]
    net = from_modules(nn.Identity(), nn.Linear(1, CLASSES), (1,), CLASSES)
    found = sampled(net, data=data, ids=[0], sizes=(2,)).class_mean(lambda m, p, x: x.long(), start(net, 1))
    assert found.values[0, 0].tolist() == [1.5]


def test_dropout_of_two_federations_in_two_threads():
    """Each draws its own masks from torch's one generator, as it does alone."""
    model, ends = make_model("dropout"), {}
    alone = [sampled(model, round=r, epochs=6, lr=0.1).sgd(model_loss, start(model)) for r in (1, 2)]

    def job(r):
        ends[r] = sampled(model, round=r, epochs=6, lr=0.1).sgd(model_loss, start(model))

    for _ in range(3):
        threads = [threading.Thread(target=job, args=(r,)) for r in (1, 2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert [trees.unequal(ends[r], alone[r - 1]) for r in (1, 2)] == [0, 0]


@ENGINES
def test_features_are_computed_once_and_only_if_they_are_needed(engine):
    """By the first phase that trains on them; a phase without epochs needs none, and costs nothing."""
    model = make_model("cnn-small")
    params = start(model)
    clients = sampled(model, engine=engine)
    behind = clients.through(params[0])
    assert behind.sgd(head_loss, params[1], epochs=0).keys() == params[1].keys()
    assert clients.flops().tolist() == [0] * 5
    first = behind.sgd(head_loss, params[1], phase="a")
    once = clients.flops()
    second = behind.sgd(head_loss, first, phase="b")
    heads = once - (clients.flops() - once)  # what the first phase cost beyond the second: the extraction
    assert (heads > 0).all() and np.allclose(heads / np.array(SIZES), heads[0] / SIZES[0])
    assert trees.unequal(second, first) > 0


@ENGINES
def test_a_client_that_does_not_train_on_features_is_not_charged_for_them(engine):
    model = make_model("cnn-small")
    params, clients = start(model), sampled(model, engine=engine)
    clients.through(params[0]).sgd(head_loss, params[1], epochs=[0, 0, 1, 1, 0])
    assert (clients.flops() > 0).tolist() == [False, False, True, True, False]
