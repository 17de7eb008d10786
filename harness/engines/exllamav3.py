"""exllamav3's own kernels, in process: what a TabbyAPI user's prompt goes through, without a server and without top-k.

Every row passes one module before the next module is loaded, so a model larger than the GPU's memory runs. What stands
at the door of the module that makes logits is the post-norm hidden state; it is scored through the checkpoint's own
head in float32, so that the rounding of the engine's float16 logits is no part of a number. That this head is the
engine's head is checked on numbers in every run.

exllamav3 is imported when an engine is made, never before: its import needs CUDA, and reads the environment variables
that pin its kernels. They are set first, and recorded with every number. Written against exllamav3 1.6.5; see
`harness.engines.exllamav3` for how a row is carried.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch
from packaging.version import Version

from harness.engines.base import (
    device_name,
    first_line,
    import_optional,
    model_of,
    refuse_long_rows,
    stored_dtype,
    version_of,
)
from harness.engines.head import PROBE, head_at, head_logits, require_own_head, trial_states
from harness.engines.models import ModelFolder
from harness.errors import EngineError
from harness.progress import phase
from harness.types import EngineIdentity, Head, Hidden, Logits, Row, RowOutputs, Want

OLDEST = "1.6"
#: Defaults of a measurement; one that is set already keeps its value, and either way the value is recorded.
#: Sums in float32 on GeForce cards too; no int8 activations for rows of a few tokens; one way of making weights dense
#: for all rows longer than 144 tokens; and no addition left pending between modules, which streaming cannot carry.
PINS = {
    "EXL3_HGEMM_F16ACC": "0",
    "EXL3_INT8_GEMV": "0",
    "EXL3_NO_FUSED_RECONSTRUCT": "1",
    "EXL3_HC_FOLD": "0",
}
#: What streaming cannot do: experts in a helper process.
FORBIDDEN = ("EXL3_MOE_CPU_OFFLOAD", "EXL3_MOE_CPU_SPLIT")
#: A value that can be shown: a number or a word, never a path.
_PLAIN = re.compile(r"[\w.+-]{0,32}")

INSTEAD = "measure it with the reference engine meanwhile (leave out --engine)"
HOW = (
    "on a machine with CUDA, nvcc and a compiler: pip install torch, then pip install exllamav3==1.6.5 "
    "(or a prebuilt wheel of its GitHub releases)"
)


class ExllamaV3Engine:
    """Streams rows through an exllamav3 model on one GPU.

    Args:
        row_tokens: length of the longest row: what the model is told its context is, before it is built.
        vocab_size: columns that are real tokens, where fewer than the config says.
        device: a CUDA device.
        host_bytes: host memory that the states of waiting rows may take; rows run in groups that fit.

    Raises:
        EngineError: no exllamav3 or no CUDA here, or an architecture that exllamav3 does not know.
    """

    def __init__(
        self,
        located: ModelFolder,
        *,
        row_tokens: int,
        vocab_size: int | None = None,
        device: str | None = None,
        host_bytes: int | None = None,
        weights_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        package, pins = import_pinned()
        # Its kernels ask a device for its index.
        self._device = torch.device("cuda:0" if device in (None, "cuda") else device)
        self._located, self._row_tokens, self._host_bytes = located, row_tokens, host_bytes
        self._config, self._model = _build(package, located, row_tokens)
        self._head_module = _head_module(self._model, located)
        self._head = _own_head(self._head_module, located, vocab_size)
        #: Largest |logit - head(input)| on the first tokens of the last run; None before there was one.
        self.head_deviation: float | None = None
        self.identity = EngineIdentity(
            **model_of(located, weights_sha256, tokenizer_sha256),
            engine="exllamav3",
            version=f"exllamav3 {_version(package)}, torch {torch.__version__}",
            head_sha256=self._head.sha256,
            weights_dtype=stored_dtype(located.path),
            compute_dtype="float16",
            lane="served",
            device=device_name(str(self._device)),
            settings={
                "attention": "flash_attn_nc",
                "architecture": str(self._config.architecture),
                "batch": 1,
                "kv_cache": False,
                "streamed": True,
                "dynamic_seq_len": row_tokens,
                "head": "float32, from the checkpoint",
                "support": self._head.vocab_size,
                "cuda": torch.version.cuda,
                **pins,
            },
        )

    @property
    def head(self) -> Head:
        return self._head

    def run(self, rows: Sequence[Row], want: Want = "hidden") -> Iterator[RowOutputs]:
        """Yield the outputs of each row in order; ``logits`` are float32, through the checkpoint's own head.

        Raises:
            EngineError: rows longer than ``row_tokens``, or logits that are not those of the checkpoint's head.
        """
        longest = int(self._config.max_position_embeddings or self._row_tokens)
        refuse_long_rows(self._located, rows, min(self._row_tokens, longest))
        width = int(self._head.weight_VH.shape[1])
        for group in groups_of(rows, width, self._host_bytes):
            carried = [CarriedRow(self._model, row) for row in group]
            with torch.inference_mode():
                self._stream(carried, width)
            while carried:
                yield self._outputs(carried.pop(0), want)

    def _outputs(self, row: CarriedRow, want: Want) -> RowOutputs:
        states = row.state[0].cpu()
        if len(states) != row.length:
            raise EngineError(
                f"row {row.index}: exllamav3 gave {len(states)} states for {row.length} tokens",
                f"report the architecture; {INSTEAD}",
            )
        ran = row.params["input_ids"][0].cpu().numpy().astype(np.int32)
        outputs = Hidden(states_TH=states) if want == "hidden" else Logits(logits_TV=head_logits(self._head, states))
        return RowOutputs(index=row.index, echoed_ids_T=ran, outputs=outputs)

    def _stream(self, rows: Sequence[CarriedRow], width: int) -> None:
        """Bring every row to the head's door, one module after the other."""
        body = [module for module in self._model.modules if module is not self._head_module]
        tokens = sum(row.length for row in rows)
        park = park_between_modules(tokens, width, self._device)
        with phase(f"modules of {self._located.name}", total=len(body) + 1, unit="tokens", item="module") as advance:
            for module in body:
                with self._loaded(module):
                    for row in rows:
                        row.advance(module, park=park)
                advance(1, tokens)
            with self._loaded(self._head_module):
                self._check_head(rows[0])
            advance(1, PROBE)

    @contextmanager
    def _loaded(self, module: Any) -> Iterator[None]:
        """A module with its weights in memory, which is given back also when something fails."""
        try:
            self._load(module)
            yield
        finally:
            module.unload()
            self._config.stc.release_arena()
            self._config.stc.close()
            if self._device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()

    def _load(self, module: Any) -> None:
        """Read a module's weights, all in one pass over the files where it can."""
        device = torch.device("cpu") if module.caps.get("prefer_cpu") else self._device
        if not module.can_defer_load():
            module.load(device)
            return
        self._config.stc.begin_deferred_load()
        try:
            module.load(device)
            self._config.stc.end_deferred_load()
        except BaseException:
            self._config.stc.abort_deferred_load()
            raise

    def _check_head(self, row: CarriedRow) -> None:
        """Hold the engine's own logits of a few tokens against those of the checkpoint's head, and refuse others."""
        module = self._head_module
        few = trial_states(self._head, row.state[0, :PROBE].cpu())
        states = few[None].to(self._device)
        theirs = module.forward(module.prepare_for_device(states, row.params), row.params)[0].cpu()
        self.head_deviation = require_own_head(self._located, "exllamav3", theirs.half(), self._head, few, INSTEAD)


def _build(package: Any, located: ModelFolder, row_tokens: int) -> tuple[Any, Any]:
    """Config and model without weights. The context length decides between two sets of RoPE factors, so it is first."""
    try:
        config = package.Config.from_directory(str(located.path))
        config.override_dynamic_seq_len(row_tokens)
        return config, package.Model.from_config(config)
    except (AssertionError, ValueError, KeyError, NotImplementedError) as error:
        raise EngineError(
            f"exllamav3 {_version(package)} does not open {located.name}: {first_line(error, located)}",
            "update exllamav3, or measure with the reference engine (leave out --engine)",
        ) from error


def _head_module(model: Any, located: ModelFolder) -> Any:
    """The module that makes logits: exactly one, and the last."""
    makers = [module for module in model.modules if module.caps.get("logits_output")]
    if len(makers) != 1 or makers[0] is not model.modules[-1]:
        raise EngineError(
            f"{located.name}: exllamav3 has {len(makers)} modules that make logits, and one at the end is needed",
            f"report the architecture; {INSTEAD}",
        )
    return makers[0]


def _own_head(module: Any, located: ModelFolder, vocab_size: int | None) -> Head:
    """The checkpoint's head with the scale and soft-cap that exllamav3 applies to it.

    The module multiplies by ``pre_scale``, caps, and multiplies by ``post_scale``; ``weight_scale`` it folds into
    weights that are not quantised.
    """
    alternatives = module.alt_key if isinstance(module.alt_key, list) else [module.alt_key]
    names = [name for name in (module.key, *alternatives) if name]
    if module.softcap and module.post_scale != 1.0:
        raise EngineError(
            f"{located.name} scales logits after capping them, which no head of this project does",
            INSTEAD,
        )
    if module.weight_scale != 1.0:
        raise EngineError(
            f"{located.name} scales the weights of its head when it loads them, which is not supported",
            INSTEAD,
        )
    return head_at(
        located.path,
        names,
        width=module.in_features_unpadded,
        columns=module.out_features_unpadded,
        vocab_size=vocab_size,
        softcap=module.softcap,
        scale=float(module.pre_scale * module.post_scale),
    )


def pins() -> dict[str, str]:
    """The pinned variables and every other ``EXL3_*`` one, as an import now would find them."""
    found = PINS | {name: value for name, value in os.environ.items() if name.startswith("EXL3_")}
    return {name: value if _PLAIN.fullmatch(value) else "set" for name, value in sorted(found.items())}


def installed_version() -> str:
    """The version of the installed exllamav3, or an `EngineError` where there is none."""
    return version_of("exllamav3", "exllamav3", how=HOW)


def import_pinned() -> tuple[Any, dict[str, str]]:
    """Import exllamav3 with its kernels pinned.

    Returns:
        The package, and the variables to record.

    Raises:
        EngineError: it is missing, cannot be imported here, was imported before with other pins, or is told to
            compute experts on the CPU.
    """
    asked = [name for name in FORBIDDEN if os.environ.get(name, "0") not in ("", "0")]
    if asked:
        raise EngineError(f"{asked[0]} is set, and modules that are streamed one by one run on the GPU", "unset it")
    unpinned = [name for name, value in PINS.items() if os.environ.get(name) is None]
    if "exllamav3" in sys.modules and unpinned:
        raise EngineError(
            f"exllamav3 was imported before {unpinned[0]} was set, and it reads it once",
            "start a fresh process, or set the variable before the import",
        )
    for name, value in PINS.items():
        os.environ.setdefault(name, value)
    return _recent(import_optional("exllamav3", "exllamav3", HOW)), pins()


def _recent(package: Any) -> Any:
    """Refuse a version whose modules are loaded in another way than this project's streaming does."""
    if Version(version := _version(package)) < Version(OLDEST):
        raise EngineError(f"exllamav3 {version} is too old: {OLDEST} or newer is needed", HOW)
    return package


def _version(package: Any) -> str:
    """The package keeps its version in a module of its own, ``exllamav3.version``, and nowhere else."""
    return str(importlib.import_module(f"{package.__name__}.version").__version__)


#: Bytes that one element of a waiting row's state may take: float32, in up to four residual streams.
STATE_BYTES = 16
#: Share of the free host memory that waiting rows take where no bound is given.
HOST_SHARE = 0.5
#: Share of the free GPU memory up to which waiting rows stay there.
GPU_SHARE = 0.25
#: A copy made for the next module alone, in a buffer that the next row's pass would overwrite. Without it the module
#: makes its own.
HINTS = ("gr_weighted",)


class CarriedRow:
    """One row on its way: ``state`` is what the next module takes, ``[1, T, ...]``."""

    def __init__(self, model: Any, row: Row) -> None:
        ids = torch.from_numpy(np.asarray(row.ids_T, dtype=np.int64))[None]
        self.index, self.length = row.index, len(row.ids_T)
        self.params: dict[str, Any] = {"input_ids": ids, "attn_mode": "flash_attn_nc"}
        self.state: torch.Tensor = model.prepare_inputs(ids, self.params)

    def advance(self, module: Any, *, park: bool) -> None:
        """Pass a loaded module; ``park`` brings the state to host memory after it.

        The state is always copied: modules may return a buffer that they use again for the next row.
        """
        out = module.forward(module.prepare_for_device(self.state, self.params), self.params)
        for name in HINTS:
            self.params.pop(name, None)
        pending = [name for name in self.params if name.endswith("_pending")]
        if pending:
            raise EngineError(
                f"{module.key} leaves an addition pending ({pending[0]}), which cannot be carried to the next module",
                "unset EXL3_HC_FOLD, and report the version of exllamav3",
            )
        self.state = out.to("cpu", copy=True) if park else out.clone()


def groups_of(rows: Sequence[Row], width: int, host_bytes: int | None) -> Iterator[Sequence[Row]]:
    """Cut rows into runs whose states fit in host memory together; a model is streamed once for each.

    Args:
        width: hidden size.
        host_bytes: the bound; None takes half of what is free.

    Raises:
        EngineError: one row alone does not fit.
    """
    bound = int(psutil.virtual_memory().available * HOST_SHARE) if host_bytes is None else host_bytes
    group: list[Row] = []
    for row in rows:
        if len(row.ids_T) * width * STATE_BYTES > bound:
            raise EngineError(
                f"row {row.index} may take {len(row.ids_T) * width * STATE_BYTES / 2**30:.2f} GiB of host memory, "
                f"{bound / 2**30:.2f} GiB are given",
                "free memory, or choose a panel with shorter rows",
            )
        if sum(len(other.ids_T) for other in [*group, row]) * width * STATE_BYTES > bound:
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def park_between_modules(tokens: int, width: int, device: torch.device) -> bool:
    """Whether so many tokens' states should wait in host memory rather than on the GPU."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return tokens * width * STATE_BYTES > free * GPU_SHARE
