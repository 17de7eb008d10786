"""An SGLang server over HTTP: rows through its own ``/generate``, which takes token ids and tells the top k.

Its ``token_ids_logprob`` is one list for all positions of a request, so ids of our choice a position cannot be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from harness.served.address import Server, get_json
from harness.served.http import Answer, Patience, Question, in_order
from harness.served.identity import SGLANG, ServedWeights, Setting, base_name, identity, plain_dtype, settings
from harness.served.limits import NEW_TOKENS, check_context, check_status
from harness.served.seam import UNKNOWN, Ask, Capabilities, ServedRow
from harness.served.sglang_answers import read_generated
from harness.types import EngineIdentity, Row

GENERATE = "/generate"
NO_FIXED_IDS = "token_ids_logprob is one list for a whole request, not one a position; using top_logprobs_num"


def connect_sglang(server: Server, *, concurrency: int, patience: Patience, weights: ServedWeights) -> SglangServer:
    """Read what a server tells of itself."""
    told = _first_told(server, "/server_info", "/get_server_info")
    model = _first_told(server, "/model_info", "/get_model_info") or {}
    version = str((told or {}).get("version", UNKNOWN))
    context = server.context or (told or {}).get("context_length")
    return SglangServer(
        server=server,
        concurrency=concurrency,
        patience=patience,
        capabilities=Capabilities(
            software="sglang",
            version=version,
            model=base_name(server.model),
            context=context if isinstance(context, int) else None,
            max_logprobs=-1,  # SGLang checks none
            fixed_ids=False,
            note=NO_FIXED_IDS,
        ),
        identity=identity(
            "sglang",
            version,
            str(model.get("model_path") or (told or {}).get("model_path") or server.model),
            weights=weights,
            compute_dtype=plain_dtype((told or {}).get("dtype")),
            device=UNKNOWN,  # it tells no product name
            told=_settings(told),
        ),
    )


def _first_told(server: Server, *paths: str) -> dict[str, Any] | None:
    for path in paths:
        told = get_json(f"{server.base}{path}")
        if isinstance(told, dict):
            return told
    return None


def _settings(told: dict[str, Any] | None) -> dict[str, Setting]:
    """The named settings; the prefix cache is told by what switches it off."""
    off = (told or {}).get("disable_radix_cache")
    return {**settings(told, SGLANG), "prefix_cache": not off if isinstance(off, bool) else UNKNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServer:
    """A server that told of itself; see `harness.served.seam.ServedEngine`."""

    server: Server
    concurrency: int
    patience: Patience
    capabilities: Capabilities
    identity: EngineIdentity

    def run(
        self, rows: Sequence[Row], *, k: int, ask: Ask | None = None, temperature: float = 0.0
    ) -> Iterator[ServedRow]:
        """Rows with their targets and the server's top ``k``.

        Raises:
            EngineError: at once where a row is longer than the context; see the seam.
        """
        if k < 0 or ask is not None:
            raise ValueError("k is 0 or more; SGLang scores no chosen ids (capabilities.fixed_ids)")
        check_context(rows, self.capabilities.context, "--context-length")

        def read(number: int, answer: Answer) -> ServedRow:
            check_status(answer, rows[number], k)
            return read_generated(rows[number], answer, k)

        questions = (generation_of(row, k, temperature) for row in rows)
        return in_order(self.server.base, questions, read, concurrency=self.concurrency, patience=self.patience)


def generation_of(row: Row, k: int, temperature: float) -> Question:
    """The question for a row's targets and top ``k``, the lists as matrices where the server has that form."""
    body = {
        "input_ids": np.asarray(row.ids_T).tolist(),
        "sampling_params": {"temperature": temperature, "max_new_tokens": NEW_TOKENS},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": k,
        "return_text_in_logprobs": False,
        "return_flat_raw_top_logprobs": True,
        "return_flat_raw_top_logprobs_b64": True,
        "stream": False,
    }
    return Question(path=GENERATE, body=msgspec.json.encode(body), about=f"row {row.index}")
