"""A tiny exact next-token model, so that everything downstream of an engine can be tested in milliseconds.

It predicts token ``(t + 1) mod V`` with probability ``p`` and shares the rest equally: the NLL of a counting row
is ``-ln p`` at every position, and a shifted reading of its outputs is far worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from harness.digest import json_digest
from harness.types import EngineIdentity, Head, Logits, Row, RowOutputs, Want


class ToyEngine:
    """Gives logits ``[T, V]`` of the counting model."""

    head: Head | None = None
    head_deviation: float | None = None

    def __init__(self, *, vocab_size: int = 16, p: float = 0.9) -> None:
        self._vocab_size, self._p = vocab_size, p
        weights = json_digest({"toy": vocab_size, "p": p})
        self.identity = EngineIdentity(
            engine="toy",
            version="1",
            model=f"toy-{p:g}",
            revision="local",
            weights_sha256=weights,
            head_sha256=weights,
            tokenizer_sha256="absent",
            weights_dtype="float32",
            compute_dtype="float32",
            lane="weights",
            device="cpu",
        )

    def run(self, rows: Sequence[Row], want: Want = "logits") -> Iterator[RowOutputs]:
        """Yield each row's logits; whatever is wanted, logits are what this engine has."""
        rest = (1 - self._p) / (self._vocab_size - 1)
        for row in rows:
            ids = np.asarray(row.ids_T, dtype=np.int64)
            probabilities = np.full((len(ids), self._vocab_size), rest)
            probabilities[np.arange(len(ids)), (ids + 1) % self._vocab_size] = self._p
            with np.errstate(divide="ignore"):
                logits = torch.from_numpy(np.log(probabilities).astype(np.float32))
            yield RowOutputs(index=row.index, echoed_ids_T=row.ids_T.astype(np.int32), outputs=Logits(logits_TV=logits))
