"""How numbers become text: as many digits as the interval supports, and never a zero that is not zero."""

from __future__ import annotations

import math
from typing import Protocol

SUPPORTED_DIGITS = 2
#: An interval narrower than this share of its ends is rounding of the arithmetic, and supports no further digits.
NO_SPREAD = 1e-9
MISSING = "n/a"
#: Stands for a number that says nothing about other positions, and is not shown.
WITHHELD = "withheld"


class Bounds(Protocol):
    """Anything with two ends, such as `harness.measure.receipt.Interval` or `harness.stats.Estimate`."""

    @property
    def low(self) -> float | None: ...

    @property
    def high(self) -> float | None: ...


class Noted(Bounds, Protocol):
    """Two ends, or a note that says why there are none."""

    @property
    def note(self) -> str: ...


def supported_decimals(low: float | None, high: float | None) -> int | None:
    """Decimals at which the half width shows two digits; None where the interval has no finite width, or none."""
    if low is None or high is None:
        return None
    half_width = (high - low) / 2
    if not math.isfinite(half_width) or half_width <= NO_SPREAD * max(abs(low), abs(high)):
        return None
    return max(0, SUPPORTED_DIGITS - 1 - math.floor(math.log10(half_width)))


def number(value: float | None, decimals: int | None = None) -> str:
    """One number; without ``decimals`` four significant digits, three below 0.1.

    Non-finite values keep their names, and a value that would round to zero is written in powers of ten.
    """
    if value is None:
        return MISSING
    value = float(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == 0:
        return "0"
    if decimals is None:
        return _significant(value, 4 if abs(value) >= 0.1 else 3)
    text = f"{value:.{decimals}f}"
    return _significant(value, 2) if float(text) == 0 else text


def _significant(value: float, digits: int) -> str:
    """``digits`` significant digits; powers of ten only below 1e-4 and from 1e7 on."""
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 7:
        return f"{value:.{max(0, digits - 1 - exponent)}f}"
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(power)}"


def estimate(value: float | None, interval: Bounds | None, decimals: int | None = None) -> str:
    """A value with the digits its interval supports, or with the decimals that the caller fixes."""
    if decimals is None and interval is not None:
        decimals = supported_decimals(interval.low, interval.high)
    return number(value, decimals)


def bracket(interval: Bounds | None, decimals: int | None = None) -> str:
    """``[0.357, 0.411]``, or ``n/a``."""
    if interval is None or interval.low is None or interval.high is None:
        return MISSING
    places = decimals if decimals is not None else supported_decimals(interval.low, interval.high)
    return f"[{number(interval.low, places)}, {number(interval.high, places)}]"


def with_interval(value: float | None, interval: Noted | None, decimals: int | None = None) -> str:
    """``0.384 [0.357, 0.411]``, ``0.384 (no interval: fewer than 4 documents)``, or the value alone."""
    text = estimate(value, interval, decimals)
    if value is None or interval is None:
        return text
    if interval.low is None or interval.high is None:
        return f"{text} (no interval: {interval.note})" if interval.note else text
    return f"{text} {bracket(interval, decimals)}"


def ends(interval: Noted) -> str:
    """``[0.357, 0.411]``, or ``none: fewer than 4 documents``."""
    return f"none: {interval.note}" if interval.low is None else bracket(interval)


def signed(value: float | None, decimals: int | None = None) -> str:
    """A difference with its sign; exactly zero has none."""
    text = number(value, decimals)
    return f"+{text}" if value is not None and value > 0 else text


def percent(share: float | None, decimals: int = 2) -> str:
    """A share as a percentage; one that would round to 0 or to 100 without being it keeps its digits."""
    if share is None or not math.isfinite(share):
        return number(share)
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    if 0 < share < 1 and float(f"{100 * share:.{decimals}f}") in (0.0, 100.0):
        return (
            f"{_significant(100 * share, 2)} %" if share < 0.5 else f"100 % less {_significant(100 * (1 - share), 2)} %"
        )
    return f"{100 * share:.{decimals}f} %"


def percent_bracket(interval: Bounds | None) -> str:
    """``[78.1 %, 79.9 %]`` with the digits that the width supports."""
    if interval is None or interval.low is None or interval.high is None:
        return MISSING
    places = supported_decimals(100 * interval.low, 100 * interval.high)
    decimals = 2 if places is None else min(places, 4)
    return f"[{percent(interval.low, decimals)}, {percent(interval.high, decimals)}]"


def percent_ends(interval: Noted) -> str:
    """``[78.1 %, 79.9 %]``, or why there are none."""
    return ends(interval) if interval.low is None else percent_bracket(interval)


def count(value: int | None) -> str:
    """A whole number with thousands separated."""
    return MISSING if value is None else f"{int(value):,}"


def size(nbytes: int | None) -> str:
    """Bytes in decimal GB or MB, as the Hub shows them."""
    if nbytes is None:
        return MISSING
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def digest(sha256: str | None, length: int = 12) -> str:
    """The beginning of a digest, enough to tell two apart by eye."""
    return MISSING if not sha256 else sha256[:length]
