"""FedALA: every client starts from the global model, whose top layers it mixes, element by element, with its own.

Source: Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated Learning.
AAAI 2023, arXiv 2212.01197.

A model is its lower layers r and its p top layers h. Client i keeps its own h_i and weights W_i in [0, 1], one for each
element of h, all 1 at first. Round t, for the sampled clients S_t:
    1.  the server sends                      w^t = (r^t, h^t)
    2.  client i takes r^t as it is, and on a random share s of its samples learns how much of h^t it wants:
                                              ĥ = h_i + (h^t − h_i) ⊙ W
                                              W <- clip(W − η_w ∂L/∂ĥ ⊙ (h^t − h_i), 0, 1)
        one step a batch; the first time until the loss is stable, every later time for one epoch; result W_i
    3.  mixes                                 ĥ_i = h_i + (h^t − h_i) ⊙ W_i
    4.  trains all of it                      (r_i, h_i) <- SGD on f_i from (r^t, ĥ_i), E epochs
    5.  keeps h_i and W_i, and uploads        (r_i, h_i)
    6.  the server averages                   w^{t+1} = Σ n_i (r_i, h_i) / Σ n_i      (sums over S_t)
A client whose h_i is h^t still (all of them in round 1) has nothing to learn in step 2, and does not count it as first.

Travels:   the whole model, down and up, as in FedAvg.
Keeps:     the client's top layers h_i, their weights W_i, and whether it has learned weights before.
Evaluated: (r^t, ĥ_i) `before` local training, after steps 2 and 3; (r_i, h_i) `after` it.

The p top layers are the model's head: build it with `head_layers=p`. The released script's `-p 2` counts tensors, a
weight and a bias: one layer, our default.

Where released code differs, and what we do:
  - TsingZ0/FedALA (a snapshot without a date) and TsingZ0/PFLlib d832e76 (2025-11-29) take a contiguous run of samples
    from a random offset for s. Here they are drawn at random, as the paper says.
  - Their first weight learning ends when the last ten epochs' last-batch losses have a standard deviation below 0.1,
    and may run for ever. Here the mean losses of epochs are taken, and `start_epochs`, which is ours, is the limit.
  - They tell the first round by the sum of differences of the model's first tensor, which can be 0 by chance. Here all
    elements of the head are compared.
  - They run steps 2 and 3 for all clients in every round, and overwrite the models of those not sampled. Here a client
    that is not sampled is not touched.
  - They drop the last short batch. Here it is used (`Training.drop_last` restores that).
  - They score (r^t, ĥ_i), our `before`.
  - KarhouTam/FL-bench 06e658b (2025-10-09) keeps W, and the model it calls local, on a worker that all clients share.
    Here each client has its own.
"""

import statistics
from dataclasses import dataclass
from typing import ClassVar

import torch

from pflkit.checks import integer, real
from pflkit.messages import Shared
from pflkit.methods.fedah import aggregate_head, clip01, weights_loss
from pflkit.methods.fedavg import model_loss
from pflkit.trees import average, full_like, leaves


def stable(losses, epochs=10, threshold=0.1):
    """Have the last `epochs` of more than `epochs` mean losses a standard deviation below `threshold`?

    The rule and both numbers are the released code's, which applies them to the losses of last batches.

    >>> stable([1.0] * 10), stable([1.0] * 11), stable([2.0, 1.0] * 6)
    (False, True, False)
    """
    return len(losses) > epochs and statistics.pstdev(losses[-epochs:]) < threshold


def differ(a, b):
    """Which clients' trees are not the same, element by element: bool [C]."""
    return torch.stack([(x != y).reshape(len(x), -1).any(1) for x, y in zip(leaves(a), leaves(b), strict=True)]).any(0)


@dataclass(frozen=True)
class FedALA:
    paper: ClassVar[str] = "FedALA: Adaptive Local Aggregation for Personalized Federated Learning (Zhang et al., 2023)"
    product: ClassVar[str] = "after"

    weight_lr: float = 1.0  # η_w; the released code's
    share: float = 0.8  # s, of each client's training samples; the released code's
    start_epochs: int = 100  # at most so many when a client first learns weights; ours

    def __post_init__(self):
        real("weight_lr", self.weight_lr, 0)
        real("share", self.share, above=0, high=1)
        integer("start_epochs", self.start_epochs, 1)

    def server(self, fed):
        return fed.init()

    def client(self, group):
        head = group.each_client(group.init()[1])
        never = torch.zeros(len(group.ids), dtype=torch.bool, device=group.device)
        return {"head": head, "W": full_like(head, 1.0), "began": never}

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        keeps, model = self.mix(clients, kept, message)
        model = clients.sgd(model_loss, model)
        return {**keeps, "head": model[1]}, model, model

    def merge(self, server, ids, message, upload, n):
        return average(upload, n)

    def deploy(self, clients, kept, message):
        return self.mix(clients, kept, message)[1]

    def watch(self, server, kept):
        return {"W": kept["W"]}

    def mix(self, clients, kept, message):
        """Steps 2 and 3: what the client then keeps, and the mixed model. As in FedAH, W's step is plain, unclipped."""
        extractor, h_global = message
        heads = kept["head"], h_global
        apart = differ(*heads) if leaves(h_global) else kept["began"] & False  # without top layers it is FedAvg
        epochs = torch.where(kept["began"], 1, self.start_epochs) * apart
        rule = {"lr": self.weight_lr, "epochs": epochs.tolist(), "momentum": 0, "weight_decay": 0, "clip": None}
        some = clients.part(self.share, "weights").through(extractor)  # in `deploy` the same samples, so the same W
        W = some.sgd(weights_loss, kept["W"], *heads, project=clip01, phase="weights", until=stable, **rule)
        return {"W": W, "began": kept["began"] | apart}, (extractor, aggregate_head(*heads, W))
