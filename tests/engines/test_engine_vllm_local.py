"""vLLM in process, driven through a small one. `test_vllm_local_real` runs the real one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.engines import vllm_settings
from harness.engines.head import head_logits
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.open import before_opening, open_engine
from harness.engines.vllm_local import ENVIRONMENT, VllmLocalEngine, _inspectable_llvmlite
from harness.errors import EngineError
from harness.measure.rows import one_sided, targets_of
from harness.types import Hidden
from tests.engines import fake_vllm
from tests.engines.test_engine_exllamav3 import located, rows_of
from tests.measure.checked import check_engine


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*ENVIRONMENT, "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "x")  # so that what the engine sets is undone
        monkeypatch.delenv(name)
    vllm_settings.variables.cache_clear()
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm.package())
    yield
    vllm_settings.variables.cache_clear()


def opened(folder: Path, **options: Any) -> VllmLocalEngine:
    options = {"row_tokens": 96} | options
    return VllmLocalEngine(located(folder), weights_sha256="w", tokenizer_sha256="t", **options)


def test_states_of_each_row_alone(fake: None, teacher_folder: Path) -> None:
    """Faults D 33, 34, 40: one step a row, nothing cached, and neither buffers nor padding of other steps in it."""
    rows = rows_of(96, 41, 96, 7)
    engine = opened(teacher_folder)
    reference = TransformersEngine(
        ModelFolder(path=teacher_folder, name="t", revision="local"),
        compute="float32",
        device="cpu",
        weights_sha256="w",
        tokenizer_sha256="t",
    )
    answers = list(engine.run(rows))
    for row, out, expected in zip(rows, answers, reference.run(rows), strict=True):
        assert np.array_equal(out.echoed_ids_T, row.ids_T) and out.index == row.index
        assert isinstance(out.outputs, Hidden) and isinstance(expected.outputs, Hidden)
        torch.testing.assert_close(out.outputs.states_TH, expected.outputs.states_TH, rtol=0, atol=1e-5)
        a, b = (
            one_sided(side.outputs, head, targets_of(row))
            for side, head in ((out, engine.head), (expected, reference.head))
        )
        assert np.abs(a.nll - b.nll).max() < 1e-5
    assert reference.head is not None and engine.head.sha256 == reference.head.sha256
    assert engine.head_deviation is not None and engine.head_deviation < 1e-4
    assert all(check.passed for check in check_engine(engine, rows[0]))
    (logits,) = engine.run(rows[1:2], "logits")
    assert isinstance(answers[1].outputs, Hidden)
    torch.testing.assert_close(logits.outputs.logits_TV, head_logits(engine.head, answers[1].outputs.states_TH))


def test_what_vllm_is_told_and_what_is_recorded(
    fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/home/someone/cache")
    options = {"kv_cache_dtype": "fp8", "enable_prefix_caching": True, "max_num_seqs": 64, "download_dir": "/a/b"}
    digests = {"weights_sha256": "w", "tokenizer_sha256": "t"}
    engine = open_engine(located(teacher_folder), engine="vllm-local", row_tokens=50, options=options, **digests)
    assert isinstance(engine, VllmLocalEngine)
    asked = engine._llm.asked
    assert not asked["enable_prefix_caching"] and asked["max_num_seqs"] == 1 and asked["enforce_eager"]
    assert asked["max_num_batched_tokens"] == 51 and asked["seed"] == 0
    identity = engine.identity
    assert (identity.engine, identity.lane, identity.compute_dtype) == ("vllm-local", "served", "float32")
    expected = {"kv_cache_dtype": "fp8", "prefix_cache": False, "chunk_tokens": 51, "attention": "CPU_ATTN"}
    more = {"speculative": None, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": "set", "download_dir": "set"}
    assert (expected | more).items() <= identity.settings.items()
    assert "someone" not in repr(identity) and str(teacher_folder.parent) not in repr(identity)


def test_what_is_refused(fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(teacher_folder, row_tokens=30)
    with pytest.raises(EngineError, match=r"rows \[1\] are longer"):
        list(engine.run(rows_of(30, 31)))
    with pytest.raises(EngineError, match="on one GPU, 4 are asked for"):
        opened(teacher_folder, tensor_parallel=4)
    with pytest.raises(EngineError, match="does not open tiny: Unknown quantization method: exl3 in tiny"):
        opened(teacher_folder, options={"quantization": "exl3"})
    engine._llm.asked["max_num_batched_tokens"] = 16
    with pytest.raises(EngineError, match=r"ran its 30 tokens in 2 steps of \[16, 16\]"):
        list(engine.run(rows_of(30)))
    monkeypatch.setattr(fake_vllm.LLM, "cached", 16)
    with pytest.raises(EngineError, match="took 16 tokens from a cache"):
        list(opened(teacher_folder).run(rows_of(30)))


def test_a_head_that_is_not_the_models_is_found_out(fake: None, teacher_folder: Path) -> None:
    engine = opened(teacher_folder)
    engine._llm.model.scale = 1.5
    with pytest.raises(EngineError, match="vLLM's logits differ by"):
        list(engine.run(rows_of(8)))


def test_other_ids_are_told(fake: None, teacher_folder: Path) -> None:
    """What the model ran is echoed, not what was sent: a BOS that something adds is seen by the preflight."""
    engine = opened(teacher_folder)
    plain = engine._llm.generate

    def with_bos(prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        changed = fake_vllm.TokensPrompt([1, *prompts[0].prompt_token_ids[:-1]])
        return plain([changed], sampling, use_tqdm=use_tqdm)

    engine._llm.generate = with_bos
    (row,) = rows_of(20)
    with pytest.raises(EngineError, match="the engine ran token 1 at index 0"):
        check_engine(engine, row)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_where_it_is_missing_it_says_how_to_get_it(teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(EngineError, match=r"not installed\n  repair: install it in an environment of its own"):
        opened(teacher_folder)
    with pytest.raises(EngineError, match="vLLM is not installed"):
        before_opening("vllm-local")


def test_llvmlite_can_be_looked_through_and_works_after() -> None:
    """vLLM's CPU build calls ``vars`` on everything that is imported; llvmlite gives it a native function."""
    from llvmlite.binding import ffi

    with _inspectable_llvmlite():
        assert not hasattr(ffi.lib, "__dict__")
        assert callable(ffi.lib.LLVMPY_GetVersionInfo)
    assert hasattr(ffi.lib, "__dict__") and callable(ffi.lib.LLVMPY_GetVersionInfo)
