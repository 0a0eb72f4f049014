"""Small federations to test methods on: real digits, hand-made numbers, and a client written in plain torch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import data, models, partition, training
from pflkit.federation import Federation
from pflkit.training import Training


class Scale(nn.Module):
    """x -> weight * x, one number for a layer."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, x):
        return x * self.weight


class Head(nn.Module):
    """A head of two numbers, for losses that look at nothing else."""

    def __init__(self, a, b):
        super().__init__()
        self.h = nn.Parameter(torch.tensor([float(a), float(b)]))

    def forward(self, z):
        return self.h + 0 * z


class TwoLogits(Scale):
    """z -> (0, weight * z): two classes from one number."""

    def forward(self, z):
        return torch.cat([0 * z, z * self.weight], 1)


@pytest.fixture(scope="session")
def digits():
    """A function that makes a Federation of 6 unequal clients on 240 real digits. They do not train stacked, unless
    said otherwise, so that what is one and the same is so to the bit, not but for a stack's rounding.
    """
    real = data.load("digits")
    small = data.Dataset("digits-240", real.x[:240], real.y[:240], real.classes)
    split = partition.dirichlet(small.y, 6, beta=0.5, min_size=12, seed=1)

    def make(model="mlp", head_layers=1, rule=None, **options):
        net = models.build(model, small.shape, 10, head_layers=head_layers) if isinstance(model, str) else model
        options = {"engine": "threads" if "cnn" in str(model) else "loop"} | options
        return Federation(small, split, net, training=Training(lr=0.05, **(rule or {})), **options)

    return make


@pytest.fixture(scope="session")
def by_hand():
    """A function that makes a Federation of given training samples: clients = [(x [n, ...], y [n]), ...].

    `test` has the same form; without it each client is tested on a copy of its first training sample.
    """

    def make(model, clients, test=None, rule=None, **options):
        parts = [(torch.as_tensor(x, dtype=torch.float64), y) for x, y in clients]
        parts += [(torch.as_tensor(x, dtype=torch.float64), y) for x, y in test or [(x[:1], y[:1]) for x, y in clients]]
        ends = np.cumsum([len(y) for _, y in parts])
        rows = np.split(np.arange(ends[-1]), ends[:-1])
        x, y = torch.cat([x for x, _ in parts]), np.concatenate([np.asarray(y, np.int64) for _, y in parts])
        dataset = data.Dataset("by hand", x, y, tuple(range(model.classes)))
        split = partition.custom(y, rows[: len(clients)], rows[len(clients) :])
        options = {"dtype": torch.float64, "training": Training(**(rule or {}))} | options
        return Federation(dataset, split, model, **options)

    return make


@pytest.fixture(scope="session")
def two_number_head():
    """A net whose extractor does nothing, and whose head is two numbers, both 0."""
    return models.from_modules(nn.Identity(), Head(0, 0), (1,), 2)


@pytest.fixture(scope="session")
def scalar_net():
    """A function that makes the net y = h r x: one output to regress, or two classes with logits (0, h r x)."""

    def make(r, h, classes=1):
        head = Scale(h) if classes == 1 else TwoLogits(h)
        return models.from_modules(Scale(r), head, (1,), classes, name="scalar")

    return make


@pytest.fixture(scope="session")
def linear():
    """A function that makes a linear layer, the same one each time."""

    def make(inputs, outputs, seed=0):
        layer, g = nn.Linear(inputs, outputs), torch.Generator().manual_seed(seed)
        for p in layer.parameters():
            p.data.normal_(generator=g)
        return layer

    return make


@pytest.fixture(scope="session")
def uneven(by_hand, linear):
    """A function that makes a Federation of clients with 1, 7, 10 and 11 samples of 3 classes, batches of 10, and two
    random layers with a ReLU between them: small, and nothing about it is symmetric.
    """

    def make(**options):
        g, sizes = torch.Generator().manual_seed(0), (1, 7, 10, 11)
        net = models.from_modules(nn.Sequential(linear(4, 5), nn.ReLU()), linear(5, 3), (4,), 3)
        samples = [(torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g).tolist()) for n in sizes]
        test = [(torch.randn(3, 4, generator=g), [0, 1, 2]) for _ in sizes]
        return by_hand(net, samples, test, **options)

    return make


@pytest.fixture(scope="session")
def five(digits, by_hand):
    """A function that makes a Federation of mlp-1 to mlp-5 on digits (6 clients), or of cnn-1 to cnn-5 on random
    images (7 clients); the third, fourth and fifth models have one client each.
    """

    def make(kind, **options):
        if kind == "mlp":
            return digits([models.build(f"mlp-{k}", (1, 8, 8), 10) for k in range(1, 6)], **options)
        g = torch.Generator().manual_seed(0)
        clients = [(torch.randn(4, 1, 16, 16, generator=g), [k % 3, k % 3, 1, 2]) for k in range(7)]
        nets = [models.build(f"cnn-{k}", (1, 16, 16), 3) for k in range(1, 6)]
        fed = by_hand(nets[0], clients, rule={"lr": 0.05, "batch_size": 2}, dtype=torch.float32)
        return Federation(fed.dataset, fed.partition, nets, training=fed.training, **options)

    return make


@pytest.fixture
def in_order(monkeypatch):
    """Every epoch's batches come in the order of the data, whatever the client, round and phase."""

    class InOrder:
        def permutation(self, n):
            return np.arange(n)

    monkeypatch.setattr(training, "rng", lambda *names: InOrder())


@pytest.fixture(scope="session")
def play():
    """A function that plays `rounds` rounds of a method: the state it ends in, and what each round did."""

    def run(fed, method, rounds):
        state = fed.start(method)
        return state, [fed.play(method, state, rounds) for _ in range(rounds)]

    return run


@pytest.fixture(scope="session")
def plain():
    """The class of one client in plain torch, to check a round of a method against: modules, torch.optim, a loop."""
    return Plain


class Plain:
    def __init__(self, fed, i):
        self.x, self.y, self.rule = *fed.train[i], fed.training
        self.r, self.h = (copy.deepcopy(part.module).double() for part in (fed.model.extractor, fed.model.head))

    def load(self, r=None, h=None):
        for module, state in ((self.r, r), (self.h, h)):
            if state is not None:
                module.load_state_dict(state)
        return self

    def batches(self):
        step = self.rule.batch_size
        end = len(self.y) // step * step if self.rule.drop_last else len(self.y)
        return [(self.x[s : s + step], self.y[s : s + step]) for s in range(0, end, step)]

    def train(self, *modules, epochs=1):
        """SGD that moves `modules` only."""
        self.r.train(), self.h.train()
        rule = {"lr": self.rule.lr, "momentum": self.rule.momentum, "weight_decay": self.rule.weight_decay}
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], **rule)
        for _ in range(epochs):
            for x, y in self.batches():
                optimizer.zero_grad()
                self.r.zero_grad(), self.h.zero_grad()
                nn.functional.cross_entropy(self.h(self.r(x)), y).backward()
                optimizer.step()
        return self

    def state(self):
        return tuple({k: v.detach().clone() for k, v in m.state_dict().items()} for m in (self.r, self.h))

    @staticmethod
    def mean(states, n):
        """Σ n_i s_i / Σ n_i of dicts."""
        return {k: sum(m * s[k] for m, s in zip(n, states, strict=True)) / sum(n) for k in states[0]}
