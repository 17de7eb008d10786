"""One served measurement: panel + teacher capture + a server's top-k answers -> a run folder, resumable by row.

What comes out is a lower bound (and, where the server scores ids of our choice, an unbiased estimate beside it), in
the lane ``served``. The server's weights cannot be seen: the receipt says which digest the user claims for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from harness.capture import Capture, open_capture
from harness.digest import json_digest
from harness.engines.open import NO_TOKENIZER
from harness.environment import environment, source_digest
from harness.errors import UsageError
from harness.measure.receipt import Role
from harness.measure.result import build_measurement
from harness.measure.rows import finished_rows, join_rows, write_row
from harness.measure.run import (
    BYTES_PER_POSITION,
    REPORTS,
    Candidate,
    Result,
    candidate_of,
    captured,
    chosen,
    finished,
    panel_for,
    reproduction_check,
)
from harness.measure.teacher import TeacherModel, find_teacher, load_teacher
from harness.progress import phase
from harness.served.checks_server import load_of
from harness.served.connect import connect
from harness.served.floor import Question, floor_of, require_same_weights
from harness.served.identity import ServedWeights
from harness.served.preflight import check_row, check_served
from harness.served.score import AskedIds, additions, ask_of, score_served
from harness.served.seam import ServedEngine, ServedRow
from harness.store import folder_lock, require_space, write_json
from harness.types import UNKNOWN, Check, Panel, Row

Server = Literal["vllm", "sglang"]
#: Top tokens a position that are asked for where the user does not say.
DEFAULT_K = 256
#: Ids drawn from the teacher's tail at each position, where the server scores ids of our choice.
TAIL_SAMPLES = 32
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """What to measure through which server.

    ``candidate`` is a folder or Hub id with the weights that the server was started with: for the digests in the
    receipt and the tokenizer that the panel is sealed for. Without it the weights are ``unknown``.
    """

    server: Server
    url: str
    panel: Path
    candidate: str | None = None
    revision: str | None = None
    served_model: str | None = None
    teacher: str | None = None
    k: int = DEFAULT_K
    tail_samples: int = TAIL_SAMPLES
    seed: int = SEED
    rows: int | None = None
    out: Path | None = None
    concurrency: int = 1
    role: Role = "candidate"
    floor: Path | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Wire:
    """What the rows of this session cost."""

    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, row: Row, answer: ServedRow) -> Wire:
        return Wire(self.tokens + len(row.ids_T), self.bytes + answer.wire_bytes, self.seconds + answer.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """All that a run needs at hand."""

    request: ServedRequest
    engine: ServedEngine
    candidate: Candidate | None
    name: str
    panel: Panel
    rows: Sequence[Row]
    teacher: TeacherModel | Capture
    key: str
    folder: Path

    @property
    def fixed_ids(self) -> bool:
        return self.engine.capabilities.fixed_ids


def measure_served(request: ServedRequest) -> Result:
    """Measure what a server gives, or give back the finished measurement of exactly this question.

    Raises:
        EngineError: the server is not what it must be, or stopped answering; the same call goes on from there.
    """
    candidate = None if request.candidate is None else candidate_of(request.candidate, request.revision)
    engine = connect(
        request.server,
        request.url,
        model=request.served_model,
        concurrency=request.concurrency,
        weights=_weights(candidate),
    )
    named = load_teacher(request.teacher, candidate.located if candidate else None)
    panel = panel_for(request.panel, candidate.tokenizer_sha256 if candidate else NO_TOKENIZER)
    teacher = open_capture(named) if isinstance(named, Path) else find_teacher(named, panel)
    rows = chosen(panel, request.rows)
    key = _key(request, engine, panel, rows, teacher)
    name = candidate.located.name if candidate else engine.identity.model
    part = "" if len(rows) == len(panel.rows) else f"-rows{len(rows)}"
    folder = request.out or REPORTS / f"{name.replace(' ', '-')}--{request.server}--{panel.name}--{key[:8]}{part}"
    run = _Run(
        request=request, engine=engine, candidate=candidate, name=name, panel=panel, rows=rows,
        teacher=teacher, key=key, folder=folder,
    )  # fmt: skip
    with folder_lock(folder):
        if done := finished(folder, key):
            return Result(folder=folder, measurement=done, reused=True)
        return _measure(run)


def floor_request(request: ServedRequest) -> ServedRequest:
    """The same question about the teacher itself: the server is said to serve the teacher's own weights."""
    named = load_teacher(request.teacher, None)
    if isinstance(named, Path):
        raise UsageError(f"{named.name} is a capture", "name the teacher's file or model, whose weights are served")
    return replace(request, candidate=named.model, revision=named.revision, role="floor")


def _weights(candidate: Candidate | None) -> ServedWeights:
    """The digests of the files that the user names, as no server tells them."""
    if candidate is None:
        return ServedWeights()
    return ServedWeights(
        revision=candidate.located.revision,
        weights_sha256=candidate.weights_sha256,
        tokenizer_sha256=candidate.tokenizer_sha256,
    )


def _key(
    request: ServedRequest, engine: ServedEngine, panel: Panel, rows: Sequence[Row], teacher: TeacherModel | Capture
) -> str:
    """Digest of all that decides the numbers. The address is no part of it; what the server says of itself is."""
    identity, fixed_ids = engine.identity, engine.capabilities.fixed_ids
    return json_digest(
        {
            "panel": panel.sha256,
            "rows": [row.index for row in rows],
            "registration": panel.registration_sha256,
            "teacher": teacher.sha256 if isinstance(teacher, Capture) else teacher.capture_key(panel),
            "engine": asdict(identity) | {"settings": dict(identity.settings)},
            "role": request.role,
            "k": request.k,
            "fixed_ids": fixed_ids,
            "tail_samples": request.tail_samples if fixed_ids else 0,
            "seed": request.seed if fixed_ids else 0,
            "concurrency": request.concurrency,
            "source": source_digest(),
            "environment": environment(),
        }
    )


def _measure(run: _Run) -> Result:
    started = time.time()
    require_space(run.folder, sum(len(row.ids_T) for row in run.rows) * BYTES_PER_POSITION, "this measurement")
    capture, reproduction = captured(run.teacher, run.panel, run.rows, run.request.device)
    checks = _preflight(run, capture)
    wire = _ask_and_score(run, capture)
    checks.append(reproduction_check(reproduction))
    table = join_rows(run.folder, run.panel, run.rows, run.key)
    measurement = build_measurement(
        run.folder,
        table,
        panel=run.panel,
        rows=run.rows,
        capture=capture,
        identity=run.engine.identity,
        scoring=_scoring(run, capture),
        key=run.key,
        checks=checks,
        name=run.name,
        candidate=run.candidate.located if run.candidate else None,
        panel_folder=run.request.panel,
        role=run.request.role,
        notes=_notes(run),
        estimator="lower_bound",
        more=additions(table, run.panel),
    )
    _write_run(run.folder, started, wire)
    return Result(folder=run.folder, measurement=measurement, reused=False)


def _preflight(run: _Run, capture: Capture) -> list[Check]:
    longest = max(run.rows, key=lambda row: len(row.ids_T))
    return check_served(
        run.engine,
        run.rows,
        k=run.request.k,
        vocab_size=_vocabulary(capture),
        teacher_nll_T=capture.row(longest.index).nll,
        load=load_of(run.request.url),
    )


def _ask_and_score(run: _Run, capture: Capture) -> Wire:
    """Every missing row: asked, checked, scored against the capture, and stored before the next is taken."""
    parts, request, vocab = run.folder / "rows", run.request, _vocabulary(capture)
    present, wire = finished_rows(parts, run.key), Wire()
    todo = [row for row in run.rows if row.index not in present]
    asked: dict[int, AskedIds] = {}

    def ask(row: Row) -> Any:
        asked[row.index] = ask_of(capture, row, k=request.k, m=request.tail_samples, seed=request.seed)
        return asked[row.index].ids_TM

    answers: Iterator[ServedRow] = run.engine.run(todo, k=request.k, ask=ask if run.fixed_ids else None)
    with phase(f"{request.server} k={request.k}", total=len(todo), unit="tokens") as advance:
        for row, answer in zip(todo, answers, strict=True):
            check_row(row, answer, k=request.k, vocab_size=vocab, software=request.server)
            scores, extras = score_served(
                capture, capture.row(row.index), row, answer, asked.pop(row.index, None), vocab
            )
            write_row(parts, run.key, row, scores, extras)
            wire = wire.add(row, answer)
            advance(1, len(row.ids_T))
    return wire


def _vocabulary(capture: Capture) -> int:
    if capture.head is None:
        raise UsageError(
            "this capture holds no head, so the teacher's log-probabilities of a server's tokens cannot be had from it",
            "capture the teacher as hidden states: fidelity teacher capture",
        )
    return capture.head.vocab_size


def _scoring(run: _Run, capture: Capture) -> dict[str, Any]:
    request = run.request
    asked: dict[str, Any] = {
        "way": "fixed ids" if run.fixed_ids else "top-k",
        "k": request.k,
        "concurrency": request.concurrency,
        "support": _vocabulary(capture),
    }
    if run.fixed_ids:
        asked |= {"tail_samples": request.tail_samples, "seed": request.seed}
    if request.role == "floor":
        require_same_weights(run.name, capture.identity.weights_sha256, run.engine.identity.weights_sha256)
        return asked
    question = Question(
        panel_sha256=run.panel.sha256,
        rows=len(run.rows),
        identity=run.engine.identity,
        teacher_sha256=capture.identity.weights_sha256,
        scoring=asked,
    )
    floor = floor_of(request.floor, run.folder, question)
    return asked if floor is None else asked | {"floor": floor}


def _notes(run: _Run) -> list[str]:
    notes = [run.engine.capabilities.note] if run.engine.capabilities.note else []
    if run.candidate is None:
        notes.append(f"the weights behind the server are {UNKNOWN}: no folder was named, so no digest of them exists")
    else:
        notes.append(
            "the weights digest is that of the folder named; what the server loaded cannot be seen from outside"
        )
    return notes


def _write_run(folder: Path, started: float, wire: Wire) -> None:
    ended = time.time()
    write_json(
        folder / "run.json",
        {
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "seconds": round(ended - started, 1),
            "tokens": wire.tokens,
            "tokens_per_second": round(wire.tokens / (ended - started), 1),
            "wire_bytes": wire.bytes,
            "server_seconds": round(wire.seconds, 2),
        },
    )
