"""Forward passes of many rows, held at the door of each decoder layer, so that all pass one layer before the next.

Each row runs the model class's own ``forward`` in a greenlet that is suspended by a hook in front of every layer.
So whatever the class passes from layer to layer (masks, rotary tables, top-k selections, several residual streams)
is simply kept, and each operation sees the same shapes as in a run of the whole model: the results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn

from harness.errors import EngineError


class HeldRow:
    """One row's forward pass, ``ids`` [1, T].

    ``stage`` is the layer it waits for; the number of layers means the head, whose input is then in ``held``.
    ``kept`` is the number of bytes that it keeps while it waits, once it has reached the first layer.
    """

    def __init__(self, gates: Gates, ids: torch.Tensor) -> None:
        self.length = ids.shape[1]
        self.stage, self.kept = -1, 0
        self.held: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self._gates, self._ids = gates, ids
        self._run = greenlet(self._forward)

    def advance(self) -> int:
        """Run until the next door, or past the head to the end; the stage reached.

        Raises:
            EngineError: the model went past its head, or came to no door at all.
        """
        before = self.stage
        with self._gates.entering(self._run, self):
            self._run.switch()
        if self._run.dead and before != self._gates.head_stage:
            raise EngineError("the model ended before its output head", "report the architecture")
        return self.stage

    def drop(self) -> None:
        """Give up the rest of the forward pass and what it holds."""
        if not self._run.dead and self.stage >= 0:
            self._run.throw(GreenletExit)
        self.held = self.logits = None

    def _forward(self) -> None:
        out = self._gates.model(input_ids=self._ids, use_cache=False)
        self.logits = out.logits[0]


class Gates:
    """Hooks in front of every decoder layer and the head of ``model`` that suspend the rows passing through."""

    def __init__(self, model: Any, layers: Sequence[nn.Module]) -> None:
        self.model = model
        self.head_stage = len(layers)
        self._rows: dict[greenlet, HeldRow] = {}
        for stage, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._gate(stage), with_kwargs=True)
        model.get_output_embeddings().register_forward_pre_hook(self._gate(self.head_stage), with_kwargs=True)

    @contextmanager
    def entering(self, run: greenlet, row: HeldRow) -> Iterator[None]:
        """Make ``run`` stop at the doors while it is switched to from here."""
        self._rows[run] = row
        try:
            yield
        finally:
            del self._rows[run]

    def _gate(self, stage: int) -> Callable[..., None]:
        def wait(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current = getcurrent()
            row = self._rows.get(current)
            if row is None:
                return
            if stage == 0:
                row.kept = _kept_bytes(args, kwargs)
            if stage == self.head_stage:
                row.held = (*args, *kwargs.values())[0]
            row.stage = stage
            # The parent is the code that made the row and advances it.
            assert current.parent is not None
            current.parent.switch()

        return wait


def _kept_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """What a waiting row keeps: the layer's inputs, and its embeddings, which the model's frame still holds."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors((args, kwargs))}
    hidden = (*args, *kwargs.values())[0]
    return sum(storages.values()) + int(hidden.untyped_storage().nbytes())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
