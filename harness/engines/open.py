"""From a located model to what runs it here: our reference, whole or layer by layer, or an engine that people use.

The reference computes with transformers; exllamav3, llama.cpp and vLLM with their own kernels, and they are imported
only when they are asked for. All give exact outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, get_args

from harness.engines.hf import Alter, ComputeDType, TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.streaming import StreamingEngine
from harness.errors import CheckpointError, UsageError
from harness.exl3.files import model_files
from harness.types import Engine

EngineName = Literal["reference", "exllamav3", "llamacpp", "vllm-local"]
ENGINES: tuple[str, ...] = get_args(EngineName)

#: Bytes for weights and activations of a run layer by layer; ``auto`` is what one layer needs; None runs it whole.
MemoryBudget = int | Literal["auto"] | None
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?))?B?", re.IGNORECASE)

#: What stands in a receipt for a model folder without tokenizer files: ids go in and out, so it can still run.
NO_TOKENIZER = "absent"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
#: What llama.cpp may be told beside the arguments that every engine has.
_LLAMA_OPTIONS = {"kv_dtype", "flash_attention", "threads", "gpu_layers"}


class _Digests(TypedDict):
    weights_sha256: str
    tokenizer_sha256: str


def open_engine(
    located: ModelFolder,
    *,
    engine: EngineName = "reference",
    weights_sha256: str,
    tokenizer_sha256: str,
    compute: ComputeDType = "auto",
    device: str | None = None,
    vocab_size: int | None = None,
    packed: bool = False,
    memory_budget: MemoryBudget = None,
    alter: Alter | None = None,
    row_tokens: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Engine:
    """Open a model for exact outputs.

    Args:
        located: a plain or EXL3 folder; for ``llamacpp`` what `harness.engines.gguf_files.locate_gguf` gives.
        compute: dtype of the reference and of vllm-local; the other two have their own.
        device: ``cuda`` or ``cpu`` where the engine leaves a choice.
        vocab_size: columns that are real tokens, where fewer than the model's config says.
        packed: reference: decode EXL3 weights at every use.
        memory_budget: reference: run layer by layer within so many bytes, or within what one layer needs (``auto``).
        alter: reference: changes the loaded model before it runs, as anchors and floors do.
        row_tokens: the others: length of the longest row; their context and batch sizes follow from it, and are
            recorded.
        options: further arguments of ``vllm.LLM`` or of llama.cpp.

    Raises:
        EngineError: the engine is not installed, or does not open this model; the message says how to get it.
        UsageError: there is no such engine, or it does not have an option that is given.
    """
    if engine not in ENGINES:
        raise UsageError(f"there is no engine {engine} in this process", f"choose one of {', '.join(ENGINES)}")
    digests = _Digests(weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256)
    if engine == "reference":
        _known_options(engine, options, set(), "leave it out")
        if memory_budget is None:
            return TransformersEngine(
                located, compute=compute, device=device, packed=packed, vocab_size=vocab_size, alter=alter, **digests
            )
        if packed or alter is not None:
            raise UsageError("--memory-budget decodes each layer once", "leave out --packed, and measure anchors whole")
        budget = None if memory_budget == "auto" else memory_budget
        return StreamingEngine(
            located, compute=compute, device=device, memory_budget=budget, vocab_size=vocab_size, **digests
        )
    if packed or memory_budget is not None or alter is not None:
        raise UsageError(f"--engine {engine} loads a model its own way", "leave out the other options")
    if row_tokens is None:
        raise ValueError(f"{engine} is opened for rows of a length, and none is given")
    files = model_files(located.path) if located.path.is_dir() else None
    if files and (extra := (*files.left_out, *files.superseded)):
        raise CheckpointError(
            f"{located.name}: not all of {extra[0]} is the model, and {engine} chooses files by a rule of its own",
            "move that file out of the folder, or what the index does not take from it out of the file",
        )
    return _with_own_kernels(engine, located, row_tokens, vocab_size, device, compute, options, digests)


def _with_own_kernels(
    engine: EngineName,
    located: ModelFolder,
    row_tokens: int,
    vocab_size: int | None,
    device: str | None,
    compute: ComputeDType,
    options: Mapping[str, Any] | None,
    digests: _Digests,
) -> Engine:
    if engine == "exllamav3":
        from harness.engines.exllamav3 import ExllamaV3Engine

        _known_options(engine, options, set(), "set its EXL3_* variables instead")
        return ExllamaV3Engine(located, row_tokens=row_tokens, vocab_size=vocab_size, device=device, **digests)
    if engine == "llamacpp":
        from harness.engines.llamacpp import LlamaCppEngine

        chosen = _known_options(engine, options, _LLAMA_OPTIONS, f"it has {', '.join(sorted(_LLAMA_OPTIONS))}")
        return LlamaCppEngine(located, row_tokens=row_tokens, vocab_size=vocab_size, device=device, **chosen, **digests)
    from harness.engines.vllm_local import VllmLocalEngine

    return VllmLocalEngine(
        located, row_tokens=row_tokens, compute=compute, vocab_size=vocab_size, options=options, **digests
    )


def _known_options(
    engine: EngineName, options: Mapping[str, Any] | None, known: set[str], repair: str
) -> dict[str, Any]:
    unknown = sorted((options or {}).keys() - known)
    if unknown:
        raise UsageError(f"{engine} has no option {unknown[0]}", repair)
    return dict(options or {})


def before_opening(engine: EngineName) -> dict[str, str]:
    """What of an engine decides its numbers and is known before it is opened: for the key of a measurement.

    The reference's versions are part of every key.

    Raises:
        EngineError: the engine is not installed.
        UsageError: there is no such engine.
    """
    if engine == "reference":
        return {}
    if engine == "exllamav3":
        from harness.engines import exllamav3

        return {"exllamav3": exllamav3.installed_version(), **exllamav3.pins()}
    if engine == "llamacpp":
        from harness.engines import llamacpp

        return {"llama-cpp-python": llamacpp.installed_version()}
    if engine == "vllm-local":
        from harness.engines import vllm_local

        return {"vllm": vllm_local.installed_version()}
    raise UsageError(f"there is no engine {engine} in this process", f"choose one of {', '.join(ENGINES)}")


def digests_of(located: ModelFolder) -> tuple[str, str]:
    """Content digests of the weights and of the tokenizer (``absent`` where the folder has none)."""
    from harness.exl3.files import weights_digest

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
    # pydantic.ByteSize takes "4GiB please" for 4 GiB and knows no "4Gi".
    size = _SIZE.fullmatch(text.strip())
    number = float(size["number"]) if size else 0.0
    if size is None or not number:
        raise UsageError(f"--memory-budget {text!r} is not an amount of memory", "write it as 4GiB, 500MB or auto")
    power = " KMGT".index((size["unit"] or " ").upper())
    return int(number * (1024 if size["binary"] else 1000) ** power)
