"""A run that was cut short goes on in a new process as if nothing had happened, whatever the method."""

import subprocess
import sys

import pandas as pd
import pytest

from pflkit import experiment, trees
from pflkit.federation import Federation
from pflkit.methods import make

SETUP = """
from pflkit import data, experiment, models, partition
from pflkit.federation import Federation
from pflkit.methods import METHODS, make
from pflkit.training import Training

real = data.load("digits")
net = models.build("mlp", real.shape, 10)
split, options = partition.iid(real.y, 40), {"training": Training(lr=0.05), "join_ratio": 0.1}
fed = Federation(real, split, net, **options)
mixed = Federation(real, split, [net, models.build("mlp-3", real.shape, 10)], **options)
RUNS = [(name, fed) for name in METHODS]
RUNS += [(name, mixed) for name, method in METHODS.items() if getattr(method, "heterogeneous", False)]
"""
CONTINUE = """
import sys
for name, fed in RUNS:
    experiment.run(make(name), fed, 4, out=sys.argv[1], progress=1)
"""


def test_continued_elsewhere_after_round_2(tmp_path, monkeypatch):
    """Tables (seconds aside) and state are those of an uninterrupted run, with one model and with different ones."""
    exec(SETUP, scope := {})
    play, runs = Federation.play, scope["RUNS"]

    def two_rounds(fed, method, state, rounds):
        if state.round == 2:
            raise KeyboardInterrupt
        return play(fed, method, state, rounds)

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "play", two_rounds)
        patch.setattr(experiment.time, "perf_counter", lambda: 0.0)  # so that no save is found too expensive
        for name, fed in runs:
            with pytest.raises(KeyboardInterrupt):
                experiment.run(make(name), fed, 4, out=tmp_path)
    command = [sys.executable, "-c", SETUP + CONTINUE, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    for k, (name, fed) in enumerate(runs):  # a line on what was read, and one for each of the rounds 3 and 4
        assert [line.split("  ")[0].split(":")[0] for line in lines[3 * k : 3 * k + 3]] == [name] * 3
        assert lines[3 * k].startswith(f"{name}: 2 of 4 rounds read")
        whole, continued = experiment.run(make(name), fed, 4), experiment.run(make(name), fed, 4, out=tmp_path)
        assert continued.loaded
        states = [(history.state.server, history.state.kept) for history in (whole, continued)]
        assert trees.unequal(*states) == 0
        for table in ("rounds", "clients", "watch"):
            tables = [getattr(history, table) for history in (whole, continued)]
            tables = [t.drop(columns=["seconds", "seconds_eval"], errors="ignore") for t in tables]
            pd.testing.assert_frame_equal(*tables, check_exact=True, check_like=True)
