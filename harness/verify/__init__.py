"""`fidelity verify`: everything that a receipt states, computed again from positions.parquet and the seals.

On a CPU and without weights, so that a stranger can check a published result. Floats may differ in the last digits
between machines; everything else must be equal. What cannot be checked here is said, never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from harness.errors import Refused, UsageError
from harness.records import NO_SEAL, broken_seal
from harness.store import write_receipt
from harness.verify.derived import verify_card, verify_comparison, verify_tasks
from harness.verify.run import Finding, Outcome, as_json, verify_run
from harness.verify.signature import sealed_files

__all__ = [
    "Finding",
    "Outcome",
    "as_json",
    "seal_unsealed",
    "verify",
    "verify_card",
    "verify_comparison",
    "verify_run",
    "verify_tasks",
]


def seal_unsealed(path: Path, outcome: Outcome) -> list[str]:
    """Seal the records below ``path`` that are older than seals, where nothing else differs; the names of those sealed.

    Raises:
        Refused: something differs, so there is nothing that a seal could vouch for.
    """
    others = [finding for finding in outcome.findings if finding.found != NO_SEAL]
    if others:
        raise Refused(f"{others[0].where} differs, so {path.name} is not sealed", "make it again")
    folder = path if path.is_dir() else path.parent
    done = []
    for file in sealed_files(folder):
        if broken_seal(file) == NO_SEAL:
            document = json.loads(file.read_text(encoding="utf-8"))
            for part in document if isinstance(document, list) else [document]:
                part.setdefault("seal", "")
            write_receipt(file, document)
            done.append(file.relative_to(folder).as_posix())
    return done


def verify(
    path: Path, *, runs: Sequence[Path] = (), panel: Path | None = None, checkpoint: Path | None = None
) -> Outcome:
    """Check a run, a comparison, a tasks folder or a card's folder, whichever ``path`` is (or a file in it).

    Args:
        checkpoint: the quant's folder, from which a card's artifact receipt is counted again.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise UsageError(f"{path.name} is not there", "name a run folder, a comparison folder or a card's folder")
    if (folder / "comparison.json").is_file():
        return verify_comparison(folder, runs=runs, panel=panel)
    if (folder / "measurement.json").is_file():
        return verify_run(folder, panel=panel)
    if (folder / "tasks.json").is_file():
        return verify_tasks(folder)
    return verify_card(folder, runs=runs, panel=panel, checkpoint=checkpoint)
