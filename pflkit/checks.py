"""Bad input gets one clear line that names the parameter, its value and what is allowed."""

from numbers import Integral, Real


def integer(name, value, low=None, high=None):
    """`value` as an int within [low, high]; else ValueError. True and False are not integers here."""
    allowed = "must be a whole number" + _range(low, high)
    if isinstance(value, bool) or not isinstance(value, Integral) or not _within(value, low, high):
        raise ValueError(f"{name}={value!r}: {allowed}")
    return int(value)


def real(name, value, low=None, high=None, above=None):
    """`value` as a finite float, within [low, high], and > `above` where that is given; else ValueError.

    Finite in float32: what only float64 can hold would overflow in training.
    """
    allowed = "must be a finite number" + (f" above {above}" if above is not None else "") + _range(low, high)
    ok = isinstance(value, Real) and not isinstance(value, bool) and abs(value) < 3.4e38 and _within(value, low, high)
    if not ok or (above is not None and not value > above):
        raise ValueError(f"{name}={value!r}: {allowed}")
    return float(value)


def boolean(name, value):
    """`value` if it is True or False; else ValueError (the string "false" is neither)."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")
    return value


def choice(name, value, allowed):
    """`value` if it is one of `allowed`; else ValueError."""
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")
    return value


def _within(value, low, high):
    return (low is None or value >= low) and (high is None or value <= high)


def _range(low, high):
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f", at least {low}"
    return f", at most {high}" if high is not None else ""
