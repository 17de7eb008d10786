"""Scoring from logits: our kernel against torch, against the llama.cpp loop, and against reading the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from harness.bench import llama_loop
from harness.bench.baselines import Chunked, naive
from harness.bench.figure import Figure
from harness.bench.limits import read_probe
from harness.bench.made_up import made_up_logits
from harness.bench.timing import Work, extra_megabytes, interleaved, one_thread, wall_seconds
from harness.scoring import score_logits

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def run(vocab: int, positions: int, rounds: int) -> list[Figure]:
    """Positions per CPU second on one thread, extra memory, and two threads against one."""
    sides = made_up_logits(positions, vocab)
    with one_thread():
        works = _works(*sides)
        seconds = interleaved(works, rounds)
        extra = {name: extra_megabytes(works[name]) for name in ("ours f32", "naive torch f32", "chunked torch f32")}
    return [*_speeds(seconds, vocab, positions), *_memory(extra), _threads(*sides, rounds)]


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


def _threads(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor, rounds: int) -> Figure:
    """Wall time: means something only while nothing else runs, so the load average stands beside it."""

    def on(threads: int) -> Work:
        return lambda: score_logits(teacher, candidate, targets, second_pass=False, threads=threads)

    seconds = interleaved({"1": on(1), "2": on(2)}, max(rounds, 3), clock=wall_seconds)
    note = f"wall time; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    return Figure(name="two threads / one", value=seconds["1"] / seconds["2"], unit="x", least=1.7, note=note)
