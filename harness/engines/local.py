"""Engines that run in this process with their own kernels: exllamav3, llama.cpp and vLLM. All give exact outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

from harness.engines.hf import ComputeDType
from harness.engines.models import ModelFolder
from harness.errors import UsageError
from harness.types import Engine

LocalName = Literal["exllamav3", "llamacpp", "vllm-local"]
LOCAL_ENGINES: tuple[str, ...] = get_args(LocalName)


class _Digests(TypedDict):
    weights_sha256: str
    tokenizer_sha256: str


def open_local(
    engine: LocalName,
    located: ModelFolder,
    *,
    weights_sha256: str,
    tokenizer_sha256: str,
    row_tokens: int,
    vocab_size: int | None = None,
    device: str | None = None,
    compute: ComputeDType = "auto",
    options: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine of the served lane in this process, opened for rows of up to ``row_tokens`` tokens.

    Args:
        engine: which one. ``llamacpp`` takes what `harness.engines.gguf_files.locate_gguf` gives, the others a folder.
        row_tokens: length of the panel's longest row; context sizes and batch sizes follow from it, and are recorded.
        vocab_size: columns that are real tokens, where fewer than the model's config says.
        device: ``cuda`` or ``cpu`` where the engine leaves a choice.
        compute: dtype for vllm-local; the other two have their own.
        options: further arguments of ``vllm.LLM``, or of `harness.engines.llamacpp.LlamaCppEngine`.

    Raises:
        EngineError: the engine is not installed, or does not open this model; the message says how to get it.
        UsageError: an option that the engine does not have.
    """
    digests = _Digests(weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256)
    if engine == "exllamav3":
        from harness.engines.exllamav3 import ExllamaV3Engine

        _no_options(engine, options)
        return ExllamaV3Engine(located, row_tokens=row_tokens, vocab_size=vocab_size, device=device, **digests)
    if engine == "llamacpp":
        from harness.engines.llamacpp import LlamaCppEngine

        return LlamaCppEngine(
            located, row_tokens=row_tokens, vocab_size=vocab_size, device=device, **_llama(options), **digests
        )
    if engine == "vllm-local":
        from harness.engines.vllm_local import VllmLocalEngine

        return VllmLocalEngine(
            located, row_tokens=row_tokens, compute=compute, vocab_size=vocab_size, options=options, **digests
        )
    raise UsageError(f"there is no engine {engine} in this process", f"choose one of {', '.join(LOCAL_ENGINES)}")


def before_opening(engine: LocalName) -> dict[str, str]:
    """What of an engine decides its numbers and is known before it is opened: for the key of a measurement.

    Raises:
        EngineError: the engine is not installed.
    """
    if engine == "exllamav3":
        from harness.engines import exllamav3_pins

        return {"exllamav3": exllamav3_pins.installed_version(), **exllamav3_pins.pins()}
    if engine == "llamacpp":
        from harness.engines import llamacpp

        return {"llama-cpp-python": llamacpp.installed_version()}
    if engine == "vllm-local":
        from harness.engines import vllm_local

        return {"vllm": vllm_local.installed_version()}
    raise UsageError(f"there is no engine {engine} in this process", f"choose one of {', '.join(LOCAL_ENGINES)}")


def _no_options(engine: str, options: Mapping[str, Any] | None) -> None:
    if options:
        raise UsageError(f"{engine} has no option {next(iter(options))}", "set its EXL3_* variables instead")


def _llama(options: Mapping[str, Any] | None) -> dict[str, Any]:
    known = {"kv_dtype", "flash_attention", "threads", "gpu_layers"}
    unknown = sorted((options or {}).keys() - known)
    if unknown:
        raise UsageError(f"llamacpp has no option {unknown[0]}", f"it has {', '.join(sorted(known))}")
    return dict(options or {})
