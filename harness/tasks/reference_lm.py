"""lm-eval's view of a reference engine: the answers to one question share one forward pass of their prompt.

What is shared is the longest common beginning of prompt and answers. Where every answer is one token, that is all
there is to run; where answers are longer, their rest follows from the prompt's cache. Logits are computed at the
scored positions only. Suffixes: T positions, V vocabulary, B answers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix

from harness.digest import ids_digest
from harness.engines.head import head_logits
from harness.errors import EngineError
from harness.types import Engine, Hidden, Logits, Row, RowOutputs

Request = tuple[tuple[str, str], list[int], list[int]]
Answer = tuple[float, bool]


class ReferenceLM(TemplateLM):
    """Scores with any engine of the harness; the transformers engine reuses its cache within a question.

    Args:
        tokenizer: the model's own; special tokens are added as it adds them by itself, as lm-eval's HFLM does.
    """

    def __init__(self, engine: Engine, tokenizer: Any) -> None:
        super().__init__()
        self.engine, self.tokenizer = engine, tokenizer
        model = getattr(engine, "model", None)
        self._scorer: CachedScorer | RowScorer = RowScorer(engine) if model is None else CachedScorer(model)

    @property
    def shares_cache(self) -> bool:
        """Whether a question's answers follow from one cache; else the engine runs rows."""
        return isinstance(self._scorer, CachedScorer)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return int(bos) if bos is not None else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids of a text."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            special = {"add_special_tokens": False}
        return list(self.tokenizer.encode(string, **special))

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[Answer]:
        questions: dict[tuple[int, ...], list[int]] = {}
        for number, (_texts, context, _answer) in enumerate(requests):
            questions.setdefault(tuple(context), []).append(number)
        by_number: dict[int, Answer] = {}
        asked = [(list(context), [requests[n][2] for n in numbers]) for context, numbers in questions.items()]
        for numbers, answers in zip(questions.values(), self._scorer.score(asked), strict=True):
            for number, answer in zip(numbers, answers, strict=True):
                by_number[number] = answer
                self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
        return [by_number[number] for number in range(len(requests))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Whole texts: lm-eval's own HFLM on the loaded model is enough."""
        values: list[float] = self._hflm().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return values

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Greedy generation: lm-eval's own HFLM on the loaded model is enough."""
        texts: list[str] = self._hflm().generate_until(requests, disable_tqdm=disable_tqdm)
        return texts

    def _hflm(self) -> Any:
        from lm_eval.models.huggingface import HFLM

        if not hasattr(self.engine, "model"):
            raise EngineError(
                f"engine {self.engine.identity.engine} scores rows only", "choose tasks scored by log-likelihood"
            )
        return HFLM(pretrained=self.engine.model, tokenizer=self.tokenizer, batch_size=1)


#: A question: the prompt's ids and those of each answer.
Question = tuple[list[int], list[list[int]]]


def answer_of(logits_TV: torch.Tensor, answer: Sequence[int]) -> Answer:
    """Log-likelihood in nats of an answer's tokens, and whether each is the likeliest one."""
    logprobs_TV = torch.log_softmax(logits_TV.double(), dim=-1)
    ids_T = torch.tensor(answer, device=logprobs_TV.device)
    value = logprobs_TV.gather(1, ids_T[:, None]).sum()
    return float(value), bool((logprobs_TV.argmax(-1) == ids_T).all())


def shared_length(inputs: Sequence[Sequence[int]]) -> int:
    """Length of the longest common beginning."""
    shortest = min(inputs, key=len)
    for at, token in enumerate(shortest):
        if any(other[at] != token for other in inputs):
            return at
    return len(shortest)


class CachedScorer:
    """One forward pass of what a question's answers share, then one of their rests from its cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        # transformers renames it, and warns of the old name from then on.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def score(self, questions: Sequence[Question]) -> Iterator[list[Answer]]:
        """Yield the answers' log-likelihoods, question by question."""
        for context, answers in questions:
            with torch.inference_mode():
                yield self._question(context, answers)

    def _question(self, context: list[int], answers: list[list[int]]) -> list[Answer]:
        inputs = [context + answer[:-1] for answer in answers]
        shared = shared_length(inputs)
        rests = [ids[shared:] for ids in inputs]
        first = shared - len(context) + 1
        with self._head_sees_last(first):
            out = self._model(input_ids=self._ids([inputs[0][:shared]]), use_cache=any(rests))
        start_TV = out.logits[0]
        tails = self._tails(getattr(out, self._cache), [rest for rest in rests if rest]) if any(rests) else iter(())
        scored = []
        for rest, answer in zip(rests, answers, strict=True):
            logits_TV = torch.cat([start_TV, next(tails)]) if rest else start_TV
            scored.append(answer_of(logits_TV[: len(answer)], answer))
        return scored

    def _tails(self, cache: Any, rests: list[list[int]]) -> Iterator[torch.Tensor]:
        """Logits ``[T, V]`` of each rest. A cache of attention alone is repeated for all of them in one batch."""
        if not _plain_attention(cache):
            for rest in rests:
                yield self._after(copy.deepcopy(cache), [rest])[0]
            return
        # Ids after a rest's end are never seen by it: attention looks back only.
        longest = max(map(len, rests))
        padded = [rest + [rest[-1]] * (longest - len(rest)) for rest in rests]
        cache.batch_repeat_interleave(len(rests))
        for rest, logits_TV in zip(rests, self._after(cache, padded), strict=True):
            yield logits_TV[: len(rest)]

    def _after(self, cache: Any, rows: list[list[int]]) -> torch.Tensor:
        """Logits ``[B, T, V]`` of rows of one length that follow what is in the cache."""
        logits: torch.Tensor = self._model(input_ids=self._ids(rows), use_cache=True, **{self._cache: cache}).logits
        return logits

    def _ids(self, rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.long, device=self._model.device)

    @contextmanager
    def _head_sees_last(self, positions: int) -> Iterator[None]:
        """Give the output head the last positions only: the rest of its logits are never asked for."""

        def cut(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (inputs[0][:, -positions:], *inputs[1:])

        handle = self._model.get_output_embeddings().register_forward_pre_hook(cut)
        try:
            yield
        finally:
            handle.remove()


def _plain_attention(cache: Any) -> bool:
    """Whether every layer's cache is keys and values alone, so that it can be repeated along the batch."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    layers = getattr(cache, "layers", None) or []
    return bool(layers) and all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


class RowScorer:
    """Through the engine seam: one row for every distinct beginning; one-token answers share theirs.

    All rows are handed over at once, so that an engine may stream a model larger than memory layer by layer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def score(self, questions: Sequence[Question]) -> Iterator[list[Answer]]:
        """Yield the answers' log-likelihoods, question by question."""
        plan = [_distinct(context, answers) for context, answers in questions]
        rows = [_row(n, ids) for n, ids in enumerate(ids for inputs in plan for ids in inputs)]
        outputs = self._engine.run(rows, "hidden")
        for (context, answers), inputs in zip(questions, plan, strict=True):
            logits = {ids: self._logits(next(outputs), ids, len(context)) for ids in inputs}
            yield [answer_of(logits[tuple(context + answer[:-1])], answer) for answer in answers]

    def _logits(self, row: RowOutputs, ids: tuple[int, ...], context: int) -> torch.Tensor:
        """Logits ``[T, V]`` from the context's last token on."""
        if row.echoed_ids_T.tolist() != list(ids):
            raise EngineError(f"the engine ran other tokens than it was given (row {row.index})", "report this")
        if isinstance(row.outputs, Logits):
            return row.outputs.logits_TV[context - 1 :]
        if isinstance(row.outputs, Hidden) and self._engine.head is not None:
            return head_logits(self._engine.head, row.outputs.states_TH[context - 1 :])
        raise EngineError(f"engine {self._engine.identity.engine} gives no logits", "use --base-url for a served model")


def _distinct(context: list[int], answers: list[list[int]]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(tuple(context + answer[:-1]) for answer in answers))


def _row(index: int, ids: Sequence[int]) -> Row:
    ids_T = np.array(ids, dtype=np.int32)
    return Row(index=index, ids_T=ids_T, document=str(index), domain="tasks", sha256=ids_digest(ids_T))
