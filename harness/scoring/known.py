"""What a teacher thinks of chosen ids: its top k, ids drawn from the rest, and any ids that a server names.

Logits are made a block of positions at a time by the products of the main scorer, so a log-probability here is the one
that an exact score rests on, and memory does not grow with rows or with the vocabulary times positions. Each drawn
position uses its own stretch of a counter-based stream (Philox) keyed by seed and row: the same digits whatever the
blocks or threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from harness.errors import ScoreError
from harness.scoring import gpu
from harness.scoring.blas import GROUP, blas_choice, single_threaded
from harness.scoring.sides import HeadStrip, whole_or_nan
from harness.scoring.walk import STRIP_BYTES, default_threads, runner
from harness.types import CapturedRow, Head, Hidden, Logits

#: Rows of the head that are gathered at a time for chosen ids.
GATHERED = 8192
#: Bytes of float64 probabilities held at a time while the tail is drawn from.
DRAW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TopAndTail:
    """A teacher's ``K`` most probable ids, best first, and ``M`` ids drawn from what is left, one row.

    Ties go to the lowest id. ``tail_mass_T`` is the probability outside the top ``K``: summed where
    ids are drawn, else what the top ``K`` leave of 1. Where a position is not finite,
    or has no tail to draw from, ids are -1 and log-probabilities NaN. ``also_logp_TL`` are those of ids asked for
    beside, from the same products.
    """

    ids_TK: np.ndarray
    logp_TK: np.ndarray
    tail_ids_TM: np.ndarray
    tail_logp_TM: np.ndarray
    tail_mass_T: np.ndarray
    also_logp_TL: np.ndarray


def teacher_logprobs_at(
    row: CapturedRow, head: Head | None, ids_TK: np.ndarray, *, vocab_size: int | None = None
) -> np.ndarray:
    """The teacher's log-probabilities of ``ids_TK``, float64 ``[T - 1, K]``; NaN where an id is -1.

    Only the head's rows of these ids are multiplied, which may round the last digit of a logit otherwise than the
    product with the whole head does.

    Raises:
        ScoreError: an id is outside the vocabulary, or there are not as many positions as the row has.
    """
    vocab = _vocabulary(row, head, vocab_size)
    _check_ids(row, ids_TK, vocab)
    match row.outputs:
        case Logits(logits_TV=logits):
            at = torch.from_numpy(np.maximum(ids_TK, 0).astype(np.int64))
            values = logits.gather(1, at).double().numpy()
        case Hidden(states_TH=states):
            values = _gathered_logits(states, _head_of(row, head), np.asarray(ids_TK))
    return np.where(ids_TK >= 0, values - row.lse[:, None], np.nan)


def teacher_top_and_tail(
    row: CapturedRow,
    head: Head | None,
    k: int,
    m: int = 0,
    seed: int = 0,
    *,
    also_TL: np.ndarray | None = None,
    vocab_size: int | None = None,
) -> TopAndTail:
    """The teacher's top ``k`` at each position, and ``m`` ids drawn independently from the rest of its distribution.

    ``also_TL``: other ids whose log-probabilities are wanted, -1 where a slot is unused.

    Raises:
        ScoreError: ``k`` is above the vocabulary, or an id of ``also_TL`` outside it.
    """
    vocab, positions = _vocabulary(row, head, vocab_size), len(row.target)
    also = np.empty((positions, 0), np.int32) if also_TL is None else also_TL
    _check_ids(row, also, vocab)
    if not 0 < k <= vocab:
        raise ScoreError(f"the top {k} of a vocabulary of {vocab} tokens", f"ask for 1 to {vocab}")
    out = TopAndTail(
        ids_TK=np.full((positions, k), -1, np.int32),
        logp_TK=np.full((positions, k), np.nan),
        tail_ids_TM=np.full((positions, m), -1, np.int32),
        tail_logp_TM=np.full((positions, m), np.nan),
        tail_mass_T=np.full(positions, np.nan),
        also_logp_TL=np.full(also.shape, np.nan),
    )
    uniform = np.random.Generator(np.random.Philox(key=np.array([seed, row.index], np.uint64))).random((positions, m))
    for at, logits in _blocks(row, head, vocab):
        step = max(DRAW_BYTES // (8 * vocab), 1)
        for low in range(0, len(logits), step):
            some = slice(at.start + low, min(at.start + low + step, at.stop))
            _fill(out, some, logits[low : low + step], row.lse[some], uniform[some], also[some])
    return out


# ---- the whole vocabulary, a block of positions at a time ------------------------------------------------------------


def _blocks(row: CapturedRow, head: Head | None, vocab: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Logits ``[n, vocab]`` of consecutive positions; a block is overwritten by the next."""
    positions = len(row.target)
    if isinstance(row.outputs, Logits):
        for low in range(0, positions, GROUP):
            at = slice(low, min(low + GROUP, positions))
            yield at, row.outputs.logits_TV[at, :vocab].float()
        return
    assert isinstance(row.outputs, Hidden)
    states, head = row.outputs.states_TH, _head_of(row, head)
    width = len(head.weight_VH)
    step = max(STRIP_BYTES // (4 * width) // GROUP, 1) * GROUP
    on = gpu.device()
    held = head if on is None else replace(head, weight_VH=head.weight_VH.to(on))
    for low in range(0, positions, step):
        at = slice(low, min(low + step, positions))
        yield at, head_logits(states[at], held, on)[:, :vocab]


def head_logits(states_TH: torch.Tensor, head: Head, on: torch.device | None) -> torch.Tensor:
    """fp32 logits ``[n, width]`` of some positions: the main scorer's products, where it makes them."""
    if on is not None:
        with gpu.full_precision():
            return gpu.head_logits(whole_or_nan(states_TH.to(on)), head.weight_VH.to(on), head)
    inputs = whole_or_nan(states_TH.cpu()).float().numpy()
    with runner(default_threads()) as (run, threads), single_threaded():
        strip = HeadStrip([inputs], head, len(head.weight_VH), blas_choice(), threads)
        strip.fill(0, len(head.weight_VH), run)
    return torch.from_numpy(strip.side(0).array)


def _fill(
    out: TopAndTail, at: slice, logits: torch.Tensor, lse: np.ndarray, uniform: np.ndarray, also: np.ndarray
) -> None:
    """The top, the drawn and the other ids of the positions ``at``, whose logits are ``[n, V]``."""
    k, valid = out.ids_TK.shape[1], np.isfinite(lse)
    total = torch.tensor(lse, device=logits.device)[:, None]
    ids = top_ids(logits, k)
    top = logits.gather(1, ids).double() - total
    out.ids_TK[at] = np.where(valid[:, None], ids.cpu().numpy(), -1)
    out.logp_TK[at] = np.where(valid[:, None], top.cpu().numpy(), np.nan)
    others = logits.gather(1, torch.tensor(np.maximum(also, 0), dtype=torch.int64, device=logits.device))
    out.also_logp_TL[at] = np.where(also >= 0, (others.double() - total).cpu().numpy(), np.nan)
    if not uniform.shape[1]:
        out.tail_mass_T[at] = 1.0 - np.exp(out.logp_TK[at]).sum(1)
        return
    tail = (logits.double() - total).exp_().scatter_(1, ids, 0.0)
    sums = tail.cumsum(1)
    mass = sums[:, -1].cpu().numpy()
    drawn = _drawn(sums, tail, torch.from_numpy(uniform).to(logits.device))
    good = valid[:, None] & (mass > 0)[:, None]
    out.tail_mass_T[at] = np.where(valid, mass, np.nan)
    out.tail_ids_TM[at] = np.where(good, drawn.cpu().numpy(), -1)
    out.tail_logp_TM[at] = np.where(good, (logits.gather(1, drawn).double() - total).cpu().numpy(), np.nan)


def _drawn(sums: torch.Tensor, tail: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Ids where the running sum first passes ``uniform`` times the total, never one without probability."""
    found = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    last = tail.shape[1] - 1 - (tail.flip(1) > 0).to(torch.int8).argmax(1, keepdim=True)
    return torch.minimum(found, last)


def top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Ids ``[n, k]`` of the largest logits, best first, ties to the lowest id."""
    values, ids = torch.topk(logits, k, dim=1)
    # Which of equal logits topk takes is not defined: where more than k reach the last value, sort the whole row.
    crowded = (logits >= values[:, -1:]).sum(1) > k
    ids, order = ids.sort(1)
    values = values.gather(1, order)
    ids = ids.gather(1, values.argsort(dim=1, descending=True, stable=True))
    for t in torch.nonzero(crowded)[:, 0].tolist():
        ids[t] = logits[t].argsort(descending=True, stable=True)[:k]
    return ids


# ---- chosen ids ------------------------------------------------------------------------------------------------------


def _gathered_logits(states_TH: torch.Tensor, head: Head, ids_TK: np.ndarray) -> np.ndarray:
    """Logits of chosen ids, float64 ``[T, K]``: products of a block of positions with the head's rows of its ids."""
    out = np.empty(ids_TK.shape)
    step = max(GATHERED // max(ids_TK.shape[1], 1) // GROUP, 1) * GROUP
    for low in range(0, len(ids_TK), step):
        at = slice(low, min(low + step, len(ids_TK)))
        wanted, place = np.unique(np.maximum(ids_TK[at], 0), return_inverse=True)
        part = _rows_of(head, wanted)
        block = head_logits(states_TH[at], part, gpu.device()).cpu().numpy()
        out[at] = block[np.arange(len(block))[:, None], place.reshape(ids_TK[at].shape)]
    return out


def _rows_of(head: Head, ids: np.ndarray) -> Head:
    """A head of some of the vocabulary's rows; it has no digest of its own."""
    at = torch.from_numpy(ids.astype(np.int64))
    bias = None if head.bias_V is None else head.bias_V[at.to(head.bias_V.device)]
    return Head(
        weight_VH=head.weight_VH[at.to(head.weight_VH.device)],
        vocab_size=len(ids),
        sha256="",
        bias_V=bias,
        softcap=head.softcap,
        scale=head.scale,
    )


def _check_ids(row: CapturedRow, ids_TK: np.ndarray, vocab: int) -> None:
    if len(ids_TK) != len(row.target):
        raise ScoreError(
            f"row {row.index}: ids for {len(ids_TK)} positions, the capture holds {len(row.target)}",
            "ask about the same row",
        )
    if ids_TK.size and int(ids_TK.max()) >= vocab:
        t, slot = (int(where[0]) for where in np.nonzero(ids_TK >= vocab))
        raise ScoreError(
            f"row {row.index}: token {int(ids_TK[t, slot])} at position {t} is outside the vocabulary of {vocab}",
            "the server's model and the teacher have different tokenizers, or the server does not mask padding tokens",
        )


def _head_of(row: CapturedRow, head: Head | None) -> Head:
    if head is None:
        raise ScoreError(f"row {row.index} holds hidden states, and no head was given", "pass the capture's head")
    return head


def _vocabulary(row: CapturedRow, head: Head | None, declared: int | None) -> int:
    match row.outputs:
        case Hidden():
            return _head_of(row, head).vocab_size
        case Logits(logits_TV=logits):
            return logits.shape[1] if declared is None else declared
