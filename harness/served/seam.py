"""What crosses between a served engine and the harness: capabilities, what is asked, and what a row's answer holds.

A served engine gives log-probabilities of some ids, never a whole vocabulary. Every array has an entry for each scored
position ``t`` of ``0 .. T - 2``, which predicts token ``t + 1``: it is the entry that a server gives for prompt token
``t + 1``. Log-probabilities are natural, at temperature 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from harness.errors import EngineError
from harness.measure.preflight import check_ids
from harness.types import EngineIdentity, Row

Form = TypeVar("Form")

#: vLLM writes -9999 for -inf, SGLang the lowest float32; nothing a model computes is that low.
MINUS_INFINITY = -9999.0
#: Ids to be scored at each position of a row: int32 ``[T - 1, M]``, -1 where a slot is unused.
Ask = Callable[[Row], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a probe found that a server can do.

    ``context`` and ``max_logprobs`` are None where the server does not tell them; ``max_logprobs`` is -1 where it sets
    no cap. ``fixed_ids`` says whether it scores ids of our choice; ``note`` is one line about why not, or empty.
    """

    software: str
    version: str
    model: str
    context: int | None
    max_logprobs: int | None
    fixed_ids: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRow:
    """One row as a server answered it.

    ``ids_TK`` and ``logprobs_TK`` are the server's own top ``K``, best first, without the appended target; an unused
    slot holds id -1 and log-probability -inf. A sentinel for "impossible" is -inf here, never a number of its own.
    ``asked_TM`` are the log-probabilities of the asked ids in the order asked, NaN where a slot was unused.
    ``cached_tokens`` is None where the server does not say. ``wire_bytes`` is the length of the answer's body.
    """

    index: int
    echoed_ids_T: np.ndarray
    target_logprob_T: np.ndarray
    ids_TK: np.ndarray
    logprobs_TK: np.ndarray
    asked_TM: np.ndarray | None
    cached_tokens: int | None
    wire_bytes: int
    seconds: float


class ServedEngine(Protocol):
    """A server that has been probed. ``run`` keeps several requests in flight and yields rows in the order given.

    ``temperature`` is sent as the request's sampling temperature. It must not move a log-probability of the prompt:
    only the preflight sends another than 0, to see that it does not.

    ``identity.settings`` holds what the server tells of itself, `UNKNOWN` where it does not tell. The preflight reads
    ``speculative`` (a method's name, or None), ``chunk_tokens`` (of chunked prefill) and ``prefix_cache`` (a bool).

    Raises of ``run``: `harness.errors.EngineError` when an answer is not what was asked for, or when the server is
    gone; rows yielded before that are good, and the same call goes on from there.
    """

    @property
    def identity(self) -> EngineIdentity: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def run(
        self, rows: Sequence[Row], *, k: int, ask: Ask | None = None, temperature: float = 0.0
    ) -> Iterator[ServedRow]: ...


# ---- what answers of both servers have in common ---------------------------------------------------------------------


def decode(content: bytes, form: msgspec.json.Decoder[Form], row: Row) -> Form:
    """Typed content of an answer.

    Raises:
        EngineError: no JSON, or not of the documented form.
    """
    try:
        return form.decode(content)
    except msgspec.ValidationError as error:
        raise _not_documented(row, str(error)) from error
    except RecursionError as error:
        raise _not_documented(row, "it is nested too deep") from error
    except msgspec.DecodeError:
        pass  # Python servers can write NaN and Infinity, which are no JSON
    try:
        return form.decode(msgspec.json.encode(json.loads(content, parse_constant=_constant)))
    except (ValueError, RecursionError, OverflowError) as error:
        raise _not_documented(row, f"no JSON ({error})") from error


def _constant(name: str) -> float | None:
    return MINUS_INFINITY if name == "-Infinity" else None


def _not_documented(row: Row, how: str) -> EngineError:
    what = f"the server's answer is not of the documented form: {how}"
    return refused(row, what, "check that this is the engine you named, and its version")


def refused(row: Row, what: str, repair: str, *, position: int | None = None) -> EngineError:
    """The error about an answer: which row, which position, what is wrong, and what to do."""
    where = f"row {row.index}" if position is None else f"row {row.index}, position {position}"
    return EngineError(f"{where}: {what}", repair)


def tokens_run(row: Row, echoed_ids_T: np.ndarray) -> np.ndarray:
    """The ids that a server says it ran, int32, which must be the row's.

    Raises:
        EngineError: they are not, or not as many.
    """
    check_ids(row, echoed_ids_T)
    return echoed_ids_T.astype(np.int32)


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
    return np.where(used & (values <= MINUS_INFINITY), -np.inf, values)


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
