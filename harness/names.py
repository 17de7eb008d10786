"""Names that a user gives, made paths from any folder, or refused in the user's own words before anything is imported.

What is given is looked for as it stands, then among what this project ships (``panels/``, ``teachers/``).
"""

from __future__ import annotations

from pathlib import Path

from harness.errors import UsageError

#: The folder of this project, where it is run from its own checkout.
PROJECT = Path(__file__).parents[1]
PANELS, TEACHERS = PROJECT / "panels", PROJECT / "teachers"


def panel_folder(given: Path, example: str = "--panel {}") -> Path:
    """The folder of a panel: a path from here, or the name of a shipped one, such as ``open-32x2048``.

    ``example`` is how a panel is named where this one was, for the repair.

    Raises:
        UsageError: there is no such folder.
    """
    places = (given.expanduser(), PROJECT / given, PANELS / given)
    for place in places:
        if place.is_dir():
            return _from_here(place)
    shipped = sorted(path.parent.name for path in PANELS.glob("*/panel.toml"))
    raise UsageError(f"there is no panel {given}", f"{_one_of(example, shipped)}, or name a folder")


def teacher_source(given: str) -> str:
    """A teacher: a shipped file by its name, with or without ``.toml``, or what is given, unless it cannot be anything.

    Raises:
        UsageError: a file or folder that is not there.
    """
    path = Path(given).expanduser()
    if path.exists():
        return given
    for place in (PROJECT / given, TEACHERS / given, TEACHERS / f"{given}.toml"):
        if place.is_file() or (place.is_dir() and given.count("/") != 1):
            return str(_from_here(place))
    if path.suffix == ".toml" or not _may_be_elsewhere(given):
        shipped = sorted(path.name for path in TEACHERS.glob("*.toml"))
        raise UsageError(
            f"there is no teacher {given}: no file and no folder of this name",
            f"{_one_of('--teacher {}', shipped)}, or give a model's folder or org/name",
        )
    return given


def candidate_source(given: str) -> str:
    """A candidate as it is given; refused where it is neither here nor a name of the Hub or of a package.

    Raises:
        UsageError: as said.
    """
    if Path(given).expanduser().exists() or _may_be_elsewhere(given):
        return given
    raise UsageError(f"{given} is neither a checkpoint folder nor a Hub id", "give a folder or org/name")


def written_folder(given: Path) -> Path:
    """A folder that an earlier command wrote.

    Raises:
        UsageError: nothing of this name is there.
    """
    if not given.expanduser().exists():
        raise UsageError(f"there is no {given}", "name a folder that `fidelity measure` or `fidelity compare` wrote")
    return given


def _may_be_elsewhere(given: str) -> bool:
    """Whether a name may be a package's or the Hub's."""
    return given.startswith("package:") or (not given.startswith((".", "/", "~")) and given.count("/") == 1)


def _from_here(path: Path) -> Path:
    """The path as one would type it in the project's folder, so that what is printed can be pasted."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _one_of(example: str, names: list[str]) -> str:
    """``--panel example (or open-32x2048, ...)``."""
    if not names:
        return "check the name"
    return example.format(names[0]) + (f" (or {', '.join(names[1:])})" if names[1:] else "")
