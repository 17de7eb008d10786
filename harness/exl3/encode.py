"""Encode one linear layer: regularise, search every tile, pack. Round-to-nearest or, with a Hessian, LDLQ."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from harness.exl3.codebook import Codebook, marker_int32, table
from harness.exl3.layout import RING, RING_COL, RING_ROW, TILE, WIDTHS, pack_states
from harness.exl3.regularize import Regularized, best_rms, padded, random_signs, regularize
from harness.exl3.viterbi import search

#: Tiles that a thread takes at a time: about a tenth of a second of work.
_CHUNK = 64

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
    states = search_matrix(regular.rotated, rate, threads=threads, report=report)
    return _parts(states, regular, rate, bias)


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


def _parts(states: np.ndarray, regular: Regularized, rate: Rate, bias: np.ndarray | None) -> dict[str, np.ndarray]:
    parts = {"trellis": pack_states(states, WIDTHS[rate.bits]), "suh": regular.suh, "svh": regular.svh}
    marker = marker_int32(rate.codebook)
    if marker is not None:
        parts[rate.codebook] = np.array(marker, np.int32)
    if bias is not None:
        parts["bias"] = np.zeros(len(regular.svh), np.float16)
        parts["bias"][: len(bias)] = bias
    return parts
