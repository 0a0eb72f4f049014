"""Local training against torch.optim.SGD by hand, closed forms, and the promise that a client's result is its own."""

import gc
import itertools
import math
import re
import threading
import traceback
import warnings
import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pflkit import training, trees
from pflkit.descent import Descent, slope
from pflkit.methods.fedavg import model_loss
from pflkit.methods.fedrep import extractor_loss, head_loss
from pflkit.models import as_trained, build, from_modules
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
def test_a_parameter_among_the_extras_is_recorded_as_it_was(engine):
    def falling(model, params, batch):
        return params["a"], {"a": params["a"].detach(), "twice": 2 * params["a"]}

    clients = sampled(make_model("mlp"), sizes=(40, 40, 40), engine=engine, lr=0.1, batch_size=10)
    clients.sgd(falling, {"a": torch.zeros(3, dtype=torch.float64)})
    for name, mean in (("train", -0.15), ("train.a", -0.15), ("train.twice", -0.3)):  # of 0, -0.1, -0.2 and -0.3
        assert clients.log[name] == pytest.approx([mean] * 3)


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


def test_how_models_are_laid_out_does_not_matter_where_they_are_read():
    model = make_model("mlp")
    clients, params = sampled(model, dtype=torch.float32), start(model, dtype=torch.float32)
    last = trees.tree_map(lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0), params)  # clients along the last axis
    scores = [evaluate(model, tree, clients.data, clients.engine)[1] for tree in (params, last)]
    features = [clients.through(tree[0]).data for tree in (params, last)]
    assert np.array_equal(*scores)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(*features, strict=True))


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


@pytest.mark.parametrize("engine", ["loop", "threads"])
def test_dropout_in_the_gradient_of_all_data_is_each_clients_own(engine):
    """The same masks each time, whoever else is there, whatever was drawn before; nothing is drawn from outside."""
    net = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5))
    model = from_modules(net, nn.Linear(64, CLASSES), (6,), CLASSES)
    before = torch.get_rng_state()

    def gradient(ids):
        clients = sampled(model, sizes=[20] * len(ids), ids=ids, engine=engine)
        return clients.gradient(model_loss, trees.take(start(model), [0] * len(ids)))[0]

    both = gradient([3, 4])
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert trees.unequal(gradient([4]), trees.take(both, [1])) == 0
    frozen = from_modules(net[0], model.head.module, (6,), CLASSES)  # without dropout
    plain = sampled(frozen, sizes=[20, 20], ids=[3, 4], engine=engine)
    assert trees.unequal(plain.gradient(model_loss, trees.take(start(frozen), [0, 0]))[0][1], both[1]) > 1e-3


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


@ENGINES
@pytest.mark.parametrize(("given", "what"), [(torch.ones(10), "[10]"), (torch.ones(1), "[1]"), (1.0, "float")], ids=str)
def test_a_loss_that_is_no_scalar_is_refused(given, what, engine):
    def unsummed(model, params, batch):
        return given * model_loss(model, params, batch) if torch.is_tensor(given) else given

    model = make_model("mlp")
    with pytest.raises(ValueError, match=f"^unsummed: a loss must be a scalar tensor, not {re.escape(what)}$"):
        sampled(model, engine=engine).sgd(unsummed, start(model))


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


# Parts that are not trained


def remembered(model, params, batch):
    """A loss that writes the sum of all w so far to a part that is not trained, and learns of a third part."""
    w, third, memory = (part["w"] for part in params)
    memory.copy_((memory + w).detach())
    return (w - 4) ** 2 / 2 + (w - third) ** 2 / 2 + 0 * memory.clone()


@ENGINES
@pytest.mark.parametrize("rule", [{}, {"weight_decay": 0.5, "clip": 1e9}], ids=["plain", "decay"])
def test_unmoved_parts_stand_still_but_for_what_the_loss_writes(engine, rule):
    """From w = 0: w <- w − ¼ (w − 4 + w + decay w), third 0; the memory is the sum of the w before each step."""
    sizes, decay = (1, 7, 10), rule.get("weight_decay", 0)
    clients = sampled(make_model("mlp"), sizes, engine=engine, lr=0.25, batch_size=4, epochs=2, **rule)
    start = numbers(0, 3), numbers(0, 3), numbers(100, 3)
    w, third, memory = (part["w"].tolist() for part in clients.sgd(remembered, start, unmoved=(1, 2)))
    for i, steps in enumerate((2, 4, 6)):
        own, total = 0.0, 100.0
        for _ in range(steps):
            own, total = own - (2 * own - 4 + decay * own) / 4, total + own
        assert (w[i], memory[i]) == pytest.approx((own, total), abs=1e-12)
    assert third == [0] * 3
    assert [part["w"].tolist() for part in start] == [[0] * 3, [0] * 3, [100] * 3]
    third = clients.sgd(remembered, start, unmoved=(2,))[1]["w"]
    assert (third > 0.1).all()


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


def test_what_a_function_writes_to_its_model_is_nobody_elses():
    model = make_model("mlp")
    params = trees.expand(trees.row(start(model), 0), 5)  # stored once, as a message is
    before, clients = trees.clone(params), sampled(model)

    def doubled(model, own, x):
        for leaf in trees.leaves(own):
            leaf.mul_(2)
        return model.predict(own, x)

    clients.class_mean(doubled, params)
    clients.flops()
    assert trees.unequal(params, before) == 0


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


@ENGINES
def test_class_mean_behind_an_extractor(engine, monkeypatch):
    """That of features, which are computed once, and by the engine: in its threads, not one by one to count classes."""
    model, inside, each = make_model("cnn-small"), [], Engine.each
    params, extract = start(model), type(model).extract

    def watched(self, f, sizes):
        inside.append(True)
        try:
            return each(self, f, sizes)
        finally:
            inside.pop()

    def inner(model, r, x):
        assert inside
        seen.append(len(x))
        return extract(model, r, x)

    monkeypatch.setattr(Engine, "each", watched)
    monkeypatch.setattr(type(model), "extract", inner)
    clients, seen = sampled(model, engine=engine), []
    behind = clients.through(params[0])
    means = behind.class_mean(lambda model, nothing, z: z, ())
    behind.sgd(head_loss, params[1])
    assert sum(seen) == sum(SIZES)
    assert trees.unequal(means, clients.class_mean(representations, params[0])) == 0


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
        (lambda c, m, p: c.sgd(model_loss, p, unmoved=(2,)), r"^unmoved=\(2,\): must be a tuple of positions"),
        (lambda c, m, p: c.sgd(model_loss, p, unmoved=1), r"^unmoved=1: must be a tuple of positions"),
        (lambda c, m, p: c.sgd(model_loss, p[0], unmoved=(0,)), r"^unmoved=\(0,\): must be a tuple of positions"),
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


# Steps of another kind than SGD


STACKED = pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])


def descend(model, params, batches, lr):
    """A step of SGD on the first draw; records the loss, but of models that another pass would change."""
    gradient, after = slope(model, model_loss, params, batches[0])
    twice = model.batch_norm or model.dropout
    return trees.add(after, gradient, -lr), 0.0 if twice else model_loss(model, params, batches[0])


SHORT = {"batch_size": 4, "epochs": [2, 0, 1, 3, 1]}


@pytest.mark.parametrize(("draws", "rule"), [(1, {}), (2, {"drop_last": True}), (3, SHORT)], ids=str)
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name in SHAPES for engine in ("loop", "threads")] + [("mlp", "stacked"), ("norm", "stacked")],
)
def test_steps_of_plain_descent_are_sgd(name, draws, rule, engine):
    """To the bit, however many draws: the first has the stream of `sgd` in that phase. Stacked, but for rounding."""
    model = make_model(name)
    params = start(model)
    one, other = (sampled(model, engine=engine, lr=0.1) for _ in range(2))
    want = one.sgd(model_loss, params, phase="head", **rule)
    given = trees.clone(params)
    got = other.steps(descend, params, 0.1, draws=draws, phase="head", **rule)
    most = 1e-12 if engine == "stacked" else 0
    assert trees.unequal(got, want) <= most < trees.unequal(got, params) and trees.unequal(params, given) == 0
    assert got[0].keys() == want[0].keys() and type(got[0]) is dict
    assert one.log.keys() == other.log.keys() and ("skipped" in one.log) == (name == "norm" and "drop_last" not in rule)
    for key in one.log.keys() - ({"head"} if name in ("norm", "dropout") else set()):  # whose loss is another pass
        np.testing.assert_allclose(other.log[key], one.log[key], rtol=0, atol=most, equal_nan=True)
    assert other.flops().astype(bool).tolist() == one.flops().astype(bool).tolist()
    elsewhere = sampled(model, engine=engine, lr=0.1).steps(descend, params, 0.1, draws=draws, phase="train", **rule)
    assert trees.unequal(elsewhere, got) > most


def test_draws_are_independent_and_the_documented_streams():
    """numpy's SeedSequence over seed, 5 names as for sgd, and from the second draw on its number as a sixth."""
    seen = []

    def watch(model, state, batches):
        assert {len(batch) for batch in batches} == {2} and all(torch.equal(x[:, 0].long() % 3, y) for x, y in batches)
        seen.append([x.flatten().int().tolist() for x, _ in batches])
        return state, batches[0][0].mean()

    counted((25,), [4], round=3).steps(watch, numbers(0), draws=3, epochs=2, phase="meta", batch_size=10)
    assert [[len(rows) for rows in drawn] for drawn in seen] == [[10] * 3, [10] * 3, [5] * 3] * 2
    orders = {(e, k): [row for drawn in seen[3 * e : 3 * e + 3] for row in drawn[k]] for e in (0, 1) for k in (0, 1, 2)}
    assert len(set(map(tuple, orders.values()))) == 6  # 25! orders
    for (epoch, k), order in orders.items():
        names = [zlib.crc32(b"batches"), 3, 4, zlib.crc32(b"meta"), epoch, *([k] if k else [])]
        draw = np.random.Generator(np.random.PCG64(np.random.SeedSequence([5, len(names), *names])))
        assert order == draw.permutation(25).tolist()
    first = [list(b) for b in batches_of(5, 3, 4, "meta", 2, 25, 10, False)]
    assert [drawn[0] for drawn in seen] == first


@STACKED
def test_a_step_may_count_with_integers_only(engine):
    """The number of batches by hand, without and with short ones; the log has means over samples."""

    def count(model, state, batches, by):
        extras = {"size": len(batches[0][1]), "none": torch.zeros(())}
        return {"n": state["n"] + by, "yes": ~state["yes"]}, (0.5, extras)

    for rule, n in (({}, [1, 1, 1, 2, 7]), ({"drop_last": True}, [0, 0, 1, 1, 6]), ({"epochs": [2, 0, 1, 3, 1]}, 0)):
        clients = sampled(make_model("mlp"), engine=engine)
        state = {"n": torch.arange(5), "yes": torch.ones(5, dtype=torch.bool)}
        got = clients.steps(count, state, 10, phase="c", **rule)
        n = np.array(n or [2, 0, 1, 6, 7])
        assert got["n"].dtype == torch.int64 and got["n"].tolist() == (np.arange(5) + 10 * n).tolist()
        assert got["yes"].tolist() == (n % 2 == 0).tolist() and state["n"].tolist() == [0, 1, 2, 3, 4]
        assert clients.log["c"].tolist() == [pytest.approx(0.5) if k else pytest.approx(np.nan, nan_ok=True) for k in n]
        sizes = {1: 1, 7: 7, 10: 10, 11: (100 + 1) / 11, 61: (600 + 1) / 61}
        if not rule:
            assert clients.log["c.size"].tolist() == pytest.approx(list(sizes.values()), abs=1e-12)
        assert sorted(clients.log) == ["c", "c.none", "c.size"]


@STACKED
def test_a_step_may_return_what_it_was_given(engine):
    """Whatever the order of the leaves: Fibonacci's numbers, and two that change places."""

    def fibonacci(model, state, batches, fixed):
        a, b, c, d, _ = state
        return (b, a + b, d, c, fixed), batches[0][0].mean()

    def ends(steps):
        a, b = 0, 1
        for _ in range(steps):
            a, b = b, a + b
        return a, b, *((4, 3) if steps % 2 else (3, 4)), 7

    clients = sampled(make_model("mlp"), engine=engine)
    state = trees.expand(tuple(torch.tensor(v, dtype=torch.float64) for v in (0, 1, 3, 4, 0)), 5)
    sevens = trees.expand(torch.tensor(7, dtype=torch.float64), 5)
    got = clients.steps(fibonacci, state, sevens, epochs=[1, 2, 3, 2, 1])
    assert list(zip(*(t.tolist() for t in got), strict=True)) == [ends(k) for k in (1, 2, 3, 4, 7)]
    assert [t[0].item() for t in state] == [0, 1, 3, 4, 0] and sevens.tolist() == [7] * 5
    for t in got:  # memory of its own
        t += 1
    assert got[4].tolist() == [8] * 5 and sevens.tolist() == [7] * 5
    assert torch.equal(got[0], torch.tensor([ends(k)[0] + 1.0 for k in (1, 2, 3, 4, 7)], dtype=torch.float64))


@STACKED
def test_nobody_takes_a_step(engine):
    model = make_model("mlp")
    params = trees.expand(trees.row(start(model), 0), 2)
    for rule in ({"epochs": 0}, {"epochs": [0, 0]}, {"drop_last": True}):
        clients = sampled(model, sizes=(1, 7), engine=engine)
        got = clients.steps(descend, params, 0.1, **rule)
        assert trees.unequal(got, params) == 0 and clients.log == {} and clients.flops().tolist() == [0, 0]
        got[1]["bias"][0] += 1
        assert trees.unequal(trees.row(got, 1), trees.row(params, 1)) == 0
    assert sampled(model, engine=engine).steps(lambda model, state, batches: (state, 0.0), {}) == {}


# Several draws, fixed trees and numbers, integers, and a step that goes back to an earlier state


def involved(model, state, batches, held, mu, often):
    """Two models and a counter: a few steps of the one on each draw, pulled to `held`; the other lags behind."""
    own, past, count = state["own"], state["past"], state["count"]
    for _ in range(often):
        for x, y in batches:
            gradient, own = slope(model, model_loss, own, (x + 0.01 * mu, y))
            pull = trees.tree_map(torch.sub, trees.add(own, held, -1.0), trees.full_like(own, 0))
            own = trees.add(trees.add(own, gradient, -0.05), pull, -0.05 * mu)
    past = trees.add(trees.lerp(past, state["own"], trees.full_like(past, 0.5)), held, 0.01)
    mean = batches[-1][0].mean()
    return {"past": past, "own": own, "count": count + len(batches)}, (mean, {"y": batches[0][1].double().mean()})


@pytest.mark.parametrize(
    ("name", "draws", "often", "rule"),
    [
        *[("mlp", 1, 1, {}), ("mlp", 1, 2, {"drop_last": True}), ("mlp", 2, 1, {"batch_size": 1})],
        *[("mlp", 3, 1, {"batch_size": 7}), ("mlp", 2, 2, {"epochs": [2, 1, 0, 3, 1, 2, 1]})],
        *[("norm", 2, 1, {"epochs": [2, 1, 0, 3, 1, 2, 1]}), ("norm", 1, 2, {}), ("norm", 2, 1, {"batch_size": 1})],
    ],
    ids=str,
)
def test_stacked_steps_are_those_of_each_client(name, draws, often, rule):
    """Short batches, unequal numbers of steps and epochs, single samples: to 1e-12, and nothing falls back."""
    model, sizes = make_model(name), (1, 7, 10, 11, 1, 20, 3)
    moves = name == "mlp" or rule.get("batch_size") != 1  # batch-norm takes no single samples
    whole = start(model, 7)
    state = {"own": whole, "past": trees.expand(trees.row(whole, 2), 7), "count": torch.zeros(7, dtype=torch.int64)}
    held, before = trees.expand(trees.row(whole, 4), 7), trees.clone(state)
    ends = []
    for engine in ("loop", "stacked"):
        clients = sampled(model, sizes, engine=engine)
        ends.append((clients.steps(involved, state, held, 0.3, often, draws=draws, **rule), clients))
    (got, stacked), (want, loop) = ends[1], ends[0]
    assert ((involved, model) in stacked.engine.known) == moves and not stacked.engine.refused and not loop.engine.known
    assert trees.unequal(got, want) < 1e-12 and trees.unequal(state, before) == 0
    assert (trees.unequal(got["own"], state["own"]) > 1e-3) == moves
    assert torch.equal(got["count"], want["count"]) and got["count"].dtype == torch.int64
    assert stacked.log.keys() == loop.log.keys() and stacked.flops().tolist() == loop.flops().tolist()
    for key, values in loop.log.items():
        np.testing.assert_allclose(stacked.log[key], values, rtol=0, atol=1e-12, equal_nan=True)


@EXACT
@pytest.mark.parametrize("name", ["mlp", "norm"])
def test_a_clients_steps_are_its_own(name, engine):
    """To the bit, whoever else trains, in any order, on one thread or two; a stack of convolutions, to rounding."""
    near = 1e-6 if (name, engine) == ("norm", "stacked") else 0
    model, sizes = make_model(name), (2, 7, 10, 12, 61)

    def run(rows, threads=2):
        torch.set_num_threads(threads)
        own = trees.take(start(model, dtype=torch.float32), rows)
        state = {"own": own, "past": own, "count": torch.tensor(rows)}
        clients = sampled(model, [sizes[i] for i in rows], ids=rows, engine=engine, dtype=torch.float32)
        got = clients.steps(involved, state, own, 0.5, 1, draws=2)
        torch.set_num_threads(2)
        return got, clients.log["train.y"]

    among, ys = run([0, 1, 2, 3, 4])
    assert trees.unequal(run([0, 1, 2, 3, 4], threads=1)[0], among) == 0
    for rows in ([0], [3], [4], [4, 1, 2]):
        got, y = run(rows)
        assert trees.unequal(got, trees.take(among, rows)) <= near
        np.testing.assert_allclose(y, ys[rows], rtol=0, atol=near)


def test_steps_behind_an_extractor_and_on_a_part():
    def tune(model, head, batches, lr):
        gradient, head = slope(model, head_loss, head, batches[0])
        return trees.add(head, gradient, -lr), 0.0

    model = make_model("mlp")
    extractor, head = start(model)
    for engine in ("loop", "threads", "stacked"):
        ends = []
        for use in (lambda c: c.steps(tune, head, 0.1), lambda c: c.sgd(head_loss, head)):
            clients = sampled(model, engine=engine, lr=0.1)
            one = clients.part(0.5, "w").through(extractor)
            ends.append((use(one), clients.flops().tolist()))
        assert trees.unequal(ends[0][0], ends[1][0]) <= (1e-12 if engine == "stacked" else 0)
        assert ends[0][1] == ends[1][1]


# FLOPs of steps: of all draws, and of as many gradients as a number says


def looked(model, params, batches, often):
    for _ in range(often):
        for batch in batches:
            gradient, params = slope(model, model_loss, params, batch)
    return trees.add(params, gradient, -0.1), 0.0


@STACKED
def test_flops_of_steps_are_those_of_what_they_do(engine):
    """One cache for all, as in one federation; a number may change from one call, or one method, to another."""
    model, once = make_model("mlp"), 2 * FC1 + 3 * FC2
    params, cache = start(model), {}
    for draws, often in ((1, 1), (2, 1), (1, 3), (2, 3), (1, 1)):
        clients = sampled(model, engine=engine)
        clients._flop_cache = cache
        clients.steps(looked, params, often, draws=draws, drop_last=True, epochs=2)
        assert clients.flops().tolist() == (2 * np.array([0, 0, 10, 10, 60]) * draws * often * once).tolist()


def test_flops_of_a_loss_differ_by_its_numbers_and_by_what_is_trained():
    def repeated(model, params, batch, often):
        return sum(model_loss(model, params, batch) for _ in range(often)), {}

    def mean_of(model, params, batch, often):
        return repeated(model, params, batch, often)[0]

    model, n, cache = make_model("mlp"), np.array(SIZES), {}
    params = start(model)
    for often in (1, 2):
        for use, each in (
            (lambda c, k: c.sgd(repeated, params, k), 2 * FC1 + 3 * FC2),
            (lambda c, k: c.mean(repeated, params, k), FC1 + FC2),
            (lambda c, k: c.gradient(mean_of, params, k), 2 * FC1 + 3 * FC2),
        ):
            clients = sampled(model)
            clients._flop_cache = cache
            use(clients, often)
            assert clients.flops().tolist() == (often * each * n).tolist()


# Two models side by side


def both(pair, params, batch):
    """Cross-entropies of a client's own model and of a shared one, which do not meet."""
    own, shared = params
    return F.cross_entropy(pair.own.predict(own, batch[0]), batch[1]) + F.cross_entropy(
        pair.shared.predict(shared, batch[0]), batch[1]
    )


@pytest.mark.parametrize("clip", [None, 0.3], ids=["free", "clipped"])
@pytest.mark.parametrize("engine", ["loop", "threads", "stacked"])
def test_two_models_that_do_not_meet_train_as_each_alone(engine, clip):
    """To the bit where each client has steps of its own; and the work counted is that of both."""
    own, sizes = build("mlp", (1, 5, 5), CLASSES), (2, 7, 10, 12)
    rule = {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1, "clip": clip}
    shared, data = make_model("norm"), [samples((1, 5, 5), n, i, torch.float64) for i, n in enumerate((2, 7, 10, 12))]
    alone = []
    for model in (own, shared):
        clients = sampled(model, sizes, engine=engine, data=data, **rule)
        alone.append((clients.sgd(model_loss, start(model, 4)), clients.flops()))
    clients = sampled(own, sizes, engine=engine, data=data, **rule)
    beside = clients.beside(shared)
    together = beside.sgd(both, (start(own, 4), start(shared, 4)))
    bound = 1e-12 if engine == "stacked" else 0
    assert trees.unequal(together[0], alone[0][0]) <= bound and trees.unequal(together[1], alone[1][0]) <= bound
    assert trees.unequal(together[1], start(shared, 4)) > 1e-3
    assert clients.flops().tolist() == (alone[0][1] + alone[1][1]).tolist()
    assert clients.model is own and beside.model.own is own and beside.model.shared is shared


def test_flops_beside_another_model_are_measured_anew():
    own, data, cache, found = make_model("mlp"), [samples((6,), 10, 0, torch.float64)], {}, []
    for name in ("mlp-1", "mlp-5"):
        clients, shared = sampled(own, (10,), data=data), build(name, (6,), CLASSES)
        clients._flop_cache = cache
        clients.beside(shared).sgd(both, (start(own, 1), start(shared, 1)))
        found.append(float(clients.flops()[0]))
    assert found[0] != found[1] and len(cache) == 2


def test_a_name_that_is_a_buffer_of_one_model_and_a_parameter_of_the_other_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.running_mean = nn.Parameter(torch.ones(25))

        def forward(self, x):
            return x * self.running_mean

    scaled = nn.Sequential(nn.Flatten(), Scaled()), nn.Linear(25, CLASSES)
    scaled = from_modules(*scaled, (1, 5, 5), CLASSES, name="scaled")
    with pytest.raises(ValueError, match=r"'scaled': '1\.running_mean' is a parameter here and a buffer of 'custom'"):
        sampled(scaled).beside(make_model("norm"))


# Faults in a step


def times(number):
    def step(model, state, batches):
        return {"w": state["w"] * number}, batches[0][0].sum()

    return step


@STACKED
def test_steps_that_diverge_name_the_client(engine):
    state = {"w": torch.ones(3, dtype=torch.float64), "n": torch.zeros(3, dtype=torch.int64)}
    clients = sampled(make_model("mlp"), sizes=(7, 7, 20), ids=[4, 6, 8], engine=engine, round=3)
    clients.data[1][0][0] = math.nan
    with pytest.raises(FloatingPointError, match=r"^round 3, client 6, phase 'w': training diverged"):
        clients.steps(times(1.0), {"w": state["w"]}, phase="w")  # the loss
    clients = sampled(make_model("mlp"), sizes=(1, 61, 1), ids=[4, 6, 8], engine=engine, round=3, batch_size=1)
    with pytest.raises(FloatingPointError, match=r"^round 3, client 6, phase 'train': training diverged"):
        clients.steps(times(1e6), {"w": state["w"]})  # the state: 10^366


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda s: ({"w": s["w"].sum()}, 0.0), r"'w' is \[\] of torch.float32, and was \[3\] of torch.float32"),
        (lambda s: ({"w": s["w"].double()}, 0.0), r"'w' is \[3\] of torch.float64, and was \[3\] of torch.float32"),
        (lambda s: ({"v": s["w"]}, 0.0), r"'v' is \[3\] of torch.float32, and was missing"),
        (lambda s: ({}, 0.0), r"'w' is missing, and was \[3\]"),
        (lambda s: ((s["w"],), 0.0), r"'0' is \[3\] of torch.float32, and was missing"),
        (lambda s: s, r"a step must return \(state, loss\)"),
        (lambda s: (s, 0.0, {}), r"a step must return \(state, loss\)"),
        (lambda s: None, r"a step must return \(state, loss\)"),
    ],
)
@STACKED
def test_a_step_that_returns_something_else_is_refused(engine, step, message):
    def faulty(model, state, batches):
        return step(state)

    clients = sampled(make_model("mlp"), engine=engine)
    with warnings.catch_warnings(), pytest.raises(ValueError, match=rf"^faulty: {message}"):
        warnings.simplefilter("ignore")  # that it cannot be stacked either
        clients.steps(faulty, {"w": torch.zeros(5, 3)})


@EXACT
def test_an_error_in_a_step_surfaces_as_itself(engine):
    def fragile(model, params, batches, bad):
        if bad["is"]:
            raise KeyError("a fault of the user's")
        return descend(model, params, batches, 0.1)

    model = make_model("mlp")
    params, fine = start(model), {"is": torch.zeros(5, dtype=torch.bool)}
    want = sampled(model).steps(descend, params, 0.1)
    clients = sampled(model, engine=engine)
    with pytest.raises(KeyError, match="a fault of the user's"):
        clients.steps(fragile, params, {"is": torch.arange(5) == 2})
    assert clients.log == {} and not clients.flops().any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be stacked
        assert trees.unequal(clients.steps(fragile, params, fine), want) == 0  # the next call works


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, p: c.steps(descend, p, 0.1, draws=0), ValueError, "draws=0: must be a whole number, at least 1"),
        (lambda c, p: c.steps(descend, p, 0.1, draws=1.5), ValueError, "draws=1.5: must be a whole number"),
        (lambda c, p: c.steps(descend, p, 0.1, draws=True), ValueError, "draws=True"),
        (lambda c, p: c.steps(p, descend, 0.1), ValueError, "step: must be a function, not a tuple"),
        (lambda c, p: c.steps(descend, trees.take(p, [0, 1]), 0.1), ValueError, r"params, '0/.*must be \[5, "),
        (lambda c, p: c.steps(descend, p, torch.tensor(0.1)), ValueError, r"fixed, '', is \[\], must be \[5, "),
        (lambda c, p: c.steps(descend, p, 0.1, epochs=[1]), ValueError, r"epochs=\[1\]: must be one number"),
        (lambda c, p: c.steps(descend, p, 0.1, batch_size=0), ValueError, "batch_size=0: must be"),
        (lambda c, p: c.steps(descend, p, 0.1, drop_last=1), ValueError, "drop_last=1: must be"),
        # a step has its own rates: these would change nothing, so they must not be taken for settings of it
        (lambda c, p: c.steps(descend, p, 0.1, lr=0.1), TypeError, "lr: steps has no such argument"),
        (lambda c, p: c.steps(descend, p, 0.1, momentum=0.9), TypeError, "momentum: steps has no such"),
        (lambda c, p: c.steps(descend, p, 0.1, pull=(p, 1)), TypeError, "pull: steps has no such argument"),
    ],
)
def test_impossible_arguments_of_steps_are_refused(call, error, message):
    model = make_model("mlp")
    with pytest.raises(error, match=f"^{message}"):
        call(sampled(model), start(model))


def test_a_step_that_cannot_be_stacked_is_taken_client_by_client_with_one_warning():
    def asks(model, params, batches):
        return descend(model, params, batches, 0.1 if batches[0][0].max() > 0 else 0.2)

    model = make_model("mlp")
    params = start(model)
    want = sampled(model).steps(asks, params)
    clients = sampled(model, engine="stacked")
    with pytest.warns(UserWarning, match="asks on 'mlp' cannot be stacked, so clients train one by one") as told:
        assert trees.unequal(clients.steps(asks, params), want) == 0
    assert len(told) == 1 and told[0].filename == __file__
    assert trees.unequal(clients.steps(asks, params), want) == 0  # no warning: they are errors here
    assert clients.flops().tolist() == [2 * k for k in np.array(SIZES) * (3 * FC1 + 4 * FC2)]


@pytest.mark.parametrize("leaf", ["bias", "n"])
def test_a_step_that_vmap_gets_wrong_is_noticed_however_small_it_is(leaf):
    """It is the change that is compared, not what it comes to: that differs by less than a thousandth here."""

    def wrong(model, state, batches):
        changes = {"bias": 0.0003, "n": 1}
        if torch._C._functorch.is_batchedtensor(batches[0][0]):
            changes[leaf] *= 2
        return {name: t + changes[name] for name, t in state.items()}, batches[0][0].mean()

    state = {"bias": torch.ones(5), "n": torch.full((5,), 10_000)}
    options = {"dtype": torch.float32, "drop_last": True}
    want = sampled(make_model("mlp"), **options).steps(wrong, state)
    with pytest.warns(UserWarning, match="^wrong on 'mlp' cannot be stacked.* stacked, it gives other numbers"):
        got = sampled(make_model("mlp"), engine="stacked", **options).steps(wrong, state)
    assert trees.unequal(got, want) == 0 and got["n"].tolist() == [10_000, 10_000, 10_001, 10_001, 10_006]


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_steps_carry_no_gradients(engine):
    model = from_modules(Hidden(), nn.Linear(6, CLASSES), (6,), CLASSES)

    def hidden(model, state, batches):
        z = model.extract(state[0], batches[0][0]).mean()
        return (state[0], {"weight": 0.9 * state[1]["weight"] * z, "bias": state[1]["bias"]}), z

    clients, params = sampled(model, engine=engine), start(model)
    got = clients.steps(hidden, params)
    assert not any(t.requires_grad for t in trees.leaves(got)) and trees.unequal(got, params) > 0
    gradient, after = clients.gradient(model_loss, params)
    assert not any(t.requires_grad for t in trees.leaves((gradient, after)))
    with torch.no_grad():  # and work where the caller has them off
        assert trees.unequal(sampled(model, engine=engine).steps(hidden, params), got) == 0
        assert trees.unequal(sampled(model, engine=engine).gradient(model_loss, params)[0], gradient) == 0
        assert sampled(model, engine=engine).mean(model_loss, params).isfinite().all()


# Gradients within steps


def one_client(name, n=7):
    """A model, one client's parameters and one batch of it, in float64."""
    model = make_model(name)
    return model, trees.row(start(model, 2), 1), samples(model.shape, n, 0, torch.float64)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["mlp", "cnn-small", "norm"])
def test_slope_is_the_gradient_of_torchs_modules(name):
    """And the statistics of batch-norm are those of a module after that pass in training mode."""
    model, params, (x, y) = one_client(name)
    before = trees.clone((params, x, y))
    gradient, after = slope(model, model_loss, params, (x, y))
    assert trees.unequal((params, x, y), before) == 0
    network = plain_network(name).double().train()
    load(network, params)
    F.cross_entropy(network(x), y).backward()
    own = dict(network.named_parameters())
    for (where, g), p, (key, theirs) in zip(
        trees.named_leaves(gradient), trees.leaves(after), network.state_dict().items(), strict=True
    ):
        assert model.is_buffer(where) == (key not in own) and g.dtype == p.dtype == theirs.dtype
        wanted = own[key].grad if key in own else torch.zeros_like(theirs)
        assert (g - wanted).abs().max() <= 1e-12 and (p - theirs).abs().max() <= 1e-12
    if name == "norm":
        assert after[0]["1.num_batches_tracked"] == params[0]["1.num_batches_tracked"] + 1
        assert trees.unequal(after[0], params[0]) > 0
    assert not any(t.requires_grad for t in trees.leaves((gradient, after)))


def test_slope_of_a_part_and_of_what_the_loss_does_not_use():
    model, (extractor, head), batch = one_client("norm")
    whole, after = slope(model, model_loss, (extractor, head), batch)
    part, own = slope(model, extractor_loss, extractor, batch, head)
    assert trees.unequal(part, whole[0]) == 0 and trees.unequal(own, after[0]) == 0
    frozen, _ = slope(model, lambda m, h, b, r: F.cross_entropy(m.predict((r, h), b[0]), b[1]), head, batch, extractor)
    assert trees.unequal(frozen, whole[1]) > 1e-6  # a fixed extractor is in evaluation mode

    state = {"w": torch.tensor(3.0), "idle": torch.ones(2), "n": torch.tensor(4), "none": {}}
    gradient, same = slope(model, lambda m, p, b, c: c * p["w"] ** 2, state, batch, 5.0)
    assert gradient["w"] == 30 and gradient["idle"].tolist() == [0, 0] and gradient["none"] == {}
    assert gradient["n"] == 0 and gradient["n"].dtype == torch.int64 and trees.unequal(same, state) == 0
    assert slope(model, lambda m, p, b: torch.tensor(1.0), {}, batch) == ({}, {})


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "norm"])
def test_slope_within_vmap_is_each_clients(name):
    model, params = make_model(name), start(make_model(name), 3)
    x, y = map(torch.stack, zip(*(samples(model.shape, 7, i, torch.float64) for i in range(3)), strict=True))
    got = torch.vmap(lambda p, x, y: slope(model, model_loss, p, (x, y)))(params, x, y)
    for i in range(3):
        want = slope(model, model_loss, trees.row(params, i), (x[i], y[i]))
        assert trees.unequal(trees.row(got, i), want) < 1e-12


@pytest.mark.parametrize("name", ["mlp", "cnn-small", "norm"])
def test_slope_within_a_gradient_is_differentiated(name):
    """d/dw of f(w - a f'(w)), where batch-norm is in training mode in both, against autograd that keeps the graph."""
    model, params, (x, y) = one_client(name)

    def filled(moving):
        moving = iter(moving)
        leaves = [t.clone() if model.is_buffer(n) else next(moving) for n, t in trees.named_leaves(params)]
        return trees.like(params, leaves)

    def meta(model, w, batch):
        gradient, after = slope(model, model_loss, w, batch)
        return model_loss(model, trees.add(after, gradient, -0.1), batch)

    trained = [t.clone().requires_grad_() for n, t in trees.named_leaves(params) if not model.is_buffer(n)]
    inner = torch.autograd.grad(model_loss(model, as_trained(filled(trained)), (x, y)), trained, create_graph=True)
    moved = filled([w - 0.1 * g for w, g in zip(trained, inner, strict=True)])
    want = torch.autograd.grad(model_loss(model, as_trained(moved), (x, y)), trained)
    trained = [t.detach() for t in trained]
    whole, _ = slope(model, meta, params, (x, y))
    found = [[g for n, g in trees.named_leaves(whole) if not model.is_buffer(n)]]
    found.append(torch.func.grad(lambda moving: meta(model, as_trained(filled(moving)), (x, y)))(trained))
    for own in found:
        assert max(float((a - b).abs().max()) for a, b in zip(own, want, strict=True)) < 1e-12
    first = [g for n, g in trees.named_leaves(slope(model, model_loss, params, (x, y))[0]) if not model.is_buffer(n)]
    assert max(float((a - b).abs().max()) for a, b in zip(first, want, strict=True)) > 1e-3  # it is of second order


def test_buffers_are_told_by_their_names_wherever_they_are():
    model = make_model("norm")
    names = [n for n, _ in trees.named_leaves({"own": model.init(), "w": torch.ones(1)}) if model.is_buffer(n)]
    assert names == [f"own/0/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert [n for n, _ in trees.named_leaves(model.init()[0]) if model.is_buffer(n)] == [n[6:] for n in names]
    assert not model.is_buffer("1.running_mean/w") and not model.is_buffer("running_mean") and not model.is_buffer("")
    assert not any(make_model("mlp").is_buffer(n) for n, _ in trees.named_leaves(make_model("mlp").init()))


# A rate for each part


@STACKED
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rule", [{}, {"momentum": 0.9, "weight_decay": 0.1, "clip": 0.5}], ids=["plain", "all"])
@pytest.mark.parametrize("name", ["mlp", "norm"])
def test_two_rates_are_torchs_parameter_groups(name, rule, engine):
    model = make_model(name)
    clients, params = sampled(model, engine=engine, lr=7.0, epochs=2, **rule), start(model)
    got = clients.sgd(model_loss, params, lr=(0.1, 0.02))
    for i, n in enumerate(SIZES):
        network = plain_network(name).double().train()
        load(network, trees.row(params, i))
        groups = [{"params": ps, "lr": lr} for ps, lr in zip(halves(network), (0.1, 0.02), strict=True)]
        optimizer = torch.optim.SGD(groups, **{k: v for k, v in rule.items() if k != "clip"})
        for batch in batches_of(5, 2, i, "train", 2, n, 10, False):
            if len(batch) > 1 or name == "mlp":
                optimizer.zero_grad()
                F.cross_entropy(network(clients.data[i][0][batch]), clients.data[i][1][batch]).backward()
                if rule:
                    nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                optimizer.step()
        for mine, theirs in zip(trees.leaves(trees.row(got, i)), network.state_dict().values(), strict=True):
            assert (mine.double() - theirs.double()).abs().max() < (1e-6 if rule else 1e-12)  # torch clips at c + 10^-6


def halves(network):
    """The parameters of all but the last layer, and those of the last one."""
    *first, last = network
    return [p for layer in first for p in layer.parameters()], list(last.parameters())


@STACKED
def test_rates_of_parts(engine):
    """0 holds a part still, equal ones are one rate, and parts may be nested, empty or have one leaf."""
    model = make_model("mlp")
    clients, params = sampled(model, engine=engine), start(model)
    held = clients.sgd(model_loss, params, lr=(0, 0.1))
    assert trees.unequal(held[0], params[0]) == 0 and trees.unequal(held[1], params[1]) > 1e-3
    assert (
        trees.unequal(clients.sgd(model_loss, params, lr=(0.1, 0.1)), clients.sgd(model_loss, params, lr=0.1)) < 1e-12
    )

    def nested(model, state, batch):
        return model_loss(model, state[1][0], batch) + (state[0] - 3) ** 2 + state[1][1]["n"] * 0

    inner = (params, {"n": torch.arange(5)})
    got = clients.sgd(nested, (torch.zeros(5, dtype=torch.float64), inner, {}), lr=(0.25, 0.1, 9.0), epochs=1)
    assert got[0].tolist() == [3 - 3 * 0.5**k for k in (1, 1, 1, 2, 7)] and got[2] == {}
    assert trees.unequal(got[1][0], clients.sgd(model_loss, params, lr=0.1)) < 1e-12
    assert got[1][1]["n"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        ((0.1,), r"lr=\(0.1,\): must be one number, or one for each part of a tuple of params"),
        ((0.1, 0.1, 0.1), r"lr=\(0.1, 0.1, 0.1\): must be one number, or one for each part"),
        ((), r"lr=\(\): must be one number"),
        ((0.1, -0.1), r"lr=-0.1: must be a finite number, at least 0"),
        ((0.1, math.nan), r"lr=nan: must be a finite number"),
        ((math.inf, 0.1), r"lr=inf: must be a finite number"),
        ((0.1, "0.1"), r"lr='0.1': must be a finite number"),
        ((True, 0.1), r"lr=True: must be a finite number"),
        ([0.1, 0.1], r"lr=\[0.1, 0.1\]: must be a finite number"),
    ],
    ids=str,
)
def test_impossible_rates_are_refused(lr, message):
    model = make_model("mlp")
    with pytest.raises(ValueError, match=f"^{message}"):
        sampled(model).sgd(model_loss, start(model), lr=lr)


def test_two_rates_need_a_tuple():
    model = make_model("mlp")
    with pytest.raises(ValueError, match=r"^lr=\(0.1, 0.2\): must be one number, or one for each part of a tuple"):
        sampled(model).sgd(extractor_loss, start(model)[0], start(model)[1], lr=(0.1, 0.2))


# A name in the log that is not the phase's


@pytest.mark.parametrize("name", ["mlp", "dropout"])
def test_log_names_what_is_recorded_and_phase_the_batches_and_dropout(name):
    def loss(model, params, batch):
        return model_loss(model, params, batch), {"size": len(batch[1])}

    model = make_model(name)
    params, clients, plain = start(model), sampled(model), sampled(model)
    got = clients.sgd(loss, params, phase="train", log="own")
    assert trees.unequal(got, plain.sgd(loss, params, phase="train")) == 0
    assert sorted(clients.log) == ["own", "own.size"] and sorted(plain.log) == ["train", "train.size"]
    assert clients.log["own"].tolist() == plain.log["train"].tolist()
    clients.sgd(loss, params, phase="train", log="again")  # the same batches again
    assert clients.log["again"].tolist() == clients.log["own"].tolist()
    assert trees.unequal(clients.sgd(loss, params, phase="own"), got) > 0
    clients.data[2][0][0] = math.nan
    with pytest.raises(FloatingPointError, match=r"^round 2, client 2, phase 'own'"):
        clients.sgd(loss, params, phase="train", log="own")


# Means and gradients over local data


def tuned(model, params, batch, held, mu):
    """A loss with a tree and a number that stand still, and an extra."""
    return model_loss(model, params, batch) + mu * (params[1]["bias"] - held).square().sum(), {"extra": 1.0}


@EXACT
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 7, 61, 1000])
@pytest.mark.filterwarnings("ignore:.*has dropout, so its clients train in a loop")
@pytest.mark.parametrize("name", ["mlp", "norm", "dropout"])
def test_mean_is_over_samples_and_in_evaluation_mode(name, rows, engine, monkeypatch):
    """Against torch's own modules after eval(), sample by sample, whatever the pieces."""
    monkeypatch.setattr(training, "ROWS", rows)
    model, sizes = make_model(name), (1, 7, 61, 102)
    clients, params = sampled(model, sizes, engine=engine), start(model, 4)
    if name == "norm":
        params[0]["1.running_mean"] += 0.3
    held = torch.linspace(-1, 1, 4, dtype=torch.float64)[:, None].expand(4, CLASSES)
    before, state = trees.clone(params), torch.get_rng_state()
    got, plain = clients.mean(tuned, params, held, 0.5), clients.mean(model_loss, params)
    assert got.dtype == torch.float64 and got.shape == (4,) and clients.log == {}
    assert torch.equal(torch.get_rng_state(), state) and trees.unequal(params, before) == 0
    for i, (x, y) in enumerate(clients.data):
        network = nn.Sequential(*{"norm": norm, "dropout": dropout}[name]()) if name != "mlp" else plain_network(name)
        network = network.double().eval()
        load(network, trees.row(params, i))
        with torch.no_grad():
            want = sum(float(F.cross_entropy(network(x[j : j + 1]), y[j : j + 1])) for j in range(len(y))) / len(y)
        assert float(plain[i]) == pytest.approx(want, abs=1e-12)
        pull = 0.5 * float((params[1]["bias"][i] - held[i]).square().sum())
        assert float(got[i]) == pytest.approx(want + pull, abs=1e-12)
    shared = trees.expand(trees.row(params, 1), 4)
    assert clients.mean(model_loss, shared)[1] == plain[1]
    assert clients.mean(lambda model, nothing, batch: batch[0].mean(), {}).tolist() == pytest.approx(
        [float(x.mean()) for x, _ in clients.data], abs=1e-12
    )


def test_means_of_a_client_are_its_own_and_may_be_no_numbers():
    model, sizes = make_model("mlp"), (2, 230, 10)
    params = start(model, 3, torch.float32)
    clients = sampled(model, sizes, engine="threads", dtype=torch.float32)
    among = clients.mean(model_loss, params)
    alone = sampled(model, sizes[1:2], ids=[1], dtype=torch.float32).mean(model_loss, trees.take(params, [1]))
    assert alone.tolist() == [among[1].item()]
    clients.data[0][0][1] = math.nan  # a model of others may do badly: that is the method's to judge
    assert clients.mean(model_loss, params).isnan().tolist() == [True, False, False]


def test_means_count_their_flops_and_work_behind_an_extractor():
    model, n = make_model("mlp"), np.array(SIZES)
    clients, params = sampled(model), start(model)
    want = clients.mean(model_loss, params)
    assert clients.flops().tolist() == (n * (FC1 + FC2)).tolist()
    behind = clients.through(params[0])
    assert (behind.mean(head_loss, params[1]) - want).abs().max() < 1e-12
    assert clients.flops().tolist() == (n * (2 * FC1 + 2 * FC2)).tolist()
    first, rest = clients.split(0.5, "half")
    share = torch.from_numpy(first.n / n)
    both = share * first.mean(model_loss, params) + (1 - share) * rest.mean(model_loss, params)
    assert (both - want)[1:].abs().max() < 1e-12 and first.n.tolist() == [1, 4, 5, 6, 30]
    assert clients.flops().tolist() == (3 * n * (FC1 + FC2) + np.array([1, 0, 0, 0, 0]) * (FC1 + FC2)).tolist()


@ENGINES
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_gradient_is_that_of_the_mean_whatever_the_pieces(rows, engine, monkeypatch):
    monkeypatch.setattr(training, "ROWS", rows)
    model, sizes = make_model("mlp"), (1, 7, 61, 102)
    clients = sampled(model, sizes, engine=engine)
    params = trees.expand(trees.row(start(model), 3), 4)
    gradient, after = clients.gradient(model_loss, params)
    assert trees.unequal(after, params) == 0 and clients.log == {}
    assert clients.flops().tolist() == (np.array(sizes) * (2 * FC1 + 3 * FC2)).tolist()
    for i, (x, y) in enumerate(clients.data):
        network = plain_network("mlp").double()
        load(network, trees.row(params, i))
        for j in range(len(y)):
            (F.cross_entropy(network(x[j : j + 1]), y[j : j + 1]) / len(y)).backward()
        own = tuple(p.grad for p in network.parameters())
        assert trees.unequal(tuple(trees.leaves(trees.row(gradient, i))), own) < 1e-12
    after[1]["bias"][0] += 1  # memory of its own, for each client
    assert params[1]["bias"][0].ne(after[1]["bias"][0]).all() and torch.equal(after[1]["bias"][1], params[1]["bias"][1])


@ENGINES
@pytest.mark.usefixtures("one_thread")
def test_gradient_and_batch_norm(engine):
    """In training mode, up to 100 samples at once: the statistics are a module's; a single sample has no variance."""
    model, sizes = make_model("norm"), (1, 2, 100, 230)
    clients, params = sampled(model, sizes, engine=engine), start(model, 4)
    before = trees.clone(params)
    gradient, after = clients.gradient(model_loss, params)
    assert trees.unequal(params, before) == 0
    assert clients.log["skipped"].tolist() == [1, 0, 0, 0] and (clients.flops() > 0).tolist() == [
        False,
        True,
        True,
        True,
    ]
    assert not any(t.any() for t in trees.leaves(trees.row(gradient, 0)))
    assert trees.unequal(trees.row(after, 0), trees.row(params, 0)) == 0
    for i, pieces in ((1, [2]), (2, [100]), (3, [77, 77, 76])):
        network = plain_network("norm").double().train()
        load(network, trees.row(params, i))
        for x, y in zip(*(t.split(pieces) for t in clients.data[i]), strict=True):
            (F.cross_entropy(network(x), y) * len(y) / sum(pieces)).backward()
        named = dict(network.named_parameters())
        for g, p, (key, theirs) in zip(
            *map(trees.leaves, (trees.row(gradient, i), trees.row(after, i))), network.state_dict().items(), strict=True
        ):
            assert g.dtype == p.dtype == theirs.dtype and (p - theirs).abs().max() <= 1e-12
            assert (g - (named[key].grad if key in named else 0)).abs().max() <= 1e-12
        assert after[0]["1.num_batches_tracked"][i] == len(pieces)


def test_gradient_of_a_part_with_what_stands_still():
    model = make_model("norm")
    clients, (extractor, head) = sampled(model, sizes=(7, 11)), start(model, 2)
    whole, after = clients.gradient(model_loss, (extractor, head))
    part, own = clients.gradient(extractor_loss, extractor, head)
    assert trees.unequal(part, whole[0]) == 0 and trees.unequal(own, after[0]) == 0
    assert clients.gradient(lambda model, nothing, batch: batch[0].mean(), {}) == ({}, {})
    held, _ = clients.gradient(lambda *a: tuned(*a)[0], (extractor, head), torch.zeros(2, 3, dtype=torch.float64), 2.0)
    assert trees.unequal(held[1]["bias"], whole[1]["bias"] + 4 * head["bias"]) < 1e-12
    state = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([1, 2])}
    got, same = clients.gradient(lambda model, p, batch, k: k * p["w"] ** 2 + 0 * p["n"], state, 3)
    assert got["w"].tolist() == [6, 12] and got["n"].tolist() == [0, 0] and trees.unequal(same, state) == 0
    with pytest.raises(ValueError, match=r"^params, '0/.*, is \[2, .*must be \[5, "):
        sampled(model).gradient(model_loss, (extractor, head))
    with pytest.raises(ValueError, match=r"^params, '0/.*, is \[2, .*must be \[5, "):
        sampled(model).mean(model_loss, (extractor, head))


def test_gradient_with_dropout_is_each_clients_own_and_leaves_the_global_generator_alone():
    model, sizes = make_model("dropout"), (12, 230, 7)
    params = start(model, 3)
    state = torch.get_rng_state()
    clients = sampled(model, sizes)
    got, _ = clients.gradient(model_loss, params)
    assert clients.flops().all() and torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    alone, _ = sampled(model, sizes[1:2], ids=[1]).gradient(model_loss, trees.take(params, [1]))
    assert trees.unequal(trees.take(got, [1]), alone) == 0
    other, _ = sampled(model, sizes, round=3).gradient(model_loss, params)
    assert trees.unequal(other, got) > 0  # other masks in another round


# Two parts of the samples, the same in every round


@pytest.mark.parametrize(
    ("share", "sizes"),
    [
        (0.8, [1, 6, 8, 9, 49]),
        (0.5, [1, 4, 5, 6, 30]),  # halves to even
        (0, [1, 1, 1, 1, 1]),  # one at least in each
        (1e-9, [1, 1, 1, 1, 1]),
        (1, [1, 6, 9, 10, 60]),
        (0.999, [1, 6, 9, 10, 60]),
    ],
)
def test_a_split_is_complete_and_the_same_in_every_round(share, sizes):
    parts = [[drawn(part) for part in counted(SIZES, round=t).split(share, "meta")] for t in (1, 2, 3)]
    assert parts[0] == parts[1] == parts[2]
    clients = counted(SIZES)
    first, rest = clients.split(share, "meta")
    assert first.n.tolist() == sizes and [drawn(first), drawn(rest)] == parts[0]
    for n, one, other in zip(SIZES, *parts[0], strict=True):
        assert list(one) == sorted(set(one)) and list(other) == sorted(set(other))
        assert one == other == (0,) if n == 1 else sorted(one + other) == list(range(n))
    for part in (first, rest):
        assert part.n.tolist() == [len(y) for _, y in part.data]
        assert all(torch.equal(y, x[:, 0].long() % CLASSES) for x, y in part.data)  # with its own label
        assert part.log is clients.log and part.ids is clients.ids
    assert clients.n.tolist() == list(SIZES) and drawn(clients) == [tuple(range(n)) for n in SIZES]


def test_splits_differ_by_name_client_and_seed_and_not_by_who_joins():
    """61 samples, half of them: two draws are alike once in 10^17."""
    sizes = (61,) * 3
    draws = [*drawn(counted(sizes).split(0.5, "meta")[0]), *drawn(counted(sizes).split(0.5, "own")[0])]
    other = counted(sizes)
    other.seed += 1
    draws += drawn(other.split(0.5, "meta")[0])
    assert len(set(draws)) == 9
    among = [drawn(part) for part in counted(SIZES).split(0.5, "meta")]
    for ids in ([4], [1, 3], [3, 1, 2]):
        own = [drawn(part) for part in counted([SIZES[i] for i in ids], ids).split(0.5, "meta")]
        assert own == [[part[i] for i in ids] for part in among]
    less = counted(SIZES).split(0.25, "meta")[0]  # a smaller share is part of a larger one
    assert all(set(a) <= set(b) for a, b in zip(drawn(less), among[0], strict=True))


def test_a_split_of_a_split_and_behind_an_extractor():
    clients = counted((1, 2, 9))
    first, rest = clients.split(0.5, "a")
    again = first.split(0.5, "a")
    assert [part.n.tolist() for part in (first, rest, *again)] == [[1, 1, 4], [1, 1, 5], [1, 1, 2], [1, 1, 2]]
    assert sorted(sum((drawn(part)[2] for part in (*again, rest)), ())) == list(range(9))
    model = make_model("mlp")
    clients, (extractor, head) = sampled(model), start(model)
    one, other = clients.split(0.5, "a")[1].through(extractor), clients.through(extractor).split(0.5, "a")[1]
    assert trees.unequal(one.sgd(head_loss, head), other.sgd(head_loss, head)) < 1e-12
    assert sum(list(one.n)) == sum(len(y) for _, y in other.data)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan, "0.5", None, True])
def test_impossible_shares_of_a_split_are_refused(share):
    with pytest.raises(ValueError, match=rf"^share={share!r}: must be a finite number"):
        counted(SIZES).split(share, "meta")


# A step of a batch's words only


WORDS = 40


def texts(engine="loop", **rule):
    """A fastText and clients of it, whose words are the first 20 of 40, each several times in a text and in a batch."""
    model = build("fasttext", (8,), CLASSES, vocabulary=WORDS)
    draw = torch.Generator().manual_seed(0)
    own = [(torch.randint(20, (n, 8), generator=draw), torch.randint(CLASSES, (n,), generator=draw)) for n in SIZES]
    return sampled(model, data=own, engine=engine, **rule), start(model)


def far_from_zero(model, params, batch):
    """A loss that reads the whole embedding, beside the words of the batch."""
    return model_loss(model, params, batch) + 0.1 * params[0]["embed.weight"].square().sum()


def two_readings(model, params, batch):
    """The model reads the batch, and its first text again."""
    return model_loss(model, params, batch) + model_loss(model, params, (batch[0][:1], batch[1][:1]))


def of_a_mix(model, params, batch):
    """The trained embedding is not what the model reads, but made into it."""
    mixed = {name: (t + 1) / 2 for name, t in params[0].items()}
    return model_loss(model, (type(params[0])(mixed), params[1]), batch)


@pytest.fixture
def sparse(monkeypatch):
    """Whether each reading of an embedding was to have a sparse gradient."""
    seen, real = [], F.embedding

    def embedding(*args, **options):
        seen.append(options.get("sparse", False))
        return real(*args, **options)

    monkeypatch.setattr(F, "embedding", embedding)
    return seen


STEPS = {
    "plain": (model_loss, {}, True),
    "two epochs": (model_loss, {"epochs": 2}, True),
    "two rates": (model_loss, {"lr": (0.5, 0.1)}, True),
    "two readings": (two_readings, {}, True),
    "the whole embedding too": (far_from_zero, {}, True),  # its gradient is a sum of a sparse and a dense one
    "a mix": (of_a_mix, {}, False),
    "momentum": (model_loss, {"momentum": 0.9}, False),
    "decay": (model_loss, {"weight_decay": 0.1}, False),
    "clip": (model_loss, {"clip": 0.5}, False),
    "project": (model_loss, {"project": lambda t: t.clamp(-1, 1)}, False),
    "pull": (model_loss, {"pull": lambda p: (trees.full_like(p, 0), 0.1)}, False),
}


@EXACT
@pytest.mark.parametrize(("loss", "options", "rows"), STEPS.values(), ids=STEPS)
def test_a_step_of_a_batchs_words_is_the_step_of_all_words(loss, options, rows, engine, sparse, monkeypatch):
    clients, params = texts(engine, lr=0.5)
    options = {name: value(params) if name == "pull" else value for name, value in options.items()}
    sparse.clear()  # of what building a model reads
    got = clients.sgd(loss, params, **options)
    assert set(sparse) == {rows}
    monkeypatch.setattr(Descent, "only_descends", False)
    sparse.clear()
    assert trees.unequal(got, clients.sgd(loss, params, **options)) < 1e-12 and set(sparse) == {False}


@EXACT
def test_words_that_a_client_has_not_stay_as_they_were_to_the_bit(engine):
    clients, params = texts(engine, lr=0.5)
    before, after = params[0]["embed.weight"], clients.sgd(model_loss, params)[0]["embed.weight"]
    for i, (x, _) in enumerate(clients.data):
        has = x.unique()
        moved = (before[i] != after[i]).any(1)
        assert moved.nonzero().flatten().tolist() == has[has > 0].tolist()  # 0 is the pad


def test_an_embedding_under_a_gradient_of_a_gradient_and_without_training(sparse):
    """slope, through, mean and evaluate have no use for sparse gradients."""
    clients, params = texts()
    clients.mean(model_loss, params)
    clients.gradient(model_loss, params)
    clients.through(params[0]).sgd(head_loss, params[1])
    clients.steps(lambda m, p, b: (slope(m, model_loss, p, b[0])[0], torch.zeros(())), params)
    assert sparse and not any(sparse)
