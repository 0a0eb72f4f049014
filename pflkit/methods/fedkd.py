"""FedKD: a private teacher and a shared student teach each other; the student's updates travel as low-rank factors.

Source: Wu, Wu, Lyu, Huang, Xie: Communication-efficient federated learning via knowledge distillation. Nature
Communications 2022, doi 10.1038/s41467-022-29763-x, arXiv 2108.13323.

The paper's text was not at hand: the losses and the compression below are the paper's to our knowledge (not checked
against the text), and so is that T grows linearly.

Client i has a teacher Θ_i (elsewhere: mentor, or the local model) of any architecture, with representations z_t in
R^{r_t}. All have copies of one student w (elsewhere: mentee), with z_s in R^{r_s}; W_i [r_t, r_s] maps those to the
teacher's space. p_t and p_s are the two models' distributions over the classes. Round t of R, for the sampled clients
S_t, with the share of energy T = T_start + (T_end − T_start) t / R:
    1.  the server sends its last update      Δ^{t-1}, in the form of step 4; but to a client that was not in S_{t-1}
                                              w^t itself
    2.  client i has                          w^t = w^{t-1} + Δ^{t-1}
    3.  trains all three at once              (Θ_i, w_i, W_i) <- SGD on L_t + L_s from (Θ_i, w^t, W_i), E epochs:
                                              L_t = CE_t + (KL(p_s ‖ p_t) + H) / A,   A = CE_t + CE_s,
                                              L_s = CE_s + (KL(p_t ‖ p_s) + H) / A,   H = MSE(z_t, W_i z_s),
        where L_t moves the teacher only, L_s the student and W_i only, and A nothing
    4.  keeps Θ_i, W_i and w^t, and uploads   Δ_i = w_i − w^t, each of its matrices [m, n] as U_k, σ_k, V_k: the
                                              smallest k with Σ_{j<=k} σ_j² >= T Σ σ_j²
    5.  the server averages                   Δ^t = Σ n_i Δ_i / Σ n_i      (sums over S_t), compresses that as well,
        and does with the result as its clients will: w^{t+1} = w^t + Δ^t, the same to the bit
The kernels [m, c, h, w] of a convolution are one matrix [m, c h w]. What has fewer than two dimensions (biases,
batch-norm's statistics) or is of integers travels as it is, and so does a matrix whose factors would be no shorter.

Travels:   Σ_matrices min(k (m + n + 1), m n) + Σ_others numel numbers up, and the same down to those in S_{t-1}, and to
           all in round 1, when the update is 0; the whole student down to others.
Keeps:     the client's teacher Θ_i, its map W_i, and w^t, the student as it was last received.
Evaluated: the teacher Θ_i `before` local training, which the message does not change; and `after` it.

Where released code differs, and what we do:
  - wuch15/FedKD 9b9e63f (2022-07-18), TsingZ0/PFLlib d832e76 (2025-11-29) and TsingZ0/HtFLlib e959261 (2026-04-23) look
    for k among less than all; where all are needed, they send zeros. Here k may be all, and is at T = 1.
  - wuch15/FedKD multiplies U by the vector σ as a product of matrices, which fails unless m = k. Here: U diag(σ) V.
  - Its one loss detaches neither A, so that a larger CE is rewarded, nor the distributions taught, and teacher and
    student share an encoder; its demonstration trains on ten batches only. Here they share nothing, and every batch is
    trained on.
  - PFLlib sends parameters, not updates, and decomposes each h x w kernel apart, with one k for all, which makes most
    of them longer; it tells factors from a tensor by len(x) == 3, which a bias of three classes has too; and the first
    client unpacks the message that all share. Here k is of one matrix, and factors are known by being shorter than it.
  - It adds H to both losses and back-propagates it twice into both models; divides the KL by the number of classes;
    averages over clients, not samples; and clips gradients at 10. Here `Training.clip` bounds those of Θ_i, w_i and W_i
    each by itself, if set.
  - In its first round it sends nothing, for all have one initial student; here the update 0, whose matrices have k = 0.
  - Who missed a round has no w^{t-1}. What is done then is not known to us; it gets w^t here, and that is counted.
  - H is of the last representations, those the heads see, a mean over samples and r_t; the paper's is also of attention
    maps, which our models lack. W_i is the identity at first, cut to [r_t, r_s] (ours).
  - Where both models are right to the last bit A is 0, and 0 / 0 is no number: here A is never taken below LEAST
    (ours). A small A makes H's steps long: released code trains by Adam, ours by SGD; a smaller rate or `clip` helps.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy, linear, mse_loss, pad

from pflkit.checks import choice, real
from pflkit.messages import Rows
from pflkit.methods.fml import divergence
from pflkit.models import MODELS
from pflkit.trees import average, row, stack, tree_map

LEAST = 1e-8  # of A; ours


def mutual_losses(logits_t, logits_s, hidden_t, hidden_s, y):
    """(L_t, L_s) of ONE client's batch: logits [B, K], hidden_t = z_t and hidden_s = W z_s [B, r_t], labels y [B].

    p_t = (3/4, 1/4) and p_s = (1/2, 1/2): A = ln 4/3 + ln 2 = ln 8/3, KL(p_s ‖ p_t) = ln(4/3) / 2; H = 2, so that
    L_t = ln 4/3 + (ln(4/3) / 2 + 2) / ln 8/3:

    >>> logits, hidden = torch.tensor([[[3.0, 1.0]], [[1.0, 1.0]]]).log(), torch.tensor([[[1.0, 2.0]], [[1.0, 0.0]]])
    >>> [round(float(loss), 4) for loss in mutual_losses(*logits, *hidden, torch.tensor([0]))]
    [2.4734, 2.8656]
    """
    ce_t, ce_s = cross_entropy(logits_t, y), cross_entropy(logits_s, y)
    A = (ce_t + ce_s).detach().clamp(min=LEAST)
    loss_t = ce_t + (divergence(logits_s, logits_t) + mse_loss(hidden_t, hidden_s.detach())) / A
    loss_s = ce_s + (divergence(logits_t, logits_s) + mse_loss(hidden_s, hidden_t.detach())) / A
    return loss_t, loss_s


def fedkd_loss(pair, params, batch):
    """L_t + L_s of ONE client, and each of them; params = (teacher, student, W [r_t, r_s])."""
    (r_t, h_t), (r_s, h_s), W = params
    x, y = batch
    z_t, z_s = pair.own.extract(r_t, x), pair.shared.extract(r_s, x)
    logits = pair.own.classify(h_t, z_t), pair.shared.classify(h_s, z_s)
    loss_t, loss_s = mutual_losses(*logits, z_t.flatten(1), linear(z_s.flatten(1), W), y)
    return loss_t + loss_s, {"teacher": loss_t, "student": loss_s}


def rank(s, energy):
    """The smallest k with Σ_{j<=k} s_j² >= energy · Σ s_j², of singular values s [K], the largest first.

    At energy 1 it is the number of those that are not 0: a sum of floats is whole before its last terms.

    >>> s = torch.tensor([3.0, 1.0])  # energies 9 and 10
    >>> rank(s, 0.9), rank(s, 0.95), rank(s, 1.0), rank(0 * s, 0.9), rank(torch.tensor([10.0, 1.0]), 0.95)
    (1, 2, 2, 0, 1)
    """
    if energy >= 1:
        return int((s > 0).sum())
    sums = (s.double() ** 2).cumsum(0)
    return int((sums < energy * sums[-1]).sum()) + int(s[0] > 0)


def compress(matrix, energy):
    """The factors (u_j, σ_j, v_j) [k, m + 1 + n] of a matrix [m, n] that hold this share of its energy.

    With the sign of u_j and v_j, which is nobody's but the library's, such that u_j's largest number is positive.
    """
    U, s, V = torch.linalg.svd(matrix, full_matrices=False)
    k, signs = rank(s, energy), U.gather(0, U.abs().argmax(0, keepdim=True)).sign().T
    return torch.cat([signs * U.T, s[:, None], signs * V], 1)[:k]


def restore(factors, m):
    """Σ_j σ_j u_j v_jᵀ [m, n] of factors [k, m + 1 + n].

    >>> restore(torch.tensor([[0.6, 0.8, 5.0, 1.0, 0.0, 0.0]]), 2).tolist()
    [[3.0, 0.0, 0.0], [4.0, 0.0, 0.0]]
    """
    V = factors[:, m + 1 :].clone()  # in memory of its own, for the last bits of a product may depend on where it lies
    return (factors[:, :m] * factors[:, m : m + 1]).T @ V


def pack(change, energy):
    """What travels of ONE tensor's change, as Rows of numbers [numel]: a matrix's factors if shorter, else itself.

    >>> packed = pack(torch.outer(torch.arange(4.0), torch.arange(5.0)), 0.9)  # u, σ and v are 4 + 1 + 5 numbers of 20
    >>> packed.values.shape, int(packed.present.sum())
    (torch.Size([20]), 10)
    """
    sent = change.reshape(-1)
    if change.ndim > 1 and change.is_floating_point():
        factors = compress(change.reshape(len(change), -1), energy)
        sent = factors.reshape(-1) if factors.numel() < sent.numel() else sent
    numel = change.numel()
    return Rows(pad(sent, (0, numel - len(sent))), torch.arange(numel, device=change.device) < len(sent))


def unpack(packed, shape):
    """The change of this shape that was packed: the same numbers, to the bit, from whatever copy of them."""
    sent = packed.values[: int(packed.present.sum())]
    if len(sent) == len(packed.values):
        return sent.reshape(shape).clone()
    m, n = shape[0], shape[1:].numel()
    return restore(sent.view(-1, m + 1 + n), m).view(shape)


@dataclass(frozen=True)
class FedKD:
    paper: ClassVar[str] = "Communication-efficient federated learning via knowledge distillation (Wu et al., 2022)"
    product: ClassVar[str] = "after"
    heterogeneous: ClassVar[bool] = True

    student: str = ""  # the student's architecture, a bundled model; "": the smallest of the clients' own
    energy_start: float = 0.95  # T_start; the released code's, as is T_end
    energy_end: float = 0.98  # T_end

    def __post_init__(self):
        choice("student", self.student, ["", *MODELS])
        real("energy_start", self.energy_start, above=0, high=1)
        real("energy_end", self.energy_end, above=0, high=1)

    def energy(self, round, rounds):
        """T in a round, counted from 1."""
        return self.energy_start + (self.energy_end - self.energy_start) * round / rounds

    def server(self, fed):
        student = fed.second(self.student)
        for model in (student, *(group.model for group in fed.groups)):
            if model.vocabulary is not None and not model.init()[0]:
                raise ValueError(f"model={model.name!r}: FedKD needs layers in the extractor of a model of ids")
        start = fed.init(student)
        return {
            "student": start,
            "update": tree_map(lambda t: pack(torch.zeros_like(t), 1.0), start),
            "joined": torch.ones(fed.num_clients, dtype=torch.bool, device=fed.device),  # in the last round
            "energy": torch.ones((), dtype=torch.float64),
        }

    def client(self, group):
        shared = group.second(self.student)
        W = torch.eye(group.model.features, shared.features, dtype=group.dtype, device=group.device)
        return group.each_client({"teacher": group.init(), "student": group.init(shared), "W": W})

    def begin(self, server, round, rounds):
        return {**server, "energy": torch.full_like(server["energy"], self.energy(round, rounds))}

    def download(self, server, ids):
        joined = server["joined"][torch.as_tensor(ids, device=server["joined"].device)][:, None]

        def leaf(student, update):
            return Rows(torch.where(joined, update.values, student.reshape(-1)), update.present | ~joined)

        told = Rows(torch.zeros(*joined.shape, 0, device=joined.device), joined)  # an update? A row of no numbers
        return told, tree_map(leaf, server["student"], server["update"])

    def local(self, clients, kept, message):
        C, energy = range(len(clients.ids)), self.energy(clients.round, clients.rounds)

        def follow(i):
            old, (told, sent) = row(kept["student"], i), row(message, i)
            if told.present:
                return tree_map(lambda w, change: w + unpack(change, w.shape), old, sent)
            return tree_map(lambda w, whole: whole.values.view_as(w), old, sent)

        start = stack([follow(i) for i in C])
        both = clients.beside(clients.second(self.student))
        teacher, student, W = both.sgd(fedkd_loss, (kept["teacher"], start, kept["W"]))
        change = tree_map(torch.sub, student, start)
        upload = stack([tree_map(lambda t: pack(t, energy), row(change, i)) for i in C])
        return {"teacher": teacher, "student": start, "W": W}, upload, teacher

    def merge(self, server, ids, message, upload, n):
        student, joined = server["student"], torch.zeros_like(server["joined"])
        changes = [tree_map(lambda t, p: unpack(p, t.shape), student, row(upload, i)) for i in range(len(ids))]
        update = tree_map(lambda t: pack(t, float(server["energy"])), average(stack(changes), n))
        joined[torch.as_tensor(ids, device=joined.device)] = True
        new = tree_map(lambda t, p: t + unpack(p, t.shape), student, update)
        return {**server, "student": new, "update": update, "joined": joined}

    def deploy(self, clients, kept, message):
        return kept["teacher"]
