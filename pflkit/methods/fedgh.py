"""FedGH: clients with different extractors share one header, which the server trains on their class means.

Source: Yi, Wang, Liu, Shi, Yu: FedGH: Heterogeneous Federated Learning with Generalized Global Header. ACM Multimedia
2023, doi 10.1145/3581783.3611781, arXiv 2303.13137.

Client i has an extractor θ_i (elsewhere: r_i) of any architecture; all of them give representations in R^r, for one
linear header φ (elsewhere: the head h) from R^r to the K classes. Round t, for the sampled clients S_t:
    1.  the server sends its header           φ^t
    2.  client i trains both parts jointly    (θ_i, φ_i) <- SGD on f_i from (θ_i, φ^t), E epochs
    3.  takes the mean representation of      z̄_i^s = Σ_{x of class s} f(θ_i; x) / n_i^s
        each class s that it owns
    4.  keeps θ_i, and uploads                {(z̄_i^s, s)}
    5.  the server trains the header, pair    φ <- φ − η_φ ∇_φ CE(h(φ; z̄_i^s), s)
        after pair, which gives               φ^{t+1}
No parameter of an extractor ever travels, so extractors need not have the same shape.

Travels:   the header, rK + K numbers, down; S prototypes of r numbers and their S labels up, S the client's classes.
Keeps:     the client's extractor θ_i.
Evaluated: (θ_i, φ^t) `before` local training, after the header's replacement; (θ_i, φ_i) `after` it.

Where released code differs, and what we do:
  - LipingYi/FedGH ff50ac0 (2023-08-06) never trains the header, in FedGH.py and FedGH_mh.py: no optimizer owns it, and
    the server's step moves the last client's network instead. What it runs is one fixed random header, which replaces
    every client's in each round: ours with `header_lr=0`. Whether the paper's tables came from it is not known.
  - One optimizer and its momentum serve all clients and rounds in FedGH.py, and in the first round of FedGH_mh.py five
    networks serve all clients. Here each client has its own network, and each round's SGD starts anew.
  - It takes the mean of the batches' means, over augmented images. Here z̄ is the mean over the class's samples.
  - It scores participants after local training, our `after`; TsingZ0/PFLlib d832e76 (2025-11-29) scores all clients
    after the header's replacement, our `before`.
  - PFLlib's header is client 0's own head, which that client's training changes; its server takes shuffled batches at
    rate 1.0; its clients leave the last short batch out of their class means, so that one without a full batch uploads
    nothing; and it sends the header to clients that were not sampled, too. Here the header is the server's own, and
    `header_batch_size` and `header_epochs` say how it is trained.
  - The paper's rate η_φ is not known to us; it reports that the rate hardly matters. Ours is the local rate of the
    released code. Nor is φ^1 known: here it is one initial header, the same for all.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import linear, one_hot, softmax

from pflkit.checks import integer, real
from pflkit.messages import Rows, Shared
from pflkit.methods.fedavg import model_loss


def header_step(header, z, y, lr):
    """One SGD step of the header on the mean cross-entropy of prototypes z [B, r] with labels y [B].

    header = {"weight": W [K, r], "bias": b [K]}. With δ = (softmax(W z + b) − onehot(y)) / B:
    W <- W − lr δᵀ z, b <- b − lr Σ δ.

    Client A owns class 0 alone, with z̄ = (1, 0), client B class 1, with (0, 1); φ = 0 and lr = 1:

    >>> zero = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    >>> both = header_step(zero, torch.eye(2), torch.tensor([0, 1]), lr=1.0)
    >>> both["weight"].tolist()
    [[0.25, -0.25], [-0.25, 0.25]]
    """
    W, b = header["weight"], header["bias"]
    delta = (softmax(linear(z, W, b), 1) - one_hot(y.long(), len(b))) / len(y)
    return {"weight": W - lr * delta.T @ z, "bias": b - lr * delta.sum(0)}


def train_header(header, z, y, lr, batch_size=1, epochs=1):
    """The header after steps on batches of the pairs (z [M, r], y [M]), in their order; by default pair after pair."""
    for _ in range(epochs):
        for batch in zip(z.split(batch_size), y.split(batch_size), strict=True):
            header = header_step(header, *batch, lr)
    return header


def representations(model, extractor, x):
    """f(θ; x) [B, r] of ONE client."""
    return model.extract(extractor, x)


def class_labels(prototypes):
    """The classes of Rows of prototypes [C, K, r] or [K, r], as they travel with them: Rows of int32 [C, K] or [K]."""
    classes = torch.arange(prototypes.present.shape[-1], dtype=torch.int32, device=prototypes.present.device)
    return Rows(classes.expand(prototypes.present.shape), prototypes.present)


def check_heads(method, fed):
    """Refuses models whose heads are not linear layers with a bias for equally many features; `method` is its name."""
    for model in (group.model for group in fed.groups):
        head = model.head.module
        if type(head) is not nn.Linear or head.bias is None:
            found = type(head).__name__
            raise ValueError(
                f"model={model.name!r}: {method} needs one linear layer with a bias as the head, not {found}"
            )
        if model.features != fed.model.features:
            raise ValueError(
                f"model={model.name!r}: {method} needs equally many features of all models; this one gives "
                f"{model.features}, {fed.model.name!r} {fed.model.features}"
            )


@dataclass(frozen=True)
class FedGH:
    paper: ClassVar[str] = "FedGH: Heterogeneous Federated Learning with Generalized Global Header (Yi et al., 2023)"
    product: ClassVar[str] = "after"
    heterogeneous: ClassVar[bool] = True

    header_lr: float = 0.01  # η_φ; ours, after the released code's local rate
    header_batch_size: int = 1  # pairs a step: 1 as in the paper; a number no smaller than all pairs: one step
    header_epochs: int = 1

    def __post_init__(self):
        real("header_lr", self.header_lr, 0)
        integer("header_batch_size", self.header_batch_size, 1, 2**31 - 1)
        integer("header_epochs", self.header_epochs, 1)

    def server(self, fed):
        check_heads("FedGH", fed)
        return fed.init()[1]

    def client(self, group):
        return group.each_client(group.init()[0])

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        extractor, header = clients.sgd(model_loss, (kept, message))
        prototypes = clients.class_mean(representations, extractor)
        return extractor, (prototypes, class_labels(prototypes)), (extractor, header)

    def merge(self, server, ids, message, upload, n):
        prototypes, labels = upload
        here = prototypes.present
        pairs = prototypes.values[here], labels.values[here]  # client after client, class after class
        return train_header(server, *pairs, self.header_lr, self.header_batch_size, self.header_epochs)

    def deploy(self, clients, kept, message):
        return kept, message
