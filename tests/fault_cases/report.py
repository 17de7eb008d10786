"""What a table, a card or a receipt may say."""

from __future__ import annotations

import importlib.metadata
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.cli.doctor import required_packages
from harness.compare import compare
from harness.compare.tasks import compare_task_runs
from harness.errors import IncomparableError
from harness.exl3.census import take_census
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.headers import TensorHeader
from harness.registration import Registration, task_deviations
from harness.report.card import Options, build_card, collect, group_runs
from harness.report.card_tables import quality
from harness.report.comparison_report import markdown
from harness.report.run_report import report_text
from harness.report.tables import load_positions
from harness.report.words import task_warnings, warnings
from tests.compare.fake_arms import World, side
from tests.fault_cases.entry import Fault
from tests.report.fake_run import make_frame, write_run
from tests.tasks.made_runs import outcome_item
from tests.tasks.made_runs import write_run as write_tasks

WORLD = World(rows=12, length=40)


def pair(folder: Path, *, a: World = WORLD, b: World = WORLD, **change: Any) -> list[Path]:
    """Two run folders; ``change`` replaces fields of the second measurement."""
    return [a.run(folder / "a", "A", a.columns(0.3, 2)), b.run(folder / "b", "B", b.columns(0.2, 3), **change)]


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(IncomparableError) as error:
        compare(pair(folder, **options))
    return error.value.what


def card_of(runs: list[Path]) -> str:
    return build_card(collect(runs), Options(), pictures=[]).block


def pasted_together(folder: Path) -> None:
    """Another panel, teacher, lane: refused by the table, apart on a card; another KV dtype: said beside the table."""
    teacher = World(rows=12, length=40, teacher={"weights_sha256": "9" * 64})
    assert "same panel" in refused(folder / "panel", b=World(rows=12, length=40, panel_sha256="b" * 64))
    assert "same teacher (weights_sha256)" in refused(folder / "teacher", b=teacher)
    assert "same lane: 'weights' and 'served'" in refused(folder / "lane", lane="served")
    assert len(group_runs([folder / "lane" / "a", folder / "lane" / "b", folder / "teacher" / "b"])) == 3
    kv = [side("X", settings={"kv_dtype": kind}) for kind in ("bf16", "fp8")]
    runs = [WORLD.run(folder / n, n, WORLD.columns(0.3, 2), candidate=s) for n, s in zip("xy", kv, strict=True)]
    assert "x and y ran with another kv_dtype (bf16 and fp8): part of the difference" in markdown(compare(runs))


def mixed_estimators(folder: Path) -> None:
    """A lower bound and an exact value: refused in one comparison, two tables on a card, each named."""
    assert "same estimator: 'exact' and 'lower_bound'" in refused(folder / "x", estimator="lower_bound")
    for name, change in (("exact", {}), ("bound", {"estimator": "lower_bound", "lane": "served"})):
        write_run(folder / name, make_frame(rows=3, length=40), name=name, **change)
    block = card_of([folder / "exact", folder / "bound"])
    _, exact, bound = block.split("## How it was measured")[0].split("\n### ")
    assert "KL mean (lower bound)" in bound and "lower bound" not in exact
    assert "weights lane, exact" in exact and "served lane, lower bound" in bound


def other_panel(folder: Path) -> None:
    """0.1219 on one panel and 0.3838 on another: refused with both hashes."""
    other = World(rows=12, length=40, panel_sha256="b" * 64)
    assert refused(folder, b=other) == f"A and B do not have the same panel: {'a' * 16} and {'b' * 16}"


def directional_claim(folder: Path) -> None:
    """A weights-only exact KL is nowhere called a bound of anything."""
    found = write_run(folder, make_frame(rows=4, length=40))
    text = report_text(found, load_positions(folder), []) + card_of([folder])
    assert "lower bound" not in text and "at least" not in text
    assert "kernels, KV-cache type and batching of an engine are not in this number" in text
    bound = write_run(folder / "b", make_frame(rows=4, length=40), estimator="lower_bound", lane="served")
    assert "it is at least this number" in report_text(bound, load_positions(folder / "b"), [])


def bits_per_weight(folder: Path) -> None:
    """31 layers at K = 2 and 12 at K = 3: counted 2.279, whatever was derived; what config says is held against it."""
    three = (3, 4, 5, 6, 24, 27, 30, 33, 36, 39, 42, 44)
    tensors = {}
    for layer in range(3, 46):
        for leaf, (inputs, outputs) in {"up_proj": (4096, 1024), "down_proj": (1024, 4096)}.items():
            name = f"model.layers.{layer}.mlp.experts.0.{leaf}"
            bits = 3 if layer in three else 2
            parts: dict[str, tuple[str, tuple[int, ...], int]] = {
                "trellis": ("I16", (inputs // 16, outputs // 16, 16 * bits), 2),
                "suh": ("F16", (inputs,), 2),
                "svh": ("F16", (outputs,), 2),
                "mcg": ("I32", (), 4),
            }
            tensors |= {
                f"{name}.{part}": TensorHeader(
                    name=f"{name}.{part}", dtype=d, shape=s, shard="a", start=0, bytes=math.prod(s) * size
                )
                for part, (d, s, size) in parts.items()
            }
    proof = "model.layers.45.eh_proj.weight"
    tensors[proof] = TensorHeader(name=proof, dtype="BF16", shape=(2, 4), shard="a", start=0, bytes=16)
    claims = {"quant_method": "exl3", "bits": 2.31}
    config = {"num_hidden_layers": 45, "quantization_config": claims}
    census = take_census(Checkpoint(name="x", tensors=tensors, config=config))
    assert census.routed is not None and census.routed.mean_k == pytest.approx((31 * 2 + 12 * 3) / 43, abs=1e-12)
    assert census.routed.bits_per_weight == pytest.approx(2.279 + 8 * (2 * 5120 + 4) / (4096 * 1024), abs=1e-3)
    wrong = Checkpoint(name="x", tensors=tensors, config=config | {"quantization_config": claims | {"bits": 2.05}})
    # The claim is about the 42 layers of the text model; the 43rd is the one for multi-token prediction.
    average = (30 * 2 + 12 * 3) / 42
    assert take_census(wrong).mismatches == [f"config says 2.05 bits on average, the tensors hold {average:.3f}"]


def metrics_disagree(folder: Path) -> None:
    """Lower KL and lower top-1 agreement: both with interval and verdict, and what got worse by name."""
    base = WORLD.columns(0.3, 2)
    fewer = base["agree"] & (np.arange(len(base["agree"])) % 9 > 0)
    runs = [
        WORLD.run(folder / "a", "A", base),
        WORLD.run(folder / "b", "B", base | {"kl": 0.5 * base["kl"], "agree": fewer}),
    ]
    found = compare(runs)
    by_name = {d.metric: d for d in found.pairs[0].differences}
    assert (by_name["kl_mean"].verdict, by_name["top1_agreement"].verdict) == ("better", "worse")
    table = quality(found, "B")
    shown = {row.name: row for row in table.rows}
    assert "better" in shown["KL mean (primary)"].verdict and "worse" in shown["top-1 agreement"].verdict
    assert shown["top-1 agreement"].worse and shown["top-1 agreement"].interval
    assert any(line.startswith("top-1 agreement (") for line in table.got_worse)
    judged = [r for r in table.rows if r.verdict not in ("", "description")]
    assert len(judged) >= 9 and all(row.interval for row in judged)
    # Two benchmarks, one item up and one item down: no winner.
    asked = {"a": {"s": 1, "t": 1}, "b": {"s": 0, "t": 2}}
    tasks = []
    for name, right in asked.items():
        items = {task: [outcome_item(task, i, i < k) for i in range(100)] for task, k in right.items()}
        tasks.append(write_tasks(folder / f"tasks-{name}", name, items))
    told = compare_task_runs(tasks)
    assert "b - a: the tasks point different ways, within noise" in task_warnings(told)
    assert [task.pairs[0].verdict for task in told.tasks] == ["within noise", "within noise"]


def blind_spot(folder: Path) -> None:
    """Rows, positions and the positions' range are stated: a fault past them cannot be seen."""
    found = write_run(folder, make_frame(rows=4, length=201))
    text = report_text(found, load_positions(folder), [])
    assert "4 of 4 rows, 800 scored positions" in text
    assert "| 0-19 |" in text and "| 180-199 |" in text
    assert "Long generations" in text and "The served model" in text
    card = card_of([folder])
    assert "4 of 4 rows, 800 scored positions, at most 201 tokens a row" in card
    assert "Longer contexts: nothing past token 201 of a row was scored." in card


def preregistration(folder: Path) -> None:
    """A run with another limit, fewer rows or another metric than registered is a printed deviation."""
    plan = Registration.model_validate(
        {
            "primary": {"metric": "kl_mean", "margin": 0.1, "margin_kind": "relative"},
            "rows": 12,
            "tasks": [{"name": "mmlu"}, {"name": "gpqa"}],
        }
    )
    assert task_deviations(plan, {"mmlu": 20}) == [
        "task gpqa is registered and was not run",
        "task mmlu: the first 20 items of each task, registered all items",
    ]
    assert task_deviations(plan, {"mmlu": None, "gpqa": None}) == []
    block = {"sha256": plan.sha256, "content": plan.model_dump(mode="json"), "commit": None, "committed": None}
    world = World(rows=12, length=40, registration=block)
    runs = [world.run(folder / n, n, world.columns(0.3, 2), rows=list(range(5))) for n in "ab"]
    found = compare(runs)
    assert found.deviations == ["a: 5 rows measured, 12 registered", "b: 5 rows measured, 12 registered"]
    assert "### Deviations from the registration\n\n- a: 5 rows measured, 12 registered" in markdown(found)


def over_attribution(folder: Path) -> None:
    """All that differs between two comparators is listed; no sentence names one of it as the cause."""
    other = side("B", engine="other", version="2", compute_dtype="bfloat16", settings={"batch": 8})
    found = compare(pair(folder, candidate=other))
    named = [w for w in warnings(found) if w.startswith("A and B ran with another")]
    assert [w.split()[6] for w in named] == ["engine", "version", "compute_dtype", "batch"]
    text = markdown(found).lower()
    assert not any(word in text for word in ("because", "due to", "caused by", "explained by", "owing to"))
    assert {"top1_agreement", "kl_mean"} <= {d.metric for d in found.pairs[0].differences}


def partial_install(folder: Path) -> None:
    """One of the packages is missing: it has a line of its own with its install line, and the exit code is 1."""
    names = required_packages()
    assert len(names) == len(set(names)) > 20
    real, gone = importlib.metadata.version, names[4]

    def version(name: str) -> str | None:
        return None if name == gone else real(name) if name in names else None

    with mock.patch.object(sys.modules["harness.cli.doctor"], "_version", version):
        result = CliRunner().invoke(app, ["doctor"], terminal_width=200)
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.split()}
    assert set(names) <= set(lines) and result.exit_code == 1
    assert "missing" in lines[gone] and "pip install -c constraints.txt" in lines[gone]
    assert sum("missing" in lines[name] for name in names) == 1 and "1 required packages are missing" in result.output


ROWS = [
    Fault(id="A58-pasted-together", title="results of different suites in one table", check=pasted_together),
    Fault(id="B9-mixed-estimators", title="a lower bound beside an exact KL", check=mixed_estimators),
    Fault(id="B10-other-panel", title="one artifact on two panels", check=other_panel),
    Fault(id="B11-directional-claim", title="a weights-only KL called a bound", check=directional_claim),
    Fault(id="B13-bits-per-weight", title="bits per weight derived, not counted", check=bits_per_weight),
    Fault(id="B27-metrics-disagree", title="metrics that disagree within noise", check=metrics_disagree),
    Fault(id="B34-blind-spot", title="positions that a panel does not cover", check=blind_spot),
    Fault(id="B47-preregistration", title="a deviation from what was registered", check=preregistration),
    Fault(id="B55-over-attribution", title="a difference blamed on one cause", check=over_attribution),
    Fault(id="B58-partial-install", title="one package of five never installed", check=partial_install),
]
