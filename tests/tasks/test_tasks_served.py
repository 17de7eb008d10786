"""lm-eval's own local-completions against a real server: the same answers, and each fault in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.errors import EngineError, HarnessError, UsageError
from harness.served.address import find_server
from harness.tasks import served
from harness.tasks.run import Request, run_suite
from tests.tasks.made_data import MARK, files_with, write_gpqa, write_suite
from tests.tasks.made_models import save_tiny
from tests.tasks.small_server import SmallServer, serving


@pytest.fixture
def server(engine: TransformersEngine, tokenizer: Any) -> SmallServer:
    return SmallServer(engine.model, tokenizer)


@pytest.fixture(autouse=True)
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between attempts."""
    opened = served.open_served

    def hurried(*args: Any, **kwargs: Any) -> Any:
        lm = opened(*args, **kwargs)
        lm.max_retries = 1
        return lm

    monkeypatch.setattr(served, "open_served", hurried)


def request(tmp_path: Path, tiny: ModelFolder, url: str, *, rows: int = 6, **change: Any) -> Request:
    data, suite = tmp_path / "data", tmp_path / "suite"
    if not data.is_dir():
        write_gpqa(data, rows=rows)
        write_suite(suite)
    known = {
        "candidate": str(tiny.path),
        "suite": str(suite / "small.toml"),
        "data": data,
        "out": tmp_path / "served",
        "base_url": url,
        "num_concurrent": 3,
    }
    return Request(**(known | change))


@pytest.mark.parametrize("concurrent", [1, 3])
def test_served_answers_are_those_of_the_process(
    concurrent: int, server: SmallServer, tiny: ModelFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same model both ways: the same log-likelihoods; no address and no text in what is written."""
    with serving(server) as url:
        result = run_suite(request(tmp_path, tiny, url, num_concurrent=concurrent))
    inside = run_suite(request(tmp_path, tiny, url, base_url=None, out=tmp_path / "inside"))
    ours, theirs = (pd.read_parquet(f / "items.parquet") for f in (tmp_path / "served", tmp_path / "inside"))
    assert (ours.prompt_hash == theirs.prompt_hash).all() and (ours.correct == theirs.correct).all()
    difference = [abs(a - b).max() for a, b in zip(ours.loglikelihoods, theirs.loglikelihoods, strict=True)]
    assert max(difference) < 1e-3
    receipt = result.receipt
    assert receipt.lane == "served" and inside.receipt.lane == "weights"
    assert (receipt.model.engine, receipt.model.version) == ("vllm", "0.0.test")
    assert [check.name for check in receipt.preflight] == ["tokenizer", "two documents", "a repeated request"]
    assert receipt.preflight[0].figure.startswith("the same ")
    text = (tmp_path / "served" / "tasks.json").read_text()
    assert "127.0.0.1" not in text and str(tmp_path) not in text
    shown = capfd.readouterr()
    assert MARK not in shown.out + shown.err and files_with(MARK, [tmp_path / "served"]) == []
    # Two documents' requests and one repeated, then everything.
    assert len(server.served) == 4 + 4 + 1 + 24 or len(server.served) == 4 + 1 + 24


def test_addresses_are_found_with_and_without_their_ends(
    server: SmallServer, tiny: ModelFolder, tmp_path: Path
) -> None:
    with serving(server) as url:
        for given in (url, url.removesuffix("/v1"), url + "/", url + "/completions", url + "/chat/completions"):
            assert find_server(given, None).root == url
        assert find_server(url, "small").context == 2048
        server.has_version = False
        assert find_server(url, None).version == "unknown"


FAULTS = {
    "another model": ({}, {"served_model": "large"}, "the server does not know large; it has small"),
    "two models": ({"names": ("a", "b")}, {}, "the server has 2 models: a, b"),
    "a context too short": ({"context": 100}, {}, "24 prompts do not fit a context of 100 tokens"),
    "no echo": ({"echo": False}, {}, "the server's answer has no log-probabilities of the prompt"),
    "another tokenizer, told": ({"other_ids": True}, {}, "the server's tokenizer disagrees with the candidate's"),
    "another tokenizer, echoed": (
        {"other_texts": True, "has_tokenize": False},
        {},
        "the server's tokenizer disagrees with the candidate's: ",
    ),
    "another tokenizer, ids": (
        {"other_texts": True, "token_ids": True, "has_tokenize": False},
        {},
        "the server's tokenizer disagrees with the candidate's: ",
    ),
    "a BOS of its own": ({"adds_bos": True}, {}, "the server adds or drops tokens"),
    "only zeros": ({"zeros": True}, {}, "every log-probability of the prompt is 0"),
    "always the same": ({"constant": True}, {}, "every answer has the log-likelihood"),
    "never the same": ({"unsteady": True}, {}, "the same request gave a log-likelihood that differs by"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_one_line_and_nothing_is_scored(
    name: str, server: SmallServer, tiny: ModelFolder, tmp_path: Path
) -> None:
    """Two documents first; zero scored requests on an error."""
    switches, change, said = FAULTS[name]
    for switch, value in switches.items():
        setattr(server, switch, value)
    with serving(server) as url, pytest.raises(HarnessError, match=said) as caught:
        run_suite(request(tmp_path, tiny, url, **change))
    assert "\n" not in caught.value.what and MARK not in str(caught.value)
    assert not list((tmp_path / "served").glob("*")) or {p.name for p in (tmp_path / "served").iterdir()} == {".lock"}


def test_a_server_that_does_not_say_its_context(server: SmallServer, tiny: ModelFolder, tmp_path: Path) -> None:
    """Its refusal of the longest document is passed on, unless it quotes the question."""
    server.context = 100
    with serving(server) as url:
        assert find_server(url, None).context == 100
        server.get = lambda path: (200, {"data": [{"id": "small"}]}) if path == "/v1/models" else (404, {})  # type: ignore[method-assign]
        with pytest.raises(EngineError, match=r"refuses a request of \d+ tokens \(HTTP 400\): .*maximum context"):
            run_suite(request(tmp_path, tiny, url))
        server.says = f"your prompt was: {MARK} which number follows 0?"
        with pytest.raises(EngineError, match="its message quotes the prompt") as caught:
            run_suite(request(tmp_path, tiny, url))
    assert MARK not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/v1", "nothing answers at http://127.0.0.1:9/v1"),
        ("localhost:8000", "is no http address"),
    ],
)
def test_wrong_addresses(url: str, said: str, tiny: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        run_suite(request(tmp_path, tiny, url))


def test_an_address_of_something_else(server: SmallServer, tiny: ModelFolder, tmp_path: Path) -> None:
    server.get = lambda path: (200, {"hello": 1})  # type: ignore[method-assign]
    with serving(server) as url, pytest.raises(UsageError, match=r"lists no models \(HTTP 200\)"):
        run_suite(request(tmp_path, tiny, url))


@pytest.mark.parametrize("concurrent", [1, 3])
def test_a_server_that_dies_leaves_no_score(
    concurrent: int, server: SmallServer, tiny: ModelFolder, tmp_path: Path
) -> None:
    """Never a low score; what was answered is kept and the run goes on where it stopped."""
    with serving(server) as url:
        whole = run_suite(request(tmp_path, tiny, url, out=tmp_path / "whole", num_concurrent=concurrent))
        preflight = len(server.served) - 24
        server.served.clear()
        server.dies_after = preflight + 10
        with pytest.raises(EngineError, match=r"the server stopped answering .*: \d+ of 24 requests .* INVALID"):
            run_suite(request(tmp_path, tiny, url, num_concurrent=concurrent))
        assert not (tmp_path / "served" / "tasks.json").exists()
        kept = (tmp_path / "served" / "answers.jsonl").read_text().splitlines()
        assert 1 <= len(kept) <= 10 and all("loglikelihood" in json.loads(line) for line in kept)
        server.dies_after = None
        server.served.clear()
        resumed = run_suite(request(tmp_path, tiny, url, num_concurrent=concurrent))
    assert len(server.served) == preflight + 24 - len(kept)
    assert resumed.receipt.results == whole.receipt.results and resumed.receipt.key == whole.receipt.key


def test_weights_that_are_not_here_are_unknown(server: SmallServer, tiny: ModelFolder, tmp_path: Path) -> None:
    """A folder with config and tokenizer alone is enough to ask a server; nothing can then be said of its weights."""
    folder = save_tiny(tmp_path / "empty")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with serving(server) as url:
        receipt = run_suite(request(tmp_path, tiny, url, candidate=str(folder), rows=2)).receipt
    assert receipt.model.weights_sha256 == "unknown"


def test_special_tokens_as_the_tokenizer_adds_them(tokenizer: Any) -> None:
    """The served lane asks with the same BOS as the process does."""

    class Bos:
        def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
            ids = list(text.encode())
            return type("E", (), {"input_ids": [1, *ids] if add_special_tokens else ids})

    assert served.adds_special_tokens(Bos()) and not served.adds_special_tokens(tokenizer)
