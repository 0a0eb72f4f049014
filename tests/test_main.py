"""The command line: what it prints, what it refuses in one line, and where its results go."""

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from pflkit import claims, data, evidence, reproduce
from pflkit.__main__ import main, value_of
from pflkit.methods import METHODS

SMALL = ["--clients", "4", "--rounds", "2"]
LAST = re.compile(
    r"accuracy=(?P<accuracy>\S+) before=(?P<before>\S+) after=(?P<after>\S+)( global=(?P<global>\S+))?"
    r" best=(?P<best>\S+)"
    r" bytes_up=(?P<up>\d+) bytes_down=(?P<down>\d+) seconds=(?P<seconds>\d+\.\d)"
)
MLP = 64 * 64 + 64 + 64 * 10 + 10  # parameters of the model for digits


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch):
    monkeypatch.delenv("PFLKIT_DATA", raising=False)


def call(*arguments):
    """The finished command, which has shown no traceback."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def printed(*arguments):
    """The lines that a successful command prints."""
    done = call(*arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return done.stdout.splitlines()


def refused(*arguments):
    """The one line that a refused command prints."""
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("pflkit: ")
    return line.removeprefix("pflkit: ")


# --- list, run -------------------------------------------------------------------------------------------------------


def test_list_prints_a_line_per_method():
    lines = printed("list")
    assert [line.split()[0] for line in lines] == list(METHODS)
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)


def test_run_prints_a_line_a_round_and_last_its_numbers():
    *rounds, last = printed("run", "fedavg", *SMALL)
    assert [re.match(r"fedavg  round (\d)/2  before 0\.\d{4}  after ", line)[1] for line in rounds] == ["1", "2"]
    numbers = LAST.fullmatch(last).groupdict()
    accuracies = {name: float(numbers[name]) for name in ("accuracy", "before", "after", "best")}
    assert all(0 <= value <= 1 for value in accuracies.values())
    assert accuracies["accuracy"] == accuracies["before"] <= accuracies["best"]
    assert int(numbers["up"]) == int(numbers["down"]) == 2 * 4 * MLP * 4  # rounds, clients, parameters, bytes of each


def test_run_tells_the_accuracy_of_a_global_model():
    """Ditto's is FedAvg's, to the bit; methods with one model have none."""
    ditto, fedavg = (LAST.fullmatch(printed("run", name, *SMALL)[-1]).groupdict() for name in ("ditto", "fedavg"))
    assert ditto["global"] == fedavg["before"] != ditto["before"]
    assert fedavg["global"] is None


@pytest.mark.parametrize(
    ("ratio", "joined"), [("1", {4}), ("0.5", {2}), ("0.01", {1}), ("0.5:1", {2, 3, 4}), ("0.25:0.25", {1})]
)
def test_join_ratio_is_a_number_or_a_range(ratio, joined):
    *_, last = printed("run", "fedavg", *SMALL, "--join-ratio", ratio)
    sent = int(LAST.fullmatch(last)["up"]) / (4 * MLP)  # by how many, over both rounds
    assert sent in {a + b for a in joined for b in joined}


def test_settings_of_a_method_change_its_result():
    plain = printed("run", "fedah", *SMALL)[-1]
    weighted = printed("run", "fedah", *SMALL, "--set", "weight_lr=1e+2", "--set", "weight_epochs=2")[-1]
    assert LAST.fullmatch(plain)["after"] != LAST.fullmatch(weighted)["after"]


def test_clients_have_one_of_the_models_in_turn(tmp_path):
    """Nothing of the extractors travels: 650 numbers of the header down, 65 up for each class that a client has."""
    arguments = ["run", "fedgh", *SMALL, "--model", "mlp-1+mlp-2", "--out", tmp_path]
    *_, last = printed(*arguments)
    numbers = LAST.fullmatch(last)
    assert int(numbers["down"]) == 2 * 4 * 650 * 4
    assert int(numbers["up"]) % (65 * 4) == 0 and 0 < int(numbers["up"]) <= 2 * 4 * 650 * 4
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "config.json").read_text())["model"]["name"] == "mlp-1+mlp-2"
    assert printed(*arguments)[-1] == last


def test_rates_that_differ_by_default_must_be_given(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "images.npz", x=rng.random((60, 16, 16)), y=[0, 1] * 30)
    arguments = ["run", "local", *SMALL, "--dataset", tmp_path / "images.npz", "--partition", "iid", "--epochs", "0"]
    mixed = [*arguments, "--model", "cnn-5+mlp-5"]
    assert refused(*mixed) == "lr=None: must be given, for cnn-5+mlp-5 have different rates by default"
    assert LAST.fullmatch(printed(*mixed, "--lr", "0.02")[-1])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("2E4", 2e4),
        ("1", 1),
        ("0.5", 0.5),
        ("false", False),
        ("abc", "abc"),
        ("", None),
        ("[1, 1e1]", [1, 10.0]),
    ],
)
def test_values_are_yaml_and_numbers_in_any_notation(text, value):
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [
        ("nope", "method='nope': must be one of 'local', 'fedavg'"),
        ("local --dataset x", "dataset='x': must be one of 'digits'"),
        ("local --dataset x.npz", "dataset='x.npz': no such file"),
        ("local --model x", "model='x': must be one of"),
        ("local --model mlp-1+x", "model='x': must be one of"),
        ("local --model mlp-1+", "model='': must be one of"),
        ("local --model mlp+cnn-1", "model='cnn-1"),
        (
            "local --model mlp+mlp-1+mlp-2 --clients 2",
            "model='mlp+mlp-1+mlp-2': 3 models for 2 clients, must be 1 to as many",
        ),
        ("fedavg --model mlp-1+mlp-2", "model=mlp-1, mlp-2: FedAvg needs one model for all clients"),
        ("local --model cnn", "model='cnn': does not fit inputs of shape (1, 8, 8)"),
        ("local --partition x", "partition='x': must be one of 'iid', 'pathological'"),
        ("local --partition iid --beta 1", "beta=1.0: not a setting of partition 'iid'"),
        ("local --classes 2", "classes=2: not a setting of partition 'dirichlet'"),
        ("local --partition pathological --classes 11", "classes=11: must be a whole number from 1 to 10"),
        ("local --beta 0", "beta=0.0: must be a finite number"),
        ("local --beta nan", "beta=nan: must be a finite number"),
        ("local --clients 0", "clients=0: must be a whole number, at least 1"),
        ("local --clients 1000", "clients=1000: 1797 samples are too few"),
        ("local --rounds 0", "rounds=0: must be a whole number, at least 1"),
        ("local --lr nan", "lr=nan: must be a finite number"),
        ("local --lr -1", "lr=-1.0: must be a finite number"),
        ("local --batch-size 0", "batch_size=0: must be a whole number from 1 to 2147483647"),
        ("local --epochs -1", "epochs=-1: must be a whole number"),
        ("local --seed -1", "seed=-1: must be a whole number, at least 0"),
        ("local --engine x", "engine='x': must be one of 'auto'"),
        ("local --device x", "device='x': cannot be used here"),
        ("local --join-ratio 0", "join_ratio=0.0: "),
        ("local --join-ratio 1.5", "join_ratio=1.5: "),
        ("local --join-ratio -0.5", "join_ratio=-0.5: "),
        ("local --join-ratio nan", "join_ratio=nan: "),
        ("local --join-ratio 0.5:0.2", "join_ratio=(0.5, 0.2): "),
        ("local --join-ratio abc", "join_ratio='abc': "),
        ("local --join-ratio 1:2:3", "join_ratio='1:2:3': "),
        ("local --set x=1", "x=1: local has no such setting"),
        ("fedah --set weigth_lr=1", "weigth_lr=1: fedah has no such setting; its settings: weight_lr"),
        ("fedah --set weight_lr=fast", "weight_lr='fast': must be of type float | None"),
        ("fedah --set weight_lr=nan", "weight_lr='nan': must be of type float | None"),
        ("fedah --set weight_lr", "--set 'weight_lr': must be NAME=VALUE"),
        ("fedah --set weight_lr=[1", "'[1': must be a value in YAML: "),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_it(arguments, beginning):
    assert refused("run", *arguments.split()).startswith(beginning)


@pytest.mark.parametrize("arguments", ["run local --clients many", "run local --rounds 1.5", "run", "bogus", "--bogus"])
def test_what_cannot_be_read_is_refused_with_usage(arguments):
    done = call(*arguments.split())
    assert done.exit_code == 2
    assert done.stderr.startswith("Usage: ")


def test_results_are_kept_and_read_again(tmp_path):
    arguments = ["run", "fedavg", *SMALL, "--out", tmp_path / "runs"]
    first = printed(*arguments)
    again = printed(*arguments)
    assert re.match(r"fedavg: 2 of 2 rounds read from fedavg-\w+, computed \d{4}-\d\d-\d\d", again[0])
    assert again[1:] == first[-1:]


def test_a_place_that_cannot_hold_results_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert "file/fedavg-" in refused("run", "fedavg", *SMALL, "--out", tmp_path / "file")


def test_a_data_set_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "mine.npz", x=rng.random((60, 5)), y=["no", "yes"] * 30)
    *_, last = printed("run", "local", "--dataset", tmp_path / "mine.npz", "--partition", "iid", *SMALL)
    assert LAST.fullmatch(last)


def test_data_root_goes_before_the_environment(tmp_path, monkeypatch):
    """Truncated files of both places: the message names the one that was looked at."""
    for folder in ("given", "environment"):
        raw = tmp_path / folder / "FashionMNIST/raw"
        raw.mkdir(parents=True)
        (raw / "train-images-idx3-ubyte").touch()
    arguments = ["run", "local", "--dataset", "fashion-mnist"]
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path / "environment"))
    assert refused(*arguments).startswith(
        f"{tmp_path / 'environment'}/FashionMNIST/raw/train-images-idx3-ubyte is corrupt"
    )
    given = refused(*arguments, "--data-root", tmp_path / "given")
    assert given.startswith(f"{tmp_path / 'given'}/FashionMNIST/raw/train-images-idx3-ubyte is corrupt")


def found(folder):
    """What `data` prints of each set under `folder`."""
    lines = printed("data", "--data-root", folder)
    return dict(re.split(" +", line, maxsplit=1) for line in lines)


def test_data_prints_a_line_per_data_set(tmp_path, monkeypatch):
    missing = found(tmp_path)
    assert list(missing) == list(data.LOADERS)
    assert missing.pop("digits").startswith("complete, 1,797 images")
    assert all(line.startswith("missing: ") and str(tmp_path) in line for line in missing.values())
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("PFLKIT_DATA", str(tmp_path))
    assert [line.split(maxsplit=1)[1] for line in printed("data")[1:]] == list(missing.values())


def test_data_tells_complete_files_from_others(tmp_path, monkeypatch):
    """MNIST's by what they hold, packed or not; CIFAR's by md5."""
    raw = tmp_path / "MNIST/raw"
    raw.mkdir(parents=True)
    for part, n in data.MNIST_SIZES.items():
        sizes = [size.to_bytes(4, "big") for size in (n, 28, 28)]
        (raw / f"{part}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + b"".join(sizes))
        os.truncate(raw / f"{part}-images-idx3-ubyte", 16 + n * 784)
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01" + sizes[0] + bytes(n)))
    assert found(tmp_path)["mnist"] == f"complete, 70,000 images in {raw}"
    os.truncate(raw / "t10k-images-idx3-ubyte", 16)
    (raw / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8 + 60_000)))  # as long, without the header
    (raw / "t10k-labels-idx1-ubyte.gz").unlink()
    line = found(tmp_path)["mnist"]
    names = "t10k-images-idx3-ubyte, train-labels-idx1-ubyte.gz"
    assert line.startswith(f"missing: t10k-labels-idx1-ubyte; corrupt: {names} in {raw}; ")
    batches = tmp_path / "cifar-10-batches-py"
    batches.mkdir()
    for name in ("data_batch_1", "test_batch"):
        (batches / name).write_bytes(name.encode())
    known = [("test_batch", hashlib.md5(b"test_batch").hexdigest())]
    monkeypatch.setattr("torchvision.datasets.CIFAR10.test_list", known)
    line = found(tmp_path)["cifar10"]
    assert (
        "missing: data_batch_2, data_batch_3, data_batch_4, data_batch_5, batches.meta; corrupt: data_batch_1 in"
        in line
    )


def test_data_counts_the_classes_and_images_of_tiny_imagenet(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    for path in (
        *(f"train/n{k}/images/{i}.JPEG" for k in range(3) for i in range(2)),
        "val/images/0.JPEG",
        "val/images/2.JPEG",
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    (folder / "wnids.txt").write_text("n0\nn1\nn2\nn3\n")
    (folder / "val/images/3.JPEG").touch()
    lines = "0.JPEG\tn2\n1.JPEG\tn3\n2.JPEG\tn0\n3.JPEG\tn1\n"  # of n3 there is nothing else
    (folder / "val/val_annotations.txt").write_text(lines)
    beginning = f"3 of 200 classes, 9 images (counted, not decoded) in {folder}; "
    assert found(tmp_path)["tiny-imagenet"].startswith(beginning)
    (folder / "val/images/0.JPEG").unlink()
    assert f"unusable: {folder}/val/images lacks 1 images" in found(tmp_path)["tiny-imagenet"]
    (folder / "wnids.txt").unlink()
    assert f"unusable: {folder} lacks wnids.txt" in found(tmp_path)["tiny-imagenet"]


def test_as_a_module():
    """`python -m pflkit` is the same command, quiet on warnings and with the exit code of a refusal."""
    command = [sys.executable, "-W", "error", "-m", "pflkit", "run", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"pflkit: method='nope': must be one of .*\n", done.stderr)


# --- claims ----------------------------------------------------------------------------------------------------------


def evidence_of(folder, methods=("fedper", "fedrep", "fedavg")):
    """Folder of evidence with a set of short runs, and its command's arguments."""
    small = {"dataset": "digits", "samples": 200, "clients": 4, "rounds": 2, "model": "mlp", "partition": "iid"}
    runs = [{"method": m, **small, "seed": seed} for seed in range(3) for m in methods]
    assert evidence.collect({"table9/digits": runs}, folder, jobs=1, say=lambda _: None) == 0
    return ["claims", "--folder", folder]


def test_claims_without_runs_are_not_tested(tmp_path):
    lines = printed("claims", "--folder", tmp_path / "nothing")
    assert [line.split()[0] for line in lines[::2]] == list(claims.CLAIMS)
    assert set(lines[1::2]) == {"  no sets: not tested; no runs"}
    assert len(printed("claims", "AH12", "--folder", tmp_path)) == 2


def test_claims_are_checked_with_the_runs_there_are(tmp_path):
    command = evidence_of(tmp_path / "runs")
    claim, verdict, *numbers = printed(*command, "AH12")
    assert claim.startswith("AH12  Bytes a round")
    assert verdict.startswith(
        "  table9/digits: reproduced (1 of 3 parts, 3 of 11 methods); not checked: FedFomo highest"
    )
    assert len(numbers) == 2 and re.fullmatch(r"    fedper − fedavg: -\S+ \[.*\] bytes, below 0: yes", numbers[0])
    printed(*command, "--out", tmp_path / "out")
    names = {"claims.csv", "claims.md", "claims-numbers.csv"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    table = pd.read_csv(tmp_path / "out/claims.csv").set_index("id")
    assert set(table.index) == set(claims.CLAIMS) and table.loc["AH12", "sets"] == "table9/digits"
    assert table.loc["AH12", "numbers"] == "2 met"
    numbers = pd.read_csv(tmp_path / "out/claims-numbers.csv").set_index("id")
    assert numbers.loc["AH12", "met"].tolist() == ["yes", "yes"]
    assert "| AH12 | Bytes a round" in (tmp_path / "out/claims.md").read_text()


def test_claims_refuse_bad_ids_and_folders(tmp_path):
    (tmp_path / "file").touch()
    assert refused("claims", "AH99").startswith("id='AH99': must be one of 'AH1', 'AH2'")
    assert refused("claims", "--folder", tmp_path / "file") == f"folder='{tmp_path}/file': is not a folder"
    assert f"{tmp_path}/file" in refused("claims", "--folder", tmp_path / "no", "--out", tmp_path / "file")
    (tmp_path / "runs.jsonl").write_text("{")
    assert refused("claims", "--folder", tmp_path).startswith(f"{tmp_path}/runs.jsonl: cannot be read: ")


# --- the main job ----------------------------------------------------------------------------------------------------


@pytest.fixture
def not_run(monkeypatch):
    """Fails the test if a notebook is run."""
    monkeypatch.setattr(reproduce, "_execute", lambda *_: pytest.fail("a notebook was run"))


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [
        (["--only", "77"], "only='77': no notebook starts so; there are 00_quickstart"),
        (["--profile", "tiny"], "profile='tiny': must be one of 'smoke', 'small', 'paper'"),
        (["-p", "profile", "tiny"], "profile='tiny': must be one of 'smoke', 'small', 'paper'"),
        (["-p", "clinets", "3"], "clinets=3: no such parameter. Did you mean 'clients'?"),
        (["-p", "rounds", "many"], "rounds='many': must be of type int"),
        (["-p", "rounds", "1.5"], "rounds=1.5: must be of type int"),
        (["-p", "rounds", "true"], "rounds=True: must be of type int"),
        (["-p", "fresh", "maybe"], "fresh='maybe': must be of type bool"),
        (["-p", "fresh", "1"], "fresh=1: must be of type bool"),
        (["-p", "dataset", "5"], "dataset=5: must be of type str"),
        (["-p", "out", ""], "out=None: must be of type str"),
        (["-y", "{clinets: 3}"], "clinets=3: no such parameter. Did you mean 'clients'?"),
        (["-y", "5"], "-y '5': must be a mapping of names to values"),
        (["-y", "{a"], "'{a': must be a value in YAML: "),
    ],
)
def test_wrong_parameters_are_refused_before_any_notebook_runs(not_run, arguments, beginning):
    assert refused(*arguments).startswith(beginning)


def test_parameters_reach_the_notebooks_that_have_them(monkeypatch, tmp_path):
    """-p and -y as one, typed; a notebook gets only what it declares."""
    seen = {}
    monkeypatch.setattr(reproduce, "_execute", lambda path, target, given, say: seen.update({path.stem: given}))
    block = "{beta: 1e-2, fresh: false, clients: 3}"
    printed("--profile", "smoke", "-p", "rounds", "2", "-p", "join_ratio", "5e-1", "-p", "out", tmp_path, "-y", block)
    assert {name: seen["00_quickstart"][name] for name in ("profile", "rounds", "join_ratio", "fresh", "clients")} == {
        "profile": "smoke",
        "rounds": 2,
        "join_ratio": 0.5,
        "fresh": False,
        "clients": 3,
    }
    assert "join_ratio" not in seen["01_data_and_partitions"]
    assert seen["01_data_and_partitions"]["clients"] == 3


@pytest.mark.parametrize(("failures", "code"), [([], 0), (["00_quickstart"], 1)])
def test_the_exit_code_tells_whether_all_ran(monkeypatch, failures, code):
    monkeypatch.setattr(reproduce, "reproduce", lambda *_, **__: failures)
    assert call("--profile", "smoke").exit_code == code
