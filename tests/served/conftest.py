"""The small model that mock servers answer from, and rows for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.types import Row
from tests.served.made_rows import LENGTH
from tests.tiny import VOCAB


@pytest.fixture(scope="session")
def small_model(teacher_folder: Path) -> Iterator[Any]:
    """The tiny teacher in float32, on one thread."""
    from transformers import AutoModelForCausalLM

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).eval()
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """Five rows of random ids; the first and the last id of the vocabulary are in each."""
    made = []
    for index in range(5):
        ids_T = np.random.default_rng(index).integers(0, VOCAB, LENGTH).astype(np.int32)
        ids_T[[7, 20, 21]] = VOCAB - 1, 0, VOCAB - 1
        made.append(Row(index=index, ids_T=ids_T, document=f"d{index}", domain="test", sha256=""))
    return made
