"""A small honest fake: two real distributions over 48 tokens, scored in plain float64 numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from harness.digest import file_digest, json_digest
from harness.measure import summary
from harness.measure.receipt import Measurement, PanelIdentity, RowSummary, SideIdentity, save_measurement
from harness.measure.result import intervals, panel_units
from harness.store import write_table
from harness.types import SCORE_DTYPES, Check, Panel, Row, Scores

VOCAB = 48
DOMAINS = ("code", "dialogue", "maths", "prose")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def score(lp: np.ndarray, lq: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of positions.parquet for log-probabilities ``[T, V]`` of both sides."""
    p, q = np.exp(lp), np.exp(lq)
    at = np.arange(len(targets))
    top_p, top_q = lp.argmax(1), lq.argmax(1)
    five = [len(set(a) & set(b)) for a, b in zip(np.argsort(-lp)[:, :5], np.argsort(-lq)[:, :5], strict=True)]
    zeros = np.zeros(len(targets))
    same = top_p == top_q
    columns = {
        "kl": (p * (lp - lq)).sum(1),
        "kl_reverse": (q * (lq - lp)).sum(1),
        "nll_teacher": -lp[at, targets],
        "nll_candidate": -lq[at, targets],
        "entropy_teacher": -(p * lp).sum(1),
        "entropy_candidate": -(q * lq).sum(1),
        "top1_teacher": top_p,
        "top1_candidate": top_q,
        "agree": same,
        "agree_lowest_id": same,
        "tied_teacher": zeros,
        "tied_candidate": zeros,
        "p_top1_teacher": p.max(1),
        "nonfinite_teacher": zeros,
        "nonfinite_candidate": zeros,
        "tv": 0.5 * np.abs(p - q).sum(1),
        "top5_overlap": five,
        "rank": (lq > lq[at, top_p][:, None]).sum(1) + 1,
        "outside_teacher": zeros,
        "outside_candidate": zeros,
    }
    return {name: np.asarray(values).astype(SCORE_DTYPES[name]) for name, values in columns.items()}


def make_frame(rows: int = 16, length: int = 129, noise: float = 0.5, seed: int = 0, ramp: float = 0.0) -> pd.DataFrame:
    """Positions of ``rows`` rows; ``noise`` is the candidate's logit error, growing by ``ramp`` along the row."""
    random, parts = np.random.default_rng(seed), []
    for row in range(rows):
        peak = random.gamma(1.5, 2.0, (length - 1, 1))
        teacher = peak * random.normal(size=(length - 1, VOCAB))
        level = noise * (0.6 + 0.25 * (row % len(DOMAINS))) * (1 + ramp * np.arange(length - 1) / length)
        lp = log_softmax(teacher)
        lq = log_softmax(teacher + level[:, None] * random.normal(size=teacher.shape)) if noise else lp
        targets = np.array([random.choice(VOCAB, p=np.exp(line)) for line in lp])
        place = {"row": row, "position": np.arange(length - 1, dtype=np.int32), "target": targets.astype(np.int32)}
        parts.append(pd.DataFrame({**place, **score(lp, lq, targets)}))
    frame = pd.concat(parts, ignore_index=True)
    frame["row"] = frame["row"].astype(np.int32)
    return frame


def side(**changes: object) -> SideIdentity:
    fields = {
        "engine": "toy",
        "version": "1",
        "model": "org/teacher",
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "weights_sha256": "a" * 64,
        "head_sha256": "b" * 64,
        "tokenizer_sha256": "c" * 64,
        "weights_dtype": "bfloat16",
        "compute_dtype": "float32",
        "lane": "weights",
        "device": "cpu",
        "capture_sha256": "d" * 64,
    }
    return SideIdentity(**{**fields, **changes})


def one_each(row: int) -> str:
    """Every row is a document of its own."""
    return f"doc-{row:02d}"


def panel_of(frame: pd.DataFrame, name: str = "toy-panel", document_of: Callable[[int], str] = one_each) -> Panel:
    rows = [
        Row(
            index=int(row),
            ids_T=np.concatenate([[0], part["target"]]).astype(np.int32),
            document=document_of(int(row)),
            domain=DOMAINS[int(row) % len(DOMAINS)],
            sha256="0" * 64,
        )
        for row, part in frame.groupby("row")
    ]
    return Panel(
        name=name,
        rows=tuple(rows),
        sha256="1" * 64,
        recipe_sha256="2" * 64,
        tokenizer_sha256="c" * 64,
        tokenizer_name="toy",
    )


def row_summaries(frame: pd.DataFrame, panel: Panel) -> list[RowSummary]:
    out = []
    for row, part in frame.groupby("row"):
        scores = Scores(**{name: part[name].to_numpy() for name in SCORE_DTYPES})
        out.append(summary.row_summary(panel, int(row), scores))
    return out


def write_run(
    folder: Path, frame: pd.DataFrame, document_of: Callable[[int], str] = one_each, **changes: object
) -> Measurement:
    """A run folder with positions.parquet and measurement.json, as `fidelity measure` leaves one."""
    write_table(folder / "positions.parquet", pa.Table.from_pandas(frame, preserve_index=False))
    rows = frame["row"].nunique()
    scores = Scores(**{name: frame[name].to_numpy() for name in SCORE_DTYPES})
    row_N, panel = frame["row"].to_numpy(), panel_of(frame, document_of=document_of)
    found = intervals(scores, row_N, panel)
    fields: dict[str, object] = {
        "key": json_digest([changes.get("name"), file_digest(folder / "positions.parquet")]),
        "name": "toy-quant-3bpw",
        "status": "complete",
        "estimator": "exact",
        "lane": "weights",
        "rows_measured": rows,
        "rows_planned": rows,
        "positions": len(frame),
        "panel": PanelIdentity(
            name="toy-panel",
            sha256="1" * 64,
            recipe_sha256="2" * 64,
            tokenizer_sha256="c" * 64,
            unit="document",
            rows=int(str(changes.get("rows_planned", rows))),
            positions=len(frame),
        ),
        "teacher": side(),
        "candidate": side(
            model="org/quant-exl3",
            engine="exl3",
            weights_sha256="f" * 64,
            capture_sha256=None,
            bytes=61_200_000,
            bits_per_weight=3.27,
            settings={"codebook": "mcg", "head_bits": 6},
        ),
        "scoring": {"head": "own", "dtype": "float32 products, float64 sums", "seed": 1},
        "summary": summary.summarise(scores, row_N, frame["position"].to_numpy(), panel_units(panel, row_N)),
        "intervals": found,
        "per_row": row_summaries(frame, panel),
        "counts": summary.counts(scores),
        "preflight": [
            Check(name="ids echoed", passed=True, figure=f"{rows}/{rows} rows"),
            Check(name="NLL at shift 0 beats shift 1 and -1", passed=True, figure="1.21 < 4.30, 4.28"),
        ],
        "environment": {"python": "3.11", "torch": "2.13.0"},
        "positions_sha256": file_digest(folder / "positions.parquet"),
    }
    measurement = Measurement(**{**fields, **changes})
    save_measurement(folder, measurement)
    return measurement
