"""The same walk on a GPU: whole rows of logits of a block of positions in device memory, then one program a position.

Products of bf16 or fp16 hidden states with a head of the same type accumulate and return fp32; any other mix is made
fp32 first. A block's logits take about 1 GiB of device memory, so the second pass needs no second product and is on
unless refused. Results equal the CPU's to about 1e-6 of themselves (the products round differently). Without Triton
each row is summed whole, in plain float64.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from harness.scoring import state as slot
from harness.scoring.sides import whole_or_nan
from harness.scoring.walk import Source, Walked
from harness.types import Head

STRIP_BYTES = 1 << 30
#: float64 bytes of one side that are worked on at a time where there is no Triton.
PIECE_BYTES = 64 << 20
#: Rows of a head made fp32 at a time where the product is not of one 16-bit type.
TILE = 16384
#: Columns of a block whose maxima are kept; the Triton kernels use the same.
BLOCK = 2048
TOP = 5


def device() -> torch.device | None:
    """The CUDA device to score on, if there is one."""
    return torch.device("cuda") if torch.cuda.is_available() else None


def walk(
    sources: tuple[Source, Source], targets_T: np.ndarray, vocab_size: int, *, second: bool | None, on: torch.device
) -> Walked:
    """See every position against the whole vocabulary, on the device ``on``."""
    heads = _heads_on(sources, on)
    wide = max(source.width for source in sources)
    step = max(STRIP_BYTES // (8 * wide), 1)
    blocks = []
    with full_precision():
        for low in range(0, len(targets_T), step):
            at = slice(low, min(low + step, len(targets_T)))
            t, c = _logits(sources, heads, at, on)
            targets = torch.from_numpy(targets_T[at]).to(on)
            state, extra = _score(t, c, targets, vocab_size, second is not False)
            padding = torch.stack([_padding(side, vocab_size) for side in (t, c)], -1)
            blocks.append([part.cpu().numpy() for part in (state, extra, padding)])
    joined = [np.concatenate(parts) for parts in zip(*blocks, strict=True)]
    return Walked(state=joined[0], second_T3=joined[1], padding_T2=joined[2])


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 and no 16-bit reductions while the logits are made."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(matmul, name, value)


def _heads_on(sources: tuple[Source, Source], on: torch.device) -> list[torch.Tensor | None]:
    """Each side's head weight on the device; one copy where both are the same."""
    first = None if sources[0].head is None else sources[0].head.weight_VH.to(on)
    if _same_head(sources):
        return [first, first]
    return [first, None if sources[1].head is None else sources[1].head.weight_VH.to(on)]


def _same_head(sources: tuple[Source, Source]) -> bool:
    one, two = sources[0].head, sources[1].head
    return one is not None and two is not None and (one is two or one.sha256 == two.sha256)


def _logits(
    sources: tuple[Source, Source], heads: list[torch.Tensor | None], at: slice, on: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 logits of both sides, padding included; one product for both where they share a head."""
    inputs = [
        source.matrix[at].to(on) if source.head is None else whole_or_nan(source.matrix[at].to(on))
        for source in sources
    ]
    weight, head = heads[0], sources[0].head
    if weight is not None and head is not None and sources[0] is sources[1]:
        both = head_logits(inputs[0], weight, head)
        return both, both
    if weight is not None and head is not None and _same_head(sources) and inputs[0].dtype == inputs[1].dtype:
        stacked = head_logits(torch.cat(inputs), weight, head)
        return stacked[: len(inputs[0])], stacked[len(inputs[0]) :]
    sides = [
        side.float().contiguous() if weight is None or source.head is None else head_logits(side, weight, source.head)
        for side, weight, source in zip(inputs, heads, sources, strict=True)
    ]
    return sides[0], sides[1]


def head_logits(states_RH: torch.Tensor, weight_VH: torch.Tensor, head: Head) -> torch.Tensor:
    """fp32 logits ``[R, V]``, padding included; ``weight_VH`` is the head's weight on the device of the states."""
    if states_RH.is_cuda and states_RH.dtype == weight_VH.dtype != torch.float32:
        logits = torch.mm(states_RH, weight_VH.T, out_dtype=torch.float32)
    else:
        logits = torch.empty(len(states_RH), len(weight_VH), device=states_RH.device)
        states = states_RH.float()
        for low in range(0, len(weight_VH), TILE):
            logits[:, low : low + TILE] = states @ weight_VH[low : low + TILE].float().T
    if head.bias_V is not None:
        logits += head.bias_V.to(logits)
    if head.scale != 1.0:
        logits *= head.scale
    if head.softcap is not None:
        logits.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits


def _padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Log mass of the padding columns; -inf where there are none."""
    if logits.shape[1] == vocab_size:
        return torch.full((len(logits),), -torch.inf, dtype=torch.float64, device=logits.device)
    return torch.logsumexp(logits[:, vocab_size:].double(), -1)


def _score(
    t: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, vocab_size: int, second: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    state, tops = first_pass(t, c, targets, vocab_size)
    if not second:
        return state, torch.empty(0, 3, dtype=torch.float64)
    rows = torch.arange(len(t), device=t.device)
    own = c[rows, state[:, slot.ID_T].long().clamp(min=0)].contiguous()
    gap, above = second_pass(t, c, state, own, vocab_size)
    ids = [top_ids(side, tops[:, k], vocab_size) for k, side in enumerate((t, c))]
    overlap = ((ids[0][:, :, None] == ids[1][:, None, :]) & (ids[0][:, :, None] >= 0)).sum((1, 2))
    extra = torch.stack([gap / (2 * state[:, slot.SUM_S]), overlap.double(), above.double() + 1], -1)
    invalid = (state[:, slot.BAD_T] + state[:, slot.BAD_C] > 0) | torch.isinf(state[:, [slot.TOP_T, slot.TOP_C]]).any(
        -1
    )
    nothing = torch.tensor([torch.nan, -1.0, -1.0], dtype=torch.float64, device=t.device)
    return state, torch.where(invalid[:, None], nothing, extra)


def _triton(side: torch.Tensor) -> bool:
    return side.is_cuda and importlib.util.find_spec("triton") is not None


def first_pass(
    t: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """States ``[n, SLOTS]`` and block maxima ``[n, 2, blocks]``; by Triton where there is a GPU with it."""
    if _triton(t):
        from harness.scoring import triton_rows

        return triton_rows.first_pass(t, c, targets, vocab_size)
    whole = t[:, :vocab_size], c[:, :vocab_size]
    state = torch.cat([_sums(whole[0][at].double(), whole[1][at].double()) for at in _pieces(len(t), vocab_size)])
    for slot_at, side in ((slot.AT_T, t), (slot.AT_C, c)):
        state[:, slot_at] = side.gather(1, targets[:, None])[:, 0].double()
    tops = [torch.stack([block.amax(-1) for block in side.split(BLOCK, -1)], -1) for side in whole]
    return state, torch.stack(tops, 1)


def second_pass(
    t: torch.Tensor, c: torch.Tensor, state: torch.Tensor, own: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position ``sum |p - ratio q|`` and the number of candidate logits above ``own``."""
    if _triton(t):
        from harness.scoring import triton_rows

        return triton_rows.second_pass(t, c, state, own, vocab_size)
    t, c = t[:, :vocab_size], c[:, :vocab_size]
    gaps = [_gap(t[at].double(), c[at].double(), state[at]) for at in _pieces(len(t), vocab_size)]
    return torch.cat(gaps), (c > own[:, None]).sum(-1)


def _pieces(rows: int, width: int) -> Iterator[slice]:
    """Rows that are worked on in float64 together."""
    step = max(PIECE_BYTES // (8 * width), 1)
    for low in range(0, rows, step):
        yield slice(low, low + step)


def _sums(t: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """States of rows that are seen whole, float64 throughout: the sums of `harness.scoring.kernel`."""
    good_t, good_c = t < torch.inf, c < torch.inf
    has_t, has_c = good_t & (t > -torch.inf), good_c & (c > -torch.inf)
    pair, only_t, only_c = has_t & has_c, has_t & (c == -torch.inf), has_c & (t == -torch.inf)
    top_t, top_c = (side.masked_fill(~good, -torch.inf).amax(-1) for side, good in ((t, good_t), (c, good_c)))
    st = _shift(top_t)
    p = torch.where(has_t, torch.exp(t - st[:, None]), 0.0)
    c0 = _centre(torch.where(pair, p, 0.0), torch.where(pair, c - t, 0.0), _shift(top_c) - st)
    sc = st + c0
    q = torch.where(has_c, torch.exp(c - sc[:, None]), 0.0)
    d = torch.where(pair, (c - t) - c0[:, None], 0.0)
    # Away from 0 phi needs no care, and exp of a large d would leave the range.
    near, gap = d.abs() < 1.0, q - p
    forward = torch.where(near, p * (torch.expm1(d) - d), gap - p * d)
    backward = torch.where(near, q * (torch.expm1(-d) + d), q * d - gap)
    at_top_t, at_top_c = t == top_t[:, None], c == top_c[:, None]
    values = {
        slot.TOP_T: top_t,
        slot.TOP_C: top_c,
        slot.C0: c0,
        slot.SUM_S: p.sum(-1),
        slot.SUM_Q: q.sum(-1),
        slot.SUM_M: (p * d - torch.where(only_t, p, 0.0)).sum(-1),
        slot.SUM_N: (q * d).sum(-1),
        slot.SUM_A: torch.where(pair, forward, torch.where(only_c, q, 0.0)).sum(-1),
        slot.SUM_B: torch.where(pair, backward, torch.where(only_t, p, 0.0)).sum(-1),
        slot.SUM_E: torch.where(p > 0, p * (t - st[:, None]), 0.0).sum(-1),
        slot.SUM_F: torch.where(q > 0, q * (c - sc[:, None]), 0.0).sum(-1),
        slot.ID_T: _lowest(at_top_t),
        slot.ID_C: _lowest(at_top_c),
        slot.TIES_T: at_top_t.sum(-1),
        slot.TIES_C: at_top_c.sum(-1),
        slot.JOINT: (at_top_t & at_top_c).any(-1),
        slot.BAD_T: (~good_t).sum(-1),
        slot.BAD_C: (~good_c).sum(-1),
        slot.LOST_T: t.masked_fill(~only_t, -torch.inf).amax(-1),
        slot.LOST_C: c.masked_fill(~only_c, -torch.inf).amax(-1),
    }
    state = torch.from_numpy(slot.fresh(len(t))).to(t.device)
    for slot_at, value in values.items():
        state[:, slot_at] = value.double()
    return state


def _shift(top: torch.Tensor) -> torch.Tensor:
    return torch.where(top > -torch.inf, top, 0.0)


def _centre(p: torch.Tensor, gap: torch.Tensor, middle: torch.Tensor) -> torch.Tensor:
    """The mean of c - t under the teacher, within reach of the maxima's difference ``middle``, as `state.centre`."""
    mean = (p * gap).sum(-1) / p.sum(-1)
    mean = torch.where(torch.isfinite(mean), mean, middle)
    return torch.minimum(torch.maximum(mean, middle - slot.REACH), middle + slot.REACH)


def _lowest(at_top: torch.Tensor) -> torch.Tensor:
    """The first id of each row that is marked, -1 where none is."""
    return torch.where(at_top.any(-1), at_top.to(torch.int8).argmax(-1), -1)


def _gap(t: torch.Tensor, c: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    st = _shift(state[:, slot.TOP_T])[:, None]
    ratio = (state[:, slot.SUM_S] / state[:, slot.SUM_Q])[:, None]
    return (torch.exp(t - st) - torch.exp(c - (st + state[:, slot.C0, None])) * ratio).abs().sum(-1)


def top_ids(logits: torch.Tensor, tops: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Ids ``[n, 5]`` of the largest logits, ties to the lowest id, -1 past the vocabulary.

    They lie in the five blocks of the largest maxima; stable sorts keep ties in the order of ids.
    """
    blocks = torch.sort(tops, dim=-1, descending=True, stable=True).indices[:, :TOP].sort(-1).values
    columns = (blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    inside = columns < vocab_size
    values = logits.gather(1, columns.clamp(max=vocab_size - 1)).masked_fill(~inside, -torch.inf)
    order = torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :TOP]
    return torch.where(inside, columns, -1).gather(1, order)
