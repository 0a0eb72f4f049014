"""FedFomo: every client tries a few other clients' models, and mixes those that do better on its own validation data.

Source: Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization.
ICLR 2021, arXiv 2012.08565.

The server keeps the last model θ_n that each client has uploaded, and affinities P [N, N], all 0 at first. Client i
keeps its own θ_i, as its last local training left it; L_i is its loss on its validation data, a random share of its
samples that is the same in every round, and f_i that on the rest. Round t, for the sampled clients S_t:
    1.  the server sends client i             θ_n of the M others with the largest P_in, ties at random; ε-greedy: with
                                              probability ε_t a place goes to a random one of whom nothing is known yet
    2.  client i weighs each of them          w_n = (L_i(θ_i) − L_i(θ_n)) / ‖θ_n − θ_i‖
    3.  mixes those that are better           θ̂_i = Σ w_n⁺ θ_n,   w_n⁺ = max(w_n, 0) / Σ_m max(w_m, 0)
        (none is: it keeps its own)           θ̂_i = θ_i
    4.  trains                                θ_i <- SGD on f_i from θ̂_i, E epochs
    5.  keeps θ_i, and uploads                θ_i and all w_n, signed
    6.  the server stores θ_i and adds        P_in <- P_in + w_n
As the w_n⁺ sum to 1, θ̂_i is θ_i + Σ w_n⁺ (θ_n − θ_i), the paper's step to first order.

Travels:   M models down, one model and M numbers up. No client numbers do: the w_n come in the order of the models.
Keeps:     its model θ_i. The server keeps N models and N² affinities. A round holds M models for each sampled client,
           twice while they are sent: 2.3 GB where 100 clients with the 4-layer CNN join, or are scored.
Evaluated: θ̂_i `before` local training; θ_i `after` it.

Ours, where we know of no rule: M is at most N − 1, all others; those that have not joined yet are candidates too, with
the initial model; "unknown" is P_in = 0, and where nobody is, any of those not on the list may get the place; w_n is 0
where the distance is 0 or a loss not finite. The norm is over trained parameters, so over all but batch-norm's
statistics, which are mixed by w⁺ like the rest. Each place is drawn by itself, as in the released code.

Where released code differs, and what we do:
  - The authors' NVlabs/FedFomo fae2375, as its README runs it, and TsingZ0/PFLlib d832e76 (2025-11-29) take for θ_i in
    step 2 the model after the last mixing and before the last training, so that the own trained model, which they have
    in the list, looks like the best candidate. Here θ_i is after the training, and no candidate: its w would be 0/0.
    Which of the two the paper means, we have not checked against its text.
  - The authors' code divides by the sum of absolute differences, adds w_n / |Σ w_m| to P, gives an exploring place to
    anyone not on the list, and has for candidates only those who joined the last round. Here it is steps 1, 2 and 6.
  - Its M is 8, in its README 4 and 9, others beside the own model; PFLlib's 5 are 4 others and the own, and no more
    than clients that join. Here M are others.
  - PFLlib has no ε. Here it is the authors': .3, falling by .05 a round.
  - PFLlib validates on the last fifth of the file, and trains on the rest unshuffled; with fewer than five samples it
    validates on all, and trains on none. Here validation data are drawn at random, at least one; a client of a single
    sample trains and validates on it.
  - PFLlib measures validation losses in training mode. Here batch-norm uses its running statistics, dropout is off.
  - PFLlib sends models to clients that are not sampled, too. Here they get none, and are as they were.
  - PFLlib scores the last round's θ_i, our `after`.
  - KarhouTam/FL-bench 06e658b (2025-10-09) draws new validation data every round, so that they are trained on in other
    rounds. Here they never are, but for a single sample. It has no ε.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pflkit.checks import integer, real
from pflkit.methods.fedavg import model_loss
from pflkit.streams import rng, torch_seed
from pflkit.trees import average, clone, leaves, named_leaves, put, repeat, row, stack, tree_map


def choose(affinity, i, M, epsilon, draw):
    """Step 1: the M clients whose models client i gets, out of all others, by its row `affinity` [N] of P.

    >>> choose([0.0, -1.0, 2.0, 1.0], 0, 2, 0.0, rng(0))               # greedy: the largest
    [2, 3]
    >>> sorted(choose([0.0, -1.0, 2.0, 0.0], 1, 2, 1.0, rng(0)))       # ε = 1: the unknown ones, in any order
    [0, 3]
    """
    others = draw.permutation([n for n in range(len(affinity)) if n != i])
    queue = sorted(others.tolist(), key=lambda n: -affinity[n])  # a stable sort: ties stay in random order
    chosen = []
    for explore in draw.random(M) < epsilon:
        drawn_from = ([n for n in queue if affinity[n] == 0] or queue) if explore else queue[:1]
        chosen.append(drawn_from[draw.integers(len(drawn_from))])
        queue.remove(chosen[-1])
    return chosen


def weights(loss, losses, distances):
    """Step 2: w [M] of ONE client, from its own loss, the candidates' losses [M], and their distances [M] to it.

    θ_i = 0, candidates 1, 3 and −1, L(θ) = (θ − 2)²: they gain 3, 3 and −5 over a distance of 1, 3 and 1.

    >>> weights(torch.tensor(4.0), torch.tensor([1.0, 1.0, 9.0]), torch.tensor([1.0, 3.0, 1.0]))
    tensor([ 3.,  1., -5.])
    """
    gain = loss - losses
    return torch.where(gain.isfinite() & (distances > 0), gain / distances, 0)


def mixed(own, candidates, w):
    """Step 3: the model of ONE client: `own` [...], `candidates` [M, ...], w [M].

    >>> mixed({"θ": torch.tensor(0.0)}, {"θ": torch.tensor([1.0, 3.0, -1.0])}, torch.tensor([3.0, 1.0, -5.0]))
    {'θ': tensor(1.5000)}
    """
    better = w.clamp(min=0)
    return average(candidates, better) if better.any() else clone(own)


def distances(model, own, candidates):
    """‖θ_n − θ_i‖ over the trained parameters of ONE client's `own` [...] and its `candidates` [M, ...]: [M]."""
    pairs = zip(named_leaves(own), leaves(candidates), strict=True)
    apart = [(far - near).reshape(len(far), near.numel()) for (name, near), far in pairs if not model.is_buffer(name)]
    return sum(t.double().square().sum(1) for t in apart).sqrt().cpu()


@dataclass(frozen=True)
class FedFomo:
    paper: ClassVar[str] = (
        "Personalized Federated Learning with First Order Model Optimization (Zhang et al., ICLR 2021)"
    )
    product: ClassVar[str] = "after"

    candidates: int = 5  # M; PFLlib's, and to our knowledge (not checked against the text) the paper's main runs'
    epsilon: float = 0.3  # ε_t in the first round; the authors' code's
    epsilon_decrease: float = 0.05  # what ε_t loses each round, down to 0; the authors' code's
    share: float = 0.2  # of a client's training samples, for validation; PFLlib's

    def __post_init__(self):
        integer("candidates", self.candidates, 0)
        real("epsilon", self.epsilon, 0, 1)
        real("epsilon_decrease", self.epsilon_decrease, 0)
        real("share", self.share, above=0, high=1)

    def server(self, fed):
        N = fed.num_clients
        affinity = torch.zeros(N, N, dtype=torch.float32, device=fed.device)
        counts = {"round": torch.tensor(0), "seed": torch.tensor(torch_seed(fed.seed, "candidates"))}
        return {"models": repeat(fed.init(), N), "affinity": affinity, **counts}

    def client(self, group):
        return group.each_client(group.init())

    def download(self, server, ids):
        chosen = self.chosen(server, ids)
        return tree_map(lambda t: t[chosen], server["models"])

    def local(self, clients, kept, message):
        model, w = self.mix(clients, kept, message)
        _, rest = clients.split(self.share, "validation")
        model = rest.sgd(model_loss, model)
        return model, {"model": model, "w": w.to(leaves(model)[0].device, torch.float32)}, model

    def merge(self, server, ids, message, upload, n):
        chosen = self.chosen(server, ids)  # once more the same, for the draws are those of the round
        learned = clone(server)
        learned["affinity"][torch.as_tensor(ids)[:, None], chosen] += upload["w"]
        put(learned["models"], ids, upload["model"])
        return {**learned, "round": server["round"] + 1}

    def deploy(self, clients, kept, message):
        return self.mix(clients, kept, message)[0]

    def watch(self, server, kept):
        P = server["affinity"]
        return {"P": P[~torch.eye(len(P), dtype=torch.bool, device=P.device)]}

    def chosen(self, server, ids):
        """Whose models the clients `ids` get this round: [C, M]."""
        M, t = min(self.candidates, len(server["affinity"]) - 1), int(server["round"])
        rows = zip(server["affinity"][torch.as_tensor(ids)].tolist(), np.asarray(ids).tolist(), strict=True)
        epsilon = max(0, self.epsilon - self.epsilon_decrease * t)
        lists = [choose(P, i, M, epsilon, rng(int(server["seed"]), t, i)) for P, i in rows]
        return torch.tensor(lists, dtype=torch.int64).view(len(ids), M)

    def mix(self, clients, kept, message):
        """Steps 2 and 3: the models [C, ...] before training, and w [C, M]."""
        held_out, _ = clients.split(self.share, "validation")
        own = held_out.mean(model_loss, kept)
        M = leaves(message)[0].shape[1]
        losses = [held_out.mean(model_loss, tree_map(lambda t, m=m: t[:, m], message)) for m in range(M)]
        losses = torch.stack([own, *losses], 1)  # [C, 1 + M]
        models, w = [], []
        for i, (loss, *_) in enumerate(losses):
            mine, theirs = row(kept, i), row(message, i)
            w.append(weights(loss, losses[i, 1:], distances(clients.model, mine, theirs)))
            models.append(mixed(mine, theirs, w[i]))
        return stack(models), torch.stack(w)
