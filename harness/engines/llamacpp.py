"""llama.cpp in this process, through llama-cpp-python: full logits of a GGUF file, so that it stands beside EXL3.

The file goes to llama.cpp as it is. A row is one decode call: ``n_batch`` and ``n_ubatch`` are the length of the
longest row, so no result depends on how a row is cut. Token ids go in, none is added. Logits are what llama.cpp
computes, in float32, of every token; one row's are held at a time: ``T * V * 4`` bytes, three times over (in llama.cpp,
in llama-cpp-python, and the copy that is given out).

llama_cpp is imported when an engine is made, never before. Uses ``Llama(...)``, ``reset``, ``eval``, ``scores``,
``input_ids``, ``n_tokens`` and ``n_vocab`` of llama-cpp-python 0.3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np
import psutil
import torch

from harness.engines.base import first_line, import_optional, model_of, refuse_long_rows, version_of
from harness.engines.models import ModelFolder, gguf_dtype
from harness.errors import EngineError, UsageError
from harness.panel.gguf_metadata import gguf_scalars
from harness.types import EngineIdentity, Logits, Row, RowOutputs, Want

KvType = Literal["f16", "f32", "bf16", "q8_0"]
NAME = "llama-cpp-python"
HOW = "pip install llama-cpp-python (it compiles llama.cpp; CMAKE_ARGS=-DGGML_CUDA=on for a GPU)"
#: llama.cpp allocates contexts in steps of this many tokens.
CONTEXT_STEP = 256


class LlamaCppEngine:
    """Runs rows one at a time through llama.cpp; outputs are logits, there is no separable head.

    Args:
        located: ``path`` is the GGUF file, as `harness.engines.gguf_files.locate_gguf` gives it.
        row_tokens: length of the longest row.
        vocab_size: columns that are real tokens; the file must have at least these.
        device: ``cpu`` or ``cuda``; None takes a GPU where llama.cpp was built for one.
        kv_dtype: of the KV cache; f16 is what llama.cpp takes by itself.
        flash_attention: llama.cpp's fused attention; some kinds of KV cache need it.
        threads: CPU threads; None takes every core this process may use.
        gpu_layers: layers on the GPU, where not all or none.

    Raises:
        EngineError: no llama-cpp-python here, or llama.cpp does not open the file.
    """

    head: None = None
    head_deviation: None = None

    def __init__(
        self,
        located: ModelFolder,
        *,
        row_tokens: int,
        vocab_size: int | None = None,
        device: str | None = None,
        kv_dtype: KvType = "f16",
        flash_attention: bool = False,
        threads: int | None = None,
        gpu_layers: int | None = None,
        weights_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        package = import_optional(NAME, "llama_cpp", HOW)
        self._located, self._row_tokens = located, row_tokens
        self._metadata = gguf_scalars(located.path)
        threads = threads or len(os.sched_getaffinity(0))
        layers = _gpu_layers(package, device) if gpu_layers is None else gpu_layers
        self._llama = _open(
            package,
            located,
            n_ctx=-(-row_tokens // CONTEXT_STEP) * CONTEXT_STEP,
            n_batch=row_tokens,
            n_ubatch=row_tokens,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=layers,
            type_k=_kv_type(package, kv_dtype),
            type_v=_kv_type(package, kv_dtype),
            flash_attn=flash_attention,
        )
        columns = int(self._llama.n_vocab())
        if vocab_size is not None and columns < vocab_size:
            raise EngineError(
                f"{located.name} has {columns} tokens, the teacher {vocab_size}",
                "they are not of one model family; convert the GGUF from this teacher",
            )
        _require_memory(row_tokens, columns)
        self.identity = EngineIdentity(
            **model_of(located, weights_sha256, tokenizer_sha256),
            engine="llamacpp",
            version=f"llama-cpp-python {package.__version__}",
            head_sha256=weights_sha256,
            weights_dtype=gguf_dtype(located.path),
            # llama.cpp chooses a type for each product: float32 activations, or 8-bit blocks of them.
            compute_dtype="ggml",
            lane="served",
            device="cpu" if layers == 0 else _gpu_name(),
            settings={
                "architecture": str(self._metadata.get("general.architecture", "unknown")),
                "batch": 1,
                "kv_cache_dtype": kv_dtype,
                "flash_attention": flash_attention,
                "n_batch": row_tokens,
                "n_ubatch": row_tokens,
                "threads": threads,
                "gpu_layers": "all" if layers == -1 else layers,
                "columns": columns,
                "features": _features(package),
                "speculative": None,
                "prefix_cache": False,
                "chunk_tokens": row_tokens,
            },
        )

    def run(self, rows: Sequence[Row], want: Want = "logits") -> Iterator[RowOutputs]:
        """Yield each row's logits; ``hidden`` gives logits too, since they are what this engine has.

        Raises:
            EngineError: rows longer than ``row_tokens`` or than the model's context, ids past its vocabulary, or
                llama.cpp fails.
        """
        self._refuse(rows)
        for row in rows:
            yield self._one(row)

    def _one(self, row: Row) -> RowOutputs:
        ids = np.asarray(row.ids_T).tolist()
        # The KV cache of the row before is dropped: eval keeps only what lies before its position, which is 0 again.
        self._llama.reset()
        try:
            self._llama.eval(ids)
        except RuntimeError as error:
            raise EngineError(
                f"{self._located.name}: llama.cpp failed on row {row.index}: {error}",
                "free memory, or choose a panel with shorter rows",
            ) from error
        count = int(self._llama.n_tokens)
        ran = np.array(self._llama.input_ids[:count], dtype=np.int32)
        logits = torch.from_numpy(np.array(self._llama.scores[:count], dtype=np.float32))
        return RowOutputs(index=row.index, echoed_ids_T=ran, outputs=Logits(logits_TV=logits))

    def _refuse(self, rows: Sequence[Row]) -> None:
        """Refuse rows that are too long, and ids that llama.cpp would read past its tables for."""
        own = self._metadata.get(f"{self._metadata.get('general.architecture')}.context_length", self._row_tokens)
        refuse_long_rows(self._located, rows, min(self._row_tokens, int(own)))
        columns = int(self._llama.n_vocab())
        outside = [row.index for row in rows if int(np.max(row.ids_T)) >= columns or int(np.min(row.ids_T)) < 0]
        if outside:
            raise EngineError(
                f"rows {outside[:5]} hold ids outside the {columns} tokens of {self._located.name}",
                "the panel is sealed for another tokenizer: seal it for this model",
            )


def installed_version() -> str:
    """The version of the installed llama-cpp-python, or an `EngineError` where there is none."""
    return version_of(NAME, NAME, how=HOW)


def _open(package: Any, located: ModelFolder, **arguments: Any) -> Any:
    try:
        return package.Llama(str(located.path), logits_all=True, verbose=False, **arguments)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise EngineError(
            f"llama.cpp of {NAME} {package.__version__} does not open {located.name}: {first_line(error, located)}",
            "fetch the file again; if it is whole, update llama-cpp-python",
        ) from error


def _require_memory(row_tokens: int, columns: int) -> None:
    """Refuse before the first row what would be killed in it: one row's logits, three times over."""
    needed, free = row_tokens * columns * 4 * 3, int(psutil.virtual_memory().available)
    if needed > free:
        raise EngineError(
            f"the logits of a row of {row_tokens} tokens take {needed / 2**30:.1f} GiB with {columns} columns, "
            f"{free / 2**30:.1f} GiB of memory are free",
            "free memory, or choose a panel with shorter rows",
        )


def _gpu_layers(package: Any, device: str | None) -> int:
    """-1 is all layers, 0 none."""
    can = bool(package.llama_supports_gpu_offload())
    if device not in (None, "cpu") and not can:
        raise EngineError(f"this llama.cpp was built without a GPU, {device} is asked for", HOW)
    return -1 if can and device != "cpu" else 0


def _gpu_name() -> str:
    """The GPU's product name, where torch can tell; llama-cpp-python cannot."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "unknown GPU"


def _kv_type(package: Any, name: str) -> int:
    if name not in get_args(KvType):
        raise UsageError(f"there is no KV cache of {name}", f"choose one of {', '.join(get_args(KvType))}")
    return int(getattr(package, f"GGML_TYPE_{name.upper()}"))


def _features(package: Any) -> str:
    """The instruction sets that llama.cpp computes with, as it prints them: they move digits."""
    features = package.llama_print_system_info().decode("utf-8", "replace")
    return " ".join(re.findall(r"(\w+) = 1\b", features)) or "unknown"
