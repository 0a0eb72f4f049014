"""Models as pure functions: an extractor r and a head h, and where one ends and the other begins.

    z = model.extract(r, x)         representations [B, r] of inputs x [B, ...]
    logits = model.classify(h, z)   [B, classes]

`r` and `h` are dicts of tensors. The bundled networks, but for torchvision's ResNet, are chains of torch layers that
run as plain functions of such a dict, so that many clients can use one model at once; any other torch module works too
(`from_modules`). Inputs are real numbers, or the ids of a vocabulary's words: whole numbers from 0.
"""

import copy
import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from pflkit import trees
from pflkit.checks import choice, integer
from pflkit.streams import GLOBAL, torch_seed


class Trained(dict):
    """Parameters being trained: on these, batch-norm and dropout work as in training; on others, as in evaluation."""


class RowsTrained(Trained):
    """Parameters trained by steps that are their gradient times a rate, and no more: then an embedding's gradient may
    be a sparse tensor, of the few rows that a batch has, and a step need not pass over all others.
    """


def as_trained(tree, kind=Trained):
    """The same tree with its dicts as Trained, or as RowsTrained."""
    if isinstance(tree, tuple):
        return tuple(as_trained(part, kind) for part in tree)
    return kind((name, as_trained(part, kind)) for name, part in tree.items()) if isinstance(tree, dict) else tree


class Mean(nn.Module):
    """The mean over all positions: [B, length, ...] -> [B, ...]."""

    def forward(self, x):
        return x.mean(1)


def embedding(x, weight, padding_idx, rows=False):
    """F.embedding(x, weight, padding_idx), also under torch.vmap, which does not keep the pad's row from learning.

    rows: the gradient may be sparse. It is on a CPU, where adding all rows takes ten times as long, if the weight is
    what is trained, and not made of that, for of a sparse gradient not all functions have a derivative.
    """
    if rows and weight.is_leaf and weight.device.type == "cpu":
        return F.embedding(x, weight, padding_idx, sparse=True)
    pads = (x == padding_idx).unsqueeze(-1)
    return torch.where(pads, weight[padding_idx].detach(), F.embedding(x, weight))


def _padded(layer, x):
    return embedding(x, layer.weight, layer.padding_idx)


def cross_entropy(logits, y):
    """The mean cross-entropy of ONE client's logits [B, K] for labels y [B]; of C clients', [C, B, K] and [C, B]: [C].

    Samples with the label -100 do not count: they fill up batches that are shorter than others.
    """
    if y.ndim == 1:
        return F.cross_entropy(logits, y)
    if logits.shape[-1] < 16:  # torch's softmax along so short a last axis takes up to five times as long
        each = F.cross_entropy(logits.mT, y, reduction="none")
    else:
        each = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    return each.sum(1) / (y >= 0).sum(1)


def for_many(loss):
    """Marks a loss of ONE client that gives the losses [C] of C clients, if all it gets has a client axis in front; or
    a step that gives their states and losses.

    So does a loss that is `cross_entropy`, above, of what a model's extract, classify and predict give, by trees that
    may be mixed element by element, and a step that mixes such trees and the slopes of such a loss. Stacked clients
    train by it without torch.vmap, which takes several times as long.
    """
    loss.for_many = True
    return loss


def linear(x, weight, bias):
    """A linear layer's outputs of x [B, in], or, with C clients' weights [C, out, in], of x [C, B, in]."""
    if weight.ndim == 2:
        return F.linear(x, weight, bias)
    # This way round, so that the weights' gradients are laid out as the weights are, to which they are added.
    return (torch.bmm(weight, x.mT) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x.mT)).mT


LAYERS = {  # the layers of the bundled models, with the settings that occur there
    nn.Conv2d: lambda layer, p, n, x: F.conv2d(
        x, p[n + ".weight"], p[n + ".bias"], layer.stride, layer.padding, layer.dilation, layer.groups
    ),
    nn.Linear: lambda layer, p, n, x: linear(x, p[n + ".weight"], p[n + ".bias"]),
    nn.Embedding: lambda layer, p, n, x: embedding(
        x, p[n + ".weight"], layer.padding_idx, rows=isinstance(p, RowsTrained)
    ),
    Mean: lambda layer, p, n, x: x.mean(1),
    nn.MaxPool2d: lambda layer, p, n, x: F.max_pool2d(x, layer.kernel_size, layer.stride),
    nn.ReLU: lambda layer, p, n, x: F.relu(x),
    nn.Flatten: lambda layer, p, n, x: x.flatten(1),
}
MANY = {nn.Linear: LAYERS[nn.Linear], nn.ReLU: LAYERS[nn.ReLU], nn.Flatten: lambda layer, p, n, x: x.flatten(2)}


class Part:
    """A torch module as a pure function: part(params, x).

    A linear layer, or the chain of layers of a bundled model (`plain`), is run by torch.nn.functional. Any other module
    is called through torch.func.functional_call on a copy of its own in each thread: threads sharing a module mix up
    their parameters.

    part(params [C, ...], x [C, B, ...]) is of C clients, where the layers are linear ones and ReLU (MANY);
    NotImplementedError for others.
    """

    def __init__(self, module, plain=False):
        self.module, self.plain = module, plain
        self.buffers = frozenset(name for name, _ in module.named_buffers())
        kinds = {type(m) for m in module.modules()}
        self.batch_norm = any(issubclass(k, nn.modules.batchnorm._BatchNorm) for k in kinds)
        self.dropout = any(issubclass(k, nn.modules.dropout._DropoutNd) for k in kinds)
        self.first = next(((name, t.ndim) for name, t in module.named_parameters()), None)
        self.layers = list(module.named_children())
        self._copies = threading.local()

    def __call__(self, params, x):
        if type(self.module) is nn.Linear:
            return linear(x, params["weight"], params.get("bias"))
        layers = MANY if self.first and params[self.first[0]].ndim > self.first[1] else LAYERS
        if self.plain:
            for name, layer in self.layers:
                if type(layer) not in layers:
                    raise NotImplementedError(f"{type(layer).__name__} of many clients")
                x = layers[type(layer)](layer, params, name, x)
            return x
        if layers is MANY:
            raise NotImplementedError(f"{type(self.module).__name__} of many clients")
        if not hasattr(self._copies, "module"):
            self._copies.module = copy.deepcopy(self.module)
            for layer in self._copies.module.modules():
                if (
                    type(layer) is nn.Embedding
                    and layer.padding_idx is not None
                    and not (layer.max_norm or layer.scale_grad_by_freq or layer.sparse)
                ):
                    layer.forward = functools.partial(_padded, layer)  # right under torch.vmap too
        module = self._copies.module.train(isinstance(params, Trained))
        x = x.clone()  # for the module may work in place, and this is the data itself
        return torch.func.functional_call(module, dict(params), (x,))

    def state(self):
        """The module's own parameters and buffers, copied: the initial values."""
        return {name: t.detach().clone() for name, t in self.module.state_dict().items()}

    def __getstate__(self):  # threads' copies stay behind when a model goes to another process
        return {k: v for k, v in self.__dict__.items() if k != "_copies"}

    def __setstate__(self, state):
        self.__dict__.update(state, _copies=threading.local())


class Model:
    """An extractor and a head for inputs of `shape` (one sample) and `classes` classes.

    vocabulary: None for inputs that are real numbers; V for ids of words, whole numbers from 0 to V-1.
    Raises ValueError where the modules do not turn a batch [B, *shape] into logits [B, classes], and where they cannot
    be told apart as trees of tensors: two layers that share a parameter, or one name for a parameter and a buffer.
    """

    def __init__(self, name, extractor, head, shape, classes, plain=False, vocabulary=None):
        self.name, self.shape, self.classes, self.plain = name, tuple(shape), classes, plain
        self.vocabulary = None if vocabulary is None else integer("vocabulary", vocabulary, 1)
        self.extractor, self.head = Part(extractor, plain), Part(head, plain)
        parts = (self.extractor, self.head)
        self.batch_norm, self.dropout = any(p.batch_norm for p in parts), any(p.dropout for p in parts)
        self.convolutional = any(isinstance(m, nn.Conv2d) for p in parts for m in p.module.modules())
        # Whether the parts can be called on many clients' params at once.
        self.many = plain and all(type(m) in MANY for p in parts for _, m in p.layers or [("", p.module)])
        named = [item for p in parts for item in p.module.named_parameters(remove_duplicate=False)]
        self.buffers = self.extractor.buffers | self.head.buffers
        if len({id(p) for _, p in named}) < len(named) or self.buffers & {n for n, _ in named}:
            raise ValueError(f"model={name!r}: every parameter needs a tensor of its own and a name that no buffer has")
        if frozen := [n for n, p in named if not p.requires_grad]:
            raise ValueError(f"model={name!r}: {frozen[0]!r} has requires_grad=False; make it a buffer, to stand still")
        if lost := self.buffers - set().union(*self.init()):
            raise ValueError(f"model={name!r}: buffer {min(lost)!r} is not persistent, so it could not travel")
        try:
            with GLOBAL, torch.no_grad(), torch.random.fork_rng(devices=[]):
                two = torch.zeros(2, *self.shape, dtype=None if vocabulary is None else torch.int64)
                start = torch.get_rng_state()
                self.features = self.extract(self.extractor.state(), two).shape[1:].numel()
                out, before = self.predict(self.init(), two), torch.get_rng_state()
                self.predict(tuple(map(Trained, self.init())), two)  # F.dropout in a custom module shows only here
                self.dropout |= not torch.equal(before, torch.get_rng_state())
                if not torch.equal(start, before):
                    raise ValueError("random in evaluation mode; F.dropout takes training=self.training")
        except (RuntimeError, IndexError, KeyError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"model={name!r}: does not fit inputs of shape {self.shape}: {error}") from error
        if out.shape != (2, classes):
            raise ValueError(f"model={name!r}: gives {tuple(out.shape)} for a batch of 2, must be (2, {classes})")

    def extract(self, r, x):
        """Representations [B, ...] of inputs `x` [B, *shape] by the extractor's parameters `r`."""
        return self.extractor(r, x)

    def classify(self, h, z):
        """Logits [B, classes] of representations `z` by the head's parameters `h`."""
        return self.head(h, z)

    def predict(self, params, x):
        """Logits [B, classes] of inputs `x`; `params` = (extractor, head)."""
        return self.classify(params[1], self.extract(params[0], x))

    def is_buffer(self, name):
        """Whether the leaf `name` of a tree (see trees.named_leaves) is a buffer, which is not trained."""
        return name.rsplit("/")[-1] in self.buffers

    def size(self):
        """How many parameters it has, buffers left out."""
        return sum(p.numel() for part in (self.extractor, self.head) for p in part.module.parameters())

    def init(self):
        """The model's initial parameters (extractor, head)."""
        return self.extractor.state(), self.head.state()


def trained(model, tree):
    """Of each leaf of a tree, whether it is trained: a floating one that is no buffer."""
    return [leaf.is_floating_point() and not model.is_buffer(name) for name, leaf in trees.named_leaves(tree)]


@dataclass(frozen=True)
class Pair:
    """Two models that train side by side on the same inputs, as losses and steps get them: a client's `own`, and the
    `shared` one, whose architecture is everybody's.

    Raises ValueError where one's parameter has the name of the other's buffer, for a tree may hold both.
    """

    own: Model
    shared: Model

    def __post_init__(self):
        for one, other in ((self.own, self.shared), (self.shared, self.own)):
            if mixed := other.buffers & (set().union(*one.init()) - one.buffers):
                raise ValueError(
                    f"model={one.name!r}: {min(mixed)!r} is a parameter here and a buffer of {other.name!r}; rename one"
                )

    @property
    def name(self):
        return f"{self.own.name} beside {self.shared.name}"

    @property
    def classes(self):
        return self.own.classes

    @property
    def plain(self):
        return self.own.plain and self.shared.plain

    @property
    def many(self):
        return self.own.many and self.shared.many

    @property
    def batch_norm(self):
        return self.own.batch_norm or self.shared.batch_norm

    @property
    def dropout(self):
        return self.own.dropout or self.shared.dropout

    def is_buffer(self, name):
        """As Model.is_buffer, of a leaf of either."""
        return self.own.is_buffer(name) or self.shared.is_buffer(name)


def from_modules(extractor, head, shape, classes, name="custom", vocabulary=None):
    """A Model of your own two torch modules; their present values are the initial parameters.

    vocabulary: how many ids there are, where inputs are ids, whole numbers from 0, and not real numbers.
    """
    return Model(name, extractor, head, shape, classes, vocabulary=vocabulary)


def cnn(shape, classes):
    """The 4-layer CNN of the FedAH paper (its reference [8]): two 5x5 convolutions without padding, two linear layers.

    582,026 parameters for 1x28x28 and 10 classes.
    """
    channels, height, width = _image("cnn", shape, 16)
    after = _twice_pooled(height, width)
    return [
        *[("conv1", nn.Conv2d(channels, 32, 5)), ("pool1", nn.MaxPool2d(2)), ("relu1", nn.ReLU())],
        *[("conv2", nn.Conv2d(32, 64, 5)), ("pool2", nn.MaxPool2d(2)), ("flat", nn.Flatten()), ("relu2", nn.ReLU())],
        *[("fc1", nn.Linear(64 * after[0] * after[1], 512)), ("relu3", nn.ReLU())],
        ("fc2", nn.Linear(512, classes)),
    ]  # ReLU after pooling and flattening gives the same values and gradients, on fewer numbers and in one layout


def lenet5(shape, classes):
    """LeNet-5, FedAPA's released code's default: two 5x5 convolutions without padding, three linear layers.

    An extractor of 61,156 parameters for 3x32x32, 43,576 for 1x28x28. ReLU and maximum pooling are ours.
    """
    channels, height, width = _image("lenet5", shape, 16)
    after = _twice_pooled(height, width)
    return [
        *[("conv1", nn.Conv2d(channels, 6, 5)), ("pool1", nn.MaxPool2d(2)), ("relu1", nn.ReLU())],
        *[("conv2", nn.Conv2d(6, 16, 5)), ("pool2", nn.MaxPool2d(2)), ("flat", nn.Flatten()), ("relu2", nn.ReLU())],
        *[("fc1", nn.Linear(16 * after[0] * after[1], 120)), ("relu3", nn.ReLU())],
        *[("fc2", nn.Linear(120, 84)), ("relu4", nn.ReLU()), ("fc3", nn.Linear(84, classes))],
    ]


def cnn_small(shape, classes):
    """A CNN for small images such as the 8x8 digits: two padded 3x3 convolutions, two linear layers (ours)."""
    channels, height, width = _image("cnn-small", shape, 4)
    return [
        *[("conv1", nn.Conv2d(channels, 16, 3, padding=1)), ("pool1", nn.MaxPool2d(2)), ("relu1", nn.ReLU())],
        *[("conv2", nn.Conv2d(16, 32, 3, padding=1)), ("pool2", nn.MaxPool2d(2)), ("relu2", nn.ReLU())],
        *[("flat", nn.Flatten()), ("fc1", nn.Linear(32 * (height // 4) * (width // 4), 64)), ("relu3", nn.ReLU())],
        ("fc2", nn.Linear(64, classes)),
    ]


def mlp(shape, classes):
    """One hidden layer of 64 units (ours): the quickest model, for small inputs."""
    return [
        *[("flat", nn.Flatten()), ("fc1", nn.Linear(torch.Size(shape).numel(), 64)), ("relu1", nn.ReLU())],
        ("fc2", nn.Linear(64, classes)),
    ]


def cnn_mixed(name, filters, units, shape, classes):
    """CNN-1 to CNN-5 of the FedGH code: two 5x5 convolutions, three linear layers, 500 features."""
    channels, height, width = _image(name, shape, 16)
    after = _twice_pooled(height, width)
    return [
        *[("conv1", nn.Conv2d(channels, 16, 5)), ("pool1", nn.MaxPool2d(2)), ("relu1", nn.ReLU())],
        *[("conv2", nn.Conv2d(16, filters, 5)), ("pool2", nn.MaxPool2d(2)), ("flat", nn.Flatten())],
        *[("relu2", nn.ReLU()), ("fc1", nn.Linear(filters * after[0] * after[1], units)), ("relu3", nn.ReLU())],
        *[("fc2", nn.Linear(units, 500)), ("relu4", nn.ReLU()), ("fc3", nn.Linear(500, classes))],
    ]


def mlp_mixed(units, shape, classes):
    """MLP-1 to MLP-5 (ours): two hidden layers, the first of `units` units, all with 64 representations, as the mlp."""
    return [
        *[("flat", nn.Flatten()), ("fc1", nn.Linear(torch.Size(shape).numel(), units)), ("relu1", nn.ReLU())],
        *[("fc2", nn.Linear(units, 64)), ("relu2", nn.ReLU()), ("fc3", nn.Linear(64, classes))],
    ]


def resnet18(shape, classes):
    """Torchvision's ResNet-18 as it is, untrained: colour images of any size, batch-norm; its last linear layer apart.

    11,279,112 parameters and 9,620 numbers in buffers for 200 classes.
    """
    import torchvision  # here, because that takes a second

    if len(shape) != 3 or shape[0] != 3:
        raise ValueError(
            f"model='resnet18': does not fit inputs of shape {shape}: needs colour images (3, height, width); "
            "try 'cnn', 'cnn-small' or 'mlp'"
        )
    body = torchvision.models.resnet18(weights=None, num_classes=classes)
    head, body.fc = body.fc, nn.Identity()
    return [("body", body), ("fc", head)]


def fasttext(shape, classes, vocabulary):
    """The fastText of the FedAH paper's code: the mean of a text's word vectors, and two linear layers with no ReLU.

    Id 0 is a pad, or an unknown word: a vector of zeros that is not trained. It counts in the mean, which is over all
    positions. 3,157,508 parameters for 98,635 words and 4 classes.
    """
    if len(shape) != 1:
        raise ValueError(f"model='fasttext': does not fit inputs of shape {shape}: needs texts (length,)")
    return [
        *[("embed", nn.Embedding(vocabulary, 32, padding_idx=0)), ("mean", Mean())],
        *[("fc1", nn.Linear(32, 32)), ("fc2", nn.Linear(32, classes))],
    ]


CNNS = {"cnn-1": (32, 2000), "cnn-2": (16, 2000), "cnn-3": (32, 1000), "cnn-4": (32, 800), "cnn-5": (32, 500)}
MLPS = {"mlp-1": 256, "mlp-2": 128, "mlp-3": 64, "mlp-4": 32, "mlp-5": 16}
MODELS = {
    **{"cnn": cnn, "cnn-small": cnn_small, "lenet5": lenet5, "mlp": mlp},
    **{name: functools.partial(cnn_mixed, name, *size) for name, size in CNNS.items()},
    **{name: functools.partial(mlp_mixed, units) for name, units in MLPS.items()},
    **{"resnet18": resnet18, "fasttext": fasttext},
}
TEXT = ("fasttext",)  # the models of ids


def build(name, shape, classes, *, vocabulary=None, head_layers=1, seed=0):
    """A bundled model for inputs of `shape`, cut so that the head is its last `head_layers` layers with parameters.

    `vocabulary` is how many ids there are where inputs are the ids of words, as a text model needs them. `head_layers`
    goes from 0 (all is extractor, the head is empty) to the number of such layers (all is head); of a ResNet all before
    its last linear layer counts as one. Initial values are torch's or torchvision's default, drawn from `seed`; the
    global random state is left alone. Raises ValueError for an unknown name, a cut that does not exist and a model that
    does not fit the inputs.
    """
    choice("model", name, MODELS)
    integer("classes", classes, 1)
    for side in shape:
        integer("shape", side, 1)
    if vocabulary is not None:
        integer("vocabulary", vocabulary, 1)
    if (name in TEXT) != (vocabulary is not None):
        found = f"inputs of shape {tuple(shape)}" + (", ids of words" if vocabulary else "")
        advice = "takes real numbers; try " + " or ".join(map(repr, TEXT))
        if name in TEXT:
            advice = "takes ids of words (and vocabulary=, how many there are); try 'cnn' or 'mlp'"
        raise ValueError(f"model={name!r}: does not fit {found}: {advice}")
    with GLOBAL, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch_seed(seed, "weights"))  # the CPU's: no GPU's state is touched
        layers = MODELS[name](tuple(shape), classes, *([] if vocabulary is None else [vocabulary]))
    cuts = [i for i, (_, layer) in enumerate(layers) if any(True for _ in layer.parameters())]
    integer("head_layers", head_layers, 0, len(cuts))
    cut = [*cuts, len(layers)][len(cuts) - head_layers]
    if head_layers == len(cuts):
        cut = 0  # what comes before the first parameters, a flattening, goes with them
    extractor, head = (nn.Sequential(OrderedDict(part)) for part in (layers[:cut], layers[cut:]))
    head = head[0] if len(head) == 1 else head  # one layer: "weight", "bias"
    plain = all(type(layer) in LAYERS for _, layer in layers)
    return Model(name, extractor, head, shape, classes, plain, vocabulary)


def _twice_pooled(*sides):
    """The sides of an image after two 5x5 convolutions without padding, each followed by 2x2 pooling."""
    return [((side - 4) // 2 - 4) // 2 for side in sides]


def _image(name, shape, least):
    if len(shape) != 3 or min(shape[1:]) < least:
        others = " or ".join(repr(m) for m in ("cnn-small", "mlp") if m != name)
        raise ValueError(
            f"model={name!r}: does not fit inputs of shape {tuple(shape)}: needs images (channels, height, width) "
            f"of at least {least} x {least}; try {others}"
        )
    return shape
