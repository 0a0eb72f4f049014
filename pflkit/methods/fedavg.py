"""FedAvg: one global model, averaged from the clients' locally trained ones.

Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017, arXiv 1602.05629, Algorithm 1.

Round t, for the sampled clients S_t:
    1.  the server sends                      w^t
    2.  client i trains all of it             θ_i <- SGD on f_i from w^t, E epochs
    3.  and uploads                           θ_i
    4.  the server averages                   w^{t+1} = Σ n_i θ_i / Σ n_i      (sums over S_t)

Travels:   the whole model, down and up.
Keeps:     nothing; clients are stateless.
Evaluated: w^t `before` local training, the method's product; and θ_i `after` it.

Where released code differs, and what we do:
  - TsingZ0/PFLlib d832e76 (2025-11-29) averages parameters only: batch-norm's running statistics stay with the clients.
    Here they travel and are averaged like the extractor they belong to.
  - It drops each epoch's last short batch. Here it is trained on (`Training.drop_last` restores that).
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.messages import Shared
from pflkit.models import cross_entropy, for_many
from pflkit.trees import average


@for_many
def model_loss(model, params, batch):
    """Mean cross-entropy of ONE client's whole model; params = (extractor, head), batch = (x [B, ...], y [B])."""
    return cross_entropy(model.predict(params, batch[0]), batch[1])


@dataclass(frozen=True)
class FedAvg:
    paper: ClassVar[str] = (
        "Communication-Efficient Learning of Deep Networks from Decentralized Data (McMahan et al., 2017)"
    )
    product: ClassVar[str] = "before"  # the global model

    def server(self, fed):
        return fed.init()

    def client(self, group):
        return ()

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, message)
        return (), model, model

    def merge(self, server, ids, message, upload, n):
        return average(upload, n)

    def deploy(self, clients, kept, message):
        return message
