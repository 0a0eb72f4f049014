"""Many experiments on all cores: finished ones are read instead of repeated, and one failure loses no other."""

import contextlib
import traceback
import warnings

import joblib
import pandas as pd

from pflkit.experiment import experiment


@contextlib.contextmanager
def processes():
    """Within: joblib's workers are processes with one thread each.

    That it replaces a worker whose memory has grown, between two experiments, is not told: nothing is lost.
    """
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A worker stopped while some jobs were given to the executor")
        yield


def sweep(experiments, *, out="runs", jobs=-1, progress=True):
    """Runs `experiments`, dicts of arguments for `experiment`, each in a process of its own with one thread.

    Returns a DataFrame with a row for each, in order: its arguments, the method's `settings` a column each, and
    History.summary()'s numbers. `jobs` is the number of processes (-1: all cores). Raises RuntimeError after the others
    have finished where some failed, with the arguments and traceback of each.
    """
    experiments = list(experiments)
    rows, failures = [None] * len(experiments), []
    with processes():
        work = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(
            joblib.delayed(_one)(i, arguments, out) for i, arguments in enumerate(experiments)
        )
        for done, (i, summary, error) in enumerate(work, 1):
            text = " ".join(f"{key}={value}" for key, value in experiments[i].items())
            if error:
                failures.append(f"{text}\n{error}")
            else:
                plain = {k: v for k, v in experiments[i].items() if k != "settings"}
                rows[i] = {**plain, **(experiments[i].get("settings") or {}), **summary}
            if progress:
                verdict = "failed" if error else f"accuracy={summary['accuracy']:.4f}"
                print(f"{done}/{len(experiments)}  {text}  {verdict}", flush=True)
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(experiments)} experiments failed:\n\n" + "\n".join(failures))
    return pd.DataFrame(rows)


def _one(i, arguments, out):
    try:
        return i, experiment(**{"engine": "loop", "out": out, **arguments}).summary(), None
    except Exception:
        return i, None, traceback.format_exc()
