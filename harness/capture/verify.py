"""Proof that a capture is whole: every digest again, and decoding it gives back the stored NLL and top-1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.capture.inventory import entry_of
from harness.capture.reader import Capture, CapturedRow
from harness.digest import ids_digest
from harness.errors import CaptureError
from harness.progress import phase
from harness.scoring import teacher_stats
from harness.types import Check, Head, Hidden, Logits, Panel

#: fp32 products in another order move an NLL by a few 1e-6; more than this is another number.
NLL_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """How far decoding a row is from what is stored with it."""

    max_nll_change: float
    top1_changes: int


def verify_capture(capture: Capture, panel: Panel | None = None) -> list[Check]:
    """Check every file and number of a capture; one line a check, none is skipped after a failure.

    Args:
        panel: when given, also that the rows are this panel's.
    """
    have, planned = capture.manifest.rows_present, capture.manifest.rows_planned
    note = "" if have == planned else f"{capture.label}: run `fidelity teacher capture` again for the rest"
    checks = [
        Check(name="rows", passed=have == planned, figure=f"{have}/{planned}", note=note),
        _held("head", lambda: _head_figure(capture)),
    ]
    if panel is not None:
        checks.append(_held("panel", lambda: _panel_figure(capture, panel)))
    failures, decoded = _rows(capture)
    checks.append(_count("digests", have, failures))
    return [*checks, *_decoding(decoded)]


def _rows(capture: Capture) -> tuple[list[str], list[Decoded]]:
    """Refusals of the row files, and how the others decode."""
    failures, decoded = [], []
    with phase("verify", total=capture.manifest.rows_present, unit="positions") as advance:
        for entry in capture.manifest.rows:
            try:
                capture.check_file(entry)
                fresh, _ = entry_of(capture.folder / entry.file)
                if fresh != entry:
                    raise CaptureError(f"{entry.file} and the manifest disagree", f"delete {entry.file}, capture again")
                decoded.append(decode(capture.row(entry.row), capture.head))
            except CaptureError as error:
                failures.append(f"{error.what}; {error.repair}")
            advance(1, entry.positions)
    return failures, decoded


def decode(row: CapturedRow, head: Head | None) -> Decoded:
    """Score a row again from its captured array and hold it against the stored NLL and top-1.

    A top-1 that differs counts unless the stored one is still within `NLL_TOLERANCE` of the largest: a near tie that
    another order of additions decides otherwise.
    """
    match row.outputs:
        case Hidden(states_TH=matrix):
            pass
        case Logits(logits_TV=matrix):
            pass
    fresh = teacher_stats(matrix, row.target, head)
    moved = np.flatnonzero(fresh.top1 != row.top1)
    if len(moved):
        stored = teacher_stats(matrix[moved], row.top1[moved], head)
        moved = moved[~(stored.nll + np.log(stored.p_top1) <= NLL_TOLERANCE)]
    return Decoded(max_nll_change=_max(np.abs(fresh.nll - row.nll)), top1_changes=len(moved))


def _max(values: np.ndarray) -> float:
    return float(values.max()) if len(values) else 0.0


def _decoding(decoded: list[Decoded]) -> list[Check]:
    largest = max((row.max_nll_change for row in decoded), default=float("nan"))
    flips = sum(row.top1_changes for row in decoded)
    return [
        Check(name="stored NLL", passed=largest <= NLL_TOLERANCE, figure=f"max |dNLL| {largest:.2g} nats"),
        Check(name="stored top-1", passed=bool(decoded) and flips == 0, figure=f"{flips} differ"),
    ]


def _head_figure(capture: Capture) -> str:
    head = capture.head
    return "none (not separable)" if head is None else head.sha256[:12]


def _panel_figure(capture: Capture, panel: Panel) -> str:
    capture.require_panel(panel)
    ids = {row.index: ids_digest(row.ids_T) for row in panel.rows}
    for entry in capture.manifest.rows:
        if ids.get(entry.row) != entry.ids_sha256:
            raise CaptureError(f"{entry.file} holds other token ids than the panel", f"delete {entry.file}")
    return panel.sha256[:12]


def _held(name: str, figure: Callable[[], str]) -> Check:
    try:
        return Check(name=name, passed=True, figure=figure())
    except CaptureError as error:
        return Check(name=name, passed=False, figure="refused", note=f"{error.what}; {error.repair}")


def _count(name: str, total: int, failures: list[str]) -> Check:
    figure = f"{total - len(failures)}/{total} row files"
    return Check(name=name, passed=not failures, figure=figure, note="\n".join(failures))
