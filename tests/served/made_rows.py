"""Rows for mock servers, and what the small model itself says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from harness.types import Row

#: Tokens of each row of the fixture ``rows``.
LENGTH = 48


def exact(model: Any, row: Row) -> np.ndarray:
    """Float64 log-probabilities ``[T - 1, V]`` of what predicts each token after the first, from the model itself."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([row.ids_T.tolist()])).logits[0, :-1]
    return torch.log_softmax(logits_TV.double(), -1).numpy()
