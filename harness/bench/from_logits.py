"""Scoring from logits: our kernel against torch, against the llama.cpp loop, and against reading the numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from harness.bench import llama_loop
from harness.bench.baselines import Chunked, naive
from harness.bench.figure import Figure
from harness.bench.limits import arithmetic_probe, read_probe
from harness.bench.made_up import made_up_logits
from harness.bench.timing import Work, extra_megabytes, in_turns, interleaved, one_thread, wall_seconds
from harness.scoring import score_logits

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
