"""vLLM's wire form: the model's own numbers come through, its quirks are undone, and what is no answer is refused."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from harness.errors import EngineError
from harness.served.connect import connect
from harness.served.http import Answer, Patience
from harness.served.identity import VLLM, ServedWeights, base_name
from harness.served.vllm_answers import read_completion, read_generated
from harness.types import Row
from tests.served.made_rows import LENGTH, exact
from tests.served.mock_vllm import Faults, MockVllm, Numbers, serving
from tests.tiny import VOCAB

QUICK = Patience(timeout=20, tries=2, wait=0.01)
#: Float32 on both sides, summed in another order.
CLOSE = 2e-5


def served(model: Any, faults: Faults | None = None, **settings: Any) -> MockVllm:
    return MockVllm(numbers=Numbers(model, faults), **settings)


@pytest.mark.parametrize("k", [0, 1, 20, VOCAB])
def test_prompt_logprobs_are_the_model_s_own(k: int, small_model: Any, rows: list[Row]) -> None:
    """Targets and top k at every position, against float64 from the model (k or k + 1 entries)."""
    mock = served(small_model)
    with serving(mock) as url:
        answers = list(connect("vllm", url, patience=QUICK).run(rows, k=k))
    for row, answer in zip(rows, answers, strict=True):
        truth_TV = exact(small_model, row)
        at = np.arange(LENGTH - 1)
        np.testing.assert_array_equal(answer.echoed_ids_T, row.ids_T)
        np.testing.assert_allclose(answer.target_logprob_T, truth_TV[at, row.ids_T[1:]], atol=CLOSE)
        assert answer.ids_TK.shape == answer.logprobs_TK.shape == (LENGTH - 1, k)
        np.testing.assert_allclose(answer.logprobs_TK, -np.sort(-truth_TV, axis=1)[:, :k], atol=CLOSE)
        told_TK = np.take_along_axis(truth_TV, answer.ids_TK.astype(np.int64), axis=1)
        np.testing.assert_allclose(answer.logprobs_TK, told_TK, atol=CLOSE)
        assert answer.asked_TM is None and answer.cached_tokens == 0 and answer.seconds > 0
    body = mock.numbers.bodies[-1]
    assert (
        body["add_special_tokens"] is False and body["temperature"] == 0 and body["prompt"] == rows[-1].ids_T.tolist()
    )


def test_both_kinds_of_list_are_met(small_model: Any, rows: list[Row]) -> None:
    """Without both the test above would show nothing about the extra entry."""
    target_in_top = [exact(small_model, row).argsort(1)[:, -20:] == row.ids_T[1:, None] for row in rows]
    share = np.mean([found.any(axis=1).mean() for found in target_in_top])
    assert 0.05 < share < 0.95


@pytest.mark.parametrize("k", [0, 5])
def test_chosen_ids_are_scored(k: int, small_model: Any, rows: list[Row]) -> None:
    """Way (a): ids of our choice a position, unused slots as NaN, the targets with them in one answer."""
    drawn = {row.index: np.random.default_rng(row.index).integers(-40, VOCAB, (LENGTH - 1, 9)) for row in rows}
    wanted = {index: np.maximum(ids_TM, -1) for index, ids_TM in drawn.items()}
    mock = served(small_model)
    with serving(mock) as url:
        engine = connect("vllm", url, patience=QUICK)
        assert engine.capabilities.fixed_ids and engine.capabilities.note == ""
        answers = list(engine.run(rows, k=k, ask=lambda row: wanted[row.index].astype(np.int32)))
    for row, answer in zip(rows, answers, strict=True):
        truth_TV, ids_TM = exact(small_model, row), wanted[row.index]
        expected_TM = np.where(ids_TM < 0, np.nan, np.take_along_axis(truth_TV, np.maximum(ids_TM, 0), axis=1))
        assert answer.asked_TM is not None
        np.testing.assert_allclose(answer.asked_TM, expected_TM, atol=CLOSE)
        assert np.isnan(answer.asked_TM).any()
        np.testing.assert_allclose(answer.target_logprob_T, truth_TV[np.arange(LENGTH - 1), row.ids_T[1:]], atol=CLOSE)
        np.testing.assert_allclose(answer.logprobs_TK, -np.sort(-truth_TV, axis=1)[:, :k], atol=CLOSE)
    params = mock.numbers.bodies[-1]["sampling_params"]
    assert [ids[-1] for ids in params["prompt_logprob_token_ids"]] == mock.numbers.bodies[-1]["token_ids"][1:]
    assert params.get("prompt_logprobs", 0) == k


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (403, "POST /inference/v1/generate answers 403: started without --enable-scale-out; using prompt_logprobs"),
        (404, "POST /inference/v1/generate answers 404: this version does not have it; using prompt_logprobs"),
        (
            400,
            "POST /inference/v1/generate answers 400: prompt_logprob_token_ids requires the V2 model runner.; "
            "using prompt_logprobs",
        ),
    ],
)
def test_servers_without_chosen_ids_say_why(status: Any, why: str, small_model: Any, rows: list[Row]) -> None:
    with serving(served(small_model, fixed_ids=status)) as url:
        engine = connect("vllm", url, patience=QUICK)
        assert not engine.capabilities.fixed_ids and engine.capabilities.note == why
        assert len(list(engine.run(rows, k=2))) == len(rows)
        with pytest.raises(ValueError, match="fixed_ids"):
            engine.run(rows, k=2, ask=lambda row: np.zeros((LENGTH - 1, 1), np.int32))


def test_chosen_ids_need_an_echo(small_model: Any) -> None:
    """A server that scores chosen ids but does not tell which ids it ran is asked in the other way."""
    with serving(served(small_model, Faults(echoes=False))) as url:
        note = connect("vllm", url, patience=QUICK).capabilities.note
    assert note == (
        "POST /inference/v1/generate answers 200, but the answer does not tell the ids that were run; "
        "using prompt_logprobs"
    )


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(adds_bos=256), "row 0: the engine ran 49 tokens, the panel has 48"),
        (Faults(echoes=False), "row 0: the answer does not tell the ids that were run"),
        (Faults(nan_at=7), "row 0, position 7: the server gave NaN or no number for a token of its list"),
        (Faults(null_at=7), "row 0, position 7: null where the entries of the next token belong"),
    ],
)
def test_what_is_no_answer_is_refused(faults: Faults, message: str, small_model: Any, rows: list[Row]) -> None:
    """With row and position, never a number in its place."""
    with serving(served(small_model, faults, fixed_ids=404)) as url, pytest.raises(EngineError, match=message):
        list(connect("vllm", url, patience=QUICK).run(rows, k=5))


def test_a_chosen_id_that_is_nan(small_model: Any, rows: list[Row]) -> None:
    mock = served(small_model)
    with serving(mock) as url:
        engine = connect("vllm", url, patience=QUICK)
        mock.numbers.faults.nan_at = 7
        targets = engine.run(rows, k=0, ask=lambda row: np.zeros((LENGTH - 1, 2), np.int32))
        with pytest.raises(EngineError, match="row 0, position 7: the server gave NaN or no number for the next token"):
            next(targets)
        with pytest.raises(EngineError, match="row 0, position 7: .* for an id that was asked for"):
            next(engine.run(rows, k=0, ask=lambda row: row.ids_T[1:, None].astype(np.int32)))


def test_sentinels_are_impossible_and_not_numbers(small_model: Any, rows: list[Row]) -> None:
    """-9999 in JSON and -inf in the array are both -inf here, of top tokens, targets and chosen ids."""
    never = int(rows[0].ids_T[3])
    with serving(served(small_model, Faults(masked=[never]))) as url:
        engine = connect("vllm", url, patience=QUICK)
        by_top = next(engine.run(rows, k=VOCAB))
        by_choice = next(engine.run(rows, k=0, ask=lambda row: np.full((LENGTH - 1, 1), never, np.int32)))
    assert by_top.target_logprob_T[2] == by_choice.target_logprob_T[2] == -np.inf
    assert by_choice.asked_TM is not None and np.isneginf(by_choice.asked_TM).all()
    assert (by_top.ids_TK[:, -1] == never).all() and (by_top.logprobs_TK[:, -1] == -np.inf).all()
    assert np.isfinite(by_top.logprobs_TK[:, :-1]).all()


def test_the_cap_is_named(small_model: Any, rows: list[Row]) -> None:
    """A server that refuses k says its cap; one that told it is not even asked."""
    with serving(served(small_model, Faults(cap=20))) as url:
        engine = connect("vllm", url, patience=QUICK)
        assert engine.capabilities.max_logprobs is None
        with pytest.raises(EngineError, match="at most 20 log-probabilities a position, 64 are asked for") as error:
            next(engine.run(rows, k=64))
        assert "--max-logprobs 64 (or -1)" in error.value.repair
        with pytest.raises(EngineError, match="at most 20 log-probabilities a position, 31 are asked for"):
            next(engine.run(rows, k=5, ask=lambda row: np.zeros((LENGTH - 1, 30), np.int32)))
    mock = served(small_model, Faults(cap=20), dev_mode=True)
    with serving(mock) as url:
        engine = connect("vllm", url, patience=QUICK)
        before = len(mock.numbers.bodies)
        with pytest.raises(EngineError, match="k = 21 is more than the server's cap of 20 log-probabilities"):
            engine.run(rows, k=21)
        assert len(mock.numbers.bodies) == before
        assert len(list(engine.run(rows, k=20))) == len(rows)


def test_a_context_shorter_than_a_row_is_met_before_asking(small_model: Any, rows: list[Row]) -> None:
    mock = served(small_model, Faults(context=LENGTH))
    with serving(mock) as url:
        engine = connect("vllm", url, patience=QUICK)
        before = len(mock.numbers.bodies)
        with pytest.raises(EngineError, match="5 rows do not fit .* of 48 .* the longest has 48 tokens") as error:
            engine.run(rows, k=5)
        assert "--max-model-len 49" in error.value.repair and len(mock.numbers.bodies) == before
    with serving(served(small_model, Faults(context=LENGTH, tells_context=False))) as url:
        engine = connect("vllm", url, patience=QUICK)
        with pytest.raises(EngineError, match="HTTP 400: This model's maximum context length is 48 tokens") as error:
            next(engine.run(rows, k=5))
        assert "a context of 49 or more" in error.value.repair


@pytest.mark.parametrize("cached", [0, 32, None])
def test_cached_tokens_are_read_and_silence_is_none(cached: int | None, small_model: Any, rows: list[Row]) -> None:
    with serving(served(small_model, Faults(cached_tokens=cached))) as url:
        engine = connect("vllm", url, patience=QUICK)
        asked = engine.run(rows, k=0, ask=lambda row: np.zeros((LENGTH - 1, 1), np.int32))
        assert next(engine.run(rows, k=1)).cached_tokens == cached == next(asked).cached_tokens


def test_temperature_is_passed_on(small_model: Any, rows: list[Row]) -> None:
    """A server whose prompt log-probabilities move with it can so be found out."""
    with serving(served(small_model, Faults(leaks_temperature=True), fixed_ids=404)) as url:
        engine = connect("vllm", url, patience=QUICK)
        cold, warm = (next(engine.run(rows, k=1, temperature=t)) for t in (0.0, 2.0))
    assert np.abs(cold.target_logprob_T - warm.target_logprob_T).max() > 0.1


SHORT = Row(index=4, ids_T=np.array([5, 6, 7], np.int32), document="d", domain="x", sha256="")
FIRST = {"6": {"logprob": -3.0, "rank": 9}, "8": {"logprob": -0.5, "rank": 1}, "9": {"logprob": -1.0, "rank": 2}}
SECOND = {"7": {"logprob": -1.5, "rank": 2}, "3": {"logprob": -0.25, "rank": 1}}


def answer(content: Any) -> Answer:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return Answer(status=200, content=data, wire_bytes=len(data), seconds=0.0)


def completion(positions: Any, ids: Any = (5, 6, 7)) -> Answer:
    return answer({"choices": [{"prompt_logprobs": positions, "prompt_token_ids": list(ids)}]})


def test_a_row_written_by_hand() -> None:
    """Position 0: the next token is an extra entry of three. Position 1: it is one of the top two."""
    read = read_completion(SHORT, completion([None, FIRST, SECOND]), 2)
    np.testing.assert_array_equal(read.target_logprob_T, [-3.0, -1.5])
    np.testing.assert_array_equal(read.ids_TK, [[8, 9], [3, 7]])
    np.testing.assert_array_equal(read.logprobs_TK, [[-0.5, -1.0], [-0.25, -1.5]])
    assert read.index == 4 and read.cached_tokens is None and read.ids_TK.dtype == np.int32


def test_ties_go_by_rank() -> None:
    tied = {"6": {"logprob": -1.0, "rank": 3}, "9": {"logprob": -1.0, "rank": 1}, "8": {"logprob": -1.0, "rank": 2}}
    read = read_completion(SHORT, completion([None, tied, SECOND | {"1": {"logprob": -9.0, "rank": 3}}]), 3)
    np.testing.assert_array_equal(read.ids_TK[0], [9, 8, 6])


def test_a_vocabulary_smaller_than_k_leaves_slots_unused() -> None:
    whole = SECOND | {"6": {"logprob": -2.0, "rank": 3}}
    read = read_completion(SHORT, completion([None, whole, whole]), 5)
    np.testing.assert_array_equal(read.ids_TK, [[3, 7, 6, -1, -1]] * 2)
    np.testing.assert_array_equal(read.logprobs_TK[:, 3:], -np.inf)
    np.testing.assert_array_equal(read.target_logprob_T, [-2.0, -1.5])


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([FIRST, FIRST, SECOND], "row 4: the first token has an entry"),
        ([None, FIRST], "row 4: 2 entries for 3 tokens"),
        ([None, FIRST, SECOND, SECOND], "row 4: 4 entries for 3 tokens"),
        (None, "row 4: the answer has no log-probabilities"),
        ([None, SECOND, FIRST], "row 4, position 0: no entry of the next token 6"),
        ([None, FIRST, {**FIRST, "7": {"logprob": -1.0, "rank": 3}}], "row 4, position 1: 4 ids, 2 and the next token"),
        ([None, FIRST, {"7": {"logprob": -1.5, "rank": 2}}], "row 4, position 1: 1 top ids, elsewhere 2"),
        ([None, FIRST, {"7": {"rank": 2}, "3": {"logprob": -1.0}}], "row 4, position 1: .* NaN or no number"),
        ([None, {**FIRST, "6": {"logprob": "-3"}}, SECOND], "row 4: .* not of the documented form: Expected `float"),
        ([None, {"six": {"logprob": -3.0}}, SECOND], "row 4: .* not of the documented form: Expected `int`"),
        ([None, {**SECOND, "6": {"logprob": -3.0}}, {"7": {"logprob": 0}, "4294967301": {"logprob": 0}}], "4294967301"),
    ],
)
def test_answers_of_another_form_are_refused(positions: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_completion(SHORT, completion(positions), 2)


def test_numbers_that_are_no_json_are_understood() -> None:
    """Python servers write NaN and -Infinity: the one is refused with its place, the other is impossible."""
    positions = [None, FIRST, {**SECOND, "7": {"logprob": -float("inf"), "rank": 9}}]
    read = read_completion(SHORT, completion(positions), 2)
    assert read.target_logprob_T[1] == -np.inf
    with pytest.raises(EngineError, match="row 4, position 1: the server gave NaN"):
        read_completion(SHORT, completion([None, FIRST, {**SECOND, "7": {"logprob": float("nan")}}]), 2)
    with pytest.raises(EngineError, match="row 4: .* no JSON"):
        read_completion(SHORT, answer(b"<html>"), 2)


def test_other_ids_are_refused() -> None:
    with pytest.raises(EngineError, match="row 4: the engine ran token 9 at index 2, the panel has 7"):
        read_completion(SHORT, completion([None, FIRST, SECOND], (5, 6, 9)), 2)


def saved(values: Any, **how: Any) -> str:
    file = io.BytesIO()
    np.save(file, values, **how)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (None, "no prompt_token_id_logprobs"),
        ("not base64!", "is no array"),
        (base64.b64encode(b"abc").decode(), "is no array"),
        (saved(np.array([[{}, 1], [1, 1]], dtype=object), allow_pickle=True), "is no array .*allow_pickle"),
        (saved(np.zeros((3, 2), np.float32)), r"are \(3, 2\) float32, float32 of \(2, 2\) ids"),
        (saved(np.zeros((2, 1), np.float32)), r"are \(2, 1\) float32"),
        (saved(np.zeros((2, 2), np.float16)), r"are \(2, 2\) float16"),
    ],
)
def test_arrays_are_exactly_what_was_asked_for(encoded: Any, message: str) -> None:
    """Nothing is unpickled, and another shape or precision is refused."""
    content = {"prompt_token_id_logprobs": encoded, "prompt_token_ids": [5, 6, 7]}
    with pytest.raises(EngineError, match=f"row 4: .*{message}"):
        read_generated(SHORT, answer(content), np.zeros((2, 1), np.int32), 0)


def test_identity_is_what_the_server_tells(small_model: Any) -> None:
    """Every setting told or unknown, never a default; the caller's digests; no address, no folder."""
    known = ServedWeights(weights_sha256="w", tokenizer_sha256="t", revision="main", weights_dtype="exl3")
    with serving(served(small_model)) as url:
        silent = connect("vllm", url, patience=QUICK).identity
    changes = {"speculative_config": {"method": "ngram"}, "model_config": {"dtype": "torch.bfloat16"}}
    with serving(served(small_model, dev_mode=True, settings=changes)) as url:
        told = connect("vllm", url, patience=QUICK, weights=known).identity
    with serving(served(small_model, dev_mode=True)) as url:
        plain = connect("vllm", url, patience=QUICK).identity
    assert set(silent.settings) == set(VLLM) and set(silent.settings.values()) == {"unknown"}
    assert silent.lane == "served" and silent.model == "tiny-candidate" and silent.version == "0.33.0"
    assert {silent.weights_sha256, silent.revision, silent.compute_dtype, silent.device} == {"unknown"}
    assert (told.weights_sha256, told.tokenizer_sha256, told.revision, told.weights_dtype) == ("w", "t", "main", "exl3")
    assert told.compute_dtype == "bfloat16" and told.device == "GPU 0: NVIDIA H200"
    assert told.settings["speculative"] == "ngram" and plain.settings["speculative"] is None
    assert plain.settings["chunk_tokens"] == 64 and plain.settings["prefix_cache"] is False
    assert plain.settings["kv_cache_dtype"] == "auto" and plain.settings["attention_backend"] == "TORCH_SDPA"
    assert plain.settings["logprobs_mode"] == "unknown" and plain.settings["batch_invariant"] is False


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/model", "model"),
        ("/models/tiny-candidate/", "tiny-candidate"),
        ("/x/hub/models--org--name-4bpw/snapshots/0a1b2c", "name-4bpw"),
        ("C:\\models\\mine", "mine"),
        ("model", "model"),
    ],
)
def test_models_go_by_their_last_name(path: str, name: str) -> None:
    assert base_name(path) == name
