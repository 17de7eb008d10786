"""Relative error of KL against a long-double reference, from divergences that are nearly nothing to enormous ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from harness.bench.from_logits import llama_work, naive
from harness.bench.made_up import made_up_logits
from harness.bench.timing import Figure
from harness.scoring import score_logits

TARGETS = (1e-9, 1e-6, 1e-3, 0.3, 20.0)


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


def run(vocab: int, positions: int) -> list[Figure]:
    """Largest relative error over the positions, per divergence and method."""
    figures = []
    for target in TARGETS:
        teacher, candidate, targets = at_divergence(target, positions, vocab)
        exact = reference_kl(teacher.numpy(), candidate.numpy())
        for name, method in _methods(teacher, candidate, targets).items():
            error = float(np.abs(method() / exact - 1).max())
            label = f"KL {exact.mean():.2g}: {name}"
            figures.append(Figure(name=label, value=error, unit="", most=5e-6 if name == "ours" else None))
    return figures


def _methods(
    teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor
) -> dict[str, Callable[[], np.ndarray]]:
    return {
        "ours": lambda: score_logits(teacher, candidate, targets, second_pass=False).kl,
        "naive torch f32": lambda: naive(teacher, candidate, targets)[0].double().numpy(),
        "llama.cpp loop": lambda: llama_work(teacher, candidate, targets)()[:, 0],
    }
