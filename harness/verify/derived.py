"""What is made of runs, against them: a comparison value by value, a tasks folder, a card line by line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from harness.artifact.sources import open_source
from harness.artifact.summary import FILE as ARTIFACT_FILE
from harness.artifact.summary import Artifact, summarise
from harness.compare import Comparison, compare, load_comparison
from harness.compare.load import find_runs
from harness.compare.model import COMPARISON_FILE
from harness.errors import IncomparableError, Refused
from harness.records import load_json
from harness.report.card import FOLDER
from harness.report.card_write import RECORD, check_card, parts_of, read_record
from harness.report.words import worded
from harness.tasks.items import read_items
from harness.tasks.receipt import TASKS_FILE, Count, TaskReceipt, TaskResult, load_receipt, pool
from harness.verify.run import Finding, Outcome, differences, verify_run, verify_seal

#: What a tokenizer adds for the reader; it takes no part in any number.
DECODED = "texts"


def verify_comparison(folder: Path, *, runs: Sequence[Path] = (), panel: Path | None = None) -> Outcome:
    """Check a comparison; its runs are found by their keys in ``runs``, in the folder, and beside it."""
    c = load_comparison(folder, checked=False)
    outcome = Outcome(name=" against ".join(arm.name for arm in reversed(c.arms)))
    verify_seal(outcome, folder / COMPARISON_FILE)
    found = find_runs(folder, runs)
    keys = [arm.key for arm in c.arms] + [r.key for r in c.references]
    missing = [name for name, key in zip(_names(c), keys, strict=True) if key not in found]
    if missing:
        outcome.unchecked_numbers.append(
            f"the numbers: the runs of {', '.join(missing)} are not here (name them with --run)"
        )
        return outcome
    for key in dict.fromkeys(keys):
        outcome.join(verify_run(found[key], panel=panel))
    outcome.compare("comparison", _plain(c), _plain(_again(c, found, panel)))
    return outcome


def _names(c: Comparison) -> list[str]:
    return [arm.name for arm in c.arms] + [r.name for r in c.references]


def _again(c: Comparison, found: dict[str, Path], panel: Path | None) -> Comparison:
    floor = next((found[r.key] for r in c.references if r.kind == "floor"), None)
    anchors = [found[r.key] for r in c.references if r.kind == "anchor"]
    return worded(compare([found[arm.key] for arm in c.arms], panel=panel, floor=floor, anchors=anchors))


def _plain(c: Comparison) -> dict[str, object]:
    """comparison.json without what depends on when and with which tokenizer it was written."""
    record = c.model_dump(exclude={"seal"})
    for position in record["worst"]:
        position.pop(DECODED)
    if record["registration"]:
        record["registration"].pop("lead_time")
    return record


# ---- a tasks folder: accuracies and standard errors again from the items, groups again from their tasks --------------


def verify_tasks(folder: Path) -> Outcome:
    """Check tasks.json against items.parquet; without items, groups and errors against the counts of their tasks."""
    receipt = load_receipt(folder, checked=False)
    outcome = Outcome(name=f"tasks of {receipt.name}")
    verify_seal(outcome, folder / TASKS_FILE)
    try:
        items = read_items(folder, receipt)
    except (Refused, IncomparableError) as error:
        outcome.findings.append(Finding(where="items.parquet", stated=receipt.items_sha256, found=error.what))
        return outcome
    if items is None:
        outcome.unchecked_numbers.append("counts of the tasks: no items were published")
    else:
        outcome.compare("items", receipt.items, items.num_rows)
    again = {result.name: _results_again(receipt, result, items) for result in receipt.results}
    stated = {
        result.name: {field: getattr(result, field) for field in again[result.name]} for result in receipt.results
    }
    outcome.compare("results", stated, again)
    return outcome


def _results_again(receipt: TaskReceipt, result: TaskResult, items: pa.Table | None) -> dict[str, float | int | None]:
    counts = [_count(leaf, items) for leaf in receipt.leaves(result.name)]
    pooled = pool(counts)
    found: dict[str, float | int | None] = {
        "n": pooled.n,
        "correct": pooled.correct,
        "value": pooled.accuracy,
        "stderr": pooled.stderr if result.kind == "group" else counts[0].stderr,
    }
    return found | ({"macro": pooled.macro} if result.macro is not None else {})


def _count(leaf: TaskResult, items: pa.Table | None) -> Count:
    """Right answers of one task, under the filter of its primary metric."""
    if items is None:
        return Count(leaf.correct, leaf.n)
    wanted = leaf.metric.partition(",")[2] or "none"
    columns = (items[name].to_pylist() for name in ("task", "filter", "correct"))
    right = [correct for task, name, correct in zip(*columns, strict=True) if task == leaf.name and name == wanted]
    return Count(sum(right), len(right))


# ---- a card: rendered again, line by line; then the receipts beside it -----------------------------------------------


def verify_card(
    folder: Path, *, runs: Sequence[Path] = (), panel: Path | None = None, checkpoint: Path | None = None
) -> Outcome:
    """Check README.md and everything behind it that lies in ``folder`` or is named in ``runs``."""
    record = read_record(folder, checked=False)
    receipts, tasks = ([folder / FOLDER / name for name in names] for names in (record.receipts, record.tasks))
    outcome = Outcome(name=f"card {folder.resolve().name}")
    verify_seal(outcome, folder / RECORD)
    stale = check_card(parts_of(record, folder), record.options, folder, tasks=tasks)
    for line in stale:
        stated, found = (line[1:], "") if line.startswith("-") else ("", line[1:])
        outcome.findings.append(Finding(where="README.md", stated=stated or "nothing", found=found or "nothing"))
    if not stale:
        outcome.checked.append("README.md says what the receipts beside it give")
    nearby = [*runs, *sorted((folder / FOLDER).glob("*/"))]
    known = [run for run in nearby if (run / "measurement.json").is_file()]
    for receipt in receipts:
        if (receipt / COMPARISON_FILE).is_file():
            outcome.join(verify_comparison(receipt, runs=known, panel=panel))
        elif (receipt / "positions.parquet").is_file():
            outcome.join(verify_run(receipt, panel=panel))
        else:
            outcome.unchecked_numbers.append(f"{receipt.name}: its positions.parquet is not here")
    for folder_of_tasks in tasks:
        outcome.join(verify_tasks(folder_of_tasks))
    if (folder / FOLDER / ARTIFACT_FILE).is_file():
        _verify_artifact(outcome, folder / FOLDER, checkpoint)
    return outcome


def _verify_artifact(outcome: Outcome, home: Path, checkpoint: Path | None) -> None:
    """The receipt of what the quant holds, counted again from its headers where its folder is named."""
    verify_seal(outcome, home / ARTIFACT_FILE)
    if checkpoint is None:
        outcome.unchecked.append(f"{ARTIFACT_FILE}: name the quant's folder with --checkpoint")
        return
    stated = load_json(home / ARTIFACT_FILE, Artifact, "make it again with `fidelity artifact show`", seal=False)
    # The folder's other files, such as the card itself, come and go.
    other = {"seal", "source", "file_bytes"}
    was, now = (one.model_dump(exclude=other) for one in (stated, summarise(open_source(str(checkpoint)))))
    found = differences(was, now, ARTIFACT_FILE)
    outcome.findings += found
    if not found:
        outcome.checked.append(f"{ARTIFACT_FILE}: counted again from {checkpoint.name}'s headers")
