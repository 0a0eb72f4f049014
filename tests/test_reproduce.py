"""The main job on small notebooks: what fails is told and loses nothing, and committed results stay as they are."""

import base64
import io
import os
import re

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from pflkit import experiment, reproduce
from pflkit.__main__ import main

PARAMETERS = """
profile: str = "small"
out: str = None
saved: str = None
fresh: bool = None
"""
SETUP = {"clients": 4, "rounds": 6, "join_ratio": 0.5}
SETTLE = "from pflkit import notebook\nnotebook.settle(globals())"
TRAIN = f"""
from pflkit import experiment
history = experiment.experiment("fedah", **{SETUP}, out=saved, progress=1)
print(history.summary()["accuracy"], "after", history.state.round, "rounds")
"""
KILLED_IN_ROUND_4 = """
import os, signal
play = experiment._round
experiment._Saver.due = property(lambda self: 0.0, lambda self, value: None)  # every round is saved

def _round(method, fed, state, *rest):
    os.kill(os.getpid(), signal.SIGKILL) if state.round == 3 else None
    return play(method, fed, state, *rest)

experiment._round = _round
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose notebooks are written by `project(name, *code cells)`."""
    monkeypatch.setattr(reproduce, "root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()

    def write(name, *cells):
        tagged = new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        notebook = new_notebook(cells=[new_markdown_cell("# Title"), tagged, *map(new_code_cell, cells)])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")

    write.folder = tmp_path
    return write


def call(*arguments):
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(done.exception, SystemExit | None), done.exception
    return done.exit_code, done.output


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_one_failure_or_dead_kernel_stops_no_other_notebook(project):
    """Copies are left of all, the failed with their error; the last line of each tells, and the exit code too."""
    project("01_wrong", "print('before')", "1 / 0", "print('never')")
    project("02_dead", "import os\nos.kill(os.getpid(), 9)")
    project("03_right", "print('all is', 'well')")
    code, output = call("--profile", "smoke")
    assert code == 1
    assert "   before\n" in output
    assert "== 01_wrong FAILED: ZeroDivisionError: division by zero (cell 4)\n" in output
    assert "== 02_dead FAILED: DeadKernelError: Kernel died\n" in output
    assert "   all is well\n== 03_right done in " in output
    assert "never" not in output
    assert "1 of 3 notebooks ran in " in output
    assert files(project.folder / "figures") == [f"smoke/{name}.ipynb" for name in ("01_wrong", "02_dead", "03_right")]
    errors = [
        o.ename
        for cell in nbformat.read(project.folder / "figures/smoke/01_wrong.ipynb", 4).cells
        for o in cell.get("outputs", [])
        if o.output_type == "error"
    ]
    assert errors == ["ZeroDivisionError"]


def test_executed_copies_hold_nothing_of_the_machine_or_the_hour(project):
    project("01_plain", "print('out is', 'there' if out else 'missing')")
    copies = []
    for _ in range(2):
        assert call("--profile", "smoke")[0] == 0
        copies.append((project.folder / "figures/smoke/01_plain.ipynb").read_text())
    assert copies[0] == copies[1]
    assert "out is there" in copies[0]
    assert str(project.folder) not in copies[0]
    assert "papermill" not in copies[0]


def test_killed_during_training_it_goes_on_from_what_was_saved(project, monkeypatch):
    """The kernel is killed in round 4 of 6; the next run reads 3 rounds, and ends like one that was never cut short.

    The next run has an error in its last cell, which costs no result either.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as in this process
    project("01_train", SETTLE, "from pflkit import experiment\n" + KILLED_IN_ROUND_4, TRAIN)
    code, output = call("--profile", "smoke", "-p", "saved", project.folder / "cut")
    assert code == 1
    assert "== 01_train FAILED: DeadKernelError" in output
    assert "round 3/6" in output
    project("01_train", SETTLE, TRAIN, "1 / 0")
    code, output = call("--profile", "smoke", "-p", "saved", project.folder / "cut")
    assert code == 1
    assert "== 01_train FAILED: ZeroDivisionError" in output
    assert "fedah: 3 of 6 rounds read from" in output
    assert re.findall(r"round (\d)/6", output) == ["4", "5", "6"]
    whole = experiment.experiment("fedah", **SETUP, out=project.folder / "whole")
    assert f"{whole.summary()['accuracy']!r} after 6 rounds" in output
    (one,), (other,) = (list((project.folder / name).iterdir()) for name in ("cut", "whole"))
    assert one.name == other.name
    for name in ("state.safetensors", "history.csv", "watch.csv", "config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture
def placed(project, monkeypatch):
    """`placed(*arguments)`: where the command puts its results, which are then a notebook and a figure."""
    project("01_plain")

    def execute(path, target, given, say):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{given['fresh']}")
        (target.parent / "01_figure.png").write_text(f"{given['profile']} {given['out'] == str(target.parent)}")

    monkeypatch.setattr(reproduce, "_execute", execute)

    def run(*arguments):
        before = {name: (project.folder / "figures" / name).read_text() for name in files(project.folder / "figures")}
        code, output = call(*arguments)
        assert code == 0, output
        assert output.splitlines()[-1].startswith("Executed notebooks, figures (PNG, CSV) and tables (CSV, Markdown): ")
        after = {name: (project.folder / "figures" / name).read_text() for name in files(project.folder / "figures")}
        return {name for name in after if after[name] != before.get(name)}, after

    return run


def test_committed_results_are_rewritten_only_when_asked_for(placed, project):
    small = project.folder / "figures/small"
    small.mkdir(parents=True)
    for name in ("01_plain.ipynb", "01_figure.png"):
        (small / name).write_text("committed")
    written, now = placed()
    assert written == {"latest-small/01_plain.ipynb", "latest-small/01_figure.png"}
    assert now["latest-small/01_figure.png"] == "small True"
    assert now["latest-small/01_plain.ipynb"] == "False"
    written, now = placed("--profile", "smoke")
    assert written == {"smoke/01_plain.ipynb", "smoke/01_figure.png"}
    written, now = placed("-p", "profile", "paper")  # however the profile is given
    assert written == {"paper/01_plain.ipynb", "paper/01_figure.png"}
    written, now = placed("--write")
    assert written == {"small/01_plain.ipynb", "small/01_figure.png"}
    assert now["small/01_plain.ipynb"] == "True"  # from fresh runs


def test_out_names_another_folder(placed, project):
    written, _ = placed("-p", "out", project.folder / "figures/mine")
    assert written == {"mine/01_plain.ipynb", "mine/01_figure.png"}


def test_only_chooses_by_the_beginning_of_the_name(project):
    for name in ("00_a", "01_b", "02_c"):
        project(name)
    (project.folder / "notebooks/scratch.ipynb").touch()
    chosen = [path.stem for path in reproduce.chosen(("02", "00"))]
    assert chosen == ["00_a", "02_c"]
    assert [path.stem for path in reproduce.chosen()] == ["00_a", "01_b", "02_c"]
    with pytest.raises(ValueError, match="only='03': no notebook starts so; there are 00_a, 01_b, 02_c"):
        reproduce.chosen(("00", "03"))


def test_the_environment_is_left_as_it_was(project):
    project("01_plain", "x = 1")
    before = dict(os.environ)
    call("--profile", "smoke")
    assert dict(os.environ) == before


def test_pictures_in_executed_copies_are_small_and_still_pictures(tmp_path):
    """A curve's smooth edges have more than 256 colours with a band behind them; the page looks the same."""
    figure, ax = plt.subplots()
    ax.plot(np.sin(np.arange(50)))
    ax.fill_between(range(50), np.cos(np.arange(50)), alpha=0.3)
    before = io.BytesIO()
    figure.savefig(before, format="png")
    plt.close(figure)
    picture = nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(before.getvalue()).decode()})
    cells = [new_code_cell("", outputs=[picture, nbformat.v4.new_output("stream", text="no picture")])]
    nbformat.write(new_notebook(cells=cells), tmp_path / "one.ipynb")
    reproduce.tidy(tmp_path / "one.ipynb")
    after = base64.b64decode(nbformat.read(tmp_path / "one.ipynb", 4).cells[0].outputs[0]["data"]["image/png"])
    assert len(after) < 0.7 * len(before.getvalue())
    old, new = (np.asarray(Image.open(f).convert("RGBA"), float) for f in (before, io.BytesIO(after)))
    assert old.shape == new.shape and np.abs(old - new).mean() < 2
