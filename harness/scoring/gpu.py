"""The same walk on a GPU: whole rows of logits of a block of positions in device memory, then one program a position.

Products of bf16 or fp16 hidden states with a head of the same type accumulate and return fp32; any other mix is made
fp32 first. A block's logits take about 1 GiB of device memory, so the second pass needs no second product and is on
unless refused. Results equal the CPU's to about 1e-6 of themselves (the products round differently).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from harness.scoring import chunk
from harness.scoring import state as slot
from harness.scoring.sides import whole_or_nan
from harness.scoring.walk import Source, Walked
from harness.types import Head

STRIP_BYTES = 1 << 30
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
    with _full_precision():
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
def _full_precision() -> Iterator[None]:
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
        both = _through(inputs[0], weight, head)
        return both, both
    if weight is not None and head is not None and _same_head(sources) and inputs[0].dtype == inputs[1].dtype:
        stacked = _through(torch.cat(inputs), weight, head)
        return stacked[: len(inputs[0])], stacked[len(inputs[0]) :]
    sides = [
        side.float().contiguous() if weight is None or source.head is None else _through(side, weight, source.head)
        for side, weight, source in zip(inputs, heads, sources, strict=True)
    ]
    return sides[0], sides[1]


def _through(states_RH: torch.Tensor, weight_VH: torch.Tensor, head: Head) -> torch.Tensor:
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
    state, tops = torch.from_numpy(slot.fresh(len(t))).to(t.device), []
    for low in range(0, vocab_size, BLOCK):
        parts = [side[:, low : min(low + BLOCK, vocab_size)] for side in (t, c)]
        chunk.update(state, parts[0], parts[1], low)
        tops.append(torch.stack([part.amax(-1) for part in parts], -1))
    for slot_at, side in ((slot.AT_T, t), (slot.AT_C, c)):
        state[:, slot_at] = side.gather(1, targets[:, None])[:, 0].double()
    return state, torch.stack(tops, -1)


def second_pass(
    t: torch.Tensor, c: torch.Tensor, state: torch.Tensor, own: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position ``sum |p - ratio q|`` and the number of candidate logits above ``own``."""
    if _triton(t):
        from harness.scoring import triton_rows

        return triton_rows.second_pass(t, c, state, own, vocab_size)
    gap, above = torch.zeros(len(t), dtype=torch.float64, device=t.device), torch.zeros_like(own, dtype=torch.int64)
    for low in range(0, vocab_size, BLOCK):
        high = min(low + BLOCK, vocab_size)
        more = chunk.second(state, t[:, low:high], c[:, low:high], own)
        gap, above = gap + more[0], above + more[1]
    return gap, above


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
