"""Servers that give log-probabilities: what they answer in place of a number, what moves one, and how they die."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.errors import EngineError, Refused, ScoreError
from harness.measure.run import Result
from harness.panel import load_panel
from harness.served.checks_server import check_alone, check_cached, check_memory, load_of
from harness.served.connect import connect
from harness.served.http import Answer, Patience
from harness.served.measure import ServedRequest, measure_served
from harness.served.preflight import check_row, check_served
from harness.served.seam import ServedRow
from harness.served.vllm_answers import read_completion
from harness.types import Row
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.served.mock_numbers import Faults, Numbers
from tests.served.mock_sglang import MockSglang
from tests.served.mock_vllm import MockVllm, serving

SOON = Patience(timeout=30.0, tries=2, wait=0.01)
VOCAB = 259


def numbers(teacher_folder: Path, **faults: Any) -> Numbers:
    """A small model's own numbers."""
    model = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).eval()
    return Numbers(model, Faults(**faults))


def answer(text: str) -> Answer:
    return Answer(status=200, content=text.encode(), wire_bytes=len(text), seconds=0.1)


def completion(entries: str, ids: str) -> Answer:
    return answer(f'{{"choices": [{{"prompt_logprobs": {entries}, "prompt_token_ids": {ids}}}]}}')


def sentinels(folder: Path) -> None:
    """-9999 and null are "not observed", NaN names its position; p * 9999 nats never appear."""
    row = made.row([1, 5, 7])
    told = (
        '[null, {"5": {"logprob": -0.1}, "9": {"logprob": -9999.0}}, {"7": {"logprob": -0.2}, "4": {"logprob": -2.0}}]'
    )
    found = read_completion(row, completion(told, "[1, 5, 7]"), 1)
    assert found.target_logprob_T.tolist() == [-0.1, -0.2]
    assert found.ids_TK[0].tolist() == [9] and np.isneginf(found.logprobs_TK[0, 0])
    for bad in ("null", "NaN"):
        broken = told.replace("-0.2", bad)
        with pytest.raises(EngineError, match="row 0, position 1: the server gave NaN or no number"):
            read_completion(row, completion(broken, "[1, 5, 7]"), 1)
    for sentinel in (-3.4028e38, -1000.0):
        with pytest.raises(ScoreError, match="row 0, position 1: the log-probability of a token is a sentinel"):
            check_row(row, spoiled(found, (1, 0), sentinel), k=1, vocab_size=None)


def spoiled(row: ServedRow, at: tuple[int, int], value: float) -> ServedRow:
    logprobs_TK = row.logprobs_TK.copy()
    logprobs_TK[at] = value
    return replace(row, logprobs_TK=logprobs_TK)


def cap_of_k(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """k = 64 on a server that gives 20, told or not: both numbers in one line, nothing is scored with 20."""
    rows = load_panel(panel_folder).rows
    mock = MockVllm(numbers=numbers(teacher_folder, cap=20), dev_mode=True, fixed_ids=404)
    with serving(mock) as url:
        with pytest.raises(EngineError, match="k = 64 is more than the server's cap of 20 .*\n.*--max-logprobs 64"):
            check_served(connect("vllm", url, patience=SOON), rows, k=64, vocab_size=VOCAB)
        assert mock.numbers.asked == []
        mock.dev_mode = False
        with pytest.raises(EngineError, match="at most 20 log-probabilities a position, 64 are asked for"):
            check_served(connect("vllm", url, patience=SOON), rows, k=64, vocab_size=VOCAB)


def target_entry(folder: Path) -> None:
    """k or k + 1 entries, the first null: the next token's own entry is the target, the best of the rest the top-1."""
    entries = '[null, {"15043": {"logprob": -7.6, "rank": 900}, "917": {"logprob": -2.5, "rank": 1}}, '
    last = '{"29892": {"logprob": -1.5, "rank": 1}}]'
    found = read_completion(made.row([1, 15043, 29892]), completion(entries + last, "[1, 15043, 29892]"), 1)
    assert found.target_logprob_T.tolist() == [-7.6, -1.5]
    assert found.ids_TK[:, 0].tolist() == [917, 29892]
    with pytest.raises(EngineError, match="row 0: 2 entries for 3 tokens"):
        read_completion(made.row([1, 15043, 29892]), completion(entries[:-2] + "]", "[1, 15043, 29892]"), 1)
    with pytest.raises(EngineError, match="the first token has an entry"):
        read_completion(
            made.row([1, 15043, 29892]),
            completion((entries + last).replace("null", last[:-1], 1), "[1, 15043, 29892]"),
            1,
        )


def one_list(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """SGLang has one id list for all positions: never used for ids a position; vLLM's lists are checked id by id."""
    rows = load_panel(panel_folder).rows
    with serving(MockSglang(numbers=numbers(teacher_folder))) as url:
        other = connect("sglang", url, patience=SOON)
        assert not other.capabilities.fixed_ids and "one list for a whole request" in other.capabilities.note
        with pytest.raises(ValueError, match="SGLang scores no chosen ids"):
            list(other.run(rows, k=1, ask=lambda row: np.zeros((len(row.ids_T) - 1, 1), np.int32)))
    mock = MockVllm(numbers=numbers(teacher_folder))
    original = mock.array
    with serving(mock) as url:
        found = {line.name: line for line in check_served(connect("vllm", url), rows, k=4, vocab_size=VOCAB)}
        assert found["ids of our choice"].figure.startswith("213 of 213, within")
        # The union of all positions' ids at every position, in the order of the first: ids get another's number.
        mock.array = lambda logprobs_TV, wanted_TM, tokens: original(
            logprobs_TV, wanted_TM[:1].repeat(len(wanted_TM), 0), tokens
        )  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"position \d+: id \d+ was asked for and has log-probability"):
            check_served(connect("vllm", url), rows, k=4, vocab_size=VOCAB)


def prefix_cache_crash(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """HTTP 500 from the second request on: one line that names the option, and no row."""
    rows = load_panel(panel_folder).rows
    mock = MockVllm(numbers=numbers(teacher_folder), fixed_ids=404)
    original = mock.complete
    mock.complete = lambda body: (
        (500, {"error": {"message": "index out of range"}}) if mock.numbers.asked else original(body)
    )  # type: ignore[method-assign]
    with serving(mock) as url, pytest.raises(EngineError) as caught:
        check_served(connect("vllm", url, patience=SOON), rows, k=4, vocab_size=VOCAB)
    assert caught.value.what.startswith("the server answered row 0, but not a row with the same beginning, or it again")
    assert "\n" not in caught.value.what and "--no-enable-prefix-caching" in caught.value.repair


def temperature(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Log-probabilities at another temperature are the same, and add up to 1 over a whole vocabulary."""
    rows = load_panel(panel_folder).rows
    with serving(MockVllm(numbers=numbers(teacher_folder), fixed_ids=404)) as url:
        found = {line.name: line for line in check_served(connect("vllm", url), rows, k=VOCAB, vocab_size=VOCAB)}
    assert found["temperature does not reach the prompt"].figure == "max |difference| 0"
    total = [float(x) for x in re.findall(r"[\d.]+", found["sum of probabilities"].figure)]
    assert total == pytest.approx([1, 1, 1], abs=1e-4)
    for mock in (MockVllm, MockSglang):
        name = "vllm" if mock is MockVllm else "sglang"
        with serving(mock(numbers=numbers(teacher_folder, leaks_temperature=True))) as url:
            with pytest.raises(EngineError, match="the same tokens have other log-probabilities at temperature 2"):
                check_served(connect(name, url), rows, k=4, vocab_size=VOCAB)  # type: ignore[arg-type]


def measured(folder: Path, url: str, teacher: Path, panel: Path, name: str) -> Result:
    """The teacher through a server, against its own capture."""
    return measure_served(
        ServedRequest(
            server="vllm", url=url, panel=panel, candidate=str(teacher), teacher=str(teacher), k=8, out=folder / name
        )
    )


def died(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Memory is told before the start; a server that dies keeps whole rows only, and the same call ends the same."""
    told = check_memory([made.row([0] * 8192)], 152_000)
    assert told.figure == "up to 8192 x 152000 x 6 bytes = 7.47 GB"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("harness.served.connect.Patience", lambda timeout: SOON)
        mock = MockVllm(numbers=numbers(teacher_folder), fixed_ids=404)
        with serving(mock) as url:
            whole = measured(folder, url, teacher_folder, panel_folder, "whole")
            in_all = len(mock.numbers.asked)
            mock.numbers.faults.dies_after = in_all + (in_all - 1)
            with pytest.raises(EngineError):
                measured(folder, url, teacher_folder, panel_folder, "killed")
            kept = sorted(path.name for path in (folder / "killed" / "rows").glob("*"))
            assert kept == ["row-0000.parquet", "row-0001.parquet", "row-0002.parquet"]
            assert not (folder / "killed" / "measurement.json").exists()
            mock.numbers.faults.dies_after = None
            again = measured(folder, url, teacher_folder, panel_folder, "killed")
    assert again.measurement.positions_sha256 == whole.measurement.positions_sha256
    assert again.measurement.summary == whole.measurement.summary


def cached_tokens(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """64 cached tokens on row 3 alone: that row is not stored, the next run goes on with it; no field is unproven."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        mock = MockVllm(numbers=numbers(teacher_folder), fixed_ids=404)
        original = mock.usage
        last = load_panel(panel_folder).rows[3]
        mock.usage = lambda ran: {"prompt_tokens_details": {"cached_tokens": 64 * (list(ran) == last.ids_T.tolist())}}  # type: ignore[method-assign]
        with serving(mock) as url:
            with pytest.raises(EngineError, match="row 3: the server took 64 of 96 tokens from its prefix cache"):
                measured(folder, url, teacher_folder, panel_folder, "run")
            assert sorted(p.name for p in (folder / "run" / "rows").glob("*")) == [
                f"row-000{i}.parquet" for i in range(3)
            ]
            mock.usage = original  # type: ignore[method-assign]
            mock.numbers.faults.cached_tokens = None
            found = measured(folder, url, teacher_folder, panel_folder, "run").measurement
    line = next(check for check in found.preflight if check.name == "tokens taken from a prefix cache")
    assert line.figure.startswith("unproven in ") and found.status == "complete"


def dead_server(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Three answers, then resets: the run has no score at all, and an earlier one stays as it was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("harness.served.connect.Patience", lambda timeout: SOON)
        mock = MockVllm(numbers=numbers(teacher_folder), fixed_ids=404)
        with serving(mock) as url:
            earlier = measured(folder, url, teacher_folder, panel_folder, "earlier")
            before = (earlier.folder / "measurement.json").read_bytes()
            mock.numbers.faults.dies_after = len(mock.numbers.asked) + 3
            with pytest.raises(Refused) as caught:
                measured(folder, url, teacher_folder, panel_folder, "later")
    left = {file.name for file in (folder / "later").glob("*.json")}
    assert "\n" not in caught.value.what and left <= {"begun.json"}, "when it began, and no score"
    assert (earlier.folder / "measurement.json").read_bytes() == before


def shared_server(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Content is right and the server is busy: contaminated, not failed; a server that does not tell is unproven."""
    busy = MockVllm(numbers=numbers(teacher_folder), fixed_ids=404)
    original = busy.get
    gauge = b'vllm:num_requests_running{model_name="small"} 2.0\nvllm:num_requests_waiting{model_name="small"} 1.0\n'
    busy.get = lambda path: (200, gauge) if path == "/metrics" else original(path)  # type: ignore[method-assign]
    with serving(busy) as url:
        rows: tuple[Row, ...] = load_panel(panel_folder).rows
        found = check_served(connect("vllm", url), rows, k=4, vocab_size=VOCAB, load=load_of(url))[-1]
    assert (found.passed, found.figure) == (False, "3 other requests") and found.note.startswith("contaminated")
    assert check_alone(0, 0).passed and check_alone(None, None).figure == "unproven"
    assert check_cached([], "vllm").figure == "0 in 0 rows"


SERVED = ("teacher_folder", "panel_folder")
ROWS = [
    Fault(id="A16-sentinels", title="-9999, null, -3.4e38 for what is not known", check=sentinels),
    Fault(id="A17-cap-of-k", title="more tokens asked for than the server gives", check=cap_of_k, needs=SERVED),
    Fault(id="A18-target-entry", title="k or k + 1 entries, and a first that is null", check=target_entry),
    Fault(id="A20-one-list", title="one token list for the whole request", check=one_list, needs=SERVED),
    Fault(
        id="A33-cache-crash", title="prefix cache and log-probabilities crash", check=prefix_cache_crash, needs=SERVED
    ),
    Fault(id="A36-temperature", title="sampling that reaches the prompt", check=temperature, needs=SERVED),
    Fault(id="A39-out-of-memory", title="memory of log-probabilities, and a death", check=died, needs=SERVED),
    Fault(id="B32-cached-tokens", title="cached tokens on one row", check=cached_tokens, needs=SERVED),
    Fault(id="B35-dead-server", title="a dead server is no failed model", check=dead_server, needs=SERVED),
    Fault(id="B36-shared-server", title="contention is no failure", check=shared_server, needs=SERVED),
]
