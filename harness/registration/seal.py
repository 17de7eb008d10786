"""Sealing a registration into panel.lock.json, and what git knows about when that was done."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness.errors import PanelError, UsageError
from harness.panel.seal import find_seal, list_seals, write_lock
from harness.registration.model import FILE, Registration, load_registration
from harness.store import folder_lock, write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The commit that last changed the registration. ``changed`` says that the file differs from it today."""

    commit: str
    committed: str
    changed: bool


def write_registration(folder: Path, registration: Registration, *, replace: bool = False) -> None:
    """Write registration.toml, for `register` to seal.

    Raises:
        UsageError: the panel cannot answer it, or is not sealed.
        PanelError: another registration lies there and ``replace`` is not set.
    """
    _check_against_panel(folder, registration)
    before = load_registration(folder)
    if before is not None and before.sha256 != registration.sha256 and not replace:
        raise PanelError(
            f"{folder.name}/{FILE} is another registration ({before.sha256[:12]}; the flags give "
            f"{registration.sha256[:12]})",
            "leave the flags away to seal the file as it is; or --replace, or a copy of the panel under another name",
        )
    write_text(folder / FILE, _toml(registration))


def _toml(registration: Registration) -> str:
    """A registration's own keys; strings as JSON writes them, which TOML reads."""
    said = registration.model_dump(mode="json", exclude_defaults=True)
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in said.items() if _is_plain(value)]
    for key, value in said.items():
        if not _is_plain(value):
            tables = value if isinstance(value, list) else [value]
            for table in tables:
                lines += ["", f"[[{key}]]" if isinstance(value, list) else f"[{key}]"]
                lines += [f"{name} = {json.dumps(part, ensure_ascii=False)}" for name, part in table.items()]
    return "\n".join(lines) + "\n"


def _is_plain(value: Any) -> bool:
    """Whether a value is no table, and no list of tables."""
    return not isinstance(value, dict) and not (isinstance(value, list) and isinstance(value[0], dict))


def register(folder: Path, *, replace: bool = False) -> Registration:
    """Write the registration's SHA-256 into every seal of the panel in ``folder``.

    Raises:
        UsageError: there is no registration.toml, or the panel is not sealed.
        PanelError: another registration is sealed already and ``replace`` is not set.
    """
    registration = load_registration(folder)
    if registration is None:
        raise UsageError(
            f"{folder.name} has no {FILE}", "write one: the primary metric and its margin are enough to begin with"
        )
    _check_against_panel(folder, registration)
    seals = list_seals(folder)
    other = {lock.registration_sha256 for _, lock in seals} - {None, registration.sha256}
    if other and not replace:
        raise PanelError(
            f"panel {folder.name} is registered as {str(sorted(map(str, other))[0])[:12]}, "
            f"{FILE} is now {registration.sha256[:12]}",
            "undo the change; or --replace, which makes earlier measurements deviate from the registration",
        )
    for place, lock in seals:
        with folder_lock(place):
            sealed = lock.model_copy(update={"registration_sha256": registration.sha256})
            write_lock(place, sealed)
    return registration


def _check_against_panel(folder: Path, registration: Registration) -> None:
    """Refuse a registration that the panel cannot answer."""
    _, lock = find_seal(folder)
    if registration.rows is not None and registration.rows > lock.counts.rows:
        raise UsageError(
            f"{FILE} plans {registration.rows} rows, panel {lock.name} has {lock.counts.rows}", "correct rows"
        )
    if registration.unit == "document" and lock.unit == "row":
        raise UsageError(f"{FILE} resamples documents, panel {lock.name} has only rows", 'set unit = "row"')
    beyond = [e.row for e in registration.exclusions if e.row >= lock.counts.rows]
    if beyond:
        raise UsageError(
            f"{FILE} excludes row {beyond[0]}, panel {lock.name} has {lock.counts.rows}", "correct that row"
        )


def sealed_registration(folder: Path) -> Registration | None:
    """The registration that the panel's default seal holds; None where nothing is sealed.

    Raises:
        PanelError: registration.toml was changed after sealing, or is gone.
    """
    _, lock = find_seal(folder)
    if lock.registration_sha256 is None:
        return None
    registration = load_registration(folder)
    if registration is None or registration.sha256 != lock.registration_sha256:
        found = "gone" if registration is None else f"now {registration.sha256[:12]}"
        raise PanelError(
            f"panel {folder.name} is registered as {lock.registration_sha256[:12]}, and {FILE} is {found}",
            f"restore {FILE} from git, or register anew: fidelity panel register {folder} --replace",
        )
    return registration


def registration_block(folder: Path) -> dict[str, Any] | None:
    """Digest and content of the sealed registration of the panel in ``folder``, and its commit; None without one."""
    registration = sealed_registration(folder)
    if registration is None:
        return None
    known = provenance(folder)
    return {
        "sha256": registration.sha256,
        "content": registration.model_dump(mode="json"),
        "commit": known.commit if known else None,
        "committed": known.committed if known else None,
        "changed_since_commit": known.changed if known else None,
    }


def provenance(folder: Path) -> Provenance | None:
    """Commit and date of the registration's seal in git; None outside a repository or before the first commit."""
    shown = _git(folder, "log", "-1", "--format=%H %cI", "--", FILE)
    if not shown:
        return None
    commit, committed = shown.split()
    changed = bool(_git(folder, "status", "--porcelain", "--", FILE))
    return Provenance(commit=commit, committed=committed, changed=changed)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints, or nothing where it is not installed or ``folder`` is in no repository."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def lead_time(committed: str, started: str) -> str:
    """``3 d 4 h before the run``, or a warning when the registration is younger than the run (ISO 8601 times)."""
    seconds = (datetime.fromisoformat(started) - datetime.fromisoformat(committed)).total_seconds()
    minutes = int(abs(seconds) // 60)
    days, hours = divmod(minutes // 60, 24)
    parts = [(days, "d"), (hours, "h"), (minutes % 60, "min")]
    shown = [f"{value} {unit}" for value, unit in parts if value][:2] or ["less than a minute"]
    return " ".join(shown) + (" before the run" if seconds >= 0 else " AFTER the run began")
