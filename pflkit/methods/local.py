"""Local: every client trains alone. The baseline that personalization has to beat.

Source: none; the standard baseline.

One round, for each of the N clients (no server takes part, so no sampling either, unless `everyone` is False):
    1.  θ_i <- SGD on f_i from its own θ_i, E epochs

Travels:   nothing.
Keeps:     the client's model θ_i. All start from the same initial values as every other method.
Evaluated: θ_i, `before` local training and `after` it: each round's `before` is the `after` of the one before.

Where released code differs, and what we do:
  - TsingZ0/PFLlib d832e76 (2025-11-29) and KarhouTam/FL-bench 06e658b (2025-10-09) train only sampled clients, which
    slows Local down at join ratios below 1. Here everyone trains in every round; with `everyone=False` those who are
    sampled, as with the other methods, which is the fair comparison at equal work.
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.checks import boolean
from pflkit.methods.fedavg import model_loss


@dataclass(frozen=True)
class Local:
    paper: ClassVar[str] = "Local training alone (baseline, no paper)"
    product: ClassVar[str] = "after"
    heterogeneous: ClassVar[bool] = True

    everyone: bool = True  # ours: nothing needs a server's invitation

    def __post_init__(self):
        boolean("everyone", self.everyone)

    def server(self, fed):
        return ()

    def client(self, group):
        return group.each_client(group.init())

    def joins(self, round, sampled, everyone):
        return everyone if self.everyone else sampled

    def download(self, server, ids):
        return ()

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, kept)
        return model, (), model

    def merge(self, server, ids, message, upload, n):
        return ()

    def deploy(self, clients, kept, message):
        return kept
