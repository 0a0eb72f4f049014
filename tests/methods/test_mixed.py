"""Clients with different models: what holds for every method that allows them, and that every other one refuses."""

import dataclasses

import numpy as np
import pytest
import torch

from pflkit import experiment, models, trees
from pflkit.federation import Federation
from pflkit.messages import Rows, received, split
from pflkit.methods import METHODS, make
from pflkit.training import Clients

ALLOW = [name for name, method in METHODS.items() if getattr(method, "heterogeneous", False)]
REFUSE = [name for name in METHODS if name not in ALLOW]
NAMES = ("mlp-1", "mlp", "mlp-4")  # all with 64 representations; clients 0 and 3, 1 and 4, 2 and 5

# Settings with which nothing changes where clients do not train.
STILL = {"fedgh": {"header_lr": 0.0}}

# The model that all clients have beside their own, where a method has one; by default it would be one of theirs.
SECOND = {name: {"student": "mlp-4"} for name in ("fml", "fedkd")}

every_mixed = pytest.mark.parametrize("name", ALLOW)


@pytest.fixture(scope="module")
def mixed(digits):
    """A function that makes a Federation of 6 unequal clients with three models."""

    def make(names=NAMES, **options):
        return digits([models.build(name, (1, 8, 8), 10) for name in names], **options)

    return make


def own(whole, i):
    """Client i's part of a whole over all six clients."""
    return trees.row(whole[i % 3], i // 3)


def everything(state):
    return state.server, state.kept


def learned(state):
    """Everything but what a server knows of rounds, and but Rows, which are what clients sent it."""
    server, of_rounds = () if isinstance(state.server, Rows) else state.server, {"joined", "energy"}
    return {k: v for k, v in server.items() if k not in of_rounds} if isinstance(server, dict) else server, state.kept


def wipe(tree):
    for leaf in trees.leaves(tree):
        leaf.untyped_storage().fill_(0)


def local(fed, method, state, ids, t=3):
    """What `local` gives for each of the clients `ids`, group by group: {client: (keeps, upload, model)}."""
    ids, given = np.array(ids), {}
    message = received(method.download(state.server, ids), len(ids))
    for g, at, rows in fed.by_group(ids):
        kept = trees.take(state.kept[g], rows)
        result = method.local(fed.clients(ids[at], t, t), kept, split(message, at))
        given |= {int(i): trees.row(result, j) for j, i in enumerate(ids[at])}
    return given


@every_mixed
def test_two_rounds_finite_and_scored(name, mixed):
    """Scores are recomputed here, client by client, from each one's model and test data."""
    fed, method = mixed(join_ratio=0.5), make(name)
    history = experiment.run(method, fed, 2)
    assert all(leaf.isfinite().all() for leaf in trees.leaves(everything(history.state)))
    held = fed.deployed(method, history.state, 2)
    nets = [models.build(NAMES[i % 3], (1, 8, 8), 10) for i in range(6)]
    right = [net.predict(own(held, i), fed.test[i][0]).argmax(1) == fed.test[i][1] for i, net in enumerate(nets)]
    last = history.clients[history.clients["round"] == 3]
    assert last["client"].tolist() == list(range(6))
    assert last["before"].tolist() == [float(r.double().mean()) for r in right]
    closing = history.rounds.set_index("round").loc[3]
    assert closing["before"] == pytest.approx(np.mean(last["before"]))
    assert closing["before_pooled"] == pytest.approx(float(torch.cat(right).double().mean()))
    joined = history.clients[history.clients["joined"]]
    assert len(joined) == 2 * (6 if name == "local" else 3)
    assert joined[["before", "after", "before_loss", "after_loss"]].notna().all(axis=None)
    assert (joined["flops"] > 0).all()


@every_mixed
def test_bytes_and_flops_are_those_of_each_clients_own_model(name, mixed, digits):
    """In the first round, where nothing has passed from one to another: as if all had that model."""
    fed, method = mixed(), make(name, **SECOND.get(name, {}))
    result = fed.play(method, fed.start(method), 1)
    for g, model in enumerate(NAMES):
        one = digits(model)
        alike = one.play(method, one.start(method), 1)
        for of in ("bytes_down", "bytes_up"):
            assert getattr(result, of)[g::3].tolist() == getattr(alike, of)[g::3].tolist()
        assert result.flops()[g::3].tolist() == alike.flops()[g::3].tolist()
    assert len(set(result.flops() / fed.n)) >= 3


@every_mixed
def test_unsampled_clients_are_not_touched(name, mixed):
    fed, method = mixed(join_ratio=0.3), make(name)
    state = fed.start(method)
    for _ in range(3):
        before = trees.clone(state.kept)
        ids = fed.play(method, state, 3).ids
        fed.deployed(method, state, 3)
        for i in np.setdiff1d(np.arange(6), ids):
            assert trees.unequal(own(state.kept, i), own(before, i)) == 0


@every_mixed
def test_a_client_alone_is_itself_among_others(name, mixed, play):
    fed, method = mixed(), make(name)
    state, _ = play(fed, method, 1)
    together = local(fed, method, state, range(6))
    for ids in ([4], [2, 3]):
        for i, result in local(fed, method, state, ids).items():
            assert trees.unequal(result, together[i]) == 0
    assert trees.unequal(together[0][2], together[3][2]) > 0


@every_mixed
def test_arguments_are_not_changed(name, mixed, play):
    """Not by `local`, `merge`, `deploy` or `watch`."""
    fed, method = mixed(), make(name)
    state, _ = play(fed, method, 1)
    ids = np.arange(6)
    message = received(method.download(state.server, ids), 6)
    before = trees.clone((everything(state), message))
    uploads = []
    for g, at, _ in fed.by_group(ids):
        clients, part = fed.clients(ids[at], 3, 3), split(message, at)
        method.deploy(clients, state.kept[g], part)
        uploads.append(method.local(clients, state.kept[g], part)[1])
        if hasattr(method, "watch"):
            method.watch(state.server, state.kept[g])
    upload = trees.join(uploads, [0, 2, 4, 1, 3, 5])
    sent = trees.clone(upload)
    method.merge(state.server, ids, message, upload, fed.n)
    assert trees.unequal((everything(state), message), before) == 0
    assert trees.unequal(upload, sent) == 0


@every_mixed
def test_nothing_that_passed_is_aliased(name, mixed):
    """Wiping all that `local` got and gave, and what `deployed` returned, does not change the state."""
    fed, method = mixed(join_ratio=0.5), make(name)
    state, seen = fed.start(method), []

    class Spy:
        def __getattr__(self, name):
            return getattr(method, name)

        def local(self, clients, kept, message):
            given = method.local(clients, kept, message)
            seen.append((kept, message, *given))
            return given

    for _ in range(2):
        result = fed.play(Spy(), state, 2)
        after = trees.clone(everything(state))
        wipe((fed.deployed(Spy(), state, 2), tuple(seen), result.held))
        assert trees.unequal(everything(state), after) == 0


@every_mixed
def test_scoring_changes_nothing(name, mixed, play):
    fed, method = mixed(join_ratio=0.5), make(name)
    state = fed.start(method)
    fed.play(method, state, 2)
    first, second = (fed.deployed(method, state, 2) for _ in range(2))
    assert trees.unequal(first, second) == 0
    fed.play(method, state, 2)
    unscored, _ = play(fed, method, 2)
    assert trees.unequal(everything(state), everything(unscored)) == 0


@every_mixed
def test_a_rate_of_zero_changes_nothing(name, mixed, play):
    fed = mixed(join_ratio=0.7)
    fed.training = dataclasses.replace(fed.training, lr=0.0, momentum=0.9)
    method = make(name, **STILL.get(name, {}))
    state, _ = play(fed, method, 2)
    assert trees.unequal(learned(state), learned(fed.start(method))) == 0


@every_mixed
def test_same_seed_same_result_on_one_thread_or_two(name, mixed, play):
    """In the loop, with a client a thread, and as `auto` picks: convolutions in threads, the others in the loop."""
    ends = []
    for engine in ("loop", "threads", "auto"):
        fed = mixed(("mlp-1", "cnn-small", "mlp-4"), join_ratio=0.5, engine=engine, seed=5)
        state, rounds = play(fed, make(name), 1)
        ends.append((everything(state), rounds[-1].held))
        torch.rand(3), np.random.rand(3)
    assert [group.engine.name for group in fed.groups] == ["loop", "threads", "loop"]
    assert trees.unequal(ends[0], ends[1]) == trees.unequal(ends[0], ends[2]) == 0


@every_mixed
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_five_models_of_which_half_the_clients_join(name, kind, five):
    """Sampled clients train and hold a model of their own shapes, others stay, bit for bit; scores are finite."""
    fed, method = five(kind, join_ratio=0.5), make(name)
    state, groups = fed.start(method), len(fed.groups)
    for _ in range(3 if kind == "mlp" else 2):
        before = trees.clone(state.kept)
        result = fed.play(method, state, 3)
        for i in range(fed.num_clients):
            was, now = (trees.row(whole[i % groups], i // groups) for whole in (before, state.kept))
            assert (trees.unequal(now, was) > 0) == (i in result.ids)
        for (g, at, _), held in zip(fed.by_group(result.ids), result.held, strict=True):
            start = trees.repeat(fed.groups[g].init(), len(at))
            assert trees.unequal(held, start) > 0  # not NaN, so of its model's shapes
        everyone = np.arange(fed.num_clients)
        for held, ids in ((result.held, result.ids), (fed.deployed(method, state, 3), everyone)):
            assert np.isfinite(fed.score(held, ids)[1]).all()


@pytest.mark.parametrize("name", REFUSE)
def test_others_refuse_different_models_before_anything_is_trained(name, mixed, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was trained")

    monkeypatch.setattr(Clients, "sgd", never)
    monkeypatch.setattr(Federation, "play", never)
    line = rf"^model=mlp-1, mlp, mlp-4: {METHODS[name].__name__} needs one model for all clients "
    line += r"\(a method that allows several has heterogeneous = True\)$"
    with pytest.raises(ValueError, match=line):
        experiment.run(make(name), mixed(), 2, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_which_methods_allow_different_models():
    assert {"local", "fedgh", "fedproto", "lgfedavg", "fd", "fml", "fedkd"} == set(ALLOW)
    assert {"fedavg", "fedavg_ft", "fedprox", "fedala", "fedper", "fedrep", "fedah", "fedapa"} <= set(REFUSE)
