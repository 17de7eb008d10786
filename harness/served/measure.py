"""One served measurement: panel + teacher capture + a server's top-k answers -> a run folder, resumable by row.

What comes out is a lower bound (and, where the server scores ids of our choice, an unbiased estimate beside it), in
the lane ``served``. The server's weights cannot be seen: the receipt says which digest the user claims for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.capture import Capture
from harness.digest import json_digest
from harness.engines.open import NO_TOKENIZER
from harness.errors import UsageError
from harness.exl3.files import config_digest, read_json, vocabulary_of
from harness.measure.folder import begin, finished, folder_name, write_run
from harness.measure.receipt import Measurement, Role
from harness.measure.result import build_measurement
from harness.measure.rows import finished_rows, join_rows, require_room, write_row
from harness.measure.run import MEASUREMENT, Candidate, Result, find_candidate
from harness.measure.teacher import TeacherModel, Yardstick, find_yardstick, load_teacher
from harness.progress import phase
from harness.served.checks_server import check_model, load_of
from harness.served.connect import connect
from harness.served.floor import Lane, floor_of, require_same_weights
from harness.served.identity import ServedWeights
from harness.served.known_ids import AskedIds, ask_of
from harness.served.preflight import check_row, check_served, require_k
from harness.served.score import receipt_extras, score_served
from harness.served.seam import ServedEngine, ServedRow
from harness.store import folder_lock
from harness.types import UNKNOWN, Check, Row

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
    """All that a run needs at hand; ``name`` is the candidate's, or what the server calls its model."""

    request: ServedRequest
    engine: ServedEngine
    candidate: Candidate | None
    name: str
    yardstick: Yardstick
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
    candidate = (
        None if request.candidate is None else find_candidate(request.candidate, request.revision, runs_here=False)
    )
    engine = connect(
        request.server,
        request.url,
        model=request.served_model,
        concurrency=request.concurrency,
        weights=_weights(candidate),
    )
    tokenizer = candidate.tokenizer_sha256 if candidate else NO_TOKENIZER
    located = candidate.located if candidate else None
    yardstick = find_yardstick(request.panel, request.rows, request.teacher, located, tokenizer)
    request = replace(request, k=_at_most_all(request.k, candidate, yardstick))
    key = _key(request, engine, yardstick)
    name = located.name if located else engine.identity.model
    named = folder_name(name, request.server, yardstick.panel.name, key=key, partial=yardstick.partial)
    folder = request.out or named
    with folder_lock(folder):
        if done := finished(folder, key, MEASUREMENT):
            return Result(folder=folder, measurement=done, reused=True)
        run = _Run(
            request=request, engine=engine, candidate=candidate, name=name, yardstick=yardstick, key=key, folder=folder
        )
        return Result(folder=folder, measurement=_measure(run), reused=False)


def _measure(run: _Run) -> Measurement:
    """Capture, preflight, rows, receipt, bookkeeping."""
    leg, yardstick = time.time(), run.yardstick
    require_k(run.engine, yardstick.rows, run.request.k)
    begun = begin(run.folder, run.key)
    require_room(run.folder, yardstick.rows)
    capture, reproduced, told = yardstick.captured(run.request.device)
    checks = _preflight(run, capture)
    wire = _ask_and_score(run, capture)
    table = join_rows(run.folder, yardstick.panel, yardstick.rows, run.key)
    measurement = build_measurement(
        run.folder,
        table,
        yardstick=yardstick,
        capture=capture,
        identity=run.engine.identity,
        scoring=_scoring(run, capture),
        key=run.key,
        checks=[*checks, reproduced],
        name=run.name,
        candidate=run.candidate.located if run.candidate else None,
        role=run.request.role,
        notes=_notes(run),
        estimator="lower_bound",
        extras=receipt_extras(table, yardstick.panel),
        begun=begun,
    )
    write_run(
        run.folder,
        leg,
        begun=begun,
        tokens=wire.tokens,
        wire_bytes=wire.bytes,
        server_seconds=round(wire.seconds, 2),
        teacher=told,
    )
    return measurement


def _at_most_all(k: int, candidate: Candidate | None, yardstick: Yardstick) -> int:
    """``k``, or the vocabulary where that is smaller: a server that is asked for more may die of it."""
    teacher = yardstick.teacher
    located = [candidate.located] if candidate else []
    located += [teacher.located] if isinstance(teacher, TeacherModel) else []
    sizes = [vocabulary_of(read_json(one.path / "config.json")) for one in located if one.path.is_dir()]
    sizes += [teacher.head.vocab_size] if isinstance(teacher, Capture) and teacher.head is not None else []
    return min([k, *(size for size in sizes if isinstance(size, int) and size > 0)])


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
        config_sha256=config_digest(candidate.located.path),
    )


def _key(request: ServedRequest, engine: ServedEngine, yardstick: Yardstick) -> str:
    """Digest of all that decides the numbers. The address is no part of it; what the server says of itself is."""
    identity, fixed_ids = engine.identity, engine.capabilities.fixed_ids
    asked = {
        "engine": asdict(identity) | {"settings": dict(identity.settings)},
        "role": request.role,
        "k": request.k,
        "fixed_ids": fixed_ids,
        "tail_samples": request.tail_samples if fixed_ids else 0,
        "seed": request.seed if fixed_ids else 0,
        "concurrency": request.concurrency,
    }
    return json_digest(yardstick.key() | asked)


def _preflight(run: _Run, capture: Capture) -> list[Check]:
    longest = max(run.yardstick.rows, key=lambda row: len(row.ids_T))
    named = [] if run.candidate is None else [check_model(run.engine.identity, run.candidate.located)]
    return named + check_served(
        run.engine,
        run.yardstick.rows,
        k=run.request.k,
        vocab_size=_vocabulary(capture),
        teacher_nll_T=capture.row(longest.index).nll,
        load=load_of(run.request.url),
    )


def _ask_and_score(run: _Run, capture: Capture) -> Wire:
    """Every missing row: asked, checked, scored against the capture, and stored before the next is taken."""
    parts, request, vocab = run.folder / "rows", run.request, _vocabulary(capture)
    present, wire = finished_rows(parts, run.key), Wire()
    todo = [row for row in run.yardstick.rows if row.index not in present]
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
    lane = Lane(
        panel_sha256=run.yardstick.panel.sha256,
        rows=len(run.yardstick.rows),
        identity=run.engine.identity,
        teacher_sha256=capture.identity.weights_sha256,
        scoring=asked,
    )
    floor = floor_of(request.floor, run.folder, lane)
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
