"""Archives that store experts as tensor-parallel slices: the join is the model; what is no whole archive is refused.

The independent side is plain transformers on plain safetensors: each slice is decoded by itself and the dense weights
are concatenated here, by the definition of tensor parallelism.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import CheckpointError
from harness.exl3.census import take_census
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.decode import dense_weight
from harness.exl3.hf import load_exl3
from harness.exl3.tensors import Exl3Linear
from tests.exl3 import made_packs
from tests.exl3.made_packs import Pack, Spec, random_linear
from tests.exl3.test_hf_models import logits, routed_experts

Tensors = dict[str, torch.Tensor]


def archive(folder: Path, ranks: int, shared: bool = False, model: Any = None) -> Pack:
    """A tiny model whose routed experts lie in ``ranks`` slices, and its dense twin, joined here."""
    pack = made_packs.pack(model or wide_experts(), folder, lambda name: None)
    dense = load_file(pack.dense / "model.safetensors")
    rng, stored = np.random.default_rng(5), {}
    for key, weight in sorted(dense.items()):
        if ".experts." not in key:
            stored[key] = weight
            continue
        linear, axis = key.removesuffix(".weight"), 1 if "down_proj" in key else 0
        sizes = list(weight.shape)
        sizes[axis] //= ranks
        slices = []
        for rank in range(ranks):
            parts = random_linear(linear, *sizes, Spec(bits=3), rng)
            if shared:
                name = f"{linear.partition('.experts.')[0]}.experts.shared_h.{linear.rpartition('.')[2]}.rank{rank}"
                for scale in ("suh", "svh"):
                    parts[scale] = stored.setdefault(f"{name}.{scale}", parts[scale])
            slices.append(dense_weight(Exl3Linear.from_tensors(linear, parts)))
            kept = {suffix: part for suffix, part in parts.items() if not (shared and suffix in ("suh", "svh"))}
            stored |= {f"{linear}.rank{rank}.{suffix}": part for suffix, part in kept.items()}
        dense[key] = torch.cat(slices, axis)
    save_file({k: v.contiguous() for k, v in dense.items()}, pack.dense / "model.safetensors", {"format": "pt"})
    pack.rewrite({k: v.contiguous() for k, v in stored.items()})
    return pack


def wide_experts(vocabulary: int = made_packs.VOCAB) -> Any:
    """A tiny Qwen3-MoE with experts 512 wide, so that each of four ranks keeps whole Hadamard blocks."""
    model = made_packs.qwen3_moe()
    config = model.config
    config.moe_intermediate_size = config.hidden_size = 512
    config.vocab_size = vocabulary
    torch.manual_seed(3)
    return type(model)(config).eval()


def change(pack: Pack, edit: Callable[[Tensors], None]) -> Path:
    tensors = pack.tensors()
    edit(tensors)
    pack.rewrite(tensors)
    return pack.packed


@pytest.mark.parametrize("shared", [False, True], ids=["own scales", "shared scales"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_are_the_dense_join(ranks: int, shared: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    pack = archive(tmp_path, ranks, shared=shared)
    twin = AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32)
    dense = load_exl3(pack.packed, dequantize=True, dtype=torch.float32)
    wanted = twin.state_dict()
    assert dense.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in dense.state_dict().items())
    packed = load_exl3(pack.packed, dtype=torch.float32)
    torch.testing.assert_close(logits(packed), logits(twin), rtol=0, atol=1e-5)
    census = take_census(open_checkpoint(pack.packed))
    layers, experts = twin.config.num_hidden_layers, twin.config.num_experts
    assert census.routed is not None and census.routed.tensors == layers * experts * 3
    assert census.whole.bytes == sum(tensor.nbytes for tensor in pack.tensors().values())
    assert {group.ranks for group in census.groups} == {ranks} and {g.leaf for g in census.groups} == {
        "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_one_rank_is_the_same_model_under_another_name(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.glm5_next(experts=2), tmp_path, routed_experts)
    before = logits(load_exl3(pack.packed, dtype=torch.float32))

    def rename(tensors: Tensors) -> None:
        for key in [key for key in tensors if key.rpartition(".")[0] in pack.bits]:
            owner, _, suffix = key.rpartition(".")
            tensors[f"{owner}.rank0.{suffix}"] = tensors.pop(key)

    change(pack, rename)
    assert torch.equal(logits(load_exl3(pack.packed, dtype=torch.float32)), before)


def test_casting_keeps_shared_scales(tmp_path: Path) -> None:
    pack = archive(tmp_path, 2, shared=True)
    model = load_exl3(pack.packed, dtype=torch.float32)
    before = model.model.layers[0].mlp.experts.gate_up_proj
    cast = model.to(torch.bfloat16)
    assert {buffer.dtype for name, buffer in cast.named_buffers() if ".shared_h." in name} == {torch.float16}
    assert torch.equal(cast.model.layers[0].mlp.experts.gate_up_proj, before.to(torch.bfloat16))


LAYER = "model.layers.1.mlp.experts"
WRONG = {
    "missing rank": (lambda t: drop(t, ".experts.1.up_proj.rank1."), "up_proj: rank 1 of 4 is missing"),
    "missing last rank": (lambda t: drop(t, ".rank3."), "config.json says rank_stacked_tp 4"),
    "another K": (lambda t: recode(t, f"{LAYER}.0.down_proj.rank2", bits=2), "differ in K: 3, 3, 2, 3"),
    "another codebook": (lambda t: recode(t, f"{LAYER}.0.down_proj.rank2", codebook="mul1"), "differ in codebook"),
    "another size": (lambda t: recode(t, f"{LAYER}.0.down_proj.rank2", columns=256), "differ in size"),
}  # fmt: skip


def drop(tensors: Tensors, part: str) -> None:
    for key in [key for key in tensors if part in key]:
        del tensors[key]


def recode(tensors: Tensors, name: str, bits: float = 3, codebook: str = "mcg", columns: int = 128) -> None:
    drop(tensors, f"{name}.")
    parts = random_linear(name, 512, columns, Spec(bits=bits, codebook=codebook), np.random.default_rng(1))
    tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_whole_archive_is_refused(what: str, tmp_path: Path) -> None:
    edit, line = WRONG[what]
    pack = archive(tmp_path, 4)
    pack.edit_config(lambda config: config["quantization_config"].update(rank_stacked_tp=4))
    load_exl3(pack.packed)
    change(pack, edit)
    for read in (open_checkpoint, load_exl3):
        with pytest.raises(CheckpointError, match=line):
            read(pack.packed)


SHARED_WRONG = {
    "a shared scale is missing": (lambda t: drop(t, f"{LAYER}.shared_h.up_proj.rank1.svh"), "rank1.svh is missing"),
    "a projection has none": (lambda t: drop(t, f"{LAYER}.shared_h.up_proj."), "up_proj.rank0.suh is missing"),
    "both kinds": (
        lambda t: t.update({f"{LAYER}.0.up_proj.rank0.suh": t[f"{LAYER}.shared_h.up_proj.rank0.suh"].clone()}),
        "has a suh of its own beside the shared",
    ),
    "nobody's": (
        lambda t: t.update({f"{LAYER}.shared_h.other.rank0.suh": t[f"{LAYER}.shared_h.up_proj.rank0.suh"].clone()}),
        "holds scales that no expert uses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SHARED_WRONG)
def test_shared_scales_that_do_not_fit_are_refused(what: str, tmp_path: Path) -> None:
    edit, line = SHARED_WRONG[what]
    pack = archive(tmp_path, 2, shared=True)
    change(pack, edit)
    with pytest.raises(CheckpointError, match=line):
        open_checkpoint(pack.packed)


def test_config_is_held_against_the_names(tmp_path: Path) -> None:
    pack = archive(tmp_path, 2)
    config = json.loads((pack.packed / "config.json").read_text())
    (pack.packed / "config.json").write_text(json.dumps(config | {"archive_tensor_parallel_size": 4}))
    with pytest.raises(CheckpointError, match="archive_tensor_parallel_size 4, and .* has 2 ranks"):
        open_checkpoint(pack.packed)
