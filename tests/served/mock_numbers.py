"""What a mock server answers from: a small model's own numbers, and the faults that a served engine can have.

`Faults` are switches for tests; each is something that a server in use has done. They can be changed while it runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

#: Tokens of a prefix that the mock's prefix cache knows a row by.
PREFIX = 16


@dataclass(kw_only=True)
class Faults:
    """How the server fails; as it stands it does not.

    Attributes:
        cached_tokens: what each answer reports as taken from the prefix cache; None reports nothing.
        dies_after: rows answered (a probe of chosen ids is one) until it only drops connections; None brings it back.
        drops: how many of the next requests lose their connection.
        statuses: HTTP statuses of the next requests, used up from the left.
        delay: seconds that each answer takes.
        adds_bos: an id put in front of every prompt.
        echoes: whether the ids that were run are told.
        off_by_one: every position answers from the distribution of the one before it.
        leaks_temperature: the sampling temperature divides the logits of the prompt.
        prefix_cache: a row changes where another row with the same first `PREFIX` tokens was the last to use them.
        unsteady: every request has its own noise.
        chunk: the token at every multiple of it, but 0, has the log-probability of another id.
        speculative: log-probability 0 for everything.
        masked: ids that are impossible (log-probability -inf, each server with its own sentinel).
        nan_at: a position of every row whose next token has NaN.
        null_at: a position of every row that has null where its entries belong.
        beyond: how many ids past the vocabulary are likely tokens.
        told: what is told in place of log-probabilities, made from them: ``[T - 1, V]`` to the same.
        cap: most log-probabilities a position; None is no cap.
        context: tokens that fit, prompt and answer together.
        tells_context: whether the context length is told.
    """

    cached_tokens: int | None = 0
    dies_after: int | None = None
    drops: int = 0
    statuses: list[int] = field(default_factory=list)
    delay: float = 0.0
    adds_bos: int | None = None
    echoes: bool = True
    off_by_one: bool = False
    leaks_temperature: bool = False
    prefix_cache: bool = False
    unsteady: bool = False
    chunk: int | None = None
    speculative: bool = False
    masked: Sequence[int] = ()
    nan_at: int | None = None
    null_at: int | None = None
    beyond: int = 0
    cap: int | None = None
    told: Callable[[torch.Tensor], torch.Tensor] | None = None
    context: int = 2048
    tells_context: bool = True


class Dropped(Exception):
    """The connection is to be lost."""


class Numbers:
    """Log-probabilities of a model's own forward pass, with the faults done to them.

    ``asked`` holds the token counts of the rows answered, ``bodies`` and ``keys`` the last few requests; for tests.
    """

    def __init__(self, model: Any, faults: Faults | None = None) -> None:
        self.model = model
        self.faults = faults or Faults()
        self.vocab_size = int(model.config.vocab_size)
        self.asked: list[int] = []
        self.bodies: deque[dict[str, Any]] = deque(maxlen=8)
        self.keys: deque[str | None] = deque(maxlen=8)
        self._users_of_prefix: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """The ids that are run."""
        first = [] if self.faults.adds_bos is None else [self.faults.adds_bos]
        return [*first, *ids]

    def logprobs(self, ids: Sequence[int], temperature: float) -> torch.Tensor:
        """Float32 ``[T - 1, V]`` of what predicts each token after the first."""
        with self._lock:
            if self.faults.dies_after is not None and len(self.asked) >= self.faults.dies_after:
                raise Dropped
            self.asked.append(len(ids))
            logits_TV = self._logits(ids)
            logits_TV = self._moved(logits_TV, ids, temperature)
            logprobs_TV = torch.log_softmax(logits_TV[:-1], -1)
            return self._spoiled(logprobs_TV, ids)

    def _logits(self, ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([list(ids)])).logits[0].float().clone()

    def _moved(self, logits_TV: torch.Tensor, ids: Sequence[int], temperature: float) -> torch.Tensor:
        """Faults of the forward pass and of the sampler."""
        faults = self.faults
        if faults.off_by_one:
            logits_TV = torch.cat([logits_TV[:1], logits_TV[:-1]])
        if faults.prefix_cache and self._shared_with_another(ids):
            logits_TV[PREFIX:] += 0.3 * torch.sin(torch.arange(logits_TV.shape[1]) * 1.0)
        if faults.unsteady:
            noise = torch.Generator().manual_seed(len(self.asked))
            logits_TV += 0.05 * torch.randn(logits_TV.shape, generator=noise)
        if faults.chunk:
            at = torch.arange(faults.chunk, len(logits_TV), faults.chunk) - 1
            logits_TV[at] = logits_TV[at].roll(1, -1)
        if faults.leaks_temperature and temperature > 0:
            logits_TV /= temperature
        logits_TV[:, list(faults.masked)] = -torch.inf
        if faults.beyond:
            likely_T = logits_TV.amax(-1, keepdim=True) - 1.0
            logits_TV = torch.cat([logits_TV, likely_T.expand(-1, faults.beyond)], -1)
        return logits_TV

    def _spoiled(self, logprobs_TV: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
        """Faults of what is told about it."""
        if self.faults.told is not None:
            logprobs_TV = self.faults.told(logprobs_TV)
        if self.faults.speculative:
            logprobs_TV = torch.zeros_like(logprobs_TV)
        if self.faults.nan_at is not None:
            at = self.faults.nan_at
            logprobs_TV[at, int(ids[at + 1])] = torch.nan
        return logprobs_TV

    def _shared_with_another(self, ids: Sequence[int]) -> bool:
        row = tuple(ids)
        before = self._users_of_prefix.get(row[:PREFIX])
        self._users_of_prefix[row[:PREFIX]] = row
        return before is not None and before != row


def best(logprobs_V: torch.Tensor, k: int) -> list[tuple[int, float]]:
    """The ``k`` likeliest ids with their log-probabilities; NaN counts as the likeliest."""
    values, ids = torch.topk(logprobs_V, min(k, len(logprobs_V)))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
