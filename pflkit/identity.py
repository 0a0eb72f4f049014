"""What a run is: all that its result depends on, as plain values, and the hash that names its folder.

Code belongs to it. Of this package the source counts; of a user's own methods, losses and modules the compiled code
does, and that of all they name, because a notebook's cells leave no source behind.
"""

import functools
import hashlib
import importlib
import inspect
import json
import pickle
import sys
import types
import uuid
from dataclasses import asdict, is_dataclass

import torch

from pflkit import (
    checks,
    data,
    descent,
    federation,
    graphs,
    messages,
    models,
    partition,
    stack,
    streams,
    training,
    trees,
)
from pflkit.methods import METHODS

PACKAGE = (trees, checks, streams, data, partition, models, messages, descent, stack, graphs, training, federation)
INNER = {name for name in vars(torch.nn.Module()) if not name.endswith("hooks")}  # torch's own, in every module
PLAIN = bool | int | float | str | tuple | None


def describe(method, fed, rounds, eval_every=1):
    """All that the result of `method` on `fed` depends on, as plain values; code and weights enter as hashes."""
    names = {cls: name for name, cls in METHODS.items()}
    nets = [group.model for group in fed.groups]
    parts = [part.module for net in nets for part in (net.extractor, net.head)]
    starts = [trees.leaves(net.init()) for net in nets]
    weights = hashlib.sha256(b"".join(t.numpy().tobytes() for start in starts for t in start))
    inexact = [] if fed.precision == "full" else [fed.precision]
    settings = asdict(method) if is_dataclass(method) else {k: repr(v) for k, v in vars(method).items()}
    config = {
        "method": names.get(type(method), type(method).__name__),
        "settings": settings,
        "dataset": {"name": fed.dataset.name, **fed.dataset.settings, "fingerprint": fed.fingerprint},
        "partition": {"name": fed.partition.name, **fed.partition.settings, "fingerprint": fed.partition.fingerprint},
        "clients": fed.num_clients,
        "model": {
            "name": "+".join(net.name for net in nets),
            "classes": fed.dataset.num_classes,
            "features": [net.features for net in nets],
            "parameters": [sum(t.numel() for t in start) for start in starts],
            "modules": [str(module) for module in parts],
            "attributes": [[name, *_attributes(m)] for module in parts for name, m in module.named_modules()],
            "weights": weights.hexdigest()[:16],
        },
        "training": asdict(fed.training),
        "join_ratio": fed.join_ratio,
        "rounds": rounds,
        "eval_every": eval_every,
        "seed": fed.seed,
        "engine": "+".join(sorted({name for group in fed.groups for name in [*group.engine.names(), *inexact]})),
        "device": fed.device.type,
        "dtype": str(fed.dtype),
        "versions": ["{}.{}".format(*sys.version_info), torch.__version__],
        "code": _code(method, parts),
    }
    return json.loads(json.dumps(config, default=_item))  # as it will be read from disk


def digest(config):
    """Twelve hex digits that name the run."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def _attributes(module):
    """A module's own settings, such as a scale or an activation; str(module) shows only those of torch's layers."""
    return [[name, _plain(value)] for name, value in _settings(module)]


def _settings(module):
    """A module's own attributes, and hooks; not its parameters, buffers and parts, which enter by themselves."""
    held = [(k, v) for k, v in sorted(vars(module).items()) if k not in INNER]
    return [(k, v) for k, v in held if not k.endswith("hooks") or v]


def _plain(value):
    """Any value as plain values that are equal only where it is."""
    if isinstance(value, PLAIN) and not isinstance(value, tuple):
        return value
    if isinstance(value, dict):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, functools.partial):
        return ["partial", *map(_plain, (value.func, value.args, value.keywords))]
    if torch.is_tensor(value):
        return [str(value.dtype), list(value.shape), hashlib.sha256(value.detach().cpu().numpy().tobytes()).hexdigest()]
    if hasattr(value, "__qualname__"):  # functions and classes; a user's own enter by their code, too
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    try:
        return [type(value).__qualname__, hashlib.sha256(pickle.dumps(value)).hexdigest()]
    except Exception:
        # Whatever cannot be pickled: a value that never comes again, so that no saved run is taken for it.
        return [type(value).__qualname__, uuid.uuid4().hex]


def _named(value):
    """The functions and classes in a value."""
    if isinstance(value, dict | list | tuple):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return [thing for part in parts for thing in _named(part)]
    if isinstance(value, functools.partial):
        return _named((value.func, value.args, value.keywords))
    return [value] if isinstance(value, type | types.FunctionType) else [getattr(value, "__func__", None), type(value)]


def _item(value):
    """A numpy number as Python's own; anything else that JSON has no word for, as it prints."""
    return value.item() if hasattr(value, "item") else repr(value)


def _code(method, parts):
    """A hash of the code of what computes: the package, the method's file and those it uses, and a user's own."""
    modules, todo = set(), [type(method).__module__]
    while todo:
        name = todo.pop()
        if name in modules or not name.startswith("pflkit.methods."):
            continue
        modules.add(name)
        todo += {getattr(v, "__module__", None) or "" for v in vars(sys.modules[name]).values()}
    files = [*PACKAGE, importlib.import_module("pflkit.experiment"), *(sys.modules[name] for name in sorted(modules))]
    inside = [m for part in parts for m in part.modules()]
    own = [type(method), *map(type, inside), *(f for m in inside for _, v in _settings(m) for f in _named(v))]
    sources = [inspect.getsource(module) for module in files] + _compiled(own)
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]


def _compiled(things):
    """The compiled code of a user's classes and functions, and of all the user's code and constants that these name."""
    found, todo = {}, list(things)
    while todo:
        thing = todo.pop()
        if not isinstance(thing, type | types.FunctionType) or thing in found or _known(thing.__module__):
            continue
        if isinstance(thing, type):
            members = [(k, getattr(v, "__func__", v)) for k, v in sorted(vars(thing).items()) if k != "__module__"]
            found[thing] = repr([(k, v) for k, v in members if isinstance(v, PLAIN) and not k.startswith("__")])
            todo += [*thing.__mro__, *(v for _, v in members)]
            continue
        codes, text = [thing.__code__], repr([v for v in thing.__defaults__ or () if isinstance(v, PLAIN)])
        for code in codes:  # grows: the code of inner functions is a constant of the outer one
            inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
            codes += inner
            text += repr((code.co_code.hex(), code.co_names, [c for c in code.co_consts if c not in inner]))
            named = [thing.__globals__.get(name) for name in code.co_names]
            named += [cell.cell_contents for cell in thing.__closure__ or ()]
            libraries = [v for v in named if isinstance(v, types.ModuleType) and not _known(v.__name__)]
            named += [getattr(library, name, None) for library in libraries for name in code.co_names]
            text += repr([v for v in named if isinstance(v, PLAIN)])
            todo += named
        found[thing] = text
    return sorted(f"{thing.__module__}.{thing.__qualname__} {text}" for thing, text in found.items())


def _known(module):
    """Is this the name of an installed module, or of one whose source counts already?"""
    root = (module or "builtins").split(".")[0]
    installed = "-packages" in (getattr(sys.modules.get(root), "__file__", None) or "")
    return root != "__main__" and (installed or root == "pflkit" or root in sys.stdlib_module_names)
