import copy
import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch

from pflkit import claims, data, evidence, protocols
from pflkit.claims import comparisons, fedgh, report, scale
from pflkit.experiment import History, experiment
from pflkit.federation import State
from pflkit.methods import METHODS
from pflkit.training import Training

PRODUCT = {"fedavg": "before", "fedprox": "before"}
BYTES = {"fedavg": 100, "fedah": 100, "fedper": 90, "fedrep": 90, "fedfomo": 600, "fedala": 100} | {"fedapa": 90}
LR = {"cnn": 0.005, "lenet5": 0.01, "resnet18": 0.01, "fasttext": 0.01, "mlp": 0.05} | dict.fromkeys(
    ("cnn-1", fedgh.MIXED), 0.01
)
RULE = "the stopping rule of FedAH's released code: 100 evaluations without a new best"
PAPER = {"dataset": "tiny-imagenet", "model": "resnet18", "samples": 110_000, "rounds": 102}


def history(method, curve, seed=0, dataset="digits", model="mlp", samples=1797, rounds=None, **changes):
    """A run whose accuracies at the method's own point, in %, are `curve`; the last value is held to fill `rounds`."""
    product = PRODUCT.get(method, "after")
    curve = [*curve, *[curve[-1]] * ((rounds or len(curve)) - len(curve))]
    rows = [
        {"round": t, "joined": 2, product: value / 100, "bytes_down": 2 * BYTES.get(method, 1), "bytes_up": 0}
        | {"flops": 1, "seconds": 1.0}
        for t, value in enumerate(curve, 1)
    ]
    other = {"before": "after", "after": "before"}[product]
    rows = [row | {other: 0.5} for row in rows]
    clients = pd.DataFrame({"client": [0, 1, 0, 1], "n_train": [1, samples - 3, 1, samples - 3], "n_test": [1] * 4})
    partition = {
        "name": "dirichlet",
        "beta": 0.1,
        "min_size": 40,
        "capped": False,
        "clients": 20,
        "test_share": 0.25,
        "stratify": False,
        "seed": seed,
        "redraws": seed,
        "moved": 0,
        "fingerprint": str(seed),
    }
    config = {
        "method": method,
        "settings": asdict(METHODS[method]()) if method in METHODS else {},
        "dataset": {"name": dataset, "fingerprint": "x"},
        "partition": partition,
        "clients": 20,
        "model": {"name": model, "modules": [], "weights": str(seed)},
        "training": asdict(Training(lr=LR[model])),
        "join_ratio": (1.0, 1.0),
        "rounds": len(curve),
        "eval_every": 1,
        "seed": seed,
        "dtype": "torch.float32",
    }
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    return History(config, product, pd.DataFrame(rows), clients, pd.DataFrame(), labels=None, state=None)


def runs(seeds=3, **last):
    """{method: [History, ...]} that end at `last`: a list of accuracies in %, one a seed."""
    return {m: [history(m, [values[s]], s) for s in range(seeds)] for m, values in last.items()}


def full(seeds=5, **last):
    """The same at the paper's scale: best in round 2 of 102, so just converged by the rule of 100 evaluations."""
    return {m: [history(m, [v - 9, v], s, **PAPER) for s, v in enumerate(values[:seeds])] for m, values in last.items()}


# --- intervals: t(.975) is 4.3027 for 3 values, 2.7764 for 5 ----------------------------------------------------------


def test_t_interval_by_hand():
    assert comparisons.interval([1, 2, 3]) == pytest.approx(
        (2, 2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3))
    )
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)  # 1..5: deviations 4 + 1 + 0 + 1 + 4 = 10, over n - 1 = 4
    assert comparisons.interval([1, 2, 3, 4, 5]) == pytest.approx((3, 3 - half, 3 + half))


def test_one_value_has_no_interval_and_equal_ones_have_a_point():
    assert comparisons.interval([7]) == (7, -math.inf, math.inf)
    assert comparisons.interval([7, 7, 7]) == (7, 7, 7)


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([2, 3, 4], True),  # 3 ± 2.48
        ([1, 2, 3], None),  # 2 ± 2.48
        ([-4, -3, -2], False),
        ([5], None),
    ],
)
def test_above_needs_an_interval_on_one_side_of_0(values, holds):
    assert comparisons.above("a − b", values).holds is holds


@pytest.mark.parametrize(
    ("values", "holds"),
    [
        ([-0.2, 0, 0.2], True),  # 0 ± .497
        ([0.4, 0.5, 0.6], True),  # .5 ± .248: it excludes 0, and is close all the same
        ([-1, 0, 1], None),  # 0 ± 2.48: contains 0, but shows nothing
        ([0.8, 0.9, 1.0], None),  # .9 ± .248 straddles the margin
        ([2, 2.1, 2.2], False),  # 2.1 ± .248
        ([-2.2, -2.1, -2], False),
        ([0.1], None),
    ],
)
def test_close_needs_an_interval_within_the_margin(values, holds):
    assert comparisons.close("a − b", values, 1.0).holds is holds


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_agrees_at_reduced_scale():
    found = claims.check("AH7", runs(fedavg=[80, 81, 79], fedah=[82, 84, 83]))  # ahead by 2, 3, 4
    assert found.verdict == "agrees at reduced scale"
    (number,) = found.numbers
    assert number.what == "fedah − fedavg" and number.values == pytest.approx((2, 3, 4))
    assert (number.low, number.high) == pytest.approx((3 - 2.484138, 3 + 2.484138))
    assert "digits with mlp" in found.why and "3 of at least 5 seeds" in found.why
    assert "without fedala, fedrep, fedper" in found.why
    assert str(found) == "agrees at reduced scale (2 of 10 methods)"


def test_disagrees_at_reduced_scale():
    found = claims.check("AH7", runs(fedavg=[80, 81, 79], fedah=[78, 78, 75]))
    assert found.verdict == "disagrees at reduced scale"
    assert "contradicted by fedah − fedavg" in found.why


def test_a_tie_is_not_tested_and_says_so():
    found = claims.check("AH7", runs(fedavg=[80, 81, 79], fedah=[81, 83, 82]))  # 1, 2, 3
    assert found.verdict == "not tested" and "within noise: fedah − fedavg" in found.why


def test_an_open_question_of_closeness_says_whether_0_is_in_reach():
    wide = claims.check("AH6", runs(fedper=[80, 81, 79], fedrep=[79, 81, 80]))  # 1, 0, -1
    assert (wide.verdict, wide.why) == ("not tested", "within noise, but not shown to be within ±1: fedper − fedrep")
    edge = claims.check("AH6", runs(fedper=[80.8, 81.9, 80], fedrep=[80, 81, 79]))  # .8, .9, 1
    assert (edge.verdict, edge.why) == ("not tested", "not 0, but not shown to be within ±1: fedper − fedrep")


def test_one_tie_keeps_a_claim_about_all_open_and_one_contradiction_settles_it():
    ahead, tied, behind = [90, 92, 91], [81, 83, 82], [70, 71, 68]
    start = {"fedavg": [80, 81, 79], "fedah": ahead}
    found = claims.check("AH7", runs(**start, fedrep=tied))
    assert found.verdict == "not tested" and "fedrep" in found.why and "fedah" not in found.why
    found = claims.check("AH7", runs(**start, fedrep=tied, fedper=behind))
    assert found.verdict == "disagrees at reduced scale" and "contradicted by fedper − fedavg" in found.why


def test_reproduced_and_not_reproduced_at_full_scale():
    near = claims.check("AH6", full(fedper=[50, 50.1, 50.2, 50.3, 50.4], fedrep=[50.2, 50, 50.3, 50.2, 50.5]))
    assert (near.verdict, near.why, str(near)) == ("reproduced", "", "reproduced")
    far = claims.check("AH6", full(fedper=[50, 50.1, 50.2, 50.3, 50.4], fedrep=[55, 56, 55, 56, 55]))
    assert far.verdict == "not reproduced" and far.why == "contradicted by fedper − fedrep"


CLOSE = {"fedper": [50, 50.1, 50.2, 50.3, 50.4], "fedrep": [50.2, 50, 50.3, 50.2, 50.5]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dataset": "cifar100"}, "cifar100 with resnet18, the paper: tiny-imagenet with resnet18"),
        ({"model": "cnn"}, "tiny-imagenet with cnn"),
        ({"samples": 109_999}, "a part of the data"),
        ({"clients": 10}, "clients 10, the protocol: 20"),
        ({"join_ratio": (0.5, 0.5)}, "join_ratio (0.5, 0.5), the protocol: (1.0, 1.0)"),
        ({"training": {"batch_size": 16}}, "batch_size 16, the protocol: 10"),
        ({"training": {"epochs": 5}}, "epochs 5, the protocol: 1"),
        ({"training": {"lr": 0.005}}, "lr 0.005, the protocol: 0.01"),
        ({"training": {"momentum": 0.9}}, "momentum 0.9, the protocol: 0.0"),
        ({"training": {"weight_decay": 0.1}}, "weight_decay 0.1, the protocol: 0.0"),
        ({"training": {"clip": 1.0}}, "clip 1.0, the protocol: None"),
        ({"training": {"drop_last": True}}, "drop_last True, the protocol: False"),
        ({"partition": {"beta": 0.5}}, "beta 0.5, the protocol: 0.1"),
        ({"partition": {"test_share": 0.5}}, "test_share 0.5, the protocol: 0.25"),
        ({"partition": {"stratify": True}}, "stratify True, the protocol: False"),
        ({"partition": {"min_size": 4000}}, "min_size 4000, the protocol: at most 40"),
        ({"partition": {"name": "pathological"}}, "partition pathological, the protocol: dirichlet"),  # TINY: Dir only
        (
            {"rounds": 101},
            f"10 of 10 runs not converged ({RULE})",
        ),
    ],
)
def test_each_precondition_of_reproduced(change, why):
    found = claims.check(
        "AH6",
        {
            m: [history(m, [v - 9, v], s, **(PAPER | change)) for s, v in enumerate(values)]
            for m, values in CLOSE.items()
        },
    )
    assert found.verdict == "agrees at reduced scale" and why in found.why and found.why.count(";") == 0


def test_full_data_are_all_that_the_loaders_yield():
    """Numbers as the data sets' own sites give them; of Tiny-ImageNet 500 and 50 images a class, no test images."""
    full = {
        "digits": len(data.load("digits").y),
        "fashion-mnist": 60_000 + 10_000,
        "mnist": 60_000 + 10_000,
        "cifar10": 50_000 + 10_000,
        "cifar100": 50_000 + 10_000,
        "tiny-imagenet": 200 * (500 + 50),
        "agnews": 120_000 + 7_600,
    }
    assert full == scale.SIZES and full.keys() == data.LOADERS.keys()


def test_one_seed_on_a_part_of_the_data_reproduces_nothing():
    there = full(**CLOSE)
    for method, values in CLOSE.items():
        there[method][3] = history(method, [values[3]], 3, **(PAPER | {"samples": 109_999}))
    found = claims.check("AH6", there)
    assert found.verdict == "agrees at reduced scale" and "a part of the data" in found.why


def test_four_seeds_reproduce_nothing():
    found = claims.check("AH6", full(4, **CLOSE))
    assert (found.verdict, found.why) == ("agrees at reduced scale", "4 of at least 5 seeds")


def at_full_scale(dataset, partition, fedah=None, model="cnn", own=(), **training):
    """The claim AH7 by fabricated runs of a model at full scale, FedAH far ahead, its settings changed by `fedah`.

    own: the data set's own settings, as they stand in a configuration.
    """
    size = {"dataset": dataset, "model": model, "samples": scale.SIZES[dataset], "rounds": 102}
    changes = {"partition": partition, "training": training}
    settings = {"fedavg": {}, "fedah": fedah or {}}
    there = {
        m: [history(m, [v - 9, v], s, settings=settings[m], **size, **changes) for s in range(5)]
        for m, v in (("fedavg", 50), ("fedah", 60))
    }
    for run in (run for group in there.values() for run in group):
        run.config["dataset"] |= dict(own)
    found = claims.check("AH7", there)
    return found.verdict, found.why.split("; ")[:-1]  # the last names the methods without runs


GROUPS = {"name": "pathological", "classes": 2, "grouped": True, "balanced": False, "beta": None, "min_size": 0}


def test_either_split_of_the_paper_will_do_each_with_its_classes():
    assert at_full_scale("cifar10", {}) == ("reproduced", [])
    assert at_full_scale("cifar10", {"capped": True}) == ("reproduced", [])
    assert at_full_scale("cifar10", GROUPS) == ("reproduced", [])
    assert at_full_scale("cifar100", GROUPS | {"classes": 10}) == ("reproduced", [])
    assert at_full_scale("cifar100", GROUPS) == ("agrees at reduced scale", ["classes 2, the protocol: 10"])
    drawn = at_full_scale("cifar10", GROUPS | {"grouped": False})
    assert drawn == ("agrees at reduced scale", ["grouped False, the protocol: True"])


def test_runs_by_another_protocol_reproduce_nothing():
    split = GROUPS | {"classes": 5, "balanced": True, "test_share": 0.5}
    verdict, why = at_full_scale("cifar10", split, {"weight_lr": 1.0}, lr=0.5, momentum=0.9)
    assert verdict == "agrees at reduced scale"
    assert set(why) == {
        "classes 5, the protocol: 2",
        "balanced True, the protocol: False",
        "test_share 0.5, the protocol: 0.25",
        "lr 0.5, the protocol: 0.005",
        "momentum 0.9, the protocol: 0.0",
        "fedah's weight_lr 1.0, its default: None",
    }


def test_texts_cut_otherwise_than_by_default_reproduce_nothing():
    assert at_full_scale("agnews", {}, model="fasttext", own={"length": 200, "ngrams": 1}) == ("reproduced", [])
    verdict, why = at_full_scale("agnews", {}, model="fasttext", own={"length": 50, "ngrams": 2})
    assert verdict == "agrees at reduced scale"
    assert why == ["agnews's length 50, its default: 200", "agnews's ngrams 2, its default: 1"]


def test_a_method_with_other_settings_reproduces_nothing():
    verdict, why = at_full_scale("cifar10", {}, {"weight_epochs": 0, "weight_init": 0})
    assert verdict == "agrees at reduced scale"
    assert why == ["fedah's weight_epochs 0, its default: 1", "fedah's weight_init 0, its default: 1.0"]


def test_a_model_that_the_paper_lacks_has_no_rate_of_its():
    assert "lr" not in claims.check("AH7", runs(fedavg=[80, 81, 79], fedah=[82, 84, 83])).why


def test_two_seeds_and_unknown_data_give_no_verdict():
    ahead = {"fedavg": [80, 81, 79], "fedah": [90, 92, 91]}
    found = claims.check("AH7", runs(2, **ahead))
    assert found.verdict == "not tested" and "2 of at least 3 seeds" in found.why
    own = {m: [history(m, [v], s, dataset="mine.npz") for s, v in enumerate(vs)] for m, vs in ahead.items()}
    found = claims.check("AH7", own)
    assert found.verdict == "not tested" and "mine.npz is not known to be a real data set" in found.why


def test_heterogeneity_is_part_of_ah7():
    split = {"beta": 0.5}
    alike = {m: [history(m, [v], s, partition=split) for s in range(3)] for m, v in (("fedavg", 80), ("fedah", 90))}
    assert "not strongly heterogeneous" in claims.check("AH7", alike).why
    split = {"name": "pathological", "classes": 2, "grouped": True}
    skewed = {m: [history(m, [v], s, partition=split) for s in range(3)] for m, v in (("fedavg", 80), ("fedah", 90))}
    assert claims.check("AH7", skewed).verdict == "agrees at reduced scale"


def test_the_product_decides_which_accuracy_counts():
    low_before = runs(fedavg=[80, 81, 79], fedah=[82, 84, 83])
    assert all(h.product == "before" and h.rounds["after"].eq(0.5).all() for h in low_before["fedavg"])
    assert claims.check("AH7", low_before).numbers[0].mean == pytest.approx(3)


# --- AH8 --------------------------------------------------------------------------------------------------------------


def kept(drops, tail=100):
    """FedAH with its best, 90 %, in round 2, and 90 − drop in each of the `tail` rounds after it."""
    return {"fedah": [history("fedah", [50, 90, *[90 - d] * tail], s) for s, d in enumerate(drops)]}


@pytest.mark.parametrize(
    ("drops", "verdict"),
    [
        ([0.1, 0.2, 0.3], "agrees at reduced scale"),  # .2 ± .248
        ([0.1, 1.0, 1.9], "not tested"),
        ([4, 4.1, 4.2], "disagrees at reduced scale"),
    ],
)
def test_what_is_left_of_the_best_after_convergence(drops, verdict):
    assert claims.check("AH8", kept(drops, tail=100)).verdict == verdict


def test_before_convergence_nothing_is_said_of_what_follows_it(monkeypatch):
    found = claims.check("AH8", kept([0.1, 0.2, 0.3], tail=99))
    assert found.verdict == "not tested" and "3 of 3 runs not converged" in found.why
    monkeypatch.setattr(scale, "PATIENCE", 50)
    assert claims.check("AH8", kept([0.1, 0.2, 0.3], tail=99)).verdict == "agrees at reduced scale"


# --- AH12: the ledger -------------------------------------------------------------------------------------------------


def ledger(*methods, **changes):
    return {m: [history(m, [50], **changes)] for m in methods}


def test_the_ledger_is_exact_at_any_scale():
    found = claims.check("AH12", ledger("fedah", "fedavg", "fedper", "fedrep", dataset="mine.npz"))
    assert found.verdict == "reproduced"
    assert str(found) == "reproduced (2 of 3 parts, 4 of 11 methods)"
    assert "not checked: FedFomo highest" in found.why
    assert {n.what: n.mean for n in found.numbers} == {
        "fedah − fedavg": 0,
        "fedper − fedah": -10,
        "fedper − fedavg": -10,
        "fedrep − fedah": -10,
        "fedrep − fedavg": -10,
    }


def test_with_fedfomo_all_parts_are_checked():
    found = claims.check("AH12", ledger("fedah", "fedavg", "fedper", "fedrep", "fedfomo", "fedala"))
    assert found.verdict == "reproduced" and found.coverage == "6 of 11 methods" and "not checked" not in found.why
    assert {"fedfomo − fedala", "fedfomo − fedah", "fedper − fedfomo"} <= {n.what for n in found.numbers}


@pytest.mark.parametrize(("method", "size"), [("fedah", 101), ("fedah", 99), ("fedper", 100), ("fedrep", 101)])
def test_a_broken_identity_is_not_reproduced(monkeypatch, method, size):
    monkeypatch.setitem(BYTES, method, size)
    found = claims.check("AH12", ledger("fedah", "fedavg", "fedper", "fedrep"))
    assert found.verdict == "not reproduced" and f"contradicted by {method} − " in found.why


def test_fedfomo_that_is_not_highest_is_not_reproduced(monkeypatch):
    monkeypatch.setitem(BYTES, "fedfomo", 100)
    found = claims.check("AH12", ledger("fedah", "fedavg", "fedper", "fedrep", "fedfomo"))
    assert found.verdict == "not reproduced"


def test_one_run_in_many_breaks_the_identity():
    broken = {m: [history(m, [50], s) for s in range(5)] for m in ("fedah", "fedavg")}
    broken["fedah"][3].rounds["bytes_up"] += 1
    assert claims.check("AH12", broken).verdict == "not reproduced"


# --- AH3 --------------------------------------------------------------------------------------------------------------


def curves(*prox, avg=(60, 70, 80)):
    """A curve of FedProx a seed, each against the same one of FedAvg."""
    there = {"fedprox": [history("fedprox", c, s) for s, c in enumerate(prox)]}
    return there | {"fedavg": [history("fedavg", avg, s) for s in range(len(prox))]}


def test_close_in_the_last_round_and_wherever_the_curves_are_farthest_apart():
    found = claims.check("AH3", curves([60.5, 70, 80.1], [60, 69.4, 80], [60, 70, 79.6]))
    last, curve = found.numbers
    assert last.values == pytest.approx((0.1, 0, -0.4)) and curve.values == pytest.approx((0.5, 0.6, 0.4))
    assert last.what == "fedprox − fedavg (mu 0.01, ours)"
    assert curve.what == "largest gap of fedprox's and fedavg's curves (mu 0.01, ours)"
    assert found.verdict == "agrees at reduced scale"


def test_gaps_to_either_side_do_not_cancel():
    found = claims.check("AH3", curves([60, 75, 80], [60, 65, 80], [60, 75, 80]))
    assert found.verdict == "disagrees at reduced scale" and "contradicted by largest gap" in found.why
    assert found.numbers[0].holds is True and found.numbers[1].values == pytest.approx((5, 5, 5))


def test_closeness_takes_both_methods():
    assert "too few of its methods" in claims.check("AH3", runs(fedavg=[80, 81, 82])).why


# --- FedAH's claims about one set: each holds, is contradicted, is open, and is not tested ----------------------------

AGREES, DISAGREES, OPEN = "agrees at reduced scale", "disagrees at reduced scale", "not tested"
LOW, MID, HIGH, NEAR = [70, 71, 69], [80, 81, 79], [90, 92, 91], [81, 83, 82]  # NEAR − MID: 1, 2, 3, within noise
MNIST = {"dataset": "mnist"}


def of(changes, **last):
    """As `runs`, each changed likewise."""
    return {m: [history(m, [v], s, **changes) for s, v in enumerate(values)] for m, values in last.items()}


@pytest.mark.parametrize(
    ("claim", "there", "verdict", "why"),
    [
        ("AH1", runs(fedah=HIGH, fedavg=LOW, fedala=MID), AGREES, "without fedrep"),
        ("AH1", runs(fedah=MID, fedavg=LOW, fedala=HIGH), DISAGREES, "contradicted by fedah − fedala;"),
        ("AH1", runs(fedah=NEAR, fedavg=LOW, fedala=MID), OPEN, "within noise: fedah − fedala;"),
        ("AH1", runs(fedah=HIGH), OPEN, "too few of its methods"),
        ("AH1", runs(fedavg=HIGH, fedala=LOW), OPEN, "too few of its methods"),
        ("AH1", of(MNIST, fedah=MID, fedala=HIGH, fedavg=LOW), AGREES, ""),
        (
            "AH1",
            of(MNIST, fedah=HIGH, fedala=MID, fedavg=LOW),
            DISAGREES,
            "contradicted by methods above fedah on",
        ),
        ("AH1", of(MNIST, fedah=MID, fedala=NEAR, fedavg=LOW), OPEN, "not shown to be at least 1 of 2: methods above"),
        ("AH2", runs(fedah=HIGH, fedala=MID), AGREES, "the paper's numbers (compared at full scale only)"),
        ("AH2", runs(fedah=MID, fedala=HIGH), DISAGREES, "contradicted by fedah − fedala;"),
        ("AH2", runs(fedah=NEAR, fedala=MID), OPEN, "within noise: fedah − fedala;"),
        ("AH2", of({"partition": {"name": "pathological"}}, fedah=HIGH, fedala=MID), OPEN, "about Dirichlet splits"),
        (
            "AH4",
            runs(perfedavg=LOW, fedah=HIGH, fedper=MID),
            AGREES,
            "falls after its peak (3 of 3 runs not conv",
        ),
        ("AH4", runs(perfedavg=MID, fedah=HIGH, fedper=LOW), DISAGREES, "contradicted by fedper − perfedavg;"),
        ("AH4", runs(perfedavg=MID, fedah=HIGH, fedper=NEAR), OPEN, "within noise: fedper − perfedavg;"),
        ("AH4", runs(perfedavg=LOW), OPEN, "not checked: falls after its peak"),
        ("AH4", runs(fedah=LOW), OPEN, "too few of its methods"),
        ("AH5", runs(ditto=HIGH, pfedme=MID), AGREES, ""),
        ("AH5", runs(ditto=MID, pfedme=HIGH), DISAGREES, "contradicted by ditto − pfedme"),
        ("AH5", runs(ditto=NEAR, pfedme=MID), OPEN, "within noise: ditto − pfedme"),
        ("AH5", runs(ditto=NEAR), OPEN, "too few of its methods"),
        ("AH16", runs(fedala=HIGH, fedfomo=MID, fedamp=LOW), AGREES, "fedamp's alpha, lam and sigma are ours, chosen"),
        ("AH16", runs(fedala=MID, fedfomo=LOW, fedamp=HIGH), DISAGREES, "contradicted by fedala − fedamp"),
        ("AH16", runs(fedala=NEAR, fedfomo=LOW, fedamp=MID), OPEN, "within noise: fedala − fedamp"),
        ("AH16", runs(fedfomo=LOW, fedamp=MID), OPEN, "too few of its methods"),
    ],
)
def test_claims_about_one_set(claim, there, verdict, why):
    found = claims.check(claim, there)
    assert found.verdict == verdict and why in found.why


def test_settings_of_ours_are_told_where_accuracies_count():
    ours = "fedamp's alpha, lam and sigma are ours, chosen on digits"
    there = runs(fedah=HIGH, fedamp=MID, fedper=LOW, fedrep=LOW, fedavg=LOW)
    assert {c: ours in claims.check(c, there).why for c in ("AH1", "AH7", "AH12")} == {
        "AH1": True,
        "AH7": True,
        "AH12": False,  # bytes are the same at any settings
    }
    assert ours not in claims.check("AH1", {m: h for m, h in there.items() if m != "fedamp"}).why
    assert ours not in claims.check("AH16", runs(fedamp=LOW)).why  # nothing was compared


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ([50, 90, 85], AGREES),
        ([50, 90, 89.5], DISAGREES),  # by less than a point
        ([50, 60, 90], DISAGREES),  # the last rounds are the best
    ],
)
def test_a_fall_after_the_peak_is_told_once_converged(curve, verdict, monkeypatch):
    monkeypatch.setattr(scale, "PATIENCE", 3)
    there = {"perfedavg": [history("perfedavg", curve, s, rounds=9) for s in range(3)]}
    found = claims.check("AH4", there)
    assert found.verdict == verdict and "falls after its peak" not in found.why
    there["perfedavg"][1] = history("perfedavg", [50, 85, 90], 1, rounds=9)
    assert claims.check("AH4", there).verdict != AGREES


CNN100 = {"dataset": "cifar100", "model": "cnn", "samples": 60_000, "rounds": 102}


@pytest.mark.parametrize(
    ("gain", "level", "verdict", "why"),
    [
        (2.87, 0, "reproduced", ""),
        (2.87, 0.5, "reproduced", ""),
        (2.87, 2, "not reproduced", "contradicted by best round: fedah, best round: fedala"),
        (5, 0, "not reproduced", "contradicted by best round: fedah, best round: fedah − fedala"),
        (-1, 0, "not reproduced", "contradicted by fedah − fedala, best round: fedah, best round: fedah − fedala"),
    ],
)
def test_the_papers_numbers_are_compared_at_full_scale(gain, level, verdict, why):
    """Of the best round, here the first; the last one is half a point below it."""
    ends = {"fedala": 55.92 + level, "fedah": 55.92 + level + gain}
    there = {m: [history(m, [v, v - 0.5], s, **CNN100) for s in range(5)] for m, v in ends.items()}
    found = claims.check("AH2", there)
    assert (found.verdict, found.why, found.coverage) == (verdict, why, "")
    below = {m: group[:4] for m, group in there.items()}
    found = claims.check("AH2", below)
    assert found.verdict == (AGREES if gain > 0 else DISAGREES)
    assert found.coverage == "1 of 2 parts" and [c.what for c in found.numbers] == ["fedah − fedala"]


def cost(seconds, flops, seeds=3):
    """Runs of methods that take so many FLOPs and seconds a round; a list of seconds is one number a seed."""
    there = {}
    for m, work in flops.items():
        spent = seconds[m] if isinstance(seconds[m], list) else [seconds[m]] * seeds
        there[m] = [history(m, [50, 50], s) for s in range(seeds)]
        for run, took in zip(there[m], spent, strict=True):
            run.rounds = run.rounds.assign(seconds=float(took), flops=work)
    return there


ORDER = {"pfedme": 9, "ditto": 5, "perfedavg": 5, "fedah": 3, "fedrep": 2, "fedavg": 1}


def test_the_order_of_costs_by_group():
    found = claims.check("AH11", cost(ORDER, ORDER))
    assert str(found) == f"{AGREES} (6 of 11 methods)" and found.why.endswith("are noisy")
    pairs = [c.what.removeprefix("FLOPs: ") for c in found.numbers if c.unit == "FLOPs"]
    assert pairs == [
        *("pfedme − ditto", "pfedme − perfedavg", "ditto − fedah", "perfedavg − fedah"),
        *("fedah − fedrep", "fedah − fedavg"),
    ]
    assert [c.what for c in found.numbers if c.unit == "seconds"] == [f"seconds: {pair}" for pair in pairs]


@pytest.mark.parametrize(
    ("seconds", "flops", "verdict", "why"),
    [
        ({}, {"ditto": 10}, DISAGREES, "contradicted by FLOPs: pfedme − ditto;"),
        ({}, {"fedrep": 3}, DISAGREES, "contradicted by FLOPs: fedah − fedrep;"),  # counted: a tie is none
        ({"fedah": 1.5}, {}, DISAGREES, "contradicted by seconds: fedah − fedrep;"),
        ({"fedah": [1, 2, 5]}, {}, OPEN, "within noise: "),
    ],
)
def test_costs_out_of_order(seconds, flops, verdict, why):
    found = claims.check("AH11", cost(ORDER | seconds, ORDER | flops))
    assert found.verdict == verdict and why in found.why


def test_seconds_of_other_engines_are_not_compared():
    there = cost({"fedah": 1, "fedavg": 3}, {"fedah": 3, "fedavg": 1})
    for run in there["fedah"]:
        run.config["engine"] = "stacked"
    found = claims.check("AH11", there)
    assert str(found) == f"{AGREES} (1 of 2 parts, 2 of 11 methods)"
    assert "not checked: in seconds (the runs' engines or devices differ)" in found.why
    assert "too few" in claims.check("AH11", {"fedavg": there["fedavg"]}).why


def converged(**after):
    """Runs whose best round is that, one a seed, and 100 more."""
    return {m: [history(m, [50] * (t - 1) + [90], s, rounds=160) for s, t in enumerate(ts)] for m, ts in after.items()}


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (converged(fedah=[5, 6, 7], fedala=[20, 21, 22], fedper=[30, 31, 33], fedavg=[3, 4, 5]), AGREES, ""),
        (
            converged(fedah=[25, 26, 27], fedala=[20, 21, 22], fedavg=[3, 4, 5]),
            DISAGREES,
            "contradicted by methods that",
        ),
        (converged(fedah=[5, 6, 7], fedala=[6, 7, 8], fedavg=[4, 7, 7]), OPEN, "not shown to be at least 2 of 2"),
        (converged(fedah=[5, 6, 7], fedala=[20, 21, 70]), OPEN, "1 of 6 runs not converged"),
        (converged(fedah=[5, 6, 7]), OPEN, "too few of its methods"),
    ],
)
def test_few_rounds_until_convergence(there, verdict, why):
    found = claims.check("AH13", there)
    assert found.verdict == verdict and why in found.why
    if verdict == AGREES:
        whole = [c for c in found.numbers if not c.counted]
        assert [(c.rule, c.low, c.high) for c in whole] == [("at least 2 of 3", 2, 2)] * 3
        (rounds,) = (c for c in found.numbers if c.what == "rounds: fedala − fedah")
        (sent,) = (c for c in found.numbers if c.what == "bytes: fedala − fedah")
        assert rounds.values == (15, 15, 15) and sent.values == (3000,) * 3  # 200 bytes a round of two clients


@pytest.mark.parametrize(
    ("holds", "least", "whole"),
    [
        ([True, True, None, False], 2, True),
        ([True, True, None, False], 3, None),  # the open one would make it three
        ([True, True, None, False], 4, False),
        ([None, None], 1, None),
    ],
)
def test_undecided_ones_count_neither_way(holds, least, whole):
    values = {True: (2, 3, 4), None: (1, -2, 3), False: (-4, -3, -2)}
    found = comparisons.count("it", [comparisons.above("x", values[h]) for h in holds], least)
    assert found[0].holds is whole
    assert (found[0].low, found[0].high) == (holds.count(True), len(holds) - holds.count(False))
    assert all(c.counted for c in found[1:]) and [c.holds for c in found[1:]] == holds
    assert found[0].values[0] == sum(values[h][0] > 0 for h in holds)


def test_most_is_more_than_half():
    up, down = comparisons.above("x", (2, 3, 4)), comparisons.above("x", (-4, -3, -2))
    assert comparisons.most("it", [up, down])[0].holds is False
    assert comparisons.most("it", [up, up, down])[0].holds is True
    assert comparisons.most("it", []) == []


@pytest.mark.parametrize(
    ("values", "above", "below"),
    [
        ([0, 10, 20], True, False),  # s = 10, σ within 10 · √(2 / 7.378) = 5.2 and 10 · √(2 / .0506) = 63
        ([0, 0.05, 0.1], False, True),  # s = .05: .026 to .31
        ([0, 1, 2], None, None),
        ([3], None, None),
    ],
)
def test_a_standard_deviation_by_its_interval(values, above, below):
    found = comparisons.spread("it", values, "above", 1.0)
    assert found.holds is above and comparisons.spread("it", values, "below", 1.0).holds is below
    if len(values) == 3:
        s = float(np.std(values, ddof=1))
        assert (found.mean, found.low, found.high) == pytest.approx((s, 0.52066 * s, 6.28474 * s), rel=1e-4)


# --- FedAH's claims that compare sets ---------------------------------------------------------------------------------

TINY = {"dataset": "tiny-imagenet", "model": "cnn"}


def sets(change, ends, base=()):
    """{"set v": runs} for {v: {method: accuracies}}; change(v): what the value changes of a run."""
    return {f"set {v}": of(dict(base) | change(v), **last) for v, last in ends.items()}


def by_beta(ends, base=()):
    return sets(lambda v: {"partition": {"beta": v}}, ends, base)


def by_clients(ends):
    return sets(lambda v: {"clients": v, "partition": {"clients": v, "min_size": 400 // v}}, ends)


def by_epochs(ends):
    return sets(lambda v: {"training": {"epochs": v}, "rounds": max(1, 40 // v)}, ends)


def by_ratio(ends):
    return sets(lambda v: {"join_ratio": v}, ends)


def by_data(ends):
    def change(v):
        return {"dataset": v, "model": "fasttext" if v == "agnews" else "cnn", "partition": {"min_size": len(v)}}

    return sets(change, ends)


FALL = ({"fedah": HIGH, "fedrep": HIGH, "fedper": MID}, {"fedah": MID, "fedrep": MID, "fedper": HIGH})  # two of three
ONLY = {"fedah": HIGH, "fedala": HIGH, "fedavg": MID, "fedrep": LOW, "fedper": LOW}
BEFORE = {m: [95, 96, 97] for m in ONLY}


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (by_beta({0.1: FALL[0], 0.5: FALL[1]}), AGREES, "not checked: only FedALA and FedAH above FedAvg on TINY"),
        (by_beta({0.1: FALL[1], 0.5: FALL[0]}), DISAGREES, "contradicted by personalized methods that lose, beta 0.1"),
        (by_beta({0.5: FALL[1], 0.01: FALL[1], 0.1: FALL[1], 1.0: FALL[0]}), DISAGREES, "lose, beta 0.01 − 1"),
        (by_beta({0.1: {"fedah": NEAR}, 0.5: {"fedah": MID}}), OPEN, "not shown to be at least 1 of 1"),
        (by_beta({0.1: FALL[0], 1.0: FALL[1]}), OPEN, "no runs with beta 0.5"),
        (by_beta({0.1: BEFORE, 0.5: ONLY}, TINY), AGREES, "3 of at least 5 seeds"),
        (by_beta({0.1: BEFORE, 0.5: ONLY | {"fedrep": HIGH}}, TINY), DISAGREES, "by beta 0.5: fedavg − fedrep;"),
        (by_beta({0.1: BEFORE, 0.5: ONLY | {"fedala": LOW}}, TINY), DISAGREES, "by beta 0.5: fedala − fedavg;"),
        (by_beta({0.1: BEFORE, 0.5: ONLY | {"fedah": NEAR}}, TINY), OPEN, "within noise: beta 0.5: fedah − fedavg;"),
    ],
)
def test_growing_beta(there, verdict, why):
    found = claims.check("AH9", there)
    assert found.verdict == verdict and why in found.why


FIRST = {"fedah": [85, 86, 87], "fedrep": MID, "fedper": LOW}
START = {m: [95, 96, 97] for m in FIRST}


@pytest.mark.parametrize(
    ("claim", "there", "verdict", "why"),
    [
        ("AH10", by_clients({20: START, 100: FIRST, 200: FIRST}), AGREES, "without fedala"),
        ("AH10", by_clients({20: START, 200: FIRST, 10: FIRST}), AGREES, "100 clients (no such runs)"),
        ("AH10", by_clients({20: START, 100: START | {"fedper": MID}}), OPEN, "not shown to be at least 2 of 3"),
        (
            "AH10",
            by_clients({20: FIRST, 100: START}),
            DISAGREES,
            "by methods that lose, 20 − 100 clients;",
        ),
        ("AH10", by_clients({20: START, 100: FIRST | {"fedrep": HIGH}}), DISAGREES, "by 100 clients: fedah − fedrep;"),
        ("AH10", by_clients({10: START, 100: FIRST}), OPEN, "no runs with 20 clients"),
        ("AH10", by_clients({20: START, 50: FIRST}), OPEN, "100 clients (no such runs); not checked: 200"),
        ("AH15", by_epochs({1: START, 5: FIRST, 10: FIRST, 20: FIRST, 40: FIRST}), AGREES, "fewer rounds"),
        ("AH15", by_epochs({1: START, 5: FIRST, 40: FIRST | {"fedah": HIGH}}), AGREES, "20 epochs (no such runs)"),
        ("AH15", by_epochs({1: FIRST, 5: START}), DISAGREES, "contradicted by methods that lose, 1 − 5 epochs;"),
        ("AH15", by_epochs({1: START, 5: FIRST | {"fedrep": [84, 85, 89]}}), OPEN, "within noise: 5 epochs: fedah − f"),
        ("AH15", by_epochs({5: START, 10: FIRST}), OPEN, "no runs with 1 epochs"),
    ],
)
def test_more_clients_and_more_epochs(claim, there, verdict, why):
    found = claims.check(claim, there)
    assert found.verdict == verdict and why in found.why


ALL = {"pfedme": [80, 80, 80], "ditto": [80, 80, 80], "perfedavg": [80, 80, 80], "fedah": [90, 90, 90]}
WIDE = {"pfedme": [60, 70, 65], "ditto": [70, 60, 65], "perfedavg": [45, 55, 50], "fedah": [89.9, 90, 90.1]}


@pytest.mark.parametrize(
    ("all_", "some", "verdict", "why"),
    [
        (ALL, WIDE, AGREES, "the paper's numbers (compared at full scale only)"),
        (ALL, WIDE | {"pfedme": [80, 90, 85.5]}, OPEN, "within noise: pfedme, join ratio 1 − [0.1, 1];"),
        (ALL, WIDE | {"pfedme": [90, 100, 95]}, DISAGREES, "contradicted by pfedme, join ratio 1 − [0.1, 1];"),
        (ALL, WIDE | {"ditto": [65, 65, 65.1]}, DISAGREES, "contradicted by ditto: standard deviation;"),
        (ALL, WIDE | {"fedah": [80, 90, 100]}, DISAGREES, "contradicted by fedah: standard deviation;"),
        (ALL, WIDE | {"fedah": [89.5, 90, 90.5]}, OPEN, "not shown to be below 1: fedah: standard deviation;"),
        (ALL, WIDE | {"fedah": [40, 40, 40.1]}, DISAGREES, "by join ratio [0.1, 1]: fedah − "),
    ],
)
def test_a_join_ratio_drawn_anew(all_, some, verdict, why):
    found = claims.check("AH14", by_ratio({(1.0, 1.0): all_, (0.1, 1.0): some}))
    assert found.verdict == verdict and why in found.why
    assert (
        "no runs with join ratio (0.1, 1.0)" in claims.check("AH14", by_ratio({(1.0, 1.0): all_, (0.5, 1.0): some})).why
    )


@pytest.mark.parametrize(("loss", "holds"), [(6.65, True), (9, False)])
def test_what_pfedme_loses_is_compared_at_full_scale(loss, holds):
    there = {}
    for ratio, ends in (((1.0, 1.0), [60] * 5), ((0.1, 1.0), [60 - loss + d for d in (-0.1, 0, 0, 0, 0.1)])):
        pfedme = [history("pfedme", [v], s, join_ratio=ratio, **CNN100) for s, v in enumerate(ends)]
        there[str(ratio)] = {"pfedme": pfedme}
    for run in (run for group in there.values() for run in group["pfedme"]):
        run.rounds.loc[0, "after"] = 0.99  # the best, so that all have converged
    found = claims.check("AH14", there)
    what = "pfedme, join ratio 1 − [0.1, 1]"
    *losses, spread = [(c.what, c.rule, c.holds) for c in found.numbers]
    assert losses == [(what, "above 0", True), (what, "within 6.65 ±1", holds)]
    assert spread == ("pfedme: standard deviation", "above 1", False)
    assert found.verdict == "not reproduced" and found.why.startswith(
        "contradicted by pfedme: " if holds else f"contradicted by {what}, pfedme: "
    )


def gained(gain, noise=0):
    """FedAH ahead of FedRep by `gain`, of FedAvg by more."""
    return {"fedah": [80 + gain - noise, 80 + gain, 80 + gain + noise], "fedrep": [80] * 3, "fedavg": [40] * 3}


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (by_data({"cifar100": gained(5), "cifar10": gained(2), "agnews": gained(1)}), AGREES, ""),
        (
            by_data({"cifar100": gained(5), "cifar10": gained(6)}),
            DISAGREES,
            "gain on cifar100 cnn (over fedrep) − on cif",
        ),
        (by_data({"cifar100": gained(5, 2), "cifar10": gained(4)}), OPEN, "within noise: gain on cifar100"),
        (by_data({"agnews": gained(5), "cifar10": gained(4)}), OPEN, "it takes a large and a small data set"),
        (by_data({"cifar100": {"fedah": MID}, "cifar10": {"fedah": MID}}), OPEN, "too few of its methods"),
    ],
)
def test_gains_by_data_set(there, verdict, why):
    found = claims.check("AH17", there)
    assert found.verdict == verdict and (why in found.why or verdict == AGREES)


def test_of_sets_the_methods_count_that_all_of_them_have():
    there = by_beta({0.1: FALL[0], 0.5: {m: FALL[1][m] for m in ("fedah", "fedrep")} | {"ditto": MID}})
    found = claims.check("AH9", there)
    assert found.coverage == "1 of 2 parts, 2 of 10 methods" and "fedper" not in str(found.numbers)
    there["set 0.5"] = {"ditto": there["set 0.5"]["ditto"]}
    assert claims.check("AH9", there).why.startswith("none of its methods was run in every set")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rounds": 9}, "set 0.5 and set 0.1 differ in more than beta: rounds"),
        ({"training": {"lr": 0.1}}, "set 0.5 and set 0.1 differ in more than beta: training"),
        ({"dataset": "mnist"}, "set 0.5 and set 0.1 differ in more than beta: dataset"),
        ({"partition": {"beta": 0.5, "capped": True}}, "set 0.5 and set 0.1 differ in more than beta: partition"),
        ({"partition": {"beta": 0.1}}, "set 0.1 and set 0.5 have one beta: 0.1"),
        ({"settings": {"weight_lr": 1.0}}, "fedah has other settings in set 0.5 than in set 0.1"),
    ],
)
def test_sets_differ_in_one_thing_only(change, why):
    there = by_beta({0.1: {"fedah": HIGH}, 0.5: {"fedah": MID}})
    there["set 0.5"] = of({"partition": {"beta": 0.5}} | change, fedah=MID)
    found = claims.check("AH9", there)
    assert (found.verdict, found.numbers) == ("not tested", ()) and found.why.startswith(why)


def test_sets_of_other_seeds_of_one_value_or_of_no_pairs_are_not_compared():
    there = by_beta({0.1: FALL[0], 0.5: FALL[1]})
    alone = {"set 0.1": there["set 0.1"]}
    assert claims.check("AH9", alone).why.startswith("one beta only: 0.1")
    other = there | {"set 0.5": {m: group[::-1] for m, group in there["set 0.5"].items()}}
    assert "set 0.5 and set 0.1 were not run on the same seeds" in claims.check("AH9", other).why
    torn = {name: dict(group) for name, group in there.items()}
    torn["set 0.5"]["fedrep"] = torn["set 0.5"]["fedrep"][::-1]
    assert "set 0.5: fedrep and fedah were not run on the same seeds" in claims.check("AH9", torn).why
    assert claims.check("AH9", {}).why.startswith("none of its methods was run in every set")


def test_what_is_short_of_a_set_names_it():
    there = by_beta({0.1: FALL[0], 0.5: FALL[1]}, {"dataset": "agnews", "model": "fasttext", "samples": 127_600})
    for run in there["set 0.5"]["fedah"]:
        run.clients["n_train"] = 1
    found = claims.check("AH9", there)
    assert "a part of the data (set 0.5);" in found.why and "3 of at least 5 seeds;" in found.why
    assert "beta" not in found.why.split("not checked")[0]  # which the claim varies


def test_claims_of_sets_refuse_other_runs_by_name():
    with pytest.raises(ValueError, match=r"runs\['fedah'\]: must be a set, .*AH9 compares sets"):
        claims.check("AH9", runs(fedah=HIGH))
    with pytest.raises(ValueError, match=r"runs\['a'\]\['fedah'\]: holds a run of 'fedrep'"):
        claims.check("AH9", {"a": {"fedah": [history("fedrep", [80])]}})


# --- evidence ---------------------------------------------------------------------------------------------------------


def stored(folder, there):
    """Puts {set's name: runs} into a folder of evidence."""
    for name, group in there.items():
        for m, histories in group.items():
            for h in histories:
                h.clients["round"] = h.config["rounds"]
                evidence.record(folder / name, {"method": m, "seed": h.config["seed"]}, h)
    return folder


def told(folder, *ids):
    return {(v.id, names): str(v) for names, v in report.report(folder, ids)}


def test_every_claim_is_reported_with_or_without_runs(tmp_path):
    found = report.report(tmp_path / "nothing")
    assert [v.id for _, v in found] == list(claims.CLAIMS)
    assert {(names, str(v), v.why) for names, v in found} == {("", "not tested", "no runs")}
    assert len(report.table(found)) == len(claims.CLAIMS) and report.numbers(found).empty


def test_sets_of_evidence_are_checked_alone_and_together(tmp_path):
    ends = {f"a/{name}": group for name, group in by_beta({0.1: FALL[0], 0.5: FALL[1]}).items()}
    stored(tmp_path, ends | {"b": of({"rounds": 7}, fedah=HIGH, fedrep=MID)})
    assert told(tmp_path, "AH1", "AH9", "AH10", "PA3") == {
        ("AH1", "a/set 0.1"): "not tested (3 of 11 methods)",
        ("AH1", "a/set 0.5"): f"{DISAGREES} (3 of 11 methods)",
        ("AH1", "b"): f"{AGREES} (2 of 11 methods)",
        ("AH9", "a/set 0.1, a/set 0.5"): f"{AGREES} (1 of 2 parts, 3 of 10 methods)",
        ("AH10", ""): "not tested",
        ("PA3", ""): "not tested",  # FedPer alone
    }
    (_, none), *_ = report.report(tmp_path, ["AH10"])
    assert none.why == "no sets that differ in clients alone"


def test_a_claims_own_sets_go_before_others(tmp_path):
    own = {"dataset": "cifar100", "model": "cnn"}
    there = {"digits": of({}, fedah=HIGH, fedala=MID), "own": of(own, fedah=HIGH, fedala=MID)}
    there["beta"] = of(own | {"partition": {"beta": 0.5}}, fedah=HIGH, fedala=MID)
    stored(tmp_path, there)
    assert list(told(tmp_path, "AH2")) == [("AH2", "own")]
    assert list(told(tmp_path, "AH5", "AH2", "AH2")) == [("AH5", ""), ("AH2", "own")]


def test_what_evidence_does_not_keep_is_said(tmp_path):
    there = {m: of({}, **{m: HIGH})[m] for m in ("fedgh", "fedapa", "fedper")}
    for histories in there.values():
        for h in histories:
            h.config["model"] |= {"features": [5], "classes": 4, "parameters": [49]}
    stored(tmp_path, {"a": there})
    why = {v.id: v.why for _, v in report.report(tmp_path, ["GH8", "PA3", "PA5", "PA6"])}
    assert why["GH8"] == "the runs' labels were not kept" and why["PA5"] == "the runs' states were not kept"
    assert why["PA6"] == "what the runs watched was not kept"


def test_tables_of_evidence(tmp_path):
    stored(tmp_path, by_beta({0.1: FALL[0], 0.5: FALL[1]}))
    found = report.report(tmp_path, ["AH9", "AH5"])
    table = report.table(found)
    assert list(table.columns) == ["claim", "sets", "verdict", "numbers", "why"]
    assert table.loc["AH9", "numbers"] == "1 met" and table.loc["AH5", "numbers"] == ""
    numbers = report.numbers(found)
    assert numbers["sets"].unique().tolist() == ["set 0.1, set 0.5"]
    assert numbers["rule"].tolist() == ["at least 2 of 3", *["above 0 (counted)"] * 3]
    assert numbers["met"].tolist() == ["yes", "yes", "yes", "no"]
    assert numbers["mean"].tolist()[0] == 2 and numbers["seeds"].tolist() == [3] * 4


@pytest.mark.parametrize("text", ["{", '{"run": 0}\n', "[]\n"])
def test_evidence_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/runs.jsonl").write_text(text)
    for name in ("rounds", "clients"):
        (tmp_path / f"a/{name}.csv").write_text("run\n0\n")
    with pytest.raises(ValueError, match=r"a/runs\.jsonl: cannot be read: "):
        report.read(tmp_path)


def test_evidence_with_another_configuration_is_named(tmp_path):
    there = runs(fedah=HIGH)
    del there["fedah"][1].config["eval_every"]
    with pytest.raises(ValueError, match=r"a/runs\.jsonl: cannot be read: a run's configuration has no 'eval_every'"):
        report.read(stored(tmp_path, {"a": there}))


# --- GH1 to GH7: FedGH's accuracies -----------------------------------------------------------------------------------

MIX = {"model": fedgh.MIXED}
RULES = {"momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0}
ONE = {"clients": 100, "join_ratio": (0.1, 0.1), "training": RULES | {"epochs": 10, "batch_size": 64}}
FIVE = {"clients": 10, "join_ratio": (1.0, 1.0), "training": RULES | {"epochs": 30, "batch_size": 512}}
UNNUMBERED = "not checked: the paper's numbers (it has none for digits)"


def own(dataset, model, **more):
    """What FedGH's own protocol changes of a run, of all data and of rounds enough to have converged."""
    split = {"partition": {"name": "classes_per_client", "classes": 10 if dataset == "cifar100" else 2}}
    size = {"dataset": dataset, "model": model, "samples": 60_000, "rounds": 102}
    return size | split | (FIVE if "+" in model else ONE) | more


def at_own(dataset, model, ends, seeds=5, **more):
    """Runs of that: {method: a curve, or its last accuracy}, the same in all seeds but for a tenth of a point."""
    there = {}
    for m, end in ends.items():
        curve = end if isinstance(end, list) else [end - 9, end]
        there[m] = [history(m, [v + s / 10 for v in curve], s, **own(dataset, model, **more)) for s in range(seeds)]
    return there


@pytest.mark.parametrize(
    ("claim", "there", "verdict", "why"),
    [
        ("GH1", runs(fedgh=HIGH, fedproto=MID), AGREES, UNNUMBERED),
        ("GH1", runs(fedgh=MID, fedproto=HIGH), DISAGREES, "contradicted by fedgh − fedproto;"),
        ("GH1", runs(fedgh=NEAR, fedproto=MID), OPEN, "within noise: fedgh − fedproto;"),
        ("GH1", runs(fedgh=HIGH, fedkd=LOW), OPEN, "too few of its methods"),
        ("GH1", of(MIX, fedgh=HIGH, fedproto=MID), OPEN, "it is about one model for all clients"),
        ("GH2", of(MIX, fedgh=HIGH, fedproto=MID), AGREES, UNNUMBERED),
        ("GH2", of(MIX, fedgh=MID, fedproto=HIGH), DISAGREES, "contradicted by fedgh − fedproto;"),
        ("GH2", of(MIX, fedgh=NEAR, fedproto=MID), OPEN, "within noise: fedgh − fedproto;"),
        ("GH2", runs(fedgh=HIGH, fedproto=MID), OPEN, "it is about different models"),
        ("GH3", runs(fedgh=HIGH, fedproto=MID), OPEN, "it is about different models"),
        ("GH4", runs(fedgh=HIGH, fedkd=MID), OPEN, "it is about different models"),
    ],
)
def test_fedgh_beside_fedproto(claim, there, verdict, why):
    found = claims.check(claim, there)
    assert found.verdict == verdict and why in found.why


@pytest.mark.parametrize(
    ("claim", "dataset", "model", "points"),
    [
        ("GH1", "cifar10", "cnn-1", 0.54),
        ("GH1", "cifar100", "cnn-1", 8.87),
        ("GH2", "cifar10", fedgh.MIXED, 1.17),
        ("GH2", "cifar100", fedgh.MIXED, 1.83),
    ],
)
def test_the_points_ahead_of_fedproto_are_compared_at_full_scale(claim, dataset, model, points):
    ends = {"fedgh": 60 + points, "fedproto": 60}
    found = claims.check(claim, at_own(dataset, model, ends))
    assert (found.verdict, found.why, found.coverage) == ("reproduced", "", "")
    assert [c.rule for c in found.numbers] == ["above 0", f"within {points:g} ±1"]
    far = claims.check(claim, at_own(dataset, model, ends | {"fedgh": 60 + points + 1.2}))
    assert (far.verdict, far.why) == ("not reproduced", "contradicted by fedgh − fedproto")
    below = claims.check(claim, at_own(dataset, model, ends, seeds=4))
    assert str(below) == f"{AGREES} (1 of 2 parts)" and len(below.numbers) == 1


def climbs(eval_every=1, seeds=3, changes=(), **reached):
    """Runs of different models that climb to 80 % in the round that is given (or one a seed), from 50 %."""
    there = {}
    for m, when in reached.items():
        when = when if isinstance(when, list) else [when] * seeds
        there[m] = [
            history(m, [50] * (t - 1) + [80], s, rounds=130, **MIX, **dict(changes)) for s, t in enumerate(when)
        ]
        for run in there[m]:
            run.config["eval_every"] = eval_every
            run.rounds.loc[(run.rounds["round"] - 1) % eval_every != 0, "after"] = np.nan
    return there


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (climbs(fedgh=5, fedproto=[9, 10, 11], fml=30), AGREES, "without lgfedavg, fd, fedkd; not all of the paper's"),
        (climbs(fedgh=5, fedproto=9, fml=4), DISAGREES, "contradicted by rounds to the target: fml − fedgh;"),
        (climbs(fedgh=5, fedproto=5), OPEN, "within noise: rounds to the target: fedproto − fedgh;"),
        (climbs(fedgh=5, fedproto=[6, 7, 30]), OPEN, "within noise: rounds to the target: fedproto − fedgh;"),
        (climbs(fedgh=5, local=9), OPEN, "too few of its methods"),
        (climbs(fedproto=5, fml=9), OPEN, "too few of its methods"),
    ],
)
def test_fewest_rounds_to_the_target(there, verdict, why):
    found = claims.check("GH3", there)
    assert found.verdict == verdict and why in found.why


def test_the_target_is_what_all_that_talk_reach_seed_by_seed():
    """FedProto's best is 60 % in seed 0, in round 4, 75 % in seed 1; Local's is lower still, and does not count."""
    there = climbs(seeds=2, fedgh=9, fedproto=9, local=9)
    there["fedgh"] = [history("fedgh", [40, 60, 70, 80, 80], s, **MIX) for s in range(2)]
    there["fedproto"] = [history("fedproto", [50, 50, 55, v, 45], s, **MIX) for s, v in enumerate([60, 75])]
    there["local"] = [history("local", [50, 50, 40, 40, 40], s, **MIX) for s in range(2)]
    (rounds,) = claims.check("GH3", there).numbers
    assert rounds.values == (4 - 2, 4 - 4) and rounds.unit == "rounds"


def test_rounds_are_known_to_the_grain_of_the_evaluations():
    found = claims.check("GH3", climbs(eval_every=10, fedgh=5, fedproto=15))  # seen in rounds 1, 11, 21, ...
    assert [(c.what, c.mean) for c in found.numbers] == [("rounds to the target: fedproto − fedgh, seen every 10", 10)]


@pytest.mark.parametrize(
    ("fedgh", "fedproto", "verdict", "values"),
    [
        (29, 200, "reproduced", 85.5),  # 1 − 29/200
        (29, 100, "not reproduced", 71),
        (29, 20, "not reproduced", -45),
    ],
)
def test_bytes_saved_until_the_target_are_compared_at_full_scale(fedgh, fedproto, verdict, values):
    def run(m, when, seed):
        return history(m, [50] * (when - 1) + [80], seed, **own("cifar100", MIX["model"], rounds=310))

    there = {m: [run(m, t, s) for s in range(5)] for m, t in (("fedgh", fedgh), ("fedproto", fedproto))}
    found = claims.check("GH3", there)
    assert str(found) == f"{verdict} (2 of 6 methods)"
    rounds, saved, number = found.numbers
    assert rounds.mean == fedproto - fedgh and saved.mean == number.mean == pytest.approx(values)
    assert (saved.unit, saved.rule, number.rule) == ("%", "above 0", "within 85.53 ±1")
    below = claims.check("GH3", {m: group[:4] for m, group in there.items()})
    assert below.verdict == (AGREES if values > 0 else DISAGREES) and below.coverage == "2 of 3 parts, 2 of 6 methods"
    assert [c.what for c in below.numbers] == [rounds.what, saved.what]


def test_bytes_are_those_that_were_sent(monkeypatch):
    monkeypatch.setitem(BYTES, "fedproto", 3)
    cifar = {"dataset": "cifar100"}
    saved = claims.check("GH3", climbs(changes=cifar, fedgh=5, fedproto=10)).numbers[1]
    assert saved.values == pytest.approx([100 * (1 - 5 / 30)] * 3)
    assert claims.numbers([claims.check("GH3", climbs(changes=cifar, fedgh=5, fedproto=10))])["mean"].iloc[1] == 83.33
    found = claims.check("GH3", climbs(fedgh=5, fedproto=10))
    assert "fewer bytes than FedProto (it is about CIFAR-100, not digits)" in found.why
    assert found.coverage == "1 of 3 parts, 2 of 6 methods"


def test_fedghs_accuracies_are_those_after_local_training(monkeypatch):
    """At its own point FedProto would be 10 to 12 points ahead; after local training all have the same."""
    monkeypatch.setitem(PRODUCT, "fedproto", "before")
    there = runs(fedgh=[80, 81, 79], fedproto=[90, 92, 91])
    for history_ in there["fedgh"]:
        history_.rounds["after"] = 0.6
    (number,) = [c for c in claims.check("GH1", there).numbers if not c.full]
    assert number.what == "fedgh − fedproto" and number.values == pytest.approx((10, 10, 10))  # 60 − 50


SETTLED = [60, 80]  # in round 2: of 102 rounds, just ended by the rule
RISING = [*range(20, 71), 80]  # its best in round 52
FALLEN = [60, 80, 70]


@pytest.mark.parametrize(
    ("fml", "fedkd", "verdict", "why"),
    [
        (RISING, [60, 70], AGREES, ""),
        (RISING, [60, 90], DISAGREES, "contradicted by fedgh − fedkd;"),
        (RISING, [60, 80], OPEN, "within noise: fedgh − fedkd;"),
        (SETTLED, [60, 70], DISAGREES, "contradicted by fml: runs that the stopping rule has ended;"),
        ([*SETTLED, 79.5], [60, 70], DISAGREES, "contradicted by fml: runs"),  # within a point of its best
        (FALLEN, [60, 70], OPEN, "not shown to be none: fml: runs that the stopping rule has ended;"),
    ],
)
def test_fml_that_does_not_converge_where_others_do(fml, fedkd, verdict, why):
    curves = {"fedgh": SETTLED, "fml": fml, "fedkd": fedkd}
    found = claims.check("GH4", at_own("cifar10", fedgh.MIXED, curves, seeds=3))
    assert found.verdict == verdict and why in found.why and found.coverage == ""
    assert "3 of 9 runs not" not in found.why


def test_of_fmls_runs_all_must_go_on_or_all_have_ended():
    there = at_own("cifar10", fedgh.MIXED, {"fedgh": SETTLED, "fml": RISING}, seeds=3)
    assert str(claims.check("GH4", there)) == f"{AGREES} (1 of 2 parts, 2 of 3 methods)"
    there["fml"][1] = history("fml", SETTLED, 1, **own("cifar10", fedgh.MIXED))
    found = claims.check("GH4", there)
    assert found.verdict == OPEN and found.numbers[0].mean == pytest.approx(1 / 3)


def test_before_the_others_have_converged_nothing_is_said_of_fml():
    there = at_own("cifar10", fedgh.MIXED, {"fedgh": SETTLED, "fml": RISING, "fedkd": [60, 62, 70]}, seeds=3)
    found = claims.check("GH4", there)
    assert str(found) == f"{AGREES} (1 of 2 parts)" and [c.what for c in found.numbers] == ["fedgh − fedkd"]
    assert "not checked: FML does not converge (of the others 3 of 6 runs not converged (the stopping" in found.why
    assert "in its last round, converged or not" in found.why


@pytest.mark.parametrize("names", [("fml",), ("fedgh",), ("fml", "fedkd")])
def test_without_fedgh_or_the_others_nothing_is_said(names):
    found = claims.check("GH4", of(MIX, **dict.fromkeys(names, HIGH)))
    assert found.verdict == OPEN and "too few of its methods" in found.why


def test_fml_that_goes_on_is_reproduced_although_it_has_not_converged():
    curves = {"fedgh": SETTLED, "fml": RISING, "fedkd": [60, 70]}
    found = claims.check("GH4", at_own("cifar10", fedgh.MIXED, curves))
    assert str(found) == "reproduced" and found.why == "FedKD is compared in its last round, converged or not"
    found = claims.check("GH4", at_own("cifar10", fedgh.MIXED, curves | {"fml": SETTLED}))
    assert str(found) == "not reproduced"
    found = claims.check("GH4", at_own("cifar10", fedgh.MIXED, {"fedgh": RISING, "fml": RISING, "fedkd": [60, 70]}))
    assert found.verdict == AGREES and f"5 of 10 runs not converged ({RULE});" in found.why


def by_rate(ends, base=()):
    return sets(lambda v: {"settings": {"header_lr": v}}, {v: {"fedgh": end} for v, end in ends.items()}, base)


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (by_rate({0.001: MID, 0.01: MID, 1.0: [80.4, 81.5, 79.6]}), AGREES, "3 of at least 5 seeds"),
        (by_rate({0.001: LOW, 0.01: MID, 1.0: MID}), DISAGREES, "contradicted by fedgh, header_lr 0.001 − 0.01;"),
        (by_rate({0.01: MID, 1.0: MID, 10.0: HIGH}), DISAGREES, "contradicted by fedgh, header_lr 10 − 0.01;"),
        (by_rate({0.01: MID, 10.0: NEAR}), OPEN, "not shown to be within ±1: fedgh, header_lr 10 − 0.01"),
        (by_rate({0.01: MID, 1.0: MID}), OPEN, "the rates span 2 of at least 3 decades"),
        (by_rate({0.0: LOW, 0.01: MID, 10.0: MID}), AGREES, ""),  # no rate at all is none of them
        (by_rate({0.0: LOW, 0.01: MID}), OPEN, "the rates span 0 of at least 3 decades"),
        (by_rate({0.001: MID, 1.0: MID}), OPEN, "no runs with the default rate 0.01"),
        (by_rate({0.01: MID}), OPEN, "one fedgh header_lr only: 0.01"),
    ],
)
def test_rates_of_the_header(there, verdict, why):
    found = claims.check("GH5", there)
    assert found.verdict == verdict and why in found.why and "fedgh's header_lr" not in found.why


def test_a_sweep_at_full_scale_reproduces_and_other_settings_are_not_swept():
    there = {}
    for rate in (0.01, 10.0):
        there[str(rate)] = at_own("cifar10", "cnn-1", {"fedgh": 60}, settings={"header_lr": rate})
    found = claims.check("GH5", there)
    assert (str(found), found.why) == ("reproduced", "")
    there["10.0"] = at_own("cifar10", "cnn-1", {"fedgh": 60}, settings={"header_lr": 10.0, "header_epochs": 2})
    assert claims.check("GH5", there).why == "fedgh has other settings in 10.0 than in 0.01"
    both = {name: {"fedgh": group["fedgh"]} for name, group in there.items()}
    both["0.01"] = at_own("cifar10", "cnn-1", {"fedgh": 60}, settings={"header_epochs": 2})
    found = claims.check("GH5", both)
    assert (found.verdict, found.why) == (AGREES, "fedgh's header_epochs 2, its default: 1")


def test_the_setting_of_another_claim_s_method_is_not_excused():
    there = {
        str(beta): of({"partition": {"beta": beta}, "settings": {"weight_lr": 1.0}}, fedah=ends)
        for beta, ends in ((0.1, HIGH), (0.5, MID))
    }
    assert "fedah's weight_lr 1.0, its default: None" in claims.check("AH9", there).why


def by_classes(ends, dataset="cifar10"):
    return sets(
        lambda v: {"dataset": dataset, "model": "cnn-1", "partition": {"name": "classes_per_client", "classes": v}},
        ends,
    )


LEADS = {"fedgh": HIGH, "fedproto": MID, "local": LOW}
FIVE_OF_THEM = dict.fromkeys((2, 4, 6, 8, 10), LEADS)


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (by_classes(FIVE_OF_THEM), AGREES, "without lgfedavg, fd, fml, fedkd, fedavg; not all of the paper's"),
        (by_classes({2: LEADS, 6: LEADS}), AGREES, "not checked: at every number of classes (no runs with 4, 8, 10)"),
        (by_classes({10: LEADS, 50: LEADS}, "cifar100"), AGREES, "classes (no runs with 30, 70, 90, 100)"),
        (
            by_classes({2: LEADS, 3: LEADS}, "digits"),
            AGREES,
            "classes (it is about CIFAR-10 and CIFAR-100, not digits)",
        ),
        (by_classes({2: LEADS, 3: LEADS | {"local": [95, 96, 97]}}), DISAGREES, "by 3 classes: fedgh − local;"),
        (by_classes(FIVE_OF_THEM | {8: LEADS | {"fedgh": NEAR}}), OPEN, "within noise: 8 classes: fedgh − fedproto;"),
        (by_classes({2: {"fedgh": HIGH}, 4: {"fedgh": HIGH}}), OPEN, "too few of its methods"),
        (by_classes({2: {"fedgh": HIGH}, 4: {"fedgh": HIGH}}, "digits"), OPEN, "too few of its methods"),
        (by_classes({2: {"local": HIGH, "fml": LOW}, 4: {"local": HIGH, "fml": LOW}}), OPEN, "too few of its methods"),
        (by_classes({2: LEADS}), OPEN, "one classes only: 2"),
    ],
)
def test_fedgh_at_every_number_of_classes(there, verdict, why):
    found = claims.check("GH6", there)
    assert found.verdict == verdict and why in found.why
    assert ("1 of 2 parts" in found.coverage) is ("not checked: at every" in found.why and found.numbers != ())


def test_at_full_scale_no_number_of_classes_departs_from_the_protocol():
    there = {}
    for classes in (2, 4, 6, 8, 10):
        split = {"name": "classes_per_client", "classes": classes}
        there[str(classes)] = at_own("cifar10", "cnn-1", {"fedgh": 60, "local": 50}, partition=split)
    assert str(claims.check("GH6", there)) == "reproduced (2 of 8 methods)"


def by_share(ends, clients=100):
    return sets(lambda v: {"join_ratio": (v, v), "clients": clients}, ends)


AT = {0.1: {"fedgh": [95, 96, 97], "fml": MID}, 0.5: {"fedgh": HIGH, "fml": MID}, 1.0: {"fedgh": MID, "fml": LOW}}
TURNED = {0.1: AT[1.0], 0.5: AT[0.5], 1.0: AT[0.1]}
FLAT = AT | {1.0: {"fedgh": [94, 96, 98], "fml": LOW}}
ALONE = {ratio: {"fedgh": ends["fedgh"]} for ratio, ends in AT.items()}
WITHOUT = {ratio: {"fml": ends["fml"]} for ratio, ends in AT.items()}


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (by_share(AT), AGREES, "of the clients that joined the last round"),
        (by_share({v: AT[v] for v in (0.1, 1.0)}), AGREES, "rate from 0.1 to 1 (no runs with 0.5)"),
        (by_share({0.2: AT[0.1], 0.5: AT[0.5]}), AGREES, "rate from 0.1 to 1 (no runs with 0.1, 1)"),
        (by_share(AT | {0.5: {"fedgh": MID, "fml": HIGH}}), DISAGREES, "contradicted by join ratio 0.5: fedgh − fml;"),
        (by_share(TURNED), DISAGREES, "contradicted by fedgh, join ratio 0.1 − 1;"),
        (by_share(FLAT), OPEN, "within noise: fedgh, join ratio 0.1 − 1;"),
        (by_share(ALONE), AGREES, "FedGH first (no other method was run)"),
        (by_share(WITHOUT), OPEN, "too few of its methods"),
        (by_share(AT, clients=20), OPEN, "it is about 100 clients, not 20"),
    ],
)
def test_fedgh_at_every_participation_rate(there, verdict, why):
    found = claims.check("GH7", there)
    assert found.verdict == verdict and why in found.why


def test_participation_drawn_anew_each_round_is_no_rate():
    there = by_share(AT)
    there["drawn"] = of({"join_ratio": (0.1, 1.0), "clients": 100}, fedgh=LOW, fml=HIGH)
    assert claims.check("GH7", there).numbers == claims.check("GH7", by_share(AT)).numbers
    drawn = {name: there[name] for name in ("drawn", "set 0.1")}
    assert "too few" in claims.check("GH7", drawn).why


def test_at_full_scale_no_participation_rate_departs_from_the_protocol():
    there = {
        str(v): at_own("cifar100", "cnn-1", {"fedgh": 60 - v, "local": 50}, join_ratio=(v, v)) for v in (0.1, 0.5, 1.0)
    }
    assert str(claims.check("GH7", there)) == "reproduced (2 of 8 methods)"


def swept(folder, name, rates, seeds=3, **changes):
    """A set of evidence: so many runs of FedGH at each rate, without settings where it is None."""
    for rate in rates:
        given = {} if rate is None else {"settings": {"header_lr": rate}}
        for h in of(given | changes, fedgh=MID[:seeds])["fedgh"]:
            h.clients["round"] = h.config["rounds"]
            evidence.record(folder / name, {"method": "fedgh", "seed": h.config["seed"]} | given, h)


def test_a_sweep_is_found_in_one_set_or_in_several(tmp_path):
    swept(tmp_path / "one", "a", [None, 10.0])
    labels = "a (fedgh), a (fedgh header_lr=10.0)"
    assert told(tmp_path / "one", "GH5") == {("GH5", labels): AGREES}
    swept(tmp_path / "two", "a", [None])
    swept(tmp_path / "two", "b", [0.01, 10.0])  # the default once more
    swept(tmp_path / "two", "c", [0.001, 10.0], rounds=7)  # another design
    assert list(told(tmp_path / "two", "GH5")) == [
        ("GH5", "a (fedgh), b (fedgh header_lr=10.0)"),
        ("GH5", "c (fedgh header_lr=0.001), c (fedgh header_lr=10.0)"),
    ]
    swept(tmp_path / "more", "a", [None], seeds=2)
    swept(tmp_path / "more", "b", [0.01, 10.0])
    labels = "b (fedgh header_lr=0.01), b (fedgh header_lr=10.0)"  # not a's, which has fewer seeds
    assert told(tmp_path / "more", "GH5") == {("GH5", labels): AGREES}
    swept(tmp_path / "none", "a", [None])
    (name, found), *_ = report.report(tmp_path / "none", ["GH5"])
    assert (name, found.why) == ("a (fedgh)", "one fedgh header_lr only: 0.01")
    swept(tmp_path / "none", "b", [0.1], rounds=7)
    (name, found), *_ = report.report(tmp_path / "none", ["GH5"])
    assert (name, found.why) == ("", "no sets that differ in fedgh header_lr alone")


def test_a_sweep_of_other_settings_is_another(tmp_path):
    swept(tmp_path, "a", [None])
    for h in of({"settings": {"header_lr": 10.0, "header_epochs": 2}}, fedgh=MID)["fedgh"]:
        h.clients["round"] = 1
        settings = {"header_lr": 10.0, "header_epochs": 2}
        evidence.record(tmp_path / "a", {"method": "fedgh", "seed": h.config["seed"], "settings": settings}, h)
    assert list(told(tmp_path, "GH5")) == [("GH5", "")]


def test_sets_of_classes_and_of_participation_are_found(tmp_path):
    ends = {2: {"fedgh": HIGH, "local": LOW}, 4: {"fedgh": HIGH, "local": MID}}
    there = {f"c/{name}": group for name, group in by_classes(ends).items()}
    ends = {v: {"fedgh": [90 - 9 * v, 91 - 9 * v, 92 - 9 * v], "local": LOW} for v in (0.1, 0.5, 1.0)}
    stored(tmp_path, there | {f"j/{name}": group for name, group in by_share(ends).items()})
    assert told(tmp_path, "GH6", "GH7") == {
        ("GH6", "c/set 2, c/set 4"): f"{AGREES} (1 of 2 parts, 2 of 8 methods)",
        ("GH7", "j/set 0.1, j/set 0.5, j/set 1.0"): f"{AGREES} (2 of 8 methods)",
    }


# --- GH8 and GH9: FedGH's ledger and work -----------------------------------------------------------------------------

LABELS = np.array([[5, 9, 0, 0], [1, 1, 1, 0], [0, 0, 7, 0]])  # 2, 3 and 1 of 4 classes
GROUPED = {"name": "mlp-1+mlp-2", "features": [3, 5], "classes": 4, "parameters": [100, 30], "modules": []}
# Clients 0 and 2 have r = 3, client 1 has r = 5. Up: 4 (2 + 2·3) = 32, 4 (3 + 3·5) = 72, 4 (1 + 1·3) = 16 bytes.
# Down: 4 (3·4 + 4) = 64 and 4 (5·4 + 4) = 96 bytes, less than the 4·30 = 120 of the smaller model.
ROWS = [(1, 0, 32, 64, 30.0), (1, 2, 16, 64, 15.0), (2, 1, 72, 96, 45.0), (2, 2, 16, 64, 15.0)]


def of_clients(method, rows, seed=0, model=(), **changes):
    """A run with `rows` (round, client, bytes up, bytes down, FLOPs) of the clients that joined; others have none."""
    run = history(method, [50, 50], seed, **changes)
    run.config["model"] = GROUPED | dict(model)
    run.labels = LABELS
    joined = pd.DataFrame(rows, columns=["round", "client", "bytes_up", "bytes_down", "flops"]).assign(joined=True)
    absent = pd.DataFrame({"round": [1, 3], "client": [1, 0], "joined": [False, False]})
    run.clients = pd.concat([joined, absent], ignore_index=True).assign(n_train=800, n_test=98)
    return run


def test_prototypes_up_and_the_header_down_to_the_byte():
    found = claims.check("GH8", {"fedgh": [of_clients("fedgh", ROWS, dataset="mine.npz")]})
    assert (str(found), found.why) == ("reproduced", "")
    assert [c.values for c in found.numbers] == [(0,), (0,), (96 - 120,)]


@pytest.mark.parametrize(
    ("column", "deviations", "what"),
    [
        (2, [4, -4, 0, 0], "up"),  # which cancel in the sum
        (2, [0, 0, 0, -1], "up"),
        (3, [0, 1, -1, 0], "down"),
    ],
)
def test_one_byte_of_one_client_breaks_the_identity(column, deviations, what):
    rows = [(*r[:column], r[column] + d, *r[column + 1 :]) for r, d in zip(ROWS, deviations, strict=True)]
    found = claims.check("GH8", {"fedgh": [of_clients("fedgh", ROWS), of_clients("fedgh", rows, 1)]})
    assert found.verdict == "not reproduced" and f"contradicted by fedgh: {what} − 4" in found.why
    assert found.why.count("fedgh") == 1


def test_a_header_as_large_as_the_smallest_model_is_not_less_than_any():
    small = of_clients("fedgh", ROWS, model={"parameters": [100, 24]})
    assert claims.check("GH8", {"fedgh": [small]}).why == "contradicted by fedgh: down − smallest model"


def test_the_formula_is_of_32_bits_a_number():
    found = claims.check("GH8", {"fedgh": [of_clients("fedgh", ROWS, dtype="torch.float64")]})
    assert (found.verdict, found.why) == ("not tested", "the runs are not of 32 bits a number")


def extraction(*shares, epochs=1, **changes):
    """FedGH beside Local, whose clients spend 30, 45 and 15 FLOPs an epoch; FedGH spends `share` of an epoch more."""
    one, training = {0: 30.0, 1: 45.0, 2: 15.0}, {"training": {"epochs": epochs, **changes.pop("training", {})}}
    alone = [(t, i, 0, 0, epochs * flops) for t in (1, 2) for i, flops in one.items()]
    there = {"fedgh": [], "local": []}
    for seed, share in enumerate(shares):
        rows = [(t, i, up, down, (epochs + share) * one[i]) for t, i, up, down, _ in ROWS]
        there["fedgh"].append(of_clients("fedgh", rows, seed, **training, **changes))
        there["local"].append(of_clients("local", alone, seed, **training, **changes))
    return there


@pytest.mark.parametrize("epochs", [1, 4])
def test_extraction_is_counted_in_epochs_for_the_clients_that_joined(epochs):
    found = claims.check("GH9", extraction(0.49, 0.5, 0.51, epochs=epochs))
    assert str(found) == "agrees at reduced scale (1 of 3 parts)"
    assert "not checked: averaging is O(n); not checked: in seconds" in found.why
    assert found.numbers[0].values == pytest.approx((0.49, 0.5, 0.51))
    assert (found.numbers[0].unit, found.numbers[0].rule) == ("epochs", "within 0.5 ±0.1")


def test_a_third_of_an_epoch_is_not_half_of_it():
    found = claims.check("GH9", extraction(1 / 3, 1 / 3, 1 / 3))
    assert found.verdict == "disagrees at reduced scale" and "contradicted by fedgh: extracting" in found.why


def test_an_open_share_says_of_what():
    found = claims.check("GH9", extraction(0.45, 0.5, 0.55))  # .5 ± .124
    assert found.why.startswith("not shown to be within 0.5 ±0.1: fedgh: extracting representations")


def test_extraction_needs_both_runs_and_some_training():
    both = extraction(0.5, 0.5, 0.5)
    for name in both:
        assert "too few of its methods" in claims.check("GH9", {name: both[name]}).why
    still = extraction(0.5, 0.5, 0.5, epochs=0)
    assert claims.check("GH9", still).why.startswith("local trained nothing")


# --- PA3, PA5 and PA6: FedAPA's ledger and weights --------------------------------------------------------------------


SEQUENCE = "Sequential()"  # a head that is not one linear layer


def extractors(up=(100, 100), head="Linear(in_features=5, out_features=4, bias=True)", **changes):
    """FedAPA, whose two clients send `up` bytes, beside FedPer with as many; the extractor has 49 − (5 + 1) 4 = 25."""
    there = ledger("fedapa", "fedper", dataset="mine.npz", **changes)
    for (run,) in there.values():
        run.config["model"] |= {"features": [5], "classes": 4, "parameters": [49], "modules": ["", head]}
        run.clients = pd.DataFrame({"round": 1, "client": [0, 1, 2], "joined": [True, True, False]})
        run.clients = run.clients.assign(bytes_down=[100, 100, 0], bytes_up=[*up, 0])
    return there


def test_fedapa_sends_and_receives_what_fedper_does():
    shifted = extractors(head=SEQUENCE)
    assert str(claims.check("PA3", shifted)) == "reproduced"
    rounds = shifted["fedapa"][0].rounds
    rounds["bytes_up"] += 2  # two clients: one byte each
    rounds["bytes_down"] -= 2
    found = claims.check("PA3", shifted)
    assert found.why == "contradicted by fedapa − fedper, down, fedapa − fedper, up"
    assert [c.mean for c in found.numbers] == [-1, 1]
    assert "too few" in claims.check("PA3", ledger("fedapa")).why


def test_fedapa_sends_and_receives_the_extractor_to_the_byte():
    found = claims.check("PA3", extractors())
    assert str(found) == "reproduced" and [c.values for c in found.numbers] == [(0,)] * 4
    found = claims.check("PA3", extractors(up=(101, 99)))  # which cancel in the sum
    assert found.why == "contradicted by fedapa: up − 4 R"


@pytest.mark.parametrize("change", [{"head": SEQUENCE}, {"dtype": "torch.float64"}])
def test_with_another_head_or_width_fedper_alone_is_compared(change):
    found = claims.check("PA3", extractors(up=(101, 99), **change))
    assert found.verdict == "reproduced"
    assert [c.what for c in found.numbers] == ["fedapa − fedper, down", "fedapa − fedper, up"]


def test_similarity_of_label_distributions():
    similar = claims.label_similarity(np.array([[3, 0, 0], [30, 0, 0], [0, 1, 0], [4, 3, 0]]))
    assert similar == pytest.approx(np.array([[1, 1, 0, 0.8], [1, 1, 0, 0.8], [0, 0, 1, 0.6], [0.8, 0.8, 0.6, 1]]))


def weights(*rows, labels=((5, 0), (9, 0), (0, 7)), **changes):
    """Three runs of FedAPA that end with the mixing weights `rows`; clients 0 and 1 have the same labels."""
    there = [history("fedapa", [50], s, **changes) for s in range(3)]
    for run in there:
        run.labels, run.state = np.array(labels), State({"A": torch.tensor(np.array(rows))}, kept=())
    return {"fedapa": there}


def test_weights_that_follow_the_labels():
    # Off the diagonal a is .4 .1 .4 .1 .25 .25 and s is 1 0 1 0 0 0: Σ (a − .25)(s − 1/3) = .3, the sums of squares
    # are .09 and 4/3, so r = .3 / √.12 = √3 / 2.
    found = claims.check("PA5", weights([0.5, 0.4, 0.1], [0.4, 0.5, 0.1], [0.25, 0.25, 0.5]))
    (number,) = found.numbers
    assert number.values == pytest.approx([math.sqrt(3) / 2] * 3) and number.unit == "correlation"
    assert number.what == "a_ij and label similarity (server_lr 0.01, descent)"
    assert found.verdict == "agrees at reduced scale"
    found = claims.check("PA5", weights([0.5, 0.1, 0.4], [0.1, 0.5, 0.4], [0.25, 0.25, 0.5]))
    assert found.verdict == "disagrees at reduced scale" and found.numbers[0].mean == pytest.approx(-math.sqrt(3) / 2)


@pytest.mark.parametrize(
    ("rows", "labels", "name"),
    [
        (np.eye(3), ((5, 0), (9, 0), (0, 7)), "weights"),  # nothing was ever mixed
        (np.full((3, 3), 1 / 3), ((5, 0), (9, 0), (0, 7)), "weights"),
        ([[0.5, 0.4, 0.1], [0.4, 0.5, 0.1], [0.25, 0.25, 0.5]], ((5, 3), (10, 6), (15, 9)), "label similarities"),
        ([[0.5, 0.5], [0.1, 0.9]], ((5, 3), (1, 6)), "label similarities"),  # of two clients there is one
        ([[1.0]], ((5, 3),), "weights"),
    ],
)
def test_a_correlation_that_is_undefined_says_why(rows, labels, name):
    found = claims.check("PA5", weights(*np.array(rows), labels=labels))
    assert (found.verdict, found.numbers) == ("not tested", ())
    assert found.why == f"seed 0: no two clients' {name} differ from others', so no correlation is defined"


def proxies(*seeds, scale=None, **changes):
    """A run of FedAPA a seed, each given as (smallest, largest) relative change of the proxy in each of its rounds."""
    there = [history("fedapa", *(([41, 50], s) if scale else ([50], s)), **(scale or {}), **changes) for s in range(3)]
    for run, rounds in zip(there, seeds, strict=True):
        rows = [{"round": t, "name": "proxy change", "q00": a, "q100": b} for t, (a, b) in enumerate(rounds, 1)]
        run.watch = pd.DataFrame([{"round": 1, "name": "a_ij", "q00": 0.0, "q100": 1.0}, *rows])
    return {"fedapa": there}


def test_updates_that_all_lower_the_proxy():
    found = claims.check("PA6", proxies([(-0.2, 0), (-0.4, -0.1)], [(-0.3, -0.2)], [(-0.5, -0.3), (-0.1, -0.01)]))
    assert found.verdict == "agrees at reduced scale"
    largest, smallest = found.numbers
    assert largest.values == (0, -0.2, -0.01) and (largest.low, largest.high) == (-0.2, 0)
    assert smallest.values == (-0.4, -0.3, -0.5) and smallest.mean == pytest.approx(-0.4)
    assert "at the run's rate" in found.text and largest.what == "largest change of P (server_lr 0.01, descent)"


def test_one_update_that_raises_it_contradicts():
    rounds = [[(-0.2, -0.1)] * 3, [(-0.2, -0.1), (-0.2, 1e-3), (-0.2, -0.1)], [(-0.2, -0.1)] * 3]
    found = claims.check("PA6", proxies(*rounds, settings={"server_lr": 1.0, "sign": "paper"}))
    assert found.verdict == "disagrees at reduced scale"
    assert "contradicted by largest change of P (server_lr 1, paper);" in found.why
    assert "fedapa's server_lr 1.0, its default: 0.01; fedapa's sign paper, its default: descent" in found.why


def test_rounding_neither_raises_nor_lowers():
    found = claims.check("PA6", proxies([(-0.2, 3e-7)], [(-0.2, 0)], [(-0.2, 0)]))
    assert found.verdict == "agrees at reduced scale"
    found = claims.check("PA6", proxies([(-3e-7, 3e-7)], [(-0.2, 0)], [(0, 0)]))
    assert found.verdict == "not tested" and found.why.startswith("not shown to be below −1e-06: smallest change of P")


# --- PA1: scenarios ---------------------------------------------------------------------------------------------------

DIR = {"name": "dirichlet", "beta": 0.1}
TWINS = {"name": "pathological", "classes": 2, "grouped": True}
DRAWN = TWINS | {"grouped": False}
PA1 = {
    "d": ("cifar10", DIR),
    "g": ("cifar10", TWINS),
    "f": ("fashion-mnist", DIR),
    "p": ("fashion-mnist", TWINS),
    "c": ("cifar100", DIR),
    "x": ("cifar100", TWINS | {"classes": 10}),
    "r": ("cifar10", DRAWN),
}
LEAD = {"fedapa": HIGH, "fedavg": LOW, "fedala": MID}
LAG = {"fedapa": MID, "fedavg": LOW, "fedala": HIGH}
EVEN = {"fedapa": NEAR, "fedavg": LOW, "fedala": MID}


def scenarios(base=(), **ends):
    """{name: runs} of the sets of PA1 by their letters, each with ends {method: accuracies}."""
    there = {}
    for name, last in ends.items():
        dataset, split = PA1[name]
        there[name] = of({"model": "cnn", "dataset": dataset, "partition": split} | dict(base), **last)
    return there


@pytest.mark.parametrize(
    ("there", "verdict", "why"),
    [
        (scenarios(d=LEAD, g=LEAD), AGREES, ""),
        (scenarios(d=LEAD, g=LEAD, f=LAG), AGREES, ""),
        (scenarios(d=LEAD, g=LEAD, f=LAG, p=LAG), DISAGREES, "contradicted by scenarios in which fedapa is first;"),
        (
            scenarios(d=LEAD, g=LAG),
            DISAGREES,
            "contradicted by scenarios in which fedapa is first;",
        ),  # half is not most
        (scenarios(d=LEAD, g=EVEN), OPEN, "not shown to be at least 2 of 2: scenarios in which fedapa is first;"),
        (scenarios(d=LEAD, g=LEAD, f=EVEN), AGREES, ""),
        (scenarios(d=EVEN, g=EVEN, f=LAG), OPEN, "not shown to be at least 2 of 3: scenarios"),
        (scenarios(d=LEAD, g=EVEN | {"fedavg": HIGH}), DISAGREES, "contradicted by scenarios"),
        (scenarios(d=LEAD), OPEN, "one scenario only: cifar10, cnn, Dirichlet(0.1)"),
        (scenarios(d={"fedapa": HIGH}, g={"fedapa": HIGH}), OPEN, "too few of its methods"),
        (scenarios(d={"fedavg": HIGH, "dbe": LOW}, g={"fedavg": HIGH, "dbe": LOW}), OPEN, "too few of its methods"),
        (
            scenarios({"rounds": 9}, d=LEAD) | scenarios(g=LEAD),
            OPEN,
            "g and d differ in more than scenario and dataset",
        ),
        (
            scenarios(d=LEAD) | {"again": scenarios(d=LEAD)["d"]},
            OPEN,
            "d and again have one scenario: cifar10, cnn, Di",
        ),
    ],
)
def test_first_in_most_scenarios(there, verdict, why):
    found = claims.check("PA1", there)
    assert found.verdict == verdict and why in found.why
    if found.numbers:
        assert "inferred from the paper's text" in found.why and found.coverage == "1 of 2 parts, 3 of 11 methods"


def test_a_scenario_counts_once_however_many_methods_it_has():
    found = claims.check("PA1", scenarios(d=LEAD, g=LAG | {"fedapa": [71, 95, 95]}))
    whole, *counted = found.numbers
    assert whole.rule == "at least 2 of 2" and whole.unit == "scenarios"
    assert whole.values == (1, 2, 2)  # at the first seed FedALA is ahead in the second scenario
    assert (whole.low, whole.high) == (1, 2) and all(c.counted for c in counted)
    assert [c.what for c in counted] == [
        f"cifar10, cnn, {split}: fedapa − {other}"
        for split in ("Dirichlet(0.1)", "pathological (2 classes)")
        for other in ("fedavg", "fedala")
    ]


def test_random_classes_are_no_scenario():
    alone = claims.check("PA1", scenarios(d=LEAD, g=LEAD))
    with_random = claims.check("PA1", scenarios(d=LEAD, g=LEAD, r=LAG))
    assert with_random.numbers == alone.numbers
    assert "left out, of no scenario: r;" in with_random.why and "left out" not in alone.why
    assert claims.check("PA1", scenarios(r=LEAD)).why.startswith("none of its methods was run in every set")
    assert claims.check("PA1", scenarios(d=LEAD, r=LEAD)).why.startswith("one scenario only: cifar10, cnn, Dirichlet")
    strange = claims.check("PA1", scenarios(d=LEAD, g=LEAD, r={"local": HIGH}))  # a set without its methods is told so
    assert strange.why.startswith("none of its methods was run in every set") and "left out" not in strange.why


def test_the_scenarios_that_are_not_there_are_named():
    found = claims.check("PA1", scenarios(d=LEAD, g=LEAD, c=LEAD, p=LEAD))
    absent = "not checked: all six scenarios (no runs with fashion-mnist dirichlet, cifar100 pathological);"
    assert absent in found.why and found.coverage == "1 of 2 parts, 3 of 11 methods"
    found = claims.check("PA1", scenarios(**dict.fromkeys("dgfpcx", LEAD)))
    assert found.coverage == "3 of 11 methods" and "not checked" not in found.why


def test_scenarios_at_full_scale():
    """CIFAR-100's classes a client are not known: with them nothing is reproduced."""

    def at(letters, seeds=5, **more):
        there = {}
        for letter in letters:
            dataset, split = PA1[letter]
            size = {"dataset": dataset, "model": "lenet5", "samples": scale.SIZES[dataset], "rounds": 102} | FEDAPA
            split = (
                {"capped": None, "balanced": False} | split | ({"capped": False} if split == DIR else {"beta": None})
            )
            changes = size | {"partition": split} | more
            there[letter] = {
                m: [history(m, [v - 9, v], s, **changes) for s in range(seeds)]
                for m, v in (("fedapa", 60), ("dbe", 50))
            }
        return claims.check("PA1", there)

    five = at("dgfpc")
    assert str(five) == "reproduced (1 of 2 parts, 2 of 11 methods)"
    assert str(at("dgfpcr")) == str(five)  # random classes do not count, nor do they fall short
    found = at("dgfpcx")
    assert found.verdict == AGREES and found.why.startswith("partition pathological, the protocol: dirichlet (x);")
    assert at("dg", seeds=4).verdict == AGREES
    assert "epochs 1, the protocol: 2" in at("dg", training={"epochs": 1}).why


def test_scenarios_of_evidence_are_grouped_by_their_protocol(tmp_path):
    base = {"clients": 10, "rounds": 1}
    stored(tmp_path, {f"fedapa/{name}": runs for name, runs in scenarios(base, d=LEAD, r=LEAD).items()})
    stored(tmp_path, {"table1/b": of({"model": "cnn", "dataset": "cifar10"}, fedavg=HIGH, fedala=LOW, fedah=MID)})
    stored(tmp_path, {"table1/a": of({"model": "cnn", "dataset": "mnist"}, fedavg=HIGH, fedala=LOW, fedah=MID)})
    stored(tmp_path, {"fedgh/a": of(MIX | {"dataset": "cifar10"}, fedgh=HIGH, fedproto=LOW)})
    stored(tmp_path, {"fedapa/ablation/d": scenarios(base, d={"fedapa": HIGH})["d"]})  # the same runs once more
    ids = ("PA1", "PA2", "PA3", "PA4", "PA7")
    one = {(v.id, names): v.why.split(";")[0] for names, v in report.report(tmp_path, ids)}
    rule = f"3 of 3 runs not converged ({RULE})"
    assert one == {
        ("PA1", "fedapa/d"): "one scenario only: cifar10, cnn, Dirichlet(0.1)",
        ("PA2", "fedapa/d"): one["PA2", "fedapa/d"],
        ("PA2", "fedapa/r"): one["PA2", "fedapa/r"],
        ("PA3", ""): "no set with fedapa and another of its methods",
        ("PA4", ""): "no set with fedapa and another of its variants",
        ("PA7", "fedapa/ablation/d; fedapa/d; fedapa/r"): rule,
    }
    stored(tmp_path, {f"fedapa/{name}": runs for name, runs in scenarios(base, g=LEAD, f=LAG).items()})
    assert told(tmp_path, "PA1") == {
        ("PA1", "fedapa/d, fedapa/f, fedapa/g"): f"{AGREES} (1 of 2 parts, 3 of 11 methods)"
    }
    (_, none), *_ = report.report(tmp_path / "table1", ["PA1"])
    assert none.why == "no set with fedapa and another of its methods"
    (_, none), *_ = report.report(tmp_path / "table1", ["PA7"])
    assert none.why == "no runs"
    stored(tmp_path / "random", scenarios(r=LEAD))
    (_, none), *_ = report.report(tmp_path / "random", ["PA1"])
    assert none.why == "no sets that differ in scenario alone"


def test_fedapas_claims_know_the_runs_of_its_protocols():
    assert set(claims.CLAIMS["PA1"].methods) <= set(protocols.FEDAPA)
    labels = {evidence.label({"method": "fedapa", "settings": settings}) for settings in protocols.ABLATION}
    assert set(claims.CLAIMS["PA4"].methods) <= labels
    for name, group in protocols.fedapa("paper").items():
        assert {(run["dataset"], run["model"]) for run in group} <= set(claims.CLAIMS["PA4"].settings), name


# --- PA2: time a round ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "flops", "verdict", "why"),
    [
        (1.1, 7, AGREES, "are noisy"),
        ([0.9, 1.0, 1.1], 7, AGREES, "the server's mixing too"),
        (1.3, 7, DISAGREES, "contradicted by seconds: fedapa / fedavg;"),
        (0.7, 7, DISAGREES, "contradicted by seconds: fedapa / fedavg;"),
        ([0.8, 1.0, 1.3], 7, OPEN, "not shown to be within 1 ±0.25: seconds: fedapa / fedavg;"),
        (1.1, 8, DISAGREES, "contradicted by FLOPs: fedapa − fedavg;"),
        (1.1, 6, DISAGREES, "contradicted by FLOPs: fedapa − fedavg;"),
    ],
)
def test_a_round_of_about_fedavgs_time(seconds, flops, verdict, why):
    found = claims.check("PA2", cost({"fedapa": seconds, "fedavg": 1}, {"fedapa": flops, "fedavg": 7}))
    assert found.verdict == verdict and why in found.why and found.coverage == ""
    assert [(c.unit, c.rule) for c in found.numbers] == [("FLOPs", "equal 0"), ("ratio", "within 1 ±0.25")]


def test_of_two_machines_flops_alone_are_compared():
    there = cost({"fedapa": 9, "fedavg": 1}, {"fedapa": 7, "fedavg": 7})
    for run in there["fedapa"]:
        run.config["device"] = "cuda"
    found = claims.check("PA2", there)
    assert str(found) == f"{AGREES} (1 of 2 parts)" and [c.unit for c in found.numbers] == ["FLOPs"]
    assert "not checked: in seconds (the runs' engines or devices differ)" in found.why
    for run in there["fedavg"]:
        run.config["device"] = "cuda"
    for name in there:
        assert "too few of its methods" in claims.check("PA2", {name: there[name]}).why
        there[name][1].config["engine"] = "stacked"  # both of this seed
    assert len(claims.check("PA2", there).numbers) == 2
    there["fedapa"][2].config["engine"] = there["fedavg"][0].config["engine"] = "stacked"  # one of either seed
    assert len(claims.check("PA2", there).numbers) == 1


# --- PA4: the ablation ------------------------------------------------------------------------------------------------

ALONE, UNIFORM = "fedapa server_lr=0.0", "fedapa weights=uniform"
WHOLE, MEAN = "fedapa share=model", "fedapa weights=uniform share=model"
SETTINGS = {
    "fedapa": {},
    ALONE: {"server_lr": 0.0},
    UNIFORM: {"weights": "uniform"},
    WHOLE: {"share": "model"},
    MEAN: {"weights": "uniform", "share": "model"},
}
# From 60 to 86 % by learned weights, to 90 % by sharing only the extractor.
ABLATED = {"fedapa": 90, ALONE: 80, UNIFORM: 85, WHOLE: 86, MEAN: 60}


def ablation(ends, **changes):
    """Runs of FedAPA's variants: {label: accuracies, or one that is that of all seeds but for a tenth of a point}."""
    given, there = changes.pop("settings", {}), {}
    for label, end in ends.items():
        values = end if isinstance(end, list) else [end, end + 0.1, end - 0.1]
        own = {"settings": given | SETTINGS[label]}
        there[label] = [history("fedapa", [v], s, **own, **changes) for s, v in enumerate(values)]
    return there


GAINS = "gain by learned weights − by sharing only the extractor"


@pytest.mark.parametrize(
    ("ends", "verdict", "why"),
    [
        ({}, AGREES, "3 of at least 5 seeds"),
        ({ALONE: 95}, DISAGREES, f"contradicted by fedapa − {ALONE};"),
        ({UNIFORM: 95}, DISAGREES, f"contradicted by fedapa − {UNIFORM};"),
        ({WHOLE: 95}, DISAGREES, f"contradicted by fedapa − {WHOLE};"),
        ({MEAN: 84}, DISAGREES, f"contradicted by {GAINS};"),  # 2 by learned weights, 4 by the extractor
        ({MEAN: 82}, OPEN, f"within noise: {GAINS}"),
        ({MEAN: 81}, AGREES, ""),
        ({UNIFORM: [89, 92, 89]}, OPEN, f"within noise: fedapa − {UNIFORM}"),
        ({ALONE: [89, 92, 89]}, OPEN, f"within noise: fedapa − {ALONE}"),
        ({WHOLE: [89, 92, 89]}, OPEN, f"within noise: fedapa − {WHOLE}"),
    ],
)
def test_what_the_ablation_says(ends, verdict, why):
    found = claims.check("PA4", ablation(ABLATED | ends))
    assert found.verdict == verdict and why in found.why and found.coverage == ""
    assert "its default" not in found.why


def test_gains_by_hand():
    there = {"fedapa": [90, 91, 92], WHOLE: [85, 87, 86], MEAN: [60, 70, 65]}
    of_gains, extractor = claims.check("PA4", ablation(there)).numbers
    assert of_gains.values == pytest.approx(((85 - 60) - (90 - 85), (87 - 70) - (91 - 87), (86 - 65) - (92 - 86)))
    assert extractor.values == pytest.approx((5, 4, 6))


@pytest.mark.parametrize(
    ("labels", "coverage", "numbers"),
    [
        (("fedapa", ALONE), "0 of 3 parts, 2 of 5 variants", [f"fedapa − {ALONE}"]),
        (("fedapa", ALONE, UNIFORM), "1 of 3 parts, 3 of 5 variants", [f"fedapa − {ALONE}", f"fedapa − {UNIFORM}"]),
        (("fedapa", WHOLE), "1 of 3 parts, 2 of 5 variants", [f"fedapa − {WHOLE}"]),
        (("fedapa", WHOLE, MEAN), "2 of 3 parts, 3 of 5 variants", [GAINS, f"fedapa − {WHOLE}"]),
        (("fedapa",), "3 of 3 parts", []),
        ((ALONE, UNIFORM, WHOLE, MEAN), "3 of 3 parts", []),
    ],
)
def test_of_an_ablation_what_was_run_is_checked(labels, coverage, numbers):
    found = claims.check("PA4", ablation({label: ABLATED[label] for label in labels}))
    assert [c.what for c in found.numbers] == numbers
    if numbers:
        assert str(found) == f"{AGREES} ({coverage})"
    else:
        assert found.verdict == OPEN and "too few of its methods" in found.why


@pytest.mark.parametrize(
    ("label", "settings", "method", "held"),
    [
        (ALONE, {}, "fedapa", "fedapa server_lr=0.01"),
        (ALONE, SETTINGS[UNIFORM], "fedapa", "fedapa server_lr=0.01"),
        (MEAN, SETTINGS[UNIFORM], "fedapa", "fedapa weights=uniform share=extractor"),
        (WHOLE, {}, "fedavg", "fedavg"),
        ("fedapa", {}, "fedavg", "fedavg"),
    ],
)
def test_a_label_must_be_that_of_its_runs(label, settings, method, held):
    there = ablation({"fedapa": 90, ALONE: 80})
    there[label] = [history(method, [80], s, **({"settings": settings} if settings else {})) for s in range(3)]
    with pytest.raises(ValueError, match=rf"^runs\['{label}'\]: holds a run of '{held}'$"):
        claims.check("PA4", there)


def test_other_settings_of_variants_must_be_the_defaults_and_the_same():
    found = claims.check("PA4", ablation(ABLATED, settings={"momentum": 0.9, "server_lr": 0.002}))
    assert found.verdict == AGREES
    assert {text for text in found.why.split("; ") if "its default" in text} == {
        *(f"{label}'s momentum 0.9, its default: 0.0" for label in SETTINGS),
        *(f"{label}'s server_lr 0.002, its default: 0.01" for label in SETTINGS if label != ALONE),
    }
    mixed = ablation(ABLATED) | {WHOLE: ablation({WHOLE: 86}, settings={"momentum": 0.9, "server_lr": 0.002})[WHOLE]}
    found = claims.check("PA4", mixed)
    assert (found.verdict, found.numbers) == (OPEN, ())
    assert found.why == f"{WHOLE} and fedapa differ in more than it names: server_lr, momentum"


def test_variants_share_a_design():
    mixed = ablation(ABLATED) | {WHOLE: ablation({WHOLE: 86}, training={"lr": 0.5})[WHOLE]}
    assert claims.check("PA4", mixed).why.startswith(f"{WHOLE} and fedapa differ in more than the method: training")


def test_an_ablation_at_full_scale():
    size = {"dataset": "cifar10", "model": "lenet5", "samples": 60_000, "rounds": 102} | FEDAPA

    def at(ends, **changes):
        changes = size | {"partition": {"capped": False}} | changes
        there = {
            label: [history("fedapa", [v - 9, v], s, settings=SETTINGS[label], **changes) for s in range(5)]
            for label, v in ends.items()
        }
        return claims.check("PA4", there)

    order = claims.CLAIMS["PA4"].remark
    assert (str(at(ABLATED)), at(ABLATED).why) == ("reproduced", order)
    assert at(ABLATED | {WHOLE: 91}).verdict == "not reproduced"
    assert at(ABLATED, training=FEDAPA["training"] | {"epochs": 1}).why == f"epochs 1, the protocol: 2; {order}"
    assert str(at(ABLATED, model="cnn")) == "reproduced"
    assert at(ABLATED, model="resnet18").why == f"cifar10 with resnet18, the paper: others; {order}"


def test_an_ablation_of_evidence_is_found_by_its_labels(tmp_path):
    for histories, settings in ((ablation(ABLATED)[label], SETTINGS[label]) for label in SETTINGS):
        for h in histories:
            h.clients["round"] = h.config["rounds"]
            arguments = {"method": "fedapa", "seed": h.config["seed"]} | ({"settings": settings} if settings else {})
            evidence.record(tmp_path / "fedapa/ablation", arguments, h)
    stored(tmp_path, {"fedapa/main": runs(fedapa=HIGH, fedavg=LOW), "table1": runs(fedavg=HIGH, fedah=LOW)})
    assert told(tmp_path, "PA4") == {("PA4", "fedapa/ablation"): AGREES}


# --- PA7: convergence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drops", "verdict", "why"),
    [
        ([0.1, 0.2, 0.3], AGREES, ""),
        ([0.1, 1.0, 1.9], OPEN, "not shown to be within ±1: fedapa: best − last"),
        ([4, 4.1, 4.2], DISAGREES, "contradicted by fedapa: best − last;"),
    ],
)
def test_fedapa_converges_and_keeps_its_best(drops, verdict, why):
    there = {"fedapa": [history("fedapa", [50, 90, *[90 - d] * 100], s) for s, d in enumerate(drops)]}
    found = claims.check("PA7", there)
    assert found.verdict == verdict and why in found.why and "not converged" not in found.why
    there["fedapa"][1] = history("fedapa", [50, 90, *[90 - drops[1]] * 99], 1, rounds=101)
    del there["fedapa"][0], there["fedapa"][1]
    found = claims.check("PA7", there)
    assert (found.verdict, found.numbers, found.why) == (OPEN, (), f"1 of 1 runs not converged ({RULE})")


def test_one_run_that_still_rises_leaves_it_open():
    there = {"fedapa": [history("fedapa", [50, 90], s, rounds=102) for s in range(3)]}
    assert claims.check("PA7", there).verdict == AGREES
    there["fedapa"][2] = history("fedapa", [*range(20, 71), 80], 2, rounds=102)
    found = claims.check("PA7", there)
    assert (found.verdict, found.numbers) == (OPEN, ()) and found.why == f"1 of 3 runs not converged ({RULE})"
    assert claims.check("PA7", {"fedavg": there["fedapa"]}).verdict == "not tested"


# --- the protocols of FedGH's and FedAPA's released code --------------------------------------------------------------

FEDGH = {
    "dataset": "cifar10",
    "model": {"name": fedgh.MIXED},
    "clients": 10,
    "partition": {"name": "classes_per_client", "classes": 2},
    "training": {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-3, "clip": 50.0, "batch_size": 512},
}
FEDAPA = {
    "clients": 20,
    "join_ratio": (0.6, 1.0),
    "training": {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": 2},
}


def merged(base, change):
    return {k: base[k] | v if isinstance(base.get(k), dict) else v for k, v in (base | change).items()}


@pytest.mark.parametrize(
    ("change", "epochs", "named"),
    [
        ({}, 30, set()),
        ({"dataset": "cifar100", "partition": {"classes": 10}}, 30, set()),
        ({"dataset": "cifar100"}, 30, {"classes 2, the protocol: 10"}),
        ({"clients": 20, "join_ratio": (0.5, 0.5)}, 30, {"clients 20", "join_ratio (0.5, 0.5)"}),
        ({"training": {"momentum": 0.0, "clip": None}}, 1, {"epochs 1", "momentum 0.0", "clip None"}),
        ({"partition": {"name": "dirichlet"}}, 30, {"partition dirichlet"}),
        ({"model": {"name": "cnn-1"}}, 30, {"clients 10", "join_ratio (1.0, 1.0)", "epochs 30", "batch_size 512"}),
        ({"model": {"name": "cnn"}}, 30, {"cifar10 with cnn", "clients 10", "join_ratio", "epochs 30", "batch_size"}),
    ],
)
def test_fedgh_is_held_to_its_own_protocol(change, epochs, named):
    found = claims.check("GH9", extraction(0.49, 0.5, 0.51, epochs=epochs, **merged(FEDGH, change)))
    why = found.why.split("; ")
    assert found.verdict == "agrees at reduced scale" and why[-4:-2] == [
        "3 of at least 5 seeds",
        f"6 of 6 runs not converged ({RULE})",
    ]
    rest = [text for text in why[:-4] if text != "a part of the data"]
    assert len(rest) == len(named) and all(text.startswith(tuple(named)) for text in rest)


GROUPS_OF_FEDAPA = GROUPS | {"capped": None}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, set()),
        ({"partition": {"min_size": 132}}, set()),
        ({"partition": {"min_size": 133}}, {"min_size 133, the protocol: at most 132"}),
        ({"partition": {"capped": True}}, {"capped True, the protocol: False"}),
        ({"partition": {"test_share": 1 / 6}}, set()),
        ({"partition": GROUPS_OF_FEDAPA}, set()),
        ({"partition": GROUPS_OF_FEDAPA | {"grouped": False}}, {"grouped False, the protocol: True"}),
        ({"dataset": "cifar100", "samples": 60_000}, set()),
        (
            {"dataset": "cifar100", "samples": 60_000, "partition": GROUPS_OF_FEDAPA},
            {"partition pathological", "beta None", "capped None"},
        ),
        ({"join_ratio": (1.0, 1.0)}, {"join_ratio (1.0, 1.0), the protocol: (0.6, 1.0)"}),
        ({"training": {"epochs": 1, "batch_size": 10}}, {"epochs 1", "batch_size 10"}),
        ({"model": "mlp"}, {"fashion-mnist with mlp, the paper: others"}),
        ({"model": "lenet5"}, set()),
        ({"settings": {"server_lr": 1e-4}}, {"fedapa's server_lr 0.0001, its default: 0.01"}),
    ],
)
def test_fedapa_is_held_to_its_own_protocol(change, named):
    scale = merged({"dataset": "fashion-mnist", "model": "cnn", "samples": 70_000, "rounds": 102} | FEDAPA, change)
    found = claims.check("PA6", proxies(*[[(-0.2, -0.1)]] * 3, scale=scale))
    assert found.verdict == "agrees at reduced scale"
    *rest, seeds = found.why.split("; ")
    assert seeds == "3 of at least 5 seeds" and len(rest) == len(named)
    assert all(text.startswith(tuple(named)) for text in rest)


# --- real runs, tiny --------------------------------------------------------------------------------------------------


def real(method, seeds=3, **options):
    options = {"clients": 6, "rounds": 2} | options
    return [experiment(method, seed=s, **options) for s in range(seeds)]


def test_fedgh_of_two_models_keeps_its_ledger_and_its_work_is_counted():
    mixed = {"model": "mlp-1+mlp-2", "lr": 0.05, "epochs": 2, "join_ratio": 0.5}
    there = {m: real(m, 1, **mixed) for m in ("fedgh", "local")}
    assert str(claims.check("GH8", {"fedgh": there["fedgh"]})) == "reproduced"
    (number,) = claims.check("GH9", there).numbers
    # Per sample, with layers a and b before the head c: extraction is a + b products, a step 2 a + 3 b + 3 c, for the
    # first layer's input needs no gradient.
    shares = [(64 * w + 64 * w) / (2 * 64 * w + 3 * 64 * w + 3 * 64 * 10) for w in (256, 128)]
    assert all(min(shares) < value < max(shares) for value in number.values)


def test_fedapa_keeps_fedpers_ledger_and_lowers_the_proxy_at_a_small_rate_only():
    fedapa = {"fedapa": real("fedapa", settings={"server_lr": 1e-4})}
    found = claims.check("PA3", fedapa | {"fedper": real("fedper")})
    assert str(found) == "reproduced" and len(found.numbers) == 4
    assert claims.check("PA6", fedapa).verdict == "agrees at reduced scale"
    assert -1 <= claims.check("PA5", fedapa).numbers[0].mean <= 1
    for settings in ({"server_lr": 1.0}, {"server_lr": 1e-4, "sign": "paper"}):
        there = {"fedapa": real("fedapa", settings=settings)}
        assert claims.check("PA6", there).verdict == "disagrees at reduced scale"


def test_fedapa_beside_fedavg_and_its_own_variants():
    both = {m: real(m) for m in ("fedapa", "fedavg")}
    flops, seconds = claims.check("PA2", both).numbers
    assert flops.values == (0, 0, 0) and flops.holds and min(seconds.values) > 0
    twice = both | {"fedapa": real("fedapa", epochs=2)}
    assert "differ in more than the method: training" in claims.check("PA2", twice).why
    there = {label: real("fedapa", settings=settings) for label, settings in SETTINGS.items()}
    found = claims.check("PA4", there)
    assert len(found.numbers) == 4 and found.coverage == "" and "its default" not in found.why
    alone, whole = found.numbers[0], found.numbers[-1]
    assert any(alone.values) and any(whole.values)  # the variants are not the same runs


def test_fedgh_s_sets_of_real_runs_can_be_compared():
    def what(claim, there):
        return [c.what for c in claims.check(claim, there).numbers]

    mixed = {"model": "mlp-1+mlp-2", "lr": 0.05, "rounds": 1}
    rates = {str(r): {"fedgh": real("fedgh", 2, settings={"header_lr": r}, **mixed)} for r in (0.01, 10.0)}
    assert claims.check("GH5", rates).why.startswith("2 of at least 3 seeds")
    assert what("GH5", rates) == ["fedgh, header_lr 10 − 0.01"]
    split = {"partition": "classes_per_client", "rounds": 1}
    there = {str(k): {m: real(m, 2, classes=k, **split) for m in ("fedgh", "local")} for k in (2, 4)}
    assert what("GH6", there) == ["2 classes: fedgh − local", "4 classes: fedgh − local"]
    many = {str(j): {"fedgh": real("fedgh", 2, clients=100, join_ratio=j, rounds=1)} for j in (0.1, 1.0)}
    assert what("GH7", many) == ["fedgh, join ratio 0.1 − 1"]


def test_fedprox_with_no_pull_is_as_close_to_fedavg_as_can_be():
    there = {"fedprox": real("fedprox", settings={"mu": 0.0}), "fedavg": real("fedavg")}
    found = claims.check("AH3", there)
    assert found.verdict == "agrees at reduced scale" and {c.mean for c in found.numbers} == {0}


# --- runs that cannot be compared -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rounds": 9}, "rounds"),
        ({"clients": 10}, "clients"),
        ({"training": {"lr": 0.1}}, "training"),
        ({"model": "cnn", "training": {"lr": 0.05}}, "model"),
        ({"partition": {"beta": 0.01}}, "partition"),
        ({"dataset": "mnist"}, "dataset"),
        ({"join_ratio": (0.5, 0.5)}, "join_ratio"),
    ],
)
@pytest.mark.parametrize("claim", ["AH6", "AH12"])
def test_runs_that_differ_in_more_than_the_method_are_not_compared(claim, change, named):
    mixed = runs(fedper=[80, 81, 82])
    mixed["fedrep"] = [history("fedrep", [80], s, **change) for s in range(3)]
    found = claims.check(claim, mixed)
    assert found.verdict == "not tested" and found.numbers == ()
    assert found.why.split("; ")[0].endswith(f"differ in more than the method: {named}")


def test_seeds_must_match_and_differ():
    mixed = runs(fedper=[80, 81, 82], fedrep=[80, 81, 82])
    mixed["fedrep"].reverse()
    assert "not run on the same seeds" in claims.check("AH6", mixed).why
    mixed["fedrep"] = mixed["fedrep"][:2]
    assert "not run on the same seeds" in claims.check("AH6", mixed).why
    same = {m: [history(m, [80], 4)] * 3 for m in ("fedper", "fedrep")}
    assert "a seed occurs twice: 4, 4, 4" in claims.check("AH6", same).why


def test_seeds_that_a_method_lacks_are_left_out_for_all():
    """Of seeds 0 to 3 FedRep lacks the last, on which FedAH is behind."""
    there = runs(4, fedah=[80, 81, 82, 0], fedrep=[70, 71, 73, 90])
    open_ = claims.check("AH1", there)
    assert open_.verdict == "not tested" and len(open_.numbers[0].values) == 4 and "seeds" not in open_.why
    del there["fedrep"][3]
    found = claims.check("AH1", there)
    assert found.verdict == AGREES and found.numbers[0].values == pytest.approx((10, 10, 9))
    assert "on 3 of 4 seeds: the others are not there for all" in found.why
    del there["fedrep"][0]
    assert claims.check("AH1", there).why.startswith("2 of at least 3 seeds; ")
    there["fedrep"] = [history("fedrep", [70], 9)]
    assert "not run on the same seeds" in claims.check("AH1", there).why


def test_seeds_that_a_set_lacks_are_left_out_of_all():
    three = claims.check("AH9", by_beta({0.1: FALL[0], 0.5: FALL[1]}))
    before, after = ({m: [*values, 50] for m, values in ends.items()} for ends in FALL)
    found = claims.check("AH9", by_beta({0.1: before, 0.5: after | {"fedrep": MID}}))
    assert found.numbers == three.numbers and "on 3 of 4 seeds" in found.why


def test_one_method_must_have_one_setting_and_one_design():
    mixed = runs(fedper=[80, 81, 82], fedrep=[80, 81, 82])
    mixed["fedrep"][1].config["settings"] = {"head_epochs": 10}
    assert "the runs of fedrep differ in more than the seed: settings" in claims.check("AH6", mixed).why
    mixed = runs(fedper=[80, 81, 82], fedrep=[80, 81, 82])
    for method in mixed:
        mixed[method][2] = history(method, [82], 2, training={"lr": 0.5})
    assert "the runs of fedper differ in more than the seed: training" in claims.check("AH6", mixed).why


def test_without_its_methods_a_claim_is_not_tested():
    found = claims.check("AH7", runs(fedah=[90, 91, 92]))
    assert found.verdict == "not tested" and str(found) == "not tested" and "too few" in found.why
    assert claims.check("AH7", {}).why.startswith("none of its methods was run")
    assert claims.check("AH8", {"fedah": []}).verdict == "not tested"


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="claim_id='AH99': must be one of 'AH1', 'AH2'"):
        claims.check("AH99", {})
    with pytest.raises(ValueError, match=r"runs\['fedah'\]: holds a run of 'fedrep'"):
        claims.check("AH8", {"fedah": [history("fedrep", [80])]})
    with pytest.raises(ValueError, match="reference='fedah': must be one of 'fedavg'"):
        claims.differences(runs(fedavg=[80, 81, 79]), "fedah")
    with pytest.raises(ValueError, match="runs: fedah has no runs"):
        claims.differences({"fedah": [], "fedavg": []}, "fedah")


# --- tables -----------------------------------------------------------------------------------------------------------


def test_tables_of_verdicts_and_of_their_numbers():
    found = [claims.check("AH7", runs(fedavg=[80, 81, 79], fedah=[82, 84, 83])), claims.check("AH6", {})]
    table = claims.table(found)
    assert table["verdict"].to_dict() == {"AH7": "agrees at reduced scale (2 of 10 methods)", "AH6": "not tested"}
    numbers = claims.numbers(found)
    assert numbers.loc["AH7"].to_dict() == {
        "comparison": "fedah − fedavg",
        "unit": "points",
        "seeds": 3,
        "mean": 3.0,
        "low": 0.52,
        "high": 5.48,
        "rule": "above 0",
        "met": "yes",
    }
    assert claims.table([]).empty and claims.numbers([]).empty


def test_differences_are_paired_and_say_what_they_show():
    table = claims.differences(runs(fedah=[82, 84, 83], fedavg=[80, 81, 79], fedrep=[81, 82, 80]), "fedah")
    assert list(table.index) == ["fedavg", "fedrep"]
    assert table.loc["fedavg", "own"] == "+3.0 [0.5, 5.5] ahead"
    assert table.loc["fedrep", "own"] == "+2.0 [-0.5, 4.5] within noise"
    assert table.loc["fedavg", "after"] == "+33.0 [30.5, 35.5] ahead"  # against the 50 % of fedavg's other point


def test_differences_takes_labels_and_refuses_runs_that_are_no_pairs():
    mixed = runs(fedah=[82, 84, 83], fedavg=[80, 81, 79])
    label = "fedah, weight_lr=1"
    mixed[label] = [history("fedah", [v], s, settings={"weight_lr": 1.0}) for s, v in enumerate([83, 85, 84])]
    assert claims.differences(mixed, label).loc["fedah", "own"] == "+1.0 [1.0, 1.0] ahead"
    turned = mixed | {label: mixed[label][::-1]}
    with pytest.raises(ValueError, match=f"runs: {label} and fedah were not run on the same seeds"):
        claims.differences(turned, "fedah")
    longer = mixed | {label: [history("fedah", [83], s, rounds=9) for s in range(3)]}
    with pytest.raises(ValueError, match=f"{label} and fedah differ in more than the method: rounds"):
        claims.differences(longer, "fedavg")


def test_checking_changes_nothing():
    given = runs(fedavg=[80, 81, 79], fedah=[82, 84, 83])
    before = copy.deepcopy(given["fedah"][0].config)
    claims.check("AH7", given)
    assert given["fedah"][0].config == before and list(given) == ["fedavg", "fedah"]
