"""DBE: FedAvg whose clients add a private bias to each representation, and hold their mean near one that all agree on.

Source: Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan: Eliminating Domain Bias for Federated Learning in Representation
Space. NeurIPS 2023, arXiv 2311.14975 (there FedAvg+DBE). Of the paper we know the abstract and summaries only; the
round below is that of the authors' code, TsingZ0/DBE 193f435 (2025-03-27), but for what is listed at the end.

A model is an extractor θ, of representations in R^r, and a linear head φ = (W, b). Client i has a private vector p_i of
r numbers, the personalized representation bias memory (PRBM), at first 0. Round 1 is for statistics, and for all
clients, whatever the join ratio:
    1.  the server sends                      w^1 = (θ^1, φ^1)
    2.  client i trains it, as in FedAvg,     w' <- SGD on f_i from w^1, E epochs
    3.  takes its mean representation, and    z̄_i = Σ_x f(θ'; x) / n_i      over its own samples x
        forgets w'; it uploads                z̄_i
    4.  the server averages, once for all     z̄ = Σ n_i z̄_i / Σ n_i,   and keeps   w^2 = w^1
Round t > 1, for the sampled clients S_t:
    1.  the server sends                      w^t, and z̄ to those that have not had it yet
    2.  client i trains all of it, and p_i    (θ_i, φ_i, p_i) <- SGD from (θ^t, φ^t, p_i), E epochs, for each batch on
                                              mean CE(W (f(θ; x) + p) + b, y) + κ/r Σ_d ½ (m_d − z̄_d)²
        with the mean regularization (MR)     m = Σ_j (1 − μ)^(J−j) z̄_j / Σ_j (1 − μ)^(J−j)
        of a moving mean m of the means z̄_j of f(θ; x) over this round's batches so far, j = 1 ... J; only the newest,
        z̄_J, has a gradient. With μ = 1, m is z̄_J
    3.  keeps p_i, and uploads                (θ_i, φ_i)
    4.  the server averages                   w^{t+1} = Σ n_i (θ_i, φ_i) / Σ n_i      (sums over S_t)
With κ = 0 no z̄ is needed: there is no round for statistics, and round 1 is like the others. With `bias=False`, too,
p_i stays 0, and it is FedAvg.

Travels:   in round 1 the model down, r numbers up; then the whole model down and up, and once to each client r numbers
           down. p_i never does.
Keeps:     the client's p_i, and z̄.
Evaluated: (θ^t, φ^t) with the client's own p_i `before` local training, the method's product; (θ_i, φ_i) with the new
           p_i `after` it; in round 1, w^1 and w'. They are plain models: W (z + p) + b is a head with the bias b + W p.

Where released code differs, and what we do:
  - Its statistics come before the first round, and are sent without being counted. Here they are a round, as long and
    as costly as another, and counted; all clients take part in it, as there.
  - Its z̄_i is its moving mean at the end of step 2, in training mode: with μ = 1 that of the last batch, so of ten
    samples. Here it is the mean over all samples of the extractor that step 2 ends with, in evaluation mode.
  - It starts m at 0 without correction: after J batches the weights sum to 1 − (1 − μ)^J, 0.65 for μ = 0.1 and J = 10,
    so that MR pulls a mean that is too small. Here they sum to 1. It is the same for μ = 1, and both start anew in
    each round.
  - A client with less than a full batch has no representations from which to learn r, and ends the run; each epoch's
    last short batch is dropped. Here all samples are trained on, and counted in z̄_i.
  - Its flags are κ = 0, which is no MR, and μ = 0.1; its script for Fashion-MNIST has κ = 50 and μ = 1, as we do.
    Values for other data are not known to us. Their r is 512; as MR divides by r, a model with r = 64 is pulled eight
    times as hard by the same κ, and may need less.
  - p_i has an optimizer of its own, with the same rate. Here it is trained like θ and φ: with `Training`'s momentum,
    weight decay and clip, where those are set.
  - It scores every client by w^t and p_i at the beginning of the round, our `before`. So does TsingZ0/PFLlib d832e76
    (2025-11-29), and both send w^t to clients that do not join. Here it passes only to those that do.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy

from pflkit.checks import boolean, real
from pflkit.messages import Rows, Shared
from pflkit.methods.fedavg import model_loss
from pflkit.methods.fedgh import check_heads, representations
from pflkit.trees import average


def moving_mean(m, s, batch_mean, mu):
    """(m, s) after one more batch, of mean z̄ [r]: s <- (1 − μ) s + μ, then m <- m + μ/s (z̄ − m); at first both are 0.

    s, a scalar, is the sum of the batches' weights, and m [r] their weighted mean. Means 4, then 1, with μ = ½, have
    weights ¼ and ½: (¼ 4 + ½ 1) / ¾.

    >>> first = moving_mean(torch.zeros(1), torch.tensor(0.0), torch.tensor([4.0]), 0.5)
    >>> first, moving_mean(*first, torch.tensor([1.0]), 0.5)
    ((tensor([4.]), tensor(0.5000)), (tensor([2.]), tensor(0.7500)))
    """
    s = (1 - mu) * s + mu
    return torch.lerp(m, batch_mean, mu / s), s


def regularization(m, target):
    """Σ_d ½ (m_d − z̄_d)² / r, of m [r] and z̄ [r].

    >>> regularization(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0]))      # (½ + 2) / 2
    tensor(1.2500)
    """
    return (m - target).square().mean() / 2


def dbe_loss(model, params, batch, target, kappa, mu):
    """The loss of step 2 of ONE client, and MR to be watched; params = (θ, φ, {p}, {m, s}), the last not trained."""
    (r, h, private, memory), (x, y) = params, batch
    z = model.extract(r, x)
    loss = cross_entropy(model.classify(h, z + private["p"]), y)
    if kappa == 0:
        return loss
    m, s = moving_mean(memory["m"].clone(), memory["s"], z.mean(0, dtype=memory["m"].dtype), mu)
    memory["m"].copy_(m.detach()), memory["s"].copy_(s)
    apart = regularization(m, target)
    return loss + kappa * apart, {"apart": apart}


def folded(params, p):
    """(extractor, head) of C clients, with the bias b + W p for b: weight [C, K, r], bias [C, K], p [C, r].

    >>> head = {"weight": torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), "bias": torch.zeros(1, 2)}
    >>> folded(({}, head), torch.tensor([[0.5, -1.0]]))[1]["bias"]
    tensor([[ 0.5000, -2.0000]])
    """
    r, h = params
    return r, {**h, "bias": h["bias"] + (h["weight"] * p[:, None]).sum(2)}


@dataclass(frozen=True)
class DBE:
    paper: ClassVar[str] = "Eliminating Domain Bias for Federated Learning in Representation Space (Zhang et al., 2023)"
    product: ClassVar[str] = "before"  # the global model, with the client's bias

    kappa: float = 50.0  # κ; the released script's, for Fashion-MNIST; its flag: 0
    mu: float = 1.0  # μ; the released script's; its flag: 0.1
    bias: bool = True  # PRBM; False: p_i stays 0

    def __post_init__(self):
        real("kappa", self.kappa, 0)
        real("mu", self.mu, above=0, high=1)
        boolean("bias", self.bias)

    def server(self, fed):
        check_heads("DBE", fed)
        model = fed.init()
        owed = torch.zeros(fed.num_clients, dtype=torch.bool, device=fed.device)  # who has not had z̄ yet
        return {"model": model, "mean": model[1]["weight"].new_zeros(fed.model.features), "owed": owed}

    def client(self, group):
        zero = torch.zeros(len(group.ids), group.model.features, dtype=group.dtype, device=group.device)
        return {"p": zero, "mean": zero.clone()}

    def joins(self, round, sampled, everyone):
        return everyone if self.is_first(round) else sampled

    def is_first(self, round):
        """Whether it is the round for statistics."""
        return round == 1 and self.kappa > 0

    def download(self, server, ids):
        owed = server["owed"][torch.as_tensor(ids, device=server["owed"].device)]
        mean = Rows(server["mean"].expand(len(ids), 1, -1), owed[:, None])
        return {"model": Shared(server["model"]), "mean": mean}

    def local(self, clients, kept, message):
        if self.is_first(clients.round):
            model = clients.sgd(model_loss, message["model"])
            of_classes, counts = clients.class_mean(representations, model[0]).values, clients.class_counts
            shares = counts.to(of_classes.dtype) / counts.sum(1, keepdim=True)
            return kept, {"mean": (shares[:, :, None] * of_classes).sum(1)}, folded(model, kept["p"])
        mean = torch.where(message["mean"].present, message["mean"].values[:, 0], kept["mean"])
        memory = {"m": torch.zeros_like(mean), "s": mean.new_zeros(len(mean))}
        start = (*message["model"], {"p": kept["p"]}, memory)
        still = (3,) if self.bias else (2, 3)
        *model, private, _ = clients.sgd(dbe_loss, start, mean, self.kappa, self.mu, unmoved=still)
        return {**private, "mean": mean}, {"model": tuple(model)}, folded(model, private["p"])

    def merge(self, server, ids, message, upload, n):
        if "mean" in upload:
            return {**server, "mean": average(upload["mean"], n), "owed": torch.ones_like(server["owed"])}
        owed = server["owed"].clone()
        owed[torch.as_tensor(ids, device=owed.device)] = False
        return {"model": average(upload["model"], n), "mean": server["mean"], "owed": owed}

    def deploy(self, clients, kept, message):
        return folded(message["model"], kept["p"])
