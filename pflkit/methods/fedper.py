"""FedPer: a shared extractor under personal heads, trained together.

Source: Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. arXiv 1912.00818, 2019.

Round t, for the sampled clients S_t:
    1.  the server sends the extractor        r^t
    2.  client i trains both parts jointly    (r_i, h_i) <- SGD on f_i from (r^t, h_i), E epochs
    3.  keeps h_i and uploads                 r_i
    4.  the server averages                   r^{t+1} = Σ n_i r_i / Σ n_i      (sums over S_t)

Travels:   the extractor, down and up.
Keeps:     the client's head h_i.
Evaluated: (r^t, h_i) `before` local training, with the head of the client's last round; (r_i, h_i) `after` it.

The paper lets the personal part be several of the last layers: build the model with `head_layers=k`.

Where released code differs, and what we do:
  - KarhouTam/FL-bench 06e658b (2025-10-09) uploads the whole model and lets clients overwrite the averaged head again:
    the results are FedPer's, the bytes are not. Here only r travels.
"""

from dataclasses import dataclass
from typing import ClassVar

from pflkit.messages import Shared
from pflkit.methods.fedavg import model_loss
from pflkit.trees import average


@dataclass(frozen=True)
class FedPer:
    paper: ClassVar[str] = "Federated Learning with Personalization Layers (Arivazhagan et al., 2019)"
    product: ClassVar[str] = "after"

    def server(self, fed):
        return fed.init()[0]

    def client(self, group):
        return group.each_client(group.init()[1])

    def download(self, server, ids):
        return Shared(server)

    def local(self, clients, kept, message):
        extractor, head = clients.sgd(model_loss, (message, kept))
        return head, extractor, (extractor, head)

    def merge(self, server, ids, message, upload, n):
        return average(upload, n)

    def deploy(self, clients, kept, message):
        return message, kept
