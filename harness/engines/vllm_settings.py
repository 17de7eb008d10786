"""What a running vLLM says about itself, as an identity records it; what it does not say is ``unknown``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from harness.types import UNKNOWN

Setting = str | int | float | bool | None
#: A value that can be shown: a number or a word, never a path.
_PLAIN = re.compile(r"[\w.+:-]{0,40}")


def served_settings(llm: Any, asked: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings that could move a number, with ``dtype`` and ``device`` among them.

    Args:
        llm: a ``vllm.LLM`` with its engine core in this process.
        asked: the arguments it was made with.
    """
    config = llm.llm_engine.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    settings: dict[str, Setting] = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "device": _device(llm),
        "attention": _attention(llm),
        "architecture": _first(config.model_config, "architectures"),
        "quantization": _of(config.model_config, "quantization"),
        "kv_cache_dtype": _of(cache, "cache_dtype"),
        "block_size": _of(cache, "block_size"),
        "prefix_cache": _of(cache, "enable_prefix_caching"),
        "max_model_len": _of(config.model_config, "max_model_len"),
        "chunk_tokens": _of(scheduler, "max_num_batched_tokens"),
        "max_num_seqs": _of(scheduler, "max_num_seqs"),
        "enforce_eager": _of(config.model_config, "enforce_eager"),
        "seed": _of(config.model_config, "seed"),
        "speculative": _speculative(config),
        "tensor_parallel": _of(config.parallel_config, "tensor_parallel_size"),
    }
    further = {name: plain(value) for name, value in asked.items() if name not in _ALREADY | settings.keys()}
    return settings | further | variables()


#: Arguments that a setting above already shows as vLLM understood them, or that move no number.
_ALREADY = {
    "enable_prefix_caching",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "speculative_config",
    "skip_tokenizer_init",
    "disable_log_stats",
}
#: Variables that move no number: vLLM gives some a new value in every process.
_OTHER = {"VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"}


@cache
def variables() -> dict[str, Setting]:
    """The ``VLLM_*`` variables as they were at the first call, which is before vLLM's import adds its own."""
    found = {name: plain(value) for name, value in os.environ.items() if name.startswith("VLLM_")}
    return {name: value for name, value in sorted(found.items()) if name not in _OTHER}


def plain(value: Any) -> Setting:
    """The value where it is a number, a flag or a word; else only that it is set, since it may hold a path."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value) if _PLAIN.fullmatch(str(value)) else "set"


def _of(holder: Any, name: str) -> Setting:
    return plain(getattr(holder, name, UNKNOWN))


def _first(holder: Any, name: str) -> Setting:
    found = getattr(holder, name, None)
    return plain(found[0]) if found else UNKNOWN


def _speculative(config: Any) -> Setting:
    """The method of speculative decoding, None where there is none."""
    found = getattr(config, "speculative_config", UNKNOWN)
    return found if found in (None, UNKNOWN) else plain(getattr(found, "method", "on"))


def _attention(llm: Any) -> str:
    """Names of the attention backends that the model's layers chose."""

    def names(model: Any) -> list[str]:
        backends = [getattr(module, "attn_backend", None) for module in model.modules()]
        return sorted({str(backend.get_name()) for backend in backends if backend is not None})

    (found,) = llm.apply_model(names)
    return "+".join(found) or UNKNOWN


def _device(llm: Any) -> str:
    def name(model: Any) -> str:
        device = next(model.parameters()).device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)

    (found,) = llm.apply_model(name)
    return str(found)
