"""Parameters of notebooks: what is wrong is refused by name, what is left out comes from the profile."""

from pathlib import Path

import pytest

from pflkit import notebook
from pflkit.notebook import Parameter, settle

ROUNDS = Parameter(2, 20, 2000, low=1)
BETA = Parameter(0.1, 0.2, 0.3, low=1e-9)
QUICK = Parameter(True, False, False)
DATASET = Parameter("digits", "digits", "fashion-mnist")
OWN = {"rounds": ROUNDS, "beta": BETA, "quick": QUICK, "dataset": DATASET}


@pytest.fixture
def cell(tmp_path):
    """The globals of a notebook whose parameters cell has been run."""
    nothing = dict.fromkeys(["fresh", *OWN])
    return {"profile": "small", "out": str(tmp_path / "out"), "saved": str(tmp_path / "saved"), **nothing}


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("smoke", {"rounds": 2, "beta": 0.1, "quick": True, "dataset": "digits"}),
        ("small", {"rounds": 20, "beta": 0.2, "quick": False, "dataset": "digits"}),
        ("paper", {"rounds": 2000, "beta": 0.3, "quick": False, "dataset": "fashion-mnist"}),
    ],
)
def test_what_is_left_out_comes_from_the_profile(cell, profile, expected, capsys):
    cell["profile"] = profile
    settle(cell, **OWN)
    assert {name: cell[name] for name in OWN} == expected
    shown = " ".join(f"{name}={value!r}" for name, value in expected.items())
    assert capsys.readouterr().out == f"profile={profile!r} fresh=False {shown}\n"


def test_what_is_given_stays(cell):
    given = {"rounds": 7, "beta": 0.5, "quick": True, "dataset": "mine.npz", "fresh": True}
    settle(cell := cell | given, **OWN)
    assert {name: cell[name] for name in given} == given


def test_a_whole_number_will_do_for_a_real_one(cell):
    cell["beta"] = 1
    settle(cell, **OWN)
    assert cell["beta"] == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("profile", "tiny"),
        ("profile", None),
        ("fresh", "false"),
        ("fresh", 0),
        ("quick", "True"),
        ("rounds", 0),
        ("rounds", 2.0),
        ("rounds", "2"),
        ("rounds", True),
        ("beta", 0.0),
        ("beta", "0.1"),
        ("beta", float("nan")),
        ("beta", float("inf")),
        ("beta", True),
        ("dataset", 5),
        ("out", 5),
        ("saved", False),
    ],
)
def test_wrong_values_are_refused_in_one_line(cell, name, value):
    cell[name] = value
    with pytest.raises(ValueError, match=rf"^{name}={value!r}: must be .*$"):
        settle(cell, **OWN)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("round", "Did you mean 'rounds'?"), ("bta", "Did you mean 'beta'?"), ("zzz", "There are: profile")],
)
@pytest.mark.parametrize("value", [3, "x", 0.5, False, None, [1], {"a": 1}])
def test_unknown_names_are_refused_with_the_likely_one(cell, name, hint, value):
    cell[name] = value
    with pytest.raises(ValueError, match=rf"^{name}=.*no such parameter") as error:
        settle(cell, **OWN)
    assert hint in str(error.value)
    assert "rounds, beta, quick, dataset" in str(error.value)


def test_what_is_no_parameter_is_let_be(cell):
    """Modules, functions, private names, and what IPython puts there."""
    settle(cell | {"np": pytest, "f": len, "_i1": "text", "In": ["text"], "Out": {}, "exit": None}, **OWN)


def test_a_corrected_cell_can_be_run_at_once(cell):
    with pytest.raises(ValueError, match=r"^ruonds=3: no such parameter"):
        settle(cell := cell | {"ruonds": 3}, **OWN)
    settle(cell := cell | {"rounds": 3}, **OWN)
    assert cell["rounds"] == 3


def test_the_cells_can_be_run_again_in_the_same_kernel(cell):
    """Later cells have named things by then; parameters are checked as before."""
    first = dict(cell)
    settle(cell, **OWN)
    cell |= {"every": 10, "runs": {}, "name": "mlp"}
    settle(cell, **OWN)  # the second cell alone: out and saved are Paths by now
    settle(cell := cell | first | {"rounds": 5}, **OWN)
    assert cell["rounds"] == 5
    with pytest.raises(ValueError, match=r"^rounds=0: "):
        settle(cell | first | {"rounds": 0}, **OWN)


def test_folders_are_made_and_not_printed(cell, tmp_path, capsys):
    settle(cell, **OWN)
    assert cell["out"] == tmp_path / "out"
    assert cell["saved"] == tmp_path / "saved"
    assert cell["out"].is_dir()
    assert cell["saved"].is_dir()
    assert str(tmp_path) not in capsys.readouterr().out


@pytest.mark.parametrize(("profile", "folder"), [("smoke", "smoke"), ("small", "latest-small"), ("paper", "paper")])
def test_default_folders_lie_in_the_project_wherever_one_is(cell, tmp_path, monkeypatch, profile, folder):
    """By default the committed figures/small stays as it is."""
    monkeypatch.setattr(notebook, "root", lambda: tmp_path / "project")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    settle(cell := cell | {"profile": profile, "out": None, "saved": ""}, **OWN)
    assert cell["out"] == tmp_path / "project/figures" / folder
    assert cell["saved"] == tmp_path / "project/runs"


def test_the_root_is_the_clone():
    assert notebook.root() == Path(__file__).parents[1]


def test_versions_are_one_line_that_names_what_results_depend_on():
    line = notebook.versions()
    assert "\n" not in line
    assert all(word in line for word in ("Python 3.", "torch ", "numpy "))
