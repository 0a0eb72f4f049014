"""The README does what it says: its Python example, a method in one file and one line, a data set as one .npz."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pflkit.methods import METHODS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLE, METHOD, DATA_SET = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def python(*arguments, folder, **environment):
    """What a Python process prints; it must end with 0."""
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_example(tmp_path):
    """It prints both tables; what they say of bytes follows from the model's size alone."""
    printed = python("-c", EXAMPLE, folder=tmp_path)
    parameters = 64 * 64 + 64 + 64 * 10 + 10  # of the MLP for 8x8 images
    assert re.search(rf"^fedah +{4 * parameters} +{4 * parameters} ", printed, re.MULTILINE), printed
    assert re.search(r"^local +0 +0 ", printed, re.MULTILINE), printed


@pytest.fixture
def package(tmp_path):
    """A copy of the package with the README's method added as the README says."""
    shutil.copytree(ROOT / "pflkit", tmp_path / "pflkit", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pflkit/methods/halfway.py").write_text('"""Halfway."""\n\n' + METHOD)
    init = tmp_path / "pflkit/methods/__init__.py"
    text = init.read_text().replace("METHODS = {\n", 'METHODS = {\n    "halfway": Halfway,\n')
    init.write_text(text.replace("\nMETHODS", "from pflkit.methods.halfway import Halfway\n\nMETHODS", 1))
    return tmp_path


def test_own_method(package):
    listed = python("-m", "pflkit", "list", folder=package, PYTHONPATH=str(package))
    assert re.search(r"^halfway +Halfway \(you, this year\)$", listed, re.MULTILINE)
    options = ["--rounds", "2", "--join-ratio", "0.5", "--set", "share=0.25"]
    printed = python("-m", "pflkit", "run", "halfway", *options, folder=package, PYTHONPATH=str(package))
    assert re.search(r"^accuracy=0\.\d+ .*bytes_up=384800 bytes_down=384800 ", printed, re.MULTILINE), printed


def test_own_data_set(tmp_path):
    """Labels 3, 5 and 8 and grey images of 9 x 7 pixels; the README's line writes them, its command trains on them."""
    draw = np.random.default_rng(0)
    y = np.repeat([3, 5, 8], 40)
    images = draw.integers(0, 256, (120, 9, 7), dtype=np.uint8)
    images[:, :4] = np.where(y[:, None, None] == 3, 255, images[:, :4])
    code = compile(DATA_SET, "README.md", "exec")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(code, {"np": np, "images": images, "labels": y})
    finally:
        os.chdir(before)
    command = re.search(r"python (-m pflkit run fedah --dataset mine.npz .*)", README).group(1)
    printed = python(*command.split(), "--rounds", "2", "--clients", "4", folder=tmp_path)
    assert re.search(r"^accuracy=[01]\.\d+ ", printed, re.MULTILINE), printed


def test_links():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_number_of_methods():
    assert f"they are {len(METHODS)}:" in README
