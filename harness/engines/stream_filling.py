"""Fill the next layer in a thread while this one runs, within a memory allowance."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition

import torch

from harness.engines.stream_weights import Unit


class _Stopped(Exception):
    pass


class Filling:
    """Fills ``units`` in a thread; past ``early`` bytes it waits until `release` says that the memory is there."""

    def __init__(self, pool: ThreadPoolExecutor, stage: int, units: Sequence[Unit], early: float) -> None:
        self.stage, self.taken = stage, 0
        self._early, self._free, self._stopped = early, False, False
        self._changed = Condition()
        self._future = pool.submit(self._fill, units)

    def release(self) -> None:
        """The layer in use is gone: take all the memory that is needed."""
        with self._changed:
            self._free = True
            self._changed.notify()

    def stop(self) -> None:
        """Give up, and wait until the thread has done so; nothing happens after the end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._future.exception()

    def result(self) -> dict[str, torch.Tensor]:
        """Every filled tensor by name; waits for the last."""
        return self._future.result()

    def _admit(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._free or self.taken + size <= self._early)
            if self._stopped:
                raise _Stopped
            self.taken += size

    def _fill(self, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
        filled: dict[str, torch.Tensor] = {}
        for unit in units:
            filled |= unit.fill(self._admit)
        return filled
