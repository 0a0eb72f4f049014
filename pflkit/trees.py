"""Arithmetic on trees: dicts and tuples of tensors, nested, as one value.

A model's parameters are the tree `(extractor, head)`, two dicts of tensors. The parameters of C clients are the same
tree with a leading client axis: every leaf is [C, ...]. Functions here are values in, values out; only `put` writes.
"""

import numpy as np
import torch


def tree_map(f, *trees):
    """`f` of the corresponding leaves of `trees`, which have one structure; the result has it too.

    Parts of dicts correspond by name, whatever their order. Raises ValueError where structures differ.
    """
    first = trees[0]
    if isinstance(first, dict):
        if any(tree.keys() != first.keys() for tree in trees[1:]):
            raise ValueError(f"trees of different structure: {' and '.join(str(list(tree)) for tree in trees)}")
        return type(first)({name: tree_map(f, *(tree[name] for tree in trees)) for name in first})
    if isinstance(first, tuple):
        parts = [tree_map(f, *parts) for parts in zip(*trees, strict=True)]
        return first._make(parts) if hasattr(first, "_make") else tuple(parts)  # a NamedTuple stays one
    return f(*trees)


def named_leaves(tree, path=""):
    """(name, tensor) for each leaf, in a fixed order; names join keys and positions: "0/conv1.weight"."""
    if isinstance(tree, dict | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, part in items for leaf in named_leaves(part, f"{path}/{key}" if path else str(key))]
    return [(path, tree)]


def leaves(tree):
    """The tensors of `tree`, in the order of `named_leaves`."""
    return [leaf for _, leaf in named_leaves(tree)]


def like(tree, leaves):
    """`leaves`, a list of tensors, as a tree of the structure of `tree`, which has as many; else ValueError."""
    rest = list(reversed(leaves))
    try:
        made = tree_map(lambda _: rest.pop(), tree)
    except IndexError:
        raise ValueError(f"like: {len(leaves)} tensors are fewer than the tree has leaves") from None
    if rest:
        raise ValueError(f"like: {len(leaves)} tensors are more than the tree has leaves")
    return made


def on(device, values):
    """Numbers of the CPU as a tensor on `device`, without waiting for what that still does."""
    return torch.as_tensor(values).to(device, non_blocking=True)


def take(tree, ids):
    """Rows `ids` of every leaf [N, ...], copied: [len(ids), ...]."""
    return tree_map(lambda t: t[on(t.device, ids)], tree)


def pick(leaf, at):
    """Rows `at` of a tensor [C, ...], copied; but one value for all, as `expand` makes, stays stored once."""
    return leaf[:1].expand(len(at), *leaf.shape[1:]) if leaf.stride(0) == 0 else leaf[at]


def put(tree, ids, rows):
    """Writes `rows` [len(ids), ...] over rows `ids` of every leaf of `tree` [N, ...], in place."""

    def write(t, r):
        t[on(t.device, ids)] = r

    tree_map(write, tree, rows)


def row(tree, i):
    """Client i's part of every leaf [C, ...], a view without the client axis."""
    return tree_map(lambda t: t[i], tree)


def stack(rows):
    """Trees [...] of one structure, one a client, as one [C, ...]."""
    return tree_map(lambda *parts: torch.stack(parts), *rows)


def join(trees, order=slice(None)):
    """Several trees [C1, ...], [C2, ...], ... as one [C, ...]: client j is the order[j]-th of all, by default the j-th.

    A tree alone is taken to be in order, and returned as it is.
    """
    return trees[0] if len(trees) == 1 else tree_map(lambda *parts: torch.cat(parts)[order], *trees)


def expand(tree, clients):
    """One value for all: every leaf [...] seen as [clients, ...], stored once."""
    return tree_map(lambda t: t.expand(clients, *t.shape), tree)


def repeat(tree, clients):
    """`clients` copies of every leaf [...], each with memory of its own: [clients, ...]."""
    return tree_map(lambda t: t.expand(clients, *t.shape).clone(), tree)


def clone(tree):
    """The same values in new memory."""
    return tree_map(torch.clone, tree)


def owner(*others):
    """A function that returns a tensor; a copy if its memory is that of a leaf of the trees `others`, of an earlier
    tensor, or of several numbers of its own at once.
    """
    seen = {t.untyped_storage().data_ptr() for t in leaves(others)}

    def own(t):
        memory = t.untyped_storage().data_ptr()
        if memory in seen or not t.is_contiguous():
            return t.clone(memory_format=torch.contiguous_format)
        seen.add(memory)
        return t

    return own


def full_like(tree, value):
    """A tree of `value` with the shapes of `tree`."""
    return tree_map(lambda t: torch.full_like(t, value), tree)


def lerp(start, end, weight):
    """start + (end - start) * weight, element by element; all three are trees of one structure.

    torch.lerp is exact at weight 0 and at weight 1: so FedAH with W = 0 is FedRep to the bit. Of integer leaves
    (batch-norm's counters), which cannot be mixed, `end` is taken.
    """
    return tree_map(lambda a, b, w: torch.lerp(a, b, w) if a.is_floating_point() else b.clone(), start, end, weight)


def add(tree, other, alpha=1.0):
    """tree + alpha · other, element by element; integer leaves (batch-norm's counters) stay as they are.

    other: a tree of the same structure; alpha: a number.
    """
    return tree_map(lambda a, b: a.add(b, alpha=alpha) if a.is_floating_point() else a.clone(), tree, other)


def average(tree, weights):
    """The weighted mean over the client axis: leaves [C, ...] -> [...].

    `weights` [C] are non-negative and not all zero, e.g. the clients' numbers of training samples; they are divided by
    their sum. Sums run in float64, so that the mean of equal float32 rows is that row to the bit. Integer leaves
    (batch-norm's counters) stay integers: their mean is rounded.
    """
    w = np.asarray(weights, dtype=np.float64)
    if w.ndim != 1 or not w.size or not np.isfinite(w).all() or w.min() < 0 or w.sum() == 0:
        raise ValueError(f"weights={weights!r}: must be non-negative numbers, one a client, not all zero")
    w = torch.tensor(w / w.sum())

    def mean(t):
        if len(t) != len(w):
            raise ValueError(f"weights={weights!r}: {len(w)} weights for {len(t)} clients")
        if t.dtype == torch.bool:
            raise ValueError("average: true and false have no mean; average Rows over those who have each of them")
        # In pieces, for all numbers in float64 would take twice the memory of the clients' models, and longer.
        size = 4096 if t.device.type == "cpu" else 2**20
        pieces, shares = t.reshape(len(t), t.shape[1:].numel()).split(size, dim=1), on(t.device, w)
        total = torch.cat([shares @ piece.double() for piece in pieces]).view(t.shape[1:])
        return (total if t.is_floating_point() else total.round()).to(t.dtype)

    return tree_map(mean, tree)


def finite(tree):
    """Which clients' numbers are all finite: bool [C] of leaves [C, ...], at least one, on the first's device.

    On a CPU a sum, which is not finite where a number is not, takes a tenth of the time of looking at each; but it may
    be too large where all are finite. On a GPU, to ask would be to wait.
    """

    def leaf(t):
        flat = t.reshape(len(t), t.shape[1:].numel())
        if not t.is_floating_point() or (t.device.type == "cpu" and bool(flat.sum(1).isfinite().all())):
            return torch.ones(len(t), dtype=torch.bool, device=t.device)
        return flat.isfinite().all(1)

    found = [leaf(t) for t in leaves(tree)]
    return torch.stack([fine.to(found[0].device) for fine in found]).all(0)


def unequal(a, b):
    """The largest absolute difference between two trees; 0.0 means equal, NaN that a shape differs or a NaN occurs."""

    def gap(x, y):
        x, y = x.double(), y.double()
        return 0.0 if torch.equal(x, y) else float((x - y).abs().max()) if x.shape == y.shape else float("nan")

    worst = leaves(tree_map(gap, a, b))
    return float("nan") if any(w != w for w in worst) else max(worst, default=0.0)
