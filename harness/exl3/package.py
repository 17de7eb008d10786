"""Checkpoint folders that are written here: EXL3 ones that any loader takes, and plain dense ones for other engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import harness
from harness.errors import CheckpointError, UsageError
from harness.exl3.checkpoint import Checkpoint, has_trellis
from harness.exl3.codebook import MARKERS
from harness.exl3.quantize_plan import Job, QuantizePlan, QuantizeSettings
from harness.store import atomic_path, write_json

#: Written last: its existence means that the folder is whole.
MANIFEST = "exl3-quantize.json"
SHARD_BYTES = 2_000_000_000
_COMPANIONS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "*preprocessor_config.json",
    "*.model",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """Tensors that stay in one shard: key to file."""

    name: str
    tensors: dict[str, Path]
    bytes: int


def package(
    source: Checkpoint,
    dst: Path,
    plan: QuantizePlan,
    settings: QuantizeSettings,
    partial: Path,
    identity: dict[str, Any],
) -> None:
    """Write shards, index, both configs and the tokenizer's files; the manifest last."""
    modules = list(_modules(source, plan, partial))
    storage = _write_shards(dst, modules)
    about = _about(plan, settings, identity["calibration"])
    write_json(dst / "config.json", _config(source, plan, about))
    write_json(dst / "quantization_config.json", {**about, "tensor_storage": _tensor_storage(storage, plan, settings)})
    for path in sorted(source.shards[0].parent.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _COMPANIONS):
            with atomic_path(dst / path.name) as temporary:
                shutil.copyfile(path, temporary)
    write_json(dst / MANIFEST, {"made_by": f"exl3-fidelity {harness.__version__}", "identity": identity})


def _modules(source: Checkpoint, plan: QuantizePlan, partial: Path) -> Iterator[_Module]:
    where = {path.name: path for path in source.shards}
    for job in plan.jobs:
        file = partial / f"{job.module}.safetensors"
        with safe_open(file, framework="pt") as opened:
            yield _Module(name=job.module, tensors=dict.fromkeys(opened.keys(), file), bytes=file.stat().st_size)
    for key in plan.copied:
        header = source.plain[key]
        yield _Module(name=key.rpartition(".")[0] or key, tensors={key: where[header.shard]}, bytes=header.bytes)


def _write_shards(dst: Path, modules: list[_Module]) -> dict[str, dict[str, torch.Tensor]]:
    """Write the shards and, for more than one, their index; gives meta tensors by module and key."""
    shards: list[list[_Module]] = [[]]
    for module in modules:
        if shards[-1] and sum(other.bytes for other in shards[-1]) + module.bytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append(module)
    storage: dict[str, dict[str, torch.Tensor]] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = _load(shard)
        with atomic_path(dst / name) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(0o644)  # the library makes files that only their owner can read
        for module in shard:
            storage.setdefault(module.name, {}).update({key: tensors[key].to("meta") for key in module.tensors})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensors in storage.values() for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(dst / "model.safetensors.index.json", index)
    return storage


def _load(shard: list[_Module]) -> dict[str, torch.Tensor]:
    keys: dict[Path, list[str]] = {}
    for module in shard:
        for key, file in module.tensors.items():
            keys.setdefault(file, []).append(key)
    tensors: dict[str, torch.Tensor] = {}
    for file, names in keys.items():
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors


def _about(plan: QuantizePlan, settings: QuantizeSettings, calibration: list[Any] | None) -> dict[str, Any]:
    """The ``quantization_config`` block; ``layer_bits`` names every coded layer when layers differ."""
    about: dict[str, Any] = {
        "quant_method": "exl3",
        "version": f"exl3-fidelity {harness.__version__}",
        # The Hub takes only an integer; the average that was reached stands beside it.
        "bits": round(plan.bits),
        "bits_mean": round(plan.bits, 4),
        "head_bits": settings.head_bits,
        "calibration": dict(zip(("rows", "cols"), calibration or (0, 0), strict=False)),
        "out_scales": "always",
        "codebook": settings.codebook,
    }
    if settings.layer_bits:
        by_layer = {job.layer: job.rate.bits for job in plan.jobs if job.module != plan.head}
        about["layer_bits"] = {str(layer): _number(by_layer[layer]) for layer in sorted(by_layer)}
    return about


def _config(source: Checkpoint, plan: QuantizePlan, about: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(source.config))
    config["quantization_config"] = about
    if plan.head is not None:
        for holder in (config, config.get("text_config")):
            if isinstance(holder, dict) and (holder is config or "tie_word_embeddings" in holder):
                holder["tie_word_embeddings"] = False
    return config


def _tensor_storage(
    storage: dict[str, dict[str, torch.Tensor]], plan: QuantizePlan, settings: QuantizeSettings
) -> dict[str, Any]:
    """What every module stores, as the format's own converter lists it."""
    jobs: dict[str, Job] = {job.module: job for job in plan.jobs}
    listing: dict[str, Any] = {}
    for module in sorted(storage):
        stored = {
            key: {"shape": list(tensor.shape), "n_bytes": tensor.nbytes, "dtype": str(tensor.dtype)}
            for key, tensor in sorted(storage[module].items())
        }
        listing[module] = {"stored_tensors": stored}
        if module in jobs:
            listing[module] |= {"quant_format": "exl3", "bits_per_weight": _number(jobs[module].rate.bits)}
            if settings.codebook in MARKERS:
                listing[module][f"{settings.codebook}_multiplier"] = MARKERS[settings.codebook]
    return listing


def _number(bits: float) -> float | int:
    return int(bits) if bits == int(bits) else bits


#: Files that go along unchanged: what turns text into ids and back.
CARRIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.jinja", "added_tokens.json")


def decode_checkpoint(source: Path, target: Path, dtype: str = "float32") -> Path:
    """Decode every EXL3 tensor once and write safetensors in ``dtype``; the folder appears whole or not at all.

    float32 keeps every decoded value; bfloat16 rounds them, and so is a slightly other model.

    Raises:
        CheckpointError: no EXL3 tensors, or a damaged checkpoint.
        UsageError: the target is there already.
    """
    if target.exists():
        raise UsageError(f"{target.name} is there already", "remove it, or give another --out")
    if not has_trellis(source):
        raise CheckpointError(f"{source.name} holds no EXL3 tensors", "a dense folder can be served as it is")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = _dense_model(source, getattr(torch, dtype))
    model.save_pretrained(partial)
    for pattern in CARRIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, partial / file.name)
    _forget_quantisation(partial / "config.json")
    partial.replace(target)
    return target


def _dense_model(source: Path, dtype: torch.dtype) -> Any:
    """The model with plain parameters that transformers can save."""
    from harness.exl3.hf import load_exl3
    from harness.progress import quiet_transformers

    quiet_transformers()
    model = load_exl3(source, dequantize=True, dtype=dtype)
    model.hf_quantizer = None
    model.config.quantization_config = None
    model.config.dtype = dtype
    return model


def _forget_quantisation(config: Path) -> None:
    """A dense folder must not say that it is quantised: engines would look for a kernel."""
    said = json.loads(config.read_text())
    said.pop("quantization_config", None)
    config.write_text(json.dumps(said, indent=2) + "\n")
