"""Rows, distributions and receipts made of small numbers, through the harness's own store, scorer and receipt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file

from harness.capture import Capture, CaptureWriter, open_capture
from harness.digest import head_digest, ids_digest
from harness.engines.models import ModelFolder
from harness.environment import source_digest
from harness.measure.receipt import Measurement
from harness.measure.result import build_measurement, exact_scoring
from harness.measure.rows import join_rows, score_row, write_row
from harness.measure.teacher import Yardstick
from harness.panel.seal import Lock, LockCounts, LockRow, LockTokenizer, panel_digest, write_seal
from harness.types import EngineIdentity, Head, Hidden, Logits, Outputs, Panel, Row, RowOutputs, Scores, Want

KEY = "k" * 64


def logits(*distributions: Sequence[float]) -> torch.Tensor:
    """float32 log-probabilities ``[T, V]``; a probability of 0 is -inf."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(distributions, dtype=np.float64)).astype(np.float32))


def row(ids: Sequence[int], index: int = 0, document: str = "") -> Row:
    ids_T = np.array(ids, dtype=np.int32)
    name = document or f"d{index}"
    return Row(index=index, ids_T=ids_T, document=name, domain="test", sha256=ids_digest(ids_T))


def panel(rows: Sequence[Row]) -> Panel:
    return Panel(
        name="made",
        rows=tuple(rows),
        sha256=panel_digest([r.sha256 for r in rows]),
        recipe_sha256="r" * 64,
        tokenizer_sha256="t" * 64,
        tokenizer_name="t",
    )


def head(weight_VH: torch.Tensor, vocab_size: int | None = None) -> Head:
    vocab = vocab_size or len(weight_VH)
    return Head(weight_VH=weight_VH, vocab_size=vocab, sha256=head_digest(weight_VH, vocab_size=vocab))


def passing_head(columns: int, vocab_size: int) -> Head:
    """A head that gives its input back as logits; columns from ``vocab_size`` on are padding."""
    return head(torch.eye(columns), vocab_size)


def identity(head_sha256: str, **change: object) -> EngineIdentity:
    known: dict[str, object] = {
        "engine": "made",
        "version": "1",
        "model": "org/made",
        "revision": "main",
        "weights_sha256": "w" * 64,
        "head_sha256": head_sha256,
        "tokenizer_sha256": "t" * 64,
        "weights_dtype": "bfloat16",
        "compute_dtype": "float32",
        "lane": "weights",
        "device": "cpu",
    }
    return EngineIdentity(**(known | change))  # type: ignore[arg-type]


def capture(folder: Path, rows: Sequence[Row], outputs: Sequence[torch.Tensor], teacher_head: Head | None) -> Capture:
    """A stored teacher: logits, or hidden states where it has a head."""
    form, kind = ("logits", Logits) if teacher_head is None else ("hidden", Hidden)
    name = "logits_TV" if teacher_head is None else "states_TH"
    sha256 = "none" if teacher_head is None else teacher_head.sha256
    with CaptureWriter(folder, identity(sha256), panel(rows), teacher_head, form, "float32") as writer:  # type: ignore[arg-type]
        for one, values in zip(rows, outputs, strict=True):
            writer.write_row(one, kind(**{name: values}))
        writer.finish()
    return open_capture(folder)


class Replay:
    """An engine that gives what it was given, for whatever rows."""

    def __init__(self, outputs: Outputs, its_head: Head | None = None) -> None:
        self._outputs, self.head = outputs, its_head
        self.identity = identity(its_head.sha256 if its_head else "none")

    def run(self, rows: Sequence[Row], want: Want = "logits") -> Iterator[RowOutputs]:
        for one in rows:
            yield RowOutputs(index=one.index, echoed_ids_T=one.ids_T, outputs=self._outputs)


def receipt(
    folder: Path,
    rows: Sequence[Row],
    teacher: Sequence[torch.Tensor],
    candidate: Sequence[torch.Tensor],
    *,
    teacher_head: Head | None = None,
    candidate_head: Head | None = None,
    change: Callable[[Scores], Scores] = lambda scores: scores,
    source_at_end: Callable[[], str] = source_digest,
) -> Measurement:
    """A run folder ``folder / "run"`` as `fidelity measure` makes it; matrices have an entry for the last token too.

    Args:
        change: may damage the scores on their way, as a broken kernel would.
        source_at_end: what the harness finds its own source to be when the run ends (files may be edited while
            tests run, which is no fault of theirs).
    """
    stored, whole, run = capture(folder / "capture", rows, teacher, teacher_head), panel(rows), folder / "run"
    for one, values in zip(rows, candidate, strict=True):
        outputs = Logits(logits_TV=values) if candidate_head is None else Hidden(states_TH=values)
        scores = score_row(stored, stored.row(one.index), outputs, candidate_head, one)
        write_row(run / "rows", KEY, one, change(scores))
    engine = SimpleNamespace(
        head=candidate_head, identity=identity(candidate_head.sha256 if candidate_head else "none", model="org/quant")
    )
    with mock.patch("harness.measure.result.current_source_digest", source_at_end):
        return build_measurement(
            run,
            join_rows(run, whole, rows, KEY),
            yardstick=Yardstick(folder=sealed(folder / "panel", whole), panel=whole, rows=rows, teacher=stored),
            capture=stored,
            identity=engine.identity,
            scoring=exact_scoring(stored, engine),  # type: ignore[arg-type]
            key=KEY,
            checks=[],
            name="quant",
            candidate=checkpoint(folder / "quant"),
        )


def checkpoint(folder: Path) -> ModelFolder:
    """The smallest folder that a census can count."""
    folder.mkdir()
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return ModelFolder(path=folder, name="quant", revision="local")


def sealed(folder: Path, made: Panel) -> Path:
    """A panel's folder with its seal."""
    rows = [
        LockRow(row=r.index, document=r.document, domain=r.domain, source=0, start=0, sha256=r.sha256)
        for r in made.rows
    ]
    counts = LockCounts(rows=len(rows), positions=made.positions, documents=len(rows), read=0, short=0, domains={})
    tokenizer = LockTokenizer(name="t", sha256="t" * 64, vocabulary=9, bos_token_id=None, add_bos=False)
    lock = Lock(
        name=made.name,
        sha256=made.sha256,
        recipe_sha256=made.recipe_sha256,
        unit="document",
        length=len(made.rows[0].ids_T),
        bos="never",
        tokenizer=tokenizer,
        counts=counts,
        largest_overlap=0.0,
        sources=[],
        rows=rows,
    )
    write_seal(folder, lock, made.rows)
    return folder
