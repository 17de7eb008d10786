"""A vLLM server in its documented wire form (0.33), which answers from a real small model's numbers.

Switches are those of `tests.served.mock_numbers.Faults`, and of `MockVllm`: ``fixed_ids`` is how
``/inference/v1/generate`` behaves (``"served"``, or the status it answers with: 403, 400, 404), ``dev_mode`` serves
``/server_info``, ``settings`` changes what that tells.

    numbers = Numbers(model, Faults(cap=20))
    with serving(MockVllm(numbers=numbers)) as url:
        ...

Real quirks are always there: keys are strings, the prompt's own token first and only once, null at position 0,
-inf told as -9999.0 in JSON but as -inf in the array of asked ids.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from tests.served.mock_http import serving
from tests.served.mock_numbers import Faults, Numbers, best

__all__ = ["Faults", "MockVllm", "Numbers", "serving"]

VERSION = "0.33.0"
CLAMP = -9999.0


@dataclass(kw_only=True)
class MockVllm:
    """See the module's docstring. ``names`` are the models that it lists, ``folder`` where they were read from."""

    numbers: Numbers
    names: tuple[str, ...] = ("small",)
    folder: str = "/models/tiny-candidate"
    fixed_ids: Literal["served", 403, 400, 404] = "served"
    dev_mode: bool = False
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def get(self, path: str) -> tuple[int, Any]:
        path, _, query = path.partition("?")
        if path == "/v1/models":
            told = {"max_model_len": self.numbers.faults.context if self.numbers.faults.tells_context else None}
            return 200, {"data": [{"id": name, "owned_by": "vllm", "root": self.folder, **told} for name in self.names]}
        if path == "/version":
            return 200, {"version": VERSION}
        if path == "/server_info" and self.dev_mode and query == "config_format=json":
            return 200, self.server_info()
        return 404, {"detail": "Not Found"}

    def server_info(self) -> dict[str, Any]:
        """The parts of a vLLM configuration that matter here, and some that are nobody's business."""
        config: dict[str, Any] = {
            "model_config": {"model": self.folder, "dtype": "torch.float32", "quantization": None, "max_logprobs": 20},
            "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": False, "block_size": 16},
            "scheduler_config": {"max_num_seqs": 2, "max_num_batched_tokens": 64, "enable_chunked_prefill": True},
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_master_ip": "10.9.8.7"},
            "attention_config": {"backend": "TORCH_SDPA"},
            "speculative_config": None,
        }
        for part, changes in self.settings.items():
            config[part] = {**(config.get(part) or {}), **changes}
        return {
            "vllm_config": config,
            "vllm_env": {"VLLM_BATCH_INVARIANT": False, "VLLM_CACHE_ROOT": "/home/somebody/.cache/vllm"},
            "system_env": {"nvidia_gpu_models": "GPU 0: NVIDIA H200", "cuda_runtime_version": "13.0"},
        }

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/inference/v1/generate":
            return self.generate(body)
        return 404, {"detail": "Not Found"}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        ids, k = [int(i) for i in body["prompt"]], int(body["prompt_logprobs"])
        refused = self.refused(body, ids, k)
        if refused:
            return refused
        ran = self.numbers.prompt(ids)
        logprobs_TV = self.numbers.logprobs(ran, float(body.get("temperature", 1.0)))
        choice = {
            "index": 0,
            "text": "a",
            "finish_reason": "length",
            "logprobs": None,
            "prompt_logprobs": self.positions(logprobs_TV, ran, k),
            **({"prompt_token_ids": ran, "token_ids": [97]} if self._told_ids(body) else {}),
        }
        return 200, {"id": "cmpl-1", "model": body["model"], "choices": [choice], "usage": self.usage(ran)}

    def generate(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Token ids in, chosen ids scored."""
        if self.fixed_ids == 403:
            return 403, {"error": "Scale-out endpoints are off."}
        if self.fixed_ids == 404:
            return 404, {"detail": "Not Found"}
        params, ids = body["sampling_params"], [int(i) for i in body["token_ids"]]
        wanted = np.array(params["prompt_logprob_token_ids"], dtype=np.int64)
        if self.fixed_ids == 400:
            return self.error(400, "prompt_logprob_token_ids requires the V2 model runner.")
        k = int(params.get("prompt_logprobs", 0))
        refused = self.refused(body, ids, max(k, wanted.shape[1]))
        if refused:
            return refused
        if len(wanted) != len(ids) - 1:
            return self.error(400, f"prompt_logprob_token_ids has {len(wanted)} rows, not {len(ids) - 1}.")
        ran = self.numbers.prompt(ids)
        logprobs_TV = self.numbers.logprobs(ran, float(params.get("temperature", 1.0)))
        return 200, {
            "request_id": "1",
            "choices": [{"index": 0, "finish_reason": "length", "token_ids": [97]}],
            "prompt_logprobs": self.positions(logprobs_TV, ran, k) if "prompt_logprobs" in params else None,
            "prompt_token_id_logprobs": self.array(logprobs_TV, wanted, len(ran)),
            "prompt_token_ids": ran if self._told_ids(body) else None,
            "usage": self.usage(ran),
        }

    def refused(self, body: dict[str, Any], ids: list[int], k: int) -> tuple[int, Any] | None:
        faults = self.numbers.faults
        if body["model"] not in self.names:
            return self.error(404, f"The model `{body['model']}` does not exist.")
        if len(ids) + 1 > faults.context:
            return self.error(400, f"This model's maximum context length is {faults.context} tokens.")
        if faults.cap is not None and k > faults.cap:
            said = f"Requested prompt logprobs of {k}, which is greater than max allowed: {faults.cap}"
            return self.error(400, said)
        return None

    def error(self, status: int, message: str) -> tuple[int, Any]:
        return status, {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}

    def positions(self, logprobs_TV: torch.Tensor, ids: list[int], k: int) -> list[dict[str, Any] | None]:
        """One dictionary a token: its own entry, then the top k; of two entries of one id the later one is told."""
        answer: list[dict[str, Any] | None] = [None]
        for logprobs_V, target in zip(logprobs_TV, ids[1:], strict=True):
            own = float(logprobs_V[target])
            entries = [(target, own, int((logprobs_V >= own).sum()))]
            entries += [(i, value, rank + 1) for rank, (i, value) in enumerate(best(logprobs_V, k))]
            answer.append(
                {str(i): {"logprob": told(value), "rank": rank, "decoded_token": "x"} for i, value, rank in entries}
            )
        if self.numbers.faults.null_at is not None:
            answer[self.numbers.faults.null_at + 1] = None
        return answer

    def array(self, logprobs_TV: torch.Tensor, wanted_TM: np.ndarray, tokens: int) -> str:
        """Base64 of a saved float32 array; an id of -1 scores -inf."""
        padded_TM = np.full((tokens - 1, wanted_TM.shape[1]), -1)
        padded_TM[: len(wanted_TM)] = wanted_TM[: tokens - 1]
        values = np.take_along_axis(logprobs_TV.numpy(), np.maximum(padded_TM, 0), axis=1)
        file = io.BytesIO()
        np.save(file, np.where(padded_TM < 0, -np.inf, values).astype(np.float32))
        return base64.b64encode(file.getvalue()).decode()

    def usage(self, ran: list[int]) -> dict[str, Any]:
        cached = self.numbers.faults.cached_tokens
        details = None if cached is None else {"cached_tokens": cached}
        return {"prompt_tokens": len(ran), "completion_tokens": 1, "prompt_tokens_details": details}

    def _told_ids(self, body: dict[str, Any]) -> bool:
        return bool(body.get("return_token_ids")) and self.numbers.faults.echoes


def told(value: float) -> float:
    """JSON has no -inf."""
    return CLAMP if value == -math.inf else value
