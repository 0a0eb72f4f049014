"""FedRep: a shared extractor under personal heads, trained in turns: first the head, then the extractor.

Source: Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated Learning.
ICML 2021, arXiv 2102.07078, Algorithm 1.

Round t, for the sampled clients S_t:
    1.  the server sends the extractor        r^t
    2.  client i trains its head, r^t frozen  h_i <- SGD on f_i(r^t, ·) from h_i, E_h epochs
    3.  then the extractor, h_i frozen        r_i <- SGD on f_i(·, h_i) from r^t, E epochs
    4.  keeps h_i and uploads                 r_i
    5.  the server averages                   r^{t+1} = Σ n_i r_i / Σ n_i      (sums over S_t)

Travels:   the extractor, down and up.
Keeps:     the client's head h_i.
Evaluated: (r^t, h_i) `before` local training, with the head of the client's last round; (r_i, h_i) `after` it.

Where released code differs, and what we do:
  - lgcollins/FedRep (the authors'; a snapshot without a date) runs 10 head epochs a round on CIFAR-10 with two classes
    a client, momentum 0.5 and rate 0.01, and tunes every head again at the end. The FedAH paper does not say how many
    it gives FedRep; its code's default, and ours, is one: set `head_epochs=10` for the authors'. The last tuning is not
    part of a round and not done here.
  - The paper's objective counts clients equally; the authors' code weights them by n_i, and so do we.
  - TsingZ0/PFLlib d832e76 (2025-11-29) scores (r^t, h_i) before the head has met the new r, our `before`; the method
    is designed to adapt the head first, which `after` does.
  - KarhouTam/FL-bench 06e658b (2025-10-09) with one local epoch never trains the head. Here E_h has its own name.
  - It freezes a part by clearing its gradients, which holds only where torch sets them to None (since 2.0). Here a
    frozen part is not given to the optimizer.
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.checks import integer
from pflkit.messages import Shared
from pflkit.models import cross_entropy, for_many
from pflkit.trees import average


@for_many
def head_loss(model, head, batch):
    """Mean cross-entropy of ONE client's head on features; batch = (z [B, r], y [B])."""
    return cross_entropy(model.classify(head, batch[0]), batch[1])


@for_many
def extractor_loss(model, extractor, batch, head):
    """Mean cross-entropy of ONE client's extractor under its frozen head; batch = (x [B, ...], y [B])."""
    return cross_entropy(model.predict((extractor, head), batch[0]), batch[1])


@dataclass(frozen=True)
class FedRep:
    paper: ClassVar[str] = (
        "Exploiting Shared Representations for Personalized Federated Learning (Collins et al., 2021)"
    )
    product: ClassVar[str] = "after"

    head_epochs: int = 1  # E_h; the authors' CIFAR-10 script: 10

    def __post_init__(self):
        integer("head_epochs", self.head_epochs, 0)

    def server(self, fed):
        return fed.init()[0]

    def client(self, group):
        return group.each_client(group.init()[1])

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        head = clients.through(message).sgd(head_loss, kept, epochs=self.head_epochs, phase="head")
        extractor = clients.sgd(extractor_loss, message, head, phase="extractor")
        return head, extractor, (extractor, head)

    def merge(self, server, ids, message, upload, n):
        return average(upload, n)

    def deploy(self, clients, kept, message):
        return message, kept
