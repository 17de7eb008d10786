"""What answers of both servers have in common: typed JSON, sentinels, and top lists in order.

Position ``t`` predicts token ``t + 1``; the entry a server gives for prompt token ``t + 1`` is that of position ``t``.
"""

from __future__ import annotations

import json
from typing import TypeVar

import msgspec
import numpy as np

from harness.errors import EngineError
from harness.types import Row

Form = TypeVar("Form")

#: vLLM writes -9999 for -inf, SGLang the lowest float32; nothing a model computes is that low.
IMPOSSIBLE = -9999.0


def decode(content: bytes, form: msgspec.json.Decoder[Form], row: Row) -> Form:
    """Typed content of an answer.

    Raises:
        EngineError: no JSON, or not of the documented form.
    """
    try:
        return form.decode(content)
    except msgspec.ValidationError as error:
        raise _not_documented(row, str(error)) from error
    except msgspec.DecodeError:
        pass  # Python servers can write NaN and Infinity, which are no JSON
    try:
        return form.decode(msgspec.json.encode(json.loads(content, parse_constant=_constant)))
    except ValueError as error:
        raise _not_documented(row, f"no JSON ({error})") from error


def _constant(name: str) -> float | None:
    return IMPOSSIBLE if name == "-Infinity" else None


def _not_documented(row: Row, how: str) -> EngineError:
    what = f"the server's answer is not of the documented form: {how}"
    return refused(row, what, "check that this is the engine you named, and its version")


def refused(row: Row, what: str, repair: str, *, position: int | None = None) -> EngineError:
    """The error about an answer: which row, which position, what is wrong, and what to do."""
    where = f"row {row.index}" if position is None else f"row {row.index}, position {position}"
    return EngineError(f"{where}: {what}", repair)


def clean(values: np.ndarray, used: np.ndarray, row: Row, what: str) -> np.ndarray:
    """Float64 log-probabilities with sentinels as -inf; entries that are not ``used`` pass as they are.

    Args:
        values: ``[T - 1]`` or ``[T - 1, K]``, NaN where the server gave no number.
        used: mask of the same shape.

    Raises:
        EngineError: NaN or no number where one must be, with row and position.
    """
    missing = np.isnan(values) & used
    if missing.any():
        at = int(np.argmax(missing.reshape(len(values), -1).any(axis=1)))
        raise refused(
            row,
            f"the server gave NaN or no number for {what}",
            "its logits are not finite there: check the weights, the dtype and the KV cache's dtype",
            position=at,
        )
    return np.where(used & (values <= IMPOSSIBLE), -np.inf, values)


def best_first(ids_TW: np.ndarray, logprobs_TW: np.ndarray, ranks_TW: np.ndarray, k: int) -> tuple[np.ndarray, ...]:
    """The first ``k`` of lists by log-probability, then by the server's rank; unused slots (id -1) come last.

    Returns:
        int32 ids ``[T - 1, k]`` and float64 log-probabilities, -1 and -inf where a list is shorter.
    """
    order_TW = np.lexsort((ranks_TW, -logprobs_TW, ids_TW < 0), axis=-1)[:, :k]
    ids_TK = np.take_along_axis(ids_TW, order_TW, axis=1).astype(np.int32)
    logprobs_TK = np.where(ids_TK < 0, -np.inf, np.take_along_axis(logprobs_TW, order_TW, axis=1))
    short = k - ids_TK.shape[1]
    if short > 0:
        ids_TK = np.pad(ids_TK, ((0, 0), (0, short)), constant_values=-1)
        logprobs_TK = np.pad(logprobs_TK, ((0, 0), (0, short)), constant_values=-np.inf)
    return ids_TK, logprobs_TK
