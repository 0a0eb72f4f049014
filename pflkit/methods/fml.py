"""FML: each client's own model and a fork of one model that all share, the meme, teach each other; the meme travels.

Source: Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu: Federated Mutual Learning. arXiv 2006.16765 (2020). To our
knowledge (not checked against the text) the paper's losses are those below, which are the authors' code's.

Client i has a private model w_i of any architecture; the meme v has one architecture for all. p_w, p_v are their
softmax outputs. Round t, for the sampled clients S_t:
    1.  the server sends the meme             v^t
    2.  client i forks it                     v_i <- v^t
    3.  and trains both, in each step on      L_w = α CE(p_w, y) + (1 − α) KL(p_v ‖ p_w)      for w_i, p_v held fixed
        one batch, from the outputs before    L_v = β CE(p_v, y) + (1 − β) KL(p_w ‖ p_v)      for v_i, p_w held fixed
        it: SGD, E epochs
    4.  keeps w_i, and uploads                v_i
    5.  the server averages                   v^{t+1} = Σ v_i / |S_t|      (sum over S_t)
With α = 1 the private models are Local's, where all join. With β = 1, and `weighted`, the meme is FedAvg's model.

Travels:   the meme, down and up. No private parameter does.
Keeps:     the client's private model w_i.
Evaluated: w_i, `before` local training and `after` it. A message changes nothing of it, so a client's `before` is what
           its last round left. The meme is scored nowhere.

Private models and the meme begin with the initial values of every other method. So in round 1, with one architecture
and α = β, they are equal, and the KL and its gradient are 0. Momentum, decay and clipping act on each model by itself;
a batch of one sample is left out for both where either has batch-norm.

Where released code differs, and what we do:
  - ZJU-DAI/Federated-Mutual-Learning b547bbf (2021-03-25), the authors', has `fork` and `merge` commented out in
    main.py, and so have the two commits before it: nobody learns from anybody. Earlier ones call them, as we do.
  - It keeps the private model's optimizer, with its momentum 0.9, over all rounds, and makes the fork's anew in each.
    Here each round's SGD starts anew for both.
  - It averages uniformly, over all clients, who all take part. So do we, over those of the round; `weighted` averages
    by n_i. Its server (read in f12eba1) sets parameters to 0 before it sums, but not batch-norm's statistics, so that
    old ones stay in. Here they are averaged like the parameters.
  - It lowers its rate in steps from round to round, which we leave out.
  - TsingZ0/PFLlib d832e76 (2025-11-29) and TsingZ0/HtFLlib e959261 (2026-04-23) average the KL over classes too: 1/K of
    it. Here it is summed over classes and averaged over samples.
  - They do not hold the teachers fixed: each KL trains both models. Here each loss moves its own model only.
  - PFLlib's defaults are α = 1, where the private model ignores the meme, and β = 0, where the meme ignores the labels;
    HtFLlib's are 1 and 1, without any mutual learning, though its script sets 0.5. Ours are the authors' 0.5 and 0.5.
  - They bound each model's gradient by 10. Here `Training.clip` does, if set.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.nn.functional import cross_entropy, log_softmax

from pflkit.checks import boolean, choice, real
from pflkit.messages import Shared
from pflkit.models import MODELS
from pflkit.trees import average


def divergence(teacher, student):
    """KL(p_teacher ‖ p_student) of softmax(logits) [B, K], the mean over samples; the teacher's are held fixed.

    Σ_k p_k (log p_k − log q_k). Of p = softmax(3, 2, 1) and q = softmax(1, 2, 3): 2 (p_1 − p_3) = 2 (.6652 − .0900).

    >>> import torch
    >>> divergence(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0]]))
    tensor(1.1504)
    """
    log_p, log_q = log_softmax(teacher.detach(), 1), log_softmax(student, 1)
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def mutual_loss(pair, params, batch, alpha, beta):
    """L_w + L_v of ONE client, both recorded: w learns from the first alone, v from the second. params = (w, v)."""
    (w, v), (x, y) = params, batch
    private, meme = pair.own.predict(w, x), pair.shared.predict(v, x)
    L_w = alpha * cross_entropy(private, y) + (1 - alpha) * divergence(meme, private)
    L_v = beta * cross_entropy(meme, y) + (1 - beta) * divergence(private, meme)
    return L_w + L_v, {"private": L_w, "meme": L_v}


@dataclass(frozen=True)
class FML:
    paper: ClassVar[str] = "Federated Mutual Learning (Shen et al., 2020)"
    product: ClassVar[str] = "after"
    heterogeneous: ClassVar[bool] = True

    alpha: float = 0.5  # α, the share of the labels in L_w; the authors' code's
    beta: float = 0.5  # β, the share of the labels in L_v; the authors' code's
    student: str = ""  # the meme's architecture, a bundled model; "": the clients' own of fewest parameters; ours
    weighted: bool = False  # average by n_i; the authors' code does not

    def __post_init__(self):
        real("alpha", self.alpha, 0, 1)
        real("beta", self.beta, 0, 1)
        choice("student", self.student, ["", *MODELS])
        boolean("weighted", self.weighted)

    def server(self, fed):
        return fed.init(fed.second(self.student))

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        both = clients.beside(clients.second(self.student))
        private, meme = both.sgd(mutual_loss, (kept, message), self.alpha, self.beta)
        return private, meme, private

    def merge(self, server, ids, message, upload, n):
        return average(upload, n if self.weighted else [1] * len(n))

    def deploy(self, clients, kept, message):
        return kept
