"""Scoring from hidden states through the head: against whole logits in torch, and against the bare products."""

from __future__ import annotations

from statistics import median

import torch

from harness.bench.from_logits import naive_head
from harness.bench.made_up import made_up_head
from harness.bench.timing import Figure, Work, extra_megabytes, gemm_probes, in_turns, one_thread
from harness.scoring import score_hidden
from harness.scoring.blas import blas_choice

#: Columns of the product that the probe measures: it fits the cache as a kernel's tile does.
PROBE_COLUMNS = 2048
AFTER = ", after"


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
        flops, probes = _probes(2 * positions, width, min(PROBE_COLUMNS, vocab), probe)
        extra = extra_megabytes(ours)
        works: dict[str, Work] = {
            **probes,
            "ours": ours,
            # The bare products again: the machine's speed moves by a fifth within seconds.
            **{f"{name}{AFTER}": work for name, work in probes.items()},
            "naive torch f32": whole,
            "ours, both passes": lambda: score(True, positions),
        }
        seconds = in_turns(works, rounds, warm=False)
    gflops = {
        name: [2e-9 * flops / (one + two) for one, two in zip(seconds[name], seconds[f"{name}{AFTER}"], strict=True)]
        for name in probes
    }
    speeds = {name: seconds[name] for name in ("ours", "naive torch f32", "ours, both passes")}
    return _figures(2.0 * (2 * positions) * width * vocab, positions, speeds, gflops, extra)


def _probes(rows: int, width: int, columns: int, probe: float) -> tuple[float, dict[str, Work]]:
    """Floating-point operations of a probe, and each BLAS on products of the kernel's shape."""
    works, flops = gemm_probes(rows, width, columns)
    repeat = max(1, int(probe / flops))

    def many(work: Work) -> Work:
        return lambda: [work() for _ in range(repeat)] and None

    return repeat * flops, {f"GEMM, {name}": many(work) for name, work in works.items()}


def _figures(
    flops: float, positions: int, seconds: dict[str, list[float]], gflops: dict[str, list[float]], extra: float
) -> list[Figure]:
    """Medians over the rounds; a ratio is taken within a round."""

    def ratio(name: str) -> float:
        return median(one / two for one, two in zip(seconds[name], seconds["ours"], strict=True))

    best = [max(rates) for rates in zip(*gflops.values(), strict=True)]
    of_best = median(flops / (1e9 * rate * own) for rate, own in zip(best, seconds["ours"], strict=True))
    alone = ratio("naive torch f32") / of_best
    blas = blas_choice()
    return [
        *(Figure(name=name, value=median(rates), unit="GFLOP/CPU-s") for name, rates in gflops.items()),
        *(Figure(name=name, value=positions / median(each), unit="positions/CPU-s") for name, each in seconds.items()),
        Figure(
            name="ours / naive",
            value=ratio("naive torch f32"),
            unit="x",
            least=1.8,
            note=f"the best GEMM alone would be {alone:.2f}",
        ),
        Figure(
            name="ours, of the best GEMM",
            value=100 * of_best,
            unit="%",
            least=88.0,
            note=f"with everything that is not the product; uses {blas.name} ({blas.library})",
        ),
        Figure(name="second pass adds", value=100 * (ratio("ours, both passes") - 1), unit="%"),
        Figure(name="ours: extra memory", value=extra, unit="MB", most=64.0),
    ]
