"""Every notebook: written by the rules of the project, and run headless where nothing is prepared for it.

They run through bare papermill, two at a time, in a foreign folder, with an empty home and no way to a network.
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest

from pflkit.notebook import COMMON

ROOT = Path(__file__).parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
QUICKSTART = ROOT / "notebooks/00_quickstart.ipynb"
DERIVED = {"rounds": 50, "clients": 3, "join_ratio": 0.34}
WRONG = {  # what the command is given, and what the notebook says to it
    "clinets": ("3", "Did you mean 'clients'?"),
    "fresh": ("false", "must be True or False"),
    "rounds": ("many", "must be a whole number"),
}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def printed(notebook):
    return "".join(o.text for o in outputs(notebook) if o.output_type == "stream")


# --- as committed ----------------------------------------------------------------------------------------------------


@pytest.fixture
def committed(path):
    return nbformat.read(path, as_version=4)


@EACH
def test_it_is_valid_and_holds_no_results(committed):
    nbformat.validate(committed)
    assert len({cell.id for cell in committed.cells}) == len(committed.cells)
    assert outputs(committed) == []
    assert {cell.execution_count for cell in code_cells(committed)} == {None}
    assert set(committed.metadata) <= {"kernelspec", "language_info"}


@EACH
def test_its_kernel_is_python3(committed):
    assert committed.metadata.kernelspec.name == "python3"


@EACH
def test_one_cell_holds_the_parameters_as_literals_with_a_type_and_a_comment(committed):
    tagged = [cell for cell in committed.cells if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == code_cells(committed)[:1]
    for line in tagged[0].source.splitlines():
        (statement,) = ast.parse(line).body
        assert isinstance(statement, ast.AnnAssign), line
        assert statement.annotation.id in {"str", "int", "float", "bool"}, line
        ast.literal_eval(statement.value)
        assert re.search(r"  # \S+", line), line


@EACH
def test_the_second_cell_settles_just_these_parameters(committed):
    parameters, second, *_ = (ast.parse(cell.source) for cell in code_cells(committed))
    (call,) = (n for n in ast.walk(second) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "settle")
    declared = {statement.target.id for statement in parameters.body}
    assert declared == set(COMMON) | {keyword.arg for keyword in call.keywords}


@EACH
def test_code_cells_are_short(committed):
    for cell in code_cells(committed):
        lines = [line for line in cell.source.splitlines() if line.strip() and not line.strip().startswith("#")]
        assert len(lines) < 15, cell.source


# --- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def papermill(elsewhere):
    """papermill(path, target, **parameters): runs a notebook by the command line; the finished process."""
    (elsewhere / "home").mkdir()
    unset = ("PFLKIT_DATA", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLBACKEND", "PYTHONWARNINGS")
    environment = {k: v for k, v in os.environ.items() if k not in unset and not k.startswith(("JUPYTER", "IPYTHON"))}
    dead = dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"], "http://127.0.0.1:9")
    environment |= {"HOME": str(elsewhere / "home"), "OMP_NUM_THREADS": "1", **dead}

    def execute(path, target, **parameters):
        pairs = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
        command = [sys.executable, "-m", "papermill", "--no-progress-bar", str(path), str(target), *pairs]
        return subprocess.run(command, capture_output=True, text=True, cwd=elsewhere, env=environment)

    return execute


@pytest.fixture(scope="module")
def started(elsewhere, papermill):
    """Runs that may not have ended yet: of each notebook (by path), of DERIVED, and of each of WRONG (by name)."""
    with ThreadPoolExecutor(2) as pool:

        def start(name, path, **given):
            folders = {folder: elsewhere / name / folder for folder in ("out", "saved")}
            return pool.submit(papermill, path, elsewhere / f"{name}.ipynb", **{"profile": "smoke", **folders, **given})

        runs = {path: start(path.stem, path) for path in PATHS}
        runs |= {name: start(name, QUICKSTART, **{name: value}) for name, (value, _) in WRONG.items()}
        yield runs | {"derived": start("derived", QUICKSTART, **DERIVED)}


@pytest.fixture
def executed(path, started, elsewhere):
    done = started[path].result()
    assert done.returncode == 0, done.stderr[-2000:]
    return nbformat.read(elsewhere / path.name, as_version=4)


@EACH
def test_it_runs_and_leaves_pictures_with_their_numbers(executed, path, elsewhere):
    left = {file.name for file in (elsewhere / path.stem / "out").iterdir()}
    pictures = {name for name in left if name.endswith(".png")}
    assert pictures
    assert {name.replace(".png", ".csv") for name in pictures if "schematic" not in name} <= left
    assert all(name.startswith(path.stem.partition("_")[0] + "_") for name in left)
    tables = {name for name in left if name.endswith(".md")}
    assert {name.replace(".md", ".csv") for name in tables} <= left


@EACH
def test_it_shows_no_error_warning_or_widget(executed):
    assert [output for output in outputs(executed) if output.output_type == "error"] == []
    assert [output.text for output in outputs(executed) if output.get("name") == "stderr"] == []
    assert "widgets" not in executed.metadata
    kinds = {kind for output in outputs(executed) for kind in output.get("data", {})}
    assert kinds <= {"text/plain", "text/html", "image/png", "text/markdown"}


@EACH
def test_it_is_small_and_prints_little(executed, path, elsewhere):
    assert (elsewhere / path.name).stat().st_size < 1_000_000
    for cell in code_cells(executed):
        lines = "".join(o.text for o in cell.outputs if o.output_type == "stream").splitlines()
        assert len(lines) <= 40, cell.source
        assert not any("\r" in line for line in lines)


@EACH
def test_it_shows_nobodys_folders(executed, elsewhere):
    shown = json.dumps([{k: v for k, v in o.get("data", {}).items() if k != "image/png"} for o in outputs(executed)])
    for folder in (ROOT, Path.home(), elsewhere, tempfile.gettempdir()):
        assert str(folder) not in shown + printed(executed)


def test_parameters_reach_all_that_is_derived_from_them(started, elsewhere):
    """50 rounds and 3 clients: the printed settings, tables and the rounds that report follow; output stays short."""
    done, target = started["derived"].result(), elsewhere / "derived.ipynb"
    assert done.returncode == 0, done.stderr[-2000:]
    text = printed(nbformat.read(target, as_version=4))
    for name, value in DERIVED.items():
        assert f"{name}={value!r}" in text
    every = ["16", "32", "48", "50"]  # a third of the rounds, and the last
    assert re.findall(r"round +(\d+)/50", text) == 2 * every
    assert len((elsewhere / "derived/out/00_clients.csv").read_text().splitlines()) == 1 + 3
    assert len(text.splitlines()) <= 50
    assert target.stat().st_size < 1_000_000


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parameters_end_with_an_error_that_names_them(name, started):
    """By the bare command: a misspelt name, the string that papermill makes of `false`, a value of the wrong type."""
    done, (value, message) = started[name].result(), WRONG[name]
    assert done.returncode != 0
    last = [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert last.startswith(f"ValueError: {name}=")
    assert value in last
    assert message in last
