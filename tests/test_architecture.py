"""The rooms of the harness: data flows one way; no package imports one above it, no modules import in a circle."""

from __future__ import annotations

import re

import pytest

from tests.architecture import HARNESS, Graph, import_graph

#: From the ground up: a package imports from itself and from what stands before it.
ORDER = (
    "shown",
    "errors",
    "names",
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
    "artifact",
    "report",
    "verify",
    "bench",
    "cli",
    "start",
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph()


def upward(graph: Graph) -> list[str]:
    rank = {name: place for place, name in enumerate(ORDER)}
    return [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if name and rank[other.split(".")[0]] > rank[name.split(".")[0]]
    ]


def circles(graph: Graph) -> list[str]:
    """The modules left once all that import nothing left are taken away, again and again."""
    left = {name: set(others) for name, others in graph.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_every_package_has_its_place(graph: Graph) -> None:
    assert {name.split(".")[0] for name in graph if name} == set(ORDER)


def test_no_package_imports_upwards(graph: Graph) -> None:
    assert upward(graph) == []


def test_no_modules_import_in_a_circle(graph: Graph) -> None:
    assert circles(graph) == []


def test_the_tests_can_fail(graph: Graph) -> None:
    """A lazy import upwards and a circle of two, added to what is there, are found."""
    assert upward(graph | {"stats.tests": graph["stats.tests"] | {"cli"}}) == ["stats.tests imports cli"]
    back = {"store": graph["store"] | {"panel.seal"}}
    assert {"store", "panel.seal"} <= set(circles(graph | back))


def test_the_map_is_of_what_is_there() -> None:
    """ARCHITECTURE.md: each package with the number of its modules, each file that it names."""
    text = (HARNESS.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    found = {
        folder.name: len(list(folder.rglob("*.py")))
        for folder in HARNESS.iterdir()
        if (folder / "__init__.py").is_file()
    }
    assert {name: int(count) for name, count in re.findall(r"^\| `(\w+)/` \| (\d+) \|", text, re.MULTILINE)} == found
    assert f"## Modules ({len(list(HARNESS.rglob('*.py')))})" in text
    named = re.findall(r"`(?:harness/)?(\w+/\w+\.py)`", text)
    assert (
        named
        and [name for name in named if not any((root / name).is_file() for root in (HARNESS, HARNESS.parent))] == []
    )
