"""Scores: their speed from logits and through a head, their accuracy, and the bootstrap over rows that follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np
import torch
from scipy import stats as scipy_stats

from harness.bench.baselines import Chunked, llama_work, naive, naive_head
from harness.bench.made_up import made_up_head, made_up_logits
from harness.bench.timing import (
    Figure,
    Work,
    arithmetic_probe,
    cpu_seconds,
    extra_megabytes,
    gemm_probes,
    in_turns,
    interleaved,
    one_thread,
    read_probe,
    wall_seconds,
)
from harness.scoring import score_hidden, score_logits
from harness.scoring.blas import blas_choice
from harness.scoring.packed import WIDE
from harness.stats import resample_matrix

# From logits: our kernel against torch, against the llama.cpp loop, and against reading the numbers.

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def from_logits(vocab: int, positions: int, rounds: int) -> list[Figure]:
    """Positions per CPU second on one thread, extra memory, and two threads against one."""
    sides = made_up_logits(positions, vocab)
    with one_thread():
        works = _logits_works(*sides)
        seconds = interleaved(works, rounds)
        extra = {name: extra_megabytes(works[name]) for name in ("ours f32", "naive torch f32", "chunked torch f32")}
    return [*_logits_speeds(seconds, vocab, positions), *_logits_memory(extra), *_two_threads(*sides, rounds)]


def _logits_works(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> dict[str, Work]:
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


def _logits_speeds(seconds: dict[str, float], vocab: int, positions: int) -> list[Figure]:
    figures = [Figure(name=name, value=positions / value, unit="positions/CPU-s") for name, value in seconds.items()]
    ours = seconds["ours f32"]
    targets = vocab > 100_000  # they are set for a large vocabulary
    rates = {
        "ours f32 / naive": (seconds["naive torch f32"] / ours, "x", 11.0),
        "ours f32 / chunked": (seconds["chunked torch f32"] / ours, "x", None),
        "ours f32 / llama.cpp loop": (seconds["llama.cpp loop"] / ours, "x", 7.5),
        "ours bf16 / ours f32": (ours / seconds["ours bf16"], "x", None),
        "ours f32, of the read bandwidth": (100 * seconds["read probe"] / ours, "%", 40.0 if WIDE == 16 else 30.0),
    }
    figures += [
        Figure(name=name, value=value, unit=unit, least=least if targets else None)
        for name, (value, unit, least) in rates.items()
    ]
    cost = 100 * (seconds["ours f32, both passes"] / ours - 1)
    return [*figures, Figure(name="second pass adds", value=cost, unit="%", note="asked for")]


def _logits_memory(extra: dict[str, float]) -> list[Figure]:
    return [
        Figure(name=f"{name}: extra memory", value=value, unit="MB", most=20.0 if "ours" in name else None)
        for name, value in extra.items()
    ]


def _two_threads(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor, rounds: int) -> list[Figure]:
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


# From hidden states through the head: against whole logits in torch, and against the bare products.

#: Columns of the product that the probe measures: it fits the cache as a kernel's tile does.
PROBE_COLUMNS = 2048
AFTER = ", after"


def through_head(vocab: int, width: int, positions: int, rounds: int, probe: float) -> list[Figure]:
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
        flops, probes = _head_probes(2 * positions, width, min(PROBE_COLUMNS, vocab), probe)
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
    return _head_figures(2.0 * (2 * positions) * width * vocab, positions, speeds, gflops, extra)


def _head_probes(rows: int, width: int, columns: int, probe: float) -> tuple[float, dict[str, Work]]:
    """Floating-point operations of a probe, and each BLAS on products of the kernel's shape."""
    works, flops = gemm_probes(rows, width, columns)
    repeat = max(1, int(probe / flops))

    def many(work: Work) -> Work:
        return lambda: [work() for _ in range(repeat)] and None

    return repeat * flops, {f"GEMM, {name}": many(work) for name, work in works.items()}


def _head_figures(
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
            least=95.0,
            note=f"with everything that is not the product; uses {blas.name} ({blas.library})",
        ),
        Figure(name="second pass adds", value=100 * (ratio("ours, both passes") - 1), unit="%"),
        Figure(name="ours: extra memory", value=extra, unit="MB", most=64.0),
    ]


# Relative error of KL against a long-double reference, from divergences that are nearly nothing to enormous ones.

DIVERGENCES = (1e-9, 1e-6, 1e-3, 0.3, 20.0)


def reference_kl(teacher_TV: np.ndarray, candidate_TV: np.ndarray) -> np.ndarray:
    """``sum p (expm1(d) - d)``, ``d = log q - log p``, in long double: no term is negative, so nothing cancels."""
    p_log, q_log = (_log_softmax(side.astype(np.longdouble)) for side in (teacher_TV, candidate_TV))
    d = q_log - p_log
    return np.asarray((np.exp(p_log) * (np.expm1(d) - d)).sum(1), dtype=np.float64)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def at_divergence(target: float, positions: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 logits of both sides whose mean KL is near ``target``: the noise is scaled until it is."""
    teacher, noisy, targets = made_up_logits(positions, vocab, noise=1.0)
    noise = noisy - teacher
    low, high = 1e-7, 1e3
    for _ in range(50):
        middle = (low * high) ** 0.5
        mean = _rough_kl(teacher, teacher + middle * noise)
        low, high = (middle, high) if mean < target else (low, middle)
        if abs(mean / target - 1) < 0.02:
            break
    return teacher, teacher + middle * noise, targets


def _rough_kl(teacher: torch.Tensor, candidate: torch.Tensor) -> float:
    d = candidate.double().log_softmax(1) - teacher.double().log_softmax(1)
    return float((teacher.double().softmax(1) * (torch.expm1(d) - d)).sum(1).mean())


def accuracy(vocab: int, positions: int) -> list[Figure]:
    """Largest relative error over the positions, per divergence and method."""
    figures = []
    for target in DIVERGENCES:
        teacher, candidate, targets = at_divergence(target, positions, vocab)
        exact = reference_kl(teacher.numpy(), candidate.numpy())
        for name, method in _accuracy_methods(teacher, candidate, targets).items():
            error = float(np.abs(method() / exact - 1).max())
            label = f"KL {exact.mean():.2g}: {name}"
            figures.append(Figure(name=label, value=error, unit="", most=5e-6 if name == "ours" else None))
    return figures


def _accuracy_methods(
    teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor
) -> dict[str, Callable[[], np.ndarray]]:
    return {
        "ours": lambda: score_logits(teacher, candidate, targets, second_pass=False).kl,
        "naive torch f32": lambda: naive(teacher, candidate, targets)[0].double().numpy(),
        "llama.cpp loop": lambda: llama_work(teacher, candidate, targets)()[:, 0],
    }


# The bootstrap of a report: one matrix of resamples, drawn once, for all metrics together.


def bootstrap(rows: int, resamples: int, metrics: int, rounds: int) -> list[Figure]:
    """CPU seconds to draw the matrix, and for the intervals of all metrics from it."""
    values = np.random.default_rng(37).lognormal(-5, 1, (rows, metrics))
    seeds = iter(range(1, 1000))
    matrix = resample_matrix(rows, resamples, 0)

    def intervals() -> np.ndarray:
        return np.quantile(matrix.sums(values) / rows, [0.025, 0.975], axis=0)

    def scipy_one() -> object:
        return scipy_stats.bootstrap(
            (values[:, 0],), np.mean, n_resamples=resamples, method="BCa", vectorized=True, rng=np.random.default_rng(1)
        )

    with one_thread():
        seconds = interleaved(
            {
                "draw the matrix": lambda: resample_matrix(rows, resamples, next(seeds)),
                f"percentile intervals of {metrics} metrics": intervals,
                "beside it, scipy.stats.bootstrap BCa of one": scipy_one,
            },
            rounds,
            clock=cpu_seconds,
        )
    resample_matrix.cache_clear()
    return [Figure(name=name, value=value, unit="CPU-s") for name, value in seconds.items()]
