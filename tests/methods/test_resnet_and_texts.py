"""Methods on torchvision's ResNet-18, whose batch-norm statistics travel, and on texts, whose inputs are ids."""

import numpy as np
import pytest
import torch

from pflkit import data, experiment, models, partition, trees
from pflkit.federation import Federation
from pflkit.messages import received
from pflkit.methods import METHODS, make
from pflkit.training import Training


@pytest.fixture(scope="module")
def federation():
    """A function that makes a Federation of clients of given numbers of training samples; each has 4 for tests."""

    def make(x, sizes, model, rule, **options):
        y = np.arange(len(x)) % model.classes
        rows = np.split(np.arange(len(x)), np.cumsum([4 + n for n in sizes])[:-1])
        split = partition.custom(y, [own[4:] for own in rows], [own[:4] for own in rows])
        dataset = data.Dataset("random", x, y, tuple(range(model.classes)))
        return Federation(dataset, split, model, training=Training(**rule), **options)

    return make


@pytest.fixture(scope="module")
def images(federation):
    """8, 8 and 5 random images in batches of 4: the last client's last batch is a single image, which is skipped."""
    x = torch.randn(33, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = models.build("resnet18", (3, 32, 32), 3)
    return lambda **options: federation(x, (8, 8, 5), model, {"lr": 0.01, "batch_size": 4}, device="cpu", **options)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedah", "moon"])
def test_a_resnets_statistics_are_averaged_with_its_extractor(name, images, one_thread):
    fed, method, n = images(), make(name), torch.tensor([8.0, 8.0, 5.0], dtype=torch.float64)
    state = fed.start(method)
    for _ in range(2):
        result = fed.play(method, state, 2)
        server = state.server[0] if name != "fedrep" else state.server
        held = result.held[0]
        assert fed.model.buffers <= server.keys()
        for key in fed.model.buffers:
            mean = torch.einsum("c,c...->...", n / n.sum(), held[key].double())
            if key.endswith("num_batches_tracked"):
                assert server[key].dtype == held[key].dtype == torch.int64 and server[key] == mean.round()
            else:
                torch.testing.assert_close(server[key].double(), mean, atol=1e-6, rtol=1e-5)
    assert held["body.bn1.num_batches_tracked"].tolist() == [4, 4, 3]  # two rounds: (2, 2, 1) → 37/21 → 2, and again
    assert result.calls[0].log["skipped"].tolist() == [0, 0, 1]
    assert all(leaf.isfinite().all() for leaf in trees.leaves((state.server, state.kept, result.held)))
    deployed, everyone = fed.deployed(method, state, 3), np.arange(3)
    for key, buffer in server.items():  # to the last buffer the same for all
        assert all(torch.equal(deployed[0][key][i], buffer) for i in everyone)
    message = received(method.download(state.server, everyone), 3)
    alone = method.local(fed.clients([1], 3, 3), trees.take(state.kept, [1]), trees.take(message, [1]))
    together = method.local(fed.clients(everyone, 3, 3), state.kept, message)
    assert trees.unequal(alone, trees.take(together, [1])) == 0


def test_a_resnet_trains_in_threads_as_in_the_loop(images):
    ends = []
    for engine in ("loop", "auto"):
        fed = images(engine=engine)
        state = fed.start(make("fedavg"))
        fed.play(make("fedavg"), state, 1)
        ends.append(state.server)
    assert fed.groups[0].engine.name == "threads"
    assert trees.unequal(*ends) == 0


@pytest.mark.parametrize("name", METHODS)
def test_every_method_on_texts(name, federation):
    """Random ids, pads behind them: finite, integers to the end, and the vector of id 0 is zeros still."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(1, 50, (76, 12), generator=g) * (torch.arange(12) < torch.randint(1, 12, (76, 1), generator=g))
    model = models.build("fasttext", (12,), 4, vocabulary=50)
    rule = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    fed = federation(x, (15, 9, 20, 16), model, rule, join_ratio=0.5, device="cpu")
    assert all(own.dtype == torch.int64 for own, _ in fed.train + fed.test)
    history = experiment.run(make(name), fed, 2)
    joined = history.clients[history.clients["joined"]]
    assert len(joined) == {"local": 8, "dbe": 6}.get(name, 4)  # in DBE's first round all four join
    assert joined[["before", "after", "before_loss", "after_loss"]].notna().all(axis=None)
    leaves = trees.named_leaves((history.state.server, history.state.kept, fed.deployed(make(name), history.state, 2)))
    assert all(leaf.isfinite().all() for _, leaf in leaves)
    words = [leaf for key, leaf in leaves if leaf.shape[-2:] == (50, 32)]
    assert words and not any(leaf[..., 0, :].any() for leaf in words)
    assert any(not torch.equal(own, fed.init()[0]["embed.weight"]) for leaf in words for own in leaf.view(-1, 50, 32))
