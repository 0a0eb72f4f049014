"""LG-FedAvg: private extractors under one global head, trained together; only the head is averaged.

Source: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: Think Locally, Act Globally: Federated
Learning with Local and Global Representations. NeurIPS 2019 Workshop on Federated Learning, arXiv 2001.01523.

Client i has an extractor ℓ_i (elsewhere: r_i) of any architecture; all clients share the global part g on top of it
(elsewhere: the head h). Round t, for the sampled clients S_t:
    1.  the server sends the global part      g^t
    2.  client i trains both parts jointly    (ℓ_i, g_i) <- SGD on f_i from (ℓ_i, g^t), E epochs
    3.  keeps ℓ_i, and uploads                g_i
    4.  the server averages                   g^{t+1} = Σ n_i g_i / Σ n_i      (sums over S_t)

Travels:   the global part, down and up.
Keeps:     the client's extractor ℓ_i.
Evaluated: (ℓ_i, g^t) `before` local training, with the server's global part, the method's product; (ℓ_i, g_i) `after`.

What is global is the model's head: build it with `head_layers=k` for the last k layers. If that is all of them this is
FedAvg, if it is none, Local (of the sampled clients). Heads must have the same shapes in all models.

Where released code differs, and what we do:
  - Which layers are global differs most. pliang279/LG-FedAvg 7af0568 (2020-12-11) takes the last ones of a list by
    hand: for its MNIST network the top, for its CIFAR network, whose list begins at the top, the two convolutions, with
    private linear layers. KarhouTam/FL-bench 06e658b (2025-10-09) shares the first layer. TsingZ0/PFLlib d832e76
    (2025-11-29) and HtFLlib e959261 (2026-04-23) share the head. So do we: local representations, a global model on
    top. (FedPer is the way to share the lower layers.)
  - The released code takes the plain mean over the round's clients. To our knowledge (not checked against the text) the
    paper weights by n_i; so do we. `weighted=False` is the plain mean.
  - The released code starts from a network that FedAvg has trained; PFLlib, like us, from initial values.
  - It scores each client's best model so far, chosen by test data, under the mean of those models' global parts, and
    reports the best round. Here nothing is chosen by test data.
  - It and PFLlib send the global part to all clients in every round. Here it goes to the sampled ones only; `before`
    scores the others with it too, whose extractors have not been trained under it.
  - For new devices it scores an ensemble of all clients' models; that is not done here.
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.checks import boolean
from pflkit.messages import Shared
from pflkit.methods.fedavg import model_loss
from pflkit.trees import average, named_leaves


@dataclass(frozen=True)
class LGFedAvg:
    paper: ClassVar[str] = (
        "Think Locally, Act Globally: Federated Learning with Local and Global Representations (Liang et al., 2019)"
    )
    product: ClassVar[str] = "before"  # the client's extractor under the global head
    heterogeneous: ClassVar[bool] = True

    weighted: bool = True  # by n_i; the released code: False

    def __post_init__(self):
        boolean("weighted", self.weighted)

    def server(self, fed):
        wanted = shapes(fed.model)
        for model in (group.model for group in fed.groups):
            if (found := shapes(model)) != wanted:
                raise ValueError(
                    f"model={model.name!r}: LGFedAvg needs heads of the same shapes in all models; this one's is "
                    f"{found}, that of {fed.model.name!r} {wanted}"
                )
        return fed.init()[1]

    def client(self, group):
        return group.each_client(group.init()[0])

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        extractor, head = clients.sgd(model_loss, (kept, message))
        return extractor, head, (extractor, head)

    def merge(self, server, ids, message, upload, n):
        return average(upload, n if self.weighted else [1] * len(n))

    def deploy(self, clients, kept, message):
        return kept, message


def shapes(model):
    """The shapes of a head's tensors by name."""
    return {name: list(leaf.shape) for name, leaf in named_leaves(model.init()[1])}
