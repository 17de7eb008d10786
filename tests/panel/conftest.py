"""Tokenizers of the panel tests, trained once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.panel.made_panels import TEMPLATE, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "plain", template=TEMPLATE)


@pytest.fixture(scope="session")
def bos_tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "bos", add_bos=True, template=TEMPLATE)
