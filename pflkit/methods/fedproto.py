"""FedProto: clients with different models share nothing but class means, which they hold their own close to.

Source: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients.
AAAI 2022, doi 10.1609/aaai.v36i8.20819, arXiv 2105.00243.

Client i has a model of its own, an extractor θ_i (elsewhere: r_i) and a head φ_i; all extractors f give representations
in R^r. Round t, for the sampled clients S_t:
    1.  the server sends the global           {(C̄^j, j)}
        prototypes of the classes j it knows
    2.  client i trains all of its model      (θ_i, φ_i) <- SGD on CE + λ R from (θ_i, φ_i), E epochs, where
                                              R = Σ_b ‖f(θ_i; x_b) − C̄^{y_b}‖² / (B r) over a batch of B samples;
        a sample whose class has no global prototype gives 0, and is counted in B
    3.  takes the mean representation of      C_i^j = Σ_{x of class j} f(θ_i; x) / n_i^j
        each class j that it owns
    4.  keeps (θ_i, φ_i), and uploads         {(C_i^j, j)}
    5.  the server takes for each class the   C̄^j = Σ_i C_i^j / |N_j|
        mean over those of S_t that own it, N_j; a class that none of them owns keeps the prototype it had
A sample x is of the class with the nearest global prototype, argmin_j ‖f(θ_i; x) − C̄^j‖, among all classes that have
one; before there is any, so in round 1, the client's own head φ_i serves. In round 1 there is no R either: it is Local.

Travels:   prototypes of r numbers and their labels: of the known classes down, of the client's own classes up.
Keeps:     the client's model (θ_i, φ_i); the server the global prototypes.
Evaluated: θ_i with the newest global prototypes `before` local training, the method's product; the trained θ_i with
           those that it was trained by `after` it.

The nearest prototype is the largest logit of a linear head, `nearest_head`; so models' own heads must be linear layers
with a bias. Test losses are the cross-entropy of those logits, so of −‖z − C̄^j‖²: not what is trained, nor to be
compared with other methods' or round 1's. A test sample of a class without prototype costs 1e30, in the place of
infinity.

Where released code differs, and what we do:
  - To our knowledge (not checked against the text) the paper's regulariser is Σ_j d(C_i^j, C̄^j), d the L2 distance of
    prototypes. yuetan031/FedProto 97e42e2 (2022-05-26), TsingZ0/PFLlib d832e76 (2025-11-29) and KarhouTam/FL-bench
    06e658b (2025-10-09) have the R above, and so do we.
  - How the paper weights clients in step 5 is not known to us; to our knowledge (not checked against the text) it
    prints weights |D_ij| / N_j and a factor 1 / |N_j|, one too many. The released code, PFLlib, FL-bench and
    TsingZ0/HtFLlib e959261 (2026-04-23) take the plain mean, our default; `weighted` takes the mean by numbers of
    samples, which then travel up too, one number a class.
  - The released code takes prototypes while the last epoch trains, PFLlib and FL-bench while all epochs do: of moving
    extractors in training mode; the first two without the last short batch, so that a client without a full one has
    none. Here, as in FedGH, they are those of the extractor that training ends with, in evaluation mode, over all
    samples, whatever the batches.
  - PFLlib's and HtFLlib's servers know only the classes of the last round's clients. Here a class once known stays so.
  - In the released code all clients join every round, and are scored at the end with the last global prototypes, our
    `before`. Where fewer join, `before` scores the others too, whose extractors these prototypes have moved away from.
  - It looks for the nearest prototype among the client's own classes only, and gives those unknown a distance of 100;
    and its counts of correct answers are never reset, from client to client and from head to prototypes. Here all
    known classes can be answered, no other ever is, and each client is counted by itself.
  - Its run with different models ends in an error, as a function returns three values where two are taken.
  - PFLlib scores before the first prototypes as 0. Here the client's own head is scored. Its clients share one dict of
    prototypes, into which reading a missing class writes. Here nothing is shared.
  - FL-bench scores the classifier, never prototypes; it puts features through one more ReLU in training, but not in its
    tests, and skips batches of one sample. Here there is one function for features, and only batch-norm skips those.
  - λ = 1 is the released code's; its README has 0.1 for CIFAR-10, where its ResNet-18 is pretrained, which ours is not.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from pflkit.checks import boolean, real
from pflkit.messages import Rows, Shared
from pflkit.methods.fedavg import model_loss
from pflkit.methods.fedgh import check_heads, class_labels, representations

NEVER = -1e30  # the logit of a class without prototype: no loss of test data is infinite


def distance(z, y, prototypes):
    """R: the mean over samples and dimensions of (z − C̄^y)²; 0 for samples whose class has no prototype.

    z [B, r], y [B]; prototypes: Rows [K, r]. Its slope in z is 2 (z − C̄^y) / (B r).

    >>> known = Rows(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([True, False]))
    >>> distance(torch.tensor([[1.0, 3.0]]), torch.tensor([0]), known)                    # (1 + 4) / 2
    tensor(2.5000)
    >>> distance(torch.tensor([[1.0, 3.0], [9.0, 9.0]]), torch.tensor([0, 1]), known)     # (1 + 4 + 0 + 0) / 4
    tensor(1.2500)
    """
    squares = (z - prototypes.values[y]).square()
    return (squares * prototypes.present[y].unsqueeze(1)).mean()


def global_prototypes(local, weights, last):
    """Step 5: C̄^j = Σ_i w_ij C_i^j / Σ_i w_ij, and the last C̄^j of a class without weight.

    local: Rows [C, K, r]; weights [C, K], 0 where there is no prototype; last, and what it returns: Rows [K, r].

    Client 1 has (1, 0) for class 0, of two samples, client 2 (4, 0) of one, and (0, 3) for class 1:

    >>> local = Rows(torch.tensor([[[1.0, 0], [0, 0]], [[4, 0], [0, 3]]]), torch.tensor([[True, False], [True, True]]))
    >>> none = Rows(torch.zeros(2, 2), torch.tensor([False, False]))
    >>> global_prototypes(local, local.present, none).values.tolist()
    [[2.5, 0.0], [0.0, 3.0]]
    >>> global_prototypes(local, torch.tensor([[2, 0], [1, 1]]), none).values.tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    w = weights.double().unsqueeze(2)
    total, here = w.sum(0), local.present.any(0)
    mean = (w * local.values).sum(0) / total.clamp(min=1)
    return Rows(mean.to(last.values.dtype).where(here.unsqueeze(1), last.values), here | last.present)


def nearest_head(prototypes):
    """A linear head whose largest logit is the nearest prototype's: W = 2 C̄, b = −‖C̄‖².

    For 2 C̄·z − ‖C̄‖² = ‖z‖² − ‖z − C̄‖², where ‖z‖² is the same for all classes. prototypes: Rows [C, K, r].

    >>> head = nearest_head(Rows(torch.tensor([[[1.0, 0.0], [4.0, 0.0]]]), torch.tensor([[True, True]])))
    >>> head["weight"].tolist(), head["bias"].tolist()                    # 8 z_1 − 16 > 2 z_1 − 1 where z_1 > 2.5
    ([[[2.0, 0.0], [8.0, 0.0]]], [[-1.0, -16.0]])
    """
    values, present = prototypes
    return {"weight": 2 * values, "bias": torch.where(present, -values.square().sum(-1), NEVER)}


def serving(model, prototypes):
    """The models (extractor, head) [C, ...] that answer by the nearest prototype; unchanged while there is none."""
    return (model[0], nearest_head(prototypes)) if prototypes.present.any() else model


def regularised_loss(model, params, batch, prototypes, lam):
    """CE + λ R of ONE client, and R to be watched; prototypes: Rows [K, r]."""
    (r, h), (x, y) = params, batch
    z = model.extract(r, x)
    apart = distance(z, y, prototypes)
    return cross_entropy(model.classify(h, z), y) + lam * apart, {"distance": apart}


@dataclass(frozen=True)
class FedProto:
    paper: ClassVar[str] = "FedProto: Federated Prototype Learning across Heterogeneous Clients (Tan et al., 2022)"
    product: ClassVar[str] = "before"  # the client's extractor, and the newest prototypes
    heterogeneous: ClassVar[bool] = True

    lam: float = 1.0  # λ; the released code's
    weighted: bool = False  # prototypes by their numbers of samples

    def __post_init__(self):
        real("lam", self.lam, 0)
        boolean("weighted", self.weighted)

    def server(self, fed):
        check_heads("FedProto", fed)
        weight = fed.init()[1]["weight"]  # [K, r], as the prototypes
        return Rows(torch.zeros_like(weight), torch.zeros(len(weight), dtype=torch.bool, device=weight.device))

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        return Shared((server, class_labels(server)))

    def local(self, clients, kept, message):
        known, _ = message
        if known.present.any():
            model = clients.sgd(regularised_loss, kept, known, self.lam)
        else:
            model = clients.sgd(model_loss, kept)
        means = clients.class_mean(representations, model[0])
        counts = (Rows(clients.class_counts.to(torch.int32), means.present),) if self.weighted else ()
        return model, (means, class_labels(means), *counts), serving(model, known)

    def merge(self, server, ids, message, upload, n):
        means, _, *counts = upload
        return global_prototypes(means, counts[0].values if self.weighted else means.present, server)

    def deploy(self, clients, kept, message):
        return serving(kept, message[0])
