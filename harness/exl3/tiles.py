"""A rotated matrix searched tile by tile on all cores, and decoded again."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from harness.exl3.codebook import Codebook, table
from harness.exl3.layout import RING, RING_COL, RING_ROW, TILE
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
