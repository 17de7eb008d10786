"""Models larger than memory: every row passes one decoder layer before the next one is read.

Each weight is read, and each EXL3 tensor decoded, once a run. In memory lie one layer, what the waiting rows keep,
and as much of the next layer as the budget leaves room for: it is filled in a thread while this layer runs.
Outputs are bit for bit those of `harness.engines.hf.TransformersEngine`, and so is the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.engines.base import give_back, refuse_long_rows
from harness.engines.head import PROBE, HeadProbe, head_of
from harness.engines.hf import ComputeDType, default_device, dtype_of, identity_of
from harness.engines.models import ModelFolder
from harness.engines.stream_rows import Gates, HeldRow
from harness.engines.stream_weights import Filling, OnDemand, Unit, Weights, decoder_layers, skeleton
from harness.errors import EngineError
from harness.progress import phase, quiet_transformers
from harness.types import Head, Hidden, Logits, Row, RowOutputs, Want

#: Share of one layer and the activations that may be spent on filling the next layer early.
EARLY = 0.25


class StreamingEngine:
    """Runs a model of any size through one layer's worth of memory; dense or EXL3, on a CPU or a GPU.

    Args:
        memory_budget: bytes for weights and activations together; None takes one layer, the activations and 25 %.
    """

    def __init__(
        self,
        located: ModelFolder,
        *,
        compute: ComputeDType = "auto",
        device: str | None = None,
        memory_budget: int | None = None,
        vocab_size: int | None = None,
        weights_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        quiet_transformers()
        self._device = device or default_device()
        self._dtype = dtype_of(compute, self._device)
        self._located, self._budget = located, memory_budget
        self._model = skeleton(located.path, self._dtype, self._device)
        self._weights = Weights(self._model, located.path, self._device)
        path, self._layers = decoder_layers(self._model)
        self._stages = [self._weights.under(f"{path}.{index}") for index in range(len(self._layers))]
        self._gates = Gates(self._model, self._layers)
        output = self._model.get_output_embeddings()
        head_path = next(name for name, module in self._model.named_modules() if module is output)
        self._head_units = self._weights.of(head_path)
        self._others = OnDemand(self._model, self._weights, [path, head_path])
        #: Most bytes of weights that were in memory at once in the last run; the head that is given out not counted.
        self.peak_weight_bytes = 0
        #: Bytes that the rows of the last run kept while they waited.
        self.activation_bytes = 0
        self._limit = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        own = self._own_head(vocab_size)
        self._head = own if self._probe.is_separable(self.head_deviation) else None
        self.identity = identity_of(
            located, self._model, own, self._dtype, self._device, digests=(weights_sha256, tokenizer_sha256)
        )

    @property
    def head(self) -> Head | None:
        return self._head

    @property
    def largest_layer_bytes(self) -> int:
        """Bytes of the largest decoder layer, dense in the compute dtype."""
        return max(map(_size, self._stages))

    def run(self, rows: Sequence[Row], want: Want = "hidden") -> Iterator[RowOutputs]:
        """Yield the outputs of each row in order, all after the last layer; ``hidden`` needs a separable head.

        Raises:
            EngineError: rows that are too long, or a memory budget that one layer and the rows do not fit in.
        """
        refuse_long_rows(self._located, rows, self._limit)
        held = [HeldRow(self._gates, self._ids(row)) for row in rows]
        try:
            if held:
                self._to_head(held)
            if want != "hidden" or self._head is None:
                self._install(self._head_units)
            for row, waiting in zip(rows, held, strict=True):
                ran = np.array(row.ids_T, dtype=np.int32)
                yield RowOutputs(index=row.index, echoed_ids_T=ran, outputs=self._outputs(waiting, want))
        finally:
            for waiting in held:
                waiting.drop()
            self._others.forget()
            self._weights.empty(_names(self._head_units))

    def _outputs(self, waiting: HeldRow, want: Want) -> Hidden | Logits:
        try:
            if want == "hidden" and self._head is not None:
                assert waiting.held is not None
                return Hidden(states_TH=waiting.held[0])
            with torch.inference_mode(), self._probe.exact():
                waiting.advance()
            assert waiting.logits is not None
            return Logits(logits_TV=waiting.logits.float())
        finally:
            waiting.drop()

    def _ids(self, row: Row) -> torch.Tensor:
        return torch.from_numpy(np.asarray(row.ids_T, dtype=np.int64))[None].to(self._device)

    def _to_head(self, held: Sequence[HeldRow]) -> None:
        """Bring every row to the head's door, one layer after the other."""
        tokens = sum(row.length for row in held)
        title = f"layers of {self._located.name}"
        with (
            torch.inference_mode(),
            ThreadPoolExecutor(1) as pool,
            phase(title, total=len(self._layers), unit="tokens", item="layer") as advance,
        ):
            early = self._embed(held)
            filling: Filling | None = None
            try:
                while (stage := min(row.stage for row in held)) < self._gates.head_stage:
                    filling = self._fill(pool, stage, early, filling)
                    filling.release()
                    self._weights.install(filling.result())
                    filling = self._fill(pool, stage + 1, early) if stage + 1 < self._gates.head_stage else None
                    self._pass(held, stage, filling)
                    advance(1, tokens)
            finally:
                if filling is not None:
                    filling.stop()

    def _embed(self, held: Sequence[HeldRow]) -> float:
        """Bring every row to the first layer; returns the bytes that the next layer may take early."""
        held[0].advance()
        self.activation_bytes = held[0].kept * sum(row.length for row in held) // held[0].length
        early = self._room(max(self.largest_layer_bytes, self._others.bytes))
        for row in held[1:]:
            row.advance()
        self.peak_weight_bytes = self._others.bytes
        self._others.forget(embeddings_only=True)
        give_back()
        return early

    def _room(self, weights: int) -> float:
        needed = weights + self.activation_bytes
        if self._budget is None:
            return EARLY * needed
        if needed > self._budget:
            raise EngineError(
                f"{self._located.name} needs {needed / 2**30:.2f} GiB: {weights / 2**30:.2f} for its largest layer and "
                f"{self.activation_bytes / 2**30:.2f} for the rows; the budget is {self._budget / 2**30:.2f}",
                f"give --memory-budget {needed / 2**30 * 1.25 + 0.01:.2f}GiB or fewer rows with --rows",
            )
        return self._budget - needed

    def _fill(self, pool: ThreadPoolExecutor, stage: int, early: float, begun: Filling | None = None) -> Filling:
        """Begin to fill the layer ``stage``, or go on with what was begun."""
        if begun is not None and begun.stage == stage:
            return begun
        if begun is not None:
            begun.stop()
        return Filling(pool, stage, self._stages[stage], early)

    def _pass(self, held: Sequence[HeldRow], stage: int, following: Filling | None) -> None:
        """Run the layer ``stage`` for every row that waits for it, then empty it."""
        for row in held:
            if row.stage == stage:
                row.advance()
        now = _size(self._stages[stage]) + self._others.bytes + (following.taken if following else 0)
        self.peak_weight_bytes = max(self.peak_weight_bytes, now)
        if self._device != "cpu":
            torch.cuda.synchronize()
        self._weights.empty(_names(self._stages[stage]))
        give_back()

    def _install(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._weights.install(unit.fill(lambda size: None))

    def _own_head(self, vocab_size: int | None) -> Head:
        """The head, and in ``head_deviation`` how far the model's own logits are from it, on a few tokens.

        What the layers compute does not matter for that, so only the first one is read and its output stands for
        those of the others.
        """
        output = self._model.get_output_embeddings()
        ids = torch.arange(PROBE, device=self._device)[None] % (vocab_size or output.weight.shape[0])
        self._install(self._stages[0])
        with _first_layer_only(self._layers), torch.inference_mode():
            row = HeldRow(self._gates, ids)
            while row.stage != self._gates.head_stage:
                row.advance()
            self._empty(self._stages[0])
            self._install(self._head_units)
            head = head_of(self._model, vocab_size)
            self._probe = HeadProbe(output, head)
            with self._probe.trying():
                row.advance()
            assert row.logits is not None
            self.head_deviation = self._probe.deviation(row.logits)
        self._empty(self._head_units)
        return head

    def _empty(self, units: Sequence[Unit]) -> None:
        """Give up the memory of ``units``, and of the modules outside the layers that are not needed again."""
        self._weights.empty(_names(units))
        self._others.forget()
        give_back()


def _size(units: Sequence[Unit]) -> int:
    return sum(unit.bytes for unit in units)


def _names(units: Sequence[Unit]) -> list[str]:
    return [name for unit in units for name in unit.targets]


@contextmanager
def _first_layer_only(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let every layer but the first give back what the first gave."""
    given: list[Any] = []
    watch = layers[0].register_forward_hook(lambda _module, _inputs, output: given.append(output))
    for layer in layers[1:]:
        layer.forward = lambda *_args, **_kwargs: given[-1]
    try:
        yield
    finally:
        watch.remove()
        for layer in layers[1:]:
            del layer.forward
