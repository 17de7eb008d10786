"""One measurement: panel + teacher capture + candidate engine -> a run folder with positions and a receipt.

A row is scored as soon as the engine gives it, written whole, and let go; so memory does not grow with rows.
A run killed anywhere goes on at the first missing row and ends with the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from harness.capture import Capture, open_capture
from harness.digest import file_digest, json_digest
from harness.engines.gguf_files import digests_of_gguf, locate_gguf
from harness.engines.hf import Alter, ComputeDType
from harness.engines.models import ModelFolder, locate
from harness.engines.open import (
    NO_TOKENIZER,
    LocalName,
    MemoryBudget,
    before_opening,
    digests_of,
    open_engine,
    open_local,
)
from harness.environment import environment, source_digest
from harness.errors import IncomparableError, Refused, UsageError
from harness.measure.preflight import check_echo, check_probes, check_support, probes_of
from harness.measure.receipt import Measurement, Role, load_measurement
from harness.measure.result import build_measurement, exact_scoring
from harness.measure.rows import finished_rows, join_rows, score_row, write_row
from harness.measure.teacher import MODELS, Reproduction, TeacherModel, ensure_capture, find_teacher, load_teacher
from harness.panel import ensure_built
from harness.progress import phase
from harness.store import folder_lock, require_space, write_json
from harness.types import Check, Engine, Panel, Row

#: What runs the candidate in this process: our own reference, or an engine that people deploy.
EngineName = Literal["reference"] | LocalName
REPORTS = Path("reports")
#: Rough bytes that a scored position takes in positions.parquet and its row file together.
BYTES_PER_POSITION = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure. ``candidate`` and ``teacher`` as in `harness.engines.models.locate` and `load_teacher`."""

    candidate: str
    panel: Path
    revision: str | None = None
    teacher: str | None = None
    rows: int | None = None
    out: Path | None = None
    compute: ComputeDType = "auto"
    device: str | None = None
    packed: bool = False
    memory_budget: MemoryBudget = None
    engine: EngineName = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The model under test, found on this disk, before anything of it is loaded.

    An anchor or a floor is the teacher itself with ``alter`` done to it once it is loaded. ``variant`` names that
    for the key: all that decides what ``alter`` does.
    """

    located: ModelFolder
    weights_sha256: str
    tokenizer_sha256: str
    role: Role = "candidate"
    alter: Alter | None = None
    variant: Mapping[str, str | int | float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    folder: Path
    measurement: Measurement
    reused: bool


def measure(request: Request) -> Result:
    """Measure a candidate, or give back the finished measurement of exactly this question."""
    candidate = find_candidate(request)
    panel = panel_for(request.panel, candidate.tokenizer_sha256)
    named = load_teacher(request.teacher, candidate.located)
    teacher = open_capture(named) if isinstance(named, Path) else find_teacher(named, panel)
    return measure_against(request, candidate, teacher, panel)


def measure_against(request: Request, candidate: Candidate, teacher: TeacherModel | Capture, panel: Panel) -> Result:
    """Measure what was found, or give back the finished measurement; ``request`` says how, not what."""
    rows = chosen(panel, request.rows)
    key = measurement_key(request, panel, rows, teacher, candidate)
    part = "" if len(rows) == len(panel.rows) else f"-rows{len(rows)}"
    folder = request.out or REPORTS / f"{candidate.located.name.replace(' ', '-')}--{panel.name}--{key[:8]}{part}"
    with folder_lock(folder):
        done = finished(folder, key)
        if done:
            return Result(folder=folder, measurement=done, reused=True)
        return Result(
            folder=folder, measurement=_run(request, panel, rows, candidate, teacher, key, folder), reused=False
        )


def find_candidate(request: Request) -> Candidate:
    """Locate the candidate's files and digest them; a GGUF model goes to llama.cpp as it is."""
    if request.engine == "llamacpp":
        gguf = locate_gguf(request.candidate, request.revision)
        weights_sha256, tokenizer_sha256 = digests_of_gguf(gguf)
        return Candidate(located=gguf, weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256)
    return candidate_of(request.candidate, request.revision)


def candidate_of(source: str, revision: str | None) -> Candidate:
    """A checkpoint folder or Hub id with the digests of its weights and tokenizer."""
    located = locate(source, revision, cache=MODELS)
    weights_sha256, tokenizer_sha256 = digests_of(located)
    return Candidate(located=located, weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256)


def panel_for(path: Path, tokenizer_sha256: str) -> Panel:
    """The panel as sealed for a model's tokenizer; its default seal where the model has none."""
    return ensure_built(path, tokenizer=None if tokenizer_sha256 == NO_TOKENIZER else tokenizer_sha256)


def measurement_key(
    request: Request, panel: Panel, rows: Sequence[Row], teacher: TeacherModel | Capture, candidate: Candidate
) -> str:
    """Digest of all that decides the numbers; names, places and times are no part of it."""
    return json_digest(
        {
            "panel": panel.sha256,
            "rows": [row.index for row in rows],
            "registration": panel.registration_sha256,
            "teacher": teacher.sha256 if isinstance(teacher, Capture) else teacher.capture_key(panel),
            "candidate": candidate.weights_sha256,
            "role": candidate.role,
            "variant": dict(candidate.variant),
            "compute": request.compute,
            "packed": request.packed,
            "engine": request.engine,
            "engine_version": {} if request.engine == "reference" else before_opening(request.engine),
            "device": request.device,
            "source": source_digest(),
            "environment": environment(),
        }
    )


def chosen(panel: Panel, count: int | None) -> Sequence[Row]:
    """The first ``count`` rows, or all."""
    if count is not None and not 1 <= count <= len(panel.rows):
        raise UsageError(f"--rows {count}: panel {panel.name} has {len(panel.rows)} rows", "ask for 1 up to that many")
    return panel.rows[:count]


def finished(folder: Path, key: str) -> Measurement | None:
    """The measurement of this key where it is finished and undamaged; None where the folder holds none."""
    if not (folder / "measurement.json").is_file():
        return None
    found = load_measurement(folder)
    if found.key != key:
        raise IncomparableError(
            f"{folder.name} holds the measurement {found.key[:12]} of {found.name}, this one is {key[:12]}",
            "give another --out, or remove that folder",
        )
    positions = folder / "positions.parquet"
    if not positions.is_file() or file_digest(positions) != found.positions_sha256:
        raise Refused(
            f"{folder.name}/positions.parquet is not what its measurement.json was made from",
            f"remove {folder.name} and measure again",
        )
    return found


def _run(
    request: Request,
    panel: Panel,
    rows: Sequence[Row],
    candidate: Candidate,
    teacher: TeacherModel | Capture,
    key: str,
    folder: Path,
) -> Measurement:
    started = time.time()
    require_space(folder, sum(len(row.ids_T) for row in rows) * BYTES_PER_POSITION, "this measurement")
    capture, reproduction = captured(teacher, panel, rows, request.device, request.memory_budget)
    engine = _open(request, candidate, capture, longest=max(len(row.ids_T) for row in rows))
    checks, tokens = _check_and_score(folder / "rows", key, engine, capture, rows)
    checks.append(reproduction_check(reproduction))
    table = join_rows(folder, panel, rows, key)
    measurement = build_measurement(
        folder,
        table,
        panel=panel,
        rows=rows,
        capture=capture,
        identity=engine.identity,
        scoring=exact_scoring(capture, engine),
        key=key,
        checks=checks,
        name=candidate.located.name,
        candidate=candidate.located,
        panel_folder=request.panel,
        role=candidate.role,
        notes=candidate.notes,
    )
    ended = time.time()
    write_json(
        folder / "run.json",
        {
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "seconds": round(ended - started, 1),
            "tokens": tokens,
            "tokens_per_second": round(tokens / (ended - started), 1),
        },
    )
    return measurement


def _open(request: Request, candidate: Candidate, capture: Capture, *, longest: int) -> Engine:
    """The engine that runs the candidate in this process; ``longest`` is the most tokens a row has."""
    vocab_size = capture.head.vocab_size if capture.head else None
    if request.engine != "reference":
        if request.packed or request.memory_budget is not None or candidate.alter is not None:
            raise UsageError(f"--engine {request.engine} loads a model its own way", "leave out the other options")
        return open_local(
            request.engine,
            candidate.located,
            row_tokens=longest,
            vocab_size=vocab_size,
            device=request.device,
            compute=request.compute,
            weights_sha256=candidate.weights_sha256,
            tokenizer_sha256=candidate.tokenizer_sha256,
        )
    return open_engine(
        candidate.located,
        compute=request.compute,
        device=request.device,
        packed=request.packed,
        memory_budget=request.memory_budget,
        vocab_size=vocab_size,
        alter=candidate.alter,
        weights_sha256=candidate.weights_sha256,
        tokenizer_sha256=candidate.tokenizer_sha256,
    )


def captured(
    teacher: TeacherModel | Capture,
    panel: Panel,
    rows: Sequence[Row],
    device: str | None = None,
    memory_budget: MemoryBudget = None,
) -> tuple[Capture, Reproduction | None]:
    """The teacher's outputs of these rows: stored ones, or those of its weights, reproduced first where they are."""
    if isinstance(teacher, TeacherModel):
        return ensure_capture(teacher, panel, rows, device=device, memory_budget=memory_budget)
    teacher.require_panel(panel)
    return teacher, None


def reproduction_check(reproduction: Reproduction | None) -> Check:
    """The line about the teacher's own capture."""
    name = "the teacher reproduces its capture"
    if reproduction is None:
        return Check(name=name, passed=True, figure="captured in this run, or its weights are not here")
    return Check(name=name, passed=reproduction.top1_exact, figure=reproduction.line())


def _check_and_score(
    folder: Path, key: str, engine: Engine, capture: Capture, rows: Sequence[Row]
) -> tuple[list[Check], int]:
    """One pass of the engine: three probes, which must hold before anything is scored, then the missing rows.

    Returns:
        The checks, and how many tokens of the panel were run.
    """
    present = finished_rows(folder, key)
    todo = [row for row in rows if row.index not in present]
    probes, tokens = probes_of(rows[0]), 0
    with phase("candidate", total=len(todo), unit="tokens") as advance:
        outputs = engine.run([*probes, *todo], "hidden")
        checks = check_probes(engine, probes, outputs) + _one_vocabulary(engine, capture)
        for row, out in zip(todo, outputs, strict=True):
            check_echo(row, out)
            scores = score_row(capture, capture.row(row.index), out.outputs, engine.head, row)
            write_row(folder, key, row, scores)
            tokens += len(row.ids_T)
            advance(1, len(row.ids_T))
    return checks, tokens


def _one_vocabulary(engine: Engine, capture: Capture) -> list[Check]:
    ours, theirs = capture.head, engine.head
    if ours is None or theirs is None:
        return []
    return [check_support(len(ours.weight_VH), len(theirs.weight_VH), ours.vocab_size, theirs.vocab_size)]
