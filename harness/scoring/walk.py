"""The walk over positions and vocabulary: which part is computed when, in how much memory, by how many threads.

Positions are taken in blocks, the vocabulary in strips. Two plans:

* streaming: up to 1,056 rows of hidden states and a narrow strip at a time. The head is read least often, but total
  variation and ranks need normalisers that are known only at the end, and the logits are gone by then;
* second pass: as many positions as let all of their logits stay in 44 MB, so that no product is made twice. The
  products are of fewer rows then (216 with a vocabulary of 49,152, 72 with 154,880), and the logits leave the cache:
  it costs about a third more with 49,152 and about half more with 154,880. From logits it costs 15 to 80 %.

So the second pass is on by default only where products of ``ENOUGH_ROWS`` rows fit, and has to be asked for elsewhere.
Extra memory: at most 18 MB of packed hidden states, and the strip (a few MB a thread, or the 44 MB). A library's
product also widens 8 MB of head a thread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from harness.scoring import rows
from harness.scoring.blas import GROUP, blas_choice, single_threaded
from harness.scoring.sides import HeadStrip, Part, Run, patterns, tile_width, whole_or_nan
from harness.scoring.state import fresh
from harness.types import Head

MOST_ROWS = 88 * GROUP
STATE_BYTES = 17 << 20
STRIP_BYTES = 44 << 20
#: Rows of hidden states in one product from which the second pass costs under 25 %.
ENOUGH_ROWS = 256
#: Rows of logits a thread takes at a time.
SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One side: logits ``[T, W]``, or hidden states ``[T, H]`` and their head."""

    matrix: torch.Tensor
    head: Head | None

    @property
    def width(self) -> int:
        """Columns of the logits, padding included."""
        return self.matrix.shape[1] if self.head is None else self.head.weight_VH.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """States of all positions; ``second_T3`` (empty without a second pass); log mass of padding, -inf for none."""

    state: np.ndarray
    second_T3: np.ndarray
    padding_T2: np.ndarray


def default_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def walk(
    sources: tuple[Source, Source], targets_T: np.ndarray, vocab_size: int, *, second: bool | None, threads: int | None
) -> Walked:
    """See every position against the whole vocabulary. ``second=None`` decides by its cost."""
    with runner(threads or default_threads()) as (run, workers):
        job = _Job(sources, targets_T, vocab_size, run, workers)
        if all(source.head is None for source in sources):
            return job.from_logits(bool(second))
        with single_threaded():
            return job.through_heads(second)


@contextmanager
def runner(threads: int) -> Iterator[tuple[Run, int]]:
    """What runs a function over items on so many threads, and their number."""
    if threads == 1:
        yield _in_order, 1
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def run(function: Callable[[int], None], items: Iterable[int]) -> None:
            list(pool.map(function, items))

        yield run, threads


def _in_order(function: Callable[[int], None], items: Iterable[int]) -> None:
    for item in items:
        function(item)


class _Job:
    """One walk: its inputs, and the arrays it fills."""

    def __init__(
        self, sources: tuple[Source, Source], targets_T: np.ndarray, vocab_size: int, run: Run, threads: int
    ) -> None:
        self.sources, self.targets_T, self.vocab_size = sources, targets_T, vocab_size
        self.run, self.threads = run, threads
        self.state = fresh(len(targets_T))
        self.padding_T2 = np.full((len(targets_T), 2), -np.inf)
        self.second_T3 = np.empty((0, 3))

    def _walked(self) -> Walked:
        return Walked(state=self.state, second_T3=self.second_T3, padding_T2=self.padding_T2)

    def _score(self, parts: tuple[Part, Part], columns: tuple[int, int], at: slice) -> None:
        """Add columns of some positions' logits to their states."""
        first, end = columns[0], min(columns[1], self.vocab_size)
        if end > first:
            rows.score_rows(
                parts[0].array,
                parts[1].array,
                (parts[0].start, parts[1].start),
                (parts[0].is_bf16, parts[1].is_bf16),
                (first, end),
                self.targets_T[at],
                self.state[at],
                self.second_T3[at] if len(self.second_T3) else self.second_T3,
            )

    def _pad(self, side: int, logits: torch.Tensor, first: int, at: slice) -> None:
        """Add the mass of the padding columns ``first ...``, in the same pieces whatever the strip."""
        for low in range(first - first % rows.BLOCK, first + logits.shape[1], rows.BLOCK):
            piece = logits[:, max(low - first, 0) : low - first + rows.BLOCK]
            mass = torch.logsumexp(piece.double(), -1).numpy()
            self.padding_T2[at, side] = np.logaddexp(self.padding_T2[at, side], mass)

    def from_logits(self, second: bool) -> Walked:
        if second:
            self.second_T3 = np.empty((len(self.targets_T), 3))

        def share(low: int) -> None:
            at = slice(low, min(low + SHARE, len(self.targets_T)))
            parts = tuple(self._matrix_part(source, at, 0) for source in self.sources)
            self._score((parts[0], parts[1]), (0, self.vocab_size), at)
            for side, source in enumerate(self.sources):
                if source.width > self.vocab_size:
                    self._pad(side, source.matrix[at, self.vocab_size :], self.vocab_size, at)

        self.run(share, range(0, len(self.targets_T), SHARE))
        return self._walked()

    def _matrix_part(self, source: Source, at: slice, start: int) -> Part:
        return Part(patterns(source.matrix[at]), start, source.matrix.dtype == torch.bfloat16)

    def through_heads(self, second: bool | None) -> Walked:
        sides = sum(source.head is not None for source in self.sources)
        if self.sources[0] is self.sources[1]:
            sides = 1
        wide = max(source.width for source in self.sources)
        held = _positions(STRIP_BYTES // (4 * wide), sides)
        if second is None:
            second = held * sides >= ENOUGH_ROWS
        if second:
            self.second_T3 = np.empty((len(self.targets_T), 3))
            step, width = held, wide
        else:
            hidden = max(source.matrix.shape[1] for source in self.sources if source.head is not None)
            step = _positions(min(MOST_ROWS, STATE_BYTES // (4 * hidden)), sides)
            width = -(-self.threads * tile_width(hidden, blas_choice()) // rows.BLOCK) * rows.BLOCK
        step = _even(len(self.targets_T), step)
        for low in range(0, len(self.targets_T), step):
            self._block(slice(low, min(low + step, len(self.targets_T))), width, wide)
        return self._walked()

    def _block(self, at: slice, width: int, wide: int) -> None:
        width = min(width, wide)
        strips, pick = self._strips(at, width)
        for first in range(0, wide, width):
            end = min(first + width, wide)
            for strip in strips:
                strip.fill(first, min(end, strip.weight.shape[0]), self.run)
            parts = [self._part(pick[side], strips, side, at, first) for side in (0, 1)]
            self._share_out((parts[0], parts[1]), (first, end), at)
            for side, source in enumerate(self.sources):
                low, high = max(first, self.vocab_size), min(end, source.width)
                if low < high:
                    begin = parts[side].start - first
                    logits = _as_tensor(parts[side])[:, begin + low : begin + high]
                    self._pad(side, logits, low, at)

    def _part(self, pick: tuple[int, int] | None, strips: list[HeadStrip], side: int, at: slice, first: int) -> Part:
        if pick is None:
            return self._matrix_part(self.sources[side], at, first)
        return strips[pick[0]].side(pick[1])

    def _share_out(self, parts: tuple[Part, Part], columns: tuple[int, int], at: slice) -> None:
        count = at.stop - at.start
        share = count if self.threads == 1 else -(-count // (4 * self.threads))

        def score(low: int) -> None:
            some = slice(low, min(low + share, count))
            own = tuple(Part(part.array[some], part.start, part.is_bf16) for part in parts)
            self._score((own[0], own[1]), columns, slice(at.start + some.start, at.start + some.stop))

        self.run(score, range(0, count, share))

    def _strips(self, at: slice, width: int) -> tuple[list[HeadStrip], list[tuple[int, int] | None]]:
        """The strips to fill, and for each side ``(strip, part)`` or None where its logits are there."""
        blas, heads = blas_choice(), [source.head for source in self.sources]
        inputs = [
            None if source.head is None else whole_or_nan(source.matrix[at].cpu()).float().numpy()
            for source in self.sources
        ]
        one, two = heads
        if one is not None and two is not None and (one is two or one.sha256 == two.sha256):
            same = self.sources[0] is self.sources[1]
            parts = [part for part in (inputs[:1] if same else inputs) if part is not None]
            return [HeadStrip(parts, one, width, blas, self.threads)], [(0, 0), (0, 0 if same else 1)]
        strips: list[HeadStrip] = []
        pick: list[tuple[int, int] | None] = []
        for head, part in zip(heads, inputs, strict=True):
            pick.append(None if part is None else (len(strips), 0))
            if head is not None and part is not None:
                strips.append(HeadStrip([part], head, width, blas, self.threads))
        return strips, pick


def _as_tensor(part: Part) -> torch.Tensor:
    tensor = torch.from_numpy(part.array)
    if part.array.dtype == np.float32:
        return tensor
    return tensor.view(torch.bfloat16 if part.is_bf16 else torch.float16)


def _positions(stacked: int, sides: int) -> int:
    """Positions of a block of ``stacked`` rows; a multiple of ``GROUP``, at least one."""
    return max(stacked // sides // GROUP, 1) * GROUP


def _even(count: int, most: int) -> int:
    """Positions of a block so that blocks of at most ``most`` come out alike, not with a small one at the end."""
    blocks = math.ceil(count / most)
    return math.ceil(count / blocks / GROUP) * GROUP
