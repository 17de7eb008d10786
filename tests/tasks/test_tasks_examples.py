"""The committed task runs of the example quants: real, whole, sealed, without texts, and their comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.compare.task_model import load_task_comparisons
from harness.compare.task_pairing import load_tasks
from harness.compare.tasks import compare_task_runs
from harness.report.card import Options, build_card, collect
from harness.report.task_tables import markdown
from harness.report.words import worded_tasks
from harness.tasks.local import development_questions
from harness.tasks.receipt import load_receipt
from harness.tasks.suite import load_lock, load_suite
from tests.tasks.made_data import content

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "reports" / "examples" / "tasks"
BASELINE, OTHER, TEACHER = "mlp-2bit", "mlp-2bit-10to19at3", "teacher"


@pytest.mark.parametrize("name", [BASELINE, OTHER, TEACHER])
def test_runs_are_whole_and_sealed(name: str) -> None:
    path = ROOT / "panels" / "suites" / "mmlu-dev.toml"
    suite = load_suite(path)
    lock, receipt = load_lock(path, suite), load_receipt(EXAMPLES / name)
    assert lock is not None and receipt.status == "complete" and receipt.items == 281
    assert receipt.suite.sealed and receipt.suite.sha256 == suite.sha256
    for task, sealed in lock.tasks.items():
        result = receipt.result(task)
        assert result is not None and (result.n, result.prompts_sha256) == (sealed.n, sealed.prompts_sha256)


def test_the_comparison_is_what_the_runs_give() -> None:
    found = compare_task_runs([EXAMPLES / BASELINE, EXAMPLES / OTHER], teacher=EXAMPLES / TEACHER)
    assert load_task_comparisons(EXAMPLES / "comparison") == [worded_tasks(found)]
    assert (EXAMPLES / "comparison" / "report.md").read_text() == markdown([found])


def test_the_card_section_is_what_the_runs_give() -> None:
    """Task benchmarks as ``fidelity card RUN RUN --tasks ... `` writes it: n, paired verdict, flips, agreement."""
    parts = collect([EXAMPLES.parent / name for name in (BASELINE, OTHER)])
    tasks = load_tasks([EXAMPLES / name for name in (BASELINE, OTHER, TEACHER)])
    block = build_card(parts, Options(pictures=False), pictures=[], tasks=tasks).block
    section = block[block.index("## Task benchmarks") : block.index("## How it was measured")]
    assert section.strip() + "\n" == (EXAMPLES / "card-section.md").read_text()


def test_no_question_is_in_them() -> None:
    """A benchmark that is printed somewhere is trained on."""
    texts = [t for rows in development_questions().values() for r in rows for t in (r["question"], *r["choices"])]
    long = {text[:40] for text in texts if len(text) >= 20}
    assert len(long) > 400
    everything = "\n".join(content(file) for file in EXAMPLES.rglob("*") if file.is_file())
    assert "prompt_hash" in everything and [text for text in long if text in everything] == []
