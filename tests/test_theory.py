"""pflkit.theory on losses whose smoothness and gradients are known."""

import numpy as np
import pytest
import torch
from torch import nn

from pflkit import data, models, partition, theory, trees
from pflkit.federation import Federation
from pflkit.methods import make
from pflkit.training import Training

DIGITS = data.load("digits").some(300, 0)


def federation(names, clients=4, **options):
    nets = [models.build(name, DIGITS.shape, 10) for name in names]
    split = partition.iid(DIGITS.y, clients)
    options = {"training": Training(lr=0.1), "dtype": torch.float64} | options
    return Federation(DIGITS, split, nets, **options)


def linear(fed):
    """By hand, for a model that is one linear layer: f and its gradient of each client at W, b."""

    def f(i, W, b):
        x, y = fed.train[i]
        p = torch.softmax(x.flatten(1) @ W.T + b, 1)
        off = p - nn.functional.one_hot(y, 10)
        loss = -p[range(len(y)), y].log().mean()
        return float(loss), torch.cat([(off.T @ x.flatten(1) / len(y)).flatten(), off.mean(0)]), off, x.flatten(1)

    return f


def test_by_hand_on_a_linear_model(linear_model):
    fed = Federation(DIGITS, partition.iid(DIGITS.y, 3), linear_model, training=Training(lr=0.1), dtype=torch.float64)
    table = theory.of_rounds(fed, make("local"), 1)
    assert list(table.columns) == list(theory.COLUMNS) and table["client"].tolist() == [0, 1, 2]
    start, end, f = fed.init()[1], fed.start(make("local")), linear(fed)
    held = fed.play(make("local"), end, 1).held[1]
    for i, row in table.iterrows():
        first, g, off, x = f(i, start["weight"], start["bias"])
        last, g_end, _, _ = f(i, held["weight"][i], held["bias"][i])
        moved = torch.cat([(held["weight"][i] - start["weight"]).flatten(), held["bias"][i] - start["bias"]])
        each = [
            torch.cat([(o.T @ z / len(o)).flatten(), o.mean(0)])
            for o, z in zip(off.split(10), x.split(10), strict=True)
        ]
        assert row["fall"] == pytest.approx(first - last, rel=1e-9) and row["fall"] > 0
        assert row["L"] == pytest.approx(float((g_end - g).norm() / moved.norm()), rel=1e-9)
        assert row["gradient2"] == pytest.approx(float(g @ g), rel=1e-9)
        assert row["sigma2"] == pytest.approx(np.mean([float((b - g) @ (b - g)) for b in each]), rel=1e-9)


@pytest.fixture
def linear_model():
    return models.from_modules(nn.Flatten(), nn.Linear(64, 10), DIGITS.shape, 10, name="linear")


def test_a_client_that_stands_still_has_no_smoothness(linear_model):
    how = Training(lr=0.0)
    fed = Federation(DIGITS, partition.iid(DIGITS.y, 2), linear_model, training=how, dtype=torch.float64)
    table = theory.of_rounds(fed, make("local"), 1)
    assert table["L"].isna().all() and (table["fall"] == 0).all() and (table["gradient2"] > 0).all()


def test_rows_are_those_who_joined_with_their_own_models():
    fed = federation(("mlp-5", "mlp-4"), clients=5, join_ratio=0.4)
    table = theory.of_rounds(fed, make("fedgh"), 3)
    for t, part in table.groupby("round"):
        assert sorted(part["client"]) == fed.sample(t).tolist()
        assert all(row.model == ("mlp-5", "mlp-4")[row.client % 2] for row in part.itertuples())
    assert np.isfinite(table.drop(columns="model").to_numpy(dtype=float)).all()


def test_measuring_changes_nothing():
    fed, method = federation(("mlp-5",)), make("fedgh")
    state = fed.start(method)
    for _ in range(2):
        fed.play(method, state, 2)
    seen = []
    real = Federation.play

    def play(self, *args):
        result = real(self, *args)
        seen.append(trees.clone(args[1].server))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "play", play)
        theory.of_rounds(fed, method, 2)
    assert trees.unequal(seen[-1], state.server) == 0
