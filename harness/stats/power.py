"""What a panel can resolve, and how many contexts a difference needs."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtri

from harness.stats.influence import Totals


def z_sum(power: float = 0.8, confidence: float = 0.95) -> float:
    """``z_(1 - alpha/2) + z_power``: 2.80 for 80 % power at 95 %."""
    return float(ndtri(0.5 + confidence / 2) + ndtri(power))


def group_deviation(difference: Totals) -> float:
    """Standard deviation over groups of the influence of a paired difference; nan for one group."""
    return float(difference.influence_G.std(ddof=1)) if len(difference) > 1 else float("nan")


def detectable_difference(deviation: float, groups: int, *, power: float = 0.8, confidence: float = 0.95) -> float:
    """Smallest true difference that ``groups`` contexts show with this power (MDE)."""
    return z_sum(power, confidence) * deviation / math.sqrt(groups)


def contexts_needed(deviation: float, difference: float, *, power: float = 0.8, confidence: float = 0.95) -> int:
    """How many contexts show a true ``difference`` with this power."""
    if difference == 0 or not math.isfinite(deviation):
        raise ValueError("a difference of 0, or an unknown deviation, needs no finite number of contexts")
    needed = (z_sum(power, confidence) * deviation / abs(difference)) ** 2
    return max(2, math.ceil(np.nextafter(needed, 0)))
