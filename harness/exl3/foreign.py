"""Formats of packed weights that are not read here, by their names: AWQ, GPTQ, bitsandbytes and others.

The tensors say which format it is; config.json is asked only where they say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.headers import TensorHeader
from harness.exl3.scaled import CODES

#: Scales of activations and of a cache.
SIDE_SCALE = re.compile(r"(^|\.)(input_scale|input_scale_inv|activation_scale|output_scale|([qkv]|kv)_scale)$")
#: ``quant_method`` of formats whose tensors are read here when they are codes with scales.
_READ = ("fp8", "compressed-tensors", "modelopt", "fbgemm_fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A format of packed weights that transformers reads with a package of its own; ``package`` is empty for none."""

    name: str
    package: str = ""


_PACKAGES = {
    "awq": Foreign(name="AWQ", package="gptqmodel"),
    "gptq": Foreign(name="GPTQ", package="gptqmodel optimum"),
    "bitsandbytes": Foreign(name="bitsandbytes", package="bitsandbytes"),
    "compressed-tensors": Foreign(name="compressed-tensors", package="compressed-tensors"),
    "mxfp4": Foreign(name="MXFP4", package="kernels"),
    "modelopt": Foreign(name="ModelOpt FP4"),
}
_ENDINGS = (
    (re.compile(r"\.g_idx$"), "gptq"),
    (re.compile(r"\.qweight$"), "awq"),
    (re.compile(r"\.(SCB|weight\.absmax|weight\.quant_map)$|\.quant_state\.bitsandbytes__"), "bitsandbytes"),
    (re.compile(r"\.weight_packed$"), "compressed-tensors"),
    (re.compile(r"_blocks$"), "mxfp4"),
    (re.compile(r"\.weight_scale_2$"), "modelopt"),
)


def foreign_format(checkpoint: Checkpoint) -> Foreign | None:
    """The format of a checkpoint that is neither plain, nor EXL3, nor codes with scales; None where it is one of them.

    Raises:
        CheckpointError: config.json says that the weights are codes, and they are plain; or names no format.
    """
    if checkpoint.modules:
        return None
    method = checkpoint.quantization.get("quant_method")
    for pattern, name in _ENDINGS:
        if any(pattern.search(key) for key, header in checkpoint.plain.items() if header.dtype != "BF16"):
            return _PACKAGES[method if method in ("awq", "gptq") and name in ("awq", "gptq") else name]
    if not checkpoint.quantization:
        return None
    if method in _READ:
        _require_codes(checkpoint, method)
        return None
    if method in _PACKAGES:
        return _PACKAGES[method]
    named = f"says quant_method {method}" if method else "has a quantization_config that names no quant_method"
    raise CheckpointError(
        f"{checkpoint.name}: config.json {named}, a format that is not read here",
        "give the BF16 checkpoint; where the weights are plain, remove quantization_config from config.json",
    )


def _require_codes(checkpoint: Checkpoint, method: str) -> None:
    """Codes without a scale pass here: they are refused by name where they would be placed."""
    if not any(header.dtype in CODES for header in checkpoint.plain.values()):
        raise CheckpointError(
            f"{checkpoint.name}: config.json says that the weights are {method}, and no tensor is packed or scaled",
            "where the weights are plain, remove quantization_config from config.json",
        )


def weights_in(checkpoint: Checkpoint, header: TensorHeader) -> int:
    """How many weights a tensor holds: packed words hold several, scales and tables of a format none."""
    key = header.name
    if re.search(r"\.(qzeros|scales|g_idx|weight_shape|weight_zero_point|absmax|quant_map|SCB)$", key):
        return 0
    if re.search(r"(_scales|_scale|_scale_inv|_scale_2|_global_scale|nested_absmax|nested_quant_map)$", key):
        return 0
    if ".quant_state." in key or SIDE_SCALE.search(key):
        return 0
    if re.search(r"\.(qweight|weight_packed)$", key):
        return header.bytes * 8 // _bits(checkpoint.quantization)
    packed = header.dtype == "U8" and (key.endswith("_blocks") or f"{key}.absmax" in checkpoint.tensors)
    halves = packed or (header.dtype == "U8" and f"{key}_scale_2" in checkpoint.tensors)
    return header.elements * 2 if halves else header.elements


def _bits(claims: Mapping[str, Any]) -> int:
    """Bits of a packed weight: as config.json says, 4 where it does not."""
    groups = claims.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and isinstance(weights.get("num_bits"), int):
            return int(weights["num_bits"])
    for name in ("bits", "w_bit"):
        if isinstance(claims.get(name), int) and claims[name] > 0:
            return int(claims[name])
    return 4
