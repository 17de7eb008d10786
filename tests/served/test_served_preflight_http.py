"""The checks before a served candidate is scored, through the real clients and HTTP, one fault at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from harness.cli import app
from harness.errors import EngineError, Refused
from harness.panel import load_panel
from harness.served.checks_server import load_of, requests_at_work
from harness.served.connect import connect
from harness.served.http import Patience
from harness.served.preflight import check_served
from harness.served.seam import ServedEngine
from harness.types import Check, Row
from tests.served.mock_http import Mock, serving
from tests.served.mock_numbers import Faults, Numbers
from tests.served.mock_sglang import MockSglang
from tests.served.mock_vllm import MockVllm

SOON = Patience(timeout=30.0, tries=2, wait=0.01)
VOCAB = 259


@pytest.fixture(scope="module")
def model(teacher_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows(panel_folder: Path) -> list[Row]:
    return list(load_panel(panel_folder).rows)


class Vllm(MockVllm):
    """The mock with what a real one tells besides: /metrics, and the ids of a text."""

    busy = 0
    tokenizer: Any = None

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/metrics":
            lines = [
                "# TYPE vllm:num_requests_running gauge",
                f'vllm:num_requests_running{{engine="0",model_name="small"}} {float(self.busy)}',
                'vllm:num_requests_waiting{engine="0",model_name="small"} 0.0',
                'vllm:prompt_tokens_total{engine="0"} 1234.0',
            ]
            return 200, ("\n".join(lines) + "\n").encode()
        return super().get(path)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": self.tokenizer(body["prompt"]).input_ids, "max_model_len": 2048}
        return super().post(path, body)


@contextmanager
def engine(mock: Mock) -> Iterator[ServedEngine]:
    with serving(mock) as url:
        yield connect("sglang" if isinstance(mock, MockSglang) else "vllm", url, patience=SOON)


def check(mock: Mock, rows: list[Row], k: int = 12, **options: Any) -> dict[str, Check]:
    with engine(mock) as asked:
        found = check_served(asked, rows, k=k, vocab_size=VOCAB, **options)
    return {line.name: line for line in found}


def vllm(model: Any, **faults: Any) -> MockVllm:
    settings = {"model_config": {"max_logprobs": -1}}
    return MockVllm(numbers=Numbers(model, Faults(**faults)), dev_mode=True, settings=settings)


def sglang(model: Any, **faults: Any) -> MockSglang:
    return MockSglang(numbers=Numbers(model, Faults(**faults)))


# ---- servers with no faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [vllm, sglang])
def test_every_check_passes_on_an_honest_server(make, model, rows):
    with torch.inference_mode():
        ids = torch.tensor(rows[0].ids_T.astype(np.int64))
        logprobs_TV = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), -1)
    nll_T = -logprobs_TV[:-1].gather(1, ids[1:, None])[:, 0].numpy()
    found = check(make(model), rows, teacher_nll_T=nll_T)
    assert all(line.passed for line in found.values()), [line for line in found.values() if not line.passed]
    assert found["NLL follows the teacher's"].figure == "correlation 1.0000, mean |difference| 0.0000 nats"
    assert found["tokens taken from a prefix cache"].figure.startswith("0 in ")
    assert found["the same row twice"].figure == "max |difference| 0"
    assert found["seams of chunked prefill"].figure.endswith("nats at edges of 64")
    assert f"mean {nll_T[:71].mean():.4f}" in found["NLL is a language model's"].figure
    served = "213 of 213, within" if make is vllm else "not served: top k only"
    assert found["ids of our choice"].figure.startswith(served)


def test_the_whole_vocabulary_adds_up_to_one(model, rows):
    """Where every id is known."""
    found = check(vllm(model), rows, k=VOCAB)["sum of probabilities"].figure
    assert [float(word) for word in found.replace(",", "").split()[1::2]] == pytest.approx([1, 1, 1], abs=1e-5)


@pytest.mark.parametrize("make", [vllm, sglang])
def test_tokens_that_a_server_masks(make, model, rows):
    """-9999 and -3.4e38 are "not observed" in a list, and refused for a row's own token."""
    own, other = int(rows[0].ids_T[6]), 250
    assert other not in np.concatenate([row.ids_T for row in rows])
    found = check(make(model, masked=[other]), rows, k=VOCAB)["finite log-probabilities"]
    assert found.figure == "0 NaN, 71 of -inf" and "not observed" in found.note
    at = int(np.argmax(rows[0].ids_T[1:] == own))
    with pytest.raises(Refused, match=f"row 0, position {at}: the log-probability of the next token is impossible"):
        check(make(model, masked=[own]), rows)


# ---- one fault at a time ---------------------------------------------------------------------------------------------

#: Switch of the mock, and what is said with its repair; of vLLM then of SGLang where they differ.
WRONG: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "adds a BOS (A 1)": (
        {"adds_bos": 256},
        "row 0: the engine ran 73 tokens, the panel has 72",
        "row 0: .* for 71 positions",
    ),
    "echoes nothing (A 7)": (
        {"echoes": False},
        "row 0: the answer does not tell the ids",
        "row 0: the answer has no log-probabilities of the prompt",
    ),
    "off by one (A 37)": ({"off_by_one": True}, "off by one", None),
    "temperature (A 36)": ({"leaks_temperature": True}, "other log-probabilities at temperature 2", None),
    "prefix cache (A 34)": (
        {"prefix_cache": True},
        "after a row with the same beginning: (?s:.*)--no-enable-prefix-caching",
        "after a row with the same beginning: (?s:.*)--disable-radix-cache",
    ),
    "seams (1.5)": ({"chunk": 64}, "edge of a prefill chunk of 64 moves", None),
    "speculative (A 35)": ({"speculative": True}, "row 0: every log-probability is 0(?s:.*)speculative decoding", None),
    "NaN (A 16, A 27)": ({"nan_at": 17}, "row 0, position 17: the server gave NaN or no number", None),
    "null (A 16, A 18)": (
        {"null_at": 17},
        "row 0, position 17: null where the entries of the next token belong",
        "row 0, position 17: the server gave NaN or no number",
    ),
    "beyond the vocabulary (A 13)": ({"beyond": 3}, "row 0: id 26. in a vocabulary of 259", None),
    "cached tokens (B 32)": (
        {"cached_tokens": 64},
        "row 0: the server took 64 of 72 tokens from its prefix cache(?s:.*)--no-enable-prefix-caching",
        "row 0: the server took 64 of 72 tokens from its prefix cache(?s:.*)--disable-radix-cache",
    ),
    "cap of k (A 17)": ({"cap": 5}, "at most 5 log-probabilities a position, 12 are asked for", "exceeds 5"),
    "context (A 10)": ({"context": 96}, "4 rows do not fit the server's context of 96", None),
    "context, untold (A 10)": (
        {"context": 96, "tells_context": False},
        "maximum context length is 96 tokens",
        "longer than the model's context length",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("make", [vllm, sglang])
def test_each_fault_is_refused_in_one_line_with_its_repair(make, fault, model, rows):
    faults, of_vllm, of_sglang = WRONG[fault]
    with pytest.raises(Refused, match=of_sglang or of_vllm if make is sglang else of_vllm) as caught:
        check(make(model, **faults), rows)
    assert "\n" not in caught.value.what and caught.value.repair


@pytest.mark.parametrize("make", [vllm, sglang])
def test_noise_of_an_engine_is_told_with_its_figure(make, model, rows):
    """What came before, or what runs beside, may move a row: that is its floor, not a fault."""
    found = check(make(model, unsteady=True), rows)
    told = found["the same row twice"]
    assert not told.passed and 0.05 < float(told.figure.split()[2]) < 0.5 and "noise" in told.note


def test_speculative_decoding_that_a_server_tells_is_refused(model, rows):
    """Before a row is sent."""
    mock = vllm(model)
    mock.settings["speculative_config"] = {"method": "eagle3"}
    with pytest.raises(EngineError, match=r"decodes speculatively \(eagle3\)\n.*without --speculative-config"):
        check(mock, rows)
    other = sglang(model)
    other.settings["speculative_algorithm"] = "EAGLE"
    with pytest.raises(EngineError, match=r"decodes speculatively \(EAGLE\)\n.*without --speculative-algorithm"):
        check(other, rows)
    assert other.numbers.asked == []


def test_cached_tokens_that_are_not_reported_are_unproven(model, rows):
    """Never 0."""
    found = check(vllm(model, cached_tokens=None), rows)["tokens taken from a prefix cache"]
    assert found.figure.startswith("unproven in ") and "--no-enable-prefix-caching" in found.note


def test_a_server_that_crashes_with_a_shared_prefix(model, rows):
    """HTTP 500 on the second request."""
    mock = sglang(model)
    original = mock.post

    def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (500, {"error": "CUDA error"}) if mock.numbers.asked else original(path, body)

    mock.post = post  # type: ignore[method-assign]
    message = "row 0, but not a row with the same beginning, or it again: .*500(?s:.*)--disable-radix-cache"
    with pytest.raises(EngineError, match=message):
        check(mock, rows)


def test_requests_of_others_are_read_from_metrics(model, rows):
    """Content is right and the server is shared."""
    mock = Vllm(numbers=Numbers(model, Faults()))
    with serving(mock) as url:
        asked = connect("vllm", url, patience=SOON)
        assert requests_at_work(url) == 0
        quiet = check_served(asked, rows, k=5, vocab_size=VOCAB, load=load_of(url))[-1]
        mock.busy = 3
        shared = check_served(asked, rows, k=5, vocab_size=VOCAB, load=load_of(url))[-1]
    assert quiet.passed and quiet.figure == "0 other requests before and after"
    assert not shared.passed and shared.figure == "3 other requests" and shared.note.startswith("contaminated")
    with serving(vllm(model)) as url:
        assert requests_at_work(url) is None


# ---- fidelity doctor --engine ----------------------------------------------------------------------------------------


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments], terminal_width=240, env={"COLUMNS": "240"})


def with_tokenizer(model: Any, teacher_folder: Path, **faults: Any) -> Vllm:
    from transformers import AutoTokenizer

    mock = Vllm(numbers=Numbers(model, Faults(context=200, **faults)))
    mock.tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    return mock


def test_doctor_prints_every_check_with_its_figure(model, teacher_folder):
    with serving(with_tokenizer(model, teacher_folder)) as url:
        result = doctor("--engine", url)
    assert result.exit_code == 0, result.output
    assert (
        "vllm 0.33.0, model tiny-candidate; rows: text of example in the server's own tokens, 199, 199, 199"
        in " ".join(result.output.split())
    )
    assert "nothing stands in the way" in result.output
    assert "max |difference| 0" in result.output and "unproven" not in result.output.split("nobody else uses")[1]


def test_doctor_ends_with_3_and_says_all_that_is_wrong(model, teacher_folder):
    with serving(with_tokenizer(model, teacher_folder, leaks_temperature=True, cached_tokens=16)) as url:
        result = doctor("--engine", url, "--json", "--k", "5", "--kind", "vllm", "--served-model", "small")
    assert result.exit_code == 3, result.output
    told = json.loads(result.stdout)
    refused = {check["name"]: check["repair"] for check in told["checks"] if check["repair"]}
    assert set(refused) == {"temperature does not reach the prompt", "prefix cache"}
    assert "--no-enable-prefix-caching" in refused["prefix cache"]
    assert told["engine"]["engine"] == "vllm" and len(told["checks"]) > 15


def test_doctor_says_whose_rows_it_sends_where_the_server_makes_no_tokens(model, panel_folder):
    with serving(vllm(model)) as url:
        result = doctor("--engine", url, "--panel", str(panel_folder), "--json")
        wrong = doctor("--engine", url, "--panel", "nowhere")
        other = doctor("--engine", url, "--kind", "llamacpp")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"].startswith("those of tiny for the tokenizer ")
    assert "there is no panel nowhere" in str(wrong.exception) and "only vllm and sglang" in str(other.exception)
