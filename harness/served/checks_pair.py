"""Checks on two answers of a server to one row: what must not move a number, and by how much it does."""

from __future__ import annotations

import numpy as np

from harness.errors import EngineError
from harness.measure import repeat
from harness.measure.repeat import Difference
from harness.served.seam import ServedRow
from harness.types import Check

#: At the edge of a chunk, a change of more nats than this that stands out from all near it is a seam.
SEAM = 1.0
#: How many times the largest change near it that is.
STANDS_OUT = 3.0
#: Positions on either side of an edge that it is compared with.
NEAR = 64
#: Chunk sizes that servers use, tried where a server does not tell its own.
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)


def difference(a: ServedRow, b: ServedRow) -> Difference:
    """Compare the next tokens' and the common top tokens' log-probabilities over the positions that both have."""
    count = min(len(a.target_logprob_T), len(b.target_logprob_T))
    targets_T = np.abs(a.target_logprob_T[:count] - b.target_logprob_T[:count])
    lists_T = np.array([_lists(a, b, t) for t in range(count)])
    worst_T = np.maximum(targets_T, lists_T)
    same_ids = np.array_equal(a.ids_TK[:count], b.ids_TK[:count])
    return Difference(
        equal=same_ids and not worst_T.any(),
        largest=float(worst_T.max()),
        mean=float(targets_T.mean()),
        at=int(worst_T.argmax()),
    )


def check_same(a: ServedRow, b: ServedRow, *, name: str, cause: str, repair: str) -> Check:
    """Two answers to the same tokens, judged as those of any engine are (`harness.measure.repeat.check_same`)."""
    return repeat.check_same(a.index, difference(a, b), name=name, cause=cause, repair=repair)


def check_seams(whole: ServedRow, moved: ServedRow, kept: int, dropped: int, chunk: int | None) -> Check:
    """No position at the edge of a prefill chunk stands out when the edge is moved.

    Args:
        whole: a row.
        moved: the same row without ``dropped`` tokens after its first ``kept``, so that every later token lies
            ``dropped`` places nearer the beginning: the edges of chunks fall on other tokens.
        chunk: tokens in a chunk, or None where the server does not tell.
    """
    a, b = whole.target_logprob_T[kept + dropped :], moved.target_logprob_T[kept:]
    change_T = np.full(len(whole.target_logprob_T), np.nan)
    change_T[kept + dropped :] = np.abs(a - b)
    edges = [_worst_edge(change_T, size, dropped) for size in ((chunk,) if chunk else CHUNKS)]
    worst, at, size = max(edges, key=lambda edge: edge[0])  # of several sizes with one edge, the smallest
    if worst > SEAM:
        raise EngineError(
            f"row {whole.index}, position {at}: the NLL changes by {worst:.3g} nats when the edge of a prefill chunk "
            f"of {size} moves, more than anywhere within {NEAR} positions",
            "turn chunked prefill off, or make the chunk longer than a row",
        )
    tried = str(chunk) if chunk else f"{CHUNKS[0]} to {CHUNKS[-1]}"
    return Check(name="seams of chunked prefill", passed=True, figure=f"at most {worst:.3g} nats at edges of {tried}")


def _worst_edge(change_T: np.ndarray, size: int, dropped: int) -> tuple[float, int, int]:
    """Largest change at an edge of chunks of one size that stands out, its position, and the size; 0 if none does."""
    ends = np.arange(size, len(change_T) + 1, size)
    # A chunk's last position has its target in the next chunk, so either side of an edge may be wrong.
    edges = np.concatenate([ends - 1, ends, ends - 1 + dropped, ends + dropped])
    edges = edges[edges < len(change_T)]
    elsewhere_T = change_T.copy()
    elsewhere_T[edges] = np.nan
    worst = (0.0, -1, size)
    for edge in edges.tolist():
        near = elsewhere_T[max(0, edge - NEAR) : edge + NEAR + 1]
        near = near[~np.isnan(near)]
        if len(near) and change_T[edge] > STANDS_OUT * near.max():
            worst = max(worst, (float(change_T[edge]), edge, size))
    return worst


def _lists(a: ServedRow, b: ServedRow, t: int) -> float:
    """Largest change among the ids that both lists hold at a position."""
    _, ours, theirs = np.intersect1d(a.ids_TK[t], b.ids_TK[t], return_indices=True)
    with np.errstate(invalid="ignore"):
        change = np.abs(a.logprobs_TK[t][ours] - b.logprobs_TK[t][theirs])
    # Unused slots, and ids that are impossible in both, differ by -inf - -inf.
    return float(np.where(np.isnan(change), 0.0, change).max(initial=0.0))
