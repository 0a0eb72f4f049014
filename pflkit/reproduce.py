"""The main job: all notebooks through papermill, in order, leaving figures, tables and executed copies."""

import base64
import contextlib
import io
import logging
import os
import time
import warnings
from pathlib import Path

from pflkit.notebook import COMMON, root, unknown

TYPES = {"bool": bool, "int": int, "float": (int, float), "str": str}


def reproduce(profile="small", only=(), parameters=None, write=False, say=print):
    """Runs the notebooks whose names start with one of `only` (default: all). Returns the names of those that failed.

    `parameters` go to every notebook that has them; ValueError, before anything runs, where no notebook does, or the
    type is wrong. Executed copies, figures and tables go to figures/<profile>; those of `small` are committed, so they
    are overwritten only if `write`, and otherwise go to figures/latest-small. One that fails leaves its copy too.
    """
    notebooks = chosen(only)
    given = {"profile": profile, **(parameters or {})}
    known = {path: _parameters(path) for path in notebooks}
    _check(given, known)
    profile = given["profile"]
    out = root() / "figures" / profile
    if profile == "small" and not write and any(out.glob("*.ipynb")):
        out = out.with_name("latest-small")
    given = {"out": str(out), "fresh": write, **given}
    out = Path(given["out"])
    failed, start = [], time.perf_counter()
    for path in notebooks:
        say(f"== {path.stem}")
        began = time.perf_counter()
        error = _execute(path, out / path.name, {k: v for k, v in given.items() if k in known[path]}, say)
        if error:
            failed.append(path.stem)
            say(f"== {path.stem} FAILED: {error}")
        else:
            say(f"== {path.stem} done in {time.perf_counter() - began:.0f} s")
    shown = os.path.relpath(out)
    say(f"{len(notebooks) - len(failed)} of {len(notebooks)} notebooks ran in {time.perf_counter() - start:.0f} s.")
    say(f"Executed notebooks, figures (PNG, CSV) and tables (CSV, Markdown): {shown}")
    return failed


def chosen(only=()):
    """The notebooks' paths in order; ValueError for an `only` that starts no notebook's name."""
    paths = sorted((root() / "notebooks").glob("[0-9]*.ipynb"))
    for name in only:
        if not any(path.name.startswith(name) for path in paths):
            raise ValueError(f"only={name!r}: no notebook starts so; there are {', '.join(p.stem for p in paths)}")
    return [path for path in paths if not only or path.name.startswith(tuple(only))]


def _parameters(path):
    """{name: name of its type} of the notebook's parameters cell."""
    import papermill

    return {name: p["inferred_type_name"] for name, p in papermill.inspect_notebook(path).items()}


def _check(given, known):
    every = {name: kind for kinds in known.values() for name, kind in kinds.items()}
    for name, value in given.items():
        if name not in every:
            raise ValueError(f"{name}={value!r}: {unknown(name, every)}")
        kind = TYPES.get(every[name], object)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise ValueError(f"{name}={value!r}: must be of type {every[name]}")
    COMMON["profile"].check("profile", given["profile"])


def _execute(path, target, parameters, say):
    """Runs one notebook; None, or what went wrong in one line. Its prints are shown as they come."""
    import papermill
    from papermill.exceptions import PapermillExecutionError

    target.parent.mkdir(parents=True, exist_ok=True)
    log = logging.getLogger("papermill")
    handler = _Say(say)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    environment = dict(os.environ)
    os.environ.pop("MPLBACKEND", None)  # whatever it says, the notebooks' figures go into the notebooks
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a debugger's warning in every kernel's first line
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")  # nbformat's and zmq's own
            papermill.execute_notebook(
                path,
                target,
                parameters,
                kernel_name="python3",
                progress_bar=False,
                log_output=True,
                extra_arguments=["--log-level=CRITICAL"],  # of the kernel: no word on how it is connected
            )
    except PapermillExecutionError as error:
        return f"{error.ename}: {error.evalue} (cell {error.exec_count})"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(environment)
        log.removeHandler(handler)
        if target.exists():
            tidy(target)
    return None


class _Say(logging.Handler):
    """Passes on what a notebook prints, without papermill's own remarks."""

    def __init__(self, say):
        super().__init__()
        self.say = say

    def emit(self, record):
        text = record.getMessage().rstrip()
        own = ("Executing ", "Ending ", "Input Notebook", "Output Notebook", "<IPython", "<Figure")
        if text and not text.startswith(own):
            self.say("\n".join(f"   {line}" for line in text.splitlines()))


def tidy(path):
    """Takes out of an executed notebook what changes from run to run and tells readers nothing; its pictures get 256
    colours, which is all that a plot needs, and a third of the size.
    """
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    notebook.metadata = {k: v for k, v in notebook.metadata.items() if k in ("kernelspec", "language_info")}
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        for data in (output["data"] for output in cell.get("outputs", []) if "data" in output):
            if "image/png" in data:
                data["image/png"] = _few_colours(data["image/png"])
    # The injected parameters hold the paths of whoever ran it.
    notebook.cells = [c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
    nbformat.write(notebook, path)


def _few_colours(png):
    """A PNG in base64 with 256 colours, if that is smaller."""
    from PIL import Image

    small = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png)))
    picture.quantize(256, Image.Quantize.FASTOCTREE).save(small, "PNG", optimize=True)
    return min(base64.b64encode(small.getvalue()).decode(), png, key=len)
