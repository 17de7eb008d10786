"""Questions in flight: order, bounds, retries, a server that dies and comes back, and what stays on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from harness.errors import EngineError, UsageError
from harness.served.connect import connect
from harness.served.http import Patience, first_words
from harness.served.seam import ServedEngine, ServedRow
from harness.types import Row
from tests.served.mock_sglang import MockSglang
from tests.served.mock_vllm import Faults, MockVllm, Numbers, serving

QUICK = Patience(timeout=20, tries=4, wait=0.01)


@contextmanager
def vllm(model: Any, faults: Faults, **settings: Any) -> Iterator[tuple[ServedEngine, Numbers]]:
    """A probed mock without chosen ids; the faults begin after the probe, so they are a row's."""
    numbers = Numbers(model)
    with serving(MockVllm(numbers=numbers, fixed_ids=404)) as url:
        engine = connect("vllm", url, **({"patience": QUICK} | settings))
        numbers.faults = faults
        yield engine, numbers


class Busy(MockVllm):
    """Counts how many rows it works on at once; later rows are answered sooner."""

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        with lock:
            working.append(1)
            most.append(sum(working))
        time.sleep(0.3 / (1 + len(self.numbers.asked)))
        answer = super().complete(body)
        with lock:
            working.append(-1)
        return answer


lock = threading.Lock()
working: list[int] = []
most: list[int] = []


@pytest.mark.parametrize("concurrency", [1, 3])
def test_rows_come_in_order_and_no_more_are_at_the_server(concurrency: int, small_model: Any, rows: list[Row]) -> None:
    working.clear()
    most.clear()
    with serving(Busy(numbers=Numbers(small_model), fixed_ids=404)) as url:
        engine = connect("vllm", url, concurrency=concurrency, patience=QUICK)
        assert [answer.index for answer in engine.run(rows, k=2)] == [0, 1, 2, 3, 4]
    assert max(most) == concurrency


def test_a_slow_reader_holds_the_server_back(small_model: Any, rows: list[Row]) -> None:
    """Memory does not grow with rows: what is asked ahead is bounded, and given up with the iterator."""
    with vllm(small_model, Faults(), concurrency=2) as (engine, numbers):
        answers = engine.run(rows * 20, k=2)
        next(answers)
        time.sleep(0.3)
        assert 1 <= len(numbers.asked) <= 4
        answers.close()  # type: ignore[attr-defined]
        time.sleep(0.1)
        assert len(numbers.asked) <= 4


@pytest.mark.parametrize("faults", [Faults(statuses=[503, 429, 500]), Faults(drops=3)], ids=["statuses", "drops"])
def test_passing_troubles_are_repeated(faults: Faults, small_model: Any, rows: list[Row]) -> None:
    with vllm(small_model, Faults()) as (engine, _):
        calm = list(engine.run(rows, k=3))
    with vllm(small_model, faults, concurrency=1) as (engine, _):
        same(list(engine.run(rows, k=3)), calm)
    assert faults.statuses == [] and faults.drops == 0


def same(ours: list[ServedRow], theirs: list[ServedRow]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.index == b.index
        for name in ("echoed_ids_T", "target_logprob_T", "ids_TK", "logprobs_TK"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_server_that_dies_keeps_what_it_gave_and_goes_on(concurrency: int, small_model: Any, rows: list[Row]) -> None:
    """Rows before the death are good, the error says so, and the rest gives the same digits later."""
    with vllm(small_model, Faults()) as (engine, _):
        whole = list(engine.run(rows, k=3))
    got = []
    with vllm(small_model, Faults(dies_after=2), concurrency=concurrency) as (engine, numbers):
        with pytest.raises(EngineError, match=r"stopped answering at row \d \(RemoteProtocolError; 4 tries\)") as error:
            for answer in engine.run(rows, k=3):
                got.append(answer)
        assert "run the same command again: it goes on from there" in error.value.repair
        # Of several rows at the server at once, any two may have been answered.
        assert len(got) == 2 if concurrency == 1 else len(got) <= 2
        assert f"at row {len(got)} " in error.value.what
        assert [answer.index for answer in got] == list(range(len(got)))
        numbers.faults.dies_after = None
        got += engine.run(rows[len(got) :], k=3)
    same(got, whole)


def test_a_server_that_is_gone(small_model: Any, rows: list[Row]) -> None:
    with vllm(small_model, Faults()) as (engine, _):
        pass
    with pytest.raises(EngineError, match=r"stopped answering at row 0 \(ConnectError; 4 tries\)"):
        next(engine.run(rows, k=3))


def test_an_answer_that_takes_too_long(small_model: Any, rows: list[Row]) -> None:
    short = Patience(timeout=0.2, tries=2, wait=0.01)
    with vllm(small_model, Faults(), patience=short) as (engine, numbers):
        numbers.faults.delay = 1.0
        with pytest.raises(EngineError, match=r"row 0 \(ReadTimeout; 2 tries\)"):
            next(engine.run(rows, k=3))


def test_an_engine_that_crashes_at_log_probabilities(small_model: Any, rows: list[Row]) -> None:
    """HTTP 500 at every try is told in the server's words, with what helps against no memory."""
    with vllm(small_model, Faults(statuses=[500] * 8), concurrency=1) as (engine, _):
        with pytest.raises(EngineError, match=r"row 0 \(HTTP 500: busy; 4 tries\)") as error:
            next(engine.run(rows, k=3))
    assert "out of memory: a smaller --k" in error.value.repair


def test_a_refusal_is_not_repeated(small_model: Any, rows: list[Row]) -> None:
    with vllm(small_model, Faults(statuses=[400, 401])) as (engine, numbers):
        with pytest.raises(EngineError, match=r"refuses row 0 \(48 tokens, 3 ids\): HTTP 400: busy"):
            next(engine.run(rows[:1], k=3))
        assert numbers.faults.statuses == [401]
        with pytest.raises(EngineError, match="HTTP 401") as error:
            next(engine.run(rows[:1], k=3))
        assert "OPENAI_API_KEY" in error.value.repair


@pytest.mark.parametrize("mock", [MockVllm, MockSglang])
def test_key_and_address_stay_here(
    mock: Any, small_model: Any, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key goes into a header and nowhere else; no host, path or key is in what a receipt takes."""
    monkeypatch.setenv("OPENAI_API_KEY", "very-secret")
    numbers = Numbers(small_model)
    with serving(mock(numbers=numbers, **({"dev_mode": True} if mock is MockVllm else {}))) as url:
        engine = connect("vllm" if mock is MockVllm else "sglang", url, patience=QUICK)
        next(engine.run(rows, k=1))
    assert set(numbers.keys) == {"Bearer very-secret"}
    told = f"{engine.identity} {engine.capabilities}"
    for private in ("secret", "127.0.0.1", "10.9.8.7", "http", "/models", "somebody", "/home"):
        assert private not in told


def test_another_engine_is_a_usage_error(small_model: Any) -> None:
    with serving(MockVllm(numbers=Numbers(small_model))) as url:
        with pytest.raises(UsageError, match="a server of vllm, not of sglang"):
            connect("sglang", url)
        with pytest.raises(UsageError, match="--concurrency 0"):
            connect("vllm", url, concurrency=0)


def test_a_server_s_words_are_one_short_line() -> None:
    """No address, no path, whatever form the message has."""
    assert first_words(b'{"error": {"message": "No model\\nat /models/x or http://10.0.0.1/ today"}}') == (
        "No model at or today"
    )
    assert first_words(b'{"detail": "Not Found"}') == "Not Found"
    assert first_words(b"<html>") == "<html>"
    assert first_words(b"x " * 300) == "x " * 80 + "..."
