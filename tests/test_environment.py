"""A key covers the source of everything that computes a number: what changes there is measured again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import environment
from harness.engines.models import ModelFolder
from harness.environment import SOURCES, current_source_digest, source_digest
from harness.tasks.run import Request
from harness.tasks.subject import Subject, model_key
from tests.architecture import HARNESS, Graph, import_graph
from tests.fault_cases import made, state

#: Where the numbers of a receipt are made.
MAKERS = ("measure.run", "measure.altered", "served.measure", "tasks.run")
#: What they import and the key leaves out, and why no digit can come from there.
EXCUSED = {
    "shown": "how text of others is printed; makes no number",
    "errors": "what is told when there is no number",
    "records": "reads JSON and TOML into models, and refuses what does not fit",
    "store": "writes and reads files whole",
    "environment": "makes the key: what it says is in the key itself",
    "progress": "shows how far a run is",
    "registration": "a text and its seal, whose digest is in the key",
}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The harness's source in a folder of its own, which the digest is then taken of."""
    folder = tmp_path / "harness"
    shutil.copytree(HARNESS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(environment, "HARNESS", folder)
    source_digest.cache_clear()
    yield folder
    source_digest.cache_clear()


def keys(folder: Path) -> Callable[[], tuple[str, str]]:
    """What gives the key of one measurement and of one task run, of the source as it is then."""
    row, logits = made.row([1, 2, 0]), made.logits(*[(0.5, 0.2, 0.3)] * 3)
    stored = made.capture(folder / "capture", [row], [logits], None)
    request = Request(candidate="x")
    subject = Subject(
        located=ModelFolder(path=Path("m.gguf"), name="m", revision="local"),
        weights_sha256="w",
        tokenizer_sha256="t",
        server=None,
    )

    def now() -> tuple[str, str]:
        source_digest.cache_clear()
        return state.key(stored, [row]), str(model_key(request, subject))

    return now


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_of_each_source_makes_another_digest(name: str, copied: Path) -> None:
    """A line more, file by file, in all that is listed."""
    files = [copied / name] if (copied / name).is_file() else sorted((copied / name).rglob("*.py"))
    digests = {current_source_digest()}
    for file in files:
        file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
        digests.add(current_source_digest())
    assert len(digests) == 1 + len(files) and files


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_of_each_source_makes_other_keys(name: str, copied: Path, tmp_path: Path) -> None:
    now = keys(tmp_path)
    before = now()
    assert now() == before
    file = copied / name if (copied / name).is_file() else next((copied / name).rglob("*.py"))
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    assert all(one != other for one, other in zip(now(), before, strict=True))


def test_a_file_by_another_name_is_another_source(copied: Path) -> None:
    before = current_source_digest()
    (copied / "stats" / "means.py").rename(copied / "stats" / "estimated.py")
    assert current_source_digest() != before


def test_what_shows_numbers_does_not_measure_again(copied: Path) -> None:
    before = current_source_digest()
    file = copied / "report" / "style.py"
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    assert current_source_digest() == before


def reached(graph: Graph, makers: tuple[str, ...] = MAKERS) -> set[str]:
    """The packages and loose modules that the makers of numbers import, and what those import, to the end."""
    seen: set[str] = set()
    waiting = list(makers)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [*graph[name], *([name.rpartition(".")[0]] if "." in name else [])]
    return {name.partition(".")[0] for name in seen}


def test_everything_that_makes_numbers_is_in_the_key() -> None:
    """What is neither listed nor excused would leave an old receipt standing after its numbers have changed."""
    assert reached(import_graph()) == {name.removesuffix(".py") for name in SOURCES} | set(EXCUSED)


def test_a_source_that_is_not_listed_is_found() -> None:
    graph = import_graph()
    assert "interop" in reached(graph | {"stats.means": graph["stats.means"] | {"interop.g4"}})
