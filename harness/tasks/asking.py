"""The model that lm-eval sees: checks every prompt, asks only what is not answered yet, and keeps each answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import LM, TemplateLM

from harness.errors import EngineError
from harness.progress import phase
from harness.tasks.answers import Answers, Recorder
from harness.tasks.prompts import Prompt, encode_prompts, refuse_long

#: Runs before the first answer with lm-eval's requests and the prompts made of them; raises where the model must
#: not be asked.
Preflight = Callable[[Sequence[Any], Sequence[Prompt]], None]


class AskingLM(LM):
    """Wraps one of lm-eval's models or our own.

    Args:
        inner: a model with tokens of its own (`TemplateLM`): the reference engine, HFLM, local-completions.
        limit: tokens of the model's context; ``extra`` of them are needed besides prompt and answer.
        preflights: further checks, in order, before anything is scored.
        failures: exceptions that mean "the server is gone": the leg is then invalid and can be resumed.
    """

    def __init__(
        self,
        inner: TemplateLM,
        answers: Answers,
        *,
        limit: int | None,
        extra: int = 0,
        preflights: Sequence[Preflight] = (),
        failures: tuple[type[Exception], ...] = (),
    ) -> None:
        super().__init__()
        self.inner, self.answers = inner, answers
        self._limit, self._extra, self._failures = limit, extra, failures
        self._preflights = list(preflights)

    def before(self, preflight: Preflight) -> None:
        """Put one more check in front of the others."""
        self._preflights.insert(0, preflight)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """Answer all requests of a suite; raises before the first forward pass where one cannot be asked."""
        prompts = encode_prompts(requests, self.inner.tok_encode, self.inner.prefix_token_id)
        refuse_long(prompts, self._limit, extra=self._extra)
        for preflight in self._preflights:
            preflight(requests, prompts)
        self._ask({(p.context, p.answer): p for p in prompts})
        found = [self.answers.get(p.context, p.answer) for p in prompts]
        unanswered = found.count(None)
        if unanswered:
            raise EngineError(f"{unanswered} of {len(found)} requests were not answered", "run the same command again")
        return [answer for answer in found if answer is not None]

    def _ask(self, prompts: dict[tuple[str, str], Prompt]) -> None:
        missing = [p for p in prompts.values() if self.answers.get(p.context, p.answer) is None]
        if not missing:
            return
        with phase("tasks", total=len(missing), unit="answers", item="answer") as advance:
            self.inner.set_cache_hook(Recorder(self.answers, advance))
            try:
                found = self.inner._loglikelihood_tokens([p.request() for p in missing], disable_tqdm=True)
            except self._failures as error:
                have = sum(self.answers.get(p.context, p.answer) is not None for p in prompts.values())
                raise EngineError(
                    f"the server stopped answering ({type(error).__name__}): {have} of {len(prompts)} requests are "
                    "answered and kept; the run is INVALID until it is whole, and no score is given",
                    "start the server again and run the same command: it goes on from there",
                ) from error
        for prompt, answer in zip(missing, found, strict=True):
            self.answers.add(prompt.context, prompt.answer, answer)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Whole-text likelihoods, as the inner model computes them; not resumed."""
        found: list[float] = self.inner.loglikelihood_rolling(requests, disable_tqdm=True)
        return found

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Greedy generation by the inner model; not stored (a text may quote its question), so not resumed."""
        found: list[str] = self.inner.generate_until(requests, disable_tqdm=True)
        return found
