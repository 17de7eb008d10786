"""Numbers become text with the digits that their interval supports, and never a zero that is not zero."""

from __future__ import annotations

import math

import pytest

from harness.measure.receipt import Interval
from harness.numbers import (
    bracket,
    count,
    digest,
    ends,
    estimate,
    number,
    percent,
    percent_bracket,
    percent_ends,
    signed,
    size,
    with_interval,
)


def interval(low: float, high: float) -> Interval:
    return Interval(low=low, high=high, method="t", confidence=0.95, unit="row", n=32)


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (0.3837756141796914, 5, "0.38378"),
        (0.32521654777148873, 5, "0.32522"),
        (4.286921219375921, 5, "4.28692"),
        (0.38377, None, "0.3838"),
        (13.73049652179341, None, "13.73"),
        (0.1044262945652008, None, "0.1044"),
        (0.08110499382019043, None, "0.0811"),
        (1.5397437810897827, None, "1.540"),
        (0.0, 5, "0"),
        (-0.0, None, "0"),
        (3.1e-9, 5, "3.1e-9"),
        (-3e-7, 4, "-3.0e-7"),
        (123456.7, None, "123457"),
        (float("nan"), 3, "NaN"),
        (float("inf"), None, "inf"),
        (-math.inf, None, "-inf"),
        (None, None, "n/a"),
    ],
)
def test_number(value: float | None, decimals: int | None, text: str) -> None:
    assert number(value, decimals) == text


def test_an_interval_of_rounding_alone_supports_no_digits() -> None:
    """Two ends that differ in the last bits of a float64 are one number, not one with sixteen digits."""
    near = interval(0.0013999999999999993, 0.0014000000000000004)
    assert with_interval(0.0014, near) == "0.00140 [0.00140, 0.00140]"
    assert bracket(interval(0.0, 0.0)) == "[0, 0]"


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.3567, 0.4110, "0.384 [0.357, 0.411]"),
        (0.38370, 0.38384, "0.383776 [0.383700, 0.383840]"),
        (0.1, 4.9, "0.4 [0.1, 4.9]"),
        (-40.0, 60.0, "0.38 [-40, 60]"),
    ],
)
def test_digits_follow_the_interval(low: float, high: float, text: str) -> None:
    """Two digits of the half width; a value smaller than that keeps two of its own instead of becoming 0."""
    assert with_interval(0.383776, interval(low, high)) == text


def test_caller_may_fix_the_decimals() -> None:
    assert with_interval(0.3837756, interval(0.3567, 0.4110), 5) == "0.38378 [0.35670, 0.41100]"


def test_an_interval_without_width_or_ends() -> None:
    assert with_interval(0.0, interval(0.0, 0.0)) == "0 [0, 0]"
    withheld = interval(0.0, 0.0).model_copy(update={"low": None, "high": None, "note": "fewer than 4 rows"})
    assert with_interval(0.5, withheld) == "0.5000 (no interval: fewer than 4 rows)"
    assert ends(withheld) == percent_ends(withheld) == "none: fewer than 4 rows"
    assert bracket(None) == "n/a"
    assert estimate(0.5, interval(-math.inf, 1.0)) == "0.5000"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.7890205178309722, "78.90 %"),
        (1.0, "100 %"),
        (0.0, "0 %"),
        (0.999999, "100 % less 0.00010 %"),
        (0.00001, "0.0010 %"),
        (float("nan"), "NaN"),
        (None, "n/a"),
    ],
)
def test_percent_never_rounds_to_certainty(share: float | None, text: str) -> None:
    assert percent(share) == text


def test_small_formats() -> None:
    assert percent_bracket(interval(0.7654, 0.8123)) == "[76.5 %, 81.2 %]"
    assert signed(-0.0585, 4) == "-0.0585"
    assert signed(0.0194, 4) == "+0.0194"
    assert signed(0.0) == "0"
    assert count(65504) == "65,504"
    assert size(15_300_000_000) == "15.30 GB"
    assert size(61_200_000) == "61.2 MB"
    assert digest("ab" * 32) == "abababababab"
    assert digest(None) == count(None) == size(None) == "n/a"
