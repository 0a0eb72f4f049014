"""How a GPU computes, and its steps as CUDA graphs: a step's hundreds of launches are recorded once, and then are one.

A graph replays the same kernels on the same memory. So what a step reads and writes must stay where it is: `hold`
copies values into such a place.
"""

import contextlib
import functools
import warnings

import torch

WARM = 3  # steps that are taken as they are before one is recorded, so that libraries have made their choices
MOST = 256  # recorded steps of one federation; beyond, all are forgotten, lest they fill the memory
PLACES = 64  # where steps hold what they work on; beyond, the oldest are forgotten: APPLE has new ones every round


class Graphs:
    """Recorded steps, by keys (place, width): steps of one `place` share what they hold.

    capture(step) returns (replay, what the step returned); where it fails, steps are taken as they are from then on,
    with one warning.
    """

    def __init__(self, capture=None):
        self.capture = capture or record
        self.held, self.taken, self.recorded, self.works = {}, {}, {}, True

    def hold(self, place, name, tensors):
        """The same values in tensors [C, ...] that stay where they are: the first C rows of what was held before.

        Where there are more clients than before, the place is made larger, and its recorded steps are forgotten.
        """
        held = self.held.get((place, name))
        if held is None:
            places = list(dict.fromkeys(p for p, _ in self.held if p != place))
            self._forget(places[: max(0, len(places) + 1 - PLACES)])
        if held is None or any(len(b) < len(t) for b, t in zip(held, tensors, strict=True)):
            self.held[place, name] = held = [
                torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors
            ]
            self.recorded = {key: step for key, step in self.recorded.items() if key[0] != place}
        return [b[: len(t)].copy_(t) for b, t in zip(held, tensors, strict=True)]

    def _forget(self, places):
        if places:
            parts = self.held, self.taken, self.recorded
            kept = ({key: value for key, value in part.items() if key[0] not in places} for part in parts)
            self.held, self.taken, self.recorded = kept

    def __call__(self, place, width, step):
        """What step() returns; taken as it is, or replayed. The result of a replay is overwritten by the next one."""
        key = place, width
        if key in self.recorded:
            replay, result = self.recorded[key]
            replay()
            return result
        self.taken[key] = self.taken.get(key, 0) + 1
        if not self.works or self.taken[key] <= WARM:
            return step()
        if len(self.recorded) >= MOST:
            self.recorded = {}
        try:
            self.recorded[key] = self.capture(step)
        except RuntimeError as error:
            self.works = False
            cause = error.__context__ or error  # what ends a failed recording raises an error of its own
            if isinstance(cause, torch.OutOfMemoryError):
                self.recorded = {}  # for what they keep the step itself may lack
            reason = str(cause).strip().partition("\n")[0]
            text = f"steps cannot be recorded as CUDA graphs, so they are launched one by one: {reason}"
            warnings.warn(text, stacklevel=2)
            return step()
        return self(place, width, step)


def record(step, device=None):
    """(replay, what the step returned) of a step on a GPU; recording takes no step."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
    try:
        # On its own GPU: torch's default is a stream of the first one that ever recorded, where another's steps would
        # be taken, and nothing recorded.
        with torch.cuda.device(before.device), torch.cuda.graph(graph, stream=_beside(before.device)):
            result = step()
    except RuntimeError:
        torch.cuda.set_stream(before)  # torch may leave the side stream the current one
        raise
    return graph.replay, result


@functools.cache
def _beside(device):
    """The stream on which a GPU's steps are recorded."""
    return torch.cuda.Stream(device)


PRECISIONS = ("full", "tf32", "bf16")


@contextlib.contextmanager
def arithmetic(precision, device):
    """Within: float32's products and convolutions on a GPU are full, in TF32, or in bfloat16 where torch.autocast says.
    Torch's own default is TF32 for convolutions.
    """
    # No cache: autocast would keep a weight's first bfloat16 copy until the end, which is many steps later.
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
            yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            kind.fp32_precision = old
