"""FedProx: FedAvg with a proximal term that holds local training near the global model.

Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks. MLSys 2020,
arXiv 1812.06127.

Round t, for the sampled clients S_t:
    1.  the server sends                      w^t
    2.  client i trains all of it, held back  θ_i <- SGD on f_i(θ) + μ/2 ‖θ − w^t‖² from w^t, E epochs:
                                              θ <- θ − η (∇f_i(θ) + μ (θ − w^t)) in each step
    3.  and uploads                           θ_i
    4.  the server averages                   w^{t+1} = Σ n_i θ_i / Σ n_i      (sums over S_t)

Travels:   the whole model, down and up.
Keeps:     nothing; clients are stateless.
Evaluated: w^t `before` local training, the method's product; and θ_i `after` it.

Where released code differs, and what we do:
  - To our knowledge (not checked against the text) the paper samples clients in proportion to n_i, averages uniformly,
    and lets each client do as much local work as it can. TsingZ0/PFLlib d832e76 (2025-11-29) samples uniformly and
    averages by n_i, and so do we; every client does E epochs.
  - PFLlib's default is μ = 0, which is FedAvg; KarhouTam/FL-bench 06e658b (2025-10-09) sets 0.01 in its configuration,
    1.0 in its class. What the FedAH paper used is not known to us.
  - PFLlib logs a training loss with the norm not squared; its steps are those of the formula above. Here the loss is
    logged without the proximal term.
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.checks import real
from pflkit.methods.fedavg import FedAvg, model_loss


@dataclass(frozen=True)
class FedProx:
    paper: ClassVar[str] = "Federated Optimization in Heterogeneous Networks (Li et al., 2020)"
    product: ClassVar[str] = "before"  # the global model

    mu: float = 0.01  # μ; ours, and FL-bench's; what is best depends on the data

    def __post_init__(self):
        real("mu", self.mu, 0)

    # But for the local loss, its rounds are FedAvg's, so these are FedAvg's functions.
    server, client, download = FedAvg.server, FedAvg.client, FedAvg.download
    merge, deploy = FedAvg.merge, FedAvg.deploy

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, message, pull=(message, self.mu))  # adds μ (θ − w^t) to each gradient
        return (), model, model
