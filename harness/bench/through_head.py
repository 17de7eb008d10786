"""Scoring from hidden states through the head: against whole logits in torch, and against the bare products."""

from __future__ import annotations

import torch

from harness.bench.baselines import naive_head
from harness.bench.figure import Figure
from harness.bench.limits import gemm_probes
from harness.bench.made_up import made_up_head
from harness.bench.timing import Work, extra_megabytes, interleaved, one_thread
from harness.scoring import score_hidden
from harness.scoring.blas import blas_choice

#: Columns of the product that the probe measures: it fits the cache as a kernel's tile does.
PROBE_COLUMNS = 2048


def run(vocab: int, width: int, positions: int, rounds: int, probe: float) -> list[Figure]:
    """One thread; ``positions`` of each side, so twice as many stacked rows share the head.

    ``probe``: floating-point operations of one measurement of the bare product.
    """
    generator = torch.Generator().manual_seed(13)
    head = made_up_head(vocab, width)
    teacher = torch.randn(positions, width, generator=generator)
    candidate = (teacher + 0.05 * torch.randn(positions, width, generator=generator)).to(torch.bfloat16)
    teacher, targets = teacher.to(torch.bfloat16), torch.randint(vocab, (positions,), generator=generator)

    def score(second: bool, positions: int) -> object:
        sides = teacher[:positions], candidate[:positions], targets[:positions]
        return score_hidden(*sides, teacher_head=head, candidate_head=head, second_pass=second, threads=1)

    def ours() -> object:
        return score(False, positions)

    def whole() -> object:
        return naive_head(teacher, candidate, head.weight_VH, targets)

    with one_thread():
        score(False, 2), score(True, 2)
        gflops = _gemm_rates(2 * positions, width, vocab, probe)
        extra = extra_megabytes(ours)
        works: dict[str, Work] = {
            "ours": ours,
            "naive torch f32": whole,
            "ours, both passes": lambda: score(True, positions),
        }
        seconds = interleaved(works, rounds, warm=False)
        again = _gemm_rates(2 * positions, width, vocab, probe)
    best = {name: max(gflops[name], again[name]) for name in gflops}
    return _figures(2.0 * (2 * positions) * width * vocab, positions, seconds, best, extra)


def _gemm_rates(rows: int, width: int, vocab: int, probe: float) -> dict[str, float]:
    """GFLOP per CPU second of each BLAS on a product of the kernel's shape."""
    works, flops = gemm_probes(rows, width, min(PROBE_COLUMNS, vocab))
    repeat = max(1, int(probe / flops))

    def many(work: Work) -> Work:
        return lambda: [work() for _ in range(repeat)] and None

    seconds = interleaved({name: many(work) for name, work in works.items()}, 3)
    return {name: repeat * flops / value / 1e9 for name, value in seconds.items()}


def _figures(
    flops: float, positions: int, seconds: dict[str, float], gflops: dict[str, float], extra: float
) -> list[Figure]:
    rate, blas = flops / seconds["ours"] / 1e9, blas_choice()
    note = f"uses {blas.name} ({blas.library})"
    return [
        *(Figure(name=f"GEMM, {name}", value=value, unit="GFLOP/CPU-s") for name, value in gflops.items()),
        *(Figure(name=name, value=positions / value, unit="positions/CPU-s") for name, value in seconds.items()),
        Figure(
            name="ours / naive",
            value=seconds["naive torch f32"] / seconds["ours"],
            unit="x",
            least=1.8,
            note=f"the best GEMM alone would be {seconds['naive torch f32'] * max(gflops.values()) * 1e9 / flops:.2f}",
        ),
        Figure(name="ours, of the best GEMM", value=100 * rate / max(gflops.values()), unit="%", least=88.0, note=note),
        Figure(name="second pass adds", value=100 * (seconds["ours, both passes"] / seconds["ours"] - 1), unit="%"),
        Figure(name="ours: extra memory", value=extra, unit="MB", most=64.0),
    ]
