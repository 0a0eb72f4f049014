"""What every notebook of pflkit begins with: its parameters, checked before anything runs.

papermill runs a notebook to the end with a misspelt parameter, and passes `-p quick false` as the string "false". So
the notebooks' second cell says what their parameters are, and refuses all else.
"""

import difflib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pflkit
from pflkit import checks

IPYTHON = {"In", "Out", "exit", "quit", "open", "get_ipython"}


@dataclass(frozen=True)
class Parameter:
    """A notebook's parameter: its value in each profile, from which its type follows, and what values are allowed."""

    smoke: Any
    small: Any
    paper: Any
    low: float | None = None
    high: float | None = None
    among: tuple | None = None

    def check(self, name, value):
        """`value`, if it is of the right type and allowed; else ValueError."""
        if self.among is not None:
            return checks.choice(name, value, self.among)
        if isinstance(self.small, bool):
            return checks.boolean(name, value)
        if isinstance(self.small, int):
            return checks.integer(name, value, self.low, self.high)
        if isinstance(self.small, float):
            return checks.real(name, value, self.low, self.high)
        if not isinstance(value, str | Path):
            raise ValueError(f"{name}={value!r}: must be a string")
        return value


COMMON = {
    "profile": Parameter("smoke", "small", "paper", among=("smoke", "small", "paper")),
    "out": Parameter("", "", ""),
    "saved": Parameter("", "", ""),
    "fresh": Parameter(False, False, False),
}


def settle(namespace, **parameters):
    """Checks a notebook's parameters, fills in those left None from its profile, and prints them.

    `namespace` is the notebook's globals(), and is changed. Besides its own `parameters` every notebook has the four of
    COMMON; `out` (where figures and tables go; by default a folder of figures/) and `saved` (where runs are saved and
    taken up again; by default runs/) become Paths. Raises ValueError for an unknown name, which a typing error in a
    papermill parameter leaves behind, and for a wrong type or value. The cell may be run again in the same kernel: what
    later cells have named since is not taken for parameters, and a name that was refused is forgotten.
    """
    parameters = COMMON | parameters
    literal = (bool, int, float, str, list, dict, tuple, type(None))
    public = {k for k, v in namespace.items() if not k.startswith("_") and k not in IPYTHON and isinstance(v, literal)}
    if "_settled" not in namespace and (strange := public - parameters.keys()):
        name = min(strange)
        raise ValueError(f"{name}={namespace.pop(name)!r}: {unknown(name, parameters)}")
    profile = COMMON["profile"].check("profile", namespace.get("profile"))
    for name, parameter in parameters.items():
        value = namespace.get(name)
        namespace[name] = getattr(parameter, profile) if value is None else parameter.check(name, value)
    print(" ".join(f"{name}={namespace[name]!r}" for name in parameters if name not in ("out", "saved")))
    # The figures of `small` that are committed stay as they are, until `python -m pflkit --write` makes new ones.
    latest = "figures/latest-small" if profile == "small" else f"figures/{profile}"
    for name, folder in (("out", latest), ("saved", "runs")):
        namespace[name] = Path(namespace[name] or root() / folder)
        namespace[name].mkdir(parents=True, exist_ok=True)
    namespace["_settled"] = True


def unknown(name, parameters):
    """Why `name` is refused: the parameter that was probably meant, and all there are."""
    close = difflib.get_close_matches(name, parameters, 1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"no such parameter.{hint} There are: {', '.join(parameters)}"


def root():
    """The project's folder where pflkit runs from a clone of it; else the working directory."""
    folder = Path(pflkit.__file__).resolve().parents[1]
    return folder if (folder / "notebooks").is_dir() else Path.cwd()


def show(*things):
    """The source code of functions and classes, for a notebook to show as it runs."""
    from IPython.display import HTML, Code

    sources = [textwrap.dedent(inspect.getsource(thing)).rstrip() for thing in things]
    code = Code("\n\n\n".join(sources), language="python")
    return HTML(f'<div style="font-family: monospace">{code._repr_html_()}</div>')


def versions():
    """The versions that the results depend on, as one line."""
    import numpy
    import torch

    python = ".".join(map(str, sys.version_info[:3]))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"Python {python}, torch {torch.__version__}, numpy {numpy.__version__}, {device}"
