"""`fidelity compare` finds the task runs of the measured weights, and takes task runs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.compare import compare
from harness.compare.task_model import load_task_comparisons
from harness.compare.tasks import tasks_of_comparison
from harness.digest import json_digest
from harness.registration import Registration
from tests.compare.fake_arms import World
from tests.tasks.made_runs import outcome_item, side, write_run


def task_run(folder: Path, model: str, wrong: set[int], **change: Any) -> Path:
    rows = {"t": [outcome_item("t", n, n not in wrong) for n in range(40)]}
    model_side = side(model, weights_sha256=json_digest(model))
    return write_run(folder, f"{model}-checkpoint", rows, model=model_side, **change)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two measurements, and task runs of both and of the teacher beside them."""
    world = World(rows=4, length=40)
    made = [
        world.run(tmp_path / f"run-{name}", name, world.columns(noise, 3)) for name, noise in (("A", 0.3), ("B", 0.2))
    ]
    task_run(tmp_path / "tasks-a", "A", {1, 2})
    task_run(tmp_path / "run-B" / "tasks", "B", {1, 2, 3})
    task_run(tmp_path / "tasks-teacher", "teacher", {1})
    return made


def test_task_runs_are_found_by_their_weights(runs: list[Path], tmp_path: Path) -> None:
    task_run(tmp_path / "other-suite", "A", set(), suite="other")
    task_run(tmp_path / "partial", "A", set(range(9)), status="partial")
    found = tasks_of_comparison(compare(runs), runs)
    assert [made.suite for made in found] == ["made"]
    made = found[0]
    assert made.arms == ["A", "B"] and made.teacher == "teacher-checkpoint"
    assert [arm.correct for arm in made.tasks[0].arms] == [38, 37]
    assert (made.tasks[0].pairs[0].baseline, made.tasks[0].pairs[0].lost) == ("A", 1)
    assert [(arm.arm, arm.right_to_wrong) for arm in made.tasks[0].teacher] == [("A", 1), ("B", 2)]


def test_without_a_run_for_every_arm_there_is_no_table(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "tasks-a" / "tasks.json").unlink()
    assert tasks_of_comparison(compare(runs), runs) == []


def test_the_command_shows_and_writes_them(runs: list[Path], tmp_path: Path) -> None:
    from harness.cli import app

    out = tmp_path / "out"
    shown = CliRunner().invoke(app, ["compare", *map(str, runs), "-o", str(out)], terminal_width=200)
    assert shown.exit_code == 0, shown.output
    assert "t: B against A is within noise" in " ".join(shown.output.split())
    report = (out / "report.md").read_text()
    assert "### B - A, item by item" in report and "Against the teacher teacher-checkpoint" in report
    assert load_task_comparisons(out)[0].arms == ["A", "B"]


def test_task_runs_alone(runs: list[Path], tmp_path: Path) -> None:
    from harness.cli import app

    folders = [tmp_path / "tasks-a", tmp_path / "run-B" / "tasks"]
    arguments = ["compare", *map(str, folders), "--teacher-tasks", str(tmp_path / "tasks-teacher")]
    out = tmp_path / "alone"
    shown = CliRunner().invoke(app, [*arguments, "-o", str(out)], terminal_width=200)
    assert shown.exit_code == 0, shown.output
    assert "B-checkpoint against A-checkpoint" in " ".join(shown.output.split())
    assert "Against the teacher" in (out / "report.md").read_text()
    record = CliRunner().invoke(app, [*arguments, "-o", str(out), "--json"])
    assert record.output == (out / "task-comparison.json").read_text()


def test_registered_tasks_are_held_to(tmp_path: Path) -> None:
    """Another limit than registered is a deviation, and a bar on a task is decided by the task."""
    registration = Registration.model_validate(
        {
            "primary": {"metric": "kl_mean", "margin": 0.1},
            "tasks": [{"name": "t", "limit": 20}, {"name": "u"}],
            "bars": [{"name": "not below the base", "metric": "tasks.t", "relation": ">=", "reference": "baseline"}],
        }
    )
    block = {"sha256": registration.sha256, "content": registration.model_dump(mode="json")}
    world = World(rows=4, length=40, registration=block)
    runs = [
        world.run(tmp_path / f"run-{name}", name, world.columns(noise, 3)) for name, noise in (("A", 0.3), ("B", 0.2))
    ]
    task_run(tmp_path / "tasks-a", "A", {1, 2}, limit={"t": 40})
    task_run(tmp_path / "tasks-b", "B", {1, 2, 3}, limit={"t": 40})
    made = tasks_of_comparison(compare(runs), runs)[0]
    assert [(bar.arm, bar.name, bar.met) for bar in made.bars] == [("B", "not below the base", False)]
    assert np.isclose(made.bars[0].value or 0, 37 / 40) and np.isclose(made.bars[0].threshold or 0, 38 / 40)
    assert made.deviations == [
        "registration: task u is registered and was not run",
        "registration: task t: the first 40 items of each task, registered the first 20 items of each task",
    ]
    from harness.cli import app

    shown = CliRunner().invoke(app, ["compare", *map(str, runs), "-o", str(tmp_path / "out")], terminal_width=200)
    assert shown.exit_code == 1 and "Bars of the registration on tasks" in shown.output
