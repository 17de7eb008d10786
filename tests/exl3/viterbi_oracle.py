"""Tail-biting Viterbi search in plain numpy float64, written from the definition: slow, and nothing shared."""

from __future__ import annotations

import numpy as np


def oracle_states(weights: np.ndarray, bits: float, values: np.ndarray) -> np.ndarray:
    """States of one ring of 256 weights, int64 [256]; ``values`` is the codebook, float64 [65536]."""
    seam = _pass(weights, bits, values, first=128, start=None)[0] >> _fresh(bits, 0)
    return _pass(weights, bits, values, first=0, start=int(seam))


def cost(states: np.ndarray, weights: np.ndarray, values: np.ndarray) -> float:
    """Sum of squared distances."""
    return float(((values[states] - weights) ** 2).sum())


def is_ring(states: np.ndarray, bits: float) -> bool:
    """Whether each state is the one before, shifted by its fresh bits; the first follows the last."""
    states = states.astype(np.int64)
    before = np.roll(states, 1, axis=-1)
    fresh = np.array([_fresh(bits, i) for i in range(256)])
    return bool(np.all(states >> fresh == before & ((1 << (16 - fresh)) - 1)))


def _fresh(bits: float, position: int) -> int:
    return int(bits) + (position % 2 if bits != int(bits) else 0)


def _pass(weights: np.ndarray, bits: float, values: np.ndarray, first: int, start: int | None) -> np.ndarray:
    """Best path over all positions from ``first`` on; closed where ``start`` is given, else free at both ends."""
    state = np.arange(65536)
    costs = np.full(65536 >> _fresh(bits, first), 0.0 if start is None else np.inf)
    if start is not None:
        costs[start] = 0.0
    choices = []
    for position in range(first, first + 256):
        dropped = _fresh(bits, position + 1)
        total = costs[state >> _fresh(bits, position)] + (values - weights[position % 256]) ** 2
        by_context = total.reshape(1 << dropped, -1)
        choices.append(by_context.argmin(0))
        costs = by_context.min(0)
    context = int(costs.argmin()) if start is None else start
    path = np.empty(256, np.int64)
    for position in range(first + 255, first - 1, -1):
        dropped = _fresh(bits, position + 1)
        path[position % 256] = (int(choices[position - first][context]) << (16 - dropped)) | context
        context = path[position % 256] >> _fresh(bits, position)
    return path
