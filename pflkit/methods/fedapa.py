"""FedAPA: the server mixes for every client its own extractor, by weights that it learns by gradient.

Source: Sun, Sun, Pan, Fu, Guo: FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation for Federated
Learning on Heterogeneous Data. IJCAI 2025, doi 10.24963/ijcai.2025/692, arXiv 2502.07456, Algorithm 1.

The server keeps all clients' extractors θ_j (elsewhere: r_j) and for each client i a row of weights A_i, at first 1 for
itself and 0 for the rest. Client i keeps its head φ_i (elsewhere: h_i); θ'_i is the paper's θ_i after training. Round
t, for the sampled clients S_t:
    1.  the server mixes and sends            θ̄_i = Σ_j a_ij θ_j                                    (Eq. 5)
    2.  client i trains both parts jointly    (θ'_i, φ_i) <- SGD on f_i from (θ̄_i, φ_i), E epochs
    3.  keeps φ_i, and uploads                θ'_i
    4.  the server lowers the proxy loss      P(A_i) = ½ ‖θ̄_i(A_i) − θ'_i‖²
        by its gradient in A_i                a_ij <- a_ij − η <θ_j, θ̄_i − θ'_i>                    (Eq. 6, 7)
    5.  moves each a_ij into [0, 1], sets     a_ii <- ½
    6.  normalizes the row, and stores        A_i <- A_i / Σ_j a_ij,  θ_i <- θ'_i
In steps 1 and 4 all clients see the extractors θ_j as they were when the round began.

For an ablation: `server_lr=0.0` keeps A = I, each client alone; `weights="uniform"` keeps all a_ij = 1/N; and with
`share="model"` the head is mixed too, θ being the whole model.

Travels:   the extractor, down and up. A never leaves the server.
Keeps:     the client's head φ_i. The server keeps N extractors and N² weights.
Evaluated: (θ̄_i, φ_i) `before` local training; (θ'_i, φ_i) `after` it.

Where released code differs, and what we do:
  - Eq. 6 and 7 as printed climb the proxy loss: Δθ is defined with the other sign. The paper's prose descends, and so
    do its code, Yuxia-Sun/FedAPA a903858 (2025-05-16), and we; `sign="paper"` gives what is printed.
  - "Normalize A_i" is not defined. The code divides by the row's sum, and so do we; `normalize="others"` scales the
    other entries to a sum of 1 − `self_weight` instead.
  - The code sets a_ii = 1, the paper ½: `self_weight=1.0` gives the code's.
  - It goes client by client, so that the later ones mix what the earlier ones have just uploaded. The paper says in
    parallel, and so do we; `sequential=True` goes client by client, in the order of their ids.
  - It steps the whole of A with momentum 0.9 once per client, so that rows of clients that did not join move too, and
    one gradient counts eight to ten times. Here a row moves in its own client's rounds only, without momentum;
    `momentum` gives each row one of its own, v_i <- μ v_i + ∂P/∂A_i, A_i <- A_i − η v_i.
  - It takes inner products over batch-norm's statistics and counters, which saturates the weights. Here over trained
    parameters only; buffers are mixed by A like the rest.
  - Its clients' momentum outlives the round; here each round's SGD starts anew.
  - It scores every client's last local model, our `after` for those that joined. The paper's output is θ̄_i, our
    `before`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from pflkit.checks import boolean, choice, real
from pflkit.methods.fedavg import model_loss
from pflkit.models import trained
from pflkit.trees import clone, leaves, like, put, repeat, tree_map


def rows(t):
    """A tensor [N, ...] as a matrix [N, numbers]."""
    return t.reshape(len(t), -1)


def mixed(A, theta):
    """θ̄ = A Θ (Eq. 5), leaf by leaf: A [C, N], theta a tree [N, ...] -> a tree [C, ...].

    Integer leaves (batch-norm's counters) are rounded.
    """

    def leaf(t):
        product = A @ rows(t).to(A.dtype)
        return (product if t.is_floating_point() else product.round()).to(t.dtype).view(len(A), *t.shape[1:])

    return tree_map(leaf, theta)


def slopes(theta, sent, returned, trained):
    """∂P/∂a_ij = <θ_j, θ̄_i − θ'_i> of C clients: [C, N].

    theta: the extractors [N, ...]; sent: θ̄ [C, ...]; returned: θ' [C, ...]; trained: for each leaf, whether it counts.
    """

    def leaf(t, a, b, counts):
        return rows(a - b) @ rows(t).T if counts else 0

    return sum(leaves(tree_map(leaf, theta, sent, returned, trained)))


def proxy(sent, returned, trained):
    """P = ½ ‖θ̄_i − θ'_i‖² of C clients: [C]."""

    def leaf(a, b, counts):
        return rows(a - b).square_().sum(1) if counts else 0  # in place: of 500 clients' CNNs it is 1 GB

    return sum(leaves(tree_map(leaf, sent, returned, trained))) / 2


def normalized(raw, ids, self_weight=0.5, normalize="sum"):
    """Steps 5 and 6: the `raw` rows [C, N] of the clients `ids`, clipped, with the self weight, and of sum 1.

    >>> normalized(torch.tensor([[0.95, 0.2]]), [0])                    # (.5, .2) / .7
    tensor([[0.7143, 0.2857]])
    >>> normalized(torch.tensor([[0.95, 0.2]]), [0], normalize="others")
    tensor([[0.5000, 0.5000]])
    """
    A, own = raw.clamp(0, 1), (range(len(ids)), ids)
    if normalize == "sum":
        A[own] = self_weight
        return A / A.sum(1, keepdim=True)
    A[own] = 0
    others = A.sum(1, keepdim=True)
    A = (1 - self_weight) * A / others.where(others > 0, 1)
    A[own] = 1 - A.sum(1)  # self_weight, or 1 where no other has any weight
    return A


@dataclass(frozen=True)
class FedAPA:
    paper: ClassVar[str] = (
        "FedAPA: Server-side Gradient-Based Adaptive Personalized Aggregation for Federated Learning "
        "on Heterogeneous Data (Sun et al., 2025)"
    )
    product: ClassVar[str] = "after"

    server_lr: float = 0.01  # η; the released configuration's, the paper's is not known to us
    self_weight: float = 0.5  # a_ii; the released code: 1
    sign: str = "descent"  # or "paper": climb the proxy loss, as Eq. 6 and 7 are printed
    normalize: str = "sum"  # or "others"
    sequential: bool = False  # client by client, as the released code
    momentum: float = 0.0  # μ of each row's steps; the released code has 0.9, and one velocity for all of A
    weights: str = "learned"  # or "uniform": A stays at 1/N
    share: str = "extractor"  # or "model": all of it is mixed, and nothing kept

    def __post_init__(self):
        real("server_lr", self.server_lr, 0)
        real("self_weight", self.self_weight, above=0, high=1)
        choice("sign", self.sign, ("descent", "paper"))
        choice("normalize", self.normalize, ("sum", "others"))
        boolean("sequential", self.sequential)
        real("momentum", self.momentum, 0, 1)
        choice("weights", self.weights, ("learned", "uniform"))
        choice("share", self.share, ("extractor", "model"))
        if self.normalize == "others" and self.self_weight == 1:
            raise ValueError("self_weight=1.0: must be below 1 with normalize='others', or nobody listens to anybody")

    @property
    def cohort(self):
        return 1 if self.sequential else None

    def server(self, fed):
        theta, N = self._shared(fed.init()), fed.num_clients
        if not leaves(theta):
            raise ValueError(f"model={fed.model.name!r}: FedAPA mixes extractors, and this one has no parameters")
        one = leaves(theta)[0].new_ones(N)
        # Which leaves are trained: `merge` takes no inner products over batch-norm's statistics. It never changes.
        counts = like(theta, list(map(torch.tensor, trained(fed.model, theta))))
        A = one.diag() if self.weights == "learned" else (one / N).repeat(N, 1)
        extractors = repeat(theta, N)
        return {"extractors": extractors, "A": A, "velocity": 0 * A, "proxy_change": 0 * one, "trained": counts}

    def client(self, group):
        return group.each_client({} if self.share == "model" else group.init()[1])

    def download(self, server, ids):
        return mixed(server["A"][ids], server["extractors"])

    def local(self, clients, kept, message):
        model = clients.sgd(model_loss, self.deploy(clients, kept, message))
        return {} if self.share == "model" else model[1], self._shared(model), model

    def merge(self, server, ids, message, upload, n):
        theta, counts, A = server["extractors"], server["trained"], server["A"][ids]
        velocity = self.momentum * server["velocity"][ids] + slopes(theta, message, upload, counts)
        raw = A
        if self.weights == "learned":
            raw = A + (1 if self.sign == "paper" else -1) * self.server_lr * velocity
            A = normalized(raw, ids, self.self_weight, self.normalize)
        before, after = (proxy(sent, upload, counts) for sent in (message, mixed(raw, theta)))  # to be watched only
        change = ((after - before) / before.where(before > 0, 1)).nan_to_num()  # it must not end a run
        new = {"extractors": upload, "A": A, "velocity": velocity, "proxy_change": change}
        learned = clone({name: server[name] for name in new})
        put(learned, ids, new)
        return {**learned, "trained": counts}

    def _shared(self, model):
        """Of a model (extractor, head), what the server mixes."""
        return model if self.share == "model" else model[0]

    def deploy(self, clients, kept, message):
        return message if self.share == "model" else (message, kept)

    def watch(self, server, kept):
        A = server["A"]
        own = torch.eye(len(A), dtype=torch.bool, device=A.device)
        return {"a_ii": A[own], "a_ij": A[~own], "proxy change": server["proxy_change"]}
