"""``fidelity tasks``: one suite for one model, in this process or behind a server -> tasks.json and items.parquet.

A run killed anywhere goes on at the first missing answer; a server that dies leaves no score behind.
"""

from __future__ import annotations

import tempfile
import time
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """A suite as it can be asked here: its seal, where its documents are, and which tasks have none."""

    suite: Suite
    lock: SuiteLock | None
    sources: dict[str, Source]
    missing: list[Missing]
    limit: int | None

    def key(self) -> dict[str, Any]:
        """All that a result depends on besides the model that is asked."""
        return {
            "suite": self.suite.sha256,
            "limit": self.limit,
            "data": {name: [source.kind, source.sha256] for name, source in self.sources.items()},
            "missing": [entry.task for entry in self.missing],
        }


def run_suite(request: Request) -> Result:
    """Run a suite, or give back the finished run of exactly this question."""
    exam = find_exam(request.suite, request.data, request.limit)
    subject = find_subject(request)
    answers_key = json_digest(model_key(request, subject))
    key = json_digest({"answers": answers_key} | exam.key())
    part = f"-limit{request.limit}" if request.limit else ""
    folder = request.out or folder_name(subject.located.name, f"tasks-{exam.suite.name}", key=key, partial=part)
    with folder_lock(folder):
        if done := finished(folder, key, TASKS):
            return Result(folder=folder, receipt=done, reused=True)
        started, answers = time.time(), Answers(folder, answers_key)
        kept = len(answers)
        receipt = _examine(request, exam, subject, answers, folder, key)
        answers.discard()
        write_run(folder, started, items=receipt.items, answers_kept_from_before=kept)
    return Result(folder=folder, receipt=receipt, reused=False)


def find_exam(name: str, data: Path | None, limit: int | None = None) -> Exam:
    """Find a suite, its seal and its documents.

    Args:
        data: a folder with local documents.
        limit: the first so many documents of each task, instead of the suite's own limits.
    """
    path = find_suite(name)
    suite = load_suite(path)
    lock = load_lock(path, suite)
    sources, missing = find_sources(suite, data)
    return Exam(suite=suite, lock=lock, sources=sources, missing=missing, limit=limit)


def _examine(request: Request, exam: Exam, subject: Subject, answers: Answers, folder: Path, key: str) -> TaskReceipt:
    """Load the tasks, open the model, ask what is not answered yet, and write the receipt."""
    from harness.tasks.evaluating import evaluate_suite, quiet_lm_eval

    quiet_transformers()
    with tempfile.TemporaryDirectory() as place, quiet_lm_eval():
        loaded = load_tasks(exam.suite, exam.sources, exam.missing, Path(place))
        lm, identity, checks = open_subject(request, subject, answers)
        samples, metrics, sealed = evaluate_suite(lm, exam.suite, loaded, exam.lock, limit=exam.limit)
        circumstances = Circumstances(
            key=key,
            suite=exam.suite,
            loaded=loaded,
            identity=identity,
            checks=checks,
            sealed=sealed,
            limit=exam.limit,
        )
        return build_receipt(folder, circumstances, samples, metrics, lm)


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
