"""All clients' training at once: a step of many clients is one step on tensors with a client axis."""

import functools
import numbers
from dataclasses import replace

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from pflkit import trees
from pflkit.descent import gradients, recorded, sgd_step, step_of, value_and_extras
from pflkit.graphs import arithmetic
from pflkit.models import as_trained

SURELY = 128  # up to this size batches are as large as asked for, lest a client's rounding depend on who else trains


def in_turns(d, most, run):
    """`run`, such as all_at_once, of a Descent's clients, `most` of them at a time; what it returns for all of them."""
    if most >= (C := len(d.epochs)):
        return run(d)
    given = []
    for start in range(0, C, most):
        these = slice(start, start + most)
        some = functools.partial(trees.tree_map, lambda t, these=these: t[these])
        own = {"params": some(d.params), "fixed": tuple(d.still(some)), "data": d.data[these]}
        own |= {"epochs": d.epochs[these], "pull": d.pull and (some(d.pull[0]), d.pull[1])}
        own |= {"order": lambda i, epoch, draw, start=start: d.order(start + i, epoch, draw)}
        given.append(run(replace(d, **own)))
    out, seen, samples, skipped = zip(*given, strict=True)

    def means():
        return [values for part in seen for values in part()]

    return trees.join(out), means, np.concatenate(samples), np.concatenate(skipped)


@torch.enable_grad()
def all_at_once(d, known, graphs=None, single=False):
    """The same as `descent.one_by_one`.

    known: {(loss or step, model): Stack.many} of those that can be stacked. Of others the first step's losses,
    gradients and buffers are compared with those of each client by itself, for torch.vmap is wrong here and there (it
    forgets an embedding's `padding_idx`): RuntimeError where they differ; where not, they are `known` from then on.
    graphs: Graphs by which the steps are recorded and replayed, or None. single: there is one client, which needs no
    torch.vmap and no comparison.

    Within an epoch the clients with most batches are on top, so that those still training are the first rows of the
    stack. With a loss or step `for_many` a client's short last batch is filled up with samples that do not count; else
    all full batches go first, then the short ones, those of one size together, so that nothing is masked or padded. Who
    has finished is not touched.
    """
    stack, size, epochs = Stack(d, known, graphs, single), d.rule.batch_size, np.array(d.epochs)
    n, first = stack.n, np.cumsum(stack.n) - stack.n
    if stack.many and not d.rule.drop_last:  # much larger than anybody's samples, batches would be mostly filled up
        size = min(size, max(SURELY, 1 << (int(n.max()) - 1).bit_length()))
    skipped, curves, running = np.zeros(len(n)), [[] for _ in n], np.arange(len(n))
    for epoch in range(epochs.max()):
        running = running[epochs[running] > epoch]
        steps = n[running] // size if d.rule.drop_last or not stack.many else -(-n[running] // size)
        running, steps = (part[np.argsort(-steps, kind="stable")] for part in (running, steps))
        orders = {i: first[i] + np.stack([d.order(i, epoch, k) for k in range(d.draws)]) for i in running.tolist()}
        before, started = stack.sums["loss"].clone() if stack.sums else 0, stack.samples.copy()
        if d.skip_singles and size == 1:
            skipped[running] += steps
        elif steps.max(initial=0):
            table = np.full((len(running), d.draws, steps[0] * size), stack.nobody, dtype=np.int64)
            for j, i in enumerate(running.tolist()):
                used = min(n[i], steps[j] * size)
                table[j, :, :used] = orders[i][:, :used]
            batches = torch.from_numpy(table).unflatten(2, (steps[0], size)).permute(2, 0, 1, 3)
            widths = (steps > np.arange(steps[0])[:, None]).sum(1)
            sizes = np.clip(n[running] - size * np.arange(steps[0])[:, None], 0, size)
            sizes *= np.arange(len(running)) < widths[:, None]
            stack.train(running, batches, widths.tolist(), sizes)
        short = np.zeros_like(steps) if d.rule.drop_last or stack.many else n[running] % size
        for length in np.unique(short[short > 0]).tolist():
            rows = running[short == length]
            if d.skip_singles and length == 1:
                skipped[rows] += 1
            else:
                last = torch.from_numpy(np.stack([orders[i][:, -length:] for i in rows.tolist()]))
                stack.train(rows, last[None], [len(rows)], np.full((1, len(rows)), length))
        if d.until is not None and stack.sums:
            stepped = stack.samples - started
            mean = ((stack.sums["loss"] - before).cpu().numpy() / np.maximum(stepped, 1)).tolist()
            for i in np.flatnonzero(stepped).tolist():
                curves[i].append(mean[i])
            running = np.array([i for i in running if not stepped[i] or not d.until(curves[i])], dtype=np.int64)
    means = functools.partial(_means, stack.sums, stack.counts, len(n))
    return trees.like(d.params, stack.whole), means, stack.samples, skipped


class Stack:
    """C clients' leaves `whole` [C, ...] and momentum, and their samples behind each other.

    `nobody` is the number of a sample that does not count; `many`: whether the loss or step is one for many, and the
    model can do with it. `sums`, by name, are of each client's values, over all `samples` [C].
    """

    def __init__(self, d, known, graphs, single):
        self.d, self.known, self.graphs, self.single = d, known, graphs, single
        x, y = d.data[0]
        extra = x.new_zeros(1, *x.shape[1:]), y.new_full((1,), -100)
        self.x, self.y = map(torch.cat, zip(*d.data, extra, strict=True))
        self.fixed = [f for f in d.fixed if not isinstance(f, numbers.Real)]  # what of it has a client axis
        self.n, self.nobody = np.array([len(y) for _, y in d.data]), len(self.y) - 1
        self.whole = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in trees.leaves(d.params)]
        moving = d.moving(trees.like(d.params, self.whole))
        self.velocity = [torch.zeros_like(t) for t in moving] if d.rule.momentum else []
        self.sums, self.counts, self.samples = {}, {}, np.zeros(len(self.n))
        self.what = d.step or d.loss, d.model
        # One client gains nothing by it; and it is not among the `known`, so each phase would ask anew.
        self.many = not single and (known[self.what] if self.what in known else self._for_many())
        self.by_one = self._of_first if single else torch.vmap(self._of_one)

    def train(self, rows, batches, widths, sizes):
        """Steps of the clients `rows`: batches [steps, C, draws, B] are numbers of samples; step k is of the first
        widths[k] clients, never growing; sizes [steps, C]: how many samples count.
        """
        d, device = self.d, self.y.device
        at, seen, width = trees.on(device, rows), [], None
        place = self._place(batches.shape) if self.graphs else None
        hold = functools.partial(self.graphs.hold, place) if self.graphs else lambda name, tensors: tensors
        own, speeds = hold("own", [t[at] for t in self.whole]), hold("speeds", [t[at] for t in self.velocity])
        anchors = hold("anchors", [trees.pick(t, at) for t in d.moving(d.pull[0])] if d.pull else [])
        stills = [hold(f"still {k}", [trees.pick(t, at) for t in trees.leaves(f)]) for k, f in enumerate(self.fixed)]
        # All at once: gathering the samples of each step by itself takes a tenth of it. But each has memory of its own,
        # for the rounding of a product may depend on where its numbers begin.
        used = trees.on(device, batches[torch.arange(len(rows)) < torch.tensor(widths)[:, None]])
        for x, y in zip(self.x[used].split(widths), self.y[used].split(widths), strict=True):
            if len(y) != width:
                width = len(y)
                step = _Step(self, *([t[:width] for t in part] for part in (own, speeds, anchors, *stills)))
            inputs = hold("inputs", [x.clone(), y])
            if not self.single and self.what not in self.known:
                with arithmetic("full", device):  # lest rounding to fewer digits be taken for what vmap does wrong
                    found = step(*inputs, [step.alone(j, *inputs) for j in range(width)])
                self.known[self.what] = self.many
            elif self.graphs:
                found = self.graphs(place, width, functools.partial(step, *inputs))
                found = {name: value.clone() for name, value in found.items()}  # the next replay overwrites it
            else:
                found = step(*inputs)
            seen.append(found)
        self._record(rows, at, seen, sizes)
        for t, new in zip(self.whole + self.velocity, own + speeds, strict=True):
            t[at] = new

    def still(self, leaves):
        """The fixed arguments, of the lists of leaves of those that have a client axis."""
        parts = iter(leaves)
        return self.d.still(lambda f: trees.like(f, next(parts)))

    def of_many(self, tree, x, y, fixed):
        """Of all clients, by a loss or step for many, without torch.vmap: as `by_one`, which goes by one client's."""
        d, batches, stepped = self.d, tuple(zip(x.unbind(1), y.unbind(1), strict=True)), ()
        if d.step is None:
            value, extras = value_and_extras(d.loss(d.model, tree, batches[0], *fixed))
        else:
            stepped, value, extras = step_of(d, tree, batches, fixed)
        if value.shape != y.shape[:1]:
            raise NotImplementedError(f"losses for many that are {tuple(value.shape)}")
        return {"loss": value, **extras}, [t.detach() for t in trees.leaves(stepped)]

    def _of_one(self, leaves, x, y, stills):
        """One client's loss and extras by name, and its leaves after a step that is not SGD."""
        d, own, fixed, stepped = self.d, as_trained(trees.like(self.d.params, leaves)), self.still(stills), ()
        if d.step is None:
            value, extras = value_and_extras(d.loss(d.model, own, (x[0], y[0]), *fixed))
        else:
            stepped, value, extras = step_of(d, own, tuple(zip(x.unbind(), y.unbind(), strict=True)), fixed)
        values = {name: torch.as_tensor(t, device=y.device) for name, t in {"loss": value, **extras}.items()}
        return values, [t.detach() for t in trees.leaves(stepped)]

    def _of_first(self, leaves, x, y, stills):
        """The same of a stack of one client."""
        values, stepped = self._of_one([t[0] for t in leaves], x[0], y[0], [[t[0] for t in f] for f in stills])
        return {name: value[None] for name, value in values.items()}, [t[None] for t in stepped]

    def _for_many(self):
        """Whether the loss or step, and what of the model it calls, can do with many clients. RuntimeError where it
        gives two, one of them with two samples and the other with one, other numbers than each by itself.
        """
        d = self.d
        if not getattr(d.step or d.loss, "for_many", False):
            return False
        own = [torch.stack([t[0], 0.9 * t[0] if t.is_floating_point() else t[0]]) for t in self.whole]
        stills = [[torch.stack([t[0], t[0]]) for t in trees.leaves(f)] for f in self.fixed]
        at = trees.on(self.y.device, np.array([[[0, 0]], [[0, self.nobody]]]).repeat(d.draws, 1))
        x, y = self.x[at], self.y[at]
        with torch.no_grad(), arithmetic("full", self.y.device):
            try:
                values, new = self.of_many(trees.like(d.params, own), x, y, self.still(stills))
            except Exception:  # not NotImplementedError alone: a module without parameters cannot tell one from many
                return False
            for j, length in enumerate((2, 1)):
                leaves, still = [t[j] for t in own], [[t[j] for t in f] for f in stills]
                wanted, stepped = self._of_one(leaves, x[j, :, :length], y[j, :, :length], still)
                before = [*(0 * t.double() for t in wanted.values()), *(t.double() for t in leaves if stepped)]
                given = [*(values[name][j] for name in wanted), *(t[j] for t in new)]
                _compare(given, [*wanted.values(), *stepped], before)
        return True

    def _record(self, rows, at, seen, sizes):
        weights, counts = trees.on(self.y.device, sizes[:, : len(seen[0]["loss"])]), sizes.sum(0)
        for name in seen[0]:
            wide = pad_sequence([values[name].detach() for values in seen], batch_first=True)
            zeros = torch.zeros(len(self.n), dtype=torch.float64, device=self.y.device)
            self.sums.setdefault(name, zeros).index_add_(0, at[: wide.shape[1]], (wide.double() * weights).sum(0))
            self.counts.setdefault(name, np.zeros(len(self.n)))[rows] += counts
        self.samples[rows] += counts

    def _place(self, shape):
        """What tells apart steps that cannot be replayed for each other."""
        d = self.d
        rates, mu = d.rates and tuple(d.rates), d.pull and d.pull[1]
        named = (leaf for f in (d.params, *self.fixed) for leaf in trees.named_leaves(f))
        shapes = tuple((name, t.shape[1:], t.dtype) for name, t in named)
        values = tuple(f for f in d.fixed if isinstance(f, numbers.Real))
        inputs = self.x.shape[1:], self.x.dtype, shape[2:]
        return d.step or d.loss, d.model, d.rule, rates, mu, d.project, shapes, values, inputs


class _Step:
    """A step of the first P clients of a stack, whose rows it gets; called with their inputs [P, draws, B, ...]."""

    def __init__(self, stack, own, speeds, anchors, *stills):
        self.stack, self.d, d = stack, stack.d, stack.d
        learns = [moves and d.step is None for moves in d.trained]
        self.leaves = [t.detach().requires_grad_(learn) for t, learn in zip(own, learns, strict=True)]
        self.moving = [t for t in self.leaves if t.requires_grad]
        self.speeds, self.pull, self.stills = speeds, d.pull and (anchors, d.pull[1]), list(stills)
        if stack.many:
            self.tree, self.fixed = trees.like(d.params, self.leaves), stack.still(stills)

    def __call__(self, x, y, expected=()):
        """Changes the clients' leaves, and returns their losses and extras by name; first checked, if `expected`."""
        if self.stack.many:
            values, stepped = self.stack.of_many(self.tree, x, y, self.fixed)
        else:
            values, stepped = self.stack.by_one(self.leaves, x, y, self.stills)
        loss, *new = self._changes(values, stepped, self.leaves)
        now = recorded(values)
        for j, of_client in enumerate(expected):
            before = [0, *(t[j].double() if self.d.step else 0 for t in self.leaves)]
            _compare([loss[j], *(t[j] for t in new)], of_client, before)
        if self.d.step is None:
            sgd_step(self.d, self.moving, new[: len(self.moving)], self.speeds, self.pull, stacked=True)
        else:
            for old, t in zip(self.leaves, [t.clone() for t in new], strict=True):  # one may be another's old value
                old.copy_(t)
        return now

    def alone(self, j, x, y):
        """The changes of the j-th client by itself."""
        own = [t[j].detach().clone().requires_grad_(t.requires_grad) for t in self.leaves]
        return self._changes(*self.stack._of_one(own, x[j], y[j], [[t[j] for t in f] for f in self.stills]), own)

    def _changes(self, values, stepped, leaves):
        """A step's loss, and what it is made of: gradients and the leaves not trained; or all leaves after it."""
        moving, loss = [t for t in leaves if t.requires_grad], values["loss"]
        return [loss, *(stepped or gradients(loss, moving) + [t for t in leaves if not t.requires_grad])]


def _means(sums, counts, clients):
    """Each client's mean values, by name. No method of a Stack, which would stay in memory until they are looked at."""
    found = {name: total.cpu().numpy() / np.maximum(counts[name], 1) for name, total in sums.items()}
    return [{name: float(mean[i]) for name, mean in found.items() if counts[name][i]} for i in range(clients)]


def _compare(stacked, alone, before):
    """Raises RuntimeError where one client's tensors differ by more than the rounding of float32.

    before: of steps, what they began with, for it is their change that is judged, which may be small; else 0.
    """
    for a, b, old in zip(stacked, alone, before, strict=True):
        a, b = a.detach().double(), b.detach().double()
        allowed = (1e-3 * (b - old).abs()).maximum(1e-6 * b.abs().clamp(min=1))
        if b.isfinite().all() and b.numel() and not (a - b).abs().max() <= allowed.max():
            raise RuntimeError("stacked, it gives other numbers than each client by itself")
