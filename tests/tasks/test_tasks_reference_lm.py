"""Log-likelihoods of the reference engine against lm-eval's own HFLM on the same weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from harness.engines.hf import TransformersEngine
from harness.errors import EngineError
from harness.tasks.asking import Answers, AskingLM, encode_prompts, refuse_long
from harness.tasks.reference_lm import CachedScorer, ReferenceLM, RowScorer, answer_of, shared_length
from tests.engines.toy import ToyEngine
from tests.tiny import text

LETTERS = [" A", " B", " C", " D"]
PARENTHESES = [" (A)", " (B)", " (C)", " (D)"]
WORDS = [" the mill", " the", " seven boats left", " a"]


def instances(questions: int, answers: list[str], *, seed: int = 0) -> list[Instance]:
    """Requests as lm-eval builds them for questions of different lengths."""
    return [
        Instance(
            request_type="loglikelihood",
            doc={},
            arguments=(f"{text(seed + n, 1 + n % 2)[: 40 + 7 * n % 90]}\nAnswer:", answer),
            idx=idx,
            metadata=("made", n, 1),
        )
        for n in range(questions)
        for idx, answer in enumerate(answers)
    ]


@pytest.mark.parametrize("answers", [LETTERS, PARENTHESES, WORDS], ids=["one-token", "parentheses", "words"])
def test_a_hundred_items_equal_hflm(answers: list[str], engine: TransformersEngine, tokenizer: Any) -> None:
    """Float32, at most 1e-4 nats apart, and the same greedy flags; every answer is several tokens of bytes."""
    requests = instances(25, answers)
    theirs = HFLM(pretrained=engine.model, tokenizer=tokenizer, batch_size=8).loglikelihood(requests, disable_tqdm=True)
    ours = ReferenceLM(engine, tokenizer).loglikelihood(requests, disable_tqdm=True)
    assert len(ours) == 100
    assert max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True)) <= 1e-4
    assert [a[1] for a in ours] == [b[1] for b in theirs]


def test_answers_of_one_token_share_one_forward(engine: TransformersEngine) -> None:
    calls: list[tuple[int, ...]] = []

    def count(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        calls.append(tuple(kwargs["input_ids"].shape))

    handle = engine.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        scorer = CachedScorer(engine.model)
        list(scorer.score([([5, 6, 7], [[1], [2], [3], [4]])]))
        assert calls == [(1, 3)]
        calls.clear()
        list(scorer.score([([5, 6, 7], [[9, 1, 8], [9, 2, 8], [9, 3], [9]])]))
        assert calls == [(1, 3), (3, 2)]
        calls.clear()
        list(scorer.score([([5, 6, 7], [[9, 1, 8], [9, 2, 8]])]))
        assert calls == [(1, 4), (2, 1)]
    finally:
        handle.remove()


def test_rests_of_different_lengths_are_not_mixed(engine: TransformersEngine) -> None:
    """Against one whole forward for every answer, in another order of answers too."""
    context, answers = [70, 71, 72], [[9, 1, 8, 4], [9], [9, 3], [5, 5, 5, 5, 5], [6]]
    found = next(iter(CachedScorer(engine.model).score([(context, answers)])))
    turned = next(iter(CachedScorer(engine.model).score([(context, answers[::-1])])))
    assert [v for v, _ in turned] == pytest.approx([v for v, _ in found][::-1], abs=1e-4)
    for (value, greedy), answer in zip(found, answers, strict=True):
        with torch.inference_mode():
            logits_TV = engine.model(input_ids=torch.tensor([context + answer[:-1]])).logits[0, len(context) - 1 :]
        slow = torch.log_softmax(logits_TV.double(), -1)[range(len(answer)), answer]
        assert value == pytest.approx(float(slow.sum()), abs=1e-4)
        assert greedy == (logits_TV.argmax(-1).tolist() == answer)


def test_the_engine_seam_gives_the_same(engine: TransformersEngine, tokenizer: Any) -> None:
    questions = [([5, 6, 7], [[1], [2]]), ([70, 71, 72, 73], [[9, 1, 8], [9, 2, 8], [9], [4, 4]])]
    cached, rows = CachedScorer(engine.model).score(questions), RowScorer(engine).score(questions)
    for ours, theirs in zip(cached, rows, strict=True):
        assert [v for v, _ in ours] == pytest.approx([v for v, _ in theirs], abs=1e-4)


def test_any_engine_answers_exactly() -> None:
    """The toy engine says ``t + 1`` with probability 0.9: known answers, no model."""
    questions = [([1, 2], [[3], [4], [3, 4], [3, 5]])]
    found = next(iter(RowScorer(ToyEngine(vocab_size=16)).score(questions)))
    rest = 0.1 / 15
    expected = [0.9, rest, 0.81, 0.9 * rest]
    assert [v for v, _ in found] == pytest.approx([float(torch.tensor(e).log()) for e in expected], abs=1e-5)
    assert [greedy for _, greedy in found] == [True, False, True, False]


def test_a_cache_that_is_more_than_attention(tokenizer: Any) -> None:
    """Linear-attention layers keep a state that cannot be repeated: the cache is copied for each answer."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    model = Qwen3NextForCausalLM(config).eval()
    context, answers = [70, 71, 72], [[9, 1, 8], [9, 2, 8], [9], [4, 4]]
    found = next(iter(CachedScorer(model).score([(context, answers)])))
    for (value, _), answer in zip(found, answers, strict=True):
        with torch.inference_mode():
            logits_TV = model(input_ids=torch.tensor([context + answer[:-1]])).logits[0, len(context) - 1 :]
        assert value == pytest.approx(answer_of(logits_TV, answer)[0], abs=1e-4)


def test_generation_and_whole_texts_are_hflms(engine: TransformersEngine, tokenizer: Any) -> None:
    lm = ReferenceLM(engine, tokenizer)
    ask = [Instance("generate_until", {}, ("the mill", {"until": ["."], "max_gen_toks": 5}), 0, ("made", 0, 1))]
    assert len(lm.generate_until(ask, disable_tqdm=True)[0]) > 0
    whole = [Instance("loglikelihood_rolling", {}, ("the mill",), 0, ("made", 0, 1))]
    assert lm.loglikelihood_rolling(whole, disable_tqdm=True)[0] < 0
    with pytest.raises(EngineError, match="engine toy scores rows only"):
        ReferenceLM(ToyEngine(), tokenizer).generate_until(ask)


def test_shared_length() -> None:
    assert shared_length([[1, 2, 3], [1, 2, 3]]) == 3
    assert shared_length([[1, 2, 3], [1, 2]]) == 2
    assert shared_length([[1, 2, 3], [1, 5, 3]]) == 1


def prompt(context: str, answer: str) -> Any:
    return SimpleNamespace(args=(context, answer), task_name="made", doc_id=3, idx=1)


def test_blanks_move_to_the_answer_as_in_lm_eval(tokenizer: Any) -> None:
    found = encode_prompts([prompt("the mill ", "x")], tokenizer.encode, 256)[0]
    assert tokenizer.decode(found.answer_ids) == " x"


def test_an_answer_that_merges_with_its_prompt_is_refused(engine: TransformersEngine, tokenizer: Any) -> None:
    """One line that names the item; nothing is scored."""

    def merging(string: str) -> list[int]:
        return [ord(c) for c in string.replace(": A", "#")]

    with pytest.raises(EngineError, match="made, document 3, choice 1: the answer merges with its prompt") as caught:
        encode_prompts([prompt("Answer:", " A")], merging, None)
    assert "Answer" not in str(caught.value)
    with pytest.raises(EngineError, match="merges"):
        encode_prompts([prompt("Answer:", "")], merging, None)


def test_an_empty_context_is_the_prefix_token(tokenizer: Any) -> None:
    assert encode_prompts([prompt("", "ab")], tokenizer.encode, 256)[0].context_ids == (256,)
    with pytest.raises(EngineError, match="no context"):
        encode_prompts([prompt("", "ab")], tokenizer.encode, None)


def test_a_context_too_short_is_refused_before_any_compute(
    engine: TransformersEngine, tokenizer: Any, tmp_path: Any
) -> None:
    """Never a shorter prompt."""
    lm = AskingLM(ReferenceLM(engine, tokenizer), Answers(tmp_path, "k"), limit=50)
    with pytest.raises(EngineError, match=r"prompts do not fit a context of 50 tokens; the longest has \d+ \(made"):
        lm.loglikelihood(instances(25, LETTERS))
    assert not list(tmp_path.iterdir())
    refuse_long([], None)
