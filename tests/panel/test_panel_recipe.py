"""panel.toml: what is refused, and what its digest depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.panel import load_recipe
from tests.panel.made_panels import make_panel, words

SOURCE = '[[sources]]\nkind = "text"\ndomain = "a"\nrows = 1\nlicense = "none"\nfiles = ["0.txt"]\n'
DATASET = '[[sources]]\nkind = "dataset"\ndomain = "a"\nrows = 1\nlicense = "none"\nsplit = "train"\nname = "org/set"\n'
PACKAGE = (
    '[[sources]]\nkind = "package"\ndomain = "a"\nrows = 1\nlicense = "none"\nname = "p"\nversion = "1"\n'
    f'[sources.files]\n"f" = "{"0" * 64}"\n'
)


def panel(folder: Path, body: str = SOURCE, **keys: str | int | float | bool) -> Path:
    return make_panel(folder / "p", files={"0.txt": words(60, 0)}, body=body, **{"rows": 1, **keys})


@pytest.mark.parametrize(
    ("body", "keys", "message"),
    [
        (SOURCE, {"rowz": 3}, "rowz"),
        (SOURCE + "shuffle = true\n", {}, "shuffle"),
        (SOURCE, {"rows": 2}, "rows = 2, and the sources give 1"),
        (SOURCE, {"cross_documents": True}, "no document of their own"),
        (SOURCE, {"bos": "sometimes"}, "bos"),
        (SOURCE, {"near_duplicates": 1.5}, "near_duplicates"),
        (SOURCE + 'document_start = "("\n', {}, "regular expression"),
        (SOURCE + 'extract = "records"\n', {}, "template belong together"),
        (SOURCE.replace('"text"', '"pdf"'), {}, "kind"),
        (DATASET, {}, "needs a revision"),
        (PACKAGE.replace('name = "p"', 'name = "p"\nindex = "npm"'), {}, "needs archive"),
        (PACKAGE.replace("0" * 64, "xyz"), {}, "sources.0.package.files.f"),
        ("sources = [\n", {}, "is not TOML"),
    ],
)
def test_a_wrong_recipe_is_one_clear_line(
    tmp_path: Path, body: str, keys: dict[str, str | int | float | bool], message: str
) -> None:
    with pytest.raises(UsageError, match="p/panel.toml") as caught:
        load_recipe(panel(tmp_path, body, **keys))
    assert message in caught.value.what
    assert "\n" not in caught.value.what


def test_a_folder_without_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a panel"):
        load_recipe(tmp_path)


def test_digest_follows_the_keys_and_not_the_comments(tmp_path: Path) -> None:
    first = load_recipe(panel(tmp_path))
    file = tmp_path / "p" / "panel.toml"
    text = file.read_text()
    file.write_text("# a comment\n" + text.replace('description = "test"', 'description = "other words"'))
    assert load_recipe(file.parent).sha256 == first.sha256
    file.write_text(text.replace("seed = 1", "seed = 2"))
    assert load_recipe(file.parent).sha256 != first.sha256


def test_domains_are_counted_over_sources(tmp_path: Path) -> None:
    recipe = load_recipe(panel(tmp_path, SOURCE + SOURCE.replace('"a"', '"b"') + SOURCE, rows=3))
    assert recipe.domains == {"a": 2, "b": 1}
