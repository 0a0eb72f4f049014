"""What stands still is passed through once: how many training samples go through frozen extractors in a round."""

import numpy as np
import pytest

from pflkit import data, models, partition
from pflkit.federation import Federation
from pflkit.methods import make
from pflkit.models import Model, Trained
from pflkit.training import Training

DIGITS = data.load("digits")
SIZES = (20, 33, 51)
N = sum(SIZES)


@pytest.fixture
def passes(monkeypatch):
    """Samples that went through an extractor which is not being trained, call by call."""
    seen, real = [], Model.extract

    def extract(model, r, x):
        if not isinstance(r, Trained):
            seen.append(len(x))
        return real(model, r, x)

    monkeypatch.setattr(Model, "extract", extract)
    return seen


def federation(epochs):
    ends = np.cumsum(SIZES)
    rows = [np.arange(end - n, end) for end, n in zip(ends, SIZES, strict=True)]
    split = partition.custom(DIGITS.y, rows, list(np.arange(1000, 1030).reshape(3, 10)))
    net = models.build("mlp", DIGITS.shape, 10)
    return Federation(DIGITS, split, net, training=Training(epochs=epochs), engine="loop", device="cpu")


OFTEN = {  # settings with several epochs of training behind a frozen extractor, and the passes of a round's `local`
    "fedrep": ({"head_epochs": 3}, N),
    "fedah": ({"head_epochs": 3, "weight_epochs": 3}, N),
    "fedala": ({}, 0),  # in its first round nobody has anything to learn
    "fedpac": ({"head_epochs": 3}, 2 * N),  # before training the extractor, and after, for the means of the new one
    "fedgh": ({}, N),  # means of the trained extractor
    "fedproto": ({}, N),
    "fd": ({}, N),
    "fedfomo": ({"candidates": 2}, 3 * (4 + 7 + 10)),  # its own model and two others, on a fifth of the samples
}


@pytest.mark.parametrize(("method", "settings", "expected"), [(name, *given) for name, given in OFTEN.items()])
def test_a_frozen_extractor_sees_each_sample_once(method, settings, expected, passes):
    fed, method = federation(epochs=3), make(method, **settings)
    state = fed.start(method)
    passes.clear()
    fed.play(method, state, 2)
    assert sum(passes) == expected


def test_fedala_sees_its_share_once_however_many_epochs_it_takes(passes):
    fed, method = federation(epochs=1), make("fedala", start_epochs=20)
    state = fed.start(method)
    fed.play(method, state, 3)
    passes.clear()
    log = fed.play(method, state, 3).log()
    assert "weights" in log and sum(passes) == 16 + 26 + 41  # 0.8 of each


def test_tuning_the_head_sees_each_sample_once(passes):
    fed, method = federation(epochs=1), make("fedavg_ft", head_only=True, finetune_epochs=5)
    state = fed.start(method)
    passes.clear()
    fed.deployed(method, state, 2)
    assert sum(passes) == N
