"""Answers to questions of four choices: CPU time against lm-eval's own HFLM on the same model, and that both agree.

HFLM shares a prompt between answers of one token only (its ``logits_cache``, on by default), and computes the output
head at every position; answers of several tokens, as GPQA's ``(A)``, it runs whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from harness.bench.timing import Figure, cpu_seconds, interleaved, one_thread

Request = tuple[tuple[str, str], list[int], list[int]]


def run(vocab: int, hidden: int, layers: int, questions: int, length: int, rounds: int) -> list[Figure]:
    """CPU seconds a question and their ratio, for answers of one token and of three."""
    from lm_eval.models.huggingface import HFLM

    from harness.tasks.evaluating import quiet_lm_eval
    from harness.tasks.reference_lm import ReferenceLM

    model, tokenizer = _model(vocab, hidden, layers), _tokenizer(vocab)
    with quiet_lm_eval():
        theirs: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, max_length=2 * length)
    ours = ReferenceLM(_Loaded(model), tokenizer)  # type: ignore[arg-type]
    figures = []
    for tokens in (1, 3):
        requests = made_up_requests(vocab, questions, length, tokens)
        figures += _compare(theirs, ours, requests, questions, tokens, rounds)
    return figures


class _Loaded:
    """As much of an engine as the answers need: the model."""

    def __init__(self, model: Any) -> None:
        self.model = model


def _compare(theirs: Any, ours: Any, requests: list[Request], questions: int, tokens: int, rounds: int) -> list[Figure]:
    def answers(lm: Any) -> list[float]:
        return [value for value, _ in lm._loglikelihood_tokens(requests, disable_tqdm=True)]

    difference = float(np.abs(np.subtract(answers(ours), answers(theirs))).max())
    works = {"ours": lambda: answers(ours), "HFLM": lambda: answers(theirs)}
    with one_thread():
        seconds = interleaved(works, rounds, clock=cpu_seconds)
    what = f"4 answers of {tokens} token{'s' * (tokens > 1)}"
    return [
        Figure(name=f"{what}, ours", value=seconds["ours"] / questions, unit="CPU-s a question"),
        Figure(name=f"{what}, lm-eval's HFLM, batch 8", value=seconds["HFLM"] / questions, unit="CPU-s a question"),
        Figure(name=f"{what}, HFLM over ours", value=seconds["HFLM"] / seconds["ours"], unit="x", least=1.0),
        Figure(name=f"{what}, largest difference", value=difference, unit="nats", most=1e-4),
    ]


def made_up_requests(vocab: int, questions: int, length: int, tokens: int) -> list[Request]:
    """Prompts of random ids, of ``length`` tokens give or take a fifth; answers differ in their last but one token."""
    rng = np.random.default_rng(11)
    requests: list[Request] = []
    for number in range(questions):
        prompt = rng.integers(3, vocab, int(length * rng.uniform(0.8, 1.2))).tolist()
        opening, closing = rng.integers(3, vocab, 2).tolist()
        for choice in range(4):
            letter = 3 + choice
            answer = [letter] if tokens == 1 else [opening, letter, *[closing] * (tokens - 2)]
            requests.append(((f"{tokens} {number}", str(choice)), prompt, answer))
    return requests


def _model(vocab: int, hidden: int, layers: int) -> Any:
    """A Llama with random weights in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config).eval()


def _tokenizer(vocab: int) -> Any:
    """What HFLM wants to hold, though ids go in: one word an id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(vocab)}
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {w: n for w, n in words.items() if n > 2}
    made = Tokenizer(models.WordLevel(vocab=words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
