"""Engines that run in this process with their own kernels: exllamav3, llama.cpp and vLLM. All give exact outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

from harness.engines.hf import Alter, ComputeDType, TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.streaming import StreamingEngine
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
        from harness.engines import exllamav3 as exllamav3_pins

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


# From a located model to a running reference engine, with the digests that identify it.

#: Bytes for weights and activations of a run layer by layer; ``auto`` is what one layer needs; None runs it whole.
MemoryBudget = int | Literal["auto"] | None

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?))?B?", re.IGNORECASE)

#: What stands in a receipt for a model folder without tokenizer files: ids go in and out, so it can still run.
NO_TOKENIZER = "absent"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def digests_of(located: ModelFolder) -> tuple[str, str]:
    """Content digests of the weights and of the tokenizer (``absent`` where the folder has none)."""
    from harness.exl3.headers import weights_digest

    return weights_digest(located.path), tokenizer_of(located)


def tokenizer_of(located: ModelFolder) -> str:
    """Content digest of the tokenizer, or ``absent``."""
    from harness.panel import tokenizer_digest

    has_tokenizer = any((located.path / name).is_file() for name in TOKENIZER_FILES)
    return tokenizer_digest(located.path) if has_tokenizer else NO_TOKENIZER


def memory_budget_of(text: str | None) -> MemoryBudget:
    """Read ``auto`` or a size: ``4GiB`` and ``512M`` in powers of 1024 and 1000, or a number of bytes.

    Raises:
        UsageError: it is no size.
    """
    if text is None:
        return None
    if text.strip().lower() == "auto":
        return "auto"
    found = _SIZE.fullmatch(text.strip())
    number = float(found["number"]) if found else 0.0
    if found is None or not number:
        raise UsageError(f"--memory-budget {text!r} is not an amount of memory", "write it as 4GiB, 500MB or auto")
    power = " KMGT".index((found["unit"] or " ").upper())
    return int(number * (1024 if found["binary"] else 1000) ** power)


def open_engine(
    located: ModelFolder,
    *,
    weights_sha256: str,
    tokenizer_sha256: str,
    compute: ComputeDType = "auto",
    device: str | None = None,
    packed: bool = False,
    memory_budget: MemoryBudget = None,
    vocab_size: int | None = None,
    alter: Alter | None = None,
) -> TransformersEngine | StreamingEngine:
    """A reference engine for a plain or EXL3 folder.

    Args:
        packed: decode EXL3 weights at every use.
        memory_budget: run layer by layer within so many bytes, or within what one layer needs (``auto``).
        alter: changes the loaded model before it runs, as anchors and floors do.
    """
    if memory_budget is not None:
        if packed or alter is not None:
            raise UsageError("--memory-budget decodes each layer once", "leave out --packed, and measure anchors whole")
        return StreamingEngine(
            located,
            compute=compute,
            device=device,
            memory_budget=None if memory_budget == "auto" else memory_budget,
            vocab_size=vocab_size,
            weights_sha256=weights_sha256,
            tokenizer_sha256=tokenizer_sha256,
        )
    return TransformersEngine(
        located,
        compute=compute,
        device=device,
        packed=packed,
        vocab_size=vocab_size,
        alter=alter,
        weights_sha256=weights_sha256,
        tokenizer_sha256=tokenizer_sha256,
    )
