"""Arithmetic on trees: hand numbers, and what shares memory with what."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pflkit import trees
from pflkit.messages import Rows
from pflkit.models import Trained

ONE = torch.ones(1)
NAN = float("nan")


def tree(clients=3):
    """A nested tree [clients, ...] with a leaf of integers, a scalar a client and a dict that is empty."""
    numbers = torch.arange(clients * 4.0).reshape(clients, 2, 2)
    return {"a": numbers, "b": ({"w": numbers[:, 0] + 100, "n": torch.arange(clients)}, {}, torch.ones(clients))}


def memory(t):
    return {leaf.untyped_storage().data_ptr() for leaf in trees.leaves(t)}


def test_tree_map_keeps_the_structure_and_pairs_by_name():
    got = trees.tree_map(torch.sub, {"x": torch.tensor(5.0), "y": ()}, {"y": (), "x": torch.tensor(3.0)})
    assert got == {"x": torch.tensor(2.0), "y": ()} and list(got) == ["x", "y"]
    assert type(trees.tree_map(torch.neg, Trained(a=torch.ones(1)))) is Trained


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"x": ONE}, {"x": ONE, "y": ONE}),
        ({"x": ONE, "y": ONE}, {"x": ONE}),
        ({"x": ONE}, {"y": ONE}),
        ((ONE, ONE), (ONE,)),
        ((), (ONE,)),
    ],
)
def test_trees_of_different_structure_are_refused(a, b):
    def put(a, b):
        trees.put(trees.clone(a), [0], b)

    for function in (lambda a, b: trees.tree_map(torch.add, a, b), trees.unequal, put):
        with pytest.raises(ValueError, match=r"structure|zip\(\)"):
            function(a, b)


def test_named_leaves_are_in_the_order_of_the_tree():
    t = (OrderedDict(z=1, a={"w": 2}), {}, 3)
    assert trees.named_leaves(t) == [("0/z", 1), ("0/a/w", 2), ("2", 3)]
    assert trees.leaves(t) == [1, 2, 3]
    assert trees.named_leaves(()) == [] and trees.named_leaves(5) == [("", 5)]


def test_average_by_hand():
    got = trees.average(({"w": torch.tensor([[2.0, 0.0], [6.0, 4.0]])}, {}), (1, 3))
    assert got[0]["w"].tolist() == [5.0, 3.0] and got[0]["w"].dtype == torch.float32 and got[1] == {}
    assert trees.average(torch.tensor([1.0, 2.0, 9.0]), np.array([5, 5, 0])).item() == 1.5
    assert trees.average(torch.tensor([7.0]), [0.1]).item() == 7.0


def test_average_keeps_integers_and_dtypes():
    got = trees.average({"n": torch.tensor([1, 2]), "m": torch.tensor([10, 20], dtype=torch.int32)}, [1, 3])
    assert got["n"].dtype == torch.int64 and got["n"].item() == 2  # 1.75 rounded
    assert got["m"].dtype == torch.int32 and got["m"].item() == 18  # 17.5 to the even neighbour
    assert trees.average(torch.ones(2, 3, dtype=torch.float64), [1, 1]).dtype == torch.float64


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(FLOATS, st.lists(st.integers(0, 10**6), min_size=1, max_size=40).filter(any))
def test_the_average_of_equal_rows_is_that_row_to_the_bit(value, weights):
    assert trees.average(torch.tensor([value] * len(weights)), weights).item() == value


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1], [1, NAN], [1, float("inf")], [1], [1, 1, 1], [[1, 1]], 2])
def test_average_refuses_bad_weights(weights):
    with pytest.raises(ValueError, match="weights="):
        trees.average(torch.ones(2, 3), weights)


def test_take_put_and_row():
    t = tree()
    rows = trees.take(t, np.array([2, 0]))
    assert rows["b"][0]["n"].tolist() == [2, 0] and rows["a"][0].tolist() == [[8.0, 9.0], [10.0, 11.0]]
    assert memory(rows).isdisjoint(memory(t))
    new = trees.tree_map(lambda r: r + 1000, rows)
    trees.put(t, np.array([1, 2]), new)
    assert t["b"][0]["n"].tolist() == [0, 1002, 1000]
    assert (
        trees.unequal(trees.take(t, [1, 2]), new) == 0
        and trees.unequal(trees.take(t, [0]), trees.take(tree(), [0])) == 0
    )
    assert memory(t).isdisjoint(memory(new))
    assert trees.row(t, 1)["b"][2].shape == () and memory(trees.row(t, 1)) == memory(t)


def test_put_goes_by_name():
    t = {"head": torch.zeros(2), "W": torch.zeros(2)}
    trees.put(t, [0], {"W": torch.tensor([1.0]), "head": torch.tensor([2.0])})
    assert t["head"].tolist() == [2, 0] and t["W"].tolist() == [1, 0]


def test_expand_shares_and_repeat_does_not():
    one = trees.row(tree(), 1)
    seen, copies = trees.expand(one, 4), trees.repeat(one, 4)
    assert memory(seen) == memory(one) and memory(copies).isdisjoint(memory(one))
    assert trees.unequal(seen, copies) == 0 and seen["a"].shape == (4, 2, 2)
    copies["a"][0] = -1
    assert trees.unequal(trees.row(copies, 1), one) == 0


def test_join_puts_each_client_in_its_place():
    a, b = {"x": torch.tensor([[1.0], [3.0]]), "y": ()}, {"x": torch.tensor([[2.0]]), "y": ()}
    assert trees.join([a, b], np.array([0, 2, 1]))["x"].tolist() == [[1], [2], [3]]
    assert trees.join([b, a], [1, 0, 2])["x"].tolist() == [[1], [2], [3]]
    assert trees.join([(), ()], [0, 1]) == ()


def test_join_undoes_a_split():
    t, parts = tree(7), [[4], [0, 3, 6], [1, 2, 5]]
    order = np.argsort(np.concatenate(parts))
    joined = trees.join([trees.take(t, ids) for ids in parts], order)
    assert trees.unequal(joined, t) == 0 and joined["b"][0]["n"].dtype == torch.int64
    assert memory(joined).isdisjoint(memory(t))


def test_join_keeps_what_a_named_tuple_is():
    pair = Rows(torch.zeros(1, 2, 3), torch.ones(1, 2, dtype=torch.bool))
    joined = trees.join([pair, pair], [1, 0])
    assert isinstance(joined, Rows) and joined.values.shape == (2, 2, 3) and joined.present.dtype == torch.bool
    assert isinstance(trees.take(pair, [0]), Rows) and isinstance(trees.row(pair, 0), Rows)


def test_join_refuses_other_structures():
    with pytest.raises(ValueError, match="different structure"):
        trees.join([{"x": torch.ones(1)}, {"y": torch.ones(1)}], [0, 1])


def test_clone_full_like():
    t = trees.expand(tree(), 2)
    for copy in (trees.clone(t), trees.full_like(t, 0.25)):
        assert memory(copy).isdisjoint(memory(t)) and [x.shape for x in trees.leaves(copy)] == [
            x.shape for x in trees.leaves(t)
        ]
    trees.clone(t)["a"][0] = -1  # each row of a clone has memory of its own
    assert trees.unequal(trees.row(t, 0), trees.row(t, 1)) == 0
    assert trees.full_like(t, 0.25)["a"].unique().tolist() == [0.25]


def test_lerp_by_hand():
    start, end = {"w": torch.tensor([0.0, 2.0, 4.0])}, {"w": torch.tensor([1.0, 4.0, 0.0])}
    assert trees.lerp(start, end, {"w": torch.tensor([0.0, 0.5, 1.0])})["w"].tolist() == [0.0, 3.0, 0.0]


def test_unequal():
    a, b = tree(), tree()
    assert trees.unequal(a, b) == 0 and trees.unequal((), ()) == 0
    b["b"][0]["w"][2, 1] += 0.5
    b["a"][0, 0, 0] -= 0.25
    assert trees.unequal(a, b) == trees.unequal(b, a) == 0.5
    b["b"][2][0] = NAN
    assert np.isnan(trees.unequal(a, b)) and np.isnan(trees.unequal(b, b))
    infinite = {"x": torch.tensor([float("inf")])}
    assert trees.unequal(infinite, infinite) == 0 and trees.unequal(infinite, {"x": torch.zeros(1)}) == float("inf")
    assert np.isnan(trees.unequal(torch.zeros(3, 1), torch.zeros(1, 3)))
    assert trees.unequal({"x": torch.ones(2), "y": torch.zeros(2)}, {"y": torch.zeros(2), "x": torch.ones(2)}) == 0


def test_lerp_takes_the_end_of_integer_leaves():
    start, end, half = ({"w": torch.tensor([v]), "n": torch.tensor([k])} for v, k in ((1.0, 3), (2.0, 8), (0.5, 1)))
    mixed = trees.lerp(start, end, half)
    assert mixed["w"].item() == 1.5 and mixed["n"].item() == 8 and mixed["n"].dtype == torch.int64


def test_average_refuses_what_has_no_mean():
    with pytest.raises(ValueError, match="true and false have no mean"):
        trees.average({"present": torch.ones(2, 3, dtype=torch.bool)}, [1, 1])


def test_add_by_hand():
    t = {"w": torch.tensor([[1.0, 2.0]]), "b": ({}, torch.tensor([4.0])), "n": torch.tensor([3]), "yes": ONE.bool()}
    other = {
        "b": ({}, torch.tensor([2.0])),
        "w": torch.tensor([[10.0, 20.0]]),
        "n": torch.tensor([5]),
        "yes": ~ONE.bool(),
    }
    before = trees.clone((t, other))
    got = trees.add(t, other, -0.5)
    assert got["w"].tolist() == [[-4.0, -8.0]] and got["b"][1].tolist() == [3.0]
    assert got["n"].tolist() == [3] and got["n"].dtype == torch.int64 and got["yes"].tolist() == [True]
    assert trees.add(t, other)["w"].tolist() == [[11.0, 22.0]] and trees.add(t, t, 0)["w"].tolist() == [[1.0, 2.0]]
    assert trees.unequal((t, other), before) == 0 and memory(got).isdisjoint(memory((t, other)))


def test_add_keeps_dtypes_and_spreads_what_is_shared():
    t = tree()
    for alpha in (2, 0.5, np.float64(0.5), -1):
        got = trees.add(t, trees.expand(trees.row(t, 1), 3), alpha)
        assert [leaf.dtype for leaf in trees.leaves(got)] == [leaf.dtype for leaf in trees.leaves(t)]
        assert torch.equal(got["a"], t["a"] + t["a"][1] * alpha) and torch.equal(got["b"][0]["n"], t["b"][0]["n"])
    assert trees.unequal(trees.add(trees.add(t, t, 2.0), t, -2.0), t) == 0
    with pytest.raises(ValueError, match="different structure"):
        trees.add({"x": ONE}, {"y": ONE})


def test_like_undoes_leaves():
    t = {**tree(), "pair": Rows(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool)), "own": Trained(w=torch.ones(3))}
    same = trees.like(t, trees.leaves(t))
    assert trees.unequal(same, t) == 0 and all(a is b for a, b in zip(trees.leaves(same), trees.leaves(t), strict=True))
    assert isinstance(same["pair"], Rows) and type(same["own"]) is Trained and list(same) == list(t)
    assert trees.like(OrderedDict(z=0, a=(0, {})), [1, 2]) == OrderedDict(z=1, a=(2, {}))  # any values, in their order
    assert trees.like(({}, ()), []) == ({}, ()) and trees.like(0, [5]) == 5
    assert trees.like((0, 0), [None, None]) == (None, None)


@pytest.mark.parametrize("leaves", [[], [1], [1, 2, 3], [1, 2, 0], [1, 2, None]])
def test_like_refuses_too_few_and_too_many(leaves):
    with pytest.raises(ValueError, match=f"^like: {len(leaves)} tensors are (fewer|more) than the tree has leaves"):
        trees.like({"a": 0, "b": ({}, 0)}, leaves)


@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_finite_tells_the_clients_whose_numbers_are_not(bad):
    """Sums of inf and -inf, and sums too large for float32, are no numbers; 2e38 twice is fine all the same."""
    large = torch.full((4, 2), 2e38)
    values = torch.tensor([[0.0, 1.0], [bad, 1.0], [bad, -bad], [2.0, 3.0]])
    t = {"a": values, "n": torch.arange(4), "none": torch.ones(4, 0), "one": torch.ones(4), "large": large}
    assert trees.finite(t).tolist() == [True, False, False, True]
    assert trees.finite({"a": torch.tensor([1.0, bad, 2.0])}).tolist() == [True, False, True]
