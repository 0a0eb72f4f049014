"""pflkit.messages: bytes by hand, what is not present does not arrive, and what is shared is stored once."""

import numpy as np
import pytest
import torch

from pflkit import trees
from pflkit.messages import Rows, Shared, arrived, nbytes, received, split

NAN, INF = float("nan"), float("inf")


def rows(present, *width, dtype=torch.float32):
    """Rows [C, K, *width] that are 1, 2, 3, ... in their order."""
    present = torch.tensor(present, dtype=torch.bool)
    shape = *present.shape, *width
    return Rows(torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype), present)


THREE = [[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]]  # of four rows, three clients have none, one and all


def memory(tree):
    return {leaf.untyped_storage().data_ptr() for leaf in trees.leaves(tree)}


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "each"),
    [
        ((), [0, 0, 0]),
        ({}, [0, 0, 0]),
        (torch.zeros(3), [4, 4, 4]),  # a float32 a client
        (torch.zeros(3, 2, 5), [40, 40, 40]),
        (torch.zeros(3, 2, dtype=torch.float64), [16, 16, 16]),
        (torch.zeros(3, dtype=torch.int32), [4, 4, 4]),
        (torch.zeros(3, 0), [0, 0, 0]),
        ({"a": torch.zeros(3, 2), "b": (torch.zeros(3, dtype=torch.int64), {})}, [16, 16, 16]),
        (rows(THREE, 2), [0, 8, 32]),  # a row: two float32
        (rows(THREE, 2, 3, dtype=torch.float64), [0, 48, 192]),
        (rows(THREE, dtype=torch.int32), [0, 4, 16]),  # a row: one int32
        ((rows(THREE, 2), rows(THREE, dtype=torch.int32)), [0, 12, 48]),  # FedGH's prototypes and labels
        ({"p": rows(THREE, 2), "n": torch.zeros(3, 1)}, [4, 12, 36]),
    ],
)
def test_bytes_of_each_client_by_hand(message, each):
    """`present` itself counts nothing: who has which rows is known by the labels that travel, where they do."""
    weight = nbytes(message, 3)
    assert weight.tolist() == each
    assert weight.dtype == np.int64


def test_shared_counts_once_for_each_receiver():
    tree = {"a": torch.zeros(2, 3), "n": torch.tensor(7)}  # 24 bytes, and an int64
    assert nbytes(received(Shared(tree), 5), 5).tolist() == [32] * 5
    assert nbytes(received((Shared(tree), {"own": torch.zeros(5, 2)}), 5), 5).tolist() == [40] * 5
    some = Shared(Rows(torch.zeros(4, 2), torch.tensor([True, False, True, True])))  # the classes that anyone has
    assert nbytes(received(some, 5), 5).tolist() == [24] * 5


def test_a_part_of_a_message_weighs_its_part():
    message = received({"shared": Shared(torch.zeros(3)), "own": torch.zeros(3, 2), "rows": rows(THREE, 2)}, 3)
    for at in ([0], [1, 2], [0, 1, 2]):
        assert nbytes(split(message, np.array(at)), len(at)).tolist() == nbytes(message, 3)[at].tolist()


# --- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("junk", [5.0, NAN, INF, -INF])
def test_rows_that_are_not_present_arrive_as_zero(junk):
    given = rows([[0, 1, 0], [1, 0, 0]], 2)  # 1 to 6, 7 to 12
    given.values[~given.present] = junk
    before = given.values.clone()
    for got in (arrived(given), received(given, 2), arrived({"a": (given, ())})["a"][0]):
        assert isinstance(got, Rows)
        assert got.values.tolist() == [[[0, 0], [3, 4], [0, 0]], [[7, 8], [0, 0], [0, 0]]]
        assert got.present.tolist() == [[False, True, False], [True, False, False]]
    assert torch.equal(given.values.nan_to_num(99), before.nan_to_num(99))  # arguments are values


def test_rows_of_any_shape_and_dtype():
    for given in (rows(THREE), rows(THREE, dtype=torch.int32), rows(THREE, 2, 3), rows(THREE, 1, dtype=torch.float64)):
        got = arrived(given)
        assert got.values.dtype == given.values.dtype
        assert torch.equal(got.values[given.present], given.values[given.present])
        assert not got.values[~given.present].any()


MALFORMED = {
    "not bool": (Rows(torch.zeros(3, 4, 2), torch.ones(3, 4)), "[3, 4] of torch.float32)"),
    "other clients": (
        Rows(torch.zeros(2, 4, 2), torch.ones(3, 4, dtype=torch.bool)),
        "Rows([2, 4, 2] of torch.float32, [3, 4] of torch.bool)",
    ),
    "other rows": (
        Rows(torch.zeros(3, 5, 2), torch.ones(3, 4, dtype=torch.bool)),
        "Rows([3, 5, 2] of torch.float32, [3, 4] of torch.bool)",
    ),
    "no rows": (Rows(torch.zeros(3), torch.ones(3, dtype=torch.bool)), "Rows([3] of torch.float32, [3] of torch.bool)"),
    "a row each": (
        Rows(torch.zeros(3, 4, 2), torch.ones(3, dtype=torch.bool)),
        "Rows([3, 4, 2] of torch.float32, [3] of torch.bool)",
    ),
    "element by element": (
        Rows(torch.zeros(3, 4, 2), torch.ones(3, 4, 2, dtype=torch.bool)),
        "[3, 4, 2] of torch.bool)",
    ),
    "without clients": (
        Shared(Rows(torch.zeros(4, 2), torch.ones(2, dtype=torch.bool))),
        "Rows([4, 2] of torch.float32, [2] of torch.bool)",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_rows_are_refused_by_name(fault):
    message, named = MALFORMED[fault]
    with pytest.raises(ValueError) as error:
        received({"deep": (message,)}, 3)
    assert str(error.value).startswith("Rows(")
    assert named in str(error.value)
    axes = "K" if fault == "without clients" else "C, K"
    assert f"must be tensors [{axes}, ...] and [{axes}], this of torch.bool" in str(error.value)


def test_rows_that_are_no_tensors_are_refused_by_name():
    with pytest.raises(ValueError, match=r"^Rows\(ndarray, "):
        received(Rows(np.zeros((3, 4)), torch.ones(3, 4, dtype=torch.bool)), 3)


def test_structure_and_names_stay():
    message = {"b": (torch.zeros(2, 1), {}), "a": rows([[1], [0]], 1), "c": Shared({"w": torch.ones(3)})}
    got = received(message, 2)
    assert [name for name, _ in trees.named_leaves(got)] == ["b/0", "a/0", "a/1", "c/w"]
    assert got["b"][1] == {}
    assert received((), 2) == ()


# --- memory ----------------------------------------------------------------------------------------------------------


def test_what_arrives_is_not_the_servers_memory():
    server = {"own": torch.ones(3, 2), "one": torch.ones(2), "rows": rows(THREE, 2).values}
    message = received((server["own"], Shared(server["one"]), Rows(server["rows"], rows(THREE).present)), 3, server)
    assert memory(message).isdisjoint(memory(server))


def test_what_was_made_for_the_message_is_not_copied_but_no_two_leaves_are_one_memory():
    made = torch.ones(3, 4)
    a, b, c = received((made, made[:, 1:], torch.ones(3, 1).expand(3, 5)), 3, {"other": torch.ones(3)})
    assert a is made and len(memory((a, b, c))) == 3
    assert all(t.is_contiguous() and torch.equal(t, torch.ones_like(t)) for t in (a, b, c))


def test_present_is_not_the_servers_memory():
    given = rows(THREE, 2)
    received(given, 3, given).present.zero_()
    assert given.present.sum() == 5


def test_what_is_shared_is_stored_once_after_a_split_too():
    message = received({"shared": Shared((torch.arange(6.0).reshape(2, 3), torch.tensor(7))), "own": torch.eye(50)}, 50)
    for at in ([0], [3, 49], list(range(0, 50, 2)), list(range(50))):
        part = split(message, np.array(at))
        matrix, count = part["shared"]
        assert matrix.shape == (len(at), 2, 3) and count.shape == (len(at),)
        assert len(at) == 1 or matrix.stride(0) == count.stride(0) == 0
        assert matrix.untyped_storage().nbytes() == 6 * 4 and count.untyped_storage().nbytes() == 8
        assert all(torch.equal(row, torch.arange(6.0).reshape(2, 3)) for row in matrix)
        assert torch.equal(part["own"], torch.eye(50)[at])


def test_shared_rows_are_stored_once():
    some = Rows(torch.ones(4, 2), torch.tensor([True, False, True, True]))
    assert received(Shared(some), 50).values.untyped_storage().nbytes() == 4 * 2 * 4


def test_split_takes_the_clients_rows():
    message = {"own": torch.arange(8.0).reshape(4, 2), "rows": rows([[1, 0], [0, 1], [1, 1], [0, 0]], 1)}
    part = split(message, np.array([1, 2]))
    assert part["own"].tolist() == [[2, 3], [4, 5]]
    assert isinstance(part["rows"], Rows)
    assert part["rows"].values.tolist() == [[[3], [4]], [[5], [6]]]
    assert part["rows"].present.tolist() == [[False, True], [True, True]]
    part["own"].zero_()
    assert message["own"].sum() == 28  # the others' part is not touched


def test_the_parts_of_a_message_are_the_message():
    message = received((torch.randn(5, 3), Shared(torch.randn(2)), rows([[1, 0]] * 5, 2)), 5)
    parts = [split(message, np.array(at)) for at in ([0, 3], [1, 4], [2])]
    assert trees.unequal(trees.join(parts, [0, 2, 4, 1, 3]), message) == 0
