"""What the llama.cpp perplexity tool computes per token with --kl-divergence, restated in our own words.

Its base file holds each position's log-probabilities as 16-bit steps between the largest and (at most 16 nats below)
the smallest, with the step and the smallest as floats. Against it, a candidate's logits are read twice: once for the
maximum and the sum of exponentials, once to add p (log p - log q) in double precision over the entries above
-16 nats. Nothing is renormalised, which is where its small negative values come from.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

#: Entries this far below the largest are not stored, and base log-probabilities at or below its negative are skipped.
DEPTH = np.float32(16.0)
STEPS = np.float32(65535.0)


@njit(cache=True, nogil=True)
def encode(logits: np.ndarray, steps: np.ndarray, scales: np.ndarray) -> None:
    """Base file rows: logits float32 [n, V] to uint16 [n, V] and (step, smallest log-probability) float32 [n, 2]."""
    for row in range(logits.shape[0]):
        top = low = logits[row, 0]
        for value in logits[row]:
            top, low = max(top, value), min(low, value)
        total = 0.0
        for value in logits[row]:
            total += np.exp(value - top)
        low = max(low, top - DEPTH)
        step = (top - low) / STEPS
        scales[row, 0], scales[row, 1] = step, low - top - np.float32(math.log(total))
        inverse = np.float32(1.0) / step if step > 0 else np.float32(0.0)
        for i in range(logits.shape[1]):
            steps[row, i] = np.uint16(inverse * (max(logits[row, i], low) - low) + np.float32(0.5))


@njit(cache=True, nogil=True)
def score(steps: np.ndarray, scales: np.ndarray, logits: np.ndarray, targets: np.ndarray, out: np.ndarray) -> None:
    """``out`` float64 [n, 4] = KL, NLL of the base, NLL of the candidate, 1 where the top tokens agree."""
    for row in range(logits.shape[0]):
        top, top_id = logits[row, 0], 0
        for i in range(logits.shape[1]):
            if logits[row, i] > top:
                top, top_id = logits[row, i], i
        total = 0.0
        for value in logits[row]:
            total += np.exp(value - top)
        norm = top + np.float32(math.log(total))
        step, low = scales[row, 0], scales[row, 1]
        divergence, base_top, base_id = 0.0, np.float32(-np.inf), 0
        for i in range(logits.shape[1]):
            base = step * np.float32(steps[row, i]) + low
            if base > base_top:
                base_top, base_id = base, i
            if base > -DEPTH:
                divergence += np.exp(base) * (base - (logits[row, i] - norm))
        out[row, 0] = divergence
        out[row, 1] = -(step * np.float32(steps[row, targets[row]]) + low)
        out[row, 2] = norm - logits[row, targets[row]]
        out[row, 3] = 1.0 if base_id == top_id else 0.0
