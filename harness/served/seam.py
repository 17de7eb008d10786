"""What crosses between a served engine and the harness: capabilities, what is asked, and what a row's answer holds.

A served engine gives log-probabilities of some ids, never a whole vocabulary. Every array has an entry for each scored
position ``t`` of ``0 .. T - 2``, which predicts token ``t + 1``; log-probabilities are natural, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.types import EngineIdentity, Row

#: What stands in an identity for something that a server does not tell.
UNKNOWN = "unknown"

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
