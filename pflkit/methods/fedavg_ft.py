"""FedAvg + fine-tuning: train as FedAvg, then let every client tune a copy of the global model before using it.

Source: folklore baseline; analysed by Collins, Hassani, Mokhtari, Shakkottai: FedAvg with Fine Tuning: Local Updates
Lead to Representation Learning. NeurIPS 2022, arXiv 2205.13692 (reference from memory).

Round t: exactly FedAvg's. When a client is to use the model:
    1.  it receives                           w^t
    2.  tunes a copy, and discards it later   θ_i <- SGD on f_i from w^t, k epochs at rate η_ft

Travels:   as FedAvg; tuning costs no traffic.
Keeps:     nothing.
Evaluated: the tuned copies of all N clients, in the column `before` (before the round's own local training).

Where released code differs, and what we do:
  - No canonical k is known; ours is one epoch at the local rate. The FedRep authors' scripts give single-model
    baselines ten head-only epochs in the end: `finetune_epochs=10, head_only=True`.
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.checks import boolean, integer, real
from pflkit.methods.fedavg import FedAvg, model_loss
from pflkit.methods.fedrep import head_loss


@dataclass(frozen=True)
class FedAvgFT:
    paper: ClassVar[str] = "FedAvg with Fine Tuning (folklore; Collins et al., 2022)"
    product: ClassVar[str] = "before"  # of the next round's training, but after fine-tuning

    finetune_epochs: int = 1  # k, ours
    finetune_lr: float | None = None  # η_ft; None: the local learning rate
    head_only: bool = False  # tune the head on the global extractor's features only

    def __post_init__(self):
        integer("finetune_epochs", self.finetune_epochs, 0)
        if self.finetune_lr is not None:
            real("finetune_lr", self.finetune_lr, 0)
        boolean("head_only", self.head_only)

    # Its rounds are FedAvg's, so these are FedAvg's functions.
    server, client, download = FedAvg.server, FedAvg.client, FedAvg.download
    local, merge = FedAvg.local, FedAvg.merge

    def deploy(self, clients, kept, message):
        lr = clients.training.lr if self.finetune_lr is None else self.finetune_lr
        rule = {"lr": lr, "epochs": self.finetune_epochs}
        if not self.head_only:
            return clients.sgd(model_loss, message, phase="finetune", **rule)
        extractor, head = message
        return extractor, clients.through(extractor).sgd(head_loss, head, phase="finetune", **rule)
