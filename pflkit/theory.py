"""What proofs of convergence speak of, measured on a real run: progress, smoothness, the scatter of gradients."""

import numpy as np
import pandas as pd

from pflkit import trees
from pflkit.descent import slope
from pflkit.methods.fedavg import model_loss
from pflkit.models import trained

COLUMNS = ("round", "model", "client", "fall", "L", "sigma2", "gradient2")


def of_rounds(fed, method, rounds):
    """Plays `method` on `fed`; returns a DataFrame, a row for each round and client that joined it.

    Of the client's cross-entropy f on its training data, by the model w that it would use on receiving the round's
    message and the w' that it holds after its local steps (losses in evaluation mode, gradients as in training):

        fall        f(w) − f(w')
        L           ‖∇f(w') − ∇f(w)‖ / ‖w' − w‖: the least constant of smoothness that the two allow
        sigma2      mean ‖∇f_B(w) − ∇f(w)‖² over batches B of the training's size
        gradient2   ‖∇f(w)‖²

    Norms are over trained parameters. L is NaN where a client did not move.
    """
    state, rows = fed.start(method), []
    for t in range(1, rounds + 1):
        everyone = fed.parts(fed.deployed(method, state, rounds))
        result = fed.play(method, state, rounds)
        groups = fed.by_group(result.ids)
        for (g, at, places), end in zip(groups, fed.parts(result.held), strict=True):
            clients, start = fed.clients(result.ids[at], t, rounds), trees.take(everyone[g], places)
            rows += [(t, clients.model.name, *row) for row in _of_clients(clients, start, end)]
    return pd.DataFrame(rows, columns=COLUMNS)


def scatter(model, params, data, batch_size):
    """Mean ‖∇f_B − ∇f‖² of ONE client's model on data = (x, y), over batches B of consecutive samples."""
    whole, far = slope(model, model_loss, params, data)[0], []
    for batch in zip(*(part.split(batch_size) for part in data), strict=True):
        apart = trees.add(slope(model, model_loss, params, batch)[0], whole, -1.0)
        far.append(sum(float(leaf.double().square().sum()) for leaf in trees.leaves(apart)))
    return float(np.mean(far))


def _of_clients(clients, start, end):
    """(client, fall, L, sigma2, gradient2) of each client, whose models [C, ...] are `start` and `end`."""
    losses = [clients.mean(model_loss, params).numpy() for params in (start, end)]
    slopes = [clients.gradient(model_loss, params)[0] for params in (start, end)]
    moved = _norms(clients.model, trees.add(end, start, -1.0))
    turned = _norms(clients.model, trees.add(slopes[1], slopes[0], -1.0))
    L = np.divide(turned, moved, out=np.full(len(moved), np.nan), where=moved > 0)
    falls, gradients2 = losses[0] - losses[1], _norms(clients.model, slopes[0]) ** 2
    for i, client in enumerate(clients.ids):
        sigma2 = scatter(clients.model, trees.row(start, i), clients.data[i], clients.training.batch_size)
        yield int(client), falls[i], L[i], sigma2, gradients2[i]


def _norms(model, tree):
    """The norm of each client's trained leaves of a tree [C, ...]: [C]."""
    leaves = [leaf for leaf, moves in zip(trees.leaves(tree), trained(model, tree), strict=True) if moves]
    return sum(leaf.double().flatten(1).square().sum(1) for leaf in leaves).sqrt().cpu().numpy()
