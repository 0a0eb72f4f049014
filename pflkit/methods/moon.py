"""MOON: FedAvg whose clients keep their representations near the global model's, and away from their own last ones.

Source: Li, He, Song: Model-Contrastive Federated Learning. CVPR 2021, arXiv 2103.16257.

A model is an extractor r and a head h. Round t, for the sampled clients S_t:
    1.  the server sends                      w^t = (r^t, h^t)
    2.  client i trains all of it             θ_i = (r_i, h_i) <- SGD on ℓ + μ ℓ_con from w^t, E epochs
        with cross-entropy ℓ, and             ℓ_con = −log [e^(cos(z, z_g)/τ) / (e^(cos(z, z_g)/τ) + e^(cos(z, z_p)/τ))]
        where a sample's representation is z by r_i as it is trained, z_g by r^t, and z_p by the r_i that the client had
        at the end of its last round, in its first by r^0, the initial one
    3.  keeps r_i, and uploads                θ_i
    4.  the server averages                   w^{t+1} = Σ n_i θ_i / Σ n_i      (sums over S_t)
z_g and z_p stand still: they have no gradient, and their models run in evaluation mode.

Travels:   the whole model, down and up, as in FedAvg.
Keeps:     the extractor r_i of the client's last round, however long ago that was.
Evaluated: w^t `before` local training, the method's product; and θ_i `after` it.

With μ = 0, or where the extractor has no parameters, it is FedAvg, and takes no further passes.

Where released code differs, and what we do:
  - To our knowledge (not checked against the text) the paper's z is the output of a projection head, two layers to 256
    numbers, between extractor and output layer; so it is in QinbinLi/MOON 2f7199e. Here, as in TsingZ0/PFLlib d832e76
    (2025-11-29) and KarhouTam/FL-bench 06e658b (2025-10-09), the model is the same for all methods, and z is the
    extractor's output. Behind a ReLU it has no negative numbers, so that cosines are from 0 to 1 only.
  - In the released code's first round there are no previous models, and ℓ_con = 0; FL-bench takes r^t in a client's
    first round. Here it is r^0. In round 1 all this comes to one: z_g = z_p, ℓ_con is ln 2 and has no gradient.
  - In the released code a client that joins late has random values of its own for a previous model. Here r^0, too.
  - PFLlib runs the previous and the global model in training mode, which moves the statistics of batch-norm. Here, as
    in the released code, in evaluation mode.
  - PFLlib takes exp and log one after the other, which overflows for small τ; here it is one function, which does not.
  - PFLlib's defaults are μ = 0, which is FedAvg, and τ = 1; FL-bench's μ = 5, τ = 0.5. To our knowledge (not checked
    against the text) the paper has μ = 5 for CIFAR-10 and 1 for CIFAR-100 and Tiny-ImageNet, from {0.1, 1, 5, 10}, and
    τ = 0.5. Here they are the released code's: μ = 1, τ = 0.5.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cosine_similarity, cross_entropy

from pflkit.checks import real
from pflkit.methods.fedavg import FedAvg, model_loss


def contrast(z, z_global, z_previous, tau):
    """ℓ_con, the mean over samples; z, z_global, z_previous [B, ...]. Never exp without log, so nothing overflows.

    >>> one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> contrast(one, one, other, tau=0.5)                                           # log(1 + e^(−2))
    tensor(0.1269)
    >>> contrast(one, other, other, tau=0.5)                                         # ln 2
    tensor(0.6931)
    """
    similar = [cosine_similarity(z.flatten(1), fixed.flatten(1)) for fixed in (z_global, z_previous)]
    return cross_entropy(torch.stack(similar, 1) / tau, torch.zeros(len(z), dtype=torch.int64, device=z.device))


def contrastive_loss(model, params, batch, r_global, r_previous, mu, tau):
    """ℓ + μ ℓ_con of ONE client, and ℓ_con to be watched; r_global, r_previous are extractors that stand still."""
    (r, h), (x, y) = params, batch
    z = model.extract(r, x)
    apart = contrast(z, model.extract(r_global, x), model.extract(r_previous, x), tau)
    return cross_entropy(model.classify(h, z), y) + mu * apart, {"contrast": apart}


@dataclass(frozen=True)
class MOON:
    paper: ClassVar[str] = "Model-Contrastive Federated Learning (Li et al., 2021)"
    product: ClassVar[str] = "before"  # the global model

    mu: float = 1.0  # μ; the released code's
    tau: float = 0.5  # τ; the released code's

    def __post_init__(self):
        real("mu", self.mu, 0)
        real("tau", self.tau, above=0)

    # But for the local loss, its rounds are FedAvg's, so these are FedAvg's functions.
    server, download, merge, deploy = FedAvg.server, FedAvg.download, FedAvg.merge, FedAvg.deploy

    def client(self, group):
        return group.each_client(group.init()[0])

    def local(self, clients, kept, message):
        if self.mu == 0 or not message[0]:
            model = clients.sgd(model_loss, message)
        else:
            model = clients.sgd(contrastive_loss, message, message[0], kept, self.mu, self.tau)
        return model[0], model, model
