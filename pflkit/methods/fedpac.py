"""FedPAC: features are held close to class means that all share, and each client's head is a mix of all clients' heads.

Source: Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration. ICLR 2023,
arXiv 2306.11867. The equations here are those of the authors' code, JianXu95/FedPAC 5770f4f (2023-11-30), which to our
knowledge (not checked against the text) are the paper's.

A model is an extractor θ (elsewhere: r), common to all, and a head φ_i (elsewhere: h_i) of each client i; f gives
features z in R^r. Round t, for the sampled clients S_t:
    1.  the server sends the extractor, the   θ^t, {C̄^c}, φ_i
        prototypes of the classes c it knows,
        and client i's own combined head
    2.  client i describes its own data by    p_c = n_i^c / n_i,  μ_c = mean of f(θ^t; x) over its samples x of class c,
        the features it has on receiving θ^t  h_i[c] = p_c μ_c,
                                              V_i = Σ_c (p_c E_c‖z‖² − p_c² ‖μ_c‖²) / n_i,  E_c‖z‖² over class c
    3.  trains its head, θ^t frozen           φ_i <- SGD on CE from φ_i, E_h epochs, rate η_h
    4.  then the extractor, φ_i frozen        θ_i <- SGD on CE + λ R from θ^t, E epochs, where
                                              R = Σ_b ‖f(θ_i; x_b) − C^{y_b}‖² / (B r) over a batch of B samples, with
        C^c = C̄^c, or μ_c of step 2 for a class that the server does not know; in round 1 it knows none, and R is 0
    5.  takes its prototypes anew             C_i^c = mean of f(θ_i; x) over its samples x of class c
    6.  uploads                               θ_i, φ_i, {(C_i^c, n_i^c)}, h_i, V_i
    7.  the server averages; the n_i, and     θ^{t+1} = Σ n_i θ_i / Σ n_i      (sums over S_t)
        for a class the n_i^c, are weights;   C̄^c = Σ n_i^c C_i^c / Σ n_i^c    (a class that nobody has keeps its own)
    8.  finds for each i how much the heads   α_i = argmin Σ_j α_j² V_j + Σ_c ‖Σ_j α_j (h_i[c] − h_j[c])‖²
        of all j in S_t are worth to it       over α >= 0, Σ_j α_j = 1: variance, and bias
    9.  drops the α_ij below 10⁻³, divides    φ_i = Σ_j α_ij φ_j
        the rest by their sum, and combines
Who was not in S_t keeps its last combined head, which waits at the server, and is what it gets when it next joins; who
joins for the first time gets the initial one.

Travels:   down: the model, and r numbers for each class that the server knows. Up: the model; r numbers and a count for
           each class that the client has, h_i (K·r numbers, K the number of classes), V_i. Not counted: which classes.
Keeps:     the client nothing; the server θ, all clients' heads, and the prototypes.
Evaluated: (θ^t, φ_i) `before` local training, with the combined head; (θ_i, φ_i) `after` it, the method's product.

Heads may be of any kind, and features of any shape (they are taken as vectors); with a head of no layers, whose
features are the logits, it is FedAvg with aligned logits.

Where released code differs, and what we do:
  - The authors' code gives the problem of step 8 to cvxpy; where rounding made an eigenvalue negative, it first drops
    all those below 0.01, small ones that are meant included; where that fails, a client keeps its own head. It calls
    torch.eig, which torch no longer has. Here every problem is solved, by non-negative least squares, after eigenvalues
    below 10⁻¹⁰ of the largest were raised to that.
  - It sends new extractors and prototypes to clients that are not sampled, too, but combines no head for them. Here
    they get nothing, and have no new head either, for the server has no statistics of theirs for this θ.
  - Its prototypes are those of this round's clients alone, and where these lack a class it ends with an error. Here a
    class that nobody has keeps its last prototype.
  - Its scoring leaves the network in evaluation mode, in which it then trains. Here what is trained is in training
    mode, what is frozen, and what gives statistics and prototypes, in evaluation mode.
  - TsingZ0/PFLlib d832e76 (2025-11-29) writes a client's new head over the one it uploaded, from which later clients'
    are still to be combined: of heads 0 and 1, weights of a half make 0.5 and 0.75. Here both are 0.5.
  - It sorts heads in another order than statistics, so that weights meet other clients' heads, and looks a client up
    that keeps its own head by its number, not by its place. Here all is in the order of the clients' numbers.
  - It sets weights below 10⁻³ to 0 and does not divide by the sum of the rest; it averages prototypes without weights;
    and its heads have the extractor's rate. All as in the authors' code here.
  - Its statistics and prototypes leave out each client's last short batch. Here they are of all samples.
  - It leaves features of a class without prototype where they are. Here μ_c holds them, as in the authors' code.
  - It scores all clients before training, our `before`. The authors' code scores before and after it.
  - KarhouTam/FL-bench 06e658b (2025-10-09) counts the head's epoch among the E, which leaves E − 1 to the extractor; it
    fails where a class has neither a global nor a local prototype (its issue 189; not run by us). Here E is the
    extractor's alone, and each class of a client has one of both, for all samples count, whatever the batches.
  - The authors' script: E = 5, batches of 50, rate 0.01, momentum 0.5, weight decay 5·10⁻⁴; these are Training's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from scipy.optimize import nnls
from torch.nn.functional import cross_entropy

from pflkit.checks import integer, real
from pflkit.messages import Rows, Shared
from pflkit.methods.fedproto import distance, global_prototypes
from pflkit.methods.fedrep import extractor_loss, head_loss
from pflkit.trees import average, clone, put, stack, take

FLOOR = 1e-10  # the least eigenvalue of M, in parts of the largest: where M is singular, there is one answer still


def vectors(model, extractor, x):
    """f(θ; x) [B, r] of ONE client."""
    return model.extract(extractor, x).flatten(1)


def moments(model, nothing, z):
    """(z, ‖z‖²) of ONE client's features z [B, ...]: float64 [B, r + 1]."""
    z = z.flatten(1).double()
    return torch.cat([z, z.square().sum(1, keepdim=True)], 1)


def statistics(means, counts):
    """Step 2: (h, V), the h_i[c] = p_c μ_c [C, K, r] and V_i [C], of means (μ_c, E_c‖z‖²) [C, K, r + 1], counts [C, K].

    V_i is never negative: the mean ‖z‖² of a class is no less than ‖μ_c‖², and p_c no less than p_c². With one sample
    it is 0, but for rounding.

    Class 0 has features (1, 0) and (3, 0), class 1 has (0, 2): V = (2/3·5 + 1/3·4 − 16/9 − 4/9) / 3

    >>> h, V = statistics(torch.tensor([[[2.0, 0.0, 5.0], [0.0, 2.0, 4.0]]]), torch.tensor([[2, 1]]))
    >>> h
    tensor([[[1.3333, 0.0000],
             [0.0000, 0.6667]]])
    >>> V
    tensor([0.8148])
    """
    n = counts.sum(1)
    p = counts / n.unsqueeze(1)
    mu, square = means[..., :-1], means[..., -1]
    h = p.unsqueeze(2) * mu
    return h, (p * square - h.square().sum(2)).sum(1).clamp(min=0) / n


def objective(h, V, i):
    """M [C, C], float64, for which αᵀ M α is what client i minimises; h [C, ...], V [C].

    M_jk = ⟨h_i − h_j, h_i − h_k⟩, and V_j more where j = k: Σ_j α_j² V_j + ‖Σ_j α_j (h_i − h_j)‖², multiplied out.
    """
    h = h.double().flatten(1)
    apart = h[i] - h
    return apart @ apart.T + V.double().diag()


def combining_weights(M, least=1e-3):
    """argmin αᵀ M α over α >= 0, Σ α = 1, without those below `least`, unless all are; [C], float64, on the CPU.

    By non-negative least squares, which need no sum: M = Lᵀ L, by its eigenvalues. For β = s α, with s >= 0, Σ α = 1
    and q = αᵀ M α, it is ‖L β‖² + (Σ β − 1)² = s² q + (s − 1)². That is least for s = 1 / (1 + q), where it is
    q / (1 + q), which grows with q. So the β >= 0 that minimises it, the least-squares solution of [L; 1ᵀ] β = [0; 1],
    has the α of the least q, and α = β / Σ β. A factor of M changes no α: the largest eigenvalue is made 1.

    Of two clients: α_11 = (V_2 + δ) / (V_1 + V_2 + δ), with δ = ‖h_1 − h_2‖². Here all V are 1, and δ = 1:

    >>> h, V = torch.tensor([[[0.0]], [[1.0]]]), torch.ones(2)
    >>> [combining_weights(objective(h, V, i)) for i in (0, 1)]
    [tensor([0.6667, 0.3333], dtype=torch.float64), tensor([0.3333, 0.6667], dtype=torch.float64)]
    """
    values, directions = torch.linalg.eigh(M.cpu())
    values = (values / values[-1].clamp(min=torch.finfo(M.dtype).tiny)).clamp(min=FLOOR)
    L = values.sqrt().unsqueeze(1) * directions.T
    ones, goal = L.new_ones(1, len(L)), torch.eye(len(L) + 1, dtype=L.dtype)[-1]
    beta, _ = nnls(torch.cat([L, ones]).numpy(), goal.numpy(), maxiter=100 * len(L))
    alpha = torch.from_numpy(beta / beta.sum())
    large = alpha >= least
    alpha = alpha * large if large.any() else alpha
    return alpha / alpha.sum()


def aligned_loss(model, extractor, batch, head, targets, lam):
    """CE + λ R of ONE client's extractor under its frozen head, and R to be watched; targets: Rows [K, r]."""
    x, y = batch
    z = model.extract(extractor, x)
    apart = distance(z.flatten(1), y, targets)
    return cross_entropy(model.classify(head, z), y) + lam * apart, {"distance": apart}


@dataclass(frozen=True)
class FedPAC:
    paper: ClassVar[str] = (
        "Personalized Federated Learning with Feature Alignment and Classifier Collaboration (Xu et al., 2023)"
    )
    product: ClassVar[str] = "after"

    lam: float = 1.0  # λ; the authors' code's
    head_lr: float = 0.1  # η_h; the authors' code's
    head_epochs: int = 1  # E_h; the authors' code's
    least_weight: float = 1e-3  # α below it are dropped; the authors' code's

    def __post_init__(self):
        real("lam", self.lam, 0)
        real("head_lr", self.head_lr, 0)
        integer("head_epochs", self.head_epochs, 0)
        real("least_weight", self.least_weight, 0, 1)

    def server(self, fed):
        extractor, head = fed.init()
        group, K, r = fed.groups[0], fed.model.classes, fed.model.features
        unknown = torch.zeros(K, r, dtype=fed.dtype, device=fed.device)
        prototypes = Rows(unknown, torch.zeros(K, dtype=torch.bool, device=fed.device))
        return {"extractor": extractor, "prototypes": prototypes, "heads": group.each_client(head)}

    def client(self, group):
        return ()

    def download(self, server, ids):
        return Shared((server["extractor"], server["prototypes"])), take(server["heads"], ids)

    def local(self, clients, kept, message):
        (extractor, known), head = message
        behind, counts = clients.through(extractor), clients.class_counts
        means = behind.class_mean(moments, ())
        h, V = statistics(means.values, counts)
        head = behind.sgd(head_loss, head, lr=self.head_lr, epochs=self.head_epochs, phase="head")
        if known.present.any():
            own = means.values[..., :-1].to(known.values.dtype)
            targets = Rows(known.values.where(known.present.unsqueeze(2), own), known.present | means.present)
            extractor = clients.sgd(aligned_loss, extractor, head, targets, self.lam, phase="extractor")
        else:
            extractor = clients.sgd(extractor_loss, extractor, head, phase="extractor")
        prototypes = clients.class_mean(vectors, extractor)
        counts = Rows(counts.to(torch.int32), prototypes.present)
        h, V = (t.to(known.values.dtype) for t in (h, V))
        return (), (extractor, head, prototypes, counts, h, V), (extractor, head)

    def merge(self, server, ids, message, upload, n):
        extractor, head, prototypes, counts, h, V = upload
        alphas = [combining_weights(objective(h, V, i), self.least_weight) for i in range(len(ids))]
        heads = clone(server["heads"])
        put(heads, ids, stack([average(head, alpha.numpy()) for alpha in alphas]))
        return {
            "extractor": average(extractor, n),
            "prototypes": global_prototypes(prototypes, counts.values, server["prototypes"]),
            "heads": heads,
        }

    def deploy(self, clients, kept, message):
        (extractor, _), head = message
        return extractor, head
