"""One tiny model, opened once, and questions written here."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder, locate
from harness.engines.open import digests_of, open_engine
from tests.tiny import save_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """The tiny Llama of tests/tiny.py."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    save_llama(folder)
    return locate(str(folder), None, cache=folder.parent)


@pytest.fixture(scope="session")
def engine(tiny: ModelFolder) -> TransformersEngine:
    """It, running."""
    weights, tokenizer = digests_of(tiny)
    return open_engine(tiny, weights_sha256=weights, tokenizer_sha256=tokenizer)


@pytest.fixture(scope="session")
def tokenizer(tiny: ModelFolder) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.folder)
