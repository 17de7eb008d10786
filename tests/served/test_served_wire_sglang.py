"""SGLang's wire form in all its shapes, its quirks undone, and what is no answer refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.errors import EngineError
from harness.served.connect import connect
from harness.served.http import Answer, Patience
from harness.served.identity import SGLANG
from harness.served.sglang import read_generated
from harness.types import Row
from tests.served.made_rows import LENGTH, exact
from tests.served.mock_sglang import Faults, MockSglang, Numbers, serving
from tests.tiny import VOCAB

QUICK = Patience(timeout=20, tries=2, wait=0.01)
CLOSE = 2e-5
FORMS: list[dict[str, Any]] = [
    {"form": "b64"},
    {"form": "b64", "counts_null": True},
    {"form": "flat"},
    {"form": "nested"},
]


def served(model: Any, faults: Faults | None = None, **settings: Any) -> MockSglang:
    return MockSglang(numbers=Numbers(model, faults), **settings)


@pytest.mark.parametrize("k", [0, 20, VOCAB])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_log_probabilities_are_the_model_s_own(form: dict[str, Any], k: int, small_model: Any, rows: list[Row]) -> None:
    """T - 1 positions (the first is null, the sampled token's is dropped), and id V - 1 comes back as what it is."""
    mock = served(small_model, **form)
    with serving(mock) as url:
        answers = list(connect("sglang", url, patience=QUICK).run(rows, k=k))
    for row, answer in zip(rows, answers, strict=True):
        truth_TV = exact(small_model, row)
        np.testing.assert_array_equal(answer.echoed_ids_T, row.ids_T)
        np.testing.assert_allclose(answer.target_logprob_T, truth_TV[np.arange(LENGTH - 1), row.ids_T[1:]], atol=CLOSE)
        assert answer.ids_TK.shape == answer.logprobs_TK.shape == (LENGTH - 1, k)
        np.testing.assert_allclose(answer.logprobs_TK, -np.sort(-truth_TV, axis=1)[:, :k], atol=CLOSE)
        told_TK = np.take_along_axis(truth_TV, answer.ids_TK.astype(np.int64), axis=1)
        np.testing.assert_allclose(answer.logprobs_TK, told_TK, atol=CLOSE)
        assert answer.cached_tokens == 0 and answer.asked_TM is None
    body = mock.numbers.bodies[-1]
    assert body["logprob_start_len"] == 0 and body["return_text_in_logprobs"] is False
    assert body["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 1}


def test_one_list_for_all_positions_is_not_used(small_model: Any, rows: list[Row]) -> None:
    """Ids of our choice cannot be asked a position at a time."""
    with serving(served(small_model)) as url:
        engine = connect("sglang", url, patience=QUICK)
        assert not engine.capabilities.fixed_ids and "one list for a whole request" in engine.capabilities.note
        with pytest.raises(ValueError, match="scores no chosen ids"):
            engine.run(rows, k=2, ask=lambda row: np.zeros((LENGTH - 1, 1), np.int32))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sentinels_are_impossible_and_not_numbers(form: dict[str, Any], small_model: Any, rows: list[Row]) -> None:
    """The lowest float32 is -inf here."""
    never = int(rows[0].ids_T[3])
    with serving(served(small_model, Faults(masked=[never]), **form)) as url:
        answer = next(connect("sglang", url, patience=QUICK).run(rows, k=VOCAB))
    assert answer.target_logprob_T[2] == -np.inf
    assert (answer.ids_TK[:, -1] == never).all() and (answer.logprobs_TK[:, -1] == -np.inf).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(nan_at=7), "row 0, position 7: the server gave NaN or no number"),
        (Faults(null_at=7), "row 0, position 7: the server gave NaN or no number for the next token"),
        (Faults(adds_bos=256), "row 0: "),
        (Faults(echoes=False), "row 0: the answer has no log-probabilities of the prompt"),
    ],
)
def test_what_is_no_answer_is_refused(
    faults: Faults, message: str, form: dict[str, Any], small_model: Any, rows: list[Row]
) -> None:
    with serving(served(small_model, faults, **form)) as url, pytest.raises(EngineError, match=message):
        list(connect("sglang", url, patience=QUICK).run(rows, k=5))


@pytest.mark.parametrize("cached", [0, 32, None])
def test_cached_tokens_are_read_and_silence_is_none(cached: int | None, small_model: Any, rows: list[Row]) -> None:
    with serving(served(small_model, Faults(cached_tokens=cached))) as url:
        for answer in connect("sglang", url, patience=QUICK).run(rows, k=1):
            assert answer.cached_tokens == cached


def test_a_context_shorter_than_a_row_is_met_before_asking(small_model: Any, rows: list[Row]) -> None:
    mock = served(small_model, Faults(context=LENGTH))
    with (
        serving(mock) as url,
        pytest.raises(EngineError, match="5 rows do not fit .* context of 48 with") as error,
    ):
        connect("sglang", url, patience=QUICK).run(rows, k=5)
    assert "--context-length 49" in error.value.repair and not mock.numbers.bodies


@pytest.mark.parametrize("old_paths", [False, True])
def test_identity_is_what_the_server_tells(old_paths: bool, small_model: Any) -> None:
    settings = {"speculative_algorithm": "EAGLE", "disable_radix_cache": False}
    with serving(served(small_model, settings=settings, old_paths=old_paths)) as url:
        engine = connect("sglang", url, patience=QUICK)
    identity, told = engine.identity, engine.identity.settings
    assert set(told) == {*SGLANG, "prefix_cache"}
    assert (identity.engine, identity.version, identity.model) == ("sglang", "0.5.23", "tiny-candidate")
    assert (identity.lane, identity.compute_dtype, identity.device) == ("served", "float32", "unknown")
    assert told["speculative"] == "EAGLE" and told["prefix_cache"] is True and told["chunk_tokens"] == 64
    assert told["max_batch"] == 1 and told["fp32_head"] == "unknown" and told["quantization"] is None
    assert engine.capabilities.version == "0.5.23" and engine.capabilities.max_logprobs == -1


def test_a_server_that_tells_nothing_is_unknown(small_model: Any) -> None:
    mock = served(small_model)
    mock.server_info = None  # type: ignore[method-assign, assignment]
    with serving(mock) as url:
        identity = connect("sglang", url, patience=QUICK).identity
    assert set(identity.settings.values()) == {"unknown"}
    assert {identity.version, identity.compute_dtype} == {"unknown"}


SHORT = Row(index=4, ids_T=np.array([5, 6, 7], np.int32), document="d", domain="x", sha256="")
META: dict[str, Any] = {
    "input_token_logprobs": [[None, 5, None], [-3.0, 6, None], [-1.5, 7, None]],
    "input_top_logprobs": [None, [[-0.5, 8, None], [-1.0, 9, None]], [[-0.25, 3, None], [-1.5, 7, None]]],
}
FLAT: dict[str, Any] = {
    "input_token_logprobs": META["input_token_logprobs"],
    "input_top_logprobs_val_flat": [-0.5, -1.0, -0.25, -1.5],
    "input_top_logprobs_idx_flat": [8, 9, 3, 7],
    "input_top_logprobs_shape": [2, 2],
    "input_top_logprobs_null_prefix": 1,
}


def answer(meta: dict[str, Any]) -> Answer:
    data = json.dumps({"text": "", "meta_info": meta}).encode()
    return Answer(status=200, content=data, wire_bytes=len(data), seconds=0.0)


@pytest.mark.parametrize("meta", [META, FLAT], ids=["nested", "flat"])
def test_a_row_written_by_hand(meta: dict[str, Any]) -> None:
    read = read_generated(SHORT, answer(meta), 2)
    np.testing.assert_array_equal(read.target_logprob_T, [-3.0, -1.5])
    np.testing.assert_array_equal(read.ids_TK, [[8, 9], [3, 7]])
    np.testing.assert_array_equal(read.logprobs_TK, [[-0.5, -1.0], [-0.25, -1.5]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_token_logprobs": META["input_token_logprobs"][:2]}, "the engine ran 2 tokens, the panel has 3"),
        ({"input_token_logprobs": [[-1.0, 5, None], *META["input_token_logprobs"][1:]]}, "nothing predicts it"),
        ({"input_token_logprobs": [[None, 5, None], [-3.0, 6, None], [None, 7, None]]}, "position 1: .* no number"),
        ({"input_top_logprobs": META["input_top_logprobs"][:2]}, "2 top lists for 3 tokens"),
        ({"input_top_logprobs": META["input_top_logprobs"][1:] * 2}, "4 top lists for 3 tokens"),
        ({"input_top_logprobs": [*META["input_top_logprobs"][:2], None]}, "position 1: 0 top ids"),
        ({"input_top_logprobs": [*META["input_top_logprobs"][:2], [[-1.0, 1, None]] * 3]}, "position 1: 3 top ids"),
        ({"input_top_logprobs": None}, "no top log-probabilities"),
    ],
)
def test_answers_of_another_form_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=f"row 4.*{message}"):
        read_generated(SHORT, answer(META | changes), 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"input_top_logprobs_shape": [1, 2]},
        {"input_top_logprobs_shape": [2, 1]},
        {"input_top_logprobs_null_prefix": 0},
        {"input_top_logprobs_val_flat": [-0.5, -1.0]},
        {"input_top_logprobs_idx_flat": [8, 9]},
        {"input_top_logprobs_val_flat_b64": "AAAA", "input_top_logprobs_idx_flat_b64": "AAAA"},
        {"input_top_logprobs_val_flat_b64": "!", "input_top_logprobs_idx_flat_b64": "!"},
        {
            "input_top_logprobs_val_flat_b64": "",
            "input_top_logprobs_idx_flat_b64": "",
            "input_top_logprobs_val_flat_b64_dtype": "object",
        },
    ],
    ids=str,
)
def test_matrices_of_another_shape_are_refused(changes: dict[str, Any]) -> None:
    """One row too few or too many is an answer about other positions."""
    with pytest.raises(EngineError, match="row 4: .*top"):
        read_generated(SHORT, answer(FLAT | changes), 2)


def test_only_the_last_id_may_come_back_as_0() -> None:
    """The quirk is id V - 1; a 0 in place of an id that is not the highest of all is another token."""
    last = replace(SHORT, ids_T=np.array([5, 99, 7], np.int32))
    meta = META | {"input_token_logprobs": [[None, 5, None], [-3.0, 0, None], [-1.5, 7, None]]}
    np.testing.assert_array_equal(read_generated(last, answer(meta), 2).echoed_ids_T, last.ids_T)
    with pytest.raises(EngineError, match="row 4: the engine ran token 0 at index 1, the panel has 6"):
        read_generated(SHORT, answer(meta), 2)
