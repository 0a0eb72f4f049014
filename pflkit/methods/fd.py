"""FD: clients with any models teach each other by their mean outputs for each class.

Source: Jeong, Oh, Kim, Park, Bennis, Kim: Communication-Efficient On-Device Machine Learning: Federated Distillation
and Augmentation under Non-IID Private Data. NIPS 2018 workshop MLPCD, arXiv 1811.11479. Its distillation, FD, alone;
not its augmentation, FAug.

Client i has a model θ_i of any architecture, whose outputs are F_i(x) = softmax(z_i(x)), z the logits of the K classes.
Round t, for the sampled clients S_t:
    1.  the server sends client i, for each   F̂_{i,l} = Σ_{j≠i, j owns l} F̄_{j,l} / #{j ≠ i that own l}
        class l that another one owns, the
        mean over the others
    2.  client i trains, its term for a       θ_i <- SGD on CE(F_i(x), y) + γ CE(F_i(x) ‖ F̂_{i,y}) from its own θ_i,
        sample of class y                     E epochs;  CE(F ‖ F̂) = −Σ_k F̂_k log F_k, nothing where there is no F̂_{i,y}
    3.  takes its mean output for each        F̄_{i,l} = Σ_{x of class l} F_i(x) / n_{i,l}
        class l that it owns
    4.  keeps θ_i, and uploads                {(F̄_{i,l}, l)}
    5.  the server keeps                      the latest F̄_{i,l} of every client i
No one knows a target in round 1, which is Local's.

Travels:   K probabilities and a label for each class: those that others own down, those that the client owns up.
Keeps:     the client's model θ_i; the server all clients' F̄.
Evaluated: θ_i, `before` local training and `after` it; no message changes a model by itself.

To our knowledge (not checked against the text), the paper's outputs are probabilities, as here; it takes the F̄ during
training, of samples as they are trained on; and it divides by M − 1, the number of all other devices. Here F̄ is of the
trained θ_i in evaluation mode, which costs a pass without gradients, as in FedGH; the division is by the number of
others that own the class, so that targets are probabilities; and a client that is not sampled counts by what it sent
last. All classes that others own go down, though a client uses only its own: before its first upload nobody knows them.

Where released code differs, and what we do (TsingZ0/PFLlib d832e76, 2025-11-29; TsingZ0/HtFLlib e959261, 2026-04-23):
  - They average logits, and take them for the probabilities of a target. The loss has no lower bound then, and a client
    in perfect agreement is moved: its gradient is (Σ_k t_k) softmax(z) − t, not 0. PFLlib 3f5141b and HtFLlib 17f851e
    (dates unknown) take the softmax of the mean logits. Here a target is a mean of probabilities.
  - They send everyone one mean over all participants, the receiver included. Here it is left out, of its own targets.
  - A sample whose class has no target has its own logits for one. Here it has no such term.
  - They average over all epochs of training, while the model moves. Here over each sample once, after training.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import cross_entropy, softmax

from pflkit.checks import real
from pflkit.messages import Rows
from pflkit.methods.fedgh import class_labels
from pflkit.trees import clone, put, take


def leave_one_out(averages):
    """For each client the mean over the others that own a class: Rows [N, K, r] of Rows [N, K, r].

    F̂_i = (Σ_j F̄_j − F̄_i) / (number of the others), in float64; a class that no other owns is not present.

    Three clients, two classes; the second one is client 1's alone:

    >>> F = torch.tensor([[1.0, 0.0], [3.0, 7.0], [8.0, 0.0]])
    >>> targets = leave_one_out(Rows(F[..., None], F > 0))
    >>> targets.values[..., 0].tolist()
    [[5.5, 7.0], [4.5, 0.0], [2.0, 7.0]]
    >>> targets.present.tolist()
    [[True, True], [True, False], [True, True]]
    """
    values, present = averages
    own, others = values.double() * present[..., None], present.sum(0) - present.long()
    means = (own.sum(0) - own) / others.clamp(min=1)[..., None]  # not below 0: no sum of such is less than one of them
    return Rows(means.to(values.dtype), others > 0)


def distillation(z, targets):
    """Mean over the batch of CE(softmax(z) ‖ t) = −Σ_k t_k log softmax(z)_k; logits z and targets t are [B, K].

    Its gradient, (softmax(z) − t) / B, is 0 where both agree. A row of t that is 0 has no term, but counts in B.

    >>> z = torch.zeros(2, 2, requires_grad=True)
    >>> loss = distillation(z, torch.tensor([[0.75, 0.25], [0.0, 0.0]]))
    >>> loss.item()  # ln(2) / 2
    0.3465735912322998
    >>> torch.autograd.grad(loss, z)[0].tolist()
    [[-0.125, 0.125], [0.0, 0.0]]
    """
    return cross_entropy(z, targets)


def distilled_loss(model, params, batch, targets, gamma):
    """Step 2's loss of ONE client; targets [K, K], row l for class l, 0 for a class without."""
    x, y = batch
    z = model.predict(params, x)
    term = distillation(z, targets[y])
    return cross_entropy(z, y) + gamma * term, {"distillation": term}


def outputs(model, params, x):
    """F(x) [B, K] of ONE client."""
    return softmax(model.predict(params, x), 1)


@dataclass(frozen=True)
class FD:
    paper: ClassVar[str] = (
        "Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID "
        "Private Data (Jeong et al., 2018)"
    )
    product: ClassVar[str] = "after"
    heterogeneous: ClassVar[bool] = True

    gamma: float = 1.0  # γ; PFLlib's and HtFLlib's, for targets of another kind; the paper's is not known to us

    def __post_init__(self):
        real("gamma", self.gamma, 0)

    def server(self, fed):
        N, K = fed.num_clients, fed.model.classes
        nothing = torch.zeros(N, K, K, device=fed.device, dtype=fed.dtype)
        return Rows(nothing, torch.zeros(N, K, dtype=torch.bool, device=fed.device))

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        targets = take(leave_one_out(server), ids)
        return targets, class_labels(targets)

    def local(self, clients, kept, message):
        targets, _ = message  # rows that are not present are 0
        model = clients.sgd(distilled_loss, kept, targets.values, self.gamma)
        averages = clients.class_mean(outputs, model)
        return model, (averages, class_labels(averages)), model

    def merge(self, server, ids, message, upload, n):
        averages, _ = upload
        latest = clone(server)
        put(latest, ids, averages)
        return latest

    def deploy(self, clients, kept, message):
        return kept
