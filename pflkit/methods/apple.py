"""APPLE: every client mixes all clients' core models by weights that it learns, and trains its own core within the mix.

Source: Luo, Wu: Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning. IJCAI 2022,
arXiv 2110.08394.

Each client j has a core model w_j^c; client i keeps its own, and weights p_i [N], any real numbers. They start at
p_0j = n_j / n, the clients' shares of all samples, and are drawn back there, by λ(r) less and less. Round r (counted
from 0), for the sampled clients:
    1.  the server sends client i             the others' cores w_j^c
    2.  which form, with its own,             w_i^p = Σ_j p_ij w_j^c
        in each step the personalized model
    3.  client i trains core and weights      w_i^c  <- w_i^c − η_1 p_ii ∇f_i(w_i^p)
        on f_i(w_i^p) + λ(r) μ/2 ‖p_i − p_0‖² p_ij   <- p_ij − η_2 (<∇f_i(w_i^p), w_j^c> + λ(r) μ (p_ij − p_0j))
        others' cores stand still; E epochs
    4.  keeps w_i^c and p_i, and uploads      w_i^c
    5.  the server stores it

Travels:   the other N − 1 cores down, or M of them with a `budget`; the own core up. p_i never leaves the client.
Keeps:     its core, p_i and p_0; with a budget also the others' cores as it last got them. The server keeps N cores.
Evaluated: w_i^p `before` local training, of the new cores and old weights; w_i^p `after` it.

Client i's weights are in the order of the clients i, i + 1, ..., N − 1, 0, ..., i − 1; the first is its own, p_ii.
p_0 is known from the start and not counted, like the initial model and N: sizes do not change.
A round holds N − 1 cores for each sampled client, twice while they are sent: 2 N² models in all where everyone joins,
or is scored: 46 GB for 100 clients with the 4-layer CNN. A `budget` saves bytes, not memory, for cores are then kept.
As p_ii is near 1/N at first, a core moves at about η_1 / N: slowly, at the local rate of other methods.
Momentum, decay and clipping of `Training`, where set, act on cores and weights alike, as one vector.
FLOPs counted are those of the model; the mix and its gradient take about 4 N a parameter and step more.

Batch-norm's statistics are the client's own: they belong to its personalized model on its own data, and a mix by
weights that may be negative, or not sum to 1, could be a negative variance. So they do not travel.

With a budget M, the paper (to our knowledge, not checked against the text) and its code let a client choose, those it
never got first, then at random by |p_ij|. Here p_i is not told, so the server sends cores in turn, M a round, and all
once before any comes again. In the mix a client uses the last copy it got of each core, or at first the initial
model: leaving the missing ones out would scale the model down, by its missing weights.

Where released code differs, and what we do:
  - ljaiverson/pFL-APPLE 30a02c4 trains with η_1 = .01 and momentum .9, η_2 = .001, μ = .1, L = .1 of all rounds and the
    exponential λ; the last four are our defaults. But its penalty λ(r) μ ‖p_i − p_0‖² is without the ½, so its μ is
    .2 here; and its exponential λ is 0 from round L on. Here it goes on falling.
  - TsingZ0/PFLlib d832e76 (2025-11-29) starts at p_ij = 1/N. Here it is n_j / n.
  - It uploads the personalized model and sets the core back, so that cores are never shared. Here they are.
  - The mix that it uploads and scores is that of the start of the last batch: a step is lost. Here it is made anew.
  - Its gradient in p is a mean over elements and tensors, and its η_2 and μ are 0 by default, which freezes p. Here it
    is the inner product, and neither is 0.
  - Its λ is a round late. Here round r has λ(r).
  - All its clients train, whatever the join ratio. Here those that are not sampled are not touched.
  - It multiplies η_1 by N, to make up for p_ii = 1/N. Here η_1 is the local learning rate; `core_lr` sets another.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from pflkit.checks import choice, integer, real
from pflkit.methods.fedavg import model_loss
from pflkit.trees import clone, put, repeat, row, stack, tree_map


def personal(core, p, others):
    """w^p = p_0 core + Σ_k p_k others_k of ONE client: core (extractor, head), p [N], others of leaves [N − 1, ...].

    What others do not have, batch-norm's statistics, is the core's.

    >>> core, others = ({"w": torch.tensor([1.0])}, {}), ({"w": torch.tensor([[3.0]])}, {})
    >>> personal(core, torch.tensor([0.5, 0.5]), others)
    ({'w': tensor([2.])}, {})
    """

    def mix(own, far):  # as a product of a matrix and a vector, which reads all cores only once
        return p[0] * own + (far.reshape(len(far), own.numel()).T @ p[1:]).view(own.shape)

    def part(own, far):
        return type(own)({name: mix(t, far[name]) if name in far else t for name, t in own.items()})

    return tuple(map(part, core, others))


def apple_loss(model, params, batch, others, p_0, strength):
    """The loss of step 3 of ONE client: params = (core, p), strength = λ(r) μ; mean cross-entropy of w^p, and penalty.

    Its gradients by autograd are those of step 3: p_ii ∇f_i for the core, full inner products for p.
    """
    core, p = params
    return model_loss(model, personal(core, p, others), batch) + strength / 2 * (p - p_0).square().sum()


def focus(r, L, scheduler="exp"):
    """λ(r), from 1 in round r = 0 on: "cos" down to 0 in round L, "exp" to .001, and on; L a number of rounds.

    >>> [focus(r, 10, "cos") for r in (0, 5, 10, 11)]
    [1.0, 0.5, 0.0, 0.0]
    >>> [round(focus(r, 9), 6) for r in (0, 3, 9)]
    [1.0, 0.1, 0.001]
    """
    if scheduler == "exp":
        return 0.001 ** (r / L)  # the released code's number
    return (1 + math.cos(math.pi * r / L)) / 2 if r < L else 0.0


def trained(model, params):
    """(extractor, head) without buffers: what of a core travels."""
    return tuple({name: t for name, t in part.items() if not model.is_buffer(name)} for part in params)


def in_turn(turn, N, M):
    """Which M of its N − 1 others a client gets next, by their place in its order [C, M], and its turn after that [C].

    >>> places, turn = in_turn(torch.tensor([0, 2]), N=4, M=2)
    >>> places.tolist(), turn.tolist()
    ([[0, 1], [2, 0]], [2, 1])
    """
    others = max(1, N - 1)
    return (turn[:, None] + torch.arange(M)) % others, (turn + M) % others


@dataclass(frozen=True)
class APPLE:
    paper: ClassVar[str] = (
        "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning (Luo, Wu, 2022)"
    )
    product: ClassVar[str] = "after"

    lr_p: float = 0.001  # η_2; the released code's, as scheduler and L
    mu: float = 0.1  # μ; the number is the released code's, whose penalty is twice as strong
    scheduler: str = "exp"  # of λ; or "cos"
    L: float = 0.1  # the share of all rounds that the paper's L is
    core_lr: float | None = None  # η_1; None: the local learning rate
    budget: int | None = None  # M, how many cores a client gets; None, or N − 1 and more: all others'

    def __post_init__(self):
        real("lr_p", self.lr_p, 0)
        real("mu", self.mu, 0)
        choice("scheduler", self.scheduler, ("exp", "cos"))
        real("L", self.L, above=0, high=1)
        if self.core_lr is not None:
            real("core_lr", self.core_lr, 0)
        if self.budget is not None:
            integer("budget", self.budget, 1)

    def server(self, fed):
        cores = repeat(trained(fed.model, fed.init()), fed.num_clients)
        return {"cores": cores, "turn": torch.zeros(fed.num_clients, dtype=torch.int64)}

    def client(self, group):
        N, core = len(group.sizes), group.init()
        order = (torch.arange(N)[:, None] + torch.arange(N)) % N
        sizes = torch.as_tensor(group.sizes, dtype=torch.float64)[order]
        p_0 = (sizes / sizes[0].sum()).to(group.device, group.dtype)
        kept = {"core": group.each_client(core), "p": p_0.clone(), "p_0": p_0}
        if self.most(N) == N - 1:
            return kept
        cores = repeat(repeat(trained(group.model, core), N - 1), N)
        return {**kept, "cores": cores, "turn": torch.zeros(N, dtype=torch.int64)}

    def download(self, server, ids):
        N, ids = len(server["turn"]), torch.as_tensor(ids)
        places, _ = in_turn(server["turn"][ids], N, self.most(N))
        which = (ids[:, None] + 1 + places) % N  # of client i's others the k-th is i + 1 + k
        return tree_map(lambda t: t[which], server["cores"])

    def local(self, clients, kept, message):
        lr = clients.training.lr if self.core_lr is None else self.core_lr
        strength = self.mu * focus(clients.round - 1, self.L * clients.rounds, self.scheduler)
        keeps, cores = self.known(kept, message)
        start = (kept["core"], kept["p"])
        core, p = clients.sgd(apple_loss, start, cores, kept["p_0"], strength, lr=(lr, self.lr_p))
        return {**keeps, "core": core, "p": p}, trained(clients.model, core), self.models(core, p, cores)

    def merge(self, server, ids, message, upload, n):
        learned, N = clone(server), len(server["turn"])
        _, turn = in_turn(server["turn"][torch.as_tensor(ids)], N, self.most(N))
        put(learned, ids, {"cores": upload, "turn": turn})
        return learned

    def deploy(self, clients, kept, message):
        return self.models(kept["core"], kept["p"], self.known(kept, message)[1])

    def watch(self, server, kept):
        return {"p_ii": kept["p"][:, 0], "p_ij": kept["p"][:, 1:]}

    def most(self, N):
        """How many of N clients' cores one of them gets."""
        return N - 1 if self.budget is None else min(self.budget, N - 1)

    def known(self, kept, message):
        """What clients keep on receiving `message`, and the others' cores as they then know them, [C, N − 1, ...]."""
        if "cores" not in kept:
            return kept, message
        C, N = kept["p"].shape
        places, turn = in_turn(kept["turn"], N, self.most(N))
        cores = clone(kept["cores"])
        for i in range(C):
            put(row(cores, i), places[i], row(message, i))
        return {**kept, "cores": cores, "turn": turn}, cores

    def models(self, core, p, cores):
        """w^p of each client: [C, ...]."""
        return stack([personal(*row((core, p, cores), i)) for i in range(len(p))])
