"""Bad values get one line that names the parameter, the value and what is allowed."""

import re

import numpy as np
import pytest

from pflkit.checks import boolean, choice, integer, real


@pytest.mark.parametrize("value", [2, 5, np.int64(3), np.uint8(5)])
def test_integer_gives_an_int(value):
    assert type(integer("k", value, 2, 5)) is int and integer("k", value, 2, 5) == value


@pytest.mark.parametrize("value", [1, 6, 3.0, True, np.True_, "3", None, float("nan"), np.array([3]), 2 + 0j])
def test_integer_refuses(value):
    with pytest.raises(ValueError, match=rf"^k={re.escape(repr(value))}: must be a whole number from 2 to 5$"):
        integer("k", value, 2, 5)


@pytest.mark.parametrize("value", [0, 0.5, 1, np.float32(0.25), np.int32(1)])
def test_real_gives_a_float(value):
    assert type(real("r", value, 0, 1)) is float and real("r", value, 0, 1) == value


@pytest.mark.parametrize("value", [-1e-9, 1.001, float("nan"), float("inf"), -float("inf"), False, "0.5", None, 1j])
def test_real_refuses(value):
    with pytest.raises(ValueError, match=rf"^r={re.escape(repr(value))}: must be a finite number from 0 to 1$"):
        real("r", value, 0, 1)


def test_an_open_end_excludes_its_bound():
    assert real("r", 1e-300, above=0) == 1e-300
    with pytest.raises(ValueError, match=r"^r=0: must be a finite number above 0, at most 1$"):
        real("r", 0, above=0, high=1)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(None, None, ""), (1, None, ", at least 1"), (None, 9, ", at most 9"), (1, 9, " from 1 to 9")],
)
def test_the_message_says_the_range(low, high, said):
    with pytest.raises(ValueError, match=rf"^k='x': must be a whole number{said}$"):
        integer("k", "x", low, high)


def test_boolean():
    assert boolean("b", True) is True and boolean("b", False) is False
    for value in ("false", 0, 1, None, np.True_):
        with pytest.raises(ValueError, match=rf"^b={re.escape(repr(value))}: must be True or False$"):
            boolean("b", value)


def test_choice():
    assert choice("c", "x", {"x": 1, "y": 2}) == "x"
    for value in ("z", None, ["x"]):
        with pytest.raises(ValueError, match=rf"^c={re.escape(repr(value))}: must be one of 'x', 'y'$"):
            choice("c", value, ("x", "y"))


def test_without_bounds_there_are_still_wrong_kinds():
    for value in (True, False, 1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"^k={value}: must be a whole number$"):
            integer("k", value)
    for value in (True, False, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match=rf"^r={value}: must be a finite number$"):
            real("r", value)
