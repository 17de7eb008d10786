"""Panels: a recipe (panel.toml) and its seal for a tokenizer (rows.parquet, panel.lock.json)."""

from harness.panel.build import build_panel, ensure_built
from harness.panel.recipe import Recipe, load_recipe
from harness.panel.seal import load_panel
from harness.panel.tokenizer import check_tokenizer, gguf_in_package, load_tokenizer, tokenizer_digest, tokenizer_name

__all__ = [
    "Recipe",
    "build_panel",
    "check_tokenizer",
    "ensure_built",
    "gguf_in_package",
    "load_panel",
    "load_recipe",
    "load_tokenizer",
    "tokenizer_digest",
    "tokenizer_name",
]
