"""The card's benchmark table where the teacher ran the benchmark too: its column, and flips against its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.compare.task_pairing import load_tasks
from harness.errors import IncomparableError, UsageError
from harness.report.frontmatter import index_results
from harness.report.task_tables import task_table
from tests.tasks.made_runs import choice_item, outcome_item, side, write_run

ARMS = [("a", "a" * 64), ("b", "b" * 64)]
TEACHER = ("t", "f" * 64)
#: Choices of ten items with four choices, 0 is right: 6 right; then 2 lost, 1 won, 1 wrong another way.
OF_TEACHER = [0, 0, 0, 0, 0, 0, 1, 1, 2, 3]
OF_SUBJECT = [0, 0, 0, 0, 1, 2, 0, 2, 2, 3]


def answered(choices: list[int]) -> list[dict[str, Any]]:
    """Items of which each choice is a nat ahead of the others."""
    return [choice_item("x", n, [-1.0 if i == c else -2.0 for i in range(4)]) for n, c in enumerate(choices)]


def run(folder: Path, name: str, digest: str, choices: list[int], **change: Any) -> Path:
    model = side(name, weights_sha256=digest)
    return write_run(folder / name, f"{name}-run", {"x": answered(choices)}, model=model, **change)


def three(folder: Path, **change: Any) -> list[Path]:
    """Baseline, subject, teacher."""
    sides = (*ARMS, TEACHER)
    return [
        run(folder, *found, choices, **change)
        for found, choices in zip(sides, (OF_TEACHER, OF_SUBJECT, OF_TEACHER), strict=True)
    ]


def test_the_teacher_has_a_column_and_its_answers_a_table(tmp_path: Path) -> None:
    """Counted by hand: two right to wrong, one wrong to right, one wrong to another wrong, six the same."""
    table = task_table(load_tasks(three(tmp_path)), ARMS, "b", teacher=TEACHER)
    assert table is not None and (table.arms, table.teacher) == (("a", "b"), "t-run")
    [line] = table.lines
    assert line.teacher.startswith("0.6000 ± ") and [v[:6] for v in line.values] == ["0.6000", "0.5000"]
    assert line.flips.startswith("2 lost, 1 won of 10")
    a, b = table.agreement
    assert (a[1], a[2][:5], *a[3:6]) == ("a", "100 %", "0", "0", "0")
    assert (b[1], b[2][:6], *b[3:6]) == ("b", "60.0 %", "2", "1", "1")
    # Four of ten items moved their best choice: p * 1 nat forth and back, p = e / (e + 3) - 1 / (e + 3).
    assert b[6].startswith(f"{0.4 * (2.718281828 - 1) / (2.718281828 + 3):.2f}"[:4])
    assert [result.value for result in index_results(table.subject)] == [0.5], "only the subject's goes to the Hub"


def test_without_the_teachers_run_there_is_neither(tmp_path: Path) -> None:
    table = task_table(load_tasks(three(tmp_path)[:2]), ARMS, "b", teacher=TEACHER)
    assert table is not None and table.teacher == "" and table.agreement == []


def test_other_items_than_the_teachers_are_a_note(tmp_path: Path) -> None:
    folders = three(tmp_path)
    write_run(folders[2], "t-run", {"x": answered(OF_TEACHER[:9])}, model=side("t", weights_sha256=TEACHER[1]))
    table = task_table(load_tasks(folders), ARMS, "b", teacher=TEACHER)
    assert table is not None and table.agreement == []
    assert [note for note in table.notes if "not the teacher's" in note] == [
        "a: its items of x are not the teacher's",
        "b: its items of x are not the teacher's",
    ]


def test_a_teacher_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    """Another number of shots is another benchmark."""
    folders = three(tmp_path)
    run(tmp_path, *TEACHER, OF_TEACHER, leaf={"num_fewshot": 5})
    with pytest.raises(IncomparableError, match="num_fewshot of x is 5 for t-run, 0 for a-run"):
        task_table(load_tasks(folders), ARMS, "b", teacher=TEACHER)


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the tasks of t-run belong to none of a, b, and it is not their teacher"):
        task_table(load_tasks(three(tmp_path)), ARMS, "b", teacher=("u", "0" * 64))


def test_a_run_of_the_teacher_as_an_arm_is_both(tmp_path: Path) -> None:
    """The self measurement: the candidate is the teacher."""
    table = task_table(load_tasks(three(tmp_path)[2:]), [TEACHER], "t", teacher=TEACHER)
    assert table is not None and table.arms == ("t",) and [line[2][:5] for line in table.agreement] == ["100 %"]


def test_notes_that_all_share_stand_once(tmp_path: Path) -> None:
    shared = task_table(load_tasks(three(tmp_path, notes=["micro"])), ARMS, "b", teacher=TEACHER)
    assert shared is not None and shared.notes == ["micro"]
    run(tmp_path, *TEACHER, OF_TEACHER)
    two = task_table(load_tasks([tmp_path / n for n in "abt"]), ARMS, "b", teacher=TEACHER)
    assert two is not None and two.notes == ["a-run, b-run: micro"]


def test_development_questions_are_not_called_the_benchmark(tmp_path: Path) -> None:
    """Neither on the card nor for the Hub."""
    rows = {"mmlu": [outcome_item("mmlu", n, n % 2 == 0) for n in range(8)]}
    folder = write_run(tmp_path / "a", "a", rows, leaf={"data": "wheel"})
    table = task_table(load_tasks([folder]), ARMS, "a")
    assert table is not None and table.lines[0].name == "mmlu (all 8 development questions)"
    [result] = index_results(table.subject)
    assert result.split == "dev" and result.args["selection"] == "all 8 development questions"
