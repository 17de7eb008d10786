"""What people do today with torch: the two baselines that the kernels are held against."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit
from torch.nn import functional

from harness.bench import from_logits as llama_loop
from harness.bench.made_up import made_up_logits
from harness.bench.timing import (
    Figure,
    Work,
    arithmetic_probe,
    extra_megabytes,
    in_turns,
    interleaved,
    one_thread,
    read_probe,
    wall_seconds,
)
from harness.scoring import score_logits

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


# Scoring from logits: our kernel against torch, against the llama.cpp loop, and against reading the numbers.

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def run(vocab: int, positions: int, rounds: int) -> list[Figure]:
    """Positions per CPU second on one thread, extra memory, and two threads against one."""
    sides = made_up_logits(positions, vocab)
    with one_thread():
        works = _works(*sides)
        seconds = interleaved(works, rounds)
        extra = {name: extra_megabytes(works[name]) for name in ("ours f32", "naive torch f32", "chunked torch f32")}
    return [*_speeds(seconds, vocab, positions), *_memory(extra), *_threads(*sides, rounds)]


def _works(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> dict[str, Work]:
    def ours(dtype: torch.dtype, second: bool = False) -> Work:
        left, right = teacher.to(dtype), candidate.to(dtype)
        return lambda: score_logits(left, right, targets, second_pass=second, threads=1)

    chunked = Chunked(teacher.shape[1])
    return {
        "read probe": read_probe(teacher.numpy(), candidate.numpy()),
        **{f"ours {name}": ours(dtype) for name, dtype in DTYPES.items()},
        "ours f32, both passes": ours(torch.float32, True),
        "naive torch f32": lambda: naive(teacher, candidate, targets),
        "chunked torch f32": lambda: chunked(teacher, candidate, targets),
        "llama.cpp loop": llama_work(teacher, candidate, targets),
    }


def llama_work(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Callable[[], np.ndarray]:
    """The loop over a base that is encoded beforehand, as its tool reads it from a file."""
    positions, vocab = teacher.shape
    steps, scales = np.empty((positions, vocab), np.uint16), np.empty((positions, 2), np.float32)
    llama_loop.encode(teacher.numpy(), steps, scales)
    logits, ids = candidate.numpy(), targets.numpy()

    def work() -> np.ndarray:
        out = np.empty((positions, 4))
        llama_loop.score(steps, scales, logits, ids, out)
        return out

    return work


def _speeds(seconds: dict[str, float], vocab: int, positions: int) -> list[Figure]:
    figures = [Figure(name=name, value=positions / value, unit="positions/CPU-s") for name, value in seconds.items()]
    ours = seconds["ours f32"]
    targets = vocab > 100_000  # they are set for a large vocabulary
    rates = {
        "ours f32 / naive": (seconds["naive torch f32"] / ours, "x", 9.0),
        "ours f32 / chunked": (seconds["chunked torch f32"] / ours, "x", None),
        "ours f32 / llama.cpp loop": (seconds["llama.cpp loop"] / ours, "x", 6.0),
        "ours f32, of the read bandwidth": (100 * seconds["read probe"] / ours, "%", 22.0),
    }
    figures += [
        Figure(name=name, value=value, unit=unit, least=least if targets else None)
        for name, (value, unit, least) in rates.items()
    ]
    cost = 100 * (seconds["ours f32, both passes"] / ours - 1)
    return [*figures, Figure(name="second pass adds", value=cost, unit="%", note="asked for")]


def _memory(extra: dict[str, float]) -> list[Figure]:
    return [
        Figure(name=f"{name}: extra memory", value=value, unit="MB", most=20.0 if "ours" in name else None)
        for name, value in extra.items()
    ]


def _threads(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor, rounds: int) -> list[Figure]:
    """Two threads against one, in wall time, beside what the machine gives two threads that share nothing.

    Two virtual cores may be one physical core, or share it with a neighbour: then nothing runs 1.7 times as fast.
    """

    def on(threads: int) -> Work:
        return lambda: score_logits(teacher, candidate, targets, second_pass=False, threads=threads)

    half = len(teacher) // 2
    sides = teacher.numpy(), candidate.numpy()
    halves = [read_probe(*(side[at] for side in sides)) for at in (slice(half), slice(half, 2 * half))]
    times = max(1, teacher.numel() // 4096)
    with ThreadPoolExecutor(2) as pool:

        def together(one: Work, two: Work) -> Work:
            return lambda: list(pool.map(lambda work: work(), (one, two)))

        works: dict[str, Work] = {
            "ours 1": on(1),
            "arithmetic 1": lambda: [arithmetic_probe(times)() for _ in range(2)],
            "reading 1": lambda: [work() for work in halves],
            "ours 2": on(2),
            "arithmetic 2": together(arithmetic_probe(times), arithmetic_probe(times)),
            "reading 2": together(*halves),
        }
        seconds = in_turns(works, max(rounds, 5), clock=wall_seconds)
    gain = {name: min(seconds[f"{name} 1"]) / min(seconds[f"{name} 2"]) for name in ("ours", "arithmetic", "reading")}
    load = f"wall time, the best round; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return [
        Figure(name="the machine's arithmetic, two threads / one", value=gain["arithmetic"], unit="x", note=load),
        Figure(name="the machine's reading, two threads / one", value=gain["reading"], unit="x"),
        Figure(
            name="two threads / one",
            value=gain["ours"],
            unit="x",
            least=1.7,
            note=f"the machine gives {gain['arithmetic']:.2f} to arithmetic, {gain['reading']:.2f} to reading",
        ),
        Figure(
            name="two threads / one, of the machine's arithmetic",
            value=100 * gain["ours"] / gain["arithmetic"],
            unit="%",
            least=85.0,
            note="1.7 of 2",
        ),
    ]
