"""Sweeps: rows in order, finished experiments read, and one failure that loses no other."""

import warnings

import pandas as pd
import pytest

from pflkit.experiment import experiment
from pflkit.sweep import processes, sweep

SMALL = {"clients": 4, "rounds": 2, "partition": "iid"}


def test_a_sweep_is_the_experiments_one_by_one(tmp_path, capsys):
    wanted = [{"method": method, "seed": seed, **SMALL} for method in ("fedavg", "fedrep") for seed in (0, 1)]
    table = sweep(wanted, out=tmp_path, jobs=2)
    assert len(capsys.readouterr().out.splitlines()) == 4
    alone = [{**arguments, **experiment(**arguments).summary()} for arguments in wanted]
    columns = ["method", "seed", "accuracy", "before", "after", "best", "bytes_up", "bytes_down", "flops"]
    pd.testing.assert_frame_equal(table[columns], pd.DataFrame(alone)[columns], check_exact=True)
    seconds = table["seconds"].tolist()
    assert sweep(wanted, out=tmp_path, jobs=1, progress=False)["seconds"].tolist() == seconds  # read, not repeated


def test_a_failure_is_told_with_its_arguments_and_loses_nothing(tmp_path):
    wanted = [{"method": "fedavg", "beta": 0.1, **SMALL}, {"method": "local", **SMALL}]  # iid has no beta
    with pytest.raises(RuntimeError, match=r"1 of 2 experiments failed:\n\nmethod=fedavg beta=0.1 (.|\n)*beta=0.1: "):
        sweep(wanted, out=tmp_path, jobs=2, progress=False)
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["local"]


def test_that_a_worker_was_replaced_is_no_news_and_all_else_is():
    with processes():
        warnings.warn(
            "A worker stopped while some jobs were given to the executor. This can be caused by", stacklevel=1
        )
        with pytest.warns(UserWarning, match="else"):
            warnings.warn("something else", stacklevel=1)
