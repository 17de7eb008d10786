"""A card against the receipts beside it: rendered again, line by line; then the receipts themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.report.card import FOLDER
from harness.report.card_write import check_card, parts_of, read_record
from harness.verify.comparison import verify_comparison
from harness.verify.outcome import Finding, Outcome
from harness.verify.run import verify_run
from harness.verify.tasks import verify_tasks


def verify_card(folder: Path, *, runs: Sequence[Path] = (), panel: Path | None = None) -> Outcome:
    """Check README.md and everything behind it that lies in ``folder`` or is named in ``runs``."""
    record = read_record(folder)
    receipts, tasks = ([folder / FOLDER / name for name in names] for names in (record.receipts, record.tasks))
    outcome = Outcome(name=f"card {folder.resolve().name}")
    stale = check_card(parts_of(record, folder), record.options, folder, tasks=tasks)
    for line in stale:
        stated, found = (line[1:], "") if line.startswith("-") else ("", line[1:])
        outcome.findings.append(Finding(where="README.md", stated=stated or "nothing", found=found or "nothing"))
    if not stale:
        outcome.checked.append("README.md says what the receipts beside it give")
    nearby = [*runs, *sorted((folder / FOLDER).glob("*/"))]
    known = [run for run in nearby if (run / "measurement.json").is_file()]
    for receipt in receipts:
        if (receipt / "comparison.json").is_file():
            outcome.join(verify_comparison(receipt, runs=known, panel=panel))
        elif (receipt / "positions.parquet").is_file():
            outcome.join(verify_run(receipt, panel=panel))
        else:
            outcome.unchecked.append(f"{receipt.name}: its positions.parquet is not here")
    for folder_of_tasks in tasks:
        outcome.join(verify_tasks(folder_of_tasks))
    return outcome
