"""Who can load an artifact, what it takes, and what the Hub trips over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.artifact.fits import GIB, budget
from harness.artifact.runtimes import answer, known_runtimes, load_runtime, needs
from harness.errors import UsageError
from tests.artifact.made import checkpoint, experts, linear
from tests.exl3 import made_packs
from tests.exl3.test_hf_models import routed_experts
from tests.exl3.test_ranked import archive
from tests.fault_cases.statements import fidelity


def published_case() -> Any:
    """The published GLM case: everything in mul1, the first three layers dense MLPs, attention and head too."""
    tensors = experts({layer: 2 for layer in range(3, 45)}, codebook="mul1")
    for layer in (0, 3):
        tensors |= linear(f"model.layers.{layer}.self_attn.o_proj", (4096, 4096), 4, "mul1")
    tensors |= linear("model.layers.0.mlp.up_proj", (4096, 8192), 4, "mul1")
    return checkpoint(tensors)


def test_the_true_blockers_of_the_published_case() -> None:
    """The reason that was first given, the lineage of the keys, is not among them."""
    given = answer(load_runtime("vllm-exl3-0.2.2"), needs(published_case()))
    stopped = {need.feature: f"{need.because} {why}" for need, verdict, why in given.lines if verdict == "refused"}
    assert given.verdict == "refused" and set(stopped) == {
        "quantised dense MLP before the experts",
        "codebook mul1",
        "routed experts in mul1",
        "EXL3 linears outside the routed experts",
    }
    assert "layer 0 is a dense MLP" in stopped["quantised dense MLP before the experts"]
    assert "no EXL3 LinearMethod for non-routed linears" in stopped["EXL3 linears outside the routed experts"]
    assert not any("lineage" in text or "key" in text for text in stopped.values())
    assert answer(load_runtime("vllm-exl3-2026-09-07"), needs(published_case())).verdict == "loads"


def test_every_runtime_has_a_source_for_every_entry() -> None:
    for name in known_runtimes():
        runtime = load_runtime(name)
        assert len({entry.feature for entry in runtime.entries}) == len(runtime.entries)
        assert all(entry.source and entry.at and entry.read for entry in runtime.entries)
        assert all(entry.why for entry in runtime.entries if not entry.can)


def test_through_the_command(tmp_path: Path) -> None:
    pack = archive(tmp_path, 2, shared=True)
    code, said = fidelity(tmp_path, "artifact", "compat", pack.packed, "--load-check")
    assert code == 0 and "exl3-fidelity reference and streaming engines: " in said
    assert "refused: rank-sliced experts" in said and "refused: shared scales" in said
    assert "load check: " in said and "in Qwen3MoeForCausalLM" in said
    pack.edit_config(lambda config: config["quantization_config"].update(bits=2, layer_bits={"1": 4}))
    code, said = fidelity(tmp_path, "artifact", "compat", pack.packed, "--load-check")
    assert "load shape mismatch: layer 1 up_proj: config says K=4" in said and "K=3" in said
    code, said = fidelity(tmp_path, "artifact", "compat", pack.packed, "--runtime", "exllamav3==1.6.5")
    assert code == 1 and "exllamav3 1.6.5: refused" in said
    code, said = fidelity(tmp_path, "artifact", "compat", pack.packed, "--runtime", "nobody")
    assert code == 2 and "choose one of exllamav3-1.6.5" in said


def test_show_counts_an_archive(tmp_path: Path) -> None:
    pack = archive(tmp_path, 4)
    code, said = fidelity(tmp_path, "artifact", "show", pack.packed, "--out", "artifact.json")
    assert code == 0, said
    receipt = json.loads((tmp_path / "artifact.json").read_text())
    assert receipt["ranks"] == 4 and "ranks: 4" in said
    assert sum(receipt["bytes_by_kind"].values()) == receipt["scopes"]["whole file"]["bytes"]
    assert receipt["scopes"]["whole file"]["bytes"] == sum(t.nbytes for t in pack.tensors().values())


# ---- memory ----------------------------------------------------------------------------------------------------------

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("config", "kv", "bytes_a_token"),
    [
        (LLAMA, "fp16", 2 * 32 * 8 * 128 * 2),
        (LLAMA, "q8_0", 2 * 32 * 8 * 128 * 34 / 32),
        (LLAMA, "fp16,q4_0", 32 * 8 * 128 * (2 + 18 / 32)),
        ({**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "fp16", 32 * 576 * 2),
        ({"text_config": {**LLAMA, "head_dim": 64}}, "fp16", 2 * 32 * 8 * 64 * 2),
    ],
)
def test_cache_of_a_token(config: dict[str, Any], kv: str, bytes_a_token: float) -> None:
    made = budget(0, config, gpu_gib=24, context=1024, kv=kv)
    assert made.cache == bytes_a_token * 1024
    assert budget(0, config, gpu_gib=24, context=1024, kv=kv, slots=3).cache == 3 * made.cache


def test_windows_and_states_do_not_grow() -> None:
    kinds = ["full_attention", "sliding_attention", "linear_attention"]
    config = {**LLAMA, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 512}
    config |= {"linear_num_heads": 4, "linear_head_dim": 32}
    short, long = (budget(0, config, gpu_gib=1, context=context, kv="fp16").cache for context in (1024, 2048))
    assert long - short == 1024 * 2 * 8 * 128 * 2  # the one full layer
    assert short == 2 * 8 * 128 * 2 * (1024 + 512) + 4 * 32 * 32 * 2


def test_the_verdict_shows_its_arithmetic(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.qwen3_moe(), tmp_path, routed_experts)
    code, said = fidelity(tmp_path, "artifact", "fits", pack.packed, "--gpu-gib", "24", "--context", "32768")
    assert code == 0 and "24: fits" in said and "32,768 tokens x" in said and "assumed, not measured" in said
    code, said = fidelity(tmp_path, "artifact", "fits", pack.packed, "--gpu-gib", "1", "--context", "32768")
    assert code == 1 and "does NOT fit" in said
    code, said = fidelity(tmp_path, "artifact", "fits", pack.packed, "--gpu-gib", "24", "--context", "9", "--kv", "q9")
    assert code == 2 and "--kv q9" in said and "repair:" in said


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(UsageError, match="no num_hidden_layers"):
        budget(GIB, {}, gpu_gib=8, context=10, kv="fp16")


# ---- lint ------------------------------------------------------------------------------------------------------------


def test_lint_names_what_the_hub_trips_over(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.qwen3_moe(), tmp_path, routed_experts)
    folder = pack.packed
    (folder / "README.md").write_text("---\nbase_model: org/base\n---\n# q\n")
    (folder / ".model.safetensors.7.partial").write_text("")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": {"x": "gone.safetensors"}})
    )
    code, said = fidelity(tmp_path, "artifact", "lint", folder)
    assert code == 1
    for line in (
        "README.md has no license", "no pipeline_tag", "base_model_relation is not", "the tag exl3 is missing",
        "bits is 4.0: the Hub takes only an integer", "the index names gone.safetensors", "is an unfinished file",
        "there is no LICENSE file",
    ):  # fmt: skip
        assert line in said, line
    (folder / "model.safetensors.index.json").unlink()
    (folder / ".model.safetensors.7.partial").unlink()
    (folder / "LICENSE").write_text("MIT")
    (folder / "README.md").write_text(
        "---\nlicense: mit\nbase_model: org/base\nbase_model_relation: quantized\npipeline_tag: text-generation\n"
        "tags: [exl3]\n---\n# q\n"
    )
    pack.edit_config(lambda config: config["quantization_config"].update(bits=4))
    code, said = fidelity(tmp_path, "artifact", "lint", folder)
    assert code == 0 and said.endswith("0 errors, 0 warnings\n"), said
