"""Encode one linear layer: regularise, search every tile, pack. Round-to-nearest or, with a Hessian, LDLQ.

LDLQ is rounding that lets later rows make up for the error of earlier ones, where the inputs are correlated. With ``H``
the mean of ``x x^T`` over calibration tokens, in the rotated basis, the loss of an error matrix ``E`` is
``tr(E^T H E)``. Let ``H = L D L^T`` with ``L`` unit lower triangular in blocks of 16. Rows are coded in blocks of 16
from the last to the first; each block codes ``W[r] + L[below, r]^T E[below]``, so that its own rounding error is all
that it adds to the loss.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from harness.exl3.codebook import Codebook, marker_int32, table
from harness.exl3.layout import RING, RING_COL, RING_ROW, TILE, WIDTHS, pack_states
from harness.exl3.regularize import Regularized, best_rms, blockwise, padded, random_signs, regularize
from harness.exl3.viterbi import search

#: Tiles that a thread takes at a time: about a tenth of a second of work.
_CHUNK = 64
#: Added to the diagonal of a Hessian, relative to its mean: calibration data is finite.
DAMPING = 0.025

#: Told the number of weights coded since the last call.
Report = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How a linear is coded: ``bits`` a weight (1..8; 1.5, 2.5, 3.5 with mul1) and the codebook."""

    bits: float
    codebook: Codebook


@dataclass(frozen=True, slots=True, kw_only=True)
class SignNames:
    """Names that fix the random signs; linears that share an input give the same ``input``."""

    seed: int
    input: str
    output: str


def encode_linear(
    name: str,
    weight: np.ndarray,
    rate: Rate,
    signs: SignNames,
    *,
    bias: np.ndarray | None = None,
    hessian: np.ndarray | None = None,
    threads: int | None = None,
    report: Report = lambda weights: None,
) -> dict[str, np.ndarray]:
    """The stored parts of a linear by suffix: trellis, suh, svh, the marker of its codebook, bias.

    Args:
        name: of the module, for errors.
        weight: float32 [out, in], the Hugging Face orientation, any sizes.
        rate: bits and codebook.
        signs: what the random signs follow from.
        bias: [out], stored as fp16 at the padded length.
        hessian: mean of ``x x^T`` over calibration tokens, [in, in]; None rounds to the nearest path.
        threads: of the search; all cores where None.
        report: told of progress.

    Raises:
        CheckpointError: values that are not finite or do not fit in fp16 scales.
    """
    out_features, in_features = weight.shape
    rows, columns = padded(in_features), padded(out_features)
    full = np.zeros((rows, columns), np.float32)
    full[:in_features, :out_features] = weight.T
    pair = random_signs(rows, signs.seed, signs.input), random_signs(columns, signs.seed, signs.output)
    regular = regularize(name, full, pair, best_rms(rate.bits, rate.codebook))
    del full
    if hessian is None:
        states = search_matrix(regular.rotated, rate, threads=threads, report=report)
    else:
        inner = rotated_hessian(hessian, regular.suh)
        states = ldlq_states(regular.rotated, inner, rate, threads=threads, report=report)
    return _parts(states, regular, rate, bias)


def _parts(states: np.ndarray, regular: Regularized, rate: Rate, bias: np.ndarray | None) -> dict[str, np.ndarray]:
    parts = {"trellis": pack_states(states, WIDTHS[rate.bits]), "suh": regular.suh, "svh": regular.svh}
    marker = marker_int32(rate.codebook)
    if marker is not None:
        parts[rate.codebook] = np.array(marker, np.int32)
    if bias is not None:
        parts["bias"] = np.zeros(len(regular.svh), np.float16)
        parts["bias"][: len(bias)] = bias
    return parts


def search_matrix(
    rotated: np.ndarray, rate: Rate, *, threads: int | None = None, report: Report = lambda weights: None
) -> np.ndarray:
    """States of every tile of a rotated matrix [in, out]: uint16 [in/16, out/16, 256]."""
    down, across = (size // TILE for size in rotated.shape)
    tiles = rotated.reshape(down, TILE, across, TILE).transpose(0, 2, 1, 3).reshape(-1, TILE, TILE)
    states = np.empty((len(tiles), RING), np.uint16)

    def work(start: int) -> int:
        chunk = tiles[start : start + _CHUNK, RING_ROW, RING_COL]
        states[start : start + _CHUNK] = search(chunk, rate.bits, rate.codebook)
        return chunk.size

    pool = ThreadPoolExecutor(threads or len(os.sched_getaffinity(0)))
    try:
        for weights in pool.map(work, range(0, len(tiles), _CHUNK)):
            report(weights)
    finally:
        # On Ctrl-C only the chunks under way are finished.
        pool.shutdown(cancel_futures=True)
    return states.reshape(down, across, RING)


def decoded(states: np.ndarray, codebook: Codebook) -> np.ndarray:
    """The rotated matrix that states stand for: float32 [in, out]."""
    down, across, _ = states.shape
    tiles = np.empty((down, across, TILE, TILE), np.float32)
    tiles[:, :, RING_ROW, RING_COL] = table(codebook)[states]
    return tiles.transpose(0, 2, 1, 3).reshape(down * TILE, across * TILE)


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
        uint16 [in/16, out/16, 256], as `search_matrix`.
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
