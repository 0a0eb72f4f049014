"""pFedHN: a hypernetwork on the server generates every client's model from an embedding, and learns from what returns.

Source: Shamsian, Navon, Fetaya, Chechik: Personalized Federated Learning using Hypernetworks. ICML 2021, arXiv
2103.04628.

The server has a hypernetwork H with parameters φ, and an embedding v_i in R^d of each client. H is an MLP that turns
v_i into features e_i, and for each tensor of the client's model a linear layer on them:
    e_i = MLP(v_i),  θ_i = H(v_i; φ) = {W e_i + b for each tensor}
The clients S_t of round t meet the server one after the other, each the φ that the one before has left. For client i:
    1.  the server generates and sends        θ_i = H(v_i; φ)
    2.  client i trains it                    θ̃_i <- SGD on f_i from θ_i, E epochs
    3.  uploads                               θ̃_i
    4.  the server takes θ_i − θ̃_i for the    g_φ = (∂θ_i/∂φ)ᵀ (θ_i − θ̃_i)
        gradient in θ_i, by the chain rule    g_v = (∂θ_i/∂v_i)ᵀ (θ_i − θ̃_i)
    5.  bounds the norm of (g_φ, g_v) by 50
    6.  and takes a step of SGD with          φ <- φ − α u_φ,    u_φ <- .9 u_φ + g_φ + λ φ
        momentum and weight decay             v_i <- v_i − α u_i,  u_i <- .9 u_i + g_v + λ v_i
With `pc` (pFedHN-PC, personal classifier) H generates the extractor only, and client i keeps and trains a head of its
own along with it.

Travels:   the generated parameters, down and up: a whole model, or with `pc` an extractor. φ and v never do.
Keeps:     batch-norm's statistics, and with `pc` the head. The server keeps φ, v and their momentum.
Evaluated: θ_i `before` local training, with `pc` under the client's own head; θ̃_i `after` it.

Where released code differs, and what we do. The authors' is AvivSham/pFedHN 1bc0549 (2023-02-14), from which are the
sizes of H and the rates:
  - To our knowledge (not checked against the text) the paper defines Δθ_i = θ̃_i − θ_i and subtracts its gradient, which
    would climb. The code descends, as step 4 does.
  - Weight decay and momentum move all clients' embeddings in each of the code's steps, and of KarhouTam/FL-bench's,
    06e658b (2025-10-09). Here v_i and its momentum move in the client's own rounds only.
  - The code's round is one client, drawn from all, and K = 50 steps, each on the first batch of newly shuffled data.
    Here the federation draws clients, who come in the order of their ids and train by `Training`, of which batch size
    64, lr 0.005, momentum 0.9, weight decay 5e-5 and clip 50 are the code's. `sequential=False` generates all models of
    a round from one φ, and takes one step on the mean of the clients' losses, in which v_i has 1/|S_t| of its own
    gradient (ours).
  - Clients count alike in the code, and here; but one with more batches an epoch moves further, and so counts more.
  - With `pc` the code's α is 0.05. Each head there begins with values of its own, has a momentum that outlives the
    round, and no part in the clipping. Here all heads begin alike, and head and extractor train as one model.
  - FL-bench takes int((1 + N) / 4) numbers for an embedding, the authors and we int(1 + N / 4): 12 and 13 for N = 50.
    With `pc` it generates heads all the same; here no head is generated, or travels.
  - The code reports the step of best validation accuracy. Here every round is scored, and the last one counts.
  - Its models have no batch-norm. Here H generates trained parameters only; running statistics and counters stay on the
    client. To the vector of a word that stands for padding, which is not trained, H gives zeros.
  - Initial values are of torch's default distributions, as in the code, but drawn from the federation's seed. So θ_i is
    not at first the model that other methods start from (ours).

H is large: a hundred times the model. For the 582,026 parameters of the 4-layer CNN it has 59 million, 235 MB, their
momentum as much; a run needs 2 GB, and a step of the server a second on one core. Clients who train one after the other
have one core between them, too.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import linear

from pflkit.checks import boolean, integer, real
from pflkit.methods.fedavg import model_loss
from pflkit.streams import torch_seed
from pflkit.trees import add, full_like, leaves, tree_map


def generate(phi, v):
    """θ = H(v; φ) of C clients: embeddings v [C, d] -> a tree [C, ...].

    phi: the layers "mlp", of which all but the last have a ReLU behind them; for each tensor [...] of θ a "weight"
    [..., hidden size] and a "bias" [...].
    """
    e = v
    for k, layer in enumerate(phi["mlp"]):
        e = linear(e.relu() if k else e, layer["weight"], layer["bias"])
    return tree_map(lambda W, b: torch.tensordot(e, W, ([1], [W.ndim - 1])) + b, phi["weight"], phi["bias"])


def pulled_back(H, phi, v, delta):
    """(g_φ, g_v) = the vector-Jacobian products of H(phi, v) with `delta`, a tree like its value.

    A hypernetwork of one number, θ = φ v, where φ = 3 and v = 2 give θ = 6, and training θ̃ = 5:

    >>> pulled_back(torch.mul, torch.tensor(3.0), torch.tensor(2.0), torch.tensor(6.0 - 5.0))
    (tensor(2.), tensor(3.))
    """
    return torch.func.vjp(H, phi, v)[1](delta)


def clipped(gradient, clip):
    """A tree, scaled down to the norm `clip` where its own is larger.

    >>> clipped((torch.tensor([3.0]), torch.tensor([4.0])), 2.5)
    (tensor([1.5000]), tensor([2.]))
    """
    norm = torch.stack([torch.linalg.vector_norm(g) for g in leaves(gradient)]).norm()
    return tree_map(lambda g: g * (clip / norm.clamp(min=clip)), gradient)


def stepped(tree, velocity, gradient, lr, momentum, weight_decay):
    """A step of SGD: (p − lr u, u) with u = momentum · velocity + gradient + weight_decay · p, for each tensor p."""
    velocity = add(add(gradient, tree, weight_decay), velocity, momentum)
    return add(tree, velocity, -lr), velocity


def initial(theta, clients, size, hidden_size, hidden_layers, seed):
    """(φ, v) for models like the tree `theta`, with torch's default distributions: of nn.Linear and nn.Embedding."""
    g = torch.Generator().manual_seed(torch_seed(seed, "hypernetwork"))

    def uniform(shape, inputs):
        return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=g)

    v, widths = torch.randn(clients, size, generator=g), [size] + [hidden_size] * hidden_layers
    mlp = [{"weight": uniform((hidden_size, w), w), "bias": uniform(hidden_size, w)} for w in widths]
    weight = tree_map(lambda t: uniform((*t.shape, hidden_size), hidden_size), theta)
    bias = tree_map(lambda t: uniform(t.shape, hidden_size), theta)
    return {"mlp": tuple(mlp), "weight": weight, "bias": bias}, v


def only(model, part):
    """Of a model (extractor, head), the tensors with the names that `part` has."""
    return tuple({name: whole[name] for name in some} for whole, some in zip(model, part, strict=True))


def together(part, rest):
    """The model of two parts."""
    return tuple(a | b for a, b in zip(part, rest, strict=True))


@dataclass(frozen=True)
class PFedHN:
    paper: ClassVar[str] = "Personalized Federated Learning using Hypernetworks (Shamsian et al., 2021)"
    product: ClassVar[str] = "before"

    pc: bool = False  # pFedHN-PC: heads are personal, and not generated
    embedding_size: int = 0  # d; 0: int(1 + N / 4); this, and all below but `sequential`, is the released code's
    hidden_size: int = 100
    hidden_layers: int = 3  # of the MLP, behind its first layer
    server_lr: float = 0.01  # α; the released code's, 0.05 with `pc`
    embedding_lr: float | None = None  # of v; None: as server_lr
    momentum: float = 0.9
    weight_decay: float = 0.001  # λ
    clip: float | None = 50.0  # None: no bound
    sequential: bool = True  # client by client, as the released code

    def __post_init__(self):
        boolean("pc", self.pc)
        integer("embedding_size", self.embedding_size, 0)
        integer("hidden_size", self.hidden_size, 1)
        integer("hidden_layers", self.hidden_layers, 0)
        real("server_lr", self.server_lr, 0)
        if self.embedding_lr is not None:
            real("embedding_lr", self.embedding_lr, 0)
        real("momentum", self.momentum, 0, 1)
        real("weight_decay", self.weight_decay, 0)
        if self.clip is not None:
            real("clip", self.clip, above=0)
        boolean("sequential", self.sequential)

    @property
    def cohort(self):
        return 1 if self.sequential else None

    def parts(self, group, model):
        """Of the initial (extractor, head) of `group`: what H generates, and the rest, which clients keep."""
        generated = [{name: t for name, t in part.items() if name not in model.buffers} for part in group.init()]
        if self.pc:
            generated[1] = {}
        rest = [{k: t for k, t in a.items() if k not in b} for a, b in zip(group.init(), generated, strict=True)]
        return tuple(generated), tuple(rest)

    def server(self, fed):
        theta, _ = self.parts(fed, fed.model)
        if not any(theta):
            raise ValueError(f"model={fed.model.name!r}: pFedHN-PC generates extractors; this one has no parameters")
        size = self.embedding_size or int(1 + fed.num_clients / 4)
        phi, v = initial(theta, fed.num_clients, size, self.hidden_size, self.hidden_layers, fed.seed)
        for k, part in enumerate((fed.model.extractor, fed.model.head)):
            for name, layer in part.module.named_modules():
                vectors = f"{name}.weight".removeprefix(".")
                if getattr(layer, "padding_idx", None) is not None and vectors in theta[k]:
                    for tree in (phi["weight"][k], phi["bias"][k]):
                        tree[vectors][layer.padding_idx] = 0
        phi, v = tree_map(lambda t: t.to(fed.device, fed.dtype), (phi, v))
        return {"phi": phi, "v": v, "velocity": full_like((phi, v), 0)}

    def client(self, group):
        return group.each_client(self.parts(group, group.model)[1])

    def download(self, server, ids):
        return generate(server["phi"], server["v"][ids])

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, together(message, kept))
        return only(model, kept), only(model, message), model

    def merge(self, server, ids, message, upload, n):
        phi, v, (u_phi, u_v) = server["phi"], server["v"].clone(), server["velocity"]
        u_v = u_v.clone()
        delta = tree_map(lambda sent, back: (sent - back) / len(ids), message, upload)
        gradient = pulled_back(generate, phi, v[ids], delta)
        g_phi, g_v = gradient if self.clip is None else clipped(gradient, self.clip)
        embedding_lr = self.server_lr if self.embedding_lr is None else self.embedding_lr
        phi, u_phi = stepped(phi, u_phi, g_phi, self.server_lr, self.momentum, self.weight_decay)
        v[ids], u_v[ids] = stepped(v[ids], u_v[ids], g_v, embedding_lr, self.momentum, self.weight_decay)
        return {"phi": phi, "v": v, "velocity": (u_phi, u_v)}

    def deploy(self, clients, kept, message):
        return together(message, kept)
