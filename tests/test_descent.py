"""All clients at once against one by one: the same steps, whatever the model, method and sizes; and what falls back."""

import functools
import gc
import itertools
import math
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pflkit import data, models, partition, stack, training, trees
from pflkit.descent import slope, value_and_slope
from pflkit.federation import Federation
from pflkit.methods import METHODS, make, perfedavg, pfedme
from pflkit.methods.fedavg import model_loss
from pflkit.methods.fedrep import extractor_loss, head_loss
from pflkit.training import Clients, Engine, Training

CLASSES = 4
SIZES = (1, 7, 10, 61, 640)
HARD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "clip": 1.0}
SHAPES = {"cnn": (1, 16, 16), "fasttext": (20,), "resnet18": (3, 8, 8)}  # the others: 8x8 grey images


def federation(names, sizes=SIZES, engine="stacked", dtype=torch.float64, rule=None, **options):
    """Clients of given sizes on noise, each with one sample for tests; names: of the models, or a model."""
    g, n = torch.Generator().manual_seed(0), sum(sizes) + len(sizes)
    nets = names
    if isinstance(names, str):
        shape, words = SHAPES.get(names, (1, 8, 8)), 50 if names == "fasttext" else None
        nets = [models.build(name, shape, CLASSES, vocabulary=words) for name in names.split("+")]
    shape, words = (nets[0].shape, nets[0].vocabulary) if isinstance(nets, list) else (nets.shape, nets.vocabulary)
    x = torch.randn(n, *shape, generator=g) if words is None else torch.randint(words, (n, *shape), generator=g)
    y = torch.randint(CLASSES, (n,), generator=g).numpy()
    ends = np.cumsum([size + 1 for size in sizes])
    rows = [np.arange(end - size - 1, end) for end, size in zip(ends, sizes, strict=True)]
    split = partition.custom(y, [own[:-1] for own in rows], [own[-1:] for own in rows])
    noise = data.Dataset("noise", x, y, tuple(range(CLASSES)), vocabulary=words)
    options = {"training": Training(**(HARD if rule is None else rule)), "device": "cpu"} | options
    return Federation(noise, split, nets, engine=engine, dtype=dtype, **options)


def play(fed, method, rounds=2):
    state = fed.start(method)
    results = [fed.play(method, state, rounds) for _ in range(rounds)]
    return (state.server, state.kept, results[-1].held), results


def alike(model, method, sizes=SIZES, rule=HARD):
    """Two rounds by both engines: equal parameters, losses, skipped batches and FLOPs."""
    loop, looped = play(federation(model, sizes, "loop", rule=rule), method)
    stack, stacked = play(federation(model, sizes, "stacked", rule=rule), method)
    assert trees.unequal(loop, stack) < 1e-10
    for a, b in zip(looped, stacked, strict=True):
        assert list(a.log()) == list(b.log()) and np.array_equal(a.flops(), b.flops())
        for name, values in a.log().items():
            np.testing.assert_allclose(b.log()[name], values, rtol=0, atol=1e-10)


@pytest.fixture
def used(monkeypatch):
    """Which way each training went, as (name of the loss or step, engine)."""
    ways = []

    def watch(name, way):
        real = getattr(training, name)

        def run(d, *rest, **named):
            out = real(d, *rest, **named)
            ways.append(((d.step or d.loss).__name__, way))
            return out

        monkeypatch.setattr(training, name, run)

    watch("all_at_once", "stacked")
    watch("one_by_one", "one by one")
    return ways


MIXED = "mlp-1+mlp-2"
HETEROGENEOUS = [name for name, method in METHODS.items() if getattr(method, "heterogeneous", False)]
EVERY = [
    *itertools.product(["mlp", "cnn", "cnn-small", "fasttext"], METHODS),
    *itertools.product([MIXED], HETEROGENEOUS),
]


@pytest.mark.parametrize(("model", "method"), EVERY)
def test_two_rounds_are_those_of_the_loop(model, method, used):
    alike(model, make(method))
    half = len(used) // 2
    ways = [{way for _, way in part} for part in (used[:half], used[half:])]
    assert ways == ([set(), set()] if method == "fedmeta" else [{"one by one"}, {"stacked"}])  # it takes no local steps


CALM = HARD | {"lr": 0.005}  # at 0.05 a nudge of 1e-15 at the start is one of 1e-8 after 64 steps


def test_two_rounds_of_a_resnet_are_those_of_the_loop():
    alike("resnet18", make("fedrep"), (1, 7, 10), CALM)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedrep", "fedah"])
def test_two_rounds_of_a_resnet_with_a_large_client_are_those_of_the_loop(method):
    alike("resnet18", make(method), SIZES, CALM)


# One training


def norm():
    """A small net with batch-norm, whose buffers move in training."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return models.from_modules(body, nn.Linear(36, CLASSES), (1, 5, 5), CLASSES, name="norm")


def mlp(**options):
    return models.build("mlp", (6,), CLASSES, **options)


def clients(model, engine, sizes=(1, 7, 10, 61), ids=None, dtype=torch.float64, round=2, **rule):
    ids = np.arange(len(sizes)) if ids is None else np.array(ids)
    own = []
    for n, i in zip(sizes, ids, strict=True):
        g = torch.Generator().manual_seed(1000 * int(i) + n)
        words, shape = model.vocabulary, (n, *model.shape)
        x = torch.randint(words, shape, generator=g) if words else torch.randn(shape, generator=g, dtype=dtype)
        own.append((x, torch.randint(CLASSES, (n,), generator=g)))
    engine = engine if isinstance(engine, Engine) else Engine(engine, model)
    return Clients(model, own, ids, round, 9, Training(**rule), 5, engine, {})


def start(model, C=4, dtype=torch.float64):
    """Every client's own initial model: the model's, moved by a little that differs from client to client."""
    by = torch.arange(C, dtype=dtype) / 64

    def moved(t):
        return t.to(dtype) + by.reshape(-1, *[1] * (t.ndim - 1)) if t.is_floating_point() else t

    return trees.tree_map(moved, trees.repeat(model.init(), C))


def both(model, train, C=4, tolerance=1e-12, **options):
    """train(clients, params [C, ...]) by both engines, without a fallback, to equal results and logs; the result."""
    runs = {engine: clients(model, engine, **options) for engine in ("loop", "stacked")}
    out = {engine: train(c, start(model, C)) for engine, c in runs.items()}
    loop, stack = runs["loop"], runs["stacked"]
    assert not stack.engine.refused
    assert trees.unequal(out["loop"], out["stacked"]) < tolerance
    same = trees.tree_map(lambda a, b: a.dtype == b.dtype and a.shape == b.shape, out["loop"], out["stacked"])
    assert all(trees.leaves(same))
    assert sorted(loop.log) == sorted(stack.log) and np.array_equal(loop.flops(), stack.flops())
    for name, values in loop.log.items():
        np.testing.assert_allclose(stack.log[name], values, rtol=0, atol=1e-12)
    return out["stacked"], stack


def with_extras(model, params, batch):
    logits = model.predict(params, batch[0])
    right = (logits.argmax(1) == batch[1]).double().mean()
    return F.cross_entropy(logits, batch[1]), {"right": right, "size": len(batch[1]), "half": len(batch[1]) / 2}


def now_and_then(model, params, batch):
    """Only full batches say how long the logits are."""
    logits = model.predict(params, batch[0])
    return F.cross_entropy(logits, batch[1]), {"length": logits.norm()} if len(batch[1]) == 10 else {}


def with_numbers(model, params, batch, anchor, mu, name_is_free):
    return model_loss(model, params, batch) + mu * (params[1]["bias"] - anchor["bias"]).square().sum() * name_is_free


def only_the_head_matters(model, params, batch):
    return F.cross_entropy(model.classify(params[1], torch.ones(len(batch[1]), 64, dtype=torch.float64)), batch[1])


def unit(p):
    return p / p.norm()


def fallen(losses):
    return losses[-1] < 0.9 * losses[0]


def anchors(params):
    return trees.tree_map(lambda t: t + 1 if t.is_floating_point() else t.clone(), params)


TRAININGS = {
    "extras": lambda c, p: c.sgd(with_extras, p),
    "extras that some steps lack": lambda c, p: c.sgd(now_and_then, p, epochs=2),
    "pull": lambda c, p: c.sgd(model_loss, p, pull=(anchors(p), 0.5)),
    "pull to one place": lambda c, p: c.sgd(model_loss, p, pull=(trees.expand(trees.row(p, 0), 4), 2)),
    "pull by name": lambda c, p: c.sgd(model_loss, p, pull=((dict(reversed(anchors(p)[0].items())), p[1]), 0.5)),
    "clamp": lambda c, p: c.sgd(model_loss, p, project=lambda t: t.clamp(-0.1, 0.1)),
    "unit length": lambda c, p: c.sgd(model_loss, p, project=unit),
    "until": lambda c, p: c.sgd(model_loss, p, until=fallen, epochs=6),
    "until, of each": lambda c, p: c.sgd(model_loss, p, until=fallen, epochs=[1, 0, 6, 3]),
    "epochs of each": lambda c, p: c.sgd(model_loss, p, epochs=[0, 3, 1, 2]),
    "one client trains": lambda c, p: c.sgd(model_loss, p, epochs=[0, 0, 2, 0]),
    "full batches": lambda c, p: c.sgd(model_loss, p, epochs=2, drop_last=True),
    "batches of one": lambda c, p: c.sgd(model_loss, p, batch_size=1),
    "one batch": lambda c, p: c.sgd(model_loss, p, batch_size=1000, epochs=3),
    "no momentum": lambda c, p: c.sgd(model_loss, p, momentum=0, weight_decay=0, clip=None, epochs=2),
    "two phases": lambda c, p: c.sgd(model_loss, c.sgd(model_loss, p), phase="again", epochs=2),
    "numbers": lambda c, p: c.sgd(with_numbers, p, trees.tree_map(torch.ones_like, p[1]), 0.5, np.float32(2)),
    "one value for all": lambda c, p: c.sgd(model_loss, trees.expand(trees.row(p, 1), 4)),
    "under one head": lambda c, p: c.sgd(extractor_loss, p[0], trees.expand(trees.row(p[1], 1), 4)),
    "behind the extractor": lambda c, p: c.through(p[0]).sgd(head_loss, p[1], epochs=[2, 1, 0, 1]),
}


@pytest.mark.parametrize("train", TRAININGS.values(), ids=TRAININGS)
@pytest.mark.parametrize("model", [mlp, norm])
def test_all_that_training_can_be_asked_is_as_in_the_loop(model, train):
    both(model(), train, **HARD)


def test_parameters_that_the_loss_does_not_see_only_decay():
    got, _ = both(mlp(), lambda c, p: c.sgd(only_the_head_matters, p), lr=0.5, weight_decay=0.5)
    first = trees.leaves(got[0])
    for i, steps in enumerate((1, 1, 1, 7)):
        for now, then in zip(first, trees.leaves(start(mlp())[0]), strict=True):
            torch.testing.assert_close(now[i], then[i] * 0.75**steps, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sizes", [(1,), (7,), (61,), (1, 1, 1)])
@pytest.mark.parametrize("rule", [{}, {"batch_size": 1}, {"batch_size": 1000}, {"drop_last": True}], ids=str)
@pytest.mark.parametrize("model", [mlp, norm])
def test_few_clients_and_few_samples(model, rule, sizes):
    C = len(sizes)
    both(model(), lambda c, p: c.sgd(model_loss, p, epochs=2), C=C, sizes=sizes, **HARD | rule)


def test_extras_are_means_over_the_steps_that_give_them():
    """The clients of 1 and 7 samples never do, which is NaN and not 0."""
    for engine in ("loop", "stacked"):
        c = clients(mlp(), engine, lr=0.0)
        c.sgd(lambda m, p, b: (model_loss(m, p, b), {"ten": 10.0} if len(b[1]) == 10 else {}), start(mlp()))
        np.testing.assert_array_equal(c.log["train.ten"], [np.nan, np.nan, 10, 10])
        assert np.isfinite(c.log["train"]).all()


class Other(nn.Module):
    """A net with buffers of whole numbers, and of true and false: a mask, and a count of its calls."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.register_buffer("mask", torch.tensor([True, False, True, True, True]))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls += 1
        return self.fc(x) * self.mask


def test_buffers_of_whole_numbers_and_of_true_and_false():
    torch.manual_seed(0)
    model = models.from_modules(Other(), nn.Linear(5, CLASSES), (6,), CLASSES)
    (extractor, _), _ = both(model, lambda c, p: c.sgd(model_loss, p, epochs=2), **HARD)
    assert extractor["calls"].tolist() == [2, 2, 2, 14] and extractor["mask"].tolist() == 4 * [Other().mask.tolist()]


def test_a_tree_of_only_a_dict():
    def loss(model, params, batch, other):
        return (params["a"] * batch[0].mean() - params["n"]).square().sum() + other["b"] * params["a"].sum()

    tree = {"a": torch.ones(4, 3, dtype=torch.float64), "n": torch.arange(4), "on": torch.ones(4, dtype=torch.bool)}
    got, _ = both(mlp(), lambda c, p: c.sgd(loss, tree, {"b": torch.arange(4.0).double()}), lr=0.1)
    assert got["n"].tolist() == [0, 1, 2, 3] and got["on"].all() and (got["a"] != tree["a"]).all()


def test_a_model_that_is_all_head():
    """Its extractor is an empty dict, in params and among what stands still."""
    model = mlp(head_layers=2)

    @models.for_many
    def under_nothing(model, head, batch, extractor):
        return model_loss(model, (extractor, head), batch)

    whole, _ = both(model, lambda c, p: c.sgd(model_loss, p), **HARD)
    head, _ = both(model, lambda c, p: c.sgd(under_nothing, p[1], {}), **HARD)
    assert trees.unequal(whole[1], head) == 0 and whole[0] == {}


# Batch-norm (case F1)


def test_batch_norms_gradients_statistics_and_counters_are_the_loops():
    """One step with lr 1 is the gradient; then three epochs. Single samples are skipped, and counted."""
    model, sizes = norm(), (7, 10, 61, 1)
    one, _ = both(model, lambda c, p: c.sgd(model_loss, p, batch_size=100), sizes=sizes, lr=1.0)
    extractor, before = one[0], start(model)[0]
    assert (extractor["0.weight"] - before["0.weight"]).flatten(1).abs().amax(1).gt(1e-3).tolist() == [True] * 3 + [
        False
    ]
    many, c = both(model, lambda c, p: c.sgd(model_loss, p, epochs=3), sizes=sizes, **HARD)
    assert c.log["skipped"].tolist() == [0, 0, 3, 3]
    assert many[0]["1.num_batches_tracked"].tolist() == [3, 3, 18, 0]
    assert (many[0]["1.running_mean"] != before["1.running_mean"]).any(1).tolist() == [True] * 3 + [False]
    _, c = both(model, lambda c, p: c.sgd(model_loss, p, epochs=2), sizes=sizes, batch_size=1)
    assert c.log["skipped"].tolist() == [14, 20, 122, 2] and "train" not in c.log


def test_a_frozen_batch_norm_is_in_evaluation_mode_and_stands_still():
    def on_top(model, head, batch, extractor):
        return F.cross_entropy(model.predict((extractor, head), batch[0]), batch[1])

    model = norm()
    (head, extractor), c = both(model, lambda c, p: (c.sgd(on_top, p[1], p[0]), p[0]), **HARD)
    assert trees.unequal(extractor, start(model)[0]) == 0 and "skipped" not in c.log
    behind, _ = both(model, lambda c, p: c.through(p[0]).sgd(head_loss, p[1]), **HARD)
    assert trees.unequal(head, behind) < 1e-12


# A client's result is its own (case F11)


@pytest.mark.parametrize(
    ("model", "sizes", "dtype"), [(mlp, (61, 6413, 10), torch.float32), (norm, (61, 641, 10), torch.float64)]
)
def test_a_client_among_unequal_others_is_the_client_alone(model, sizes, dtype):
    model, rule = model(), {"momentum": 0.9, "weight_decay": 1e-3, "dtype": dtype}
    params = start(model, 3, dtype)

    def train(c, p):
        return c.sgd(model_loss, p, pull=(anchors(p), 0.1))

    # At the larger rate 642 steps are chaotic: they make 0.4 of a rounding, so that only equal bits stay equal.
    for engine, lr in (("stacked", 0.05), ("loop", 0.001)):
        among = train(clients(model, "stacked", sizes, lr=lr, **rule), params)
        for i, size in enumerate(sizes):
            alone = train(clients(model, engine, [size], ids=[i], lr=lr, **rule), trees.take(params, [i]))
            gap = trees.unequal(alone, trees.take(among, [i]))
            assert gap == 0 if (engine, model.name) == ("stacked", "mlp") else gap < 1e-6


def test_who_takes_no_step_is_not_touched():
    """To the bit, though others train: without an epoch, without a full batch, with single samples only."""
    for model, sizes, epochs, rule, still in [
        (mlp(), (61, 641, 10), [2, 3, 0], {}, [2]),
        (mlp(), (61, 9, 10), [2, 3, 1], {"drop_last": True}, [1]),
        (norm(), (1, 61, 10), [2, 3, 1], {}, [0]),
    ]:
        c, params = clients(model, "stacked", sizes=sizes, dtype=torch.float32, **HARD), start(model, 3, torch.float32)
        got = c.sgd(model_loss, params, epochs=epochs, pull=(anchors(params), 0.1), **rule)
        for i in range(3):
            row, before = trees.row(got, i), trees.row(params, i)
            assert all(torch.equal(a, b) for a, b in zip(*map(trees.leaves, (row, before)), strict=True)) == (
                i in still
            )
            assert np.isnan(c.log["train"][i]) == (i in still)


def test_everyone_trains_on_one_intra_op_thread():
    """Else sums would depend on their number, called from outside a round too."""
    seen = []

    def watch(model, params, batch):
        seen.append(torch.get_num_threads())
        return model_loss(model, params, batch)

    clients(mlp(), "stacked").sgd(watch, start(mlp()))
    assert set(seen) == {1}


def test_the_order_of_clients_does_not_matter():
    model, order = mlp(), [2, 0, 3, 1]
    params, sizes = start(model), (1, 7, 10, 61)
    given = clients(model, "stacked", **HARD).sgd(model_loss, params, epochs=2)
    turned = clients(model, "stacked", [sizes[i] for i in order], ids=order, **HARD)
    turned = turned.sgd(model_loss, trees.take(params, order), epochs=2)
    assert trees.unequal(turned, trees.take(given, order)) < 1e-12


# What cannot be stacked


def branching(model, params, batch):
    """Looks at a value, which torch.vmap refuses."""
    logits = model.predict(params, batch[0])
    return F.cross_entropy(logits if logits.max() > 0 else 2 * logits, batch[1])


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.max() > 0 else -x)


class Padded(nn.Module):
    """Words by hand: torch.vmap keeps the pad's row from learning for the first client only."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 8))

    def forward(self, x):
        return F.embedding(x, self.weight, padding_idx=0).mean(1)


def user(extractor, shape=(6,), vocabulary=None):
    torch.manual_seed(0)
    return models.from_modules(extractor(), nn.Linear(8, CLASSES), shape, CLASSES, name="mine", vocabulary=vocabulary)


@pytest.mark.parametrize(
    ("make_model", "loss", "why"),
    [
        (mlp, branching, "data-dependent control flow"),
        (lambda: user(lambda: Branching(6, 8)), model_loss, "data-dependent control flow"),
        (lambda: user(Padded, (5,), 50), model_loss, "other numbers than each client by itself"),
    ],
    ids=["loss", "model", "padding"],
)
def test_what_cannot_be_stacked_is_looped_with_one_warning_in_all_rounds(make_model, loss, why):
    model = make_model()
    rounds = {}
    for wanted in ("loop", "stacked"):
        engine, params = Engine(wanted, model), start(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for t in (1, 2, 3):
                params = clients(model, engine, round=t, **HARD).sgd(loss, params)
        rounds[wanted] = params
        messages = [str(w.message) for w in caught]
        assert len(messages) == (wanted == "stacked") and all(why in m.replace("\n", " ") for m in messages)
        assert all(m.startswith(f"{loss.__name__} on {model.name!r} cannot be stacked, so clients") for m in messages)
    assert trees.unequal(rounds["loop"], rounds["stacked"]) == 0


def test_only_the_loss_that_cannot_be_stacked_is_looped(used):
    c, params = clients(mlp(), "stacked"), start(mlp())
    with pytest.warns(UserWarning, match="branching on 'mlp' cannot be stacked"):
        c.sgd(branching, params)
    c.sgd(model_loss, params)
    c.sgd(branching, params)
    assert used == [("branching", "one by one"), ("model_loss", "stacked"), ("branching", "one by one")]


def test_a_project_that_looks_at_a_value_is_looped():
    def bounded(p):
        return p / p.norm() if p.norm() > 0.5 else p

    runs = {engine: clients(mlp(), engine, **HARD) for engine in ("loop", "stacked")}
    want = runs["loop"].sgd(model_loss, start(mlp()), project=bounded)
    with pytest.warns(UserWarning, match="cannot be stacked") as caught:
        got = runs["stacked"].sgd(model_loss, start(mlp()), project=bounded)
    assert trees.unequal(got, want) == 0 and len(caught) == 1


def test_a_users_embedding_with_a_pad_is_stacked_rightly():
    """Though no text of the first round, which is the one that is checked, has a pad. The loop is torch's own."""
    model, by_hand = (
        user(lambda: nn.Sequential(nn.Embedding(50, 8, padding_idx=0), models.Mean()), (5,), 50),
        user(Padded, (5,), 50),
    )
    first, ends = start(model), {}
    for name, net, engine in (("loop", model, "loop"), ("stacked", model, "stacked"), ("torch", by_hand, "loop")):
        engine, params = Engine(engine, net), first if net is model else ({"weight": first[0]["0.weight"]}, first[1])
        for t in (1, 2):
            c = clients(net, engine, round=t, momentum=0.9)
            c.data = [(x.clamp(min=1) if t == 1 else x, y) for x, y in c.data]
            params = c.sgd(model_loss, params)
        assert not engine.refused
        ends[name] = trees.leaves(params)
    assert all(torch.equal(a, b) for a, b in zip(ends["loop"], ends["torch"], strict=True))
    assert trees.unequal(tuple(ends["loop"]), tuple(ends["stacked"])) < 1e-12
    assert torch.equal(ends["stacked"][0][:, 0], first[0]["0.weight"][:, 0])


def test_the_check_sees_what_is_not_a_number(monkeypatch):
    """A stack that gives NaN where a client by itself does not, as others' masked losses do."""
    stack, unspoilt = torch.vmap, []

    def spoilt(f):
        run = stack(f)

        def nan(*args):
            found, leaves = run(*args)
            unspoilt.append(found)
            return {name: value * torch.tensor([1, 1, np.nan, 1]) for name, value in found.items()}, leaves

        return nan

    def plain_loss(*args):
        return model_loss(*args)  # not marked as for many

    monkeypatch.setattr(torch, "vmap", spoilt)
    c = clients(mlp(), "stacked", sizes=(10,) * 4)
    with pytest.warns(UserWarning, match="other numbers"):
        got = c.sgd(plain_loss, start(mlp()))
    assert len(unspoilt) == 1
    assert trees.unequal(got, clients(mlp(), "loop", sizes=(10,) * 4).sgd(model_loss, start(mlp()))) == 0


def test_a_call_without_a_step_is_no_check():
    model = user(Padded, (5,), 50)
    engine, params = Engine("stacked", model), start(model)
    clients(model, engine, sizes=(1, 2, 3, 4), drop_last=True).sgd(model_loss, params)
    with pytest.warns(UserWarning, match="other numbers"):
        got = clients(model, engine).sgd(model_loss, params)
    assert trees.unequal(got, clients(model, "loop").sgd(model_loss, params)) == 0


def test_dropout_warns_once_and_loops(used):
    def dropout():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))

    model = user(dropout)
    with pytest.warns(UserWarning, match="model='mine': has dropout, so its clients train in a loop") as caught:
        fed = federation(model, (1, 7, 10))
    got, _ = play(fed, make("fedrep"), 3)
    want, _ = play(federation(model, (1, 7, 10), "loop"), make("fedrep"), 3)
    assert len(caught) == 1 and trees.unequal(got, want) == 0 and {way for _, way in used} == {"one by one"}


class Failing(nn.Linear):
    """Fails in its fifth call, whatever the values."""

    calls = 0

    def forward(self, x):
        Failing.calls += 1
        if Failing.calls >= 5:
            raise KeyError("a fault of the user's")
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*cannot be stacked")
@pytest.mark.parametrize("engine", ["auto", "stacked"])
def test_an_error_in_a_users_forward_surfaces_as_itself(engine):
    """Case F13: in a later round, and where the fault looks at a value; nothing else is told above it."""

    class Fragile(nn.Linear):
        def forward(self, x):
            if x.max() > 100:
                raise KeyError("a fault of the user's")
            return super().forward(x)

    for layer, spoil in ((Fragile, 1000), (Failing, 0)):
        Failing.calls = -100  # building a model calls it too
        model = user(lambda layer=layer: layer(6, 8))
        run = Engine(engine, model, width=20)
        c, params = clients(model, run, sizes=(10,) * 4), start(model)
        c.sgd(model_loss, params)
        c.data[2][0][3] += spoil
        Failing.calls = 4
        with pytest.raises(KeyError, match="a fault of the user's") as caught:
            c.sgd(model_loss, params)
        assert caught.value.__context__ is None and caught.traceback[-1].name == "forward"
        assert torch.get_num_threads() == 2


def test_a_loss_that_is_not_finite_in_a_later_round_names_the_client():
    engine, model = Engine("stacked", mlp()), mlp()
    params = clients(model, engine, **HARD).sgd(model_loss, start(model))
    c = clients(model, engine, ids=[4, 6, 8, 9], round=3, **HARD)
    c.data[1][0][0] = np.nan
    with pytest.raises(FloatingPointError, match=r"^round 3, client 6, phase 'tune'"):
        c.sgd(model_loss, params, phase="tune")


# The choice of an engine (case F6)


def chosen(model, method="fedavg", sizes=(30,) * 20, **options):
    """The engine that runs one at a time, and which losses were stacked, in one round of `auto`."""
    fed = federation(model, sizes, "auto", torch.float32, {"lr": 0.05}, **options)
    play(fed, make(method), 1)
    return fed.groups[0].engine.name


def test_auto_stacks_many_small_networks_of_similar_size(used):
    assert chosen("mlp") == "loop" and used == [("model_loss", "stacked")]


@pytest.mark.parametrize(
    "options",
    [{"sizes": (30,) * 2}, {"join_ratio": 0.1}, {"sizes": (640,) + (10,) * 19}],
    ids=["few", "few join", "one is large"],
)
def test_auto_loops_where_few_would_train_side_by_side(options, used):
    assert chosen("mlp", **options) == "loop" and used == [("model_loss", "one by one")]


def test_auto_takes_threads_for_convolutions_on_a_cpu_and_stacks_heads_behind_them(used):
    assert chosen("cnn", "fedrep", sizes=(3,) * 20) == "threads"
    assert used == [("head_loss", "stacked"), ("extractor_loss", "one by one")]


def test_auto_stacks_convolutions_of_tiny_images(used):
    assert chosen("cnn-small", sizes=(3,) * 20) == "threads" and used == [("model_loss", "stacked")]
    for side, stacked in ((16, True), (17, False)):
        model = models.build("cnn-small", (1, side, side), 10)
        engine = Engine("auto", model, width=8)
        assert engine.stacks("stacked", model_loss, model, 20_000, False) == stacked
        assert not engine.stacks("stacked", model_loss, model, 20_001, False)


def test_auto_does_not_stack_large_vocabularies_on_a_cpu(used):
    model = models.build("fasttext", (20,), CLASSES, vocabulary=98_635)
    engine = Engine("auto", model, "cpu", width=20)
    clients(model, engine, sizes=(3, 2)).sgd(model_loss, start(model, 2))
    assert engine.name == "threads" and used == [("model_loss", "one by one")]


def test_auto_takes_threads_for_large_models_on_a_cpu():
    for words, name in ((6_000, "loop"), (7_000, "threads")):  # of 32 numbers each
        model = models.build("fasttext", (20,), CLASSES, vocabulary=words)
        assert Engine("auto", model, "cpu").name == name and Engine("auto", model, "cuda").name == "loop"


def test_auto_does_not_stack_what_a_method_has_one_after_the_other(used):
    chosen("mlp", "fedapa", sizes=(30,) * 20)
    assert used == [("model_loss", "stacked")]
    used.clear()
    play(federation("mlp", (30,) * 20, "auto", torch.float32, {"lr": 0.05}), make("pfedhn"), 1)
    assert {way for _, way in used} == {"one by one"} and len(used) == 20


def test_auto_stacks_whatever_is_wide_on_a_gpu():
    for model in (models.build("cnn", (1, 28, 28), 10), models.build("fasttext", (20,), 4, vocabulary=98_635)):
        numbers = sum(t.numel() for t in trees.leaves(model.init()))
        wide, narrow = (Engine("auto", model, "cuda", width=width) for width in (20, 3))
        case = "stacked", model_loss, model, numbers, False
        assert wide.stacks(*case) and not narrow.stacks(*case)
        assert not Engine("auto", model, "cpu", width=20).stacks(*case)
        assert not Engine("loop", model, "cuda", width=20).stacks(*case)


def test_the_choice_does_not_depend_on_who_is_sampled(used):
    """Every round goes the same way, be it without the one large client, or of a single client."""
    for sizes, way in (((30,) * 20, "stacked"), ((640,) + (10,) * 19, "one by one")):
        fed = federation("mlp", sizes, "auto", rule={"lr": 0.05})
        for ids in ([0], [3], [3, 4, 5], range(20), range(1, 20)):
            fed.clients(np.array(ids), 1, 1).sgd(model_loss, trees.expand(fed.init(), len(ids)))
        assert used == [("model_loss", way)] * 5
        used.clear()


# Memory


def storages():
    """Bytes of all tensors that are alive, each memory once."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            memory = thing.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("model", [mlp, norm])
def test_nothing_is_held_after_training_and_nothing_that_was_given_is_changed(model):
    model = model()
    c, params = clients(model, "stacked", **HARD), start(model)
    fixed, anchor = trees.clone(params[1]), anchors(params)
    everything = (params, fixed, anchor, tuple(x for x, _ in c.data))
    given = trees.clone(everything)
    before = storages()
    got = c.sgd(extractor_loss, params[0], fixed, pull=(anchor[0], 0.1))
    assert storages() - before == sum(t.nbytes for t in trees.leaves(got))
    memories = [t.untyped_storage().data_ptr() for t in trees.leaves((got, params, fixed, anchor))]
    assert len(set(memories)) == len(memories) and all(t.is_contiguous() for t in trees.leaves(got))
    trees.tree_map(torch.Tensor.zero_, got)
    assert trees.unequal(everything, given) == 0


def test_a_refused_stack_holds_nothing_either():
    c, params = clients(mlp(), "stacked"), start(mlp())
    before = storages()
    with pytest.warns(UserWarning, match="cannot be stacked"):
        got = c.sgd(branching, params)
    kept = sum(t.nbytes for t in trees.leaves(got))
    assert storages() - before == kept


@pytest.mark.parametrize(
    ("model", "clients_of", "ratio"), [("mlp", 100, 0.1), pytest.param("resnet18", 500, 0.02, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("method", ["fedavg", "fedrep"])
def test_memory_is_flat_over_rounds_and_what_clients_keep_is_stored_once(model, clients_of, ratio, method):
    """Case F14."""
    before = storages()
    fed = federation(model, (3,) * clients_of, "auto", torch.float32, {"lr": 1e-4}, join_ratio=ratio)
    state, alive = fed.start(make(method)), []
    of_start = storages()
    head = sum(t.nbytes for t in trees.leaves(fed.init()[1]))
    assert sum(t.untyped_storage().nbytes() for t in trees.leaves(state.kept)) == head * clients_of * (
        method == "fedrep"
    )
    whole = sum(t.nbytes for t in trees.leaves(fed.init()))
    for _ in range(4):
        fed.play(make(method), state, 4)
        alive.append(storages())
    assert alive[1] == alive[2] == alive[3]
    # beyond the start: a copy of the user's modules for each of two threads and the caller's
    assert alive[3] - of_start <= 3 * whole and alive[3] > before
    assert sum(t.untyped_storage().nbytes() for t in trees.leaves(state.kept)) == head * clients_of * (
        method == "fedrep"
    )


# Two at once


def test_two_federations_at_once():
    ends = {}

    def job(seed):
        ends[seed] = play(federation(MIXED, seed=seed), make("local"))[0]

    alone = [play(federation(MIXED, seed=seed), make("local"))[0] for seed in (1, 2)]
    threads = [threading.Thread(target=job, args=(seed,)) for seed in (1, 2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [trees.unequal(ends[seed], alone[seed - 1]) for seed in (1, 2)] == [0, 0]


def test_a_loss_without_a_name_can_be_stacked_and_refused():
    c, params = clients(mlp(), "stacked"), start(mlp())
    want = c.sgd(model_loss, params)
    assert trees.unequal(c.sgd(functools.partial(model_loss), params), want) < 1e-15
    with pytest.warns(UserWarning, match="cannot be stacked"):
        c.sgd(functools.partial(branching), params)


def test_steps_and_losses_for_many_are_stacked_from_fewer_clients():
    """Gradients by torch.func are slow one client at a time, too; and losses for many need no torch.vmap."""
    model = mlp()
    for width, expected in ((2.9, []), (3.0, [2]), (4.0, [1, 2]), (8.0, [0, 1, 2])):
        engine, kinds = Engine("auto", model, width=width), ("stacked", "stacked steps", "stacked for many")
        stacked = [kind for kind in kinds if engine.stacks(kind, model_loss, model, 100, vectors=False)]
        assert stacked == [kinds[k] for k in expected] and engine.names() == ["loop", *stacked]
    for kind, most in (("stacked", 20_000), ("stacked for many", 100_000)):
        assert engine.stacks(kind, model_loss, model, most, False)
        assert not engine.stacks(kind, model_loss, model, most + 1, False)


# Losses for many clients


def test_cross_entropy_of_many_clients_is_each_ones():
    """Of logits (0, 0): log 2. The third sample of the second client does not count."""
    logits, y = torch.zeros(2, 3, 2), torch.tensor([[0, 1, 0], [1, 0, -100]])
    logits[1, 2] = torch.tensor([50.0, -50.0])
    assert models.cross_entropy(logits, y).tolist() == pytest.approx([math.log(2)] * 2)
    for one, labels in zip(logits, y, strict=True):
        assert models.cross_entropy(one, labels).item() == pytest.approx(math.log(2))


@pytest.fixture
def no_vmap(monkeypatch):
    monkeypatch.setattr(torch, "vmap", lambda f: lambda *args: pytest.fail("torch.vmap was called"))


@pytest.mark.parametrize("rule", [{}, HARD, {"drop_last": True}, {"momentum": 0.9, "epochs": [2, 0, 1, 3]}])
def test_a_loss_for_many_needs_no_vmap_and_fills_up_short_batches(no_vmap, rule):
    """Clients of 61, 1, 7 and 10 samples: one step a batch of the largest, however many sizes there are."""
    calls = []

    @models.for_many
    def counted(model, params, batch):
        calls.append(tuple(batch[1].shape))
        return model_loss(model, params, batch)

    both(mlp(), lambda c, p: c.sgd(counted, p, **rule), sizes=(61, 1, 7, 10))
    widths = [shape[0] for shape in calls if len(shape) == 2]
    assert max(widths) <= 4 and all(s[1] == 10 for s in calls if len(s) == 2 and s[0] > 1 and s != (2, 2))


@pytest.mark.parametrize(
    "step, draws, numbers",
    [
        (pfedme.moreau_step, 1, (3, 0.02, 0.1, 5.0)),
        (perfedavg.first_order, 2, (0.1, 0.1)),
        (perfedavg.exact_step, 3, (0.1, 0.1)),
    ],
)
@pytest.mark.parametrize("rule", [{}, {"drop_last": True}, {"epochs": [2, 0, 1, 3]}])
def test_a_step_for_many_needs_no_vmap_and_fills_up_short_batches(no_vmap, step, draws, numbers, rule):
    def train(c, params):
        state = {"w": params, "theta": params} if step is pfedme.moreau_step else params
        return c.steps(step, state, *numbers, draws=draws, **rule)

    both(mlp(), train, sizes=(61, 1, 7, 10))


def marked(move, extra=None):
    """A step marked for many that is none: `move` of (tensor, batch) is beyond a step for many."""

    @models.for_many
    def step(model, state, batches):
        loss, gradient, _ = value_and_slope(model, model_loss, state, batches[0])
        new = trees.tree_map(lambda t, g: t - 0.1 * g - move(t, batches[0][1]), state, gradient)
        return new, (loss, {"extra": extra(loss)} if extra else {})

    return step


@pytest.mark.parametrize("sizes", [(33,), (65,) * 10])
@pytest.mark.parametrize(
    "step",
    [
        marked(lambda t, y: 0.1 * t.mean()),
        marked(lambda t, y: 0.01 * len(y)),
        marked(lambda t, y: 0.01 * y.shape[-1]),
        marked(lambda t, y: 0, lambda loss: loss - loss.mean()),
    ],
)
def test_a_step_that_is_marked_for_many_and_is_none_is_found_out(step, sizes):
    """Also where the first batch is full and has as many samples as there are clients, or there is one client."""
    loop, stacked = (clients(mlp(), engine, sizes) for engine in ("loop", "stacked"))
    want = loop.steps(step, start(mlp(), len(sizes)))
    with pytest.warns(UserWarning, match="so clients train one by one: stacked, it gives other numbers"):
        assert trees.unequal(want, stacked.steps(step, start(mlp(), len(sizes)))) == 0


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_slopes_are_of_scalar_losses(engine):
    def each(model, params, batch):
        return F.cross_entropy(model.predict(params, batch[0]), batch[1], reduction="none")

    def step(model, params, batches):
        return trees.add(params, slope(model, each, params, batches[0])[0], -0.1), torch.zeros(())

    c = clients(mlp(), engine)
    for train in (lambda: c.gradient(each, start(mlp())), lambda: c.steps(step, start(mlp()))):
        with pytest.raises(ValueError, match="each: a loss must be a scalar tensor"):
            train()


def test_a_module_without_parameters_goes_by_vmap():
    net = models.from_modules(nn.Flatten(), nn.Linear(64, 10), (1, 8, 8), 10)
    both(net, lambda c, params: c.sgd(model_loss, params))
    both(net, lambda c, params: c.steps(perfedavg.first_order, params, 0.1, 0.1, draws=2))


def test_batches_for_many_are_not_much_wider_than_anybody_fills_them(monkeypatch):
    widths, train = [], stack.Stack.train

    def told(self, rows, batches, *rest):
        widths.append(batches.shape[-1])
        return train(self, rows, batches, *rest)

    monkeypatch.setattr(stack.Stack, "train", told)
    both(mlp(), lambda c, params: c.sgd(model_loss, params, batch_size=10**9), sizes=(61, 1, 7, 10))
    assert widths == [stack.SURELY]
    both(mlp(), lambda c, params: c.sgd(model_loss, params, batch_size=62, drop_last=True), sizes=(61, 1, 7, 10))
    assert widths == [stack.SURELY]


def test_what_cannot_do_with_many_clients_goes_by_vmap(used):
    """Convolutions, a user's module, and a loss that is marked for many but gives one number."""

    @models.for_many
    def whole(model, params, batch):
        return model_loss(model, params, batch).mean()

    for model, loss in ((models.build("cnn-small", (1, 8, 8), CLASSES), model_loss), (mlp(), whole)):
        assert torch.isfinite(trees.leaves(clients(model, "stacked").sgd(loss, start(model)))[0]).all()
    assert [way for _, way in used] == ["stacked", "stacked"]


def test_a_loss_wrongly_marked_for_many_is_found_out():
    """It mixes the clients: the mean over all of them, for each."""

    @models.for_many
    def mixed(model, params, batch):
        loss = model_loss(model, params, batch)
        return loss.mean().expand_as(loss) if loss.ndim else loss

    c = clients(mlp(), "stacked")
    with pytest.warns(UserWarning, match="cannot be stacked, so clients train one by one: stacked, it gives other"):
        got = c.sgd(mixed, start(mlp()))
    assert trees.unequal(got, clients(mlp(), "loop").sgd(model_loss, start(mlp()))) == 0
