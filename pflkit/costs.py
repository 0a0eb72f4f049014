"""What a run cost, and when it got where: from a History's measured bytes, FLOPs and seconds.

Bytes are counted where messages pass, for the sampled clients; evaluation causes no traffic. FLOPs are those of matrix
products and convolutions (a multiply-add is two), forward and backward, of the clients' training.
"""

import pandas as pd

from pflkit.checks import integer, real


def played(history):
    """History.rounds by round, without the closing row, in which nothing is sent or spent."""
    return history.rounds.dropna(subset="joined").set_index("round")


def per_round(history):
    """Bytes down and up per sampled client, and FLOPs of all of them, training only: means over rounds. `seconds` of
    the same training is the median round's: a process's first one also loads libraries and warms memory.
    """
    rounds = played(history)
    return pd.Series(
        {
            "bytes down / client": rounds["bytes_down"].sum() / rounds["joined"].sum(),
            "bytes up / client": rounds["bytes_up"].sum() / rounds["joined"].sum(),
            "FLOPs": rounds["flops"].mean(),
            "seconds": rounds["seconds"].median(),
        }
    )


def rounds_to_convergence(history, patience=100, point=None):
    """Rounds of training until the best accuracy, if `patience` evaluations after it brought no better one; else None.

    The stopping rule of FedAH's released code, where `patience` is 100.
    """
    integer("patience", patience, 1)
    curve = history.curve(point)
    best = int(curve.to_numpy().argmax())
    return int(curve.index[best]) if len(curve) - best > patience else None


def to_convergence(history, patience=100, point=None):
    """Rounds until convergence by that rule, and the bytes, down and up together, and seconds of training that they
    took, as a Series; None for a run that has not converged.
    """
    if (rounds := rounds_to_convergence(history, patience, point)) is None:
        return None
    spent = played(history).loc[:rounds]
    sent = spent[["bytes_down", "bytes_up"]].to_numpy().sum()
    return pd.Series({"rounds": rounds, "bytes": sent, "seconds": spent["seconds"].sum()})


def rounds_to_target(history, target, point=None):
    """Rounds of training until the mean accuracy is first seen to reach `target` (0 to 1); None if it never is."""
    real("target", target, 0, 1)
    curve = history.curve(point)
    reached = curve.index[curve >= target]
    return int(reached[0]) if len(reached) else None


def bytes_to_target(history, target, point=None):
    """Bytes, down and up together, until the mean accuracy first reaches `target` (0 to 1); None if it never does."""
    if (last := rounds_to_target(history, target, point)) is None:
        return None
    return int(played(history).loc[:last, ["bytes_down", "bytes_up"]].to_numpy().sum())
