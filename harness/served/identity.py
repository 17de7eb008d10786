"""What a server tells of itself that could move a number; what it does not tell is `UNKNOWN`, never a default.

Only the settings named here are taken: a server's configuration also holds hosts, keys and paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.types import UNKNOWN, EngineIdentity

Setting = str | int | float | bool | None

#: Setting -> places in what vLLM tells at /server_info, of which the first that is there counts.
VLLM = {
    "speculative": ("vllm_config.speculative_config.method",),
    "chunk_tokens": ("vllm_config.scheduler_config.max_num_batched_tokens",),
    "chunked_prefill": (
        "vllm_config.scheduler_config.enable_chunked_prefill",
        "vllm_config.scheduler_config.chunked_prefill_enabled",
    ),
    "prefix_cache": ("vllm_config.cache_config.enable_prefix_caching",),
    "kv_cache_dtype": ("vllm_config.cache_config.cache_dtype",),
    "attention_backend": ("vllm_config.attention_config.backend", "vllm_env.VLLM_ATTENTION_BACKEND"),
    "max_batch": ("vllm_config.scheduler_config.max_num_seqs",),
    "quantization": ("vllm_config.model_config.quantization",),
    "logprobs_mode": ("vllm_config.model_config.logprobs_mode",),
    "enforce_eager": ("vllm_config.model_config.enforce_eager",),
    "batch_invariant": ("vllm_env.VLLM_BATCH_INVARIANT",),
    "v2_model_runner": ("vllm_env.VLLM_USE_V2_MODEL_RUNNER",),
    "tensor_parallel": ("vllm_config.parallel_config.tensor_parallel_size",),
    "pipeline_parallel": ("vllm_config.parallel_config.pipeline_parallel_size",),
    "cuda": ("system_env.cuda_runtime_version",),
    "torch": ("system_env.torch_version",),
}
#: The same for SGLang, whose arguments stand side by side.
SGLANG = {
    "speculative": ("speculative_algorithm",),
    "chunk_tokens": ("chunked_prefill_size",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "attention_backend": ("attention_backend",),
    "max_batch": ("max_running_requests",),
    "quantization": ("quantization",),
    "deterministic": ("enable_deterministic_inference",),
    "fp32_head": ("enable_fp32_lm_head",),
    "sampling_backend": ("sampling_backend",),
    "tensor_parallel": ("tp_size",),
    "pipeline_parallel": ("pp_size",),
    "weight_version": ("weight_version",),
}
#: Settings of which null is an answer ("none is used"); of any other it means that the server chose by itself.
NULL_IS_TOLD = ("speculative", "quantization")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWeights:
    """What the caller knows of the weights that are served, as a server tells no digest."""

    weights_sha256: str = UNKNOWN
    head_sha256: str = UNKNOWN
    tokenizer_sha256: str = UNKNOWN
    config_sha256: str = UNKNOWN
    revision: str = UNKNOWN
    weights_dtype: str = UNKNOWN
    compute_dtype: str = UNKNOWN


def settings(info: Any, places: Mapping[str, tuple[str, ...]]) -> dict[str, Setting]:
    """The named settings of a server's configuration ``info``; all of them `UNKNOWN` where it is None."""
    return {name: _setting(info, name, where) for name, where in places.items()}


def _setting(info: Any, name: str, places: tuple[str, ...]) -> Setting:
    for place in places:
        there, value = look_up(info, place)
        if there and value is None and name in NULL_IS_TOLD:
            return None
        if there and isinstance(value, str | int | float | bool):
            return base_name(value) if isinstance(value, str) else value
    return UNKNOWN


def look_up(info: Any, place: str) -> tuple[bool, Any]:
    """Whether ``a.b.c`` is in nested dictionaries, and what is there; below a null there is null."""
    for depth, part in enumerate(place.split(".")):
        if info is None and depth > 0:
            return True, None
        if not isinstance(info, dict) or part not in info:
            return False, None
        info = info[part]
    return True, info


def base_name(path: str) -> str:
    """The last part of a path or Hub id; a repository's name where the path is a snapshot in the Hub's cache."""
    cached = re.search(r"models--[^/\\]+?--([^/\\]+)[/\\]+snapshots", path)
    if cached:
        return cached.group(1)
    return re.split(r"[/\\]+", path.rstrip("/\\"))[-1] or UNKNOWN


def plain_dtype(value: Any) -> str:
    """``torch.float32`` as ``float32``; `UNKNOWN` where the server only says that it chooses."""
    name = str(value).removeprefix("torch.") if value else "auto"
    return UNKNOWN if name == "auto" else name


def identity(
    engine: str,
    version: str,
    model: str,
    *,
    weights: ServedWeights,
    compute_dtype: str,
    device: str,
    told: Mapping[str, Setting],
) -> EngineIdentity:
    """An identity of the served lane; the caller's word on dtypes goes before the server's."""
    return EngineIdentity(
        engine=engine,
        version=version,
        model=base_name(model),
        revision=weights.revision,
        weights_sha256=weights.weights_sha256,
        head_sha256=weights.head_sha256,
        tokenizer_sha256=weights.tokenizer_sha256,
        config_sha256=weights.config_sha256,
        weights_dtype=weights.weights_dtype,
        compute_dtype=compute_dtype if weights.compute_dtype == UNKNOWN else weights.compute_dtype,
        lane="served",
        device=device,
        settings=dict(told),
    )
