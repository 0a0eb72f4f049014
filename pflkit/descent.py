"""Many clients' steps, each on its own batches, and how they are taken one client by one (`stack`: all at once)."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pflkit import trees
from pflkit.models import Model, RowsTrained, Trained, as_trained, trained


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

    @property
    def only_descends(self):
        """Whether a step subtracts gradients times rates, and no more: it leaves alone what has a gradient of 0."""
        more = self.step, self.pull, self.project, self.rule.clip
        return all(part is None for part in more) and not self.rule.momentum and not self.rule.weight_decay

    def still(self, of):
        """The fixed arguments with `of` of each tree; a number is everybody's."""
        return [f if isinstance(f, numbers.Real) else of(f) for f in self.fixed]

    def of_client(self, i, place=None):
        """Client i's own copy of the params, in `place` if that is given, and the fixed arguments."""
        return own_copy(trees.row(self.params, i), self.model.plain, place), self.still(lambda f: trees.row(f, i))


def one_by_one(d, each, dropout):
    """The trained tree [C, ...], mean values, samples and skipped batches [C] of a Descent, each client by itself.

    The mean values are a function, for to look at them is to wait for the device: it returns for each client a dict by
    name, {} where it took no step. each(f) calls f(i) for every client; dropout(i) is a context in which i trains.
    """
    out = trees.tree_map(lambda t: torch.empty_like(t, memory_format=torch.contiguous_format), d.params)
    seen, samples, skipped = [None] * len(d.epochs), np.zeros(len(d.epochs)), np.zeros(len(d.epochs))

    def batches(i, epoch):
        """Client i's batches of one epoch, the full ones, then the short last one: of each draw one (x, y)."""
        x, y = d.data[i]
        orders = [trees.on(y.device, d.order(i, epoch, draw)) for draw in range(d.draws)]
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
        # Trained where the result is to lie. By `data`, for else the clients share one count of changes, by which
        # autograd takes another thread's step for one of this client's.
        own, still = d.of_client(i, trees.tree_map(lambda t: t.data[i], out))
        own = as_trained(own, RowsTrained if d.only_descends else Trained)
        moving = [t.requires_grad_(d.step is None) for t in d.moving(own)]
        pull = d.pull and ([anchor[i] for anchor in d.moving(d.pull[0])], d.pull[1])
        velocity, values, sizes, means = None, {}, [], []
        for epoch in range(d.epochs[i]):
            first = len(sizes)
            for drawn in batches(i, epoch):
                if d.step is None:
                    value, extras = value_and_extras(d.loss(d.model, own, drawn[0], *still))
                    _check_scalar(d.loss, value)
                    now = recorded({"loss": value, **extras})
                    velocity = sgd_step(d, moving, gradients(value, moving), velocity, pull)
                else:
                    stepped, value, extras = step_of(d, own, drawn, still)
                    now = recorded({"loss": value, **extras})
                    # In new memory, for a step may return what it was given; laid out as the old.
                    own = trees.tree_map(lambda old, new: torch.empty_like(old).copy_(new.detach()), own, stepped)
                sizes.append(len(drawn[0][1]))
                for name, amount in now.items():
                    of_steps, weights = values.setdefault(name, ([], []))
                    of_steps.append(amount)
                    weights.append(sizes[-1])
            if d.until is not None and len(sizes) > first:
                means.append(_mean(values["loss"][0][first:], sizes[first:]))
                if d.until(means):
                    break
        seen[i], samples[i] = values, sum(sizes)
        for whole, part in zip(trees.leaves(out), trees.leaves(own), strict=True):
            if part.data_ptr() != whole[i].data_ptr():
                whole[i] = part.detach()

    def in_context(i):
        with dropout(i):
            client(i)

    def means():
        return [{name: _mean(*steps) for name, steps in values.items()} for values in seen]

    each(in_context)
    return out, means, samples, skipped


def slope(model, loss, params, batch, *fixed):
    """(∇loss at `params`, `params` with the batch-norm statistics of this pass), for steps of ONE client, or of C
    clients, where the loss is one for many: each loss depends on its own client's parameters alone.

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
        if not getattr(loss, "for_many", False):
            _check_scalar(loss, given)
        return given.sum(), (given, own)

    moving = [t for t, learn in zip(all_leaves, learns, strict=True) if learn]
    found, (_, (given, own)) = torch.func.grad_and_value(value, has_aux=True)(moving)
    found = iter(found)
    gradient = [next(found) if learn else torch.zeros_like(t) for t, learn in zip(all_leaves, learns, strict=True)]
    after = [t if learn else new for t, new, learn in zip(all_leaves, own, learns, strict=True)]
    return given, trees.like(params, gradient), trees.like(params, after)


def step_of(d, own, batches, still):
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


def recorded(values):
    """A step's values by name, to be kept: what is no result of its own may be a parameter, which the step changes."""
    tensors = {name: torch.as_tensor(value) for name, value in values.items()}
    return {name: t.detach().clone() if t.is_leaf or t._is_view() else t.detach() for name, t in tensors.items()}


def _check_scalar(loss, value):
    if not torch.is_tensor(value) or value.ndim:
        given = list(value.shape) if torch.is_tensor(value) else type(value).__name__
        raise ValueError(f"{getattr(loss, '__name__', loss)}: a loss must be a scalar tensor, not {given}")


def gradients(value, moving):
    """The gradients of a value's sum in the tensors `moving`; 0 for those that it does not depend on."""
    found = torch.autograd.grad(value, moving, torch.ones_like(value), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(moving, found, strict=True)]


@torch.no_grad()
def sgd_step(d, moving, grads, velocity, pull, stacked=False):
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
    values = torch.stack(values).double()  # first, for numpy has no bfloat16
    return float(np.array(sizes) / sum(sizes) @ values.cpu().numpy())


def own_copy(tree, plain, place=None):
    """A client's own copy of a tree, in `place`, a tree like it, where layouts allow, or in new memory.

    On a CPU, if `plain`, convolution kernels are laid out channels-last: of bundled models only; a user's module may
    rely on the usual layout, as x.view(len(x), -1) does.
    """
    place = tree if place is None else place

    def copy(t, into):
        if plain and _is_kernel(t):
            return _channels_last(t)
        return t.detach().clone() if into is t else into.copy_(t.detach())

    return trees.tree_map(copy, tree, place)


def to_read(tree, plain):
    """As `own_copy`, for who only reads it: if `plain`, all but kernels are the tree's own tensors, where those are
    contiguous: rounding depends on the layout, and that may depend on who else is in the tree.
    """
    if not plain:
        return own_copy(tree, plain)
    return trees.tree_map(lambda t: _channels_last(t) if _is_kernel(t) else t.contiguous(), tree)


def _is_kernel(t):
    return t.ndim == 4 and t.device.type == "cpu"


def _channels_last(t):
    """Cloned, because `contiguous` takes a kernel of one input channel for channels-last as it is, and then torch
    computes the whole layer the slow way: a step of the 4-layer CNN on grey images takes 1.6 times as long.
    """
    return t.detach().clone(memory_format=torch.channels_last)
