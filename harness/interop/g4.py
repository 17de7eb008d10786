"""Published G4 panel receipts (``glm53-g4-panel-served-v1``): row means of a served quant against a stored teacher.

They hold no positions, and their KL is a lower bound (teacher's top 256 as far as known in the served top 2,048, and
one bucket for the rest). Published values are kept digit for digit under ``summary["published"]``; the file's name
does not matter.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.digest import json_digest
from harness.errors import IncomparableError, UsageError
from harness.measure.quantities import interval_of
from harness.measure.receipt import Interval, Measurement, PanelIdentity, RowSummary, SideIdentity, save_measurement
from harness.stats import Totals
from harness.store import folder_lock, slug
from harness.types import Check

SCHEMA = "glm53-g4-panel-served-v1"
#: Published means may be rounded; more than this between summary and rows is another receipt's summary.
ROUNDING = 1e-7

NO_DOCUMENTS = "the receipt names no documents: each row counts as a unit of its own"
LOWER_BOUND = (
    "KL is a lower bound: the teacher's top {topk_teacher} tokens as far as they are in the served top "
    "{topk_candidate_requested}, and one bucket for the rest"
)


class Lenient(BaseModel):
    """Foreign files may say more than we read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class G4Panel(Lenient):
    positions_expected: int
    rows: int
    columns: int
    fixture_manifest_sha256: str
    token_rows_sha256: str
    teacher_manifest_sha256: str


class G4Teacher(Lenient):
    model: str
    revision: str
    native_head_shard_sha256: str
    source: str


class G4Row(Lenient):
    row: int
    positions: int = Field(ge=1)
    top1_agree: int
    kl_lb_mean: float
    cand_nll_mean: float
    teacher_nll_mean: float
    teacher_mass_covered_mean: float


class G4Coverage(Lenient):
    teacher_mass_in_known_set_mean: float
    topk_teacher: int
    topk_candidate_requested: int


class G4Summary(Lenient):
    positions: int
    top1_agreement: float
    top1_agree_count: int
    kl_lower_bound_mean: float
    kl_lower_bound_p50: float
    kl_lower_bound_p95: float
    kl_lower_bound_p99: float
    kl_lower_bound_max: float
    candidate_ppl: float
    candidate_nll_mean: float
    teacher_ppl_recomputed: float
    coverage: G4Coverage


class G4Reproduction(Lenient):
    top1_exact_all_rows: bool
    max_nll_sum_abs_delta: float
    ok: bool


class G4Receipt(Lenient):
    status: str
    point: str
    panel: G4Panel
    teacher: G4Teacher
    method: dict[str, str]
    summary: G4Summary
    per_row: list[G4Row] = Field(min_length=1)
    teacher_reproduction: G4Reproduction


def import_g4(file: Path, *, name: str | None = None) -> Measurement:
    """Read one receipt.

    Args:
        file: the receipt.
        name: what to call the candidate; else the beginning of the receipt's ``point``.

    Raises:
        UsageError: the file is not such a receipt.
        IncomparableError: its summary does not follow from its rows.
    """
    raw = _read(file)
    try:
        receipt = G4Receipt.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file.name}: {where}: {first['msg']}", "give the receipt as it was published") from error
    _check(file.name, receipt)
    return _measurement(receipt, raw, name or short_name(receipt.point))


def import_files(files: list[Path], out: Path, names: list[str]) -> list[Path]:
    """Import several receipts into run folders under ``out``; returns the folders in order."""
    if names and len(names) != len(files):
        raise UsageError(f"{len(names)} names for {len(files)} files", "give --name once for each file, in order")
    wanted: list[str | None] = [*names] or [None] * len(files)
    measurements = [import_g4(file, name=name) for file, name in zip(files, wanted, strict=True)]
    folders = [out / slug(m.name) for m in measurements]
    twice = {folder.name for folder in folders if folders.count(folder) > 1}
    if twice:
        raise UsageError(f"two receipts are called {sorted(twice)[0]}", "tell them apart with --name")
    for folder, measurement in zip(folders, measurements, strict=True):
        with folder_lock(folder):
            save_measurement(folder, measurement)
    return folders


def short_name(point: str) -> str:
    """The receipt's own short name: ``reference point NAME``, or what stands before the first colon or comma."""
    named = re.search(r"reference point ([\w.-]+)", point)
    return named.group(1) if named else re.split(r"[:,]", point)[0].strip()


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file.name} cannot be read: {error.strerror}", "name an existing receipt") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file.name} is not JSON: {error}", "fetch the receipt again") from error
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{file.name} has schema {schema}, not {SCHEMA}", "give the panel receipt, not its summary")
    return dict(raw)


def _check(name: str, receipt: G4Receipt) -> None:
    """Refuse a summary that does not follow from the rows."""
    numbers = [row.row for row in receipt.per_row]
    twice = sorted({n for n in numbers if numbers.count(n) > 1})
    if twice:
        raise IncomparableError(f"{name}: row {twice[0]} is there twice", "fetch the receipt again")
    positions = sum(row.positions for row in receipt.per_row)
    if positions != receipt.summary.positions:
        raise IncomparableError(
            f"{name}: rows hold {positions} positions, the summary says {receipt.summary.positions}",
            "fetch the receipt again",
        )
    rows, s = receipt.per_row, receipt.summary
    for what, published, values in (
        ("KL mean", s.kl_lower_bound_mean, [r.kl_lb_mean for r in rows]),
        ("NLL mean", s.candidate_nll_mean, [r.cand_nll_mean for r in rows]),
        ("top-1 agreement", s.top1_agreement, [r.top1_agree / r.positions for r in rows]),
        ("NLL behind the PPL", math.log(s.candidate_ppl), [r.cand_nll_mean for r in rows]),
    ):
        computed = float(np.average(values, weights=[r.positions for r in rows]))
        if not abs(computed - published) < ROUNDING:
            raise IncomparableError(
                f"{name}: {what} is {published!r} in the summary and {computed!r} from the rows",
                "fetch the receipt again",
            )


def _measurement(receipt: G4Receipt, raw: dict[str, Any], name: str) -> Measurement:
    complete = receipt.status == "complete" and receipt.summary.positions == receipt.panel.positions_expected
    coverage = receipt.summary.coverage
    content = {key: raw[key] for key in ("point", "panel", "teacher", "method", "summary")}
    rows = [{k: v for k, v in row.items() if k != "candidate_seconds"} for row in raw["per_row"]]
    return Measurement(
        key=json_digest(content | {"per_row": rows}),
        name=name,
        status="complete" if complete else "partial",
        estimator="lower_bound",
        lane="served",
        rows_measured=len(receipt.per_row),
        rows_planned=receipt.panel.rows,
        positions=receipt.summary.positions,
        panel=_panel(receipt.panel),
        teacher=_teacher(receipt),
        candidate=_candidate(receipt),
        scoring={
            "head_policy": "own head on each side",
            "topk_teacher": coverage.topk_teacher,
            "topk_candidate": coverage.topk_candidate_requested,
        },
        summary=_summary(receipt, raw["summary"]),
        intervals=_intervals(receipt),
        per_row=[_row(row) for row in receipt.per_row],
        counts={},
        preflight=[_reproduction(receipt.teacher_reproduction)],
        environment={},
        positions_sha256="",
        row_level_only=True,
        notes=[LOWER_BOUND.format(**coverage.model_dump()), NO_DOCUMENTS],
    )


def _panel(panel: G4Panel) -> PanelIdentity:
    return PanelIdentity(
        name=f"g4-{panel.rows}x{panel.columns}",
        sha256=panel.token_rows_sha256,
        recipe_sha256=panel.fixture_manifest_sha256,
        tokenizer_sha256="",
        unit="row",
        rows=panel.rows,
        positions=panel.positions_expected,
    )


def _teacher(receipt: G4Receipt) -> SideIdentity:
    return SideIdentity(
        engine="stored hidden states",
        version=SCHEMA,
        model=receipt.teacher.model,
        revision=receipt.teacher.revision,
        weights_sha256="",
        head_sha256=receipt.teacher.native_head_shard_sha256,
        tokenizer_sha256="",
        weights_dtype="bfloat16",
        compute_dtype="bfloat16",
        lane="weights",
        device="",
        settings={"arithmetic": receipt.method.get("teacher_arithmetic", ""), "source": receipt.teacher.source},
        capture_sha256=receipt.panel.teacher_manifest_sha256,
    )


def _candidate(receipt: G4Receipt) -> SideIdentity:
    return SideIdentity(
        engine="served",
        version="",
        model=receipt.point,
        revision="",
        weights_sha256="",
        head_sha256="",
        tokenizer_sha256="",
        weights_dtype="exl3",
        compute_dtype="",
        lane="served",
        device="",
        settings={"arithmetic": receipt.method.get("candidate_arithmetic", "")},
    )


def _summary(receipt: G4Receipt, published: dict[str, Any]) -> dict[str, Any]:
    """Our keys for the published values, and the published block as it is."""
    s = receipt.summary
    weights = [row.positions for row in receipt.per_row]
    return {
        "kl_mean": s.kl_lower_bound_mean,
        "kl_p50": s.kl_lower_bound_p50,
        "kl_p95": s.kl_lower_bound_p95,
        "kl_p99": s.kl_lower_bound_p99,
        "kl_max": s.kl_lower_bound_max,
        "nll_teacher": float(np.average([row.teacher_nll_mean for row in receipt.per_row], weights=weights)),
        "nll_candidate": s.candidate_nll_mean,
        "ppl_token_teacher": s.teacher_ppl_recomputed,
        "ppl_token_candidate": s.candidate_ppl,
        "top1_agreement": s.top1_agreement,
        "top1_agree_count": s.top1_agree_count,
        "captured_teacher_mass_mean": s.coverage.teacher_mass_in_known_set_mean,
        "published": published,
    }


def _intervals(receipt: G4Receipt) -> dict[str, Interval]:
    counts_R = np.array([row.positions for row in receipt.per_row], dtype=np.float64)
    kl = Totals(np.array([row.kl_lb_mean for row in receipt.per_row]) * counts_R, counts_R)
    agree = Totals(np.array([row.top1_agree for row in receipt.per_row], dtype=np.float64), counts_R)
    nll = np.array([row.cand_nll_mean - row.teacher_nll_mean for row in receipt.per_row])
    totals = {"kl_mean": kl, "top1_agreement": agree, "nll_difference": Totals(nll * counts_R, counts_R)}
    return {name: Interval(**interval_of(name, sums, unit="row").bounds()) for name, sums in totals.items()}


def _row(row: G4Row) -> RowSummary:
    return RowSummary(
        row=row.row,
        document=f"row {row.row}",
        domain="all",
        positions=row.positions,
        kl_mean=row.kl_lb_mean,
        kl_max=None,
        nll_teacher_mean=row.teacher_nll_mean,
        nll_candidate_mean=row.cand_nll_mean,
        top1_agreement=row.top1_agree / row.positions,
        nonfinite=0,
    )


def _reproduction(found: G4Reproduction) -> Check:
    exact = "exact" if found.top1_exact_all_rows else "NOT exact"
    return Check(
        name="the teacher reproduces its capture",
        passed=found.ok,
        figure=f"top-1 {exact} in all rows, max |difference of a row's NLL sum| {found.max_nll_sum_abs_delta:.4f}",
    )
