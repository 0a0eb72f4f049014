"""A GPU's rules without a GPU: tensors that compute on the CPU, but may be used only as a GPU's may.

Inside `with Device() as gpu`, tensors of "meta", which to torch is a device without values, have values, in CPU tensors
of their own. So pflkit takes "meta" for a device that is no CPU; outside, nothing is changed. What is checked:

- tensors of two devices do not meet, and numpy takes none of this one;
- `gpu.waits` counts where the CPU waits for the device: values asked for, sizes that depend on them, what is copied;
- a step is recorded without taking effect. Neither a wait nor a copy from the CPU is allowed in it (CaptureError), and
  `replay` repeats what the device did, no Python, in the same memory; that must still be held by who had it before.

Not modelled: kernels and their rounding, speed, streams, random numbers, autocast, and the allocator, so how much
memory there is and who gets what was freed. Waits are known of those of torch's operations that pflkit uses.
"""

from collections import Counter

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

VALUES = {"_local_scalar_dense", "equal", "_linalg_svd", "_linalg_eigh"}  # the CPU gets some, or waits for a library
SIZES = {"nonzero", "masked_select", "bincount", "_unique2", "unique_dim"}  # the CPU must know them
INDEXED = {"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index"}
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def each(f, nested):
    """`f` of every tensor in nested lists, tuples and dicts."""
    if isinstance(nested, torch.Tensor):
        return f(nested)
    if isinstance(nested, list | tuple):
        return type(nested)([each(f, part) for part in nested])
    return {name: each(f, part) for name, part in nested.items()} if isinstance(nested, dict) else nested


def tensors(nested):
    found = []
    each(found.append, nested)
    return found


class CaptureError(RuntimeError):
    """As CUDA's "operation not permitted when stream is capturing"."""


class OnDevice(torch.Tensor):
    """A tensor of the device; its values are in `cpu_values`, which only this file looks at."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values, device):
        about = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, device="meta", **about)
        made.cpu_values, made.of = values, device
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        device = next(t.of for t in tensors((args, kwargs)) if isinstance(t, OnDevice))
        return device.run(func, args, kwargs or {})

    def __repr__(self, **kwargs):
        return f"OnDevice({self.cpu_values})"

    # What torch does in C++ before it asks the device.

    def tolist(self):
        return self.cpu().tolist()

    def data_ptr(self):
        return self.cpu_values.data_ptr()

    def untyped_storage(self):
        return self.cpu_values.untyped_storage()

    def new_tensor(self, value):
        return torch.tensor(value, dtype=self.dtype).to(self.device)

    def __getitem__(self, at):
        return super().__getitem__(self._index(at))

    def __setitem__(self, at, value):
        super().__setitem__(self._index(at), value)

    def _index(self, at):
        """Lists, ranges and arrays are copied to the device."""
        if isinstance(at, tuple):
            return tuple(self._index(part) for part in at)
        return torch.as_tensor(np.asarray(at)).to(self.device) if isinstance(at, list | range | np.ndarray) else at


class Device(TorchDispatchMode):
    """waits: what the CPU waited for, by kind; replays: how many there were; tape: of a step that is being recorded."""

    def __init__(self):
        super().__init__()
        self.waits, self.replays, self.tape = Counter(), 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        name, given = func._schema.name.split("::")[1], tensors((args, kwargs))
        own, others = ([t for t in given if isinstance(t, OnDevice) is here] for here in (True, False))
        if any(t.is_meta for t in others):
            raise NotImplementedError(f"{name} of values that torch did not put on the stand-in")
        here = bool(own)
        if kwargs.get("device") is not None:
            here, kwargs = torch.device(kwargs["device"]).type == "meta", kwargs | {"device": torch.device("cpu")}
        if own or here:
            self.check(func, name, args, kwargs, own, others, here)
        with _disable_current_modes():
            if self.tape is not None:
                self.tape.keep(own)
            plain = each(lambda t: t.cpu_values if isinstance(t, OnDevice) else t, (args, kwargs))
            out = func(*plain[0], **plain[1])
            if name in EMPTY and out.is_floating_point():
                out.fill_(torch.nan)  # memory that nobody has written to must not matter
            if self.tape is not None and here:
                self.tape.add(func, args, kwargs, out)
        known = {id(t.cpu_values): t for t in own}  # what is changed in place stays the tensor it is

        def placed(t):
            return known[id(t)] if id(t) in known else OnDevice(t, self)

        return each(placed, out) if here else out

    def check(self, func, name, args, kwargs, own, others, here):
        """Refuses what a GPU does; counts waits."""
        if name == "_to_copy":
            if not here or (not own and (self.tape is not None or not kwargs.get("non_blocking"))):
                self.wait("copy")
        elif name == "copy_" and others:
            self.wait("copy")
        elif name in INDEXED:
            if not isinstance(args[0], OnDevice) or (len(args) > 2 and any(args[2] is t and t.ndim for t in others)):
                raise RuntimeError(f"{name}: tensors of two devices")
            if any(t is not None and not isinstance(t, OnDevice) for t in args[1]):
                self.wait("copy")
            if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
                self.wait("sizes")
        elif own and any(t.ndim or not (torch.Tag.pointwise in func.tags or name == "fill_") for t in others):
            raise RuntimeError(f"{name}: tensors of two devices")  # numbers in CPU tensors may meet others, as in x * n
        elif name in VALUES:
            self.wait("values")
        elif name in SIZES or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.wait("sizes")

    def wait(self, why):
        if self.tape is not None:
            raise CaptureError(f"operation not permitted when stream is capturing: {why}")
        self.waits[why] += 1

    def record(self, step, device=None):
        """As graphs.record."""
        self.tape = tape = Tape()
        try:
            result = step()
        finally:
            self.tape = None
            tape.undo()

        def replay():
            self.replays += 1
            tape.play()

        return replay, result


class Tape:
    """What the device did in a recorded step: `done`, and the memory from before that it read or changed: `old`."""

    def __init__(self):
        self.done, self.old, self.made, self.own_uses = [], {}, set(), Counter()

    def keep(self, tensors):
        """Notes what these tensors hold before an operation, if the step has not made them."""
        for t in tensors:
            memory = t.untyped_storage()
            if memory.data_ptr() and memory.data_ptr() not in self.made:
                self.old.setdefault(memory.data_ptr(), (memory, memory.clone()))

    def add(self, func, args, kwargs, out):
        def given(t):  # a number in a CPU tensor is passed by value
            return self._alias(t.cpu_values) if isinstance(t, OnDevice) else t.clone()

        args, kwargs = each(given, (args, kwargs))
        self.done.append((func, args, kwargs, each(self._alias, out)))
        pointers = {t.untyped_storage().data_ptr() for t in tensors(out)}
        self.made |= pointers - self.old.keys()

    def _alias(self, t):
        """The same memory, by a tensor of the tape's own: then others that use it can be told."""
        self.own_uses[t.untyped_storage().data_ptr()] += 1
        return t.detach()

    def undo(self):
        """Recording takes no step."""
        with _disable_current_modes():
            for memory, before in self.old.values():
                memory.copy_(before)

    def play(self):
        for pointer, (memory, _) in self.old.items():
            if torch._C._storage_Use_Count(memory._cdata) <= 1 + self.own_uses[pointer]:
                raise RuntimeError("a recorded step uses memory that was freed")
        with _disable_current_modes(), torch.no_grad():
            for func, args, kwargs, out in self.done:
                new = func(*args, **kwargs)
                for old, t in zip(tensors(out), tensors(new), strict=True):
                    if t.data_ptr() != old.data_ptr():
                        old.copy_(t)
