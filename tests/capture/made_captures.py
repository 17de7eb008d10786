"""A tiny teacher: random hidden states, a random head, a panel of four rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from harness.capture import CaptureWriter
from harness.digest import head_digest, ids_digest
from harness.types import EngineIdentity, Head, Hidden, Panel, Row

V, H, T = 131, 48, 17
ROW = "row-0002.parquet"


@dataclass
class Tiny:
    panel: Panel
    head: Head
    identity: EngineIdentity
    states: dict[int, torch.Tensor]

    def write(self, folder: Path, rows: list[int] | None = None) -> Path:
        """Capture some rows (all by default) and finish."""
        with CaptureWriter(folder, self.identity, self.panel, self.head) as writer:
            for index in writer.missing_rows() if rows is None else rows:
                writer.write_row(self.panel.rows[index], Hidden(states_TH=self.states[index]))
            writer.finish()
        return folder


def files(folder: Path) -> dict[str, bytes]:
    """All files but the lock, which is empty."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def make_panel(lengths: list[int], vocab: int = V, seed: int = 1) -> Panel:
    rng = np.random.default_rng(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = rng.integers(0, vocab, length).astype(np.int32)
        rows.append(Row(index=index, ids_T=ids, document=f"d{index}", domain="test", sha256=ids_digest(ids)))
    sha = ids_digest(np.concatenate([row.ids_T for row in rows]))
    return Panel(
        name="tiny", rows=tuple(rows), sha256=sha, recipe_sha256="r" * 64, tokenizer_sha256="t" * 64, tokenizer_name="t"
    )


def make_head(vocab: int = V, width: int = H, **shape: object) -> Head:
    weight = torch.randn(vocab, width, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    sha = head_digest(weight, vocab_size=vocab, **shape)
    return Head(weight_VH=weight, vocab_size=vocab, sha256=sha, **shape)


def make_identity(head_sha256: str, **changes: object) -> EngineIdentity:
    identity = EngineIdentity(
        engine="toy",
        version="1",
        model="org/tiny",
        revision="abc",
        weights_sha256="w" * 64,
        head_sha256=head_sha256,
        tokenizer_sha256="t" * 64,
        weights_dtype="bfloat16",
        compute_dtype="float32",
        lane="weights",
        device="cpu",
        settings={"batch": 1, "mask": None, "flag": True},
    )
    return replace(identity, **changes)
