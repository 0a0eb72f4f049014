"""pflkit.federation: who joins, what travels, who holds what; and what does not fit is refused by name."""

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch

from pflkit import data, models, partition, training, trees
from pflkit.federation import Federation
from pflkit.messages import Rows, Shared, received
from pflkit.methods.fedavg import model_loss
from pflkit.training import Training

DIGITS = data.load("digits")
SMALL = data.Dataset("digits-400", DIGITS.x[:400], DIGITS.y[:400], DIGITS.classes)


def federation(clients=20, **options):
    split = partition.iid(SMALL.y, clients)
    net = models.build("mlp", SMALL.shape, 10)
    return Federation(SMALL, split, net, **{"training": Training(lr=0.05), "engine": "loop"} | options)


@dataclasses.dataclass(frozen=True)
class Echo:
    """A method on two numbers a client: nobody trains; clients upload what they were told to."""

    server_value: float = 1.0

    def server(self, fed):
        return {"a": torch.full((2,), self.server_value)}

    def client(self, group):
        return {"own": torch.arange(len(group.ids) * 2.0).reshape(-1, 2)}

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        return kept, kept, message

    def merge(self, server, ids, message, upload, n):
        return {"a": upload["own"].mean(0)}

    def deploy(self, clients, kept, message):
        return message


# --- who joins -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "clients", "count"),
    [
        (0.01, 20, 1),  # none would be 0.2 of a client: one joins
        (1e-9, 20, 1),
        (0.1, 20, 2),
        (0.3, 10, 3),
        (0.29, 10, 3),
        (0.31, 10, 3),
        (0.7, 10, 7),
        (1, 20, 20),
        (1.0, 7, 7),
        (0.5, 7, 4),  # 3.5, halves to even
        (0.5, 5, 2),  # 2.5
    ],
)
def test_count_is_the_rounded_share_and_at_least_one(ratio, clients, count):
    fed = federation(clients, join_ratio=ratio)
    assert [len(fed.sample(t)) for t in range(1, 6)] == [count] * 5


@pytest.mark.parametrize(
    "ratio",
    [
        *(0, -0.1, 1.5, float("nan"), float("inf"), "0.5", True, None, np.array([0.1, 0.2])),
        *((0.5, 0.2), (0, 0.5), (0.5, 1.1), (0.1, "1"), (), (0.5,), (0.1, 0.2, 0.3)),
    ],
    ids=repr,
)
def test_other_ratios_are_refused(ratio):
    with pytest.raises(ValueError, match=r"join_ratio="):
        federation(4, join_ratio=ratio)


def test_ids_are_sorted_distinct_clients_and_differ_from_round_to_round():
    fed = federation(join_ratio=0.4)
    draws = [fed.sample(t) for t in range(1, 31)]
    for ids in draws:
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert len(ids) == 8
        assert set(ids) <= set(range(20))
    assert len({tuple(ids) for ids in draws}) > 20
    assert set(np.concatenate(draws)) == set(range(20))


def test_ids_depend_on_seed_and_round_only():
    one = federation(join_ratio=0.4, seed=7)
    other = federation(join_ratio=0.4, seed=7, training=Training(lr=1.0, epochs=3), dtype=torch.float64)
    assert [one.sample(t).tolist() for t in (3, 1, 2)] == [other.sample(t).tolist() for t in (3, 1, 2)]
    assert one.sample(1).tolist() != federation(join_ratio=0.4, seed=8).sample(1).tolist()


def test_a_range_draws_every_count_in_it_and_no_other():
    fed = federation(10, join_ratio=(0.2, 0.7))
    assert {len(fed.sample(t)) for t in range(1, 301)} == {2, 3, 4, 5, 6, 7}
    assert {len(federation(20, join_ratio=(0.001, 0.05)).sample(t)) for t in range(1, 20)} == {1}


@pytest.mark.parametrize(
    ("ratio", "clients", "share"),
    [(0.5, 4, 0.5), (1, 7, 1), (0.01, 20, 0.05), (0.5, 5, 0.4), ((0.2, 0.7), 10, 0.45), ((0.01, 0.2), 10, 0.15)],
)
def test_clients_know_the_share_that_joins_on_average(ratio, clients, share):
    fed = federation(clients, join_ratio=ratio)
    assert fed.clients([0], 1, 1).join_ratio == pytest.approx(share, abs=1e-15)
    assert np.mean([len(fed.sample(t)) for t in range(1, 2001)]) / clients == pytest.approx(share, rel=0.05)


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed=-1: must be a whole number, at least 0"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": True}, "seed=True"),
        ({"dtype": torch.float16}, "dtype=torch.float16: must be one of"),
        ({"dtype": "float32"}, "dtype='float32': must be one of"),
        ({"engine": "vmap2"}, "engine='vmap2': must be one of"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"training": {"lr": 0.1}}, "training={'lr': 0.1}: must be a Training"),
        ({"training": 0}, "training=0: must be a Training"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError) as error:
        federation(4, **options)
    assert message in str(error.value)


def test_a_partition_of_other_labels_is_refused():
    net = models.build("mlp", SMALL.shape, 10)
    for y in (DIGITS.y, SMALL.y[::-1].copy()):
        with pytest.raises(ValueError, match="partition='iid': was made for other labels than those of 'digits-400'"):
            Federation(SMALL, partition.iid(y, 4), net)


@pytest.mark.parametrize(("shape", "classes"), [((1, 8, 9), 10), ((64,), 10), ((1, 8, 8), 9), ((1, 8, 8), 11)])
def test_a_model_of_another_shape_or_classes_is_refused(shape, classes):
    with pytest.raises(ValueError, match=r"model='mlp': takes .*, but 'digits-400' has \(1, 8, 8\) and 10"):
        Federation(SMALL, partition.iid(SMALL.y, 4), models.build("mlp", shape, classes))


# --- data ------------------------------------------------------------------------------------------------------------


def test_every_client_has_its_own_rows():
    fed = federation(7)
    for parts, placed in ((fed.partition.train, fed.train), (fed.partition.test, fed.test)):
        for rows, (x, y) in zip(parts, placed, strict=True):
            assert torch.equal(x, SMALL.x[torch.from_numpy(rows)])
            assert y.tolist() == SMALL.y[rows].tolist()
    assert fed.n.tolist() == [len(part) for part in fed.partition.train]
    assert fed.num_clients == 7


def test_dtype_is_of_data_and_parameters():
    fed = federation(4, dtype=torch.float64)
    assert fed.train[0][0].dtype == torch.float64
    assert {leaf.dtype for leaf in trees.leaves(fed.init())} == {torch.float64}
    assert trees.unequal(fed.init(), federation(4).init()) == 0


def test_init_is_a_fresh_copy_and_each_client_has_one():
    fed = federation(3)
    wiped = fed.init()
    for leaf in trees.leaves(wiped):
        leaf.zero_()
    assert trees.unequal(fed.init(), wiped) > 0
    rows = fed.groups[0].each_client({"w": torch.zeros(2)})["w"]
    rows[1] += 1
    assert rows.tolist() == [[0, 0], [1, 1], [0, 0]]


# --- what travels ----------------------------------------------------------------------------------------------------


def test_shared_is_stored_once_and_seen_by_all():
    server = {"a": torch.arange(6.0).reshape(2, 3)}
    message = received((Shared(server), {"own": torch.zeros(4, 5)}), 4)
    shared = message[0]["a"]
    assert shared.shape == (4, 2, 3)
    assert shared.stride(0) == 0
    assert shared.untyped_storage().nbytes() == 6 * 4
    assert all(torch.equal(shared[i], server["a"]) for i in range(4))
    shared[0].zero_()
    assert server["a"].sum() == 15  # what a method does to its message, the server does not feel
    assert message[1]["own"].shape == (4, 5)


def test_bytes_are_counted_for_each_receiver():
    """Down: 2 float32, the one shared value; up: 2 float32 and, in the other method, one int64 besides."""

    class More(Echo):
        def local(self, clients, kept, message):
            return kept, (kept, {"count": torch.ones(len(clients.ids), dtype=torch.int64)}), message

        def merge(self, server, ids, message, upload, n):
            return server

    for method, up in ((Echo(), 8), (More(), 16)):
        fed = federation(10, join_ratio=0.3)
        result = fed.play(method, fed.start(method), 1)
        assert result.bytes_down.tolist() == [8, 8, 8]
        assert result.bytes_up.tolist() == [up] * 3


def test_merge_gets_ids_uploads_and_sample_counts_in_one_order():
    seen = []

    class Spy(Echo):
        def merge(self, server, ids, message, upload, n):
            seen.append((ids.tolist(), upload["own"][:, 0].tolist(), n.tolist()))
            return server

    fed = federation(13, join_ratio=0.4)
    state = fed.start(Spy())
    for _ in range(4):
        fed.play(Spy(), state, 4)
    for ids, uploads, n in seen:
        assert ids == sorted(ids)
        assert uploads == [2 * i for i in ids]
        assert n == [len(fed.partition.train[i]) for i in ids]
    assert len({tuple(ids) for ids, _, _ in seen}) > 1


def test_local_sees_its_clients_and_the_round():
    seen = []

    class Spy(Echo):
        def local(self, clients, kept, message):
            seen.append((clients.ids.tolist(), clients.n.tolist(), clients.round, clients.rounds, len(clients.data)))
            reachable = [v for v in vars(clients).values() if isinstance(v, Federation)]
            return kept, kept, message | {"federations": torch.full((len(clients.ids),), len(reachable))}

    fed = federation(10, join_ratio=0.3)
    state = fed.start(Spy())
    for t in (1, 2):
        result = fed.play(Spy(), state, 9)
        assert seen[-1] == (result.ids.tolist(), fed.n[result.ids].tolist(), t, 9, 3)
        assert result.held["federations"].tolist() == [0, 0, 0]
    assert state.round == 2


def test_joins_may_call_others():
    class All(Echo):
        def joins(self, round, sampled, everyone):
            return everyone if round == 1 else sampled

    fed = federation(10, join_ratio=0.3)
    state = fed.start(All())
    assert [len(fed.play(All(), state, 2).ids) for _ in range(2)] == [10, 3]


def test_a_server_may_know_the_round():
    """Before anything is sent; and what it makes of that has the form that its tree always has."""
    seen = []

    class Knows(Echo):
        def begin(self, server, round, rounds):
            seen.append((round, rounds))
            return {"a": torch.full((2,), 10.0 * round + rounds)}

        def local(self, clients, kept, message):
            return kept, {"own": message["a"]}, message

        def deploy(self, clients, kept, message):
            return message

    class Grows(Echo):
        def begin(self, server, round, rounds):
            return {"a": torch.ones(3)}

    class Tells(Echo):
        def begin(self, server, round, rounds):
            return {"a": round}

    fed = federation(4)
    state = fed.start(Knows())
    for t in (1, 2):
        server = state.server
        assert fed.deployed(Knows(), state, 5)["a"].tolist() == [[10 * t + 5] * 2] * 4  # what will be sent
        assert state.server is server
        assert fed.play(Knows(), state, 5).held["a"].tolist() == [[10 * t + 5] * 2] * 4
    assert seen == [(1, 5), (1, 5), (2, 5), (2, 5)]
    for method, line in (
        (Grows(), r"Grows.begin, 'a', is \[3\]"),
        (Tells(), "Tells.begin, 'a', is int, must be a tensor"),
    ):
        state = fed.start(method)
        with pytest.raises(ValueError, match=line):
            fed.play(method, state, 5)
        assert torch.equal(state.server["a"], torch.ones(2))


# --- state -----------------------------------------------------------------------------------------------------------


def test_only_sampled_rows_are_written():
    class Count(Echo):
        def local(self, clients, kept, message):
            return {"own": kept["own"] + 100}, kept, message

    fed = federation(10, join_ratio=0.3)
    state, joined = fed.start(Count()), np.zeros(10)
    for _ in range(5):
        joined[fed.play(Count(), state, 5).ids] += 1
    expected = torch.arange(20.0).reshape(10, 2) + 100 * torch.from_numpy(joined).float()[:, None]
    assert torch.equal(state.kept["own"], expected)


def test_what_clients_keep_shares_no_memory():
    """One tree given twice, or one value seen by all: still everybody's own."""

    class Twice(Echo):
        def client(self, group):
            one = torch.zeros(len(group.ids), 2)
            return {"now": one, "then": one, "seen": torch.zeros(2).expand(len(group.ids), 2)}

        def local(self, clients, kept, message):
            return {"now": kept["now"] + 1, "then": kept["now"], "seen": kept["seen"] + 3}, message, message

        def merge(self, server, ids, message, upload, n):
            return server

    fed = federation(4, join_ratio=0.5)
    state = fed.start(Twice())
    ids = fed.play(Twice(), state, 1).ids
    joined = torch.tensor([[float(i in ids)] * 2 for i in range(4)])
    assert torch.equal(state.kept["now"], joined)
    assert torch.equal(state.kept["then"], 0 * joined)
    assert torch.equal(state.kept["seen"], 3 * joined)


# A method's fault, and how the message begins.
FAULTS = {
    "server": (lambda self, fed: {"a": 1.0}, "Faulty.server, 'a', is float, must be a tensor"),
    "client": (lambda self, group: {"own": torch.zeros(2)}, "Faulty.client, 'own', is [2], must be [5, ...]"),
    "download": (lambda self, server, ids: server, "Faulty.download, 'a', is [2], must be [3, ...]"),
    "deploy": (lambda self, clients, kept, message: {"a": message["a"][0]}, "Faulty.deploy, 'a', is [2], must be [5"),
    "merge": (lambda self, server, ids, message, upload, n: {"a": upload["own"]}, "Faulty.merge, 'a', is [3, 2] of"),
    "keeps nothing": (lambda self, c, kept, m: ((), kept, m), "Faulty.local: what it keeps, 'own', is missing"),
    "keeps one row": (
        lambda self, c, kept, m: ({"own": kept["own"][0]}, kept, m),
        "Faulty.local: what it keeps, 'own', is [2], must be [3, ...]",
    ),
    "keeps too little": (  # would be broadcast into the state without a word
        lambda self, c, kept, m: ({"own": kept["own"][:, :1]}, kept, m),
        "Faulty.local: what it keeps, 'own', is [1] of torch.float32, at the start it was [2]",
    ),
    "keeps another type": (
        lambda self, c, kept, m: ({"own": kept["own"].long()}, kept, m),
        "Faulty.local: what it keeps, 'own', is [2] of torch.int64, at the start it was [2] of torch.float32",
    ),
    "uploads a sum": (
        lambda self, c, kept, m: (kept, {"x": kept["own"].sum()}, m),
        "Faulty.local: its upload, 'x', is [], must be [3, ...]",
    ),
    "uploads a number": (lambda self, c, kept, m: (kept, {"x": 3}, m), "Faulty.local: its upload, 'x', is int"),
    "holds one": (
        lambda self, c, kept, m: (kept, kept, {"a": m["a"][0]}),
        "Faulty.local: its model, 'a', is [2], must be [3, ...]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_methods_wrong_shapes_are_refused_by_name(fault):
    """Before anything is written: the state is as it was."""
    function, message = FAULTS[fault]
    name = fault if hasattr(Echo, fault) else "local"
    faulty = type("Faulty", (Echo,), {name: function})()
    fed = federation(5, join_ratio=0.6)
    with pytest.raises(ValueError) as error:
        state = fed.start(faulty)
        before = trees.clone((state.server, state.kept))
        try:
            fed.play(faulty, state, 1)
        finally:
            assert (trees.unequal((state.server, state.kept), before), state.round) == (0, 0) or fault == "deploy"
        fed.deployed(faulty, state, 1)
    assert str(error.value).startswith(message)


def test_score_counts_right_answers_of_given_clients():
    """Models that always answer class k: right on just the test samples of class k."""
    fed = federation(5)
    extractor, head = trees.repeat(fed.init(), 2)
    head = trees.full_like(head, 0.0)
    head["bias"][0, 3], head["bias"][1, 4] = 1.0, 1.0
    correct, loss = fed.score((extractor, head), [4, 2])
    ys = [fed.test[4][1], fed.test[2][1]]
    assert correct.tolist() == [int((ys[0] == 3).sum()), int((ys[1] == 4).sum())]
    log_sum = np.log(9 + np.e)  # −log softmax: log Σ exp less the label's own logit, 1 or 0
    shares = [c / len(y) for c, y in zip(correct, ys, strict=True)]
    assert loss == pytest.approx([log_sum - share for share in shares], rel=1e-5)


# --- clients with different models -----------------------------------------------------------------------------------

THREE = ("mlp-5", "mlp-2", "mlp")


def mixed(names=THREE, clients=8, **options):
    nets = [models.build(name, SMALL.shape, 10) for name in names]
    split = partition.dirichlet(SMALL.y, clients, beta=1, min_size=12, seed=2)  # all of different sizes
    return Federation(SMALL, split, nets, **{"training": Training(lr=0.05), "engine": "loop"} | options)


def of_client(fed, whole, ids, i):
    """Client i's own part of what the clients `ids` keep or hold, counted out by hand."""
    numbers = list(range(len(fed.groups)))
    groups = {g: [j for j in ids if j % len(numbers) == g] for g in numbers}
    there = [g for g in numbers if groups[g]]
    tree = whole[there.index(i % len(numbers))] if len(numbers) > 1 else whole
    return trees.row(tree, groups[i % len(numbers)].index(i))


@dataclasses.dataclass(frozen=True)
class Owner(Echo):
    """Echo for clients of different models: each keeps its number, and uploads it."""

    heterogeneous = True

    def client(self, group):
        return {"own": torch.from_numpy(group.ids).float()[:, None].repeat(1, 2)}


@dataclasses.dataclass(frozen=True)
class Alone:
    """Sampled clients train their own model; nothing travels."""

    heterogeneous = True

    def server(self, fed):
        return ()

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        return ()

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, kept)
        return model, (), model

    def merge(self, server, ids, message, upload, n):
        return ()

    def deploy(self, clients, kept, message):
        return kept


def test_clients_get_the_models_in_turn():
    fed = mixed(clients=8)
    assert [group.ids.tolist() for group in fed.groups] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [group.model.name for group in fed.groups] == list(THREE)
    assert fed.model.name == "mlp-5" and trees.unequal(fed.init(), fed.groups[0].init()) == 0
    found = [(g, at.tolist(), rows.tolist()) for g, at, rows in fed.by_group([1, 2, 4, 7])]
    assert found == [(1, [0, 2, 3], [0, 1, 2]), (2, [1], [0])]
    assert [(g, at.tolist(), rows.tolist()) for g, at, rows in fed.by_group([6])] == [(0, [0], [2])]
    kept = fed.start(Owner()).kept
    assert [part["own"][:, 0].tolist() for part in kept] == [[0, 3, 6], [1, 4, 7], [2, 5]]


def test_a_second_model_is_one_by_name_or_the_smallest_of_the_clients():
    nets = [models.build(name, SMALL.shape, 10) for name in ("mlp", "mlp-5", "mlp-1")]
    assert nets[1].size() < nets[0].size() and nets[1].size() < nets[2].size()
    fed = Federation(SMALL, partition.iid(SMALL.y, 6), nets, seed=3, dtype=torch.float64)
    assert fed.second() is nets[1] is fed.groups[2].second()
    named = fed.second("mlp-4")
    assert named is fed.groups[1].second("mlp-4") is fed.clients([0, 3], 1, 2).second("mlp-4")  # built once
    want = models.build("mlp-4", SMALL.shape, 10, seed=3).init()
    given = fed.init(named)
    assert trees.unequal(given, trees.tree_map(torch.Tensor.double, want)) == 0
    assert all(t.dtype == torch.float64 for t in trees.leaves(given))
    with pytest.raises(ValueError, match="model='nosuch': must be one of"):
        fed.second("nosuch")
    with pytest.raises(ValueError, match="model='resnet18': does not fit"):
        fed.second("resnet18")


def test_a_list_of_one_model_is_that_model():
    split, net = partition.iid(SMALL.y, 4), models.build("mlp", SMALL.shape, 10)
    ends = []
    for model in (net, [net], (net,)):
        fed = Federation(SMALL, split, model, join_ratio=0.5)
        state = fed.start(Alone())
        result = fed.play(Alone(), state, 1)
        ends.append((state.kept, result.held, fed.deployed(Alone(), state, 1)))
    assert trees.unequal(ends[0], ends[1]) == trees.unequal(ends[0], ends[2]) == 0
    assert len(ends[0][0]) == 2  # extractor and head, not a tuple of groups


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ([], "model='': 0 models for 4 clients, must be 1 to as many"),
        (
            [models.build("mlp", (1, 8, 8), 10)] * 5,
            "model='mlp+mlp+mlp+mlp+mlp': 5 models for 4 clients, must be 1 to as many",
        ),
        (["mlp"], "model='mlp': must be a Model"),
        ("mlp-1", "model='mlp-1': must be a Model"),
        ([models.build("mlp", (1, 8, 8), 10), None], "model=None: must be a Model"),
        (
            [models.build("mlp", (1, 8, 8), 10), models.build("mlp-3", (1, 8, 9), 10)],
            "model='mlp-3': takes (1, 8, 9) and 10 classes, but 'digits-400' has (1, 8, 8) and 10",
        ),
        (
            [models.build("mlp-2", (1, 8, 8), 9), models.build("mlp", (1, 8, 8), 10)],
            "model='mlp-2': takes (1, 8, 8) and 9 classes",
        ),
    ],
    ids=["none", "more than clients", "a name in a list", "a name", "no model", "another shape", "other classes"],
)
def test_models_that_do_not_fit_are_refused_by_name(model, message):
    with pytest.raises(ValueError) as error:
        Federation(SMALL, partition.iid(SMALL.y, 4), model)
    assert str(error.value).startswith(message)


def test_a_method_for_one_model_refuses_several_before_it_does_anything():
    class Homogeneous(Echo):
        def server(self, fed):
            raise AssertionError("was asked for a server")

    with pytest.raises(ValueError, match=r"^model=mlp-5, mlp-2, mlp: Homogeneous needs one model for all clients \("):
        mixed().start(Homogeneous())


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("ratio", [0.01, 0.3, (0.1, 1.0), 1.0])
def test_merge_gets_all_in_the_order_of_ids_whatever_the_groups(groups, ratio):
    """With as many models as clients, every group has one."""
    seen = []

    class Spy(Owner):
        def download(self, server, ids):
            return torch.as_tensor(10.0 * ids)

        def local(self, clients, kept, message):
            assert message.tolist() == [10 * i for i in clients.ids]
            assert kept["own"][:, 0].tolist() == clients.ids.tolist()
            assert {clients.model.name} == {names[i % groups] for i in clients.ids}
            assert len(clients.data) == len(clients.ids) and clients.n.tolist() == [len(y) for _, y in clients.data]
            return kept, (kept, Rows(message[:, None], message[:, None] > 20)), {"id": message / 10}

        def merge(self, server, ids, message, upload, n):
            own, rows = upload
            seen.append((ids.tolist(), message.tolist(), own["own"][:, 0].tolist(), rows, n.tolist()))
            return server

    names = [f"mlp-{i % 5 + 1}" for i in range(groups)]
    fed = mixed(names, join_ratio=ratio)
    state = fed.start(Spy())
    for t in range(1, 5):
        result = fed.play(Spy(), state, 4)
        ids, message, uploads, rows, n = seen[-1]
        assert ids == result.ids.tolist() == fed.sample(t).tolist()
        assert (message, uploads) == ([10 * i for i in ids], ids)
        assert isinstance(rows, Rows) and rows.values[:, 0].tolist() == [10 * i * (i > 2) for i in ids]
        assert n == [len(fed.partition.train[i]) for i in ids]
        assert [of_client(fed, result.held, ids, i)["id"] for i in ids] == ids
        assert result.bytes_up.tolist() == [8 + 8 * (i > 2) for i in ids]
        assert result.bytes_down.tolist() == [8] * len(ids)
    assert len(seen) == 4


def test_only_sampled_rows_of_every_group_are_written():
    class Count(Owner):
        def local(self, clients, kept, message):
            return {"own": kept["own"] + 100}, kept, message

    fed = mixed(join_ratio=0.4)
    state, joined = fed.start(Count()), np.zeros(8)
    for _ in range(6):
        joined[fed.play(Count(), state, 6).ids] += 1
    assert len(set(joined)) > 2
    for i in range(8):
        assert of_client(fed, state.kept, range(8), i)["own"].tolist() == [i + 100 * joined[i]] * 2


def test_groups_share_no_memory():
    """One tree given to two groups: still everybody's own."""
    same = torch.zeros(2, 3)

    class Same(Owner):
        def client(self, group):
            return same

        def local(self, clients, kept, message):
            return kept + torch.from_numpy(clients.ids)[:, None] + 1, message, message

        def merge(self, server, ids, message, upload, n):
            return server

    fed = mixed(("mlp-1", "mlp-2"), 4)
    state = fed.start(Same())
    fed.play(Same(), state, 1)
    assert [part.tolist() for part in state.kept] == [[[1] * 3, [3] * 3], [[2] * 3, [4] * 3]]


WIDTHS = {"mlp-1": 256, "mlp-2": 128, "mlp-4": 32, "mlp-5": 16}


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_a_mixed_federation_does_what_those_of_its_models_do(ratio):
    """Two rounds, client by client, to the bit: what it keeps, holds and would use, its scores, losses and FLOPs."""
    fed = mixed(("mlp-5", "cnn-small", "mlp-2"), clients=7, join_ratio=ratio, engine="loop")
    options = {
        "training": fed.training,
        "join_ratio": ratio,
        "engine": "loop",
    }  # as a stack a client's numbers are rounded otherwise
    single = [Federation(SMALL, fed.partition, g.model, **options) for g in fed.groups]
    everyone, ends = np.arange(7), []
    for one in (fed, *single):
        state = one.start(Alone())
        for _ in range(2):
            result = one.play(Alone(), state, 2)
        deployed = one.deployed(Alone(), state, 2)
        scores = *one.score(result.held, result.ids), *one.score(deployed, everyone)
        ends.append((result, state.kept, deployed, scores))
    result, kept, deployed, scores = ends.pop(0)
    ids = result.ids.tolist()
    for j, i in enumerate(ids):
        other = ends[i % 3]
        assert trees.unequal(of_client(fed, result.held, ids, i), trees.row(other[0].held, j)) == 0
        assert [of[j] for of in scores[:2]] == [of[j] for of in other[3][:2]]
        assert result.log()["train"][j] == other[0].log()["train"][j]
        assert result.flops()[j] == other[0].flops()[j] > 0
    for i in range(7):
        mine = of_client(fed, kept, everyone, i), of_client(fed, deployed, everyone, i)
        assert trees.unequal(mine, trees.row(ends[i % 3][1:3], i)) == 0
        assert [of[i] for of in scores[2:]] == [of[i] for of in ends[i % 3][3][2:]]
        x, y = fed.test[i]  # and by plain indexing: the model, the test data, right answers
        logits = fed.groups[i % 3].model.predict(mine[1], x)
        assert scores[2][i] == int((logits.argmax(1) == y).sum())
        assert scores[3][i] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)


def test_score_takes_models_of_the_clients_asked_for():
    """Of one group, of all, in any order: heads that answer class i for client i."""
    fed = mixed(("mlp-5", "mlp"), 6)
    for ids in ([3], [4, 0, 2], [5, 2, 1], [0, 1, 2, 3, 4, 5]):
        held = []
        for g, at, _ in fed.by_group(ids):
            extractor, head = fed.groups[g].each_client(fed.groups[g].init())
            extractor, head = trees.take((extractor, head), np.arange(len(at)))
            bias = torch.nn.functional.one_hot(torch.tensor([ids[j] for j in at]), 10).float()
            held.append((extractor, {"weight": 0 * head["weight"], "bias": bias}))
        correct, _ = fed.score(fed.whole(held), ids)
        assert correct.tolist() == [int((fed.test[i][1] == i).sum()) for i in ids]


def test_flops_of_each_model_are_its_own():
    """A sample's step: fc1 forward and for its weights, fc2 and fc3 for their inputs too; 2 in out each."""
    names = tuple(WIDTHS)
    fed = mixed(names, join_ratio=0.75)
    state = fed.start(Alone())
    for _ in range(2):
        result = fed.play(Alone(), state, 2)
        widths = [WIDTHS[names[i % 4]] for i in result.ids]
        one = [2 * (2 * 64 * w + 3 * w * 64 + 3 * 64 * 10) for w in widths]
        assert result.flops().tolist() == [n * flops for n, flops in zip(fed.n[result.ids], one, strict=True)]


def test_log_is_in_the_order_of_ids_and_nan_without_the_phase():
    class Log(Owner):
        def local(self, clients, kept, message):
            clients.log["id"] = clients.ids / 2
            if clients.model.name in ("mlp-2", "mlp"):
                clients.log["some"] = -1.0 * clients.ids
            return kept, kept, message

    fed = mixed(join_ratio=0.7)
    state = fed.start(Log())
    for _ in range(3):
        result = fed.play(Log(), state, 3)
        log, ids = result.log(), result.ids
        assert log["id"].tolist() == (ids / 2).tolist()
        wanted = np.where(ids % 3 == 0, np.nan, -ids)  # the first model, mlp-5, has no such phase
        assert list(log) == ["id", "some"] and np.array_equal(log["some"], wanted, equal_nan=True)


# --- rows that only some have ----------------------------------------------------------------------------------------


def classes_of(ids):
    """Of 10 rows, client i has the first i."""
    return torch.arange(10) < torch.as_tensor(ids)[:, None]


@dataclasses.dataclass(frozen=True)
class Sparse(Owner):
    """Client i gets and sends i of 10 rows of two numbers; the others are full of what must not arrive."""

    def download(self, server, ids):
        return Shared(server), Rows(torch.full((len(ids), 10, 2), 7.0), classes_of(ids))

    def local(self, clients, kept, message):
        got = message[1]
        assert got.values.tolist() == (7.0 * got.present[..., None].expand(-1, -1, 2)).tolist()
        return kept, Rows((got.values + 1).masked_fill(~got.present[..., None], float("nan")), got.present), message[0]

    def merge(self, server, ids, message, upload, n):
        have = torch.as_tensor(ids).double()
        assert torch.equal(upload.present.sum(1), have.long())
        assert torch.equal(message[1].values.double().sum((1, 2)), 14 * have)
        assert torch.equal(upload.values.double().sum((1, 2)), 16 * have)
        return server


@pytest.mark.parametrize("names", [("mlp",), THREE])
@pytest.mark.parametrize("cohort", [None, 1])
def test_only_present_rows_count_and_arrive(names, cohort):
    method = type("Sparse", (Sparse,), {"cohort": cohort})()
    fed = mixed(names, join_ratio=0.6)
    state = fed.start(method)
    for _ in range(3):
        result = fed.play(method, state, 3)
        assert len(result.ids) == 5
        assert result.bytes_down.tolist() == [8 + 8 * i for i in result.ids]  # two shared float32, i rows of two
        assert result.bytes_up.tolist() == [8 * i for i in result.ids]


PRESENT = {
    "not bool": torch.ones(4, 10),
    "other rows": torch.ones(4, 9, dtype=torch.bool),
    "by element": torch.ones(4, 10, 2, dtype=torch.bool),
    "a row a client": torch.ones(4, dtype=torch.bool),
}


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        *[("down", fault) for fault in PRESENT],
        *[("up", fault) for fault in PRESENT],
    ],
)
def test_malformed_rows_are_refused_and_nothing_is_written(way, fault):
    bad = Rows(torch.ones(4, 10, 2), PRESENT[fault])

    class Bad(Owner):
        def download(self, server, ids):
            return bad if way == "down" else Shared(server)

        def local(self, clients, kept, message):
            return {"own": kept["own"] + 1}, bad, message

    fed = mixed(("mlp",), 4)
    state = fed.start(Bad())
    before = trees.clone((state.server, state.kept))
    with pytest.raises(ValueError, match=r"^Rows\(\[4, 10, 2\] of .*, \[4.*must be tensors \[C, K, \.\.\.\]"):
        fed.play(Bad(), state, 1)
    assert trees.unequal((state.server, state.kept), before) == 0 and state.round == 0


# --- one cohort after the other --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Chain(Owner):
    """The server counts what reached it; a client learns the count, and sends its number."""

    seen: ClassVar[list] = []

    def server(self, fed):
        return {"count": torch.zeros(()), "last": torch.tensor(-1.0)}

    def download(self, server, ids):
        return {"before": Shared(server["count"]), "rows": Rows(torch.ones(len(ids), 10), classes_of(ids))}

    def local(self, clients, kept, message):
        clients.log["before"] = message["before"].numpy().copy()
        held = {"id": torch.from_numpy(clients.ids), "before": message["before"].clone()}
        return {"own": kept["own"] + 100}, (kept["own"][:, 0], message["rows"]), held

    def merge(self, server, ids, message, upload, n):
        was = float(server["count"]), float(server["last"])
        self.seen.append((ids.tolist(), *was, upload[0].tolist(), n.tolist()))
        return {"count": server["count"] + len(ids), "last": upload[0][-1]}


@pytest.mark.parametrize("names", [("mlp",), ("mlp-5", "mlp-4"), THREE])
@pytest.mark.parametrize("cohort", [1, 2, 3, 100])
def test_cohorts_meet_the_server_one_after_the_other(names, cohort):
    """Each message is made of what the server learned from the cohort before; so it is in the next round."""
    chain = type("Chain", (Chain,), {"cohort": cohort})()
    fed, count, last = mixed(names, join_ratio=0.6), 0, -1
    state = fed.start(chain)
    for _ in range(2):
        Chain.seen.clear()
        result = fed.play(chain, state, 2)
        ids, told = result.ids.tolist(), []
        assert len(ids) == 5
        for start in range(0, 5, cohort):
            own = ids[start : start + cohort]
            assert Chain.seen[start // cohort] == (own, count, last, [float(i) for i in own], fed.n[own].tolist())
            told += [count] * len(own)
            count, last = count + len(own), own[-1]
        assert len(Chain.seen) == -(-5 // cohort)
        held = [of_client(fed, result.held, ids, i) for i in ids]
        assert [int(h["id"]) for h in held] == ids
        assert [float(h["before"]) for h in held] == result.log()["before"].tolist() == told
        assert result.bytes_down.tolist() == result.bytes_up.tolist() == [4 + 4 * i for i in ids]
        assert result.flops().tolist() == [0] * 5
        for i in range(8):
            assert of_client(fed, state.kept, range(8), i)["own"].tolist() == [i + 100 * (i in ids)] * 2
        state.kept = fed.start(chain).kept
    assert state.round == 2 and int(state.server["count"]) == 10


def test_a_cohort_of_all_is_no_cohort():
    everyone = type("All", (Chain,), {"cohort": None})()
    fed = mixed(join_ratio=0.6)
    Chain.seen.clear()
    result = fed.play(everyone, fed.start(everyone), 1)
    assert [ids for ids, *_ in Chain.seen] == [result.ids.tolist()]


@pytest.mark.parametrize("cohort", [-1, "1", 1.5])
def test_an_impossible_cohort_is_refused_by_name(cohort):
    method, fed = type("Own", (Chain,), {"cohort": cohort})(), mixed()
    with pytest.raises(ValueError, match="cohort="):
        fed.play(method, fed.start(method), 1)


def test_uploads_of_different_shapes_are_refused_by_name():
    """Extractors of different models cannot be one upload."""

    class Sends(Alone):
        def local(self, clients, kept, message):
            return kept, kept, kept

    fed = mixed(("mlp-5", "mlp-2"))
    with pytest.raises(ValueError, match=r"Sends\.local: its upload"):
        fed.play(Sends(), fed.start(Sends()), 1)


def test_the_server_works_on_one_thread_and_the_engine_on_those_allowed(monkeypatch):
    """Sums over several threads depend on their number; and tiny ones wait for each other."""
    seen, pools = [], []

    class Asks(Echo):
        def merge(self, server, ids, message, upload, n):
            seen.append(torch.get_num_threads())
            return server

        def local(self, clients, kept, message):
            clients.engine.each(lambda i: None, clients.n)
            return kept, kept, message

    pool = training._pool
    monkeypatch.setattr(training, "_pool", lambda pid, workers: pools.append(workers) or pool(pid, workers))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        fed = federation(6, engine="threads")
        fed.play(Asks(), fed.start(Asks()), 1)
        assert (seen, pools, torch.get_num_threads()) == ([1], [2], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("given", [(), "two", "list"])
def test_local_that_does_not_return_three_things_is_named(given):
    class Short(Echo):
        def local(self, clients, kept, message):
            return {"two": (kept, message), "list": [kept, message, message]}.get(given, ())

    fed = federation(4)
    with pytest.raises(ValueError, match=r"^Short\.local: must return \(what it keeps, its upload, its model\)$"):
        fed.play(Short(), fed.start(Short()), 1)


# --- models of both kinds --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Both(Alone):
    """Clients train two models of their own, and call the second, trained at a tenth of the rate, the global one."""

    def client(self, group):
        return {kind: group.each_client(group.init()) for kind in ("global", "personal")}

    def local(self, clients, kept, message):
        lr = clients.training.lr
        models = {
            "personal": clients.sgd(model_loss, kept["personal"], phase="own"),
            "global": clients.sgd(model_loss, kept["global"], phase="global", lr=lr / 10),
        }
        return models, (), models


@pytest.mark.parametrize("names", [("mlp",), THREE])
@pytest.mark.parametrize("cohort", [None, 3])
def test_both_kinds_of_models_are_told_apart_and_scored(names, cohort):
    """The answers are counted here one by one; the rate tells which is which."""

    class Method(Both):
        pass

    Method.cohort = cohort
    fed, method = mixed(names, join_ratio=0.6), Method()
    state = fed.start(method)
    result = fed.play(method, state, 2)
    for held, ids in ((result.held, result.ids.tolist()), (fed.deployed(method, state, 2), list(range(8)))):
        kinds = fed.kinds(held)
        assert list(kinds) == ["", "_global"]
        for models_of_kind in kinds.values():
            correct, loss = fed.score(models_of_kind, ids)
            for j, i in enumerate(ids):
                x, y = fed.test[i]
                logits = fed.groups[i % len(names)].model.predict(of_client(fed, models_of_kind, ids, i), x)
                assert correct[j] == int((logits.argmax(1) == y).sum())
                assert loss[j] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, y)), rel=1e-5)
        for i in ids:
            own, common = (of_client(fed, models_of_kind, ids, i) for models_of_kind in kinds.values())
            start = fed.groups[i % len(names)].init()
            moved = trees.unequal(own, start), trees.unequal(common, start)
            assert 3 * moved[1] < moved[0] if i in result.ids else moved == (0, 0)


def test_kinds_of_models():
    fed, several = mixed(("mlp",)), mixed(("mlp", "mlp-1"))
    a, b = ({}, {"weight": torch.ones(1)}), ({}, {"weight": torch.zeros(1)})
    assert fed.kinds(a) == {"": a} and several.kinds((a, b)) == {"": (a, b)} and several.kinds((a,)) == {"": (a,)}
    both = {"global": b, "personal": a}
    assert fed.kinds(both) == {"": a, "_global": b}
    assert several.kinds((both, {"personal": b, "global": a})) == {"": (a, b), "_global": (b, a)}
    assert several.kinds((both,)) == {"": (a,), "_global": (b,)}  # of clients of one of the groups


@pytest.mark.parametrize(
    "wrong", [{"personal": 0}, {"global": 0}, {"own": 0, "global": 0}, {}, dict.fromkeys("abc", 0)]
)
def test_other_kinds_of_models_are_refused(wrong):
    both, model = {"personal": ({}, {}), "global": ({}, {})}, ({}, {})
    message = r"^a method's model: must be \(extractor, head\), or both \['personal', 'global'\], is "
    with pytest.raises(ValueError, match=message):
        mixed(("mlp",)).kinds(wrong)
    for held in ((both, wrong), (wrong, both), (model, wrong), (wrong, model), (both, model), (model, both)):
        with pytest.raises(ValueError, match=message):
            mixed(("mlp", "mlp-1")).kinds(held)
