"""Every sampled client's own training: exact, one after the other (loop), several at once (threads), all (stacked).

A client's steps are its own: its batches, its last short batch included, its momentum. So its result is the same to
the bit whoever else trains, in whatever order, on one thread or many; stacked, or on a GPU, the same but for rounding.
"""

import contextlib
import contextvars
import copy
import functools
import math
import numbers
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from pflkit import trees
from pflkit.checks import boolean, choice, integer, real
from pflkit.descent import Descent, one_by_one, own_copy, slope, to_read, value_and_extras
from pflkit.graphs import Graphs, record
from pflkit.messages import Rows
from pflkit.models import Model, Pair, as_trained, trained
from pflkit.stack import all_at_once, in_turns
from pflkit.streams import GLOBAL, rng, torch_seed

# What suits whom. Narrower stacks, and those of more trained numbers a client, lost to a loop on a CPU. Steps that take
# gradients by torch.func pay its price in a loop too, so for them it takes fewer clients; and losses for many do
# without torch.vmap.
WIDTH = {"stacked": 8, "stacked steps": 4, "stacked for many": 3}
NUMBERS = {"stacked": 20_000, "stacked steps": 20_000, "stacked for many": 100_000}
PIXELS = 256  # in an image, colours counted too, beyond which convolutions gained more by threads than stacked
LARGE = 200_000  # numbers of a model, beyond which threads gain by its steps even where they are no convolutions
ALONE = 2_000_000  # trained numbers a client of a convolutional model, beyond which a GPU trains one at a time

# How much at once.
COPIES = 6  # of a client's trained numbers a stack holds at most; as much again is left for what its layers make
ROWS = 100  # samples that a forward pass takes at once: the fastest size measured on a CPU; on a GPU 20 times as many


@dataclass(frozen=True)
class Training:
    """How clients train locally. Defaults: the FedAH paper's protocol (arXiv 2412.01295) for its 4-layer CNN.

    `clip` bounds the norm of each step's gradient (None: no bound). `drop_last` leaves out an epoch's last short batch,
    as other code does; then a client with fewer than `batch_size` samples does not train at all.
    """

    lr: float = 0.005
    batch_size: int = 10
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    drop_last: bool = False

    def __post_init__(self):
        real("lr", self.lr, 0)
        integer("batch_size", self.batch_size, 1, 2**31 - 1)
        integer("epochs", self.epochs, 0)
        real("momentum", self.momentum, 0, 1)
        real("weight_decay", self.weight_decay, 0)
        if self.clip is not None:
            real("clip", self.clip, above=0)
        boolean("drop_last", self.drop_last)


class Engine:
    """How clients train: one after the other (`loop`), one a thread (`threads`), all at once (`stacked`), or what is
    quickest for the model, the device and the `width`, how many clients a stack would have on average (`auto`).

    Threads pay off for convolutions and large models on a CPU; the steps of a small MLP only wait for each other there.
    Their number is torch.get_num_threads(), so OMP_NUM_THREADS and torch.set_num_threads limit it. Inside, each
    client's arithmetic always runs on one intra-op thread: on small models more of them are slower, and the numbers
    would change with them.

    Stacked, a step of all clients takes no more calls than a step of one, but four times the time a call, less if the
    loss is `for_many`: on a CPU that pays off for many clients with small models, convolutions only on tiny images.
    Models with dropout, which draws from torch's one global generator, train in a loop; a loss or model that torch.vmap
    refuses (it asks for a value, as in `if x.max() > 0`) trains client by client, with one warning.
    """

    def __init__(self, name="auto", model=None, device="cpu", width=1.0):
        self.wanted = choice("engine", name, ("auto", "loop", "threads", "stacked"))
        self.width, self.device = width, torch.device(device)
        self.on_cpu = self.device.type == "cpu"
        self.convolutional, self.pixels, heavy, dropout = False, 0, False, False
        if model is not None:
            self.convolutional, self.pixels, dropout = model.convolutional, math.prod(model.shape), model.dropout
            heavy = model.convolutional or model.size() > LARGE
        self.name = name if name in ("loop", "threads") else "threads" if heavy and self.on_cpu else "loop"
        self.known, self.refused = {}, set()  # (loss or step, model) that can be stacked, see all_at_once; that cannot
        self.graphs = None if self.on_cpu else Graphs(functools.partial(record, device=self.device))
        self.waits = not self.on_cpu  # until the round's training is done, before it looks at a phase's results
        if dropout:
            if name == "stacked":
                warnings.warn(f"model={model.name!r}: has dropout, so its clients train in a loop", stacklevel=2)
            self.name = self.wanted = "loop"

    def may_stack(self, kind, most=math.inf):
        """Whether training of a `kind`, a key of WIDTH, is stacked at all, by `most` clients at a time."""
        return self.wanted == "stacked" or (self.wanted == "auto" and min(self.width, most) >= WIDTH[kind])

    def names(self):
        """What a run's result depends on, if only by rounding."""
        if self.wanted == "stacked":
            return ["all stacked"]
        return [self.name, *filter(self.may_stack, WIDTH)]

    def stacks(self, kind, loss, model, numbers, vectors, most=math.inf):
        """Whether clients, `most` at a time, train all at once on `loss`, training of a `kind`: `numbers` trained ones
        each; vectors: inputs are [B, r].
        """
        small = numbers <= NUMBERS[kind] and (vectors or not self.convolutional or self.pixels <= PIXELS)
        helps = self.wanted == "stacked" or small or not self.on_cpu
        return self.may_stack(kind, most) and helps and (loss, model) not in self.refused

    def room(self, numbers):
        """How many clients of so many trained numbers are stacked at a time; more would not fit into a GPU's memory.

        Of large models with convolutions, such as ResNet-18, it is one, whose step, once recorded, is one launch for
        every client: a stack's convolutions, each client's with a kernel of its own, are said to be slower (we had no
        GPU to measure it; tests/gpu/check.py compares them).
        """
        if self.on_cpu:
            return 2**31
        if self.convolutional and numbers > ALONE:
            return 1
        free, _ = torch.cuda.mem_get_info(self.device)
        # And what torch holds for the next tensors, which else would be less room the more ran before.
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(1, int(free // (2 * COPIES * 8 * max(numbers, 1))))  # 8: the bytes of a float64

    def each(self, f, sizes):
        """f(i) for every client i, the largest `sizes[i]` first. The first exception of any client is raised."""
        largest_first = np.argsort(-np.asarray(sizes), kind="stable").tolist()
        workers = min(_outside.get() or torch.get_num_threads(), len(largest_first))
        with one_thread():
            if self.name == "loop" or workers < 2:
                return [f(i) for i in largest_first]
            return list(_pool(os.getpid(), workers).map(f, largest_first))


class Clients:
    """The sampled clients as a method's `local` sees them: their own data, and nothing of the server or of others.

    ids [C] client numbers; n [C] numbers of training samples, class_counts [C, K]; round, rounds (counted from 1);
    join_ratio, the share of all clients that joins a round, on average; model. `sgd` and `steps` train; `mean`,
    `gradient` and `class_mean` are over local data; `through`, `part` and `split` give the same clients with other
    inputs or fewer samples, and `beside` with a second model, which `second` gives as Federation.second does. `log`
    collects mean losses [C] by phase.
    """

    def __init__(
        self, model, data, ids, round, rounds, training, seed, engine, flop_cache, second=None, join_ratio=1.0
    ):
        self.model, self.data, self.ids, self.round, self.rounds = model, data, ids, round, rounds
        self.training, self.seed, self.engine, self._flop_cache = training, seed, engine, flop_cache
        self.second, self.join_ratio = second, join_ratio
        self.cohort = math.inf  # how many clients a method has at most at a time, which may be too few for a stack
        self.n = np.array([len(y) for _, y in data])
        self._log, self._pending, self._work = {}, [], []

    def sgd(
        self,
        loss,
        params,
        *fixed,
        phase="train",
        log=None,
        pull=None,
        project=None,
        epochs=None,
        until=None,
        unmoved=(),
        **rule,
    ):
        """Each client's SGD on its own data, from `params` [C, ...]; returns the trained tree, with memory of its own.

        loss(model, params, batch, *fixed) is of ONE client: trees without the client axis and batch = (x [B, ...],
        y [B]); it returns a scalar, or (scalar, {name: scalar}) whose values are recorded too. `phase` names the random
        stream of the batches, and the losses in the log, unless `log` does. `rule` overrides fields of Training: lr,
        momentum, ...; where params is a tuple, lr may be one of as many rates.

        fixed: trees [C, ...] that stand still, and numbers. epochs: one number, or a list of one a client. until: a
        function of a client's mean losses of its epochs so far; where it is true, the client's training ends. pull:
        (anchor [C, ...], mu) adds mu (params − anchor) to each gradient, as mu/2 ‖params − anchor‖² in the loss would
        (which is recorded without it). project: a function of one tensor, applied to each trained one after each step.
        unmoved: where params is a tuple, positions of parts that are not trained. To their tensors the loss may write,
        in place and detached, as batch-norm does to its statistics.

        Raises FloatingPointError, naming round, client and phase, where a loss or parameter is not finite; on a GPU
        when the client's work of the round is done, or `log` is asked for.
        """
        rates = rule.pop("lr") if isinstance(rule.get("lr"), tuple) else None
        if until is not None and not callable(until):
            raise ValueError(f"until={until!r}: must be a function of a list of losses")
        parts = range(len(params)) if isinstance(params, tuple) else ()
        if not isinstance(unmoved, tuple) or not set(unmoved) <= set(parts):
            raise ValueError(f"unmoved={unmoved!r}: must be a tuple of positions of parts of a tuple of params")
        more = {"loss": loss, "project": project, "until": until}
        descent = self._descent(params, fixed, phase, epochs, rule, unmoved, **more)
        if rates is not None:
            descent.rates = self._check_rates(descent, rates)
        if pull is not None:
            descent.pull = self._check_pull(params, *pull)
        return self._run(descent, phase, log or phase)

    def steps(self, step, state, *fixed, draws=1, phase="train", epochs=None, **rule):
        """Each client's steps of another kind than SGD, from `state` [C, ...]: state <- step(...) for each batch.

        step(model, state, batches, *fixed) is of ONE client, and pure: it returns the new state, a tree like `state`,
        and a loss to record (or that and named extras), and changes nothing. batches: `draws` of them, independent and
        of one size, each (x [B, ...], y [B]). `descent.slope` gives gradients, `value_and_slope` the loss too. fixed,
        phase, epochs as for `sgd`; the `rule` may override batch_size and drop_last only: a step has its own rates.
        """
        integer("draws", draws, 1)
        if not callable(step):
            raise ValueError(f"step: must be a function, not a {type(step).__name__}")
        if other := rule.keys() - {"batch_size", "drop_last"}:
            raise TypeError(f"{min(other)}: steps has no such argument")
        descent = self._descent(state, fixed, phase, epochs, rule, loss=None, step=step, draws=draws)
        return self._run(descent, phase, phase)

    def _descent(self, params, fixed, phase, epochs, rule, unmoved=(), **more):
        """A Descent of these clients, its values checked."""
        rule = replace(self.training, **rule)
        epochs = epochs if isinstance(epochs, list) else [rule.epochs if epochs is None else epochs] * len(self.n)
        if len(epochs) != len(self.n):
            raise ValueError(f"epochs={epochs}: must be one number, or a list of one for each of {len(self.n)} clients")
        for number in epochs:
            integer("epochs", number, 0)
        self._check_rows("params", params)
        for f in fixed:
            self._check_rows("fixed", f if not isinstance(f, numbers.Real) else ())
        named = trees.named_leaves(params)
        moves = trained(self.model, params)
        for k, (name, _) in enumerate(named if unmoved else ()):
            moves[k] &= int(name.partition("/")[0]) not in unmoved
        # One sample has no variance for batch-norm to divide by.
        skip_singles = self.model.batch_norm and any(self.model.is_buffer(name) for name, _ in named)
        order = functools.partial(_order, self.seed, self.round, self.ids, self.n, phase)
        about = {"fixed": fixed, "data": self.data, "order": order, "epochs": epochs, "trained": moves, "rule": rule}
        if isinstance(self.model, Pair):
            parts = [name.partition("/")[0] for (name, _), own in zip(named, moves, strict=True) if own]
            about["clips"] = [[k for k, part in enumerate(parts) if part == one] for one in dict.fromkeys(parts)]
        return Descent(model=self.model, params=params, skip_singles=skip_singles, **about, **more)

    def _run(self, descent, phase, log):
        """The trained tree of a Descent; its losses and FLOPs are recorded."""
        changes = any(descent.trained) if descent.step is None else descent.trained  # a step may count, with integers
        if not changes or not any(descent.epochs):
            return trees.clone(descent.params)
        out, means, samples, skipped = self._descend(descent, phase)
        self._skip(skipped)
        self._count(_kind("train", descent), functools.partial(_two_samples, descent), samples)
        self._record(log, means, out)
        return out

    def _skip(self, batches):
        if batches.any():
            self._log["skipped"] = self._log.get("skipped", 0) + batches

    def _descend(self, descent, phase):
        """The descent by the engine that suits it: (trained tree, mean values, samples, skipped batches)."""
        what, features = descent.step or descent.loss, isinstance(self.data, _Later)
        train = np.flatnonzero(descent.epochs).tolist()
        kind = "stacked steps" if descent.step else "stacked"
        if getattr(what, "for_many", False) and (self.model.many or (features and self.model.plain)):
            kind = "stacked for many"
        if features and self.engine.may_stack(kind, self.cohort):
            self.engine.each(lambda j: self.data[train[j]], self.n[train])
        vectors = features and self.data.complete(train) and self.data[train[0]][0].ndim == 2
        refusal = None
        numbers = sum(t[0].numel() for t in descent.moving(descent.params))
        if self.engine.stacks(kind, what, self.model, numbers, vectors, self.cohort):
            try:
                nothing = tuple(t[:0] for t in self.data[train[0]])
                data = [self.data[i] if number else nothing for i, number in enumerate(descent.epochs)]
                with one_thread():
                    most, about = self.engine.room(numbers), {"known": self.engine.known, "graphs": self.engine.graphs}
                    run = functools.partial(all_at_once, single=most == 1, **about)
                    return in_turns(replace(descent, data=data), most, run)
            except Exception as error:  # whatever torch.vmap refuses; an error of the loss itself comes again below
                refusal = str(error).strip().partition("\n")[0]
        # A step on vectors is too short to share out: threads double its time, but beside extraction they save it.
        engine = Engine("loop") if vectors else self.engine
        given = one_by_one(descent, lambda f: engine.each(f, self.n), lambda i: self._dropout(i, phase))
        if refusal is not None:
            self.engine.refused.add((what, self.model))
            name = f"{getattr(what, '__name__', what)} on {self.model.name!r}"
            warnings.warn(f"{name} cannot be stacked, so clients train one by one: {refusal}", stacklevel=4)
        return given

    def _check_rows(self, what, tree):
        """Refuses a tree whose leaves are not all tensors [C, ...]."""
        for name, leaf in trees.named_leaves(tree):
            if not torch.is_tensor(leaf) or leaf.shape[:1] != (len(self.n),):
                found = list(leaf.shape) if torch.is_tensor(leaf) else type(leaf).__name__
                raise ValueError(f"{what}, {name!r}, is {found}, must be [{len(self.n)}, ...]: a row for each client")

    def _check_rates(self, descent, rates):
        """The rate of each trained leaf, of rates for the parts of a tuple."""
        if not isinstance(descent.params, tuple) or len(rates) != len(descent.params):
            raise ValueError(f"lr={rates}: must be one number, or one for each part of a tuple of params")
        rates = [real("lr", rate, 0) for rate in rates]
        pairs = zip(descent.params, rates, strict=True)
        of_parts = tuple(trees.like(part, [rate] * len(trees.leaves(part))) for part, rate in pairs)
        return descent.moving(of_parts)

    def _check_pull(self, params, anchor, mu):
        """(anchor, mu), the anchor's parts in the order of those of `params`, to which they belong by name."""
        self._check_rows("pull", anchor)
        anchor = trees.tree_map(lambda p, a: a, params, anchor)
        for (name, p), a in zip(trees.named_leaves(params), trees.leaves(anchor), strict=True):
            if a.shape != p.shape:
                raise ValueError(f"pull, {name!r}, is {list(a.shape)}, must be {list(p.shape)}, as in params")
        return anchor, real("mu", mu, 0)

    def beside(self, shared):
        """The same clients with `shared`, a Model, beside their own: what trains gets models.Pair(own, shared).

        Params are then a tuple or dict of the models' trees, and `clip` bounds the gradient of each of its parts.
        """
        some = copy.copy(self)  # shallow: the log, and the work counted, stay common to both
        some.model = Pair(self.model, shared)
        return some

    @property
    def class_counts(self):
        """Training samples of each class: int64 [C, K]."""
        return torch.stack([y.bincount(minlength=self.model.classes) for _, y in self.data])

    def part(self, share, name):
        """The same clients with a random `share` of their samples, at least one, drawn anew each round."""
        real("share", share, above=0, high=1)
        orders = [self._shuffled(i, "part", self.round, name) for i in range(len(self.n))]
        return self._only([order[: max(1, round(share * len(order)))] for order in orders])

    def split(self, share, name):
        """The same clients twice: with a random `share` of their samples and with the rest, the same in every round.

        Each has one sample at least; who has a single one gets it twice.
        """
        real("share", share, 0, 1)
        orders = [self._shuffled(i, "split", name) for i in range(len(self.n))]
        cuts = [min(max(1, round(share * n)), n - 1) for n in self.n.tolist()]
        firsts = [order[:cut] if cut else order for order, cut in zip(orders, cuts, strict=True)]
        return self._only(firsts), self._only([order[cut:] for order, cut in zip(orders, cuts, strict=True)])

    def _shuffled(self, i, what, *names):
        return rng(self.seed, what, *names[:-1], int(self.ids[i]), names[-1]).permutation(self.n[i])

    def _only(self, rows):
        """The same clients with these rows [n] of their samples only."""
        some = copy.copy(self)  # shallow: the log, and the work counted, stay common to both
        some.data = []
        for (x, y), own in zip(self.data, rows, strict=True):
            own = trees.on(y.device, np.sort(own))
            some.data.append((x[own], y[own]))
        some.n = np.array([len(y) for _, y in some.data])
        return some

    def mean(self, loss, params, *fixed):
        """The mean of `loss`, one as for `sgd`, over each client's local samples, in evaluation mode: float64 [C]."""
        descent = self._descent(params, fixed, "mean", None, {}, loss=loss)
        means = [0] * len(self.n)

        @torch.no_grad()
        def client(i):
            own, still = descent.of_client(i)
            for batch in self._pieces(i):
                value, _ = value_and_extras(loss(self.model, own, batch, *still))
                means[i] += torch.as_tensor(value).double() * len(batch[1]) / float(self.n[i])

        @torch.no_grad()
        def two_samples():
            own, still = descent.of_client(0)
            loss(descent.model, own, _two(descent.data), *still)

        self.engine.each(client, self.n)
        self._count(_kind("mean", descent), two_samples, self.n)
        return torch.stack(means).cpu()

    def gradient(self, loss, params, *fixed):
        """The gradient of the mean of `loss` over all local samples, and `params` with its batch-norm statistics.

        Both are trees like `params` [C, ...], the gradient 0 for buffers. A loss as for `descent.slope`. Batch-norm
        sees up to 100 samples at once; a client with a single one, which has no variance, has the gradient 0.
        """
        descent = self._descent(params, fixed, "gradient", None, {}, loss=loss)
        gradient, after, skipped = trees.full_like(params, 0), trees.clone(params), np.zeros(len(self.n))

        @torch.no_grad()
        def client(i):
            own, still = descent.of_client(i)
            for batch in self._pieces(i):
                if descent.skip_singles and len(batch[1]) == 1:
                    skipped[i] += 1
                    continue
                found, own = slope(self.model, loss, own, batch, *still)
                for total, g, moves in zip(trees.leaves(gradient), trees.leaves(found), descent.trained, strict=True):
                    if moves:
                        total[i] += g * (len(batch[1]) / self.n[i])
            for whole, part in zip(trees.leaves(after), trees.leaves(own), strict=True):
                whole[i] = part

        def two_samples():
            own, still = descent.of_client(0)
            slope(descent.model, loss, own, _two(descent.data), *still)

        def in_context(i):
            with self._dropout(i, "gradient"):
                client(i)

        self.engine.each(in_context, self.n)
        self._skip(skipped)
        self._count(_kind("gradient", descent), two_samples, self.n - skipped)
        return gradient, after

    def _pieces(self, i):
        """Client i's samples as (x, y) of up to ROWS, of nearly equal size."""
        x, y = self.data[i]
        pieces = -(-len(y) // ROWS)
        return zip(x.tensor_split(pieces), y.tensor_split(pieces), strict=True)

    def through(self, extractor):
        """The same clients with features [n, r] for inputs, computed once by the frozen `extractor` [C, ...].

        They are computed when a client first trains on them, so that one thread extracts while another trains.
        """
        features, data = self._forward(Model.extract, extractor), self.data
        behind = copy.copy(self)
        behind.data = _Later(lambda i: (features[i], data[i][1]), len(self.n))
        return behind

    def class_mean(self, f, params):
        """The mean of f(model, params, x) [B, ...] over each class's local samples: Rows [C, K, ...], owned ones there.

        `f` is of ONE client and sees its model in evaluation mode. A mean is over samples, however they are batched.
        """
        forward = self._forward(f, params)
        self.engine.each(forward.__getitem__, self.n)  # features behind an extractor are then there to be counted
        counts, means = self.class_counts, []
        for values, (_, y), n in zip(forward, self.data, counts, strict=True):
            sums = values.new_zeros(len(n), *values.shape[1:], dtype=torch.float64).index_add_(0, y, values.double())
            mean = sums / n.clamp(min=1).view(-1, *[1] * (sums.ndim - 1))
            means.append(mean.to(values.dtype) if values.is_floating_point() else mean)
        return Rows(torch.stack(means), counts > 0)

    def _forward(self, f, params):
        """f(model, params, x) of each client's samples, without gradients: tensors [n, ...], _Later."""
        self._check_rows("params", params)
        # Not of the clients themselves, here and above: what they count would hold them, and all models of their round.
        model, data, n, samples = self.model, self.data, self.n, np.zeros(len(self.n))
        copied = to_read if f is Model.extract else own_copy  # a method's own f may write

        def client(i):
            own = copied(trees.row(params, i), model.plain)
            samples[i] = n[i]
            return _forward(lambda x: f(model, own, x), data[i][0])

        @torch.no_grad()
        def two_samples():
            f(model, copied(trees.row(params, 0), model.plain), _two(data)[0])

        self._count(f, two_samples, samples)
        return _Later(client, len(self.n))

    def flops(self):
        """The FLOPs [C] of all that was trained so far: each kind of step is measured once, on two samples."""
        flops = np.zeros(len(self.n))
        # Copied before anything is measured, for that may extract features, of samples that nobody trained on.
        for work, shape, step, samples in [(*w, s.copy()) for *w, s in self._work if s.any()]:
            kind = work, shape()
            if kind not in self._flop_cache:
                with GLOBAL, one_thread(), torch.random.fork_rng(devices=[]), FlopCounterMode(display=False) as counter:
                    step()
                self._flop_cache[kind] = counter.get_total_flops() / 2
            flops += self._flop_cache[kind] * samples
        return flops

    @contextlib.contextmanager
    def _dropout(self, i, phase):
        if not self.model.dropout:
            yield
            return
        device = self.data[i][1].device
        with GLOBAL, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_it = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
            seed_it(torch_seed(self.seed, "dropout", self.round, int(self.ids[i]), phase))
            yield

    def _count(self, work, step, samples):
        # The shape of inputs is asked for when it is needed, lest features be extracted that nobody trains on.
        self._work.append(((self.model, work), lambda data=self.data: data[0][0].shape[1:], step, samples))

    @property
    def log(self):
        """Mean losses [C] by phase, and skipped batches. It waits for a GPU to have finished."""
        self._settle()
        return self._log

    @contextlib.contextmanager
    def settling(self):
        """Within, a method trains; what diverged meanwhile is named at the end, whatever else came of it."""
        try:
            yield
        finally:
            self._settle()

    def _record(self, phase, means, out):
        """Notes a phase's `means`, a function as of `one_by_one`, and whether all of `out` is finite: on a GPU, to be
        looked at when the round's training is done, for to look is to wait for it.
        """
        self._pending.append((phase, means, trees.finite(out)))
        if not self.engine.waits:
            self._settle()

    def _settle(self):
        """Puts into the log what phases noted; FloatingPointError where one's numbers are not finite."""
        while self._pending:
            phase, means, finite = self._pending.pop(0)
            means, finite = means(), finite.cpu().numpy()
            for name in sorted({name for values in means for name in values}):
                found = np.array([float(values.get(name, np.nan)) for values in means])
                self._log[phase if name == "loss" else f"{phase}.{name}"] = found
                if name == "loss":
                    finite &= np.isfinite(found) | np.array([not values for values in means])
            if not finite.all():
                who = int(self.ids[np.argmin(finite)])
                raise FloatingPointError(
                    f"round {self.round}, client {who}, phase {phase!r}: training diverged (loss or parameters are "
                    f"not finite); a smaller lr may help"
                )


def _order(seed, round, ids, n, phase, i, epoch, draw):
    """The order in which client i goes through its n[i] samples in one epoch; several draws are independent."""
    names = "batches", round, int(ids[i]), phase, epoch
    return rng(seed, *names, *([draw] if draw else [])).permutation(n[i])


class _Later:
    """A list whose items are made when they are first asked for, by the thread that asks."""

    def __init__(self, make, length):
        self.make, self.items = make, [None] * length

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        if self.items[i] is None:
            self.items[i] = self.make(i)
        return self.items[i]

    def complete(self, which):
        return all(self.items[i] is not None for i in which)


def evaluate(model, params, data, engine):
    """Correct answers [C] and mean cross-entropy [C] of each client's model `params` [C, ...] on its own `data`."""
    found = [None] * len(data)

    def client(i):
        own, (x, y) = to_read(trees.row(params, i), model.plain), data[i]
        logits = _forward(lambda rows: model.predict(own, rows), x)
        found[i] = torch.stack([(logits.argmax(1) == y).sum().double(), F.cross_entropy(logits, y).double()])

    engine.each(client, [len(y) for _, y in data])
    correct, loss = torch.stack(found).cpu().numpy().T  # of all at once, for to look is to wait for a GPU
    return correct.astype(np.int64), loss


def _kind(what, d):
    """What the FLOPs of a Descent's samples depend on: numbers too, which may say how often a step does something."""
    fixed = tuple(f for f in d.fixed if isinstance(f, numbers.Real))
    return what, d.step or d.loss, tuple(d.trained), d.draws, fixed


@torch.enable_grad()
def _two_samples(d):
    """The first client's step in a Descent on two samples, for the FLOP counter."""
    (own, still), batch = d.of_client(0), _two(d.data)
    own = as_trained(own)
    if d.step is not None:
        d.step(d.model, own, (batch,) * d.draws, *still)
        return
    moving = [leaf.requires_grad_() for leaf in d.moving(own)]
    value, _ = value_and_extras(d.loss(d.model, own, batch, *still))
    torch.autograd.grad(value, moving, allow_unused=True)


def _two(data):
    """Two samples of the first client, (x, y); one of them twice where it has no other."""
    x, y = data[0]
    return x[[0, -1]], y[[0, -1]]


@torch.no_grad()  # here, in the client's own thread: the caller's grad mode does not reach it
def _forward(f, x):
    """f on all rows of x, in pieces; pieces never cross clients, so that rounding does not depend on the others."""
    found = torch.cat([f(rows) for rows in x.split(ROWS if x.device.type == "cpu" else 20 * ROWS)])
    return found.float() if found.dtype == torch.bfloat16 else found  # autocast's; it is trained on, kept and sent


_outside = contextvars.ContextVar("threads", default=None)


@contextlib.contextmanager
def one_thread():
    """Within: one intra-op thread, so that small arithmetic waits for no other, and sums do not depend on their number.

    How many clients an Engine trains at once is still what torch allowed outside.
    """
    before = torch.get_num_threads()
    outside = _outside.set(_outside.get() or before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _outside.reset(outside)


@functools.cache
def _pool(pid, workers):
    """One pool per process (a forked child must not wait for its parent's threads)."""
    return ThreadPoolExecutor(workers, thread_name_prefix="pflkit", initializer=torch.set_num_threads, initargs=(1,))
