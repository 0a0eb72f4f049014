"""FedMeta: the server descends the clients' losses after adaptation, by meta-gradients that the clients send.

Source: Chen, Luo, Dong, Li, He: Federated Meta-Learning with Fast Convergence and Efficient Communication.
arXiv 1802.07876, 2018.

Client i's training samples are split, once and for all, into a support set S_i (a `support` share) and a query set Q_i.
Minimized is the mean over clients of L_{Q_i}(θ − α ∘ ∇L_{S_i}(θ)). Round t, for the m sampled clients:
    1.  the server sends                      θ   (Meta-SGD: also α, a rate for each parameter)
    2.  client i adapts on its support set    g_S = ∇L_S(θ),  θ' = θ − α ∘ g_S
    3.  and differentiates on its query set   v = ∇L_Q(θ')
    4.  it uploads                            g_i = v − ∇²L_S(θ) (α ∘ v), the gradient of L_Q(θ') in θ
                                              (Meta-SGD: also −v ∘ g_S, its gradient in α)
    5.  the server steps                      θ <- θ − β 1/m Σ g_i   (Meta-SGD: α <- α − β 1/m Σ −v ∘ g_S)
When a client is to use the model: step 2.

`variant="maml"` is this with one number α; "fomaml" leaves the product with the Hessian out; "metasgd" learns α. All
gradients are over whole sets, a round is one step: Training's rates, epochs and batches are not used.

Travels:   the whole model down, a gradient of its size up; for Meta-SGD twice that, down and up. See below for buffers.
Keeps:     nothing; clients are stateless.
Evaluated: θ' `before`, the method's product: adapted on the support set, tested on the client's test samples. The same
           `after`, for that is what a client has at the end of a round: it does not train further.

Batch-norm's statistics have no gradient, and would stay what they were at first. So beside its gradient a client sends
its statistics, moved by its passes in steps 2 and 3, and the server takes their mean, uniform as in step 5; nothing of
this is in the paper. A set's loss is the mean over pieces of at most 100 samples, each normalized by itself; where a
client's sets are of one sample, they have no variance, and it sends a gradient of 0. Over few samples batch-norm's
curvature can be huge, and the product with the Hessian is too: "fomaml" is safe there.

Where released code differs, and what we do:
  - Neither TsingZ0/PFLlib d832e76 (2025-11-29) nor KarhouTam/FL-bench 06e658b (2025-10-09) has the method.
  - The README of adap/flower's baseline (we have not read its code, nor checked it against the paper) names a support
    share of 0.2, which is ours too; for FEMNIST α = 0.001, β = 0.0001 and five inner steps, for Shakespeare 0.1, 0.01
    and one; batches of 10; and Adam. By ddayzzz/federated-meta's README the paper has Adam as everybody's local
    optimizer, and its own inner loop is plain gradient descent. Here both steps are plain, on whole sets, the inner
    one once: our rates are larger.
  - The paper holds out whole clients for tests, to our knowledge (not checked against the text). Here S_i and Q_i are
    of each client's training samples, and every client is tested on its own test samples.
  - A client with one sample has it in both sets.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pflkit.checks import choice, real
from pflkit.messages import Shared
from pflkit.methods.fedavg import model_loss
from pflkit.methods.perfedavg import filled, only, slope_along
from pflkit.trees import add, average, full_like, tree_map


def times(tree, other):
    """tree ∘ other, element by element."""
    return tree_map(lambda a, b: a * b, tree, other)


def adapted(theta, alpha, gradient):
    """θ' = θ − α ∘ ∇L_S(θ), with a rate α for each element of θ.

    >>> adapted(torch.tensor([3.0, 3.0]), torch.tensor([0.1, 0.0]), torch.tensor([4.0, 4.0]))  # L_S = (θ − 1)²
    tensor([2.6000, 3.0000])
    """
    return add(theta, times(alpha, gradient), -1)


def meta_gradient(v, product):
    """The gradient of L_Q(θ') in θ: (1 − ∇²L_S(θ) α) v = v − ∇²L_S(θ) (α ∘ v).

    >>> v = torch.tensor(1.2)               # of L_Q = (θ − 2)² at θ' = 2.6
    >>> meta_gradient(v, 2 * 0.1 * v)       # ∇²L_S = 2, α = .1: .8·1.2
    tensor(0.9600)
    """
    return add(v, product, -1)


@dataclass(frozen=True)
class FedMeta:
    paper: ClassVar[str] = (
        "Federated Meta-Learning with Fast Convergence and Efficient Communication (Chen et al., 2018)"
    )
    product: ClassVar[str] = "before"  # the model adapted on the support set

    variant: str = "maml"  # or "fomaml", "metasgd"
    # α and β are ours, chosen on digits with an MLP. The 4-layer CNN on Tiny-ImageNet diverges at them, not at .01, .1.
    inner_lr: float = 0.1  # α; Meta-SGD: its first value
    server_lr: float = 1.0  # β
    support: float = 0.2  # the share of samples in S_i; at least one is in each set

    def __post_init__(self):
        choice("variant", self.variant, ("maml", "fomaml", "metasgd"))
        real("inner_lr", self.inner_lr, 0)
        real("server_lr", self.server_lr, 0)
        real("support", self.support, above=0, high=1)

    def server(self, fed):
        theta = fed.init()
        return theta, full_like(only(fed.model, theta), self.inner_lr) if self.variant == "metasgd" else ()

    def client(self, group):
        return ()

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        S, Q, g_S, own = self.adapt(clients, message)
        v, after = Q.gradient(model_loss, own)
        g = v
        if self.variant != "fomaml":
            theta, alpha = message[0], self.rates(message)
            g = meta_gradient(v, S.gradient(slope_along, theta, times(alpha, v))[0])
        slopes = tree_map(torch.neg, only(clients.model, times(v, g_S))) if self.variant == "metasgd" else ()
        return (), (only(clients.model, g), slopes, only(clients.model, after, buffers=True)), own

    def merge(self, server, ids, message, upload, n):
        theta, rates = server
        g, slopes, statistics = average(upload, np.ones(len(ids)))
        theta = filled(add(theta, filled(full_like(theta, 0), g), -self.server_lr), statistics)
        return theta, add(rates, slopes, -self.server_lr)

    def deploy(self, clients, kept, message):
        return self.adapt(clients, message)[-1]

    def watch(self, server, kept):
        return {"alpha": server[1]} if self.variant == "metasgd" else {}

    def rates(self, message):
        """α as a tree like θ; what it is for buffers does not matter, for their gradient is 0."""
        theta, rates = message
        return filled(full_like(theta, 0), rates) if rates else full_like(theta, self.inner_lr)

    def adapt(self, clients, message):
        """Step 2: S, Q, g_S, and θ', its batch-norm statistics moved by the pass over S."""
        S, Q = clients.split(self.support, "support")
        g_S, after = S.gradient(model_loss, message[0])
        return S, Q, g_S, adapted(after, self.rates(message), g_S)
