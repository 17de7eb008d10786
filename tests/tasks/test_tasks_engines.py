"""`fidelity tasks --engine`: engines that run in this process with their own kernels, through the engine seam."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.engines.models import ModelFolder
from harness.engines.open import open_engine
from harness.errors import UsageError
from harness.tasks.run import run_suite
from tests.tasks.made_data import small


class Rows:
    """An engine of this process as the harness sees it: rows in, states and a head out, and no model to look into."""

    def __init__(self, inner: Any, **identity: Any) -> None:
        self._inner, self.head, self.head_deviation = inner, inner.head, inner.head_deviation
        self.identity = replace(inner.identity, **identity)

    def run(self, rows: Any, want: str = "hidden") -> Any:
        return self._inner.run(rows, want)


def test_any_engine_of_this_process_is_asked(
    tiny: ModelFolder, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--engine``: opened for the longest prompt that is let through, its lane and version in key and receipt."""
    opened: list[dict[str, Any]] = []

    real = engine

    def open_it(located: ModelFolder, *, engine: str, **options: Any) -> Any:
        if engine == "reference":
            return open_engine(located, **options)
        opened.append({"name": engine} | options)
        return Rows(real, engine=engine, lane="served", version="9")

    monkeypatch.setattr("harness.tasks.subject.open_engine", open_it)
    monkeypatch.setattr("harness.tasks.subject.before_opening", lambda name: {name: "9"})
    ours = run_suite(small(tmp_path, tiny, engine="exllamav3")).receipt
    reference = run_suite(small(tmp_path, tiny, out=tmp_path / "reference")).receipt
    assert [o["name"] for o in opened] == ["exllamav3"] and opened[0]["row_tokens"] == 2048
    assert (ours.lane, ours.model.engine, ours.model.version) == ("served", "exllamav3", "9")
    assert ours.model.settings["kv_cache"] is False and ours.key != reference.key
    a, b = (pd.read_parquet(tmp_path / n / "items.parquet") for n in ("run", "reference"))
    assert max(abs(x - y).max() for x, y in zip(a.loglikelihoods, b.loglikelihoods, strict=True)) < 1e-4
    assert ours.results == reference.results


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine": "exllamav3", "base_url": "http://127.0.0.1:9/v1"}, "--base-url asks a server, --engine runs"),
        ({"engine": "nothing"}, "there is no engine nothing in this process"),
        ({"engine": "llamacpp"}, "tiny holds 0 GGUF models, not one"),
    ],
)
def test_engines_that_cannot_be(change: dict[str, str], said: str, tiny: ModelFolder, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        run_suite(small(tmp_path, tiny, **change))


def test_options_that_an_engine_does_not_have(tiny: ModelFolder, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("harness.tasks.subject.before_opening", lambda name: {})
    with pytest.raises(UsageError, match="--engine vllm-local loads a model its own way"):
        run_suite(small(tmp_path, tiny, engine="vllm-local", packed=True))
