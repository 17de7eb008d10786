"""How a row is carried from module to module of an exllamav3 model, and how many rows at once.

What one module leaves for a later one lies in the row's ``params``: the token ids, the selection that a DSA indexer
layer publishes for those that share it, value embeddings. So a row has one dict for its whole way, prepared as the
model's own forward prepares it. A fresh dict for each module computes another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from harness.errors import EngineError
from harness.types import Row

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
