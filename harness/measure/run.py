"""One measurement: panel + teacher capture + candidate engine -> a run folder with positions and a receipt.

A row is scored as soon as the engine gives it, written whole, and let go; so memory does not grow with rows.
A run killed anywhere goes on at the first missing row and ends with the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.capture import Capture
from harness.digest import json_digest
from harness.engines.base import device_kind
from harness.engines.gguf_files import digests_of_gguf, locate_gguf
from harness.engines.hf import Alter, ComputeDType
from harness.engines.models import ModelFolder, locate
from harness.engines.open import EngineName, MemoryBudget, before_opening, digests_of, open_engine
from harness.errors import EngineError
from harness.exl3.files import config_digest, require_known_model
from harness.measure.folder import Kind, begin, finished, folder_name, write_run
from harness.measure.preflight import check_echo, check_end, check_probes, check_support, probes_of
from harness.measure.receipt import Measurement, Role, load_measurement
from harness.measure.result import build_measurement, exact_scoring
from harness.measure.rows import drop_row_files, finished_rows, join_rows, require_room, score_row, write_row
from harness.measure.teacher import MODELS, Yardstick, find_yardstick
from harness.progress import phase
from harness.store import folder_lock
from harness.types import Check, Engine, Outputs, Row, RowOutputs

MEASUREMENT = Kind(
    noun="measurement",
    receipt_file="measurement.json",
    table_file="positions.parquet",
    load=load_measurement,
    table_sha256=lambda measurement: measurement.positions_sha256,
    repair="measure again",
)


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
    #: Further arguments of the engine, as `open_engine` takes them: every one is part of the key.
    options: Mapping[str, Any] = field(default_factory=dict)


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
    candidate = find_candidate(request.candidate, request.revision, request.engine)
    yardstick = find_yardstick(
        request.panel, request.rows, request.teacher, candidate.located, candidate.tokenizer_sha256
    )
    return measure_against(request, candidate, yardstick)


def measure_against(request: Request, candidate: Candidate, yardstick: Yardstick) -> Result:
    """Measure what was found, or give back the finished measurement; ``request`` says how, not what."""
    panel, rows, name = yardstick.panel, yardstick.rows, candidate.located.name
    key = measurement_key(request, candidate, yardstick)
    folder = request.out or folder_name(name, panel.name, key=key, partial=yardstick.partial)
    with folder_lock(folder):
        if done := finished(folder, key, MEASUREMENT):
            return Result(folder=folder, measurement=done, reused=True)
        leg, begun = time.time(), begin(folder, key)
        require_room(folder, rows)
        capture, reproduced, told = yardstick.captured(request.device, request.memory_budget)
        engine = _open(request, candidate, capture, longest=yardstick.longest)
        checks, tokens = _check_and_score(folder, key, engine, capture, rows)
        measurement = build_measurement(
            folder,
            join_rows(folder, panel, rows, key),
            yardstick=yardstick,
            capture=capture,
            identity=engine.identity,
            scoring=exact_scoring(capture, engine),
            key=key,
            checks=[*checks, reproduced],
            name=name,
            candidate=candidate.located,
            role=candidate.role,
            notes=candidate.notes,
            begun=begun,
        )
        write_run(folder, leg, begun=begun, tokens=tokens, teacher=told)
    return Result(folder=folder, measurement=measurement, reused=False)


def find_candidate(
    source: str, revision: str | None, engine: EngineName = "reference", *, runs_here: bool = True
) -> Candidate:
    """Locate a checkpoint folder or Hub id, for llama.cpp a GGUF model, and digest its weights and tokenizer.

    Args:
        runs_here: false where a server runs it, which may know architectures that the reference does not.
    """
    if engine == "llamacpp":
        located = locate_gguf(source, revision)
        weights_sha256, tokenizer_sha256 = digests_of_gguf(located)
    else:
        located = locate(source, revision, cache=MODELS)
        if engine == "reference" and runs_here:
            require_known_model(located.path)
        weights_sha256, tokenizer_sha256 = digests_of(located)
    return Candidate(located=located, weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256)


def measurement_key(request: Request, candidate: Candidate, yardstick: Yardstick) -> str:
    """Digest of all that decides the numbers; names, places and times are no part of it."""
    own: dict[str, Any] = {
        "candidate": candidate.weights_sha256,
        "config": config_digest(candidate.located.path),
        "role": candidate.role,
        "variant": dict(candidate.variant),
        "compute": request.compute,
        "packed": request.packed,
        "engine": request.engine,
        "engine_version": before_opening(request.engine),
        "device": device_kind(request.device),
        "options": dict(request.options),
    }
    return json_digest(yardstick.key() | own)


def _open(request: Request, candidate: Candidate, capture: Capture, *, longest: int) -> Engine:
    """The engine that runs the candidate in this process; ``longest`` is the most tokens a row has."""
    return open_engine(
        candidate.located,
        engine=request.engine,
        compute=request.compute,
        device=request.device,
        packed=request.packed,
        memory_budget=request.memory_budget,
        vocab_size=capture.head.vocab_size if capture.head else None,
        alter=candidate.alter,
        row_tokens=longest,
        options=request.options,
        weights_sha256=candidate.weights_sha256,
        tokenizer_sha256=candidate.tokenizer_sha256,
    )


def _check_and_score(
    folder: Path, key: str, engine: Engine, capture: Capture, rows: Sequence[Row]
) -> tuple[list[Check], int]:
    """One pass of the engine: three probes, which must hold before anything is scored, the missing rows, a probe again.

    Returns:
        The checks, and how many tokens of the panel were run.

    Raises:
        EngineError: a probe does not hold; where it is the last, no row of the run is kept.
    """
    parts = folder / "rows"
    present = finished_rows(parts, key)
    todo = [row for row in rows if row.index not in present]
    probes, tokens = probes_of(rows[0]), 0
    with phase("candidate", total=len(todo), unit="tokens") as advance:
        outputs = engine.run([*probes, *todo, probes[0]], "hidden")
        checks, first = check_probes(engine, probes, outputs)
        checks += _one_vocabulary(engine, capture)
        for row in todo:
            out = next(outputs)
            check_echo(row, out)
            scores = score_row(capture, capture.row(row.index), out.outputs, engine.head, row)
            write_row(parts, key, row, scores)
            tokens += len(row.ids_T)
            advance(1, len(row.ids_T))
        at_the_end = _first_row_again(folder, probes[0], first, next(outputs), engine)
    return [*checks, at_the_end], tokens


def _first_row_again(folder: Path, probe: Row, first: Outputs, again: RowOutputs, engine: Engine) -> Check:
    """`check_end`; where it refuses, rows that were scored by then are as doubtful as it is."""
    try:
        return check_end(probe, first, again, engine.head)
    except EngineError:
        drop_row_files(folder)
        raise


def _one_vocabulary(engine: Engine, capture: Capture) -> list[Check]:
    teacher, candidate = capture.head, engine.head
    if teacher is None or candidate is None:
        return []
    columns = len(teacher.weight_VH), len(candidate.weight_VH)
    return [check_support(*columns, teacher.vocab_size, candidate.vocab_size)]
