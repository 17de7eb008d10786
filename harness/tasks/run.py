"""``fidelity tasks``: one suite for one model, in this process or behind a server -> tasks.json and items.parquet.

A run killed anywhere goes on at the first missing answer; a server that dies leaves no score behind.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.digest import file_digest, json_digest
from harness.engines.hf import ComputeDType, quiet_transformers
from harness.engines.models import ModelFolder, locate
from harness.engines.open import NO_TOKENIZER, digests_of, memory_budget_of, open_engine, tokenizer_of
from harness.environment import environment, source_digest
from harness.errors import EngineError, IncomparableError, Refused
from harness.receipt import Check, SideIdentity
from harness.store import folder_lock, write_json
from harness.tasks.answers import Answers
from harness.tasks.loading import Source, find_sources, load_definitions, load_tasks, load_what_is_there
from harness.tasks.outcome import Circumstances, build_receipt, versions
from harness.tasks.receipt import FILE, ITEMS, Missing, TaskReceipt, load_receipt
from harness.tasks.suite import Suite, SuiteLock, find_suite, load_lock, load_suite, save_lock
from harness.teacher import MODELS, read_spec

if TYPE_CHECKING:
    from harness.served.address import Server
    from harness.tasks.asking import AskingLM

REPORTS = Path("reports")
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to ask whom. ``candidate`` as in `harness.engines.models.locate`, or a teacher's TOML file.

    ``base_url`` asks a server instead; the candidate then gives tokenizer and identity.
    """

    candidate: str
    suite: str = "quick"
    revision: str | None = None
    data: Path | None = None
    limit: int | None = None
    out: Path | None = None
    compute: ComputeDType = "auto"
    device: str | None = None
    packed: bool = False
    memory_budget: str | None = None
    base_url: str | None = None
    served_model: str | None = None
    num_concurrent: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    folder: Path
    receipt: TaskReceipt
    reused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The model that is asked, before it is loaded."""

    located: ModelFolder
    weights_sha256: str
    tokenizer_sha256: str
    server: Server | None


def run_suite(request: Request) -> Result:
    """Run a suite, or give back the finished run of exactly this question."""
    path = find_suite(request.suite)
    suite = load_suite(path)
    lock = load_lock(path, suite)
    sources, missing = find_sources(suite, request.data)
    subject = find_subject(request)
    answers_key = json_digest(_model_key(request, subject))
    key = json_digest({"answers": answers_key} | _question_key(request, suite, sources, missing))
    part = f"-limit{request.limit}" if request.limit else ""
    folder = request.out or REPORTS / f"{subject.located.name}--tasks-{suite.name}--{key[:8]}{part}"
    with folder_lock(folder):
        done = _finished(folder, key)
        if done:
            return Result(folder=folder, receipt=done, reused=True)
        receipt = _run(request, suite, lock, sources, missing, subject, folder, key, answers_key)
    return Result(folder=folder, receipt=receipt, reused=False)


def seal(name: str, data: Path | None) -> tuple[Path, SuiteLock]:
    """Write the seal of a suite: all prompts that its data give, hashed without a model; else its definitions."""
    from harness.tasks.evaluating import seal_suite
    from harness.tasks.quiet import quiet_lm_eval

    path = find_suite(name)
    suite = load_suite(path)
    sources, missing = find_sources(suite, data)
    with tempfile.TemporaryDirectory() as place, quiet_lm_eval():
        loaded = load_what_is_there(suite, sources, missing, Path(place) / "documents")
        names = [entry.task for entry in loaded.missing]
        definitions = load_definitions(suite, names, Path(place) / "definitions")
        lock = seal_suite(suite, loaded, definitions, versions()["lm_eval"])
    return save_lock(path, lock), lock


def find_subject(request: Request) -> Subject:
    """Locate the model's files, digest them, and find the server where one is asked.

    Raises:
        EngineError: it has no tokenizer.
    """
    from harness.served.address import find_server

    # The server first: a wrong address should not wait for gigabytes to be digested.
    server = find_server(request.base_url, request.served_model) if request.base_url else None
    located = _locate(request)
    if tokenizer_of(located) == NO_TOKENIZER:
        raise EngineError(f"{located.name} has no tokenizer", "tasks are text: put tokenizer.json into its folder")
    if server is not None and not any(located.folder.glob("*.safetensors")):
        weights, tokenizer = UNKNOWN, tokenizer_of(located)
    else:
        weights, tokenizer = digests_of(located)
    return Subject(located=located, weights_sha256=weights, tokenizer_sha256=tokenizer, server=server)


def _locate(request: Request) -> ModelFolder:
    if request.candidate.endswith(".toml"):
        spec = read_spec(Path(request.candidate).expanduser())
        return locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    return locate(request.candidate, request.revision, cache=MODELS)


def _model_key(request: Request, subject: Subject) -> dict[str, Any]:
    """All that an answer depends on besides its prompt (FAULTS A 51): A's answers can never be B's."""
    from harness.tasks.served import public_name

    server = subject.server
    return {
        "weights": subject.weights_sha256,
        "tokenizer": subject.tokenizer_sha256,
        "compute": request.compute,
        "packed": request.packed,
        "streamed": request.memory_budget is not None,
        "device": request.device,
        "server": server and [public_name(server), server.software, server.version],
        "address": server.root if server and subject.weights_sha256 == UNKNOWN else None,
        "source": [source_digest(), _own_source()],
        "environment": environment() | versions(),
    }


def _question_key(
    request: Request, suite: Suite, sources: dict[str, Source], missing: Sequence[Missing]
) -> dict[str, Any]:
    return {
        "suite": suite.sha256,
        "limit": request.limit,
        "data": {name: [source.kind, source.sha256] for name, source in sources.items()},
        "missing": [entry.task for entry in missing],
    }


def _own_source() -> str:
    """Digest of this package's own files."""
    folder = Path(__file__).parent
    return json_digest({file.name: file_digest(file) for file in sorted(folder.glob("*.py"))})


def _finished(folder: Path, key: str) -> TaskReceipt | None:
    if not (folder / FILE).is_file():
        return None
    found = load_receipt(folder)
    if found.key != key:
        raise IncomparableError(
            f"{folder.name} holds the run {found.key[:12]} of {found.name}, this one is {key[:12]}",
            "give another --out, or remove that folder",
        )
    if not (folder / ITEMS).is_file() or file_digest(folder / ITEMS) != found.items_sha256:
        raise Refused(f"{folder.name}/{ITEMS} is not what its tasks.json was made from", "remove the folder, run again")
    return found


def _run(
    request: Request,
    suite: Suite,
    lock: SuiteLock | None,
    sources: dict[str, Source],
    missing: Sequence[Missing],
    subject: Subject,
    folder: Path,
    key: str,
    answers_key: str,
) -> TaskReceipt:
    from harness.tasks.evaluating import evaluate_suite
    from harness.tasks.quiet import quiet_lm_eval

    started = time.time()
    quiet_transformers()
    with ExitStack() as stack:
        stack.enter_context(quiet_lm_eval())
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaded = load_tasks(suite, sources, missing, place)
        answers = Answers(folder, answers_key)
        already = len(answers)
        lm, identity, checks = _open(request, subject, answers)
        samples, metrics, sealed = evaluate_suite(lm, suite, loaded, lock, limit=request.limit)
        circumstances = Circumstances(
            key=key, suite=suite, loaded=loaded, identity=identity, checks=checks, sealed=sealed, limit=request.limit
        )
        receipt = build_receipt(folder, circumstances, samples, metrics, lm)
    answers.discard()
    _write_run(folder, started, receipt, already)
    return receipt


def _open(request: Request, subject: Subject, answers: Answers) -> tuple[AskingLM, SideIdentity, list[Check]]:
    """The model as lm-eval sees it, who it is, and the list that its preflight writes to."""
    from transformers import AutoTokenizer

    from harness.tasks.asking import AskingLM
    from harness.tasks.reference_lm import ReferenceLM

    tokenizer = AutoTokenizer.from_pretrained(subject.located.folder)
    if subject.server is not None:
        return _open_served(request, subject, subject.server, tokenizer, answers)
    engine = open_engine(
        subject.located,
        compute=request.compute,
        device=request.device,
        packed=request.packed,
        memory_budget=memory_budget_of(request.memory_budget),
        weights_sha256=subject.weights_sha256,
        tokenizer_sha256=subject.tokenizer_sha256,
    )
    inner = ReferenceLM(engine, tokenizer)
    lm = AskingLM(inner, answers, limit=context_of(subject.located.folder))
    settings = dict(engine.identity.settings) | {"kv_cache": "within a question" if inner.shares_cache else False}
    identity = SideIdentity.model_validate(asdict(engine.identity) | {"settings": settings} | _census(subject.located))
    return lm, identity, []


def context_of(folder: Path) -> int | None:
    """The longest context that config.json allows; None where it says nothing."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for block in (config.get("text_config", {}), config):
        if block.get("max_position_embeddings"):
            return int(block["max_position_embeddings"])
    return None


def _open_served(
    request: Request, subject: Subject, server: Server, tokenizer: Any, answers: Answers
) -> tuple[AskingLM, SideIdentity, list[Check]]:
    from harness.tasks.asking import AskingLM
    from harness.tasks.served import ServedPreflight, adds_special_tokens, failures, open_served, public_name

    inner = open_served(server, str(subject.located.folder), tokenizer, num_concurrent=request.num_concurrent)
    preflight = ServedPreflight(server, inner, tokenizer)
    # The API makes one token after every prompt.
    lm = AskingLM(inner, answers, limit=server.context, extra=1, preflights=[preflight], failures=failures())
    identity = SideIdentity(
        engine=server.software,
        version=server.version,
        model=subject.located.name,
        revision=subject.located.revision,
        weights_sha256=subject.weights_sha256,
        head_sha256=UNKNOWN,
        tokenizer_sha256=subject.tokenizer_sha256,
        weights_dtype=UNKNOWN,
        compute_dtype=UNKNOWN,
        lane="served",
        device=UNKNOWN,
        settings={
            "served_as": public_name(server),
            "context": server.context,
            "special_tokens": adds_special_tokens(tokenizer),
            "num_concurrent": request.num_concurrent,
        },
    )
    return lm, identity, preflight.checks


def _census(located: ModelFolder) -> dict[str, object]:
    from harness.exl3.census import sizes

    found = sizes(located.folder)
    return {"bytes": found.bytes, "bits_per_weight": found.bits_per_weight}


def _write_run(folder: Path, started: float, receipt: TaskReceipt, already: int) -> None:
    """run.json: when and how long; no part of any comparison."""
    seconds = time.time() - started
    write_json(
        folder / "run.json",
        {
            "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "items": receipt.items,
            "answers_kept_from_before": already,
        },
    )
