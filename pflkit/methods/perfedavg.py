"""Per-FedAvg: a global model that is good once a client has taken one gradient step of its own from it.

Source: Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach. NeurIPS 2020, arXiv 2002.07948. Minimized is the mean over clients of f_i(w − α ∇f_i(w)).

Round t, for the sampled clients S_t:
    1.  the server sends                      w^t
    2.  client i, from w = w^t, takes τ steps, each on independent batches D, D', D'' of its samples:
                                              w̃ = w − α ∇f_i(w; D)
                                              v = ∇f_i(w̃; D')
                                              w <- w − β (v − α ∇²f_i(w; D'') v)
    3.  and uploads                           w_{i,τ}
    4.  the server averages                   w^{t+1} = 1/|S_t| Σ w_{i,τ}      (over S_t, uniformly)
When a client is to use the model:
    5.  it takes one step from what it gets   w_i = w^t − α ∇f_i(w^t), over all of its training samples

The product with the Hessian ∇²f_i is left out by `variant="fo"`, a difference of two gradients in "hf", itself in
"exact". τ is what E epochs in batches have: E ⌈n_i / batch size⌉ steps. D, D' and D'' go through the samples each in an
order of its own; where a client has no more samples than a batch, they are the same samples. The losses recorded are
f_i(w̃; D').

Travels:   the whole model, down and up.
Keeps:     nothing; clients are stateless.
Evaluated: w_i `before` local training, the method's product: step 5, which is deterministic and sees no test sample.
           And w_{i,τ} `after` it, as uploaded: the algorithm takes no step 5 from there. It is a point to step from,
           not to use: `after` may be at chance where `before` is high, and is no result to compare methods by.

Training's momentum, weight decay and clipping are not used: the steps are those above. Batch-norm's statistics move
once a step, with the pass at w̃ over D' (so α = 0 is FedAvg in them too), in step 5 once for each piece of at most 100
samples, and are averaged as w is.
Over few samples batch-norm's curvature can be huge, and the product with the Hessian is too: "fo" is safe there.
A ReLU's kink between w − δv and w + δv adds its jump over 2δ to "hf", often more than the product itself. A
larger δ is steadier there; "exact" sees no kinks.

Where released code differs, and what we do:
  - TsingZ0/PFLlib d832e76 (2025-11-29) has "fo" only. It steps twice through the data in a round, with batches twice
    as large, halved into D and D'; a client with fewer samples than that takes no step. KarhouTam/FL-bench 06e658b
    (2025-10-09) takes half or a third of FedAvg's steps an epoch. Here they are as many as FedAvg's, on two or three
    batches each, the short ones included (`Training.drop_last` leaves them out).
  - PFLlib averages by n_i. The objective is a mean over clients; so FL-bench averages uniformly, and so do we.
  - PFLlib's α and β are both the local rate, whatever its flag for β says. Here too, unless `inner_lr` and `outer_lr`
    are given. FL-bench: α = 0.01, β = 0.001. The paper's α is 0.01 or 0.001 and its β 0.001, its τ 4 or 10, to our
    knowledge (not checked against the text).
  - PFLlib's step 5 is on one random batch, FL-bench's an epoch of SGD or more; CharlieDinh/pFedMe, by a report there
    (issue 19), takes test samples. Here it is one step over all training samples: w_i of the objective, without noise.
  - PFLlib's scoring of training data moves batch-norm's statistics. Here scoring changes nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pflkit.checks import choice, real
from pflkit.descent import slope, value_and_slope
from pflkit.methods.fedavg import FedAvg, model_loss
from pflkit.models import for_many
from pflkit.trees import add, average, leaves, tree_map


def hessian_free(gradient, w, v, delta):
    """∇²f(w) v, nearly: [∇f(w + δv) − ∇f(w − δv)] / 2δ; exact where f is quadratic. gradient: the function ∇f.

    >>> import torch
    >>> w, v = torch.tensor(3.0), torch.tensor(1.2)
    >>> hessian_free(lambda w: 2 * (w - 1), w, v, 0.5)  # f = (w − 1)², ∇²f = 2
    tensor(2.4000)
    >>> hessian_free(lambda w: 4 * w**3, w, v, 0.5)     # f = w⁴: 12·9·1.2 = 129.6, and an error of 4 δ²·1.2³
    tensor(131.3280)
    """
    up, down = (gradient(add(w, v, d)) for d in (delta, -delta))
    half = 0.5 / delta
    return tree_map(lambda g: g * half if g.is_floating_point() else g, add(up, down, -1))


def slope_along(model, params, batch, v):
    """<∇f(params), v> of ONE client; its gradient in `params` is the Hessian's product ∇²f v, exactly."""
    gradient, _ = slope(model, model_loss, params, batch)
    return sum(leaves(tree_map(lambda g, d: (g * d).sum(), gradient, v)))


def only(model, tree, buffers=False):
    """The trained tensors of a tree (extractor, head), or its buffers, which are batch-norm's statistics."""
    return tuple({name: t for name, t in part.items() if (name in model.buffers) == buffers} for part in tree)


def filled(tree, *others):
    """A tree (extractor, head) with the tensors of `others` in the place of its own of these names."""
    return tuple({name: t for part in parts for name, t in part.items()} for parts in zip(tree, *others, strict=True))


def adapted_slope(model, w, D, D1, alpha):
    """(f(w̃; D'), v = ∇f(w̃; D'), batch-norm's statistics after this pass) of ONE client, w̃ = w − α ∇f(w; D)."""
    inner, _ = slope(model, model_loss, w, D)
    loss, v, after = value_and_slope(model, model_loss, add(w, inner, -alpha), D1)
    return loss, v, only(model, after, buffers=True)


# Steps of ONE client. D' is the first of the draws: so with α = 0 they are FedAvg's, on FedAvg's batches.


@for_many
def first_order(model, w, batches, alpha, beta):
    """w − β v."""
    D1, D = batches
    loss, v, statistics = adapted_slope(model, w, D, D1, alpha)
    return filled(add(w, v, -beta), statistics), loss


def hessian_free_step(model, w, batches, alpha, beta, delta):
    """w − β (v − α ∇²f(w; D'') v), the product by differences. Not `for_many`, which rounds otherwise: 1/δ times that
    would be seen.
    """
    D1, D, D2 = batches
    loss, v, statistics = adapted_slope(model, w, D, D1, alpha)
    product = hessian_free(lambda at: slope(model, model_loss, at, D2)[0], w, v, delta)
    return filled(add(w, add(v, product, -alpha), -beta), statistics), loss


@for_many
def exact_step(model, w, batches, alpha, beta):
    """w − β (v − α ∇²f(w; D'') v)."""
    D1, D, D2 = batches
    loss, v, statistics = adapted_slope(model, w, D, D1, alpha)
    product, _ = slope(model, slope_along, w, D2, v)
    return filled(add(w, add(v, product, -alpha), -beta), statistics), loss


STEPS = {"fo": (first_order, 2), "hf": (hessian_free_step, 3), "exact": (exact_step, 3)}  # and how many batches


@dataclass(frozen=True)
class PerFedAvg:
    paper: ClassVar[str] = (
        "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach "
        "(Fallah et al., 2020)"
    )
    product: ClassVar[str] = "before"  # of the round's training, but after a step of the client's own

    inner_lr: float | None = None  # α; None: the local learning rate, as in PFLlib
    outer_lr: float | None = None  # β; the same
    variant: str = "fo"  # or "hf", "exact": what becomes of the Hessian
    delta: float = 1e-3  # δ of "hf"; FL-bench's

    def __post_init__(self):
        for name in ("inner_lr", "outer_lr"):
            if getattr(self, name) is not None:
                real(name, getattr(self, name), 0)
        choice("variant", self.variant, STEPS)
        real("delta", self.delta, above=0)

    # The server is FedAvg's, but for the weights, and clients are as stateless.
    server, client, download = FedAvg.server, FedAvg.client, FedAvg.download

    def local(self, clients, kept, message):
        step, draws = STEPS[self.variant]
        beta = clients.training.lr if self.outer_lr is None else self.outer_lr
        numbers = (self.alpha(clients), beta, self.delta)[: 3 if self.variant == "hf" else 2]
        w = clients.steps(step, message, *numbers, draws=draws)
        return (), w, w

    def merge(self, server, ids, message, upload, n):
        return average(upload, np.ones(len(ids)))

    def deploy(self, clients, kept, message):
        gradient, after = clients.gradient(model_loss, message)
        return add(after, gradient, -self.alpha(clients))

    def alpha(self, clients):
        return clients.training.lr if self.inner_lr is None else self.inner_lr
