"""What a model takes in memory when it is loaded: its weights, a KV cache of a type and length, and stated overhead.

Attention is read from config.json, layer by layer where it says so: full attention holds keys and values of every
token, a sliding window those of the window, multi-head latent attention one latent vector and its rotary part, linear
attention a state that does not grow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.errors import UsageError

#: Bytes a number by the name of a cache type; block formats with their scales.
KV_BYTES: dict[str, float] = {
    "fp32": 4, "f32": 4, "fp16": 2, "f16": 2, "bf16": 2, "fp8": 1, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "q8": 1 + 2 / 32, "q6": 6 / 8 + 2 / 32, "q5": 5 / 8 + 2 / 32,
    "q4": 4 / 8 + 2 / 32, "q3": 3 / 8 + 2 / 32, "q2": 2 / 8 + 2 / 32,
}  # fmt: skip
#: Memory of a runtime beside weights and cache, GiB: a statement, not a measurement.
OVERHEAD_GIB = 1.5
GIB = 2**30

Kind = Literal["full", "sliding window", "latent", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Layers of one kind with the numbers that each holds for the context, keys and values apart."""

    kind: Kind
    layers: int
    keys: int
    values: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of weights, cache and overhead against what there is."""

    weights: int
    cache: int
    overhead: int
    available: int
    parts: tuple[Part, ...]

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.overhead

    @property
    def fits(self) -> bool:
        return self.total <= self.available


def kv_bytes(text: str) -> tuple[float, float]:
    """``q8`` or ``q8,q4`` as bytes a number of keys and of values.

    Raises:
        UsageError: an unknown type.
    """
    names = [name.strip().lower() for name in text.split(",")]
    if len(names) > 2 or any(name not in KV_BYTES for name in names):
        raise UsageError(f"--kv {text}", f"give one type, or keys,values, of {', '.join(KV_BYTES)}")
    return KV_BYTES[names[0]], KV_BYTES[names[-1]]


def budget(weights: int, config: Mapping[str, Any], *, gpu_gib: float, context: int, kv: str, slots: int = 1) -> Budget:
    """What a model of ``weights`` bytes takes with ``slots`` contexts of ``context`` tokens.

    Raises:
        UsageError: config.json does not say what attention needs, or a number that is none.
    """
    if context < 1 or slots < 1 or gpu_gib <= 0:
        raise UsageError("--context, --slots and --gpu-gib are positive numbers", "such as --context 32768")
    keys, values = kv_bytes(kv)
    parts = cache_parts(config, context)
    cache = sum(part.layers * (part.keys * keys + part.values * values) for part in parts) * slots
    return Budget(
        weights=weights,
        cache=round(cache),
        overhead=round(OVERHEAD_GIB * GIB),
        available=round(gpu_gib * GIB),
        parts=tuple(parts),
    )


def cache_parts(config: Mapping[str, Any], context: int) -> list[Part]:
    """Numbers that each kind of layer holds for one context."""
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    assert isinstance(text, Mapping)
    counts = Counter(_kinds(text))
    makers = {"full": _full, "sliding window": _sliding, "latent": _latent, "linear": _linear}
    return [makers[kind](text, layers, context) for kind, layers in sorted(counts.items())]


def _kinds(text: Mapping[str, Any]) -> list[Kind]:
    layers = _whole(text, "num_hidden_layers")
    base: Kind = "latent" if text.get("kv_lora_rank") else "full"
    types = text.get("layer_types")
    if not isinstance(types, list) or len(types) != layers:
        window = text.get("sliding_window") and text.get("use_sliding_window", True)
        return ["sliding window" if window and base == "full" else base] * layers
    return [_kind(str(name), base) for name in types]


def _kind(name: str, base: Kind) -> Kind:
    if "linear" in name or "mamba" in name or "recurrent" in name:
        return "linear"
    return "sliding window" if "sliding" in name or "local" in name else base


def _whole(text: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if isinstance(text.get(name), int) and text[name] > 0:
            return int(text[name])
    raise UsageError(f"config.json has no {names[0]}", "fits needs the config.json of the model")


def _heads(text: Mapping[str, Any]) -> tuple[int, int]:
    heads = _whole(text, "num_attention_heads")
    width = text.get("head_dim") or _whole(text, "hidden_size") // heads
    return int(text.get("num_key_value_heads") or heads), int(width)


def _full(text: Mapping[str, Any], layers: int, context: int) -> Part:
    kv, width = _heads(text)
    held = context * kv * width
    return Part(
        kind="full", layers=layers, keys=held, values=held, arithmetic=f"{context:,} tokens x {kv} heads x {width} each"
    )


def _sliding(text: Mapping[str, Any], layers: int, context: int) -> Part:
    kv, width = _heads(text)
    window = min(context, _whole(text, "sliding_window"))
    held = window * kv * width
    how = f"{window:,} tokens of the window x {kv} heads x {width} each"
    return Part(kind="sliding window", layers=layers, keys=held, values=held, arithmetic=how)


def _latent(text: Mapping[str, Any], layers: int, context: int) -> Part:
    rank, rope = _whole(text, "kv_lora_rank"), int(text.get("qk_rope_head_dim") or 0)
    how = f"{context:,} tokens x (latent {rank} + rotary {rope}), no values apart"
    return Part(kind="latent", layers=layers, keys=context * (rank + rope), values=0, arithmetic=how)


def _linear(text: Mapping[str, Any], layers: int, context: int) -> Part:
    heads = _whole(text, "linear_num_heads", "linear_num_value_heads", "num_attention_heads")
    width = _whole(text, "linear_head_dim", "linear_value_head_dim", "head_dim")
    how = f"a state of {heads} heads x {width} x {width}, whatever the context"
    return Part(kind="linear", layers=layers, keys=heads * width * width, values=0, arithmetic=how)
