"""Windows, BOS, and the rows that are refused."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from harness.digest import ids_digest
from harness.errors import PanelError
from harness.panel import build_panel, load_recipe
from harness.panel.recipe import Recipe
from harness.panel.rows import (
    SHINGLE,
    Bos,
    Document,
    check_lengths,
    check_near_duplicates,
    choose,
    interleave,
    join,
    overlaps,
    windows_of,
)
from harness.types import Row
from tests.panel.made_panels import make_panel, words

NO_BOS = Bos(token_id=None, added=False)


def recipe_of(folder: Path, **keys: str | int | float | bool) -> Recipe:
    return load_recipe(make_panel(folder / "r", files={"0.txt": "x"}, **keys))


def document(tokens: int, name: str = "d", first: int = 10) -> Document:
    return Document(name=name, ids_T=np.arange(first, first + tokens, dtype=np.int32))


def rows_of(ids: list[np.ndarray]) -> list[Row]:
    return [
        Row(index=i, ids_T=some.astype(np.int32), document=f"d{i}", domain="a", sha256=ids_digest(some))
        for i, some in enumerate(ids)
    ]


@pytest.mark.parametrize(("tokens", "count"), [(4096, 2), (2047, 0), (2048, 1), (4095, 1), (6144, 3)])
def test_fault_a11_the_last_exact_window_is_kept(tmp_path: Path, tokens: int, count: int) -> None:
    """n = 2L gives two rows, n = L - 1 none."""
    windows = windows_of(document(tokens), recipe_of(tmp_path, length=2048), NO_BOS)
    assert [window.start for window in windows] == [2048 * i for i in range(count)]
    assert all(len(window.ids_T) == 2048 and window.ids_T.dtype == np.int32 for window in windows)


def test_fault_a11_too_short_says_zero_full_windows(tmp_path: Path, tokenizer_folder: Path) -> None:
    """A text shorter than a row is refused, never shortened or padded."""
    panel = make_panel(tmp_path / "p", files={"0.txt": "amber basin\n"}, tokenizer=str(tokenizer_folder))
    with pytest.raises(PanelError, match=r"0\.txt: 0 full windows in \d+ tokens"):
        build_panel(panel)


def test_bos_takes_one_place_of_the_row(tmp_path: Path) -> None:
    windows = windows_of(document(62), recipe_of(tmp_path, bos="always"), Bos(token_id=0, added=True))
    assert [list(window.ids_T[:2]) for window in windows] == [[0, 10], [0, 41]]
    assert {len(window.ids_T) for window in windows} == {32}


@pytest.mark.parametrize(("bos", "first"), [("never", None), ("always", 0), ("tokenizer", None)])
def test_bos_policy_with_a_tokenizer_that_adds_none(
    tmp_path: Path, tokenizer_folder: Path, bos: str, first: int | None
) -> None:
    panel = make_panel(tmp_path / "p", files={"0.txt": words(60, 0)}, tokenizer=str(tokenizer_folder), bos=bos)
    ids = build_panel(panel).rows[0].ids_T
    assert (ids[0] == 0) == (first == 0)
    assert list(ids[1:]).count(0) == 0


def test_bos_policy_of_the_tokenizer_is_followed(tmp_path: Path, bos_tokenizer_folder: Path) -> None:
    panel = make_panel(tmp_path / "p", files={"0.txt": words(60, 0)}, tokenizer=str(bos_tokenizer_folder))
    assert list(build_panel(panel).rows[0].ids_T[:2]).count(0) == 1


def test_fault_a1_missing_bos_is_an_error(tmp_path: Path, bos_tokenizer_folder: Path) -> None:
    """The tokenizer adds a BOS and the row has none."""
    files: dict[str, str | bytes] = {"0.txt": words(60, 0)}
    panel = make_panel(tmp_path / "p", files=files, tokenizer=str(bos_tokenizer_folder), bos="never")
    with pytest.raises(PanelError, match=r"missing BOS at row 0 \(0\.txt\)"):
        build_panel(panel)
    allowed = make_panel(
        tmp_path / "q", files=files, tokenizer=str(bos_tokenizer_folder), bos="never", allow_missing_bos=True
    )
    assert build_panel(allowed).rows[0].ids_T[0] != 0


def test_fault_a2_double_bos_is_an_error(tmp_path: Path, bos_tokenizer_folder: Path) -> None:
    """The text already starts with BOS and the recipe adds another."""
    source = '[[sources]]\nkind = "text"\ndomain = "a"\nrows = 1\nlicense = "none"\nfiles = ["0.txt"]\n'
    body = source + "allow_special = true\n"
    files: dict[str, str | bytes] = {"0.txt": "<s>" + words(60, 0)}
    keys = {"tokenizer": str(bos_tokenizer_folder), "bos": "always", "rows": 1}
    with pytest.raises(PanelError, match="double BOS at row 0"):
        build_panel(make_panel(tmp_path / "p", files=files, body=body, **keys))
    allowed = build_panel(make_panel(tmp_path / "q", files=files, body=body, **keys, allow_double_bos=True))
    assert list(allowed.rows[0].ids_T[:2]) == [0, 0]
    single = build_panel(make_panel(tmp_path / "s", files=files, body=body, **{**keys, "bos": "tokenizer"}))
    assert list(single.rows[0].ids_T[:2]).count(0) == 1


def test_plain_text_that_spells_special_tokens_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = "amber </s> basin " + words(60, 0)
    panel = make_panel(tmp_path / "p", files={"0.txt": text}, tokenizer=str(tokenizer_folder))
    with pytest.raises(PanelError, match=r"row 0 \(0\.txt\) spells special tokens in plain text: </s>"):
        build_panel(panel)


def test_fault_a50_identical_rows_are_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Two rows with the same ids."""
    files: dict[str, str | bytes] = {"a.txt": words(60, 0), "b.txt": words(60, 1), "c.txt": words(60, 0)}
    panel = make_panel(tmp_path / "p", files=files, tokenizer=str(tokenizer_folder))
    with pytest.raises(PanelError, match=r"rows \d \((a|c)\.txt\) and \d \((a|c)\.txt\) are identical"):
        build_panel(panel)


def test_fault_a50_near_duplicates_are_refused_with_row_numbers() -> None:
    """24 of 32 tokens in common."""
    one = np.arange(32)
    two = np.concatenate([np.arange(24), np.arange(100, 108)])
    rows = rows_of([one, np.arange(200, 232), two])
    with pytest.raises(PanelError, match=r"rows 0 \(d0\) and 2 \(d2\): 68%"):
        check_near_duplicates(rows, 0.2)
    assert check_near_duplicates(rows, 0.7) == pytest.approx(17 / 25)
    assert check_near_duplicates(rows[:2], 0.0) == 0.0


def test_overlaps_equal_a_slow_count() -> None:
    chooser = random.Random(3)
    rows = rows_of([np.array([chooser.randrange(2) for _ in range(40 + i)]) for i in range(6)])

    def grams(ids: np.ndarray) -> set[tuple[int, ...]]:
        return {tuple(ids[i : i + SHINGLE].tolist()) for i in range(len(ids) - SHINGLE + 1)}

    expected = {}
    for i, first in enumerate(rows):
        for j, second in enumerate(rows[i + 1 :], i + 1):
            a, b = grams(first.ids_T), grams(second.ids_T)
            if a & b:
                expected[i, j] = len(a & b) / min(len(a), len(b))
    assert {(i, j): share for i, j, share in overlaps(rows)} == pytest.approx(expected)
    assert len(expected) > 5


def test_rows_under_length_are_named() -> None:
    with pytest.raises(PanelError, match=r"row 1 \(31\), row 2 \(33\)"):
        check_lengths(rows_of([np.arange(32), np.arange(31), np.arange(33)]), 32)


def test_each_document_gives_a_row_before_any_gives_two(tmp_path: Path) -> None:
    body = (
        '[[sources]]\nkind = "text"\ndomain = "a"\nrows = 4\nlicense = "none"\nfiles = ["0.txt"]\n'
        "rows_per_document = 2\n"
    )
    recipe = load_recipe(make_panel(tmp_path / "r", files={"0.txt": "x"}, body=body, rows=4))
    windows = [windows_of(document(320, name=name), recipe, NO_BOS) for name in "abc"]
    chosen = choose(windows, 0, recipe)
    assert sorted(window.document for window in chosen[:3]) == ["a", "b", "c"]
    assert len({(window.document, window.start) for window in chosen}) == 4
    assert chosen == choose(windows[::-1], 0, recipe), "the order of reading does not count"


def test_another_seed_takes_other_windows(tmp_path: Path) -> None:
    def starts(seed: int) -> list[int]:
        recipe = recipe_of(tmp_path / str(seed), seed=seed)
        return [
            w.start for name in "abcdef" for w in choose([windows_of(document(320, name), recipe, NO_BOS)], 0, recipe)
        ]

    assert starts(1) != starts(2)


def test_first_rows_span_the_domains(tmp_path: Path) -> None:
    def source(domain: str) -> str:
        return f'[[sources]]\nkind = "text"\ndomain = "{domain}"\nrows = 2\nlicense = "none"\nfiles = ["0.txt"]\n'

    body = source("a") + source("a") + source("b")
    recipe = load_recipe(make_panel(tmp_path / "r", files={"0.txt": "x"}, body=body, rows=6))
    windows = [windows_of(document(64, name=str(number)), recipe, NO_BOS) for number in range(3)]
    assert [number for number, _ in interleave(windows, recipe)] == [0, 2, 0, 2, 1, 1]


def test_rows_cross_documents_only_on_request(tmp_path: Path, tokenizer_folder: Path) -> None:
    files: dict[str, str | bytes] = {"a.txt": words(20, 0), "b.txt": words(20, 1), "c.txt": words(20, 2)}
    keys = {"tokenizer": str(tokenizer_folder), "rows": 1}
    with pytest.raises(PanelError, match="0 full windows"):
        build_panel(make_panel(tmp_path / "p", files=files, **keys))
    crossing = make_panel(tmp_path / "q", files=files, **keys, cross_documents=True, unit="row")
    panel = build_panel(crossing)
    assert panel.unit == "row"
    assert panel.rows[0].document == "a.txt .. c.txt"
    assert 1 in panel.rows[0].ids_T, "EOS stands between the documents"


def test_join_puts_eos_between_and_not_behind() -> None:
    (joined,) = join([document(2, "a"), document(3, "b", first=50)], 1)
    assert joined.ids_T.tolist() == [10, 11, 1, 50, 51, 52]
    (plain,) = join([document(2, "a"), document(3, "b", first=50)], None)
    assert plain.ids_T.tolist() == [10, 11, 50, 51, 52]
