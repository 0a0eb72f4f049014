"""Bundled models: published sizes, cuts, seeds and refusals; your own modules: threads, modes, pickles."""

import copy
import pickle
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from pflkit import data, models, partition, trees
from pflkit.experiment import run
from pflkit.federation import Federation
from pflkit.methods import make
from pflkit.models import MODELS, Part, Trained, build, from_modules

IMAGES = {"cnn": (3, 20, 17), "cnn-small": (1, 9, 8), "lenet5": (3, 20, 17), "mlp": (2, 5)}
LAYERS = {"cnn": 4, "cnn-small": 4, "lenet5": 5, "mlp": 2}  # layers with parameters
for i in range(1, 6):
    IMAGES |= {f"cnn-{i}": (3, 20, 17), f"mlp-{i}": (2, 5)}
    LAYERS |= {f"cnn-{i}": 5, f"mlp-{i}": 3}
INPUTS = IMAGES | {"resnet18": (3, 20, 17), "fasttext": (9,)}
LAYERS |= {"resnet18": 2, "fasttext": 3}  # the body of the ResNet counts as one
pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def count(params):
    return sum(t.numel() for t in trees.leaves(params))


def inputs(shape, rows=7, dtype=torch.float32):
    return torch.randn(rows, *shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def texts(shape=(9,), rows=7, vocabulary=50):
    """Ids of words, with pads behind the first few of each text."""
    ids = torch.randint(1, vocabulary, (rows, *shape), generator=torch.Generator().manual_seed(0))
    return ids.where(torch.arange(shape[0]) < 1 + torch.arange(rows)[:, None], 0)


def small(name, **options):
    """The model, for 5 classes, and inputs for it."""
    text = name in models.TEXT
    model = build(name, INPUTS[name], 5, vocabulary=50 if text else None, **options)
    return model, texts(INPUTS[name]) if text else inputs(INPUTS[name])


@pytest.mark.parametrize(  # FedAH's 4-layer CNN: arXiv 2412.01295 with its released code
    ("shape", "classes", "r", "h", "total"),
    [
        ((1, 28, 28), 10, 576_896, 5_130, 582_026),
        ((3, 32, 32), 10, 873_408, 5_130, 878_538),
        ((3, 32, 32), 100, 873_408, 51_300, 924_708),
        ((3, 64, 64), 200, 5_592_000, 102_600, 5_694_600),
    ],
)
def test_the_papers_cnn_has_the_papers_sizes(shape, classes, r, h, total):
    model = build("cnn", shape, classes)
    assert tuple(map(count, model.init())) == (r, h) and count(model.init()) == total and model.features == 512


@pytest.mark.parametrize(("shape", "r"), [((3, 32, 32), 61_156), ((1, 28, 28), 43_576)])
def test_lenet5_has_the_sizes_of_fedapas_code(shape, r):
    model = build("lenet5", shape, 10)
    assert tuple(map(count, model.init())) == (r, 850) and model.features == 84


def test_small_models_have_the_sizes_of_their_layers():
    convolutions = 1 * 16 * 9 + 16 + 16 * 32 * 9 + 32
    assert count(build("cnn-small", (1, 8, 8), 10).init()) == convolutions + (32 * 2 * 2 + 1) * 64 + 65 * 10
    assert count(build("mlp", (1, 8, 8), 10).init()) == 65 * 64 + 65 * 10


@pytest.mark.parametrize(  # FedGH's CNN-1 to CNN-5: its released code, Models/CNNs.py
    ("name", "ten", "hundred"),
    [
        ("cnn-1", 2_621_558, 2_666_648),
        ("cnn-2", 1_815_142, 1_860_232),
        ("cnn-3", 1_320_558, 1_365_648),
        ("cnn-4", 1_060_358, 1_105_448),
        ("cnn-5", 670_058, 715_148),
    ],
)
def test_the_mixed_cnns_have_the_papers_sizes(name, ten, hundred):
    for classes, total in ((10, ten), (100, hundred)):
        model = build(name, (3, 32, 32), classes)
        assert count(model.init()) == total
        assert count(model.init()[1]) == 501 * classes and model.features == 500


def test_the_mixed_mlps_have_one_representation_and_different_sizes():
    sizes = [count(build(f"mlp-{i}", (1, 8, 8), 10).init()) for i in range(1, 6)]
    assert sizes == [65 * w + (w + 1) * 64 + 65 * 10 for w in (256, 128, 64, 32, 16)]
    assert {build(f"mlp-{i}", (1, 8, 8), 10).features for i in range(1, 6)} == {64}


def relu_first(name, shape, classes):
    """The bundled CNNs as they are usually written: ReLU before pooling."""
    wide, kernel, padding, hidden = {"cnn": (32, 5, 0, 512), "cnn-small": (16, 3, 1, 64)}[name]
    sides = torch.tensor(shape[1:])
    for _ in range(2):
        sides = (sides + 2 * padding - kernel + 1) // 2
    return nn.Sequential(
        *[nn.Conv2d(shape[0], wide, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)],
        *[nn.Conv2d(wide, 2 * wide, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()],
        *[nn.Linear(2 * wide * int(sides.prod()), hidden), nn.ReLU(), nn.Linear(hidden, classes)],
    )


@pytest.mark.parametrize("name", ["cnn", "cnn-small"])
def test_pooling_before_relu_changes_no_value_and_no_gradient(name):
    model, usual = build(name, IMAGES[name], 5), relu_first(name, IMAGES[name], 5).double()
    params = trees.tree_map(lambda t: t.double().requires_grad_(), model.init())
    x, y = inputs(IMAGES[name], dtype=torch.float64), torch.arange(7) % 5
    with torch.no_grad():
        for p, mine in zip(usual.parameters(), trees.leaves(params), strict=True):
            p.copy_(mine)
    got, want = model.predict(params, x), usual(x)
    assert trees.unequal(got, want) < 1e-12
    ours = torch.autograd.grad(F.cross_entropy(got, y), trees.leaves(params))
    theirs = torch.autograd.grad(F.cross_entropy(want, y), list(usual.parameters()))
    assert trees.unequal(tuple(ours), tuple(theirs)) < 1e-12


@EVERY_MODEL
def test_pure_functions_equal_the_modules_themselves(name):
    model, x = small(name, seed=3)
    r, h = model.init()
    model.extractor.module.eval()
    z = model.extractor.module(x)
    assert torch.equal(model.extract(r, x), z) and torch.equal(model.classify(h, z), model.head.module(z))
    assert torch.equal(model.predict((r, h), x), model.head.module(z))
    doubled = trees.tree_map(lambda t: 2 * t, h)  # the tree's values count, not the module's
    assert torch.allclose(model.classify(doubled, z), 2 * model.classify(h, z), rtol=1e-5)


@EVERY_MODEL
def test_every_cut_gives_the_same_model(name):
    whole, x = small(name)
    for k in range(LAYERS[name] + 1):
        model = small(name, head_layers=k)[0]
        r, h = model.init()
        if name != "resnet18":
            assert [sum(key.endswith("weight") for key in part) for part in (h, r)] == [k, LAYERS[name] - k]
        assert trees.unequal(tuple(trees.leaves((r, h))), tuple(trees.leaves(whole.init()))) == 0
        assert torch.equal(model.predict((r, h), x), whole.predict(whole.init(), x))
        assert model.features == model.extract(r, x)[0].numel()
    assert list(whole.init()[1]) == ["weight", "bias"]


def test_all_head_leaves_the_inputs_to_the_head():
    model = build("cnn-small", (1, 8, 8), 10, head_layers=4)
    x = inputs((1, 8, 8))
    assert model.init()[0] == {} and torch.equal(model.extract({}, x), x) and model.features == 64


@EVERY_MODEL
def test_weights_come_from_the_seed_and_nothing_else(name, monkeypatch):
    def never(seed):
        raise AssertionError("seeds the GPUs")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", never)
    first = small(name, seed=1)[0].init()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert trees.unequal(first, small(name, seed=1)[0].init()) == 0
    assert trees.unequal(first, small(name, seed=2)[0].init()) > 0
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_init_gives_values_that_can_be_changed():
    model = build("mlp", (4,), 3)
    model.init()[1]["bias"].fill_(9)
    assert model.init()[1]["bias"].max() < 9


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "said"),
    [
        ("cnn", (1, 8, 8), 10, {}, "model='cnn': does not fit inputs of shape (1, 8, 8)"),
        ("cnn", (1, 28, 15), 10, {}, "model='cnn': does not fit inputs of shape (1, 28, 15)"),
        ("cnn", (784,), 10, {}, "model='cnn': does not fit inputs of shape (784,)"),
        ("cnn", (28, 28), 10, {}, "model='cnn': does not fit inputs of shape (28, 28)"),
        ("cnn-small", (1, 3, 8), 10, {}, "model='cnn-small': does not fit inputs of shape (1, 3, 8)"),
        ("resnet", (1, 28, 28), 10, {}, "model='resnet': must be one of 'cnn', 'cnn-small', 'lenet5', 'mlp'"),
        ("mlp", (4,), 0, {}, "classes=0: must be a whole number, at least 1"),
        ("mlp", (4,), -1, {}, "classes=-1"),
        ("mlp", (4,), 2.5, {}, "classes=2.5"),
        ("mlp", (4,), True, {}, "classes=True"),
        ("mlp", (0,), 2, {}, "shape=0"),
        ("cnn", (0, 28, 28), 2, {}, "shape=0"),
        ("mlp", (4,), 2, {"head_layers": 3}, "head_layers=3: must be a whole number from 0 to 2"),
        ("cnn", (1, 28, 28), 2, {"head_layers": 5}, "head_layers=5: must be a whole number from 0 to 4"),
        ("mlp", (4,), 2, {"head_layers": -1}, "head_layers=-1"),
        ("mlp", (4,), 2, {"head_layers": True}, "head_layers=True"),
        ("mlp", (4,), 2, {"head_layers": 1.0}, "head_layers=1.0"),
    ],
)
def test_what_does_not_fit_is_refused(name, shape, classes, options, said):
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        build(name, shape, classes, **options)


# A ResNet, and texts


def test_the_resnet_is_torchvisions_and_has_the_papers_sizes():
    model = build("resnet18", (3, 64, 64), 200)
    r, h = model.init()
    own = {name: t for name, t in r.items() if name not in model.buffers}
    assert (count(own), count(h), count((own, h))) == (11_176_512, 102_600, 11_279_112) and model.features == 512
    assert (len(model.buffers), count(r) - count(own)) == (60, 9_620)
    theirs = torchvision.models.resnet18(weights=None, num_classes=200).eval()
    theirs.load_state_dict({name.removeprefix("body."): t for name, t in r.items()} | {f"fc.{k}": h[k] for k in h})
    x = inputs((3, 64, 64), 2)
    assert torch.equal(model.predict((r, h), x), theirs(x))
    y = torch.tensor([0, 1])
    F.cross_entropy(theirs.train()(x), y).backward()
    params = tuple(map(Trained, (r, h)))
    moving = [t.requires_grad_() for t in (*own.values(), *h.values())]
    grads = torch.autograd.grad(F.cross_entropy(model.predict(params, x), y), moving)
    assert all(torch.equal(g, p.grad) for g, p in zip(grads, theirs.parameters(), strict=True))
    for name, buffer in theirs.named_buffers():  # counters too
        assert r[f"body.{name}"].dtype == buffer.dtype and torch.equal(r[f"body.{name}"], buffer)


def test_the_papers_fasttext_has_the_papers_sizes():
    model = build("fasttext", (200,), 4, vocabulary=98_635)
    assert tuple(map(count, model.init())) == (3_157_376, 132) and count(model.init()) == 3_157_508
    assert (model.features, model.vocabulary) == (32, 98_635)


def test_pads_count_in_the_mean_of_a_text_and_are_not_trained():
    """Two words in nine positions: the sum of their vectors over nine; id 0 is a vector of zeros that stays so."""
    model, _ = small("fasttext")
    r, h = map(Trained, model.init())
    x = torch.tensor([[3, 7, *[0] * 7]])
    mean = (r["embed.weight"][3] + r["embed.weight"][7]) / 9
    torch.testing.assert_close(model.extract(r, x)[0], r["fc1.weight"] @ mean + r["fc1.bias"])
    assert not r["embed.weight"][0].any()
    words = r["embed.weight"].requires_grad_()
    grad = torch.autograd.grad(model.predict((r, h), x)[0, 0], words)[0]
    assert grad.any(1).nonzero().flatten().tolist() == [3, 7]


def test_your_own_modules_take_ids_where_a_vocabulary_is_given():
    bag, x = nn.EmbeddingBag(50, 6), texts()
    model = from_modules(bag, nn.Linear(6, 3), (9,), 3, vocabulary=50)
    assert torch.equal(model.extract(model.init()[0], x), bag(x)) and model.vocabulary == 50
    with pytest.raises(ValueError, match=r"model='custom': does not fit inputs of shape \(9,\)"):
        from_modules(bag, nn.Linear(6, 3), (9,), 3)


@pytest.mark.parametrize(
    ("name", "shape", "options", "said"),
    [
        ("fasttext", (1, 28, 28), {}, "model='fasttext': does not fit inputs of shape (1, 28, 28): takes ids of words"),
        ("fasttext", (200,), {}, "model='fasttext': does not fit inputs of shape (200,): takes ids of words (and vo"),
        ("fasttext", (1, 8), {"vocabulary": 9}, "model='fasttext': does not fit inputs of shape (1, 8): needs texts"),
        ("fasttext", (8,), {"vocabulary": 0}, "vocabulary=0: must be a whole number, at least 1"),
        ("fasttext", (8,), {"vocabulary": True}, "vocabulary=True"),
        ("fasttext", (8,), {"vocabulary": 9, "head_layers": 4}, "head_layers=4: must be a whole number from 0 to 3"),
        ("cnn", (200,), {"vocabulary": 9}, "model='cnn': does not fit inputs of shape (200,), ids of words: takes"),
        ("mlp", (200,), {"vocabulary": 9}, "model='mlp': does not fit inputs of shape (200,), ids of words: takes"),
        ("resnet18", (1, 28, 28), {}, "model='resnet18': does not fit inputs of shape (1, 28, 28): needs colour"),
        ("resnet18", (200,), {}, "model='resnet18': does not fit inputs of shape (200,)"),
        ("resnet18", (3, 8, 8), {"head_layers": 3}, "head_layers=3: must be a whole number from 0 to 2"),
    ],
)
def test_a_text_model_on_images_and_an_image_model_on_texts_are_refused(name, shape, options, said):
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        build(name, shape, 4, **options)


@pytest.mark.parametrize(
    ("x", "vocabulary", "said"),
    [
        (texts(), None, "model='custom': takes real numbers, but 'texts' has ids (torch.int64)"),
        (texts().float(), 50, "model='custom': takes ids (int32, int64), but 'texts' has real numbers (torch.float32)"),
        (texts().short(), 50, "model='custom': takes ids (int32, int64), but 'texts' has other values (torch.int16)"),
        (texts().byte(), 50, "model='custom': takes ids (int32, int64), but 'texts' has other values (torch.uint8)"),
        (texts().byte(), None, "model='custom': takes real numbers, but 'texts' has other values (torch.uint8)"),
        (texts() + 1, 50, "model='custom': takes ids from 0 to 49, but 'texts' has 1 to 50"),
        (texts() - 1, 50, "model='custom': takes ids from 0 to 49, but 'texts' has -1 to "),
    ],
)
def test_a_federation_refuses_a_model_of_other_inputs(x, vocabulary, said):
    extractor = nn.EmbeddingBag(50, 6) if vocabulary else nn.Linear(9, 6)
    model = from_modules(extractor, nn.Linear(6, 2), (9,), 2, vocabulary=vocabulary)
    some = data.Dataset("texts", x.repeat(4, 1), np.arange(28) % 2, (0, 1))
    with pytest.raises(ValueError, match="^" + re.escape(said)):
        Federation(some, partition.iid(some.y, 2), model)


# Your own modules


class Affine(nn.Module):
    """One number times the inputs, plus a buffer that is no parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shift", torch.tensor(0.0))
        self.meet = False

    def forward(self, x):
        if self.meet:
            BARRIER.wait(timeout=30)
        return x * self.scale + self.shift


class Noisy(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


BARRIER = threading.Barrier(2)
relu = nn.ReLU()  # one object in two places


def convolutional():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())


@pytest.mark.parametrize(
    ("shape", "extractor", "head"),
    [
        ((6,), nn.Linear(6, 4, bias=False), nn.Linear(4, 3, bias=False)),
        ((6,), nn.Sequential(nn.Linear(6, 4), relu, nn.Linear(4, 4), relu), nn.Linear(4, 3)),
        (
            (1, 7, 6),
            nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten()),
            nn.Linear(84, 3),
        ),
        ((1, 7, 7), nn.Sequential(nn.MaxPool2d(2, padding=1, ceil_mode=True), nn.Flatten()), nn.Linear(16, 3)),
        ((2, 3, 2), nn.Sequential(nn.Flatten(2), nn.Linear(6, 1), nn.Flatten()), nn.Linear(2, 3)),
        ((6,), Affine(), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))),
        ((1, 6, 6), convolutional(), nn.Linear(64, 3)),
        ((6,), nn.Identity(), nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
    ],
    ids=["no bias", "shared relu", "circular", "odd pooling", "flatten 2", "custom", "batch norm", "weight norm"],
)
def test_your_own_modules_compute_what_they_compute(shape, extractor, head):
    x = inputs(shape)
    model = from_modules(extractor, head, shape, 3)
    want = nn.Sequential(extractor, head).eval()(x)
    nn.Sequential(extractor, head).train()
    assert torch.equal(model.predict(model.init(), x), want)
    assert all(not t.requires_grad for t in trees.leaves(model.init()))


def test_trained_parameters_run_in_training_mode_and_others_in_evaluation():
    model = from_modules(convolutional(), nn.Linear(64, 3), (1, 6, 6), 3)
    assert model.batch_norm and model.dropout and model.convolutional
    x, (r, _) = inputs((1, 6, 6)), model.init()
    start = trees.clone(r)
    assert torch.equal(model.extract(r, x), model.extract(r, x)) and trees.unequal(r, start) == 0
    assert not torch.equal(model.extract(Trained(r), x), model.extract(Trained(r), x))  # dropout
    mean = F.conv2d(x, r["0.weight"], r["0.bias"]).mean((0, 2, 3))
    assert torch.allclose(r["1.running_mean"], (1 - 0.9**2) * mean, atol=1e-6)  # two updates of 1/10 from 0
    assert r["1.num_batches_tracked"].item() == 2 and r["1.num_batches_tracked"].dtype == torch.int64
    assert trees.unequal(model.init()[0], start) == 0  # the module itself has seen nothing


@pytest.mark.parametrize(("head", "drops"), [(Noisy(), True), (nn.Dropout(), True), (nn.Identity(), False)])
def test_every_kind_of_dropout_is_noticed(head, drops):
    extractor, before = nn.Linear(6, 3), torch.get_rng_state()
    assert from_modules(extractor, head, (6,), 3).dropout is drops
    assert torch.equal(torch.get_rng_state(), before)


def test_of_the_bundled_models_only_the_resnet_has_batch_norm_and_none_has_dropout():
    for name in MODELS:
        model = small(name)[0]
        assert (model.batch_norm, model.dropout) == (name == "resnet18", False)
        assert model.convolutional is ("cnn" in name or name in ("lenet5", "resnet18"))


def test_threads_do_not_mix_up_their_parameters():
    module = Affine()
    module.meet = True  # both threads are inside forward at once, each with parameters of its own
    part = Part(module)

    def use(scale):
        return part({"scale": torch.tensor(scale), "shift": torch.tensor(0.0)}, torch.ones(1)).item()

    with ThreadPoolExecutor(2) as pool:
        assert [list(pool.map(use, (2.0, 3.0))) for _ in range(20)] == [[2.0, 3.0]] * 20
    assert module.scale.item() == 1.0


@pytest.mark.parametrize("round_trip", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_model_that_was_used_can_be_copied_and_pickled(round_trip):
    x = inputs((6,))
    for model in (from_modules(Affine(), nn.Linear(6, 3), (6,), 3), build("mlp", (6,), 3)):
        again = round_trip(model)
        assert torch.equal(again.predict(model.init(), x), model.predict(model.init(), x))
        assert trees.unequal(again.init(), model.init()) == 0


@pytest.mark.parametrize(
    ("extractor", "head", "shape", "said"),
    [
        (nn.Linear(5, 4), nn.Linear(4, 3), (6,), r"does not fit inputs of shape \(6,\)"),
        (nn.BatchNorm2d(6), nn.Linear(6, 3), (6,), r"does not fit inputs of shape \(6,\)"),
        (nn.Identity(), nn.Linear(6, 4), (6,), r"gives \(2, 4\) for a batch of 2, must be \(2, 3\)"),
        (nn.Identity(), nn.Linear(6, 3), (2, 6), r"gives \(2, 2, 3\) for a batch of 2"),
        (nn.Sequential(*[nn.Linear(6, 6)] * 2), nn.Linear(6, 3), (6,), "tensor of its own"),
        (nn.Linear(6, 6), nn.Sequential(*[nn.Linear(6, 6)] * 2, nn.Linear(6, 3)), (6,), "tensor of its own"),
    ],
    ids=["width", "dimensions", "classes", "rank", "tied extractor", "tied head"],
)
def test_modules_that_do_not_make_a_model_are_refused(extractor, head, shape, said):
    with pytest.raises(ValueError, match="model='custom': .*" + said):
        from_modules(extractor, head, shape, 3)


def test_a_name_of_both_a_parameter_and_a_buffer_is_refused():  # as in trees, which know names only
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.tensor(0.0))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(x + self.shift)

    with pytest.raises(ValueError, match="a name that no buffer has"):
        from_modules(Affine(), Swapped(), (6,), 3)


def test_a_frozen_parameter_is_refused_rather_than_trained():
    extractor = nn.Linear(3, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="'weight' has requires_grad=False; make it a buffer"):
        from_modules(extractor, nn.Linear(4, 2), (3,), 2)


class UsualCNN(nn.Module):
    """As most people write it: view, which needs the usual memory layout, and work in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(3 * 6 * 6, 4)

    def forward(self, x):
        x *= 2
        return F.relu(self.fc(F.relu(self.conv(x), inplace=True).view(x.shape[0], -1)))


def test_a_usual_cnn_trains_and_leaves_the_data_alone():
    torch.manual_seed(0)
    model = from_modules(UsualCNN(), nn.Linear(4, 2), (1, 8, 8), 2)
    tiny = data.Dataset("tiny", torch.randn(24, 1, 8, 8), np.arange(24) % 2, (0, 1))
    fed = Federation(tiny, partition.iid(tiny.y, 3), model)
    before = [x.clone() for x, _ in fed.train + fed.test]
    for name in ("fedavg", "fedrep"):
        run(make(name), fed, 1)
    assert all(torch.equal(x, old) for (x, _), old in zip(fed.train + fed.test, before, strict=True))


class Restless(nn.Module):
    def forward(self, x):
        return F.dropout(x)  # in evaluation too


class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x):
        return x + self.seen


@pytest.mark.parametrize(
    ("extractor", "said"),
    [(Restless(), "evaluation mode"), (Forgetful(), "'seen' is not persistent"), (nn.GRU(3, 3), "fit")],
)
def test_modules_whose_results_would_depend_on_more_than_their_tensors_are_refused(extractor, said):
    with pytest.raises(ValueError, match=rf"model='custom': .*{said}"):
        from_modules(extractor, nn.Linear(3, 2), (3,), 2)
