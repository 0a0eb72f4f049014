"""FedAH: every client starts its head from a learned, element-wise mix of its own head and the global one.

Source: Zhou, He, Zhai, Gao, Chen, Qin, Zhang, Guo: FedAH: Aggregated Head for Personalized Federated Learning.
arXiv 2412.01295, 2024.

A model is an extractor r and a linear head h. Client i keeps a head h_i and weights W_i in [0, 1], one for each element
of the head, all 1 at first. Round t, for the sampled clients S_t:
    1.  the server sends                      w^t = (r^t, h^t)
    2.  client i learns how much of the       ĥ = h_i + (h^t − h_i) ⊙ W
        global head it wants; r^t, h^t        W <- clip(W − η_w ∂L/∂ĥ ⊙ (h^t − h_i), 0, 1)
        and h_i stand still                   one step a batch, E_w epochs; result W_i
    3.  mixes                                 ĥ_i = h_i + (h^t − h_i) ⊙ W_i
    4.  trains the head, r^t frozen           h_i <- SGD on f_i(r^t, ·) from ĥ_i, E_h epochs
    5.  then the extractor, h_i frozen        r_i <- SGD on f_i(·, h_i) from r^t, E epochs
    6.  keeps h_i and W_i, and uploads        (r_i, h_i)
    7.  the server averages both              w^{t+1} = Σ n_i (r_i, h_i) / Σ n_i      (sums over S_t)
W = 1 takes FedAvg's head in step 3, W = 0 FedRep's.

Travels:   the whole model, down and up, as in FedAvg.
Keeps:     the client's head h_i and its weights W_i.
Evaluated: (r^t, ĥ_i) `before` local training, after steps 2 and 3; (r_i, h_i) `after` it.

Where released code differs, and what we do:
  - heyuepeng/FedAH e966fcf (2024-07-16) sets η_w = 1.0; the paper sets it to the local learning rate, 0.005 for its
    CNN. Ours is the paper's; at that rate W hardly leaves 1. `weight_lr=1.0` gives the code's.
  - It runs steps 2 and 3 for all clients in every round and overwrites the stored heads of those not sampled, which
    pulls them to the global head. Here a client that is not sampled is not touched.
  - It scores (r^t, ĥ_i), our `before`, and its scripts use batches of 16; the paper says 10, our default.
  - One flag drives both E_w and E_h there. Here each has its own.
  - It drops the last short batch in all phases. Here it is used (`Training.drop_last` restores that).
  - It leaves batch-norm statistics out of the average, and lets the frozen extractor's statistics follow the mode of
    the last call. Here they are averaged, and a frozen extractor runs in evaluation mode.
  - KarhouTam/FL-bench 06e658b (2025-10-09) keeps W and the local head on a worker that all clients share, so a client
    starts from the head of the one before it. Here each client has its own.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy, linear

from pflkit.checks import integer, real
from pflkit.messages import Shared
from pflkit.methods.fedrep import extractor_loss, head_loss
from pflkit.models import for_many
from pflkit.trees import average, full_like, lerp, tree_map


def aggregate_head(h_local, h_global, W):
    """The mixed head ĥ = h_local + (h_global − h_local) ⊙ W; trees of one structure, e.g. {"weight": [K, r], ...}.

    With or without a leading client axis.

    >>> mixed = aggregate_head({"b": torch.tensor([0.0, 0.0])}, {"b": torch.tensor([1.0, 2.0])},
    ...                        {"b": torch.tensor([0.5, 1.0])})
    >>> mixed["b"].tolist()
    [0.5, 2.0]
    """
    return lerp(h_local, h_global, W)


def weight_step(W, h_local, h_global, z, y, lr):
    """One step of weight learning on one batch: W <- clip(W − lr · ∂L/∂ĥ ⊙ (h_global − h_local), 0, 1).

    Heads and W are {"weight": [K, r], "bias": [K]}; z [B, r] are features, y [B] labels; L is the mean cross-entropy.
    Two classes, one feature z = 1 of class 0, h_local = 0 and a global head that says class 1: ĥ gives both logits
    (0, 2), so ∂L/∂ĥ = softmax − onehot = (−.8808, .8808) and only the second element of W has a reason to move.

    >>> zero = {"weight": torch.zeros(2, 1), "bias": torch.zeros(2)}
    >>> h_global = {"weight": torch.tensor([[0.0], [2.0]]), "bias": torch.zeros(2)}
    >>> ones = {"weight": torch.ones(2, 1), "bias": torch.ones(2)}
    >>> W = weight_step(ones, zero, h_global, torch.tensor([[1.0]]), torch.tensor([0]), lr=0.5)
    >>> [round(w, 4) for w in W["weight"].flatten().tolist()]     # 1 − .5 · .8808 · 2 = .1192
    [1.0, 0.1192]
    """
    head = aggregate_head(h_local, h_global, W)
    slope = torch.func.grad(lambda h: cross_entropy(linear(z, h["weight"], h["bias"]), y))(head)
    return tree_map(lambda w, g, own, top: clip01(w - lr * g * (top - own)), W, slope, h_local, h_global)


def clip01(w):
    """Each element of `w`, moved to the nearest value in [0, 1]."""
    return w.clamp(0, 1)


@for_many
def weights_loss(model, W, batch, h_local, h_global):
    """Mean cross-entropy of ONE client's mixed head, as a function of its weights W; batch = (z [B, r], y [B])."""
    return head_loss(model, aggregate_head(h_local, h_global, W), batch)


@dataclass(frozen=True)
class FedAH:
    paper: ClassVar[str] = "FedAH: Aggregated Head for Personalized Federated Learning (Zhou et al., 2024)"
    product: ClassVar[str] = "after"

    weight_lr: float | None = None  # η_w; None: the local learning rate, as in the paper; the released code: 1.0
    weight_epochs: int = 1  # E_w; the paper's
    head_epochs: int = 1  # E_h; not stated in the paper, the released code's default
    weight_init: float = 1.0  # W before the first round; with weight_lr=0 it stays (ours, for the notebook)

    def __post_init__(self):
        if self.weight_lr is not None:
            real("weight_lr", self.weight_lr, 0)
        integer("weight_epochs", self.weight_epochs, 0)
        integer("head_epochs", self.head_epochs, 0)
        real("weight_init", self.weight_init, 0, 1)

    def server(self, fed):
        return fed.init()

    def client(self, group):
        head = group.each_client(group.init()[1])
        return {"head": head, "W": full_like(head, self.weight_init)}

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        extractor, h_global = message
        behind = clients.through(extractor)
        W, head = self.mix(behind, kept, h_global)
        head = behind.sgd(head_loss, head, epochs=self.head_epochs, phase="head")
        extractor = clients.sgd(extractor_loss, extractor, head, phase="extractor")
        return {"head": head, "W": W}, (extractor, head), (extractor, head)

    def merge(self, server, ids, message, upload, n):
        return average(upload, n)

    def deploy(self, clients, kept, message):
        extractor, h_global = message
        _, head = self.mix(clients.through(extractor), kept, h_global)
        return extractor, head

    def watch(self, server, kept):
        return {"W": kept["W"]}

    def mix(self, behind, kept, h_global):
        """Steps 2 and 3: the learned weights and the mixed head. The step of W has no momentum, decay or clipping."""
        lr = behind.training.lr if self.weight_lr is None else self.weight_lr
        rule = {"lr": lr, "epochs": self.weight_epochs, "momentum": 0, "weight_decay": 0, "clip": None}
        heads = kept["head"], h_global
        W = behind.sgd(weights_loss, kept["W"], *heads, project=clip01, phase="weights", **rule)
        return W, aggregate_head(*heads, W)
