import copy
import math
from dataclasses import asdict

import pandas as pd
import pytest

from pflkit import claims
from pflkit.experiment import History
from pflkit.methods import METHODS
from pflkit.training import Training

PRODUCT = {"fedavg": "before", "fedprox": "before"}
BYTES = {"fedavg": 100, "fedah": 100, "fedper": 90, "fedrep": 90, "fedfomo": 600, "fedala": 100}
LR = {"cnn": 0.005, "resnet18": 0.01, "mlp": 0.05}
PAPER = {"dataset": "tiny-imagenet", "model": "resnet18", "samples": 100_000, "rounds": 102}


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
    assert claims.interval([1, 2, 3]) == pytest.approx((2, 2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)  # 1..5: deviations 4 + 1 + 0 + 1 + 4 = 10, over n - 1 = 4
    assert claims.interval([1, 2, 3, 4, 5]) == pytest.approx((3, 3 - half, 3 + half))


def test_one_value_has_no_interval_and_equal_ones_have_a_point():
    assert claims.interval([7]) == (7, -math.inf, math.inf)
    assert claims.interval([7, 7, 7]) == (7, 7, 7)


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
    assert claims.above("a − b", values).holds is holds


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
    assert claims.close("a − b", values, 1.0).holds is holds


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
        ({"samples": 99_999}, "a part of the data"),
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
            "10 of 10 runs not converged (the released code's stopping rule: 100 evaluations without a new best)",
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


def test_one_seed_on_a_part_of_the_data_reproduces_nothing():
    there = full(**CLOSE)
    for method, values in CLOSE.items():
        there[method][3] = history(method, [values[3]], 3, **(PAPER | {"samples": 99_999}))
    found = claims.check("AH6", there)
    assert found.verdict == "agrees at reduced scale" and "a part of the data" in found.why


def test_four_seeds_reproduce_nothing():
    found = claims.check("AH6", full(4, **CLOSE))
    assert (found.verdict, found.why) == ("agrees at reduced scale", "4 of at least 5 seeds")


def at_full_scale(dataset, partition, fedah=None, **training):
    """The claim AH7 by fabricated runs of the CNN at full scale, FedAH far ahead, its settings changed by `fedah`."""
    scale = {"dataset": dataset, "model": "cnn", "samples": claims.SIZES[dataset], "rounds": 102}
    changes = {"partition": partition, "training": training}
    settings = {"fedavg": {}, "fedah": fedah or {}}
    there = {
        m: [history(m, [v - 9, v], s, settings=settings[m], **scale, **changes) for s in range(5)]
        for m, v in (("fedavg", 50), ("fedah", 60))
    }
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
    split = {"name": "pathological", "grouped": True}
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
    monkeypatch.setattr(claims, "PATIENCE", 50)
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
    with pytest.raises(ValueError, match="claim_id='AH99': must be one of 'AH6'"):
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
