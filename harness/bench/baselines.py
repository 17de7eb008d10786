"""What our kernels stand beside: KL as people compute it in torch, and the loop of llama.cpp's perplexity tool."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numba import njit
from torch.nn import functional

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def naive(teacher_TV: torch.Tensor, candidate_TV: torch.Tensor, targets_T: torch.Tensor) -> Results:
    """KL, NLL of both and top-1 agreement, float32 and whole: ``log_softmax`` twice, then ``kl_div``."""
    log_p = functional.log_softmax(teacher_TV.float(), dim=-1)
    log_q = functional.log_softmax(candidate_TV.float(), dim=-1)
    kl = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    at = targets_T[:, None]
    agree = log_p.argmax(-1) == log_q.argmax(-1)
    return kl, -log_p.gather(1, at)[:, 0], -log_q.gather(1, at)[:, 0], agree


class Chunked:
    """The same in chunks of a few rows, into buffers that are made once."""

    def __init__(self, vocab: int, rows: int = 4) -> None:
        self.rows = rows
        self.buffers = torch.empty(3, rows, vocab)

    def __call__(self, teacher_TV: torch.Tensor, candidate_TV: torch.Tensor, targets_T: torch.Tensor) -> Results:
        parts = [
            self._chunk(*(side[low : low + self.rows] for side in (teacher_TV, candidate_TV, targets_T)))
            for low in range(0, len(targets_T), self.rows)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]

    def _chunk(self, teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Results:
        log_p, log_q, work = (buffer[: len(targets)] for buffer in self.buffers)
        torch.log_softmax(teacher.float(), -1, out=log_p)
        torch.log_softmax(candidate.float(), -1, out=log_q)
        torch.sub(log_p, log_q, out=work)
        at = targets[:, None]
        nll = -log_p.gather(1, at)[:, 0], -log_q.gather(1, at)[:, 0]
        agree = log_p.argmax(-1) == log_q.argmax(-1)
        kl = work.mul_(log_p.exp_()).sum(-1)
        return kl, *nll, agree


def naive_head(
    teacher_TH: torch.Tensor, candidate_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor
) -> Results:
    """Hidden states through a shared head in float32, logits whole, then `naive`."""
    wide = weight_VH.float().T
    return naive(teacher_TH.float() @ wide, candidate_TH.float() @ wide, targets_T)


# What the llama.cpp perplexity tool computes per token with --kl-divergence, restated in our own words.
#
# Its base file holds each position's log-probabilities as 16-bit steps between the largest and (at most 16 nats below)
# the smallest, with the step and the smallest as floats. Against it, a candidate's logits are read twice: once for the
# maximum and the sum of exponentials, once to add p (log p - log q) in double precision over the entries above
# -16 nats. Nothing is renormalised, which is where its small negative values come from.

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


def llama_work(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Callable[[], np.ndarray]:
    """The loop over a base that is encoded beforehand, as its tool reads it from a file."""
    positions, vocab = teacher.shape
    steps, scales = np.empty((positions, vocab), np.uint16), np.empty((positions, 2), np.float32)
    encode(teacher.numpy(), steps, scales)
    logits, ids = candidate.numpy(), targets.numpy()

    def work() -> np.ndarray:
        out = np.empty((positions, 4))
        score(steps, scales, logits, ids, out)
        return out

    return work
