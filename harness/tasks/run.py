"""``fidelity tasks``: one suite for one model, in this process or behind a server -> tasks.json and items.parquet.

A run killed anywhere goes on at the first missing answer; a server that dies leaves no score behind.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.digest import json_digest
from harness.measure.folder import Kind, finished, folder_name, write_run
from harness.progress import quiet_transformers
from harness.store import folder_lock
from harness.tasks.asking import Answers
from harness.tasks.loading import Source, find_sources, load_definitions, load_tasks, load_what_is_there
from harness.tasks.outcome import Circumstances, build_receipt, versions
from harness.tasks.receipt import ITEMS, TASKS_FILE, Missing, TaskReceipt, load_receipt
from harness.tasks.subject import Request, Subject, find_subject, model_key, open_subject
from harness.tasks.suite import Suite, SuiteLock, find_suite, load_lock, load_suite, save_lock

TASKS = Kind(
    noun="run",
    receipt_file=TASKS_FILE,
    table_file=ITEMS,
    load=load_receipt,
    table_sha256=lambda receipt: receipt.items_sha256,
    repair="run again",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    folder: Path
    receipt: TaskReceipt
    reused: bool


def run_suite(request: Request) -> Result:
    """Run a suite, or give back the finished run of exactly this question."""
    path = find_suite(request.suite)
    suite = load_suite(path)
    lock = load_lock(path, suite)
    sources, missing = find_sources(suite, request.data)
    subject = find_subject(request)
    answers_key = json_digest(model_key(request, subject))
    key = json_digest({"answers": answers_key} | _question_key(request, suite, sources, missing))
    part = f"-limit{request.limit}" if request.limit else ""
    folder = request.out or folder_name(subject.located.name, f"tasks-{suite.name}", key=key, partial=part)
    with folder_lock(folder):
        if done := finished(folder, key, TASKS):
            return Result(folder=folder, receipt=done, reused=True)
        receipt = _run(request, suite, lock, sources, missing, subject, folder, key, answers_key)
    return Result(folder=folder, receipt=receipt, reused=False)


def seal(name: str, data: Path | None) -> tuple[Path, SuiteLock]:
    """Write the seal of a suite: all prompts that its data give, hashed without a model; else its definitions."""
    from harness.tasks.evaluating import quiet_lm_eval, seal_suite

    path = find_suite(name)
    suite = load_suite(path)
    sources, missing = find_sources(suite, data)
    with tempfile.TemporaryDirectory() as place, quiet_lm_eval():
        loaded = load_what_is_there(suite, sources, missing, Path(place) / "documents")
        names = [entry.task for entry in loaded.missing]
        definitions = load_definitions(suite, names, Path(place) / "definitions")
        lock = seal_suite(suite, loaded, definitions, versions()["lm_eval"])
    return save_lock(path, lock), lock


def _question_key(
    request: Request, suite: Suite, sources: dict[str, Source], missing: Sequence[Missing]
) -> dict[str, Any]:
    return {
        "suite": suite.sha256,
        "limit": request.limit,
        "data": {name: [source.kind, source.sha256] for name, source in sources.items()},
        "missing": [entry.task for entry in missing],
    }


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
    from harness.tasks.evaluating import evaluate_suite, quiet_lm_eval

    started = time.time()
    quiet_transformers()
    with ExitStack() as stack:
        stack.enter_context(quiet_lm_eval())
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loaded = load_tasks(suite, sources, missing, place)
        answers = Answers(folder, answers_key)
        already = len(answers)
        lm, identity, checks = open_subject(request, subject, answers)
        samples, metrics, sealed = evaluate_suite(lm, suite, loaded, lock, limit=request.limit)
        circumstances = Circumstances(
            key=key, suite=suite, loaded=loaded, identity=identity, checks=checks, sealed=sealed, limit=request.limit
        )
        receipt = build_receipt(folder, circumstances, samples, metrics, lm)
    answers.discard()
    write_run(folder, started, items=receipt.items, answers_kept_from_before=already)
    return receipt
