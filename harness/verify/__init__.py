"""`fidelity verify`: everything that a receipt states, computed again from positions.parquet and the seals.

On a CPU and without weights, so that a stranger can check a published result. Floats may differ in the last digits
between machines; everything else must be equal. What cannot be checked here is said, never passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.verify.derived import verify_card, verify_comparison, verify_tasks
from harness.verify.run import Finding, Outcome, as_json, verify_run

__all__ = ["Finding", "Outcome", "as_json", "verify", "verify_card", "verify_comparison", "verify_run", "verify_tasks"]


def verify(path: Path, *, runs: Sequence[Path] = (), panel: Path | None = None) -> Outcome:
    """Check a run, a comparison, a tasks folder or a card's folder, whichever ``path`` is (or a file in it)."""
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise UsageError(f"{path.name} is not there", "name a run folder, a comparison folder or a card's folder")
    if (folder / "comparison.json").is_file():
        return verify_comparison(folder, runs=runs, panel=panel)
    if (folder / "measurement.json").is_file():
        return verify_run(folder, panel=panel)
    if (folder / "tasks.json").is_file():
        return verify_tasks(folder)
    return verify_card(folder, runs=runs, panel=panel)
