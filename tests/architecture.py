"""The modules of the harness and who imports whom, read from the source: inside functions and TYPE_CHECKING too."""

from __future__ import annotations

import ast
from pathlib import Path

HARNESS = Path(__file__).parents[1] / "harness"

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module by its dotted name below ``harness``; a package's own name for its ``__init__``."""
    found = {}
    for file in sorted(HARNESS.rglob("*.py")):
        parts = file.relative_to(HARNESS).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """The modules of the harness that a file imports anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            base = node.module or ""
            inside = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("harness.") in known else base for name in inside]
        else:
            continue
        found |= {name.removeprefix("harness.") for name in names if name.startswith("harness.")}
    return found


def import_graph() -> Graph:
    known = modules()
    return {name: imports(file, known) - {name} for name, file in known.items()}
