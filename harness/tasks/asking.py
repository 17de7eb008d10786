"""What is asked of a model: prompts in tokens, answers as they come, and the model that lm-eval sees.

`AskingLM` checks every prompt before anything is scored, asks only what is not answered yet, and keeps each answer, so
that a killed run goes on at the first missing one. Answers are one JSON line each, keyed by a digest of the model, its
settings and the prompt: another model's file can answer nothing, and no text of a question is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM, TemplateLM

from harness.errors import EngineError
from harness.progress import phase

ANSWERS_FILE = "answers.jsonl"

Encode = Callable[[str], list[int]]
Answer = tuple[float, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One context and one answer to it; ``where`` names task, document and choice, never their text."""

    where: str
    context: str
    answer: str
    context_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of context and answer together."""
        return len(self.context_ids) + len(self.answer_ids)

    def request(self) -> tuple[tuple[str, str], list[int], list[int]]:
        """The form of lm-eval's ``_loglikelihood_tokens``."""
        return (self.context, self.answer), list(self.context_ids), list(self.answer_ids)


#: Runs before the first answer with lm-eval's requests and the prompts made of them; raises where the model must
#: not be asked.
Preflight = Callable[[Sequence[Any], Sequence[Prompt]], None]


def encode_prompts(instances: Sequence[Any], encode: Encode, prefix_token: int | None) -> list[Prompt]:
    """lm-eval's log-likelihood requests as tokens, split where lm-eval splits them.

    Raises:
        EngineError: an answer merges with its prompt, so that no tokens of its own follow the prompt's tokens.
    """
    contexts: dict[str, tuple[int, ...]] = {}
    return [_prompt(instance, encode, prefix_token, contexts) for instance in instances]


def _where(instance: Any) -> str:
    return f"{instance.task_name}, document {instance.doc_id}, choice {instance.idx}"


def _prompt(instance: Any, encode: Encode, prefix_token: int | None, contexts: dict[str, tuple[int, ...]]) -> Prompt:
    context, answer = instance.args
    where = _where(instance)
    if not context:
        if prefix_token is None:
            raise EngineError(
                f"{where} has no context and the tokenizer no BOS or EOS to stand for one", "leave it out"
            )
        ids = tuple(encode(answer))
        start = 1 if ids[:1] == (prefix_token,) else 0
        return Prompt(where=where, context=context, answer=answer, context_ids=(prefix_token,), answer_ids=ids[start:])
    # As in lm-eval: blanks at the end of a context belong to the answer.
    stripped = context.rstrip()
    if stripped not in contexts:
        contexts[stripped] = tuple(encode(stripped))
    head = contexts[stripped]
    whole = tuple(encode(context + answer))
    if whole[: len(head)] != head or len(whole) == len(head):
        raise EngineError(
            f"{where}: the answer merges with its prompt into other tokens",
            "this tokenizer cannot answer this task by log-likelihood; choose a task with another answer format",
        )
    return Prompt(where=where, context=context, answer=answer, context_ids=head, answer_ids=whole[len(head) :])


def refuse_long(prompts: Sequence[Prompt], limit: int | None, *, extra: int = 0) -> None:
    """Refuse, before any compute, prompts longer than the model's context: nothing is ever truncated."""
    if limit is None:
        return
    long = [prompt for prompt in prompts if prompt.tokens + extra > limit]
    if long:
        longest = max(long, key=lambda prompt: prompt.tokens)
        raise EngineError(
            f"{len(long)} prompts do not fit a context of {limit} tokens; the longest has {longest.tokens + extra} "
            f"({longest.where})",
            "serve or load the model with a longer context, or ask with fewer shots",
        )


#: Tokens that lm-eval's models generate where nothing is said.
_GENERATED = 256


def refuse_long_generation(requests: Sequence[Any], model: TemplateLM, limit: int | None) -> None:
    """Refuse prompts that leave no room for what is to be generated after them."""
    if limit is None:
        return
    long: list[tuple[int, int, str]] = []
    for request in requests:
        context, options = request.args
        given = options or {}
        asked = given.get("max_gen_toks") or given.get("max_new_tokens")
        room = int(asked or getattr(model, "max_gen_toks", None) or _GENERATED)
        tokens = len(model.tok_encode(context))
        if tokens + room > limit:
            long.append((tokens, room, _where(request)))
    if long:
        tokens, room, where = max(long)
        raise EngineError(
            f"{len(long)} prompts do not fit a context of {limit} tokens; the longest has {tokens}, and {room} are to "
            f"be generated ({where})",
            "serve or load the model with a longer context, or ask with fewer shots or a smaller max_gen_toks",
        )


def prompts_digest(prompt_hashes: Sequence[tuple[str, str]]) -> str:
    """Digest of the (prompt, target) hashes of one task, in order: what a suite's seal holds."""
    return hashlib.sha256("".join(p + t for p, t in prompt_hashes).encode()).hexdigest()


# ---- answers ---------------------------------------------------------------------------------------------------------


class Answers:
    """Log-likelihoods by request, read from and appended to ``folder/answers.jsonl``.

    Args:
        key: digest of everything but the prompt that an answer depends on.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file, self._key = folder / ANSWERS_FILE, key
        self._by_request: dict[str, Answer] = {}
        self._read()

    def _read(self) -> None:
        """Take every whole line; what a killed process left half written is dropped."""
        if not self._file.is_file():
            return
        text = self._file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        for line in whole.split("\n")[:-1]:
            entry = json.loads(line)
            self._by_request[entry["request"]] = (float(entry["loglikelihood"]), bool(entry["greedy"]))
        if whole != text:
            self._file.write_text(whole, encoding="utf-8")

    def __len__(self) -> int:
        return len(self._by_request)

    def name(self, context: str, answer: str) -> str:
        """Digest of model, settings and prompt."""
        return hashlib.sha256(json.dumps([self._key, context, answer]).encode()).hexdigest()

    def get(self, context: str, answer: str) -> Answer | None:
        """The stored answer, if there is one."""
        return self._by_request.get(self.name(context, answer))

    def add(self, context: str, answer: str, scored: Answer) -> None:
        """Store one answer at once; one that is no number is refused."""
        value = float(scored[0])
        if not math.isfinite(value):
            raise EngineError(f"the model gave a log-likelihood of {value}", "check its weights and compute dtype")
        name = self.name(context, answer)
        if name in self._by_request:
            return
        self._by_request[name] = (value, bool(scored[1]))
        line = json.dumps({"request": name, "loglikelihood": value, "greedy": bool(scored[1])})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def discard(self) -> None:
        """Remove the file once the receipt stands."""
        self._file.unlink(missing_ok=True)


class Recorder:
    """lm-eval's cache hook: takes every answer as soon as a model has it."""

    def __init__(self, answers: Answers, advance: Any = None) -> None:
        self._answers, self._advance = answers, advance

    def add_partial(self, attr: str, request: Iterable[Any], scored: Any) -> None:
        """Called by lm-eval's models with the request and its answer."""
        if attr != "loglikelihood":
            return
        context, answer = request
        self._answers.add(context, answer, scored)
        if self._advance is not None:
            self._advance(1, 1)


# ---- the model that lm-eval sees -------------------------------------------------------------------------------------


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
        answers = [self.answers.get(p.context, p.answer) for p in prompts]
        unanswered = answers.count(None)
        if unanswered:
            raise EngineError(
                f"{unanswered} of {len(answers)} requests were not answered", "run the same command again"
            )
        return [answer for answer in answers if answer is not None]

    def _ask(self, prompts: dict[tuple[str, str], Prompt]) -> None:
        missing = [p for p in prompts.values() if self.answers.get(p.context, p.answer) is None]
        if not missing:
            return
        with phase("tasks", total=len(missing), unit="answers", item="answer") as advance:
            self.inner.set_cache_hook(Recorder(self.answers, advance))
            try:
                answers = self.inner._loglikelihood_tokens([p.request() for p in missing], disable_tqdm=True)
            except self._failures as error:
                have = sum(self.answers.get(p.context, p.answer) is not None for p in prompts.values())
                raise EngineError(
                    f"the server stopped answering ({type(error).__name__}): {have} of {len(prompts)} requests are "
                    "answered and kept; the run is INVALID until it is whole, and no score is given",
                    "start the server again and run the same command: it goes on from there",
                ) from error
        for prompt, answer in zip(missing, answers, strict=True):
            self.answers.add(prompt.context, prompt.answer, answer)

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """Whole-text likelihoods, as the inner model computes them; not resumed."""
        values: list[float] = self.inner.loglikelihood_rolling(requests, disable_tqdm=True)
        return values

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Greedy generation by the inner model; not stored (a text may quote its question), so not resumed.

        Raises:
            EngineError: a prompt and the tokens to generate do not fit: lm-eval would cut the prompt's beginning.
        """
        refuse_long_generation(requests, self.inner, self._limit)
        texts: list[str] = self.inner.generate_until(requests, disable_tqdm=True)
        return texts
