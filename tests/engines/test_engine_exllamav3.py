"""exllamav3 in process: driven through a small one that computes a real model, and through the real one on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from harness.engines.exllamav3 import PINS, CarriedRow, ExllamaV3Engine
from harness.engines.head import head_logits
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.open import before_opening, open_engine
from harness.errors import EngineError, UsageError
from harness.measure.rows import one_sided, targets_of
from harness.types import Hidden, Row
from tests import tiny
from tests.engines import fake_exllamav3
from tests.measure.checked import check_engine

#: Two float16 roundings (final norm, bf16 head is exact) on a model whose logits reach 20.
NLL_TOLERANCE = 5e-3
#: The tiny tokenizer's vocabulary: one letter a token, as `tests.tiny.save_tokenizer` numbers them.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("EXL3_")]:
        monkeypatch.delenv(name)
    for name, value in PINS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "exllamav3", fake_exllamav3.package())
    fake_exllamav3.TransformerBlock.buffers.clear()
    yield


@pytest.fixture(scope="module")
def exl3_head_folder(tmp_path_factory: pytest.TempPathFactory, teacher_folder: Path) -> Path:
    """The tiny teacher with its head coded in 6 bits and its MLPs in 4."""
    from harness.exl3.quantize import quantize_checkpoint
    from harness.exl3.quantize_plan import QuantizeSettings

    folder = tmp_path_factory.mktemp("exl3") / "tiny-head"
    quantize_checkpoint(teacher_folder, folder, QuantizeSettings(bits=4, modules="mlp", head_bits=6))
    return folder


def located(folder: Path) -> ModelFolder:
    return ModelFolder(path=folder, name="tiny", revision="local")


def opened(folder: Path, **options: Any) -> ExllamaV3Engine:
    options = {"row_tokens": 96, "device": "cpu"} | options
    return ExllamaV3Engine(located(folder), weights_sha256="w", tokenizer_sha256="t", **options)


def rows_of(*lengths: int) -> list[Row]:
    """Rows of a text that the tiny model predicts, each with another beginning."""
    made = []
    for index, length in enumerate(lengths):
        text = tiny.text(seed=20 + index, sentences=4)[:length]
        ids = np.array([ALPHABET.index("Ġ" if letter == " " else letter) for letter in text], dtype=np.int32)
        made.append(Row(index=index, ids_T=ids, document=f"d{index}", domain="d", sha256=""))
    return made


def reference(folder: Path, row: Row) -> Any:
    engine = TransformersEngine(
        located(folder), compute="float32", device="cpu", weights_sha256="w", tokenizer_sha256="t"
    )
    (out,) = engine.run([row], "hidden")
    return one_sided(out.outputs, engine.head, targets_of(row)), engine.head


def states(engine: ExllamaV3Engine, rows: list[Row]) -> list[torch.Tensor]:
    found = []
    for out in engine.run(rows):
        assert isinstance(out.outputs, Hidden)
        found.append(out.outputs.states_TH)
    return found


def test_rows_of_unlike_length_equal_the_reference_engine(fake: None, teacher_folder: Path) -> None:
    rows = rows_of(40, 96, 40, 7)
    engine = opened(teacher_folder)
    for row, out in zip(rows, engine.run(rows), strict=True):
        assert np.array_equal(out.echoed_ids_T, row.ids_T) and out.index == row.index
        ours = one_sided(out.outputs, engine.head, targets_of(row))
        theirs, head = reference(teacher_folder, row)
        assert np.abs(ours.nll - theirs.nll).max() < NLL_TOLERANCE
        assert np.array_equal(ours.top1, theirs.top1)
        assert engine.head.sha256 == head.sha256 == engine.identity.head_sha256
    assert engine.head_deviation is not None and 0 < engine.head_deviation < 0.05


def test_a_quantised_head_is_decoded_here(fake: None, exl3_head_folder: Path) -> None:
    (row,) = rows_of(96)
    engine = opened(exl3_head_folder)
    (out,) = engine.run([row])
    theirs, head = reference(exl3_head_folder, row)
    assert engine.head.weight_VH.shape == (259, 128) and engine.head.sha256 == head.sha256
    assert np.abs(one_sided(out.outputs, engine.head, targets_of(row)).nll - theirs.nll).max() < NLL_TOLERANCE


def test_a_fresh_dict_for_each_module_would_compute_nothing(fake: None, teacher_folder: Path) -> None:
    """The small exllamav3 shares through params, so the test above fails for a driver that makes a dict a module."""
    model = fake_exllamav3.Model.from_config(fake_exllamav3.Config(str(teacher_folder)))
    row = CarriedRow(model, rows_of(8)[0])
    with torch.inference_mode(), pytest.raises(KeyError, match="rotary"):
        for module in model.modules:
            if module.can_defer_load():
                module.config.stc.begin_deferred_load()
            module.load(torch.device("cpu"))
            module.config.stc.deferred = False
            row.params = {"input_ids": row.params["input_ids"], "attn_mode": "flash_attn_nc"}
            row.advance(module, park=False)


def test_neither_groups_nor_parking_move_a_bit(fake: None, teacher_folder: Path) -> None:
    """What else is in a run must not move a row. Blocks of the fake answer in one buffer for all rows."""
    rows = rows_of(40, 40, 40)
    together = states(opened(teacher_folder), rows)
    apart = states(opened(teacher_folder, host_bytes=41 * 128 * 16), rows)
    alone = [states(opened(teacher_folder), [row])[0] for row in rows]
    for a, b, c in zip(together, apart, alone, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert not torch.equal(together[0], together[1])
    with pytest.raises(EngineError, match="row 0 may take"):
        states(opened(teacher_folder, host_bytes=100), rows)


def test_one_module_at_a_time_and_the_preflight(fake: None, teacher_folder: Path) -> None:
    engine = opened(teacher_folder)
    checks = check_engine(engine, rows_of(96)[0])
    assert [check.name for check in checks if not check.passed] == []
    config = engine._config
    assert config.most_loaded == 1 and not config.loaded
    assert config.stc.closed == config.stc.released == len(engine._model.modules)
    assert config.dynamic_seq_len == 96


def test_a_failure_gives_the_weights_back(fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(teacher_folder)

    def out_of_memory(self: Any, device: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(fake_exllamav3.RMSNorm, "load", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        list(engine.run(rows_of(8)))
    assert not engine._config.loaded and engine._config.stc.aborted == 1 and not engine._config.stc.deferred


def test_the_heads_shape_is_the_engines(fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft-cap and a scale that exllamav3 applies are part of our head; one that it hides is found out."""
    plain = fake_exllamav3.Linear.__init__

    def capped(self: Any, config: Any, key: str, source: Any) -> None:
        plain(self, config, key, source)
        self.softcap, self.pre_scale = 5.0, 0.5

    monkeypatch.setattr(fake_exllamav3.Linear, "__init__", capped)
    engine = opened(teacher_folder)
    assert (engine.head.softcap, engine.head.scale) == (5.0, 0.5)
    (row,) = rows_of(20)
    (out,) = engine.run([row], "logits")
    (hidden,) = states(engine, [row])
    expected = 5 * torch.tanh(hidden.float() @ engine.head.weight_VH.float().T * 0.5 / 5)
    torch.testing.assert_close(out.outputs.logits_TV, expected)
    assert engine.head_deviation is not None and engine.head_deviation < 0.05

    engine = opened(teacher_folder)
    engine._head_module.pre_scale = 1.0
    with pytest.raises(EngineError, match="logits differ by"):
        list(engine.run([row]))


@pytest.mark.parametrize(
    ("change", "says"), [({"softcap": 5.0, "post_scale": 2.0}, "after capping"), ({"weight_scale": 2.0}, "weights of")]
)
def test_heads_of_another_shape_are_refused(
    fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, float], says: str
) -> None:
    plain = fake_exllamav3.Linear.__init__

    def other(self: Any, config: Any, key: str, source: Any) -> None:
        plain(self, config, key, source)
        self.__dict__.update(change)

    monkeypatch.setattr(fake_exllamav3.Linear, "__init__", other)
    with pytest.raises(EngineError, match=says):
        opened(teacher_folder)


def test_what_cannot_be_carried_is_refused(fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fake_exllamav3.TransformerBlock.forward

    def defers(self: Any, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        params["hc_pending"] = (x, x)
        return plain(self, x, params)

    monkeypatch.setattr(fake_exllamav3.TransformerBlock, "forward", defers)
    with pytest.raises(EngineError, match="leaves an addition pending"):
        list(opened(teacher_folder).run(rows_of(8)))


def test_rows_and_wants_that_it_does_not_do(fake: None, teacher_folder: Path) -> None:
    engine = opened(teacher_folder, row_tokens=30)
    with pytest.raises(EngineError, match="rows \\[1\\] are longer"):
        list(engine.run(rows_of(30, 31)))
    with pytest.raises(UsageError, match="no option kv_dtype"):
        open_engine(
            located(teacher_folder),
            engine="exllamav3",
            row_tokens=8,
            options={"kv_dtype": "f16"},
            weights_sha256="w",
            tokenizer_sha256="t",
        )


def test_an_unknown_architecture_is_one_line_without_a_path(fake: None, teacher_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    with pytest.raises(EngineError, match="Unknown architecture OtherForCausalLM in tiny") as caught:
        opened(tmp_path)
    assert str(tmp_path) not in str(caught.value)


# ---- pins and import -------------------------------------------------------------------------------------------------


def test_pins_are_recorded_and_paths_are_not(fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXL3_HGEMM_F16ACC", "1")
    monkeypatch.setenv("EXL3_MOE_CPU_SPLIT_STATS", "/home/someone/stats.json")
    settings = opened(teacher_folder).identity.settings
    assert settings["EXL3_HGEMM_F16ACC"] == "1" and settings["EXL3_INT8_GEMV"] == "0"
    assert settings["EXL3_MOE_CPU_SPLIT_STATS"] == "set"
    assert "someone" not in repr(opened(teacher_folder).identity)


def test_pins_stand_before_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, teacher_folder: Path) -> None:
    """exllamav3 reads them once, when it is imported."""
    (tmp_path / "exllamav3").mkdir()
    (tmp_path / "exllamav3" / "version.py").write_text('__version__ = "1.6.5"\n')
    (tmp_path / "exllamav3" / "__init__.py").write_text(
        "import os\nfrom tests.engines.fake_exllamav3 import Config, Model\n"
        "SEEN = {name: value for name, value in os.environ.items() if name.startswith('EXL3_')}\n"
    )
    for name in PINS:
        monkeypatch.setenv(name, "x")  # so that what the engine sets is undone
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exllamav3", raising=False)
    monkeypatch.delitem(sys.modules, "exllamav3.version", raising=False)
    opened(teacher_folder)
    assert sys.modules.pop("exllamav3").SEEN == PINS


def test_an_earlier_import_without_pins_is_refused(
    fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EXL3_INT8_GEMV")
    with pytest.raises(EngineError, match="imported before EXL3_INT8_GEMV"):
        opened(teacher_folder)


def test_experts_on_the_cpu_and_old_versions_are_refused(
    fake: None, teacher_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "exllamav3", fake_exllamav3.package("1.4.1"))
    with pytest.raises(EngineError, match="1.4.1 is too old"):
        opened(teacher_folder)
    monkeypatch.setenv("EXL3_MOE_CPU_OFFLOAD", "3")
    with pytest.raises(EngineError, match="EXL3_MOE_CPU_OFFLOAD is set"):
        opened(teacher_folder)


@pytest.mark.skipif(importlib.util.find_spec("exllamav3") is not None, reason="exllamav3 is installed")
def test_where_it_is_missing_it_says_how_to_get_it(teacher_folder: Path) -> None:
    with pytest.raises(EngineError, match=r"not installed\n  repair: on a machine with CUDA.*exllamav3==1\.6\.5"):
        opened(teacher_folder)
    with pytest.raises(EngineError, match="not installed"):
        before_opening("exllamav3")


def test_an_import_that_fails_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, teacher_folder: Path
) -> None:
    """Without CUDA the import itself fails; a package that it needs may be missing too."""
    for name in PINS:
        monkeypatch.setenv(name, PINS[name])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exllamav3", raising=False)
    (tmp_path / "exllamav3.py").write_text("raise OSError('CUDA_HOME environment variable is not set')\n")
    with pytest.raises(EngineError, match="cannot be imported here: CUDA_HOME"):
        opened(teacher_folder)
    (tmp_path / "exllamav3.py").write_text("import llguidance_that_is_missing_everywhere\n")
    with pytest.raises(EngineError, match="pip install llguidance_that_is_missing_everywhere"):
        opened(teacher_folder)


def test_importing_this_project_imports_no_engine() -> None:
    code = (
        "import sys, harness.engines.open, harness.engines.exllamav3, harness.engines.llamacpp, "
        "harness.engines.vllm_local; print([m for m in ('exllamav3', 'llama_cpp', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("exllamav3") is None, reason="exllamav3 is not installed")
def test_the_real_one_on_a_gpu() -> None:
    """The example's 3-bit quant: float16 kernels against float32, so the same but for rounding."""
    folder = Path(os.environ.get("FIDELITY_EXL3_FOLDER", "teachers/models/SmolLM2-135M-exl3-mlp-3bit"))
    if not folder.is_dir():
        pytest.skip("make the example's quant first (make panel), or name a folder in FIDELITY_EXL3_FOLDER")
    rng = np.random.default_rng(0)
    rows = [
        Row(index=i, ids_T=rng.integers(100, 20000, length).astype(np.int32), document="d", domain="d", sha256="")
        for i, length in enumerate((200, 64))
    ]
    engine = opened(folder, row_tokens=200, device="cuda:0")
    for row, out in zip(rows, engine.run(rows), strict=True):
        ours = one_sided(out.outputs, engine.head, targets_of(row))
        theirs, _ = reference(folder, row)
        assert np.abs(ours.nll - theirs.nll).mean() < 0.02
        assert (ours.top1 == theirs.top1).mean() > 0.95
    again = list(engine.run(rows))
    assert torch.equal(again[0].outputs.states_TH, next(iter(engine.run(rows))).outputs.states_TH)


def test_logits_are_the_heads_of_the_states(fake: None, teacher_folder: Path) -> None:
    (row,) = rows_of(20)
    engine = opened(teacher_folder)
    (out,) = engine.run([row], "logits")
    (hidden,) = states(engine, [row])
    torch.testing.assert_close(out.outputs.logits_TV, head_logits(engine.head, hidden))
    assert out.outputs.logits_TV.dtype == torch.float32
