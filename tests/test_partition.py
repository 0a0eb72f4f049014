"""Partitions: cases A of bad and hard input, the promises every scheme makes, and closed forms for what each draws."""

import hashlib
import json
import math
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from pflkit import partition as pt
from pflkit import streams

DIGITS = load_digits().target  # 1,797 labels of 10 classes
TEN = np.repeat(np.arange(10), 200)  # 10 classes of 200 samples
EVERY_SCHEME = pytest.mark.parametrize("scheme", pt.SCHEMES)


def sizes(p):
    return p.counts().sum(1)


def assert_promises(p, n):
    """Every sample is used exactly once, and everyone can train and be tested."""
    parts = [*p.train, *p.test]
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    assert sum(len(set(part.tolist())) for part in parts) == n
    assert min(len(part) for part in parts) >= 1
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert len(p.train) == len(p.test) == p.num_clients == p.settings["clients"]


@st.composite
def cases(draw):
    """A scheme with settings it can meet, on shuffled labels of uneven classes, some labels of which may not occur."""
    clients, present = draw(st.integers(1, 15)), draw(st.integers(2, 8))
    each = draw(st.lists(st.integers(200, 260), min_size=present, max_size=present))
    y = np.repeat(np.arange(present) * draw(st.sampled_from([1, 3])), each)
    y = np.random.default_rng(0).permutation(y)
    name, options = draw(st.sampled_from(list(pt.SCHEMES))), {}
    if name in ("pathological", "classes_per_client"):
        options["classes"] = draw(st.integers(math.ceil(present / clients), present))
    if name == "pathological":
        options |= {"grouped": draw(st.booleans()), "balanced": draw(st.booleans())}
    if name == "dirichlet":
        options |= {"beta": draw(st.sampled_from([1e-9, 0.01, 0.1, 1.0, 100.0])), "capped": draw(st.booleans())}
        options |= {"min_size": draw(st.integers(present + 1, 20))}
    options |= {"test_share": draw(st.floats(0.01, 0.99)), "stratify": draw(st.booleans())}
    return name, y, clients, options | {"seed": draw(st.integers(0, 2**40))}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_every_scheme_keeps_its_promises(case):
    name, y, clients, options = case
    p = pt.make(name, y, clients, **options)
    assert_promises(p, len(y))
    assert p.name == name and options.items() <= p.settings.items()
    assert p.counts().sum(0).tolist() == np.bincount(y).tolist()
    assert pt.make(name, y, clients, **options).fingerprint == p.fingerprint
    if "classes" in options:
        assert ((p.counts() > 0).sum(1) == options["classes"]).all()
    if "min_size" in options:
        assert sizes(p).min() >= options["min_size"]
    if options["stratify"]:
        for train, test in zip(p.train, p.test, strict=True):
            assert set(y[test]) <= set(y[train])


@EVERY_SCHEME
def test_the_seed_decides_everything(scheme):
    prints = [pt.make(scheme, DIGITS, 10, seed=seed).fingerprint for seed in (0, 1, 2, 0)]
    assert prints[0] == prints[3] and len(set(prints)) == 3


@EVERY_SCHEME
def test_default_split_is_a_quarter_to_test(scheme):
    p = pt.make(scheme, TEN, 10)
    assert [len(t) for t in p.test] == [round(n / 4) for n in sizes(p)]


# ---- cases A ----


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a1_tiny_beta_ends_and_serves_everyone(seed, capped):
    p = pt.dirichlet(DIGITS, 100, beta=0.01, capped=capped, seed=seed)
    assert_promises(p, 1797)
    assert p.settings["redraws"] <= pt.MAX_REDRAWS == 50
    assert sizes(p).min() >= p.settings["min_size"] >= 2


def test_a1_refuses_a_minimum_that_cannot_be_met():
    with pytest.raises(ValueError, match=r"clients=100, min_size=18: need 1800 samples, got 1797"):
        pt.dirichlet(DIGITS, 100, min_size=18)
    assert sizes(pt.dirichlet(DIGITS, 100, beta=0.01, min_size=17)).min() == 17


@EVERY_SCHEME
def test_a3_sixty_clients_none_empty(scheme):
    assert_promises(pt.make(scheme, DIGITS, 60), 1797)


@EVERY_SCHEME
@pytest.mark.parametrize("clients", [899, 1000, 1798])
def test_a3_a7_refuses_more_clients_than_the_samples_serve(scheme, clients):
    with pytest.raises(ValueError, match=f"clients={clients}: 1797 samples are too few, each needs 2"):
        pt.make(scheme, DIGITS, clients)


def test_every_client_may_have_just_two_samples():
    for p in (pt.iid(TEN, 1000), pt.dirichlet(TEN, 1000), pt.pathological(TEN, 1000, classes=1, balanced=True)):
        assert_promises(p, 2000)
        assert (sizes(p) == 2).all()


@pytest.mark.parametrize("seed", range(10))
def test_one_class_a_client_leaves_nobody_with_one_sample(seed):
    p = pt.pathological(np.repeat([0, 1], 11), 10, classes=1, seed=seed)  # 5 owners share 11 samples unevenly
    assert_promises(p, 22)
    with pytest.raises(ValueError, match=r"class 0 has 9 samples, too few for its 5 owners \(at least 2 each\)"):
        pt.pathological([0] * 9 + [1] * 11, 10, classes=1, seed=seed)


def test_a5_refuses_classes_without_an_owner():
    for scheme in (pt.pathological, pt.classes_per_client):
        with pytest.raises(ValueError, match=r"clients=3, classes=2: 4 of 10 classes would have no owner"):
            scheme(DIGITS, 3, 2)
        assert (scheme(DIGITS, 5, 2).counts().sum(0) == np.bincount(DIGITS)).all()  # 5 x 2 just suffices


def test_refuses_a_class_too_small_for_its_owners():
    y = np.array([0] * 100 + [1] * 3)
    with pytest.raises(ValueError, match="class 1 has 3 samples, too few for its 4 owners"):
        pt.pathological(y, 4, 2)
    assert_promises(pt.pathological(y, 3, 2), 103)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("pathological", {"classes": 0}, "classes=0: must be a whole number from 1 to 10"),
        ("pathological", {"classes": 11}, "classes=11: must be a whole number from 1 to 10"),
        ("classes_per_client", {"classes": 11}, "classes=11: "),
        ("classes_per_client", {"classes": 2.5}, "classes=2.5: "),
        ("classes_per_client", {"classes": "2"}, "classes='2': "),
        ("pathological", {"classes": True}, "classes=True: "),
        ("pathological", {"grouped": "false"}, "grouped='false': must be True or False"),
        ("pathological", {"balanced": 1}, "balanced=1: "),
        ("dirichlet", {"beta": 0}, "beta=0: "),
        ("dirichlet", {"beta": -0.1}, "beta=-0.1: "),
        ("dirichlet", {"beta": math.nan}, "beta=nan: "),
        ("dirichlet", {"beta": math.inf}, "beta=inf: "),
        ("dirichlet", {"beta": "0.1"}, "beta='0.1': "),
        ("dirichlet", {"beta": 1e-320}, "beta=1e-320: "),
        ("dirichlet", {"min_size": 1}, "min_size=1: must be a whole number, at least 2"),
        ("dirichlet", {"capped": None}, "capped=None: "),
        ("iid", {"clients": 0}, "clients=0: must be a whole number, at least 1"),
        ("iid", {"clients": -1}, "clients=-1: "),
        ("iid", {"clients": "20"}, "clients='20': "),
        ("iid", {"clients": True}, "clients=True: "),
        ("iid", {"clients": 20.0}, "clients=20.0: "),
        ("iid", {"test_share": 0}, "test_share=0: "),
        ("iid", {"test_share": 1}, "test_share=1: "),
        ("iid", {"test_share": math.nan}, "test_share=nan: "),
        ("iid", {"stratify": "no"}, "stratify='no': "),
        ("iid", {"seed": -1}, "seed=-1: must be a whole number, at least 0"),
        ("iid", {"seed": None}, "seed=None: "),
        ("iid", {"seed": 0.5}, "seed=0.5: "),
        ("iid", {"y": np.zeros((10, 2), int)}, "y: must be a 1-D array of class labels"),
        ("iid", {"y": np.array([0.0, 1.0] * 9)}, "y: must be "),
        ("iid", {"y": ["a", "b"] * 9}, "y: must be "),
        ("iid", {"y": [0, -1] * 9}, "y: must be "),
        ("iid", {"y": [0, 10**12] * 9}, "y: must be "),
        ("iid", {"y": []}, "y: must be "),
        ("dirichlet", {"alpha": 0.1}, "alpha=0.1: not a setting of partition 'dirichlet', which has beta, min_size"),
        ("iid", {"beta": 0.1}, "beta=0.1: not a setting of partition 'iid', which has test_share, stratify, seed"),
        ("Dirichlet", {}, "partition='Dirichlet': must be one of 'iid', 'pathological', 'dirichlet'"),
    ],
)
def test_a7_refuses_bad_values_by_name(scheme, options, message):
    with pytest.raises(ValueError) as error:
        pt.make(scheme, **({"y": DIGITS, "clients": 20} | options))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@EVERY_SCHEME
def test_a14_global_random_states_neither_matter_nor_change(scheme):
    first = pt.make(scheme, DIGITS, 20, seed=3)
    torch.rand(3), np.random.random(3), random.random()
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    second = pt.make(scheme, DIGITS, 20, seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1][1]) and np.random.get_state()[2] == before[1][2]
    assert random.getstate() == before[2]
    for a, b in zip([*first.train, *first.test], [*second.train, *second.test], strict=True):
        assert np.array_equal(a, b)


@EVERY_SCHEME
def test_other_containers_give_the_same_and_settings_are_plain(scheme):
    p = pt.make(scheme, DIGITS, 20)
    assert pt.make(scheme, torch.from_numpy(DIGITS), np.int8(20)).fingerprint == p.fingerprint
    assert pt.make(scheme, DIGITS.astype(np.uint8).tolist(), 20).fingerprint == p.fingerprint
    assert json.loads(json.dumps(p.settings)) == p.settings


# ---- what each scheme draws ----


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.lists(st.floats(0, 1e3), min_size=1, max_size=30).filter(lambda w: sum(w) > 1e-3))
def test_apportion_is_whole_and_within_one_of_exact(total, weights):
    share = pt.apportion(total, weights)
    assert share.sum() == total
    assert (np.abs(share - total * np.array(weights) / sum(weights)) < 1 + 1e-6).all()


def test_iid_sizes_and_class_shares():
    p = pt.iid(DIGITS, 20)
    assert set(sizes(p)) == {89, 90}
    p = pt.iid(np.repeat(np.arange(4), 5000), 10)
    # a client's share of a class is hypergeometric, with standard deviation below sqrt(.25 * .75 / 2000) = .0097
    assert np.abs(p.counts() / 2000 - 0.25).max() < 0.05


@pytest.mark.parametrize("scheme", ["pathological", "dirichlet", "classes_per_client"])
def test_which_samples_of_a_class_a_client_gets_is_random(scheme):
    """The order of the data set may mean something (here: each writer's digits follow one another)."""
    p = pt.make(scheme, TEN, 20)
    everyone = [np.sort(np.concatenate(both)) for both in zip(p.train, p.test, strict=True)]
    gaps = np.concatenate([np.diff(held[p.y[held] == k]) for held in everyone for k in range(10)])
    assert (gaps > 1).mean() > 0.2  # all are 1 where slices in data order are handed out


@pytest.mark.parametrize(("clients", "classes", "groups"), [(20, 2, 5), (12, 2, 5), (7, 2, 5), (7, 3, 4), (4, 10, 1)])
def test_grouped_clients_hold_equal_class_sets(clients, classes, groups):
    held = pt.pathological(DIGITS, clients, classes).counts() > 0
    neighbours = (held[1:] != held[:-1]).any(1)
    assert neighbours.sum() == groups - 1 == len(np.unique(held, axis=0)) - 1  # groups are runs of neighbours
    members = np.diff([0, *np.flatnonzero(neighbours) + 1, clients])
    assert members.max() - members.min() <= 1
    assert held.any(0).all()


def test_grouped_twenty_clients_are_the_papers_five_groups_of_four():
    held = pt.pathological(DIGITS, 20).counts() > 0
    assert [np.flatnonzero(row).tolist() for row in held] == [[i // 4 * 2, i // 4 * 2 + 1] for i in range(20)]


def test_the_last_of_a_group_is_not_systematically_the_largest():
    """Where the last owner takes what the others leave, it holds 2.35 mean shares instead of 1."""
    groups = np.concatenate([sizes(pt.pathological(TEN, 20, seed=s)).reshape(5, 4) for s in range(100)])
    shares = groups / groups.mean(1, keepdims=True)
    assert np.abs(shares.mean(0) - 1).max() < 0.1  # 500 groups: a standard error of about .015
    largest = np.bincount(groups.argmax(1), minlength=4) / len(groups)
    assert np.abs(largest - 1 / 4).max() < 0.1


def test_unbalanced_shares_are_uneven_but_at_least_a_tenth_of_the_mean():
    shares = np.concatenate([pt.pathological(TEN, 20, seed=s).counts()[:4, 0] for s in range(50)])
    assert shares.min() >= 0.1 * 50 - 1
    assert shares.std() > 10  # uniform weights on [.1, 1] spread a share of mean 50 by about 20


@pytest.mark.parametrize("grouped", [True, False])
def test_balanced_classes_are_equal_to_within_one(grouped):
    counts = pt.pathological(DIGITS, 20, 2, grouped=grouped, balanced=True).counts()
    for column in counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1
    assert set(pt.pathological(TEN, 20, balanced=True).counts().ravel()) == {0, 50}


def test_what_rounding_leaves_goes_to_no_client_in_particular():
    y = np.repeat(np.arange(10), 199)  # 50, 50, 50 and 49 for four owners
    short = [(pt.pathological(y, 20, balanced=True, seed=s).counts() == 49).any(1).reshape(5, 4) for s in range(40)]
    assert np.mean(short, axis=(0, 1)).min() > 0.2  # each owner is short of one class or both in 7 of 16 cases


@pytest.mark.parametrize("scheme", ["pathological", "classes_per_client"])
def test_random_class_sets(scheme):
    options = {"grouped": False} if scheme == "pathological" else {}
    held = np.stack([pt.make(scheme, TEN, 23, classes=3, seed=s, **options).counts() > 0 for s in range(100)])
    assert (held.sum(2) == 3).all()
    owners = held.sum(1)
    assert owners.min() == 6 and owners.max() == 7  # 23 * 3 / 10 = 6.9 owners a class
    assert np.abs(held.mean(0) - 0.3).max() < 0.2  # any client may hold any class: standard error .046
    assert np.mean([len(np.unique(h, axis=0)) for h in held]) > 15  # few of the 23 sets are alike


def test_classes_per_client_shares_are_mild():
    """Weights of .4 to .6: nobody has more than 1.5 times another's share, and most differ."""
    for seed in range(20):
        counts = pt.classes_per_client(TEN, 20, 2, seed=seed).counts()
        for column in counts.T:
            owned = column[column > 0]
            assert len(owned) == 4 and owned.min() + 1 >= (owned.max() - 1) / 1.5
        assert counts[counts > 0].std() > 2


def test_dirichlet_concentration_is_that_of_the_true_dirichlet():
    """E[sum of squared shares] = (beta + 1) / (N beta + 1), here 1.5 / 6; an exchangeable mean share of 1 / N."""
    runs = [pt.dirichlet(TEN, 10, beta=0.5, min_size=2, seed=s) for s in range(60)]
    assert sum(p.settings["moved"] for p in runs) == 0
    shares = np.stack([p.counts() for p in runs]) / 200
    assert (shares**2).sum(1).mean() == pytest.approx(0.25, abs=0.02)
    assert np.abs(shares.mean((0, 2)) - 0.1).max() < 0.03  # 600 draws a client: standard error .005


def test_dirichlet_limits():
    assert np.abs(pt.dirichlet(TEN, 10, beta=1e9).counts() - 20).max() <= 1
    one_owner = pt.dirichlet(TEN, 2, beta=1e-9, min_size=2, seed=1)
    assert one_owner.settings["moved"] == 0 and set(one_owner.counts().ravel()) == {0, 200}


def test_capped_gives_full_clients_nothing_more_and_uncapped_does():
    violations = {}
    for capped in (False, True):
        runs = [pt.dirichlet(TEN, 10, 0.1, min_size=2, capped=capped, seed=s) for s in range(20)]
        violations[capped] = 0
        for p in (p for p in runs if p.settings["moved"] == 0):
            before = p.counts().cumsum(1)[:, :-1]
            violations[capped] += ((p.counts()[:, 1:] > 0) & (before >= 200)).sum()
        assert sum(p.settings["moved"] == 0 for p in runs) > 10
        assert all(p.settings["capped"] is capped for p in runs)
    assert violations[True] == 0 < violations[False]


def test_dirichlet_records_redraws_and_moves_only_when_needed():
    easy = pt.dirichlet(TEN, 10, beta=100)
    assert (easy.settings["redraws"], easy.settings["moved"]) == (0, 0)
    hard = pt.dirichlet(TEN, 50, beta=0.01, min_size=10)
    assert hard.settings["redraws"] == 50 and hard.settings["moved"] > 0
    assert sizes(hard).min() == 10


def test_the_draw_that_lacked_least_is_repaired():
    rng = streams.rng(4, "partition", "dirichlet")
    draws = [pt._dirichlet_counts(np.bincount(DIGITS), 50, 0.05, False, rng).sum(1) for _ in range(51)]
    lacking = [np.maximum(15 - drawn, 0).sum() for drawn in draws]
    assert pt.dirichlet(DIGITS, 50, 0.05, min_size=15, seed=4).settings["moved"] == min(lacking) < lacking[-1]


@pytest.mark.parametrize(("n", "clients", "expected"), [(60_000, 20, 40), (1797, 20, 14), (1797, 100, 2), (40, 20, 2)])
def test_default_min_size(n, clients, expected):
    y = np.arange(n) % 10
    assert pt.dirichlet(y, clients, beta=10).settings["min_size"] == expected


def test_fill_up_by_hand():
    counts = np.array([[6, 4], [0, 0], [3, 1]])
    assert pt._fill_up(counts, 3).tolist() == [[3, 4], [3, 0], [3, 1]]
    assert counts.tolist() == [[6, 4], [0, 0], [3, 1]]  # its argument is left alone
    # client 0 can spare one sample only, so client 1 gives the other
    assert pt._fill_up(np.array([[4, 0], [0, 4], [1, 0]]), 3).tolist() == [[3, 0], [0, 3], [2, 1]]
    # all of class 0, then one of class 1: the giver may not fall below 3 itself
    assert pt._fill_up(np.array([[2, 2, 2], [0, 0, 0]]), 3).tolist() == [[0, 1, 2], [2, 1, 0]]


# ---- training and test part ----


def test_stratified_counts_by_hand():
    p = pt.iid(np.repeat([0, 1], 40), 1, stratify=True)
    assert np.bincount(p.y[p.test[0]]).tolist() == [10, 10]
    p = pt.iid([0] * 39 + [1], 1, stratify=True)  # the only sample of class 1 trains
    assert (p.y[p.test[0]].tolist(), p.y[p.train[0]].sum()) == ([0] * 10, 1)
    p = pt.iid([0, 1, 2] + [3] * 9, 1, stratify=True)  # exactly .25, .25, .25, 2.25, but only class 3 can spare any
    assert p.y[p.test[0]].tolist() == [3, 3, 3]
    p = pt.iid([0, 0, 1, 1, 2, 2], 1, stratify=True, test_share=0.9)  # 5 asked, 3 can be spared
    assert p.y[p.test[0]].tolist() == [0, 1, 2]


def test_unstratified_test_can_hold_a_class_that_training_lacks():
    """As in the papers' splits: among many seeds the single sample of a class lands in the test part in one of four."""
    lacks = [0 in pt.iid([1] + [0] * 7, 1, seed=s).test[0] for s in range(200)]
    assert 0.15 < np.mean(lacks) < 0.35


def test_stratify_refuses_where_nothing_is_left_to_test():
    with pytest.raises(ValueError, match="stratify=True: client 0 has one sample of each of its classes"):
        pt.iid(np.arange(10), 5, stratify=True)


# ---- Partition ----


def test_custom_and_describe_by_hand():
    y = [0, 0, 1, 1, 2, 2, 7, 0]
    p = pt.custom(y, train=[[0, 2], [7, 4, 1]], test=[[6, 3], [5]])  # class 7 of client 0 is never trained on
    assert p.num_classes == 8 and p.num_clients == 2
    assert p.counts().tolist() == [[1, 2, 0, 0, 0, 0, 0, 1], [2, 0, 2, 0, 0, 0, 0, 0]]
    table = p.describe()
    assert list(table.columns) == ["client", "train", "test", "classes", "entropy"]
    assert table[["client", "train", "test", "classes"]].values.tolist() == [[0, 2, 2, 3], [1, 3, 1, 2]]
    assert table.entropy.tolist() == [1.5, 1.0]  # 1/4, 1/2, 1/4 and 1/2, 1/2, in bits
    expected = hashlib.sha256(struct.pack("<12q", 2, 3, 2, 1, 0, 2, 1, 4, 7, 3, 6, 5)).hexdigest()
    assert p.fingerprint == expected


def test_custom_single_class_clients_and_unused_samples():
    p = pt.custom(DIGITS, [np.array([0, 10])], [np.array([20])])
    assert p.num_classes == 10 and p.describe().entropy.tolist() == [0.0] == [pt.entropy([3])]


def test_the_fingerprint_sees_who_holds_what():
    y = [0] * 6
    prints = [
        pt.custom(y, [[0], [1]], [[2], [3]]).fingerprint,
        pt.custom(y, [[1], [0]], [[2], [3]]).fingerprint,
        pt.custom(y, [[0], [1]], [[3], [2]]).fingerprint,
        pt.custom(y, [[0, 1], [2]], [[3], [4]]).fingerprint,
        pt.custom(y, [[0], [1, 2]], [[3], [4]]).fingerprint,
    ]
    assert len(set(prints)) == 5


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([[0, 1]], [[1]], "train, test: 1 samples are used twice, the first is sample 1"),
        ([[0], [0]], [[1], [2]], "train, test: 1 samples are used twice"),
        ([[0, 0]], [[1]], "train, test: 1 samples are used twice"),
        ([[0], [1]], [[2], [2]], "train, test: 1 samples are used twice"),
        ([[0], []], [[1], [2]], r"train\[1\]: must be a 1-D array of sample indices from 0 to 3, at least one"),
        ([[0]], [[]], r"test\[0\]: must be"),
        ([[4]], [[1]], r"train\[0\]: must be"),
        ([[-1]], [[1]], r"train\[0\]: must be"),
        ([[0.0]], [[1]], r"train\[0\]: must be"),
        ([[True, False, False, False]], [[1]], r"train\[0\]: must be"),
        ([0, 1], [2, 3], r"train\[0\]: must be"),
        ([[0]], [[1], [2]], "train, test: must have one index array for each client, got 1 and 2"),
        ([], [], "train, test: must have one index array"),
    ],
)
def test_custom_refuses(train, test, message):
    with pytest.raises(ValueError, match=message):
        pt.custom([0, 1, 0, 1], train, test)


def test_describe_sums_to_the_data_set():
    table = pt.dirichlet(DIGITS, 20).describe()
    assert table.train.sum() + table.test.sum() == 1797
    assert len(table) == 20 and table.entropy.between(0, np.log2(10)).all()


def test_a_partition_keeps_its_own_labels_and_prints_short():
    y = DIGITS.copy()
    p = pt.pathological(y, 20)
    y[:] = 0
    assert (p.y == DIGITS).all()
    assert len(repr(p)) < 300
