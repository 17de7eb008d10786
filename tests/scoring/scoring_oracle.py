"""Independent computations of the same results: plain float64 numpy, and mpmath for the hard rows."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import torch

from harness.types import SCORE_DTYPES, Head, Scores


def head_logits(states_TH: torch.Tensor, head: Head) -> np.ndarray:
    """fp32 logits ``[T, V]`` of a few rows, tile by tile over the head; padding columns included."""
    states = states_TH.float()
    rows = head.weight_VH.shape[0]
    logits = torch.empty(len(states), rows)
    for low in range(0, rows, 2048):
        tile = states @ head.weight_VH[low : low + 2048].float().T
        if head.bias_V is not None:
            tile += head.bias_V[low : low + 2048].float()
        tile *= head.scale
        if head.softcap is not None:
            tile = head.softcap * torch.tanh(tile / head.softcap)
        logits[:, low : low + 2048] = tile
    return logits.numpy()


def one_side(logits_V: np.ndarray, target: int) -> dict[str, Any]:
    bad = int(np.count_nonzero(np.isnan(logits_V) | (logits_V == np.inf)))
    top = -np.inf if bad else logits_V.max()
    if bad or top == -np.inf:
        blank = np.full_like(logits_V, np.nan)
        return {"bad": bad or len(logits_V), "logp": blank, "lse": np.nan, "nll": np.nan, "entropy": np.nan, "top1": -1,
                "tied": False, "top": blank == 0, "p_top1": np.nan}  # fmt: skip
    lse = top + np.log(np.exp(logits_V - top).sum())
    logp = logits_V - lse
    p = np.exp(logp)
    at_top = logits_V == top
    return {
        "bad": 0,
        "logp": logp,
        "lse": lse,
        "nll": -logp[target],
        "entropy": -(p[p > 0] * logp[p > 0]).sum(),
        "top1": int(at_top.argmax()),
        "tied": bool(at_top.sum() > 1),
        "top": at_top,
        "p_top1": float(np.exp(top - lse)),
    }


def _kl(logp_V: np.ndarray, logq_V: np.ndarray) -> float:
    """``sum p (expm1(d) - d)`` with ``d = log q - log p``: no term is negative, so nothing cancels."""
    p, q = np.exp(logp_V), np.exp(logq_V)
    held = p > 0
    if not held.any():
        return float("nan")
    with np.errstate(invalid="ignore"):
        d = logq_V[held] - logp_V[held]
    term = np.where(d == -np.inf, np.inf, np.expm1(d) - d)
    return float((p[held] * term).sum() + q[~held].sum())


def _outside(logits: np.ndarray, vocab_size: int) -> float:
    if len(logits) == vocab_size:
        return 0.0
    top = logits.max()
    mass = np.exp(logits - top)
    return float(mass[vocab_size:].sum() / mass.sum())


def _top5(logits_V: np.ndarray) -> set[int]:
    return set(np.lexsort((np.arange(len(logits_V)), -logits_V))[:5].tolist())


def _pair(teacher_W: np.ndarray, candidate_W: np.ndarray, target: int, vocab_size: int) -> dict[str, Any]:
    """One position: logits of both sides, padding included, in float64."""
    teacher, candidate = one_side(teacher_W[:vocab_size], target), one_side(candidate_W[:vocab_size], target)
    valid = not teacher["bad"] and not candidate["bad"]
    row = {"kl": _kl(teacher["logp"], candidate["logp"]), "kl_reverse": _kl(candidate["logp"], teacher["logp"])}
    for name, side in (("teacher", teacher), ("candidate", candidate)):
        row |= {f"{key}_{name}": side[key] for key in ("nll", "entropy", "top1", "tied")}
        row[f"nonfinite_{name}"] = side["bad"]
    row["p_top1_teacher"] = teacher["p_top1"]
    row["agree"] = bool((teacher["top"] & candidate["top"]).any())
    row["agree_lowest_id"] = valid and teacher["top1"] == candidate["top1"]
    row["tv"] = 0.5 * np.abs(np.exp(teacher["logp"]) - np.exp(candidate["logp"])).sum()
    row["top5_overlap"], row["rank"] = -1, -1
    if valid:
        row["top5_overlap"] = len(_top5(teacher_W[:vocab_size]) & _top5(candidate_W[:vocab_size]))
        row["rank"] = 1 + int((candidate["logp"] > candidate["logp"][teacher["top1"]]).sum())
    row["outside_teacher"] = _outside(teacher_W, vocab_size)
    row["outside_candidate"] = _outside(candidate_W, vocab_size)
    return row


def oracle_scores(
    teacher_TW: torch.Tensor | np.ndarray,
    candidate_TW: torch.Tensor | np.ndarray,
    targets_T: np.ndarray,
    vocab_size: int | None = None,
) -> Scores:
    """Every result of `Scores` from logits of both sides, in float64, one position at a time."""
    wide = [torch.as_tensor(side).double().numpy() for side in (teacher_TW, candidate_TW)]
    vocab = wide[0].shape[1] if vocab_size is None else vocab_size
    held = [_pair(t, c, int(target), vocab) for t, c, target in zip(*wide, targets_T, strict=True)]
    return Scores(**{name: np.array([row[name] for row in held], dtype) for name, dtype in SCORE_DTYPES.items()})


def mpmath_kl(teacher_V: np.ndarray, candidate_V: np.ndarray, digits: int = 50) -> float:
    """KL(teacher||candidate) of one position straight from its definition, to ``digits`` digits."""
    with mpmath.workdps(digits):
        p, q = ([mpmath.exp(mpmath.mpf(float(x))) for x in side] for side in (teacher_V, candidate_V))
        total_p, total_q = mpmath.fsum(p), mpmath.fsum(q)
        terms = (a / total_p * mpmath.log(a * total_q / (b * total_p)) for a, b in zip(p, q, strict=True) if a)
        return float(mpmath.fsum(terms))
