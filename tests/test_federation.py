"""pflkit.federation: who joins, what travels, who holds what; and what does not fit is refused by name."""

import dataclasses

import numpy as np
import pytest
import torch

from pflkit import data, models, partition, trees
from pflkit.federation import Federation
from pflkit.messages import Shared, received
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
