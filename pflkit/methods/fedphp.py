"""FedPHP: FedAvg whose clients each keep a moving average of their own trained models, which teaches the next one.

Source: Li, Zhan, Shao, Li, Song: FedPHP: Federated Personalization with Inherited Private Models. ECML PKDD 2021,
doi 10.1007/978-3-030-86486-6_36. Of the paper we know the abstract only; the round below is that of the authors' code,
lxcnju/FedRepo 617ee01 (2023-03-14), algorithms/fedphp.py.

v_i is client i's inherited private model (HPM), at first w^0. Round t, for the sampled clients S_t:
    1.  the server sends                      w^t
    2.  client i trains all of it, v_i held   θ_i <- SGD on (1 − λ) ℓ + λ R from w^t, E epochs,
        fixed, with cross-entropy ℓ, and      R = MMD²(z, z_v)                         (`regulariser="mmd"`)
        on each batch                         or  −Σ_k softmax(l_v / T)_k log softmax(l)_k, its mean      ("kd")
        where z, l are the representations and logits of θ_i as it is trained, z_v and l_v those of v_i
    3.  takes over what it had                v_i <- μ_i v_i + (1 − μ_i) θ_i,
        with c_i the rounds it had joined     μ_i = min(μ_max c_i / (c T_all), μ_max)
        before, of c T_all that are expected: c is the share of clients that join, T_all the number of all rounds
    4.  keeps v_i and c_i + 1, and uploads    θ_i
    5.  the server averages                   w^{t+1} = Σ n_i θ_i / Σ n_i      (sums over S_t)
In a client's first round μ_i = 0, so v_i becomes its θ_i, and v_i = w^0 is the teacher. With λ = 0 the global model is
FedAvg's. Where the extractor has no parameters, "mmd" is 0.

Travels:   the whole model, down and up, as in FedAvg; v_i never does.
Keeps:     the client's inherited model v_i, with batch-norm its averaged statistics too, and c_i.
Evaluated: v_i `before` steps 2 and 3, as it was kept, and `after` them, the method's product; beside it the global
           model: w^t before, θ_i after.

Where released code differs, and what we do:
  - The authors' scripts try "kd" and "mmd" with λ = 0.1 and 0.05; "mmd" with 0.1, our default, is in all. T = 4, of
    the teacher alone, μ_max = 0.9 and the five kernels of MMD are written in their code.
  - It rounds the expected rounds c T_all down, to 1 at least. Here they are not rounded, and c is the share that really
    joins: of 20 clients at join ratio 0.01 it is one in 20.
  - It trains at least five batches, and bounds each gradient by 100. Here E epochs, and `Training.clip` if set.
  - In its batches of one sample the bandwidth is the squared distance d² of z and z_v itself: R is a constant, and its
    gradient, for which the bandwidth is held fixed, 4.8/d, up to where clipping cuts it. Here R = 0 in such a batch.
  - It casts averaged batch-norm counters back to integers, towards 0. Here they are rounded.
  - It scores v_i, and so do we, but of clients that join only. Probabilities averaged over v_i and θ_i are in its file
    too, and not used.
  - TsingZ0/PFLlib d832e76 (2025-11-29; its clientphp.py as in 487a29e) keeps no moving average: its teacher is the
    global model just received, and its training starts from a mix of that and the client's last model,
    (1 − μ) w^t + μ θ_i, with μ growing by the rounds that passed, whether or not the client joined them.
  - Its λ is 1 by default, with which cross-entropy has weight 0, and its μ is 0. Here λ = 0.1, μ_max = 0.9.
  - Its kernels are exp(−d² / b) with b = 20, 30, 40 and 100, whatever the features; `mmd(x, y, (20, 30, 40, 100))`.
  - Its teacher runs in training mode, and only parameters are copied to it. Here, as in the authors' code, it runs in
    evaluation mode, with its own batch-norm statistics.
  - It scores each client's present model, which for clients that did not join is the global one, and sends that to all
    clients in each round. Here v_i is scored, and only clients that join get anything.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax

from pflkit.checks import choice, real
from pflkit.methods.fedavg import FedAvg, model_loss
from pflkit.trees import tree_map


def bandwidths(d2):
    """b/4, b/2, b, 2b, 4b [5], b the mean of the squared distances d2 [m, m] of m samples from each other (+1e-8).

    >>> bandwidths(torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
    tensor([ 0.7500,  1.5000,  3.0000,  6.0000, 12.0000])
    """
    m = len(d2)
    return (d2.sum() / (m * m - m) + 1e-8) * 2.0 ** torch.arange(-2, 3, dtype=d2.dtype, device=d2.device)


def mmd(x, y, widths=None):
    """MMD² of the rows of x [B, ...] and y [C, ...]: the mean of k(x, x') + k(y, y') − 2 k(x, y), k = Σ_b exp(−d² / b).

    widths: the b; None: `bandwidths` of all rows, which have no gradient.

    >>> mmd(torch.tensor([[0.0]]), torch.tensor([[1.0]]), widths=[1.0])         # 2 (1 − e^(−1))
    tensor(1.2642)
    >>> mmd(torch.tensor([[0.0]]), torch.tensor([[1.0]]))                       # b = 1/4, 1/2, 1, 2, 4
    tensor(6.1863)
    """
    rows, B = torch.cat([x.flatten(1), y.flatten(1)]), len(x)
    rows = rows - rows.mean(0).detach()  # as far from each other as before, and squares as small as can be
    squares = rows.square().sum(1)
    d2 = (squares[:, None] + squares - 2 * rows @ rows.T).clamp(min=0)  # in memory for (B + C)² numbers, not times r
    k = sum(torch.exp(-d2 / b) for b in (bandwidths(d2.detach()) if widths is None else widths))
    return k[:B, :B].mean() + k[B:, B:].mean() - 2 * k[:B, B:].mean()


def soft_cross_entropy(teacher, student, temperature):
    """−Σ_k p_k log q_k of logits [B, K], the mean over samples: p = softmax(teacher / T), held fixed, q of the student.

    >>> soft_cross_entropy(torch.tensor([[4.3944, 0.0]]), torch.zeros(1, 2), 4.0)       # p = (3/4, 1/4); ln 2
    tensor(0.6931)
    """
    p = softmax(teacher.detach() / temperature, 1)
    return -(p * log_softmax(student, 1)).sum(1).mean()


def mmd_loss(model, params, batch, hpm, lam, temperature):
    """(1 − λ) ℓ + λ MMD² of ONE client, and this to be watched; hpm stands still. The temperature is not used.

    Of one sample MMD² is 0 here: the bandwidth would be its own distance d², and the gradient grow with 1/d.
    """
    (r, h), (x, y) = params, batch
    z = model.extract(r, x)
    R = mmd(z, model.extract(hpm[0], x)) if len(x) > 1 else z.new_zeros(())
    return (1 - lam) * cross_entropy(model.classify(h, z), y) + lam * R, {"transfer": R}


def kd_loss(model, params, batch, hpm, lam, temperature):
    """(1 − λ) ℓ + λ times the soft cross-entropy of ONE client, and this to be watched; hpm stands still."""
    x, y = batch
    logits = model.predict(params, x)
    R = soft_cross_entropy(model.predict(hpm, x), logits, temperature)
    return (1 - lam) * cross_entropy(logits, y) + lam * R, {"transfer": R}


def momentum(joined, expected, most=0.9):
    """min(μ_max c_i / (c T_all), μ_max): rounds joined [C], the expected number of them, μ_max -> μ, float64 [C].

    >>> momentum(torch.tensor([0, 50, 100, 200]), expected=100.0).tolist()
    [0.0, 0.45, 0.9, 0.9]
    """
    return (most * joined.double() / expected).clamp(max=most)


def inherited(hpm, model, mu):
    """μ v + (1 − μ) θ, trees [C, ...], mu [C]; exact at μ = 0. Integer leaves (batch-norm's counters) are rounded.

    >>> inherited(torch.tensor([1.0, 8.0]), torch.tensor([3.0, 3.0]), torch.tensor([0.45, 0.0]))
    tensor([2.1000, 3.0000])
    """

    def leaf(old, new):
        kind = old.dtype if old.is_floating_point() else mu.dtype
        mean = torch.lerp(new.to(kind), old.to(kind), mu.to(kind).view(-1, *[1] * (old.ndim - 1)))
        return (mean if old.is_floating_point() else mean.round()).to(old.dtype)

    return tree_map(leaf, hpm, model)


@dataclass(frozen=True)
class FedPHP:
    paper: ClassVar[str] = "FedPHP: Federated Personalization with Inherited Private Models (Li et al., 2021)"
    product: ClassVar[str] = "after"

    lam: float = 0.1  # λ; in the authors' scripts, with 0.05; PFLlib's: 1
    regulariser: str = "mmd"  # or "kd"; both in the authors' scripts
    temperature: float = 4.0  # T of "kd"; the authors' code's
    max_mu: float = 0.9  # μ_max; the authors' code's

    def __post_init__(self):
        real("lam", self.lam, 0, 1)
        choice("regulariser", self.regulariser, ("mmd", "kd"))
        real("temperature", self.temperature, above=0)
        real("max_mu", self.max_mu, 0, 1)

    # But for the local loss, the global model is FedAvg's, and so are these functions.
    server, download, merge = FedAvg.server, FedAvg.download, FedAvg.merge

    def client(self, group):
        joined = torch.zeros(len(group.ids), dtype=torch.int64, device=group.device)
        return {"hpm": group.each_client(group.init()), "joined": joined}

    def local(self, clients, kept, message):
        if self.lam == 0:
            model = clients.sgd(model_loss, message)
        else:
            loss = mmd_loss if self.regulariser == "mmd" else kd_loss
            model = clients.sgd(loss, message, kept["hpm"], self.lam, self.temperature)
        mu = momentum(kept["joined"], clients.join_ratio * clients.rounds, self.max_mu)
        hpm = inherited(kept["hpm"], model, mu)
        return {"hpm": hpm, "joined": kept["joined"] + 1}, model, {"personal": hpm, "global": model}

    def deploy(self, clients, kept, message):
        return {"personal": kept["hpm"], "global": message}
