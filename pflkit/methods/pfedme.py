"""pFedMe: a client's model θ is the solution of its own task near w; the global w moves towards all of these solutions.

Source: T. Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020, arXiv 2006.08848.
It minimizes the mean over clients of F_i(w) = min_θ f_i(θ) + λ/2 ‖θ − w‖². With θ̂_i the θ of this minimum, ∇F_i(w) is
λ (w − θ̂_i); θ̃_i is what is found of θ̂_i.

Round t, for the sampled clients S_t:
    1.  the server sends                      w^t
    2.  client i starts from it               θ = w_{i,0} = w^t
    3.  for each of R mini-batches f̃, in K steps of size s, finds its solution near w_{i,r},
                                              θ <- θ − s (∇f̃(θ) + λ (θ − w_{i,r}));   θ̃_i = θ at their end
        and moves w towards it                w_{i,r+1} = w_{i,r} − η λ (w_{i,r} − θ̃_i)
    4.  keeps the last θ̃_i, and uploads       w_{i,R}
    5.  the server moves, by their mean       w^{t+1} = (1 − β) w^t + β Σ w_{i,R} / |S_t|
R is the number of mini-batches of E epochs.

Travels:   the whole model, down and up.
Keeps:     the client's personal model θ̃_i, only to be used: training starts from w^t. At first it is w^0.
Evaluated: θ̃_i `before` steps 2 and 3, as it was kept, and `after` them, the method's product; beside it the global
           model: w^t before, w_{i,R} after.

Where released code differs, and what we do:
  - To our knowledge (not checked against the text) the paper takes R mini-batches, lets all clients train in every
    round, and samples only whose w_{i,R} are averaged; so does CharlieDinh/pFedMe (a snapshot without a date), with
    R = 20. Here only clients that join train, as in every other method, and R follows from epochs, as in TsingZ0/PFLlib
    d832e76 (2025-11-29).
  - It starts θ from w^t for the first mini-batch, for later ones from the θ before. So do we. To our
    knowledge (not checked against the text) the paper asks for a solution to some accuracy, wherever it is sought from.
  - CharlieDinh/pFedMe and PFLlib average by n_i. Here the mean is uniform, to our knowledge the paper's.
  - Both, and KarhouTam/FL-bench 06e658b (2025-10-09), shrink θ by a further 0.001 s θ in each inner step, as if a
    regularizer were part of f_i. Here there is none: of `Training`'s optimizer only the rate is used, for η.
  - PFLlib's β is 0 by default, and then w never moves. CharlieDinh/pFedMe and FL-bench have 1.
  - In CharlieDinh/pFedMe and in PFLlib, θ̃_i is the very list of tensors that w is written to next: the first scores
    w_{i,R} for it, the second w^t. FL-bench scores the initial model. Here θ̃_i has memory of its own, and is scored.
  - PFLlib logs a training loss with a norm that is not squared. Here the loss is f̃(θ) before each K steps.
  - It drops each epoch's last short batch. Here it is trained on (`Training.drop_last` restores that).
  - PFLlib's running statistics of batch-norm stay with the clients. Here those of the passes, which all are θ's, are
    w's too, step by step, without λ or η; they travel, and the server takes their mean, without β, for a β above 1
    could make variances negative.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pflkit.checks import integer, real
from pflkit.descent import value_and_slope
from pflkit.messages import Shared
from pflkit.methods.fedavg import model_loss
from pflkit.models import for_many
from pflkit.trees import average, leaves, lerp, like, named_leaves


def inner_step(theta, gradient, w, s, lam):
    """θ − s (∇f̃(θ) + λ (θ − w)), tensors of one shape: a step towards min_θ f̃(θ) + λ/2 ‖θ − w‖².

    >>> inner_step(2.0, 2.0, 2.0, s=0.1, lam=1.0), inner_step(1.5, 1.5, 2.0, s=0.25, lam=1.0)
    (1.8, 1.25)
    """
    return theta - s * (gradient + lam * (theta - w))


def outer_step(w, theta, lr, lam):
    """w − η λ (w − θ̃), tensors of one shape: a step of gradient descent on F_i.

    >>> outer_step(2.0, 1.0, lr=0.1, lam=1.0)
    1.9
    """
    return w - lr * lam * (w - theta)


@for_many
def moreau_step(model, state, batches, inner_steps, s, lr, lam):
    """Step 3 for one mini-batch of ONE client; state: {"w": a model, "theta": a model}. The loss is θ's before it."""
    (batch,), w, theta, losses = batches, state["w"], state["theta"], []
    for _ in range(inner_steps):
        loss, gradient, theta = value_and_slope(model, model_loss, theta, batch)
        theta = _trained(model, lambda t, g, anchor: inner_step(t, g, anchor, s, lam), theta, gradient, w)
        losses.append(loss)
    w = _trained(model, lambda t, old: outer_step(old, t, lr, lam), theta, w)
    return {"w": w, "theta": theta}, losses[0]


def _trained(model, f, tree, *others):
    """f of the corresponding trained leaves of all; what is not trained is that of `tree`."""
    rows = zip(named_leaves(tree), *map(leaves, others), strict=True)
    return like(tree, [t if model.is_buffer(name) else f(t, *rest) for (name, t), *rest in rows])


@dataclass(frozen=True)
class PFedMe:
    paper: ClassVar[str] = "Personalized Federated Learning with Moreau Envelopes (T. Dinh et al., 2020)"
    product: ClassVar[str] = "after"

    lam: float = 15.0  # λ; the released code's and FL-bench's; PFLlib's: 1.0
    inner_steps: int = 5  # K; everybody's
    inner_lr: float = 0.01  # s; PFLlib's and FL-bench's; the released code's: 0.09 for a network
    outer_lr: float | None = None  # η; None: the local learning rate
    server_lr: float = 1.0  # β, which may be above 1; the released code's and FL-bench's

    def __post_init__(self):
        real("lam", self.lam, 0)
        integer("inner_steps", self.inner_steps, 1)
        real("inner_lr", self.inner_lr, 0)
        if self.outer_lr is not None:
            real("outer_lr", self.outer_lr, 0)
        real("server_lr", self.server_lr, 0)
        if self.inner_lr * self.lam >= 2:
            raise ValueError(
                f"inner_lr={self.inner_lr!r}: must be below 2 / lam = {2 / self.lam:g}, or inner steps diverge"
            )

    def server(self, fed):
        w = fed.init()
        beta = [t.new_tensor(1.0 if fed.model.is_buffer(name) else self.server_lr) for name, t in named_leaves(w)]
        return {"w": w, "beta": like(w, beta)}

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        return Shared(server["w"])

    def local(self, clients, kept, message):
        lr = clients.training.lr if self.outer_lr is None else self.outer_lr
        start = {"w": message, "theta": message}
        end = clients.steps(moreau_step, start, self.inner_steps, self.inner_lr, lr, self.lam)
        return end["theta"], end["w"], {"personal": end["theta"], "global": end["w"]}

    def merge(self, server, ids, message, upload, n):
        mean = average(upload, np.ones(len(n)))
        return {**server, "w": lerp(server["w"], mean, server["beta"])}

    def deploy(self, clients, kept, message):
        return {"personal": kept, "global": message}
