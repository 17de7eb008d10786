"""The rooms of the harness: data flows one way, so no package imports one above it, and no modules import in a circle.

Imports are read from the source, those inside functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "harness"

#: From the ground up: a package imports from itself and from what stands before it.
ORDER = (
    "errors",
    "records",
    "types",
    "digest",
    "store",
    "environment",
    "progress",
    "numbers",
    "stats",
    "scoring",
    "panel",
    "registration",
    "exl3",
    "capture",
    "engines",
    "measure",
    "served",
    "tasks",
    "interop",
    "compare",
    "report",
    "verify",
    "bench",
    "cli",
)


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


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(file, known) - {name} for name, file in known.items()}


def upward(graph: dict[str, set[str]]) -> list[str]:
    rank = {name: place for place, name in enumerate(ORDER)}
    return [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if name and rank[other.split(".")[0]] > rank[name.split(".")[0]]
    ]


def circles(graph: dict[str, set[str]]) -> list[str]:
    """The modules left once all that import nothing left are taken away, again and again."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_every_package_has_its_place(graph: dict[str, set[str]]) -> None:
    assert {name.split(".")[0] for name in graph if name} == set(ORDER)


def test_no_package_imports_upwards(graph: dict[str, set[str]]) -> None:
    assert upward(graph) == []


def test_no_modules_import_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert circles(graph) == []


def test_the_tests_can_fail(graph: dict[str, set[str]]) -> None:
    """A lazy import upwards and a circle of two, added to what is there, are found."""
    assert upward(graph | {"stats.tests": graph["stats.tests"] | {"cli"}}) == ["stats.tests imports cli"]
    back = {"store": graph["store"] | {"panel.seal"}}
    assert {"store", "panel.seal"} <= set(circles(graph | back))
