"""Many clients' steps, each on its own batches: one client by one, or all at once; both take exactly the same steps."""

import functools
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pflkit import trees
from pflkit.models import Model, as_trained, trained


@dataclass
class Descent:
    """What is to be done: C clients' SGD from `params` [C, ...], or steps of another kind, as training.Clients says.

    data: (x [n, ...], y [n]) of each client. order(i, epoch, draw): a permutation of client i's n samples. epochs: each
    client's number. trained: for each leaf of `params`, whether it is. rule: a Training. skip_singles: leave out
    batches of one sample. rates: for each trained leaf, in the place of the rule's. pull: (anchor [C, ...], mu).
    clips: lists of numbers of trained leaves, whose gradients have a norm together. step, draws: of the other kind;
    there is no loss then.
    """

    model: Model
    loss: Callable | None
    params: Any
    fixed: tuple
    data: list
    order: Callable
    epochs: list
    trained: list
    rule: Any
    skip_singles: bool
    rates: list | None = None
    clips: list | None = None
    project: Callable | None = None
    pull: tuple | None = None
    until: Callable | None = None
    step: Callable | None = None
    draws: int = 1

    def moving(self, tree):
        """The trained leaves of a tree such as `params`."""
        return [leaf for leaf, moves in zip(trees.leaves(tree), self.trained, strict=True) if moves]

    def still(self, of):
        """The fixed arguments with `of` of each tree; a number is everybody's."""
        return [f if isinstance(f, numbers.Real) else of(f) for f in self.fixed]

    def of_client(self, i):
        """Client i's own copy of the params, and the fixed arguments."""
        return own_copy(trees.row(self.params, i), self.model.plain), self.still(lambda f: trees.row(f, i))


def one_by_one(d, each, dropout):
    """The trained tree [C, ...], mean values, samples and skipped batches [C] of a Descent, each client by itself.

    The mean values are a dict by name for each client, {} where it took no step. each(f) calls f(i) for every client;
    dropout(i) is a context in which client i trains.
    """
    out = trees.tree_map(lambda t: torch.empty_like(t, memory_format=torch.contiguous_format), d.params)
    seen, samples, skipped = [None] * len(d.epochs), np.zeros(len(d.epochs)), np.zeros(len(d.epochs))

    def batches(i, epoch):
        """Client i's batches of one epoch, the full ones, then the short last one: of each draw one (x, y)."""
        x, y = d.data[i]
        orders = [torch.from_numpy(d.order(i, epoch, draw)).to(y.device) for draw in range(d.draws)]
        # Shuffled once an epoch, so that batches are views: gathering each of them costs a tenth of its step.
        size = d.rule.batch_size
        for drawn in zip(*(zip(x[o].split(size), y[o].split(size), strict=True) for o in orders), strict=True):
            if d.rule.drop_last and len(drawn[0][1]) < size:
                continue
            if d.skip_singles and len(drawn[0][1]) == 1:
                skipped[i] += 1
                continue
            yield drawn

    @torch.enable_grad()
    def client(i):
        own, still = d.of_client(i)
        own = as_trained(own)
        moving = [t.requires_grad_(d.step is None) for t in d.moving(own)]
        pull = d.pull and ([anchor[i] for anchor in d.moving(d.pull[0])], d.pull[1])
        velocity, values, sizes, means = None, {}, [], []
        for epoch in range(d.epochs[i]):
            first = len(sizes)
            for drawn in batches(i, epoch):
                if d.step is None:
                    value, extras = value_and_extras(d.loss(d.model, own, drawn[0], *still))
                    velocity = _step(d, moving, _gradients(value, moving), velocity, pull)
                else:
                    stepped, value, extras = _stepped(d, own, drawn, still)
                    # In new memory, for a step may return what it was given; laid out as the old.
                    own = trees.tree_map(lambda old, new: torch.empty_like(old).copy_(new.detach()), own, stepped)
                sizes.append(len(drawn[0][1]))
                for name, amount in {"loss": value, **extras}.items():
                    of_steps, weights = values.setdefault(name, ([], []))
                    of_steps.append(torch.as_tensor(amount).detach())
                    weights.append(sizes[-1])
            if d.until is not None and len(sizes) > first:
                means.append(_mean(values["loss"][0][first:], sizes[first:]))
                if d.until(means):
                    break
        seen[i], samples[i] = {name: _mean(*steps) for name, steps in values.items()}, sum(sizes)
        for whole, part in zip(trees.leaves(out), trees.leaves(own), strict=True):
            whole[i] = part.detach()

    def in_context(i):
        with dropout(i):
            client(i)

    each(in_context)
    return out, seen, samples, skipped


@torch.enable_grad()
def all_at_once(d, check):
    """The same as `one_by_one`: a step of many clients is one step on tensors with a client axis, by torch.vmap.

    check: compare the first step's losses, gradients and buffers with those of each client by itself, and raise
    RuntimeError where they differ, for torch.vmap is wrong here and there (it forgets an embedding's `padding_idx`).

    Within an epoch the clients with most batches are on top, so that those still training are the first rows of the
    stack. With a loss `for_many` a client's short last batch is filled up with samples that do not count; else all full
    batches go first, then the short ones, those of one size together, so that nothing is masked or padded. Who has
    finished is not touched.
    """
    nobody = d.data[0][0].new_zeros(1, *d.data[0][0].shape[1:]), d.data[0][1].new_full((1,), -100)
    (x, y), n = map(torch.cat, zip(*d.data, nobody, strict=True)), np.array([len(y) for _, y in d.data])
    first, size, epochs, C = np.cumsum(n) - n, d.rule.batch_size, np.array(d.epochs), len(n)
    whole = [leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in trees.leaves(d.params)]
    velocity = [torch.zeros_like(t) for t in d.moving(trees.like(d.params, whole))] if d.rule.momentum else []
    sums, counts, samples, skipped, means = {}, {}, np.zeros(C), np.zeros(C), [[] for _ in n]

    def values(leaves, x, y, still):
        """One client's loss and extras, and its leaves after a step that is not SGD."""
        still, own = iter(still), as_trained(trees.like(d.params, leaves))
        still = d.still(lambda f: trees.like(f, next(still)))
        stepped = ()
        if d.step is None:
            value, extras = value_and_extras(d.loss(d.model, own, (x[0], y[0]), *still))
        else:
            stepped, value, extras = _stepped(d, own, tuple(zip(x.unbind(), y.unbind(), strict=True)), still)
        recorded = {name: torch.as_tensor(t, device=y.device) for name, t in {"loss": value, **extras}.items()}
        return recorded, [t.detach() for t in trees.leaves(stepped)]

    def of_many(own, x, y, still):
        """Of all clients, by a loss `for_many`, without torch.vmap."""
        value, extras = value_and_extras(d.loss(d.model, own, (x[:, 0], y[:, 0]), *still))
        if value.shape != y.shape[:1]:
            raise NotImplementedError(f"a loss for many that gives {tuple(value.shape)}")
        return {"loss": value, **extras}, []

    def for_many():
        """Whether the loss, and what of the model it calls, can do with many clients: asked of a single sample."""
        if not getattr(d.loss, "for_many", False):
            return False
        try:
            first_of = functools.partial(trees.tree_map, lambda t: t[:1])
            one, still = first_of(d.params), d.still(first_of)
            with torch.no_grad():
                of_many(one, x[None, None, :1], y[None, None, :1], still)
        except NotImplementedError:
            return False
        return True

    many = for_many()
    of_all = torch.vmap(values)

    def changes(found, leaves):
        """A step's loss, and what it is made of: gradients and the leaves not trained; or all leaves after it."""
        moving, loss = [t for t in leaves if t.requires_grad], found[0]["loss"]
        return [loss, *(found[1] or _gradients(loss.sum(), moving) + [t for t in leaves if not t.requires_grad])]

    def alone(j, leaves, batch, still):
        """The changes of the j-th client by itself."""
        own = [t[j].detach().clone().requires_grad_(t.requires_grad) for t in leaves]
        return changes(values(own, x[batch[j]], y[batch[j]], [[t[j] for t in f] for f in still]), own)

    def train(rows, batches, sizes):
        """Steps of the clients `rows`; batches[k] [P, draws, B] are samples of the first P of them, P never growing;
        sizes [steps, clients]: how many of these count.
        """
        nonlocal check
        at, width, seen = torch.from_numpy(rows).to(y.device), None, []
        learns = [moves and d.step is None for moves in d.trained]
        own, speeds = [t[at] for t in whole], [t[at] for t in velocity]
        anchors = [trees.pick(t, at) for t in d.moving(d.pull[0])] if d.pull else []
        stills = [[trees.pick(t, at) for t in trees.leaves(f)] for f in d.fixed if not isinstance(f, numbers.Real)]
        for batch in batches:
            if len(batch) != width:
                width = len(batch)
                leaves = [t[:width].detach().requires_grad_(moves) for t, moves in zip(own, learns, strict=True)]
                moving = [t for t in leaves if t.requires_grad]
                speed, still = [t[:width] for t in speeds], [[t[:width] for t in f] for f in stills]
                pull = d.pull and ([t[:width] for t in anchors], d.pull[1])
                tree, parts = trees.like(d.params, leaves), iter(still)
                fixed = d.still(lambda f, parts=parts: trees.like(f, next(parts)))
            expected = [alone(j, leaves, batch, still) for j in range(width)] if check else []
            inputs = x[batch], y[batch]
            found = of_many(tree, *inputs, fixed) if many else of_all(leaves, *inputs, still)
            (loss, *new), check = changes(found, leaves), False
            for j, of_client in enumerate(expected):
                before = [0, *(t[j].double() if d.step else 0 for t in leaves)]
                _compare([loss[j], *(t[j] for t in new)], of_client, before)
            if d.step is None:
                _step(d, moving, new[: len(moving)], speed, pull, stacked=True)
            else:
                for old, t in zip(leaves, [t.clone() for t in new], strict=True):  # one may be another's old value
                    old.copy_(t)
            seen.append(found[0])
        for name in seen[0]:
            values_of, weights = [step[name].detach() for step in seen], torch.from_numpy(sizes).to(y.device)
            wide = torch.stack([F.pad(v, (0, len(rows) - len(v))) for v in values_of])
            total = sums.setdefault(name, torch.zeros(C, dtype=torch.float64, device=y.device))
            total.index_add_(0, at, (wide.double() * weights).sum(0))
            counts.setdefault(name, np.zeros(C))[rows] += sizes.sum(0)
        samples[rows] += sizes.sum(0)
        for t, new in zip(whole + velocity, own + speeds, strict=True):
            t[at] = new

    running = np.arange(C)
    for epoch in range(epochs.max()):
        running = running[epochs[running] > epoch]
        steps = n[running] // size if d.rule.drop_last or not many else -(-n[running] // size)
        running, steps = (part[np.argsort(-steps, kind="stable")] for part in (running, steps))
        orders = {i: first[i] + np.stack([d.order(i, epoch, k) for k in range(d.draws)]) for i in running.tolist()}
        before, started = sums["loss"].clone() if sums else 0, samples.copy()
        if d.skip_singles and size == 1:
            skipped[running] += steps
        elif steps.max(initial=0):
            table = np.full((len(running), d.draws, steps[0] * size), len(y) - 1, dtype=np.int64)
            for j, i in enumerate(running.tolist()):
                used = min(n[i], steps[j] * size)
                table[j, :, :used] = orders[i][:, :used]
            batches = torch.from_numpy(table).to(y.device).unflatten(2, (steps[0], size)).permute(2, 0, 1, 3)
            widths = (steps > np.arange(steps[0])[:, None]).sum(1)
            sizes = np.clip(n[running] - size * np.arange(steps[0])[:, None], 0, size)
            sizes *= np.arange(len(running)) < widths[:, None]
            train(running, [batch[:width] for batch, width in zip(batches, widths.tolist(), strict=True)], sizes)
        short = np.zeros_like(steps) if d.rule.drop_last or many else n[running] % size
        for length in np.unique(short[short > 0]).tolist():
            rows = running[short == length]
            if d.skip_singles and length == 1:
                skipped[rows] += 1
            else:
                last = torch.from_numpy(np.stack([orders[i][:, -length:] for i in rows.tolist()])).to(y.device)
                train(rows, [last], np.full((1, len(rows)), length))
        if d.until is not None and sums:
            stepped = samples - started
            mean = ((sums["loss"] - before).cpu().numpy() / np.maximum(stepped, 1)).tolist()
            for i in np.flatnonzero(stepped).tolist():
                means[i].append(mean[i])
            running = np.array([i for i in running if not stepped[i] or not d.until(means[i])], dtype=np.int64)
    found = {name: (total.cpu().numpy() / np.maximum(counts[name], 1)).tolist() for name, total in sums.items()}
    seen = [{name: mean[i] for name, mean in found.items() if counts[name][i]} for i in range(C)]
    return trees.like(d.params, whole), seen, samples, skipped


def _compare(stacked, alone, before):
    """Raises RuntimeError where one client's tensors differ by more than the rounding of float32.

    before: of steps, what they began with, for it is their change that is judged, which may be small; else 0.
    """
    for a, b, old in zip(stacked, alone, before, strict=True):
        a, b = a.detach().double(), b.detach().double()
        allowed = (1e-3 * (b - old).abs()).maximum(1e-6 * b.abs().clamp(min=1))
        if b.isfinite().all() and b.numel() and not (a - b).abs().max() <= allowed.max():
            raise RuntimeError("stacked, it gives other numbers than each client by itself")


def slope(model, loss, params, batch, *fixed):
    """(∇loss at `params`, `params` with the batch-norm statistics of this pass), for steps of ONE client.

    Both are trees like `params`; the gradient is 0 for buffers. Other than in `sgd`, the loss gives its value only.
    """
    return value_and_slope(model, loss, params, batch, *fixed)[1:]


def value_and_slope(model, loss, params, batch, *fixed):
    """The loss, and what `slope` gives."""
    all_leaves, learns = trees.leaves(params), trained(model, params)

    def value(moving):
        moving = iter(moving)
        # Cloned, for torch.func.grad forbids to change what it does not own.
        own = [next(moving) if learn else t.clone() for t, learn in zip(all_leaves, learns, strict=True)]
        given = loss(model, as_trained(trees.like(params, own)), batch, *fixed)
        return given, own

    moving = [t for t, learn in zip(all_leaves, learns, strict=True) if learn]
    found, (given, own) = torch.func.grad_and_value(value, has_aux=True)(moving)
    found = iter(found)
    gradient = [next(found) if learn else torch.zeros_like(t) for t, learn in zip(all_leaves, learns, strict=True)]
    after = [t if learn else new for t, new, learn in zip(all_leaves, own, learns, strict=True)]
    return given, trees.like(params, gradient), trees.like(params, after)


def _stepped(d, own, batches, still):
    """One client's state after a step that is not SGD, its loss and named extras. ValueError for what is no such."""
    given, name = d.step(d.model, own, batches, *still), getattr(d.step, "__name__", d.step)
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"{name}: a step must return (state, loss)")
    was, now = ({n: f"{list(t.shape)} of {t.dtype}" for n, t in trees.named_leaves(s)} for s in (own, given[0]))
    if was != now:
        leaf = min(n for n in was.keys() | now.keys() if was.get(n) != now.get(n))
        raise ValueError(f"{name}: {leaf!r} is {now.get(leaf, 'missing')}, and was {was.get(leaf, 'missing')}")
    return trees.tree_map(lambda _, new: new, own, given[0]), *value_and_extras(given[1])


def value_and_extras(given):
    """A loss's (value, named extras)."""
    return given if isinstance(given, tuple) else (given, {})


def _gradients(value, moving):
    found = torch.autograd.grad(value, moving, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(moving, found, strict=True)]


@torch.no_grad()
def _step(d, moving, grads, velocity, pull, stacked=False):
    """One SGD step of the tensors `moving`, in place; returns the momentum's velocity. pull: (anchors, mu), or None.

    stacked: every tensor has a client axis, and the step is each client's own.
    """
    rule = d.rule
    if pull is not None:
        anchor, mu = pull
        grads = torch._foreach_add(grads, torch._foreach_sub(moving, anchor), alpha=mu)
    if rule.clip is not None:
        grads = list(grads)
        norms = [torch.linalg.vector_norm(g.reshape(len(g), -1) if stacked else g.reshape(-1), dim=-1) for g in grads]
        for one in d.clips or [range(len(grads))]:
            norm = torch.linalg.vector_norm(torch.stack([norms[k] for k in one]), dim=0)
            scale = rule.clip / norm.clamp(min=rule.clip)
            for k in one:
                grads[k] = grads[k] * scale.view(scale.shape + (1,) * (grads[k].ndim - scale.ndim))
    if rule.weight_decay:
        grads = [g.add(p, alpha=rule.weight_decay) for g, p in zip(grads, moving, strict=True)]
    if rule.momentum:
        old = velocity or [torch.zeros_like(g) for g in grads]
        velocity = grads = [v.mul_(rule.momentum).add_(g) for v, g in zip(old, grads, strict=True)]
    if d.rates is not None:
        torch._foreach_add_(moving, torch._foreach_mul(grads, [-rate for rate in d.rates]))
    else:
        torch._foreach_add_(moving, grads, alpha=-rule.lr)  # all in one call, which threads wait for less
    if d.project is not None:
        project = torch.vmap(d.project) if stacked else d.project
        for p in moving:
            p.copy_(project(p))
    return velocity


def _mean(values, sizes):
    """The mean over samples of the batches' mean `values`."""
    return float(np.array(sizes) / sum(sizes) @ torch.stack(values).cpu().numpy())


def own_copy(tree, channels_last):
    """A client's own copy of a tree; on a CPU, if `channels_last`, with convolution kernels laid out so.

    Only for bundled models: a user's module may rely on the usual layout, as x.view(len(x), -1) does.

    Cloned, because `contiguous` takes a kernel of one input channel for channels-last as it is, and then torch computes
    the whole layer the slow way: a step of the 4-layer CNN on grey images takes 1.6 times as long.
    """

    def clone(t):
        kernel = channels_last and t.ndim == 4 and t.device.type == "cpu"
        return t.detach().clone(memory_format=torch.channels_last if kernel else torch.preserve_format)

    return trees.tree_map(clone, tree)
