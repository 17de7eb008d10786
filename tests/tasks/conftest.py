"""One tiny model, opened once, and the way to run a suite on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder, locate
from harness.engines.open import digests_of, open_engine
from tests.tasks.made_models import save_tiny


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make small models slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return locate(str(save_tiny(tmp_path_factory.mktemp("tiny") / "tiny")), None, cache=Path("unused"))


@pytest.fixture(scope="session")
def engine(tiny: ModelFolder) -> TransformersEngine:
    """It, running."""
    weights, tokenizer = digests_of(tiny)
    return open_engine(tiny, weights_sha256=weights, tokenizer_sha256=tokenizer)


@pytest.fixture(scope="session")
def tokenizer(tiny: ModelFolder) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny.path)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No Hub, and a cache of its own, which a test may look into."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets-cache"))
    return tmp_path / "datasets-cache"
