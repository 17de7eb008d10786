"""Small honest measurements: real distributions over 16 tokens, scored in float64, written as a run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from harness.digest import file_digest, json_digest
from harness.measure.receipt import Measurement, PanelIdentity, RowSummary, SideIdentity, save_measurement
from harness.store import write_table
from harness.types import SCORE_DTYPES

VOCAB = 16


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@dataclass
class World:
    """A teacher over ``rows`` x ``length`` positions; candidates are the teacher plus noise."""

    rows: int = 24
    length: int = 300
    documents: int | None = None
    domains: tuple[str, ...] = ("code", "prose", "talk")
    seed: int = 1
    unit: str = "document"
    registration: dict[str, Any] | None = None
    panel_sha256: str = "a" * 64
    tokenizer_sha256: str = "e" * 64
    teacher: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.logits = 3 * rng.standard_normal((self.rows * self.length, VOCAB))
        self.lp = log_softmax(self.logits)
        self.targets = np.array([rng.choice(VOCAB, p=np.exp(lp)) for lp in self.lp], dtype=np.int32)
        self.row_N = np.repeat(np.arange(self.rows), self.length).astype(np.int32)
        self.position_N = np.tile(np.arange(self.length), self.rows).astype(np.int32)
        # Contexts differ in difficulty, and the same contexts are hard for every candidate.
        self.difficulty = np.exp(0.4 * rng.standard_normal(self.rows))[self.row_N]

    def columns(self, noise: float, seed: int, *, slope: float = 0.0) -> dict[str, np.ndarray]:
        """Columns of positions.parquet for a candidate with noisy logits; ``slope`` lets the noise grow along a row."""
        rng = np.random.default_rng(seed)
        scale = noise * self.difficulty * (1 + slope * self.position_N / self.length)
        lq = log_softmax(self.logits + scale[:, None] * rng.standard_normal(self.logits.shape))
        return self.score(lq)

    def score(self, lq: np.ndarray) -> dict[str, np.ndarray]:
        lp, at = self.lp, np.arange(len(self.lp))
        p, q = np.exp(lp), np.exp(lq)
        zeros = np.zeros(len(lp))
        five = zip(np.argsort(-lp)[:, :5], np.argsort(-lq)[:, :5], strict=True)
        columns = {
            "kl": (p * (lp - lq)).sum(1),
            "kl_reverse": (q * (lq - lp)).sum(1),
            "nll_teacher": -lp[at, self.targets],
            "nll_candidate": -lq[at, self.targets],
            "entropy_teacher": -(p * lp).sum(1),
            "entropy_candidate": -(q * lq).sum(1),
            "top1_teacher": lp.argmax(1),
            "top1_candidate": lq.argmax(1),
            "agree": lp.argmax(1) == lq.argmax(1),
            "agree_lowest_id": lp.argmax(1) == lq.argmax(1),
            "tied_teacher": zeros,
            "tied_candidate": zeros,
            "p_top1_teacher": p.max(1),
            "nonfinite_teacher": zeros,
            "nonfinite_candidate": zeros,
            "tv": np.abs(p - q).sum(1) / 2,
            "top5_overlap": np.array([len(set(a) & set(b)) for a, b in five]),
            "rank": 1 + (lq > lq[at, lp.argmax(1)][:, None]).sum(1),
            "outside_teacher": zeros,
            "outside_candidate": zeros,
        }
        return {name: np.asarray(columns[name]).astype(dtype) for name, dtype in SCORE_DTYPES.items()}

    def run(self, folder: Path, name: str, columns: dict[str, np.ndarray], **change: Any) -> Path:
        """Write a run folder; ``change`` replaces fields of the measurement, ``rows`` keeps only some rows."""
        kept = change.pop("rows", list(range(self.rows)))
        mask = np.isin(self.row_N, kept)
        table = {"row": self.row_N, "position": self.position_N, "target": self.targets} | columns
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / "positions.parquet", pa.table({k: v[mask] for k, v in table.items()}))
        digest = file_digest(folder / "positions.parquet")
        measurement = self.measurement(name, columns, kept, digest)
        save_measurement(folder, measurement.model_copy(update=change))
        return folder

    def measurement(self, name: str, columns: dict[str, np.ndarray], kept: list[int], digest: str) -> Measurement:
        finite = np.isfinite(columns["kl"])
        return Measurement(
            key=json_digest([name, digest, self.registration and self.registration["sha256"]]),
            name=name,
            status="complete" if len(kept) == self.rows else "partial",
            estimator="exact",
            lane="weights",
            rows_measured=len(kept),
            rows_planned=self.rows,
            positions=len(kept) * self.length,
            panel=PanelIdentity(
                name="fake",
                sha256=self.panel_sha256,
                recipe_sha256="r" * 64,
                tokenizer_sha256=self.tokenizer_sha256,
                unit=self.unit,  # type: ignore[arg-type]
                rows=self.rows,
                positions=self.rows * self.length,
                registration_sha256=self.registration["sha256"] if self.registration else None,
            ),
            teacher=side("teacher", **({"capture_sha256": json_digest(kept)} | self.teacher)),
            candidate=side(name, bytes=1_000_000, bits_per_weight=3.0),
            scoring={"head_policy": "own head on each side", "support": VOCAB, "heads_equal": name == "A"},
            summary={
                "kl_mean": float(columns["kl"].mean()),
                "top1_agreement": float(columns["agree"].mean()),
                "nll_candidate": float(columns["nll_candidate"].mean()),
                "ppl_token_candidate": float(np.exp(columns["nll_candidate"].mean())),
            },
            intervals={},
            per_row=[self.row(r, columns) for r in kept],
            counts={"nonfinite_positions": int((~finite).sum())},
            preflight=[],
            environment={"numpy": "2"},
            positions_sha256=digest,
            registration=self.registration,
        )

    def row(self, row: int, columns: dict[str, np.ndarray]) -> RowSummary:
        at = self.row_N == row
        return RowSummary(
            row=row,
            document=f"doc {row % (self.documents or self.rows)}",
            domain=self.domains[row % len(self.domains)],
            positions=self.length,
            kl_mean=float(columns["kl"][at].mean()),
            kl_max=float(columns["kl"][at].max()),
            nll_teacher_mean=float(columns["nll_teacher"][at].mean()),
            nll_candidate_mean=float(columns["nll_candidate"][at].mean()),
            top1_agreement=float(columns["agree"][at].mean()),
            nonfinite=int((~np.isfinite(columns["kl"][at])).sum()),
        )


def side(model: str, **extra: Any) -> SideIdentity:
    return SideIdentity(
        **(
            {
                "engine": "fake",
                "version": "1",
                "model": model,
                "revision": "main",
                "weights_sha256": json_digest(model),
                "head_sha256": "h" * 64,
                "tokenizer_sha256": "e" * 64,
                "weights_dtype": "bfloat16",
                "compute_dtype": "float32",
                "lane": "weights",
                "device": "cpu",
            }
            | extra
        )
    )


def started(folder: Path, when: str) -> None:
    (folder / "run.json").write_text(json.dumps({"started": when}))
