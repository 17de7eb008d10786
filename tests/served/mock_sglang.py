"""An SGLang server in its documented wire form (0.5.23), which answers from a real small model's numbers.

Switches are those of `tests.served.mock_numbers.Faults`, and of `MockSglang`: ``form`` of the top log-probabilities
(``"b64"``, ``"flat"``, or ``"nested"`` as older servers give whatever is asked), ``counts_null`` counts the empty first
row in the flat form's shape as some versions do, ``settings`` changes what ``/server_info`` tells, ``old_paths``
serves it only at ``/get_server_info``.

    with serving(MockSglang(numbers=Numbers(model, Faults(speculative=True)))) as url:
        ...

Real quirks are always there: the first log-probability is null, the row of the sampled token is dropped, the prompt's
own token is not among the top ones, id V - 1 is reported as 0, -inf is the lowest float32.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from tests.served.mock_http import serving
from tests.served.mock_numbers import Faults, Numbers, best

__all__ = ["Faults", "MockSglang", "Numbers", "serving"]

VERSION = "0.5.23"
LOWEST = float(np.finfo(np.float32).min)


@dataclass(kw_only=True)
class MockSglang:
    """See the module's docstring."""

    numbers: Numbers
    name: str = "small"
    folder: str = "/models/tiny-candidate"
    form: Literal["b64", "flat", "nested"] = "b64"
    counts_null: bool = False
    old_paths: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def get(self, path: str) -> tuple[int, Any]:
        faults = self.numbers.faults
        if path == "/v1/models":
            told = {"max_model_len": faults.context if faults.tells_context else None}
            return 200, {"data": [{"id": self.name, "owned_by": "sglang", "root": self.name, **told}]}
        if path == ("/get_server_info" if self.old_paths else "/server_info"):
            return 200, self.server_info()
        if path == ("/get_model_info" if self.old_paths else "/model_info"):
            return 200, {"model_path": self.folder, "is_generation": True, "weight_version": "default"}
        return 404, {"detail": "Not Found"}

    def server_info(self) -> dict[str, Any]:
        """Arguments of the server as it tells them, and some that are nobody's business."""
        return {
            "model_path": self.folder,
            "host": "10.9.8.7",
            "api_key": "secret",
            "dtype": "float32",
            "quantization": None,
            "kv_cache_dtype": "auto",
            "attention_backend": "torch_native",
            "chunked_prefill_size": 64,
            "max_running_requests": 1,
            "speculative_algorithm": None,
            "disable_radix_cache": True,
            "enable_deterministic_inference": False,
            "tp_size": 1,
            "version": VERSION,
            "internal_states": [{"memory_usage": {"weight": 0.1}}],
            **self.settings,
        }

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/generate":
            return 404, {"detail": "Not Found"}
        faults, ids = self.numbers.faults, [int(i) for i in body["input_ids"]]
        k, params = int(body["top_logprobs_num"]), body["sampling_params"]
        if len(ids) + 1 > faults.context:
            said = f"The input ({len(ids)} tokens) is longer than the model's context length ({faults.context} tokens)."
            return 400, {"error": {"message": said}}
        if faults.cap is not None and k > faults.cap:
            return 400, {"error": {"message": f"top_logprobs_num {k} exceeds {faults.cap}"}}
        ran = self.numbers.prompt(ids)
        logprobs_TV = self.numbers.logprobs(ran, float(params["temperature"]))
        cached = {} if faults.cached_tokens is None else {"cached_tokens": faults.cached_tokens}
        meta = {"id": "1", "prompt_tokens": len(ran), "completion_tokens": 1, **cached}
        meta |= self.tokens(logprobs_TV, ran) | (self.top(logprobs_TV, k, body) if k else {})
        return 200, {"text": "a", "output_ids": [97], "meta_info": meta}

    def tokens(self, logprobs_TV: torch.Tensor, ids: list[int]) -> dict[str, Any]:
        own = [None, *(told(float(row[target])) for row, target in zip(logprobs_TV, ids[1:], strict=True))]
        if self.numbers.faults.null_at is not None:
            own[self.numbers.faults.null_at + 1] = None
        reported = [i if i < self.numbers.vocab_size - 1 else 0 for i in ids]
        if not self.numbers.faults.echoes:
            return {"input_token_logprobs": None}
        return {"input_token_logprobs": [[value, i, None] for value, i in zip(own, reported, strict=True)]}

    def top(self, logprobs_TV: torch.Tensor, k: int, body: dict[str, Any]) -> dict[str, Any]:
        rows = [best(row, k) for row in logprobs_TV]
        flat = self.form != "nested" and body.get("return_flat_raw_top_logprobs")
        if not flat:
            nested = [None, *([[told(value), i, None] for i, value in row] for row in rows)]
            return {"input_top_logprobs": nested}
        values = np.array([[value for _, value in row] for row in rows], dtype="<f4")
        values = np.where(np.isneginf(values), np.float32(LOWEST), values)
        ids = np.array([[i for i, _ in row] for row in rows], dtype="<i4")
        shape = [len(rows) + self.counts_null, values.shape[1]]
        common = {"input_top_logprobs_shape": shape, "input_top_logprobs_null_prefix": 1}
        if self.form == "flat" or not body.get("return_flat_raw_top_logprobs_b64"):
            flat_values = [None if math.isnan(value) else value for value in values.ravel().tolist()]
            lists = {"input_top_logprobs_val_flat": flat_values, "input_top_logprobs_idx_flat": ids.ravel().tolist()}
            return common | lists
        return common | {
            "input_top_logprobs_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
            "input_top_logprobs_val_flat_b64_dtype": "float32",
            "input_top_logprobs_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
            "input_top_logprobs_idx_flat_b64_dtype": "int32",
        }


def told(value: float) -> float | None:
    """What becomes of numbers that JSON does not have."""
    if math.isnan(value):
        return None
    return LOWEST if value == -math.inf else value
