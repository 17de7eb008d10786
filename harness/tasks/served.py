"""A model behind an OpenAI-compatible server, asked by lm-eval's own ``local-completions``, its arguments checked.

Checked before anything is scored: that the address is one, that the server knows the model, that its context is long
enough, that it echoes the tokens it is sent with a log-probability each, and that its tokenizer is the candidate's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import httpx

from harness.errors import EngineError
from harness.served.address import Server
from harness.served.fetch import LARGEST, Fetched, fetch
from harness.tasks.asking import Prompt
from harness.types import Check

#: Largest change of a repeated answer, in nats, that is still the same model.
REPEAT_TOLERANCE = 0.5
#: Share of echoed tokens whose text may differ from our tokenizer's (bytes of split characters).
TEXT_TOLERANCE = 0.02


def _post(url: str, body: dict[str, Any], what: str) -> Fetched:
    try:
        return fetch("POST", url, body=body, seconds=300, most=LARGEST)
    except httpx.HTTPError as error:
        raise EngineError(f"the server did not answer {what} ({type(error).__name__})", "see its log") from error


def open_served(server: Server, tokenizer_folder: str, tokenizer: Any, *, num_concurrent: int) -> Any:
    """lm-eval's ``local-completions`` for this server, with token ids in and BOS as the tokenizer has it."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{server.root}/completions",
        model=server.model,
        tokenizer=tokenizer_folder,
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        add_bos_token=adds_special_tokens(tokenizer),
        num_concurrent=num_concurrent,
        # Longer prompts were refused before; lm-eval would cut them.
        max_length=server.context or 1_000_000_000,
        batch_size=1,
        max_retries=3,
    )


def public_name(server: Server) -> str:
    """The server's name for its model; vLLM's is the folder that it was started with, and a path is in no receipt."""
    path = PurePath(server.model)
    return path.name if path.is_absolute() else server.model


def adds_special_tokens(tokenizer: Any) -> bool:
    """Whether the tokenizer puts special tokens around a text by itself."""
    return bool(tokenizer("a").input_ids != tokenizer("a", add_special_tokens=False).input_ids)


def failures() -> tuple[type[Exception], ...]:
    """What lm-eval's client raises when a server dies or answers nonsense."""
    import aiohttp
    import requests
    import tenacity

    network = (aiohttp.ClientError, requests.RequestException, tenacity.RetryError, TimeoutError, OSError)
    return (*network, KeyError, TypeError, IndexError, AssertionError)


@dataclass(slots=True)
class ServedPreflight:
    """Two documents, every request of theirs scored, else stop; ``checks`` go into the receipt."""

    server: Server
    lm: Any
    tokenizer: Any
    checks: list[Check] = field(default_factory=list)

    def __call__(self, _requests: Sequence[Any], prompts: Sequence[Prompt]) -> None:
        """Ask the first document and the longest one."""
        chosen = two_documents(prompts)
        values = [self._score(prompt) for prompt in chosen]
        self._same_tokenizer(chosen[0])
        if len(set(values)) == 1 and len(values) > 1:
            raise EngineError(
                f"every answer has the log-likelihood {values[0]:g}: the server does not score prompts",
                "turn speculative decoding off, and check that prompt log-probabilities are supported",
            )
        change = abs(self._score(chosen[0]) - values[0])
        if change > REPEAT_TOLERANCE:
            raise EngineError(
                f"the same request gave a log-likelihood that differs by {change:.3g} nats",
                "turn prefix caching and speculative decoding off",
            )
        longest = max(prompt.tokens for prompt in chosen)
        self.checks += [
            Check(name="two documents", passed=True, figure=f"{len(chosen)} requests, up to {longest} tokens"),
            Check(name="a repeated request", passed=True, figure=f"changes by {change:.3g} nats"),
        ]

    def _score(self, prompt: Prompt) -> float:
        """One request as lm-eval sends it, its answer looked at token by token."""
        ids = [*prompt.context_ids, *prompt.answer_ids]
        payload = self.lm._create_payload([ids], generate=False, seed=self.lm._seed)
        response = _post(f"{self.server.root}/completions", payload, f"a request of {len(ids)} tokens")
        if response.status != 200:
            raise EngineError(
                f"the server refuses a request of {len(ids)} tokens (HTTP {response.status}): "
                f"{_message(response, prompt)}",
                "check its context length, its vocabulary and that it allows prompt log-probabilities",
            )
        choice = self._choice(response)
        check_echo(choice, ids, self.tokenizer)
        try:
            parsed = self.lm.parse_logprobs(response.json, tokens=[ids], ctxlens=[len(prompt.context_ids)])
            return float(parsed[0][0])
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise _no_logprobs() from error

    def _choice(self, response: Fetched) -> dict[str, Any]:
        content = response.json
        choices = content.get("choices") if isinstance(content, dict) else None
        choice = choices[0] if isinstance(choices, list) and choices else None
        logprobs = choice.get("logprobs") if isinstance(choice, dict) else None
        values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        if not isinstance(values, list) or not values:
            raise _no_logprobs()
        assert isinstance(choice, dict)
        return choice

    def _same_tokenizer(self, prompt: Prompt) -> None:
        """Where the server can tokenize (vLLM), its ids must be ours."""
        body = {
            "model": self.server.model,
            "prompt": prompt.context.rstrip(),
            "add_special_tokens": adds_special_tokens(self.tokenizer),
        }
        url = f"{self.server.root.removesuffix('/v1')}/tokenize"
        content = _post(url, body, "at /tokenize").json
        tokens = content.get("tokens") if isinstance(content, dict) else None
        if not isinstance(tokens, list):
            self.checks.append(Check(name="tokenizer", passed=True, figure="echoed token texts are ours"))
            return
        if tokens != list(prompt.context_ids):
            raise disagreement(f"{len(tokens)} tokens where the candidate's gives {len(prompt.context_ids)}")
        self.checks.append(Check(name="tokenizer", passed=True, figure=f"the same {len(tokens)} ids at /tokenize"))


def _no_logprobs() -> EngineError:
    return EngineError(
        "the server's answer has no log-probabilities of the prompt",
        "it must support echo with logprobs in /v1/completions (vLLM and SGLang do)",
    )


def two_documents(prompts: Sequence[Prompt]) -> list[Prompt]:
    """All requests of the first document and of that with the longest prompt."""
    contexts = [prompts[0].context, max(prompts, key=lambda p: p.tokens).context]
    return [prompt for context in dict.fromkeys(contexts) for prompt in prompts if prompt.context == context]


def disagreement(how: str) -> EngineError:
    """The one line about tokenizers."""
    return EngineError(
        f"the server's tokenizer disagrees with the candidate's: {how}",
        "name the checkpoint that is served as CANDIDATE, or serve it with its own tokenizer",
    )


def check_echo(choice: dict[str, Any], ids: Sequence[int], tokenizer: Any) -> None:
    """Every token that was sent comes back with a log-probability, and is the token that our tokenizer means.

    Raises:
        EngineError: another number of tokens, a value that is no log-probability, or other tokens.
    """
    logprobs = choice["logprobs"]["token_logprobs"]
    if len(logprobs) != len(ids) + 1:
        raise EngineError(
            f"{len(ids)} tokens were sent, {len(logprobs) - 1} came back: the server adds or drops tokens",
            "turn off what it puts before a prompt (BOS, a chat template)",
        )
    known = [value for value in logprobs[1:-1] if value is not None]
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
    if len(known) < len(ids) - 1 or not numbers or any(not math.isfinite(v) or v > 1e-6 for v in known):
        raise EngineError("the server's log-probabilities have gaps or are above 0", "see its log")
    if len(ids) > 2 and all(value == 0 for value in known):
        raise EngineError("every log-probability of the prompt is 0", "turn speculative decoding off")
    told = choice["logprobs"].get("tokens")
    _check_texts([str(token) for token in told] if isinstance(told, list) else [], ids, tokenizer)


def _check_texts(tokens: Sequence[str], ids: Sequence[int], tokenizer: Any) -> None:
    pairs = list(zip(tokens, ids, strict=False))
    if pairs and all(str(token).startswith("token_id:") for token, _ in pairs):
        differ = sum(token.removeprefix("token_id:") != str(number) for token, number in pairs)
        compared = len(pairs)
    else:
        ours = [(token.strip(), tokenizer.decode([number]).strip()) for token, number in pairs]
        plain = [(theirs, mine) for theirs, mine in ours if theirs.isascii() and mine.isascii()]
        differ, compared = sum(theirs != mine for theirs, mine in plain), len(plain)
    if compared and differ / compared > TEXT_TOLERANCE:
        raise disagreement(f"{differ} of {compared} echoed tokens are others")


def _message(response: Fetched, prompt: Prompt) -> str:
    """The server's first words, unless they quote the question."""
    text = " ".join(response.text.split())[:200]
    quoted = any(prompt.context[at : at + 20] in text for at in range(max(1, len(prompt.context) - 19)))
    return "(its message quotes the prompt)" if quoted and len(prompt.context) >= 20 else text
