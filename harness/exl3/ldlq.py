"""LDLQ: rounding that lets later rows make up for the error of earlier ones, where the inputs are correlated.

With ``H`` the mean of ``x x^T`` over calibration tokens, in the rotated basis, the loss of an error matrix ``E`` is
``tr(E^T H E)``. Let ``H = L D L^T`` with ``L`` unit lower triangular in blocks of 16. Rows are coded in blocks of 16
from the last to the first; each block codes ``W[r] + L[below, r]^T E[below]``, so that its own rounding error is all
that it adds to the loss.
"""

from __future__ import annotations

import numpy as np

from harness.exl3.layout import RING, TILE
from harness.exl3.regularize import blockwise
from harness.exl3.tiles import Rate, Report, decoded, search_matrix

#: Added to the diagonal, relative to its mean: calibration data is finite.
DAMPING = 0.025


def rotated_hessian(hessian: np.ndarray, suh: np.ndarray) -> np.ndarray:
    """Second moment of what the rotated matrix is multiplied with: float64 [in, in], damped.

    Args:
        hessian: mean of ``x x^T``, [features, features] without padding.
        suh: the input scales, float16 [in] with padding.

    Raises:
        ValueError: values that are not finite.
    """
    if not np.isfinite(hessian).all():
        raise ValueError("the Hessian holds values that are not finite")
    full = np.zeros((len(suh), len(suh)), np.float64)
    full[: len(hessian), : len(hessian)] = hessian
    scales = suh.astype(np.float64)
    full = blockwise(blockwise(full * scales[:, None] * scales[None, :], axis=1), axis=0)
    full = (full + full.T) / 2
    full[np.diag_indices_from(full)] += DAMPING * float(np.mean(np.diag(full))) or 1.0
    return full


def block_factor(hessian: np.ndarray) -> np.ndarray:
    """``L - 1`` of ``H = L D L^T``: float32 [in, in], block lower triangular with zero diagonal blocks of 16."""
    factor = np.linalg.cholesky(hessian)
    for start in range(0, len(factor), TILE):
        block = slice(start, start + TILE)
        factor[:, block] = factor[:, block] @ np.linalg.inv(factor[block, block])
        factor[block, block] = 0
    return factor.astype(np.float32)


def ldlq_states(
    rotated: np.ndarray,
    hessian: np.ndarray,
    rate: Rate,
    *,
    threads: int | None = None,
    report: Report = lambda weights: None,
) -> np.ndarray:
    """States of every tile of ``rotated`` [in, out] with the least loss under ``hessian`` [in, in] that LDLQ finds.

    Returns:
        uint16 [in/16, out/16, 256], as `harness.exl3.tiles.search_matrix`.
    """
    factor = block_factor(hessian)
    rows, columns = rotated.shape
    states = np.empty((rows // TILE, columns // TILE, RING), np.uint16)
    error = np.zeros_like(rotated)
    for start in range(rows - TILE, -1, -TILE):
        block, below = slice(start, start + TILE), slice(start + TILE, rows)
        wanted = rotated[block] + factor[below, block].T @ error[below]
        states[start // TILE] = search_matrix(wanted, rate, threads=threads, report=report)[0]
        error[block] = rotated[block] - decoded(states[start // TILE][None], rate.codebook)
    return states


def proxy_loss(error: np.ndarray, weight: np.ndarray, hessian: np.ndarray) -> float:
    """``tr(E^T H E) / tr(W^T H W)``: how much of the output's energy is lost."""
    return float(np.sum(error * (hessian @ error)) / np.sum(weight * (hessian @ weight)))
