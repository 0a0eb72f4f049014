"""Ditto: beside the global model of FedAvg, every client trains one of its own that is drawn towards the global one.

Source: Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021,
arXiv 2012.04221. Client i wants min_v f_i(v) + λ/2 ‖v − w*‖², where w* is what FedAvg solves for.

Round t, for the sampled clients S_t:
    1.  the server sends                      w^t
    2.  client i trains it, as in FedAvg,     θ_i <- SGD on f_i from w^t, E epochs
    3.  and its own model                     v_i <- v_i − η (∇f_i(v_i) + λ (v_i − w^t)) in each step, E_v epochs
    4.  keeps v_i, and uploads                θ_i
    5.  the server averages                   w^{t+1} = Σ n_i θ_i / Σ n_i      (sums over S_t)
Step 3 goes through the same batches as step 2. It never touches w: the global model is FedAvg's, whatever λ is.

Travels:   the whole model, down and up, as in FedAvg; v_i never does.
Keeps:     the client's own model v_i, at first w^0; with batch-norm, its running statistics too.
Evaluated: v_i `before` steps 2 and 3, as it was kept, and `after` them, the method's product; beside it the global
           model: w^t before, θ_i after.

Where released code differs, and what we do:
  - litian96/ditto (a snapshot without a date) takes a step of v_i, then one of θ_i, on each of ten mini-batches. Here
    step 3 follows step 2, in epochs: the order is of no account, for v_i is drawn to the w^t that arrived, not to θ_i.
  - It draws clients by n_i, and then their mean is uniform. Here all are as likely, and the mean is FedAvg's.
  - Its flag has λ = 0, its README runs λ = 1, and an option picks λ from {0.1, 1, 2} by the loss on validation data.
    Here λ is one number.
  - TsingZ0/PFLlib d832e76 (2025-11-29) has λ = 0 by default, which is Local; KarhouTam/FL-bench 06e658b (2025-10-09)
    has 1. Both train v_i for one epoch.
  - PFLlib puts the scores of w and of v_i into one list, whose maximum it reports. Here each has its own column.
  - PFLlib logs v_i's training loss with a norm that is not squared. Here it is logged, as `personal`, without the norm.
  - FL-bench steps both models by one optimizer. Here each has its own momentum, which starts anew in each round.
  - PFLlib's running statistics of batch-norm stay with the clients. Here w's travel with it, and v_i has its own.
  - It drops each epoch's last short batch. Here it is trained on (`Training.drop_last` restores that).
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.checks import integer, real
from pflkit.methods.fedavg import FedAvg, model_loss


@dataclass(frozen=True)
class Ditto:
    paper: ClassVar[str] = "Ditto: Fair and Robust Federated Learning Through Personalization (Li et al., 2021)"
    product: ClassVar[str] = "after"

    lam: float = 1.0  # λ; the released code's README and FL-bench's; what is best depends on the data
    personal_epochs: int = 1  # E_v; PFLlib's and FL-bench's

    def __post_init__(self):
        real("lam", self.lam, 0)
        integer("personal_epochs", self.personal_epochs, 0)

    # The global model is FedAvg's, and so are these functions.
    server, download, merge = FedAvg.server, FedAvg.download, FedAvg.merge

    def client(self, group):
        return group.each_client(group.init())

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, message)
        towards = message, self.lam  # adds λ (v_i − w^t) to each gradient
        personal = clients.sgd(model_loss, kept, pull=towards, epochs=self.personal_epochs, log="personal")
        return personal, model, {"personal": personal, "global": model}

    def deploy(self, clients, kept, message):
        return {"personal": kept, "global": message}
