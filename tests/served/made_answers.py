"""A captured teacher, a candidate whose whole distribution is known, and what a server would say of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from harness.capture import Capture, CaptureWriter, open_capture
from harness.scoring import score_hidden
from harness.served.known_ids import AskedIds
from harness.served.score import score_served
from harness.served.seam import ServedRow
from harness.types import Hidden, Logits, Panel, Row, Scores
from tests.capture.made_captures import make_head, make_identity, make_panel

V, T = 700, 81


@dataclass(frozen=True)
class Served:
    """A captured teacher, and a candidate whose whole distribution the test knows."""

    capture: Capture
    panel: Panel
    exact: dict[int, Scores]
    lq: dict[int, np.ndarray]

    def answer(self, row: Row, k: int, asked: AskedIds | None = None, **changes: object) -> ServedRow:
        """What a server says of a row: fp32 log-probabilities, its own top k best first."""
        lq = self.lq[row.index]
        ids = np.argsort(-lq, axis=1, kind="stable")[:, :k].astype(np.int32)
        at = np.arange(len(lq))[:, None]
        fields: dict[str, object] = {
            "index": row.index,
            "echoed_ids_T": row.ids_T,
            "target_logprob_T": lq[at[:, 0], row.ids_T[1:]],
            "ids_TK": ids,
            "logprobs_TK": lq[at, ids],
            "asked_TM": None if asked is None else np.where(asked.ids_TM >= 0, lq[at, asked.ids_TM], np.nan),
            "cached_tokens": 0,
            "wire_bytes": 1,
            "seconds": 0.1,
        }
        return ServedRow(**{**fields, **changes})

    def score(self, index: int, k: int, **changes: object) -> tuple[Scores, dict[str, np.ndarray]]:
        row = self.panel.rows[index]
        return score_served(self.capture, self.capture.row(index), row, self.answer(row, k, **changes), None, None)


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), -1).float().numpy().astype(np.float64)


def states(seed: int) -> torch.Tensor:
    """Hidden states between a flat and a nearly certain distribution."""
    scale = torch.linspace(0.05, 1.2, T)[:, None]
    return torch.randn(T, 48, generator=torch.Generator().manual_seed(seed)) * scale


def made(folder: Path, form: str = "hidden", noise: float = 0.05, rows: int = 3) -> Served:
    head, panel = make_head(vocab=V), make_panel([T] * rows, vocab=V)
    identity = make_identity(head.sha256 if form == "hidden" else "")
    teacher = {i: states(i) for i in range(rows)}
    candidate = {i: h + noise * states(100 + i) for i, h in teacher.items()}
    weight = head.weight_VH.float().T
    with CaptureWriter(folder, identity, panel, head if form == "hidden" else None, form, torch.float32) as writer:
        for row in panel.rows:
            logits = teacher[row.index] @ weight
            hidden = Hidden(states_TH=teacher[row.index])
            writer.write_row(row, hidden if form == "hidden" else Logits(logits_TV=logits))
        writer.finish()
    capture = open_capture(folder)
    exact = {
        i: score_hidden(
            teacher[i][:-1], h[:-1], panel.rows[i].ids_T[1:], teacher_head=head, candidate_head=head, second_pass=True
        )
        for i, h in candidate.items()
    }
    return Served(capture, panel, exact, {i: log_softmax(h[:-1] @ weight) for i, h in candidate.items()})
