"""What is asked of a model, in tokens, checked whole before anything is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import EngineError

Encode = Callable[[str], list[int]]


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


def encode_prompts(instances: Sequence[Any], encode: Encode, prefix_token: int | None) -> list[Prompt]:
    """lm-eval's log-likelihood requests as tokens, split where lm-eval splits them.

    Raises:
        EngineError: an answer merges with its prompt, so that no tokens of its own follow the prompt's tokens.
    """
    contexts: dict[str, tuple[int, ...]] = {}
    return [_prompt(instance, encode, prefix_token, contexts) for instance in instances]


def _prompt(instance: Any, encode: Encode, prefix_token: int | None, contexts: dict[str, tuple[int, ...]]) -> Prompt:
    context, answer = instance.args
    where = f"{instance.task_name}, document {instance.doc_id}, choice {instance.idx}"
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
    """Refuse, before any compute, prompts longer than the model's context: nothing is ever truncated (FAULTS A 10)."""
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


def prompts_digest(prompt_hashes: Sequence[tuple[str, str]]) -> str:
    """Digest of the (prompt, target) hashes of one task, in order: what a suite's seal holds."""
    return hashlib.sha256("".join(p + t for p, t in prompt_hashes).encode()).hexdigest()
