"""One run folder against its own positions.parquet, its registration and the panel's seal.

`Outcome` says what was checked and holds, what differs, and what could not be checked here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.digest import file_digest
from harness.errors import PanelError
from harness.measure import summary
from harness.measure.quantities import interval_of
from harness.measure.receipt import Measurement, load_measurement
from harness.measure.result import Extras, intervals, panel_units, standing_of, text_extras
from harness.measure.text_size import BYTES, WORDS, TextSize
from harness.panel import load_panel
from harness.records import broken_seal
from harness.registration import Registration
from harness.report.plots import pictures_of
from harness.report.run_report import report_text, started
from harness.report.tables import load_positions
from harness.served.score import EXTRA_DTYPES, receipt_extras
from harness.stats import Totals
from harness.store import plain
from harness.types import SCORE_DTYPES, Panel, Row, Scores

#: Sums are taken in another order on another machine.
RELATIVE = 1e-9
NOT_HERE = "not in this receipt"
#: Published row means may be rounded.
ROUNDED = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as stated."""

    where: str
    stated: str
    found: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was checked and holds, what differs, and what could not be checked here."""

    name: str
    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    unchecked_numbers: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and every number of quality that is stated was computed again."""
        return not self.findings and not self.unchecked_numbers

    @property
    def verdict(self) -> str:
        """The last word, which says no more than what was checked."""
        if self.findings:
            return f"{len(self.findings)} things differ"
        if self.unchecked_numbers:
            return f"nothing differs in what was checked, and numbers were NOT CHECKED: {self.unchecked_numbers[0]}"
        left = f"; {len(self.unchecked)} things were not checked" if self.unchecked else ""
        return f"{len(self.checked)} things checked, all hold{left}"

    def compare(self, what: str, stated: Any, found: Any, *, relative: float = RELATIVE) -> None:
        """Check one block; every value that differs is a finding of its own."""
        before = len(self.findings)
        self.findings += differences(plain(stated), plain(found), what, relative)
        if len(self.findings) == before:
            self.checked.append(what)

    def join(self, other: Outcome) -> None:
        """Take over what another outcome says, under its name."""
        self.checked += [f"{other.name}: {line}" for line in other.checked]
        self.unchecked += [f"{other.name}: {line}" for line in other.unchecked]
        self.unchecked_numbers += [f"{other.name}: {line}" for line in other.unchecked_numbers]
        self.findings += [
            Finding(where=f"{other.name}: {f.where}", stated=f.stated, found=f.found) for f in other.findings
        ]


def differences(stated: Any, found: Any, where: str, relative: float = RELATIVE) -> list[Finding]:
    """Where two JSON values differ; numbers within ``relative`` of each other are equal."""
    if isinstance(stated, dict) and isinstance(found, dict):
        keys = [*stated, *(key for key in found if key not in stated)]
        missing = NOT_HERE
        pairs = ((f"{where}.{key}", stated.get(key, missing), found.get(key, missing)) for key in keys)
        return [finding for place, a, b in pairs for finding in differences(a, b, place, relative)]
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        return [
            finding
            for index, (a, b) in enumerate(zip(stated, found, strict=True))
            for finding in differences(a, b, f"{where}[{index}]", relative)
        ]
    if _same(stated, found, relative):
        return []
    return [Finding(where=where, stated=str(stated), found=str(found))]


def _same(stated: Any, found: Any, relative: float) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (stated, found))
    if numbers and float in (type(stated), type(found)):
        return math.isclose(stated, found, rel_tol=relative, abs_tol=relative * 1e-3)
    return bool(stated == found) and isinstance(stated, bool) == isinstance(found, bool)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome for scripts."""
    return {
        "name": outcome.name,
        "ok": outcome.ok,
        "checked": outcome.checked,
        "findings": [asdict(finding) for finding in outcome.findings],
        "unchecked": outcome.unchecked,
        "unchecked_numbers": outcome.unchecked_numbers,
        "verdict": outcome.verdict,
    }


# ---- a run folder ----------------------------------------------------------------------------------------------------


def verify_run(folder: Path, *, panel: Path | None = None) -> Outcome:
    """Check a run folder; with ``panel`` also that its positions are those of the sealed panel."""
    measurement = load_measurement(folder, checked=False)
    outcome = Outcome(name=measurement.name)
    verify_seal(outcome, folder / "measurement.json")
    told = len(outcome.findings)
    _verify_registration(outcome, measurement)
    if measurement.row_level_only:
        _verify_row_means(outcome, measurement)
        outcome.unchecked_numbers.append("quantiles and maximum: the receipt has row means only, no positions")
        return outcome
    stated = file_digest(folder / "positions.parquet") if (folder / "positions.parquet").is_file() else NOT_HERE
    outcome.compare("positions_sha256", measurement.positions_sha256, stated)
    frame = load_positions(folder)
    _verify_columns(outcome, measurement, frame)
    if len(outcome.findings) == told:
        _verify_numbers(outcome, measurement, frame)
        _verify_report(outcome, folder, measurement, frame)
    _verify_panel(outcome, measurement, frame, panel)
    if _text_size(measurement) is not None:
        outcome.unchecked.append("bytes and words of the text: counting them again needs the tokenizer")
    outcome.unchecked.append("that the weights give these positions: that needs the weights (measure again)")
    outcome.unchecked.append(f"stated, and not checked here: {', '.join(stated_only(measurement, panel=panel))}")
    return outcome


#: Blocks and leaves of a receipt that are computed again, or held against what they were made from.
CHECKED = (
    "seal", "summary", "counts", "per_row", "intervals", "status", "positions", "rows_measured", "positions_sha256",
    "registration.sha256", "panel.registration_sha256", "panel.positions",
)  # fmt: skip


def stated_only(m: Measurement, *, panel: Path | None = None) -> list[str]:
    """Every leaf of a receipt that nothing here was held against, by its place: ``candidate.bytes``."""
    checked = (*CHECKED, "panel.sha256") if panel else CHECKED
    return [leaf for leaf in _leaves(m.model_dump()) if not any(f"{leaf}.".startswith(f"{part}.") for part in checked)]


def _leaves(value: Any, place: str = "") -> Iterator[str]:
    """Places of all values of a JSON document; a list is one place."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{place}.{key}" if place else str(key))
    elif value not in (None, [], {}, ""):
        yield place


def verify_seal(outcome: Outcome, file: Path) -> None:
    """Whether a record is as it was written; that says nothing of who wrote it."""
    if broken := broken_seal(file):
        outcome.findings.append(Finding(where=f"seal of {file.name}", stated="holds", found=broken))
    else:
        outcome.checked.append(f"seal of {file.name}: unchanged since it was written (no signature: not by whom)")


def _verify_registration(outcome: Outcome, m: Measurement) -> None:
    if m.registration is None:
        return
    content = Registration.model_validate(m.registration["content"])
    outcome.compare("registration.sha256", m.registration["sha256"], content.sha256)
    outcome.compare("panel.registration_sha256", m.panel.registration_sha256, content.sha256)
    if "status" in m.registration:
        outcome.compare("registration.status", m.registration["status"], standing_of(m).status)


def _verify_columns(outcome: Outcome, m: Measurement, frame: pd.DataFrame) -> None:
    """Types, order and completeness of positions.parquet, and that its columns do not contradict each other."""
    dtypes = {name: str(frame[name].dtype) for name in SCORE_DTYPES}
    outcome.compare("column types", dict(SCORE_DTYPES), dtypes)
    lengths = dict(
        zip(*(part.tolist() for part in np.unique(frame["row"].to_numpy(), return_counts=True)), strict=True)
    )
    outcome.compare("rows and their positions", {r.row: r.positions for r in m.per_row}, lengths)
    outcome.compare("rows_measured", m.rows_measured, len(lengths))
    outcome.compare("positions", m.positions, len(frame))
    counted = frame.groupby("row").cumcount().to_numpy()
    outcome.compare("positions in order", 0, int((counted != frame["position"].to_numpy()).sum()))
    if m.rows_measured == m.rows_planned:
        outcome.compare("panel.positions", m.panel.positions, len(frame))
    for what, bad in _contradictions(frame, exact=m.estimator == "exact"):
        outcome.compare(f"positions where {what}", 0, bad)


def _contradictions(frame: pd.DataFrame, *, exact: bool) -> Iterator[tuple[str, int]]:
    """Laws that hold at every position, whatever the models are; NaN breaks none of them."""
    kl, tv = frame["kl"].to_numpy(), frame["tv"].to_numpy()
    yield "KL is below what rounding explains", int((kl < -summary.NEGATIVE_ROUNDING).sum())
    if exact:
        yield "KL is below 2 TV^2", int((kl < 2 * tv**2 - 1e-5).sum())
    same = frame["top1_teacher"].to_numpy() == frame["top1_candidate"].to_numpy()
    finite = np.isfinite(kl)
    yield "agree_lowest_id is not that of the ids", int((frame["agree_lowest_id"].to_numpy() != same)[finite].sum())
    both = frame["agree_lowest_id"].to_numpy() & ~frame["agree"].to_numpy()
    yield "agree is narrower than agree_lowest_id", int(both[finite].sum())
    p = frame["p_top1_teacher"].to_numpy()
    yield "a probability is not in [0, 1]", int(((p < 0) | (p > 1 + 1e-6)).sum())
    yield "an NLL is negative", int(((frame["nll_teacher"] < -1e-6) | (frame["nll_candidate"] < -1e-6)).sum())


def _verify_numbers(outcome: Outcome, m: Measurement, frame: pd.DataFrame) -> None:
    """Summary, counts, rows, intervals and status, all computed again."""
    again = numbers_again(m, frame)
    outcome.compare("summary", {key: m.summary.get(key, NOT_HERE) for key in again["summary"]}, again["summary"])
    stated = m.model_dump(include={"counts", "per_row", "intervals", "status"})
    for what, value in stated.items():
        outcome.compare(what, value, again[what])


def numbers_again(m: Measurement, frame: pd.DataFrame) -> dict[str, Any]:
    """All numbers of a receipt from its positions: summary, counts, rows, intervals and status, as JSON has them."""
    scores = Scores(**{name: frame[name].to_numpy() for name in SCORE_DTYPES})
    row_N = frame["row"].to_numpy()
    panel = _panel_of(m)
    more = receipt_extras(frame, panel) if set(EXTRA_DTYPES) <= set(frame.columns) else Extras()
    more = text_extras(scores, _text_size(m), more)
    position_N, unit_N = frame["position"].to_numpy(), panel_units(panel, row_N)
    given = intervals(scores, row_N, panel) | dict(more.intervals)
    rows = [summary.row_summary(panel, r.row, _only(scores, row_N == r.row)) for r in m.per_row]
    return {
        "summary": summary.summarise(scores, row_N, position_N, unit_N) | dict(more.summary),
        "counts": summary.counts(scores) | dict(more.counts),
        "per_row": [row.model_dump() for row in rows],
        "intervals": {name: interval.model_dump() for name, interval in given.items()},
        "status": _status(scores, m),
    }


def _text_size(m: Measurement) -> TextSize | None:
    """As the receipt states it: counting again needs the tokenizer."""
    if not {BYTES, WORDS} <= set(m.counts):
        return None
    return TextSize(bytes=m.counts[BYTES], words=m.counts[WORDS])


def _status(scores: Scores, m: Measurement) -> str:
    if np.isnan(scores.kl).any() or np.isneginf(scores.kl).any():
        return "invalid"
    return "complete" if m.rows_measured == m.rows_planned == m.panel.rows else "partial"


def _only(scores: Scores, mask: np.ndarray) -> Scores:
    return Scores(**{name: getattr(scores, name)[mask] for name in SCORE_DTYPES})


def _panel_of(m: Measurement) -> Panel:
    """Documents and domains as the receipt names them, at the index of each row; rows not measured are blank."""
    known = {r.row: r for r in m.per_row}
    empty = np.zeros(0, dtype=np.int32)
    rows = []
    for index in range(max(known) + 1):
        named = known.get(index)
        document, domain = (named.document, named.domain) if named else ("", "")
        rows.append(Row(index=index, ids_T=empty, document=document, domain=domain, sha256=""))
    p = m.panel
    return Panel(
        name=p.name,
        rows=tuple(rows),
        sha256=p.sha256,
        recipe_sha256=p.recipe_sha256,
        tokenizer_sha256=p.tokenizer_sha256,
        tokenizer_name="",
        unit=p.unit,
    )


def _verify_report(outcome: Outcome, folder: Path, m: Measurement, frame: pd.DataFrame) -> None:
    """report.md beside the receipt says what the receipt says."""
    file = folder / "report.md"
    if not file.is_file():
        return
    fresh = report_text(m, frame, pictures_of(), started=started(folder)).splitlines()
    lines = file.read_text(encoding="utf-8").splitlines()
    if len(lines) != len(fresh):
        outcome.findings.append(Finding(where="report.md", stated=f"{len(lines)} lines", found=f"{len(fresh)} lines"))
        return
    outcome.compare("report.md, line by line", lines, fresh)


def _verify_panel(outcome: Outcome, m: Measurement, frame: pd.DataFrame, folder: Path | None) -> None:
    """The scored tokens are the sealed panel's own."""
    if folder is None:
        outcome.unchecked.append("that these are the panel's tokens: name the panel's folder with --panel")
        return
    try:
        panel = load_panel(folder, tokenizer=m.panel.tokenizer_sha256 or None)
    except PanelError as error:
        outcome.findings.append(Finding(where="panel", stated=m.panel.name, found=error.what))
        return
    outcome.compare("panel.sha256", m.panel.sha256, panel.sha256)
    outcome.compare("panel.recipe_sha256", m.panel.recipe_sha256, panel.recipe_sha256)
    if m.panel.seal_sha256:
        outcome.compare("panel.seal_sha256", m.panel.seal_sha256, panel.seal_sha256)
    outcome.compare("panel.rows", m.panel.rows, len(panel.rows))
    if panel.sha256 != m.panel.sha256:
        return
    row_N, target_N = frame["row"].to_numpy(), frame["target"].to_numpy()
    for row in np.unique(row_N).tolist():
        if not np.array_equal(target_N[row_N == row], panel.rows[row].ids_T[1:]):
            outcome.findings.append(Finding(where=f"row {row}", stated="the panel's tokens", found="other tokens"))
    named = {r.row: (r.document, r.domain) for r in m.per_row}
    sealed_names = {row: (panel.rows[row].document, panel.rows[row].domain) for row in named}
    outcome.compare("documents and domains of the rows", named, sealed_names)


def _given(value: float | None) -> float:
    """A row's number for arithmetic; NaN where the receipt withholds it, so that no sum hides it."""
    return math.nan if value is None else value


# ---- a receipt of row means ------------------------------------------------------------------------------------------


def _verify_row_means(outcome: Outcome, m: Measurement) -> None:
    """Means, perplexities and intervals of a published receipt, from its rows."""
    counts = np.array([r.positions for r in m.per_row], dtype=np.float64)
    sums = {
        "kl_mean": counts * [r.kl_mean for r in m.per_row],
        "nll_teacher": counts * [r.nll_teacher_mean for r in m.per_row],
        "nll_candidate": counts * [r.nll_candidate_mean for r in m.per_row],
        "top1_agreement": counts * [_given(r.top1_agreement) for r in m.per_row],
    }
    means = {name: float(total.sum() / counts.sum()) for name, total in sums.items()}
    means["ppl_token_candidate"] = math.exp(means["nll_candidate"])
    means["ppl_token_teacher"] = math.exp(means["nll_teacher"])
    outcome.compare("summary", {name: m.summary.get(name) for name in means}, means, relative=ROUNDED)
    outcome.compare("positions", m.positions, int(counts.sum()))
    difference = sums["nll_candidate"] - sums["nll_teacher"]
    totals = {"kl_mean": sums["kl_mean"], "top1_agreement": sums["top1_agreement"], "nll_difference": difference}
    found = {name: interval_of(name, Totals(total, counts), unit="row") for name, total in totals.items()}
    stated = {name: interval.model_dump() for name, interval in m.intervals.items()}
    outcome.compare("intervals", stated, {name: e.bounds() for name, e in found.items()})
