"""FedAMP: the server sends each client a mix of all clients' models, in which similar ones weigh more.

Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data. AAAI 2021,
arXiv 2007.03797.

It lowers Σ_i f_i(w_i) + λ Σ_{i<j} A(‖w_i − w_j‖²) with A(x) = 1 − e^(−x/σ), by a step on the second sum at the server
and a proximal step on the first at the clients (α takes in the 2 of the derivative of ‖w_i − w_j‖²). The server keeps
all N clients' models w_i. Round k, for the sampled clients:
    1.  the server weighs the other models    ξ_ij = α A'(‖w_i − w_j‖²) = α/σ e^(−‖w_i − w_j‖²/σ)   for j ≠ i
        and the client's own                  ξ_ii = 1 − Σ_{j≠i} ξ_ij
    2.  mixes and sends                       u_i = Σ_j ξ_ij w_j                        (all N models, as last known)
    3.  client i trains all of it, held back  w_i <- SGD on f_i(w) + λ/(2α) ‖w − u_i‖² from u_i, E epochs
    4.  and uploads                           w_i
`weights="heuristic"` is HeurFedAMP: instead of step 1, ξ_ii is fixed (`self_weight`), and for j ≠ i
                                              ξ_ij = (1 − ξ_ii) softmax_j(σ cos(w_i, w_j))

Travels:   a whole model, down and up.
Keeps:     the client's model w_i. The server keeps it too, with those of all others.
Evaluated: what training starts from, u_i, `before` local training; w_i `after` it, the method's product.

Norms and cosines are over trained parameters; batch-norm's statistics are mixed by ξ like the rest.

The defaults of α, λ and σ are ours, no paper's. They were chosen in trials on digits (20 clients, an MLP and a small
CNN, 20 and 30 rounds) in which test accuracies were seen: there FedAMP has been tuned, elsewhere it has not.
‖w_i − w_j‖² grows with the learning rate, the rounds and the model, so before FedAMP is compared, tune σ and α to it;
`watch` records the weights. The least ξ_ii is that of equal models, 1 − (N − 1) α/σ: by default 0.37 with 20 clients,
and 0 with 31 and more, who then start from others' models only.

Where released code differs, and what we do:
  - If α Σ A' > 1, the formula gives ξ_ii < 0, and u_i is no average: −18 for 20 equal models, α = σ = 1. TsingZ0/PFLlib
    d832e76 (2025-11-29), WwZzz/easyFL 0bc05fd (FLGo's version) and FLAIR-Community/Fling f8dfd56 go on with that. Here
    the row's ξ_ij are divided by their sum, so that ξ_ii = 0; this is ours, and no matter where models are equal, as
    all are at first.
  - PFLlib's proximal term has no gradient, so its FedAMP is Local whatever α, λ and σ. Here it has.
  - Where SGD for step 3 starts is not known to us: from u_i in FLGo's version, from the client's last w_i in PFLlib's
    and Fling's. `start="own"` gives this; then w_i is also what is evaluated `before`, and meets u_i only through λ/α.
  - FLGo's version and Fling have λ = 1 and α = 10⁴, times 0.1 every 30 rounds, and σ = 25 and 100. To our knowledge
    (not checked against the text) the paper has the same λ and α. With λ/α = 10⁻⁴ a few epochs feel no pull, and with
    α/σ that large ξ_ii is 0 unless models are far apart. PFLlib has α = λ = σ = 1. Here α is constant, by default 0.1.
  - PFLlib mixes the models of those only that join a round, and fails where their number varies. Here everybody's, as
    the clients last sent them; who has never joined still has the initial model, and weighs as such.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pflkit.checks import choice, real
from pflkit.methods.fedapa import rows
from pflkit.methods.fedavg import model_loss
from pflkit.trees import clone, leaves, put, repeat, tree_map


def products(models, trained):
    """G_ij = <w_i, w_j> of models [N, ...], in float64: [N, N]. trained: for each leaf, whether it counts."""

    def leaf(t, counts):
        return rows(t).double() @ rows(t).double().T if counts else 0

    return sum(leaves(tree_map(leaf, models, trained)))


def attention(G, alpha, sigma):
    """Step 1: ξ [N, N] from the products G. Rows of others whose sum is above 1 are divided by it.

    >>> attention(torch.tensor([[0.0, 0.0], [0.0, 1.0]]), alpha=0.5, sigma=1.0)      # w = 0 and 1: ½ e^(−1)
    tensor([[0.8161, 0.1839],
            [0.1839, 0.8161]])
    """
    square = G.diag()
    apart = (square[:, None] + square - 2 * G).clamp(min=0)  # ‖w_i − w_j‖²
    others = (alpha / sigma * torch.exp(-apart / sigma)).fill_diagonal_(0)
    total = others.sum(1)
    return others / total.clamp(min=1)[:, None] + (1 - total).clamp(min=0).diag()


def heuristic(G, sigma, self_weight):
    """HeurFedAMP's ξ [N, N] from the products G. One client alone has the weight 1.

    >>> heuristic(torch.eye(3), sigma=1.0, self_weight=0.5)                          # three orthogonal models
    tensor([[0.5000, 0.2500, 0.2500],
            [0.2500, 0.5000, 0.2500],
            [0.2500, 0.2500, 0.5000]])
    """
    norm = G.diag().sqrt().clamp(min=1e-12)
    cosine = (G / norm / norm[:, None]).fill_diagonal_(-torch.inf)
    others = (1 - self_weight) * torch.softmax(sigma * cosine, 1).nan_to_num()
    return others + (1 - others.sum(1)).clamp(min=0).diag()


def mix(xi, models, ids):
    """Step 2 for the clients `ids`: u [C, ...] = ξ W; xi [N, N] in float64, models W [N, ...]. Integers are rounded.

    As w_i + Σ_j ξ_ij (w_j − w_i), in float64: equal models, and weights that are 1 and 0, give w_i to the bit.

    >>> xi = torch.tensor([[0.75, 0.25], [0.25, 0.75]], dtype=torch.float64)
    >>> mix(xi, {"w": torch.tensor([0.0, 1.0])}, [0, 1])["w"]
    tensor([0.2500, 0.7500])
    """

    def leaf(t):
        w = rows(t).double()
        apart = w - w[0]  # from any one model, for each row of ξ sums to 1
        u = w[ids] + (xi[ids] @ apart - apart[ids])
        return (u if t.is_floating_point() else u.round()).to(t.dtype).view(len(ids), *t.shape[1:])

    return tree_map(leaf, models)


@dataclass(frozen=True)
class FedAMP:
    paper: ClassVar[str] = "Personalized Cross-Silo Federated Learning on Non-IID Data (Huang et al., 2021)"
    product: ClassVar[str] = "after"

    alpha: float = 0.1  # α (in the paper α_k); ours, chosen on digits, see above
    lam: float = 0.01  # λ; ours, chosen on digits, see above
    sigma: float = 3.0  # σ; ours, as these. With "attention" less is more selective, with "heuristic" more is
    weights: str = "attention"  # or "heuristic": HeurFedAMP
    self_weight: float = 0.5  # ξ_ii of the heuristic; ours
    start: str = "sent"  # training starts from u_i, or "own": from the client's last w_i

    def __post_init__(self):
        real("alpha", self.alpha, above=0)
        real("lam", self.lam, 0)
        real("sigma", self.sigma, above=0)
        choice("weights", self.weights, ("attention", "heuristic"))
        real("self_weight", self.self_weight, 0, 1)
        choice("start", self.start, ("sent", "own"))
        real("lam / alpha", self.lam / self.alpha)
        real("alpha / sigma", self.alpha / self.sigma)

    def server(self, fed):
        # Which leaves are trained: products are over these. It never changes.
        trained = tuple({name: torch.tensor(name not in fed.model.buffers) for name in part} for part in fed.init())
        return {"models": repeat(fed.init(), fed.num_clients), "trained": trained}

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        return mix(self.xi(server), server["models"], ids)

    def local(self, clients, kept, message):
        start = self.deploy(clients, kept, message)
        model = clients.sgd(model_loss, start, pull=(message, self.lam / self.alpha))  # adds λ/α (w − u_i)
        return model, model, model

    def merge(self, server, ids, message, upload, n):
        models = clone(server["models"])
        put(models, ids, upload)
        return {**server, "models": models}

    def deploy(self, clients, kept, message):
        return message if self.start == "sent" else kept

    def watch(self, server, kept):
        xi = self.xi(server).float()  # the last bits of float64 depend on where in memory the models are
        own = torch.eye(len(xi), dtype=torch.bool, device=xi.device)
        return {"ξ_ii": xi[own], "ξ_ij": xi[~own]}

    def xi(self, server):
        """The weights ξ [N, N] of all clients, in float64."""
        G = products(server["models"], server["trained"])
        if self.weights == "attention":
            return attention(G, self.alpha, self.sigma)
        return heuristic(G, self.sigma, self.self_weight)
