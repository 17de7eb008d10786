"""One Table in Markdown, in the terminal and in HTML."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from harness.compare import compare, load_comparison
from harness.report.comparison_report import markdown, write
from harness.report.table import Table
from harness.report.words import warnings
from tests.compare.fake_arms import World, side

TABLE = Table("A | B", ("", "x", "what"), [("a<b", "1.5", "two | three"), ("**c**", "", "`d`")], sides="lrl")


def test_markdown_escapes_cells_and_sets_sides() -> None:
    assert TABLE.markdown.splitlines() == [
        "| | x | what |",
        "|---|---:|---|",
        "| a&lt;b | 1.5 | two \\| three |",
        "| **c** |  | `d` |",
    ]
    assert TABLE.section == f"### A \\| B\n\n{TABLE.markdown}"


def test_verbatim_cells_are_code() -> None:
    table = Table("t", ("", "a"), [("x", "p|q`r")], verbatim=True)
    assert table.markdown.splitlines()[1:] == ["|---|---:|", "| x | `p\\|q'r` |"]


def test_the_terminal_shows_cells_as_they_are() -> None:
    console = Console(width=80, record=True, color_system=None)
    console.print(Table("t", ("name", "n"), [("[red]x[/red]", "1"), ("y", "22")]).rich)
    text = console.export_text()
    assert "[red]x[/red]" in text, "a name is no markup"
    assert any(line.endswith("│  1 │") for line in text.splitlines()), "numbers stand on the right"


def test_columns_are_chosen_with_their_sides() -> None:
    chosen = TABLE.choose("what", "")
    assert (chosen.header, chosen.rows, chosen.sides) == (
        ("what", ""),
        [("two | three", "a<b"), ("`d`", "**c**")],
        "ll",
    )
    with pytest.raises(ValueError, match="tuple"):
        TABLE.choose("no such column")


def test_html_sets_what_is_read_from_the_left() -> None:
    long = "a cell that is read, not compared with others"
    assert Table("t", ("a", "b", "c"), [("1", "2", long)]).text_columns == {0, 2}


def test_words_follow_from_what_a_comparison_json_holds(tmp_path: Path) -> None:
    """Facts are in the record: the words made of it are those that were written, and those of the report."""
    world = World(rows=8, length=40, teacher={"revision": "v1"})
    other = World(rows=8, length=40, teacher={"revision": "v2"})
    a = world.run(tmp_path / "a", "A", world.columns(0.3, 2))
    candidate = side("B", device="cuda", settings={"kv_dtype": "fp8", "batch": 8})
    b = other.run(tmp_path / "b", "B", world.columns(0.2, 3), rows=[0, 1, 2, 3, 4], candidate=candidate)
    write(tmp_path / "out", compare([a, b]))
    read = load_comparison(tmp_path / "out")
    assert read.warnings == warnings(read)
    told = (tmp_path / "out" / "report.md").read_text()
    assert markdown(read) == told
    for part in ("another device (cpu and cuda)", "another kv_dtype (None and fp8)", "named v1 and v2", "rows 5, 6, 7"):
        assert any(part in text for text in read.warnings) and part in told
    bare = read.model_copy(update={"warnings": [], "unlike": []})
    assert not any("ran with another" in text for text in warnings(bare)), "made of the facts, not of the stored text"
