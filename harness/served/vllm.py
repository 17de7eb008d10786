"""A vLLM server over HTTP: what it can do, and rows asked in the best way it has.

(a) ``POST /inference/v1/generate`` scores ids of our choice at each position (``prompt_logprob_token_ids``), with the
next token as one more of them and the server's own top k in the same answer. (b) ``POST /v1/completions`` gives the
top k alone (``prompt_logprobs``). Token ids go in and come back; no text crosses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from harness.errors import EngineError
from harness.served.address import Server, get_json
from harness.served.checks_server import check_cap, check_context
from harness.served.http import NEW_TOKENS, Answer, Line, Question, check_status, first_words
from harness.served.identity import VLLM, ServedWeights, base_name, identity, look_up, plain_dtype, settings
from harness.served.seam import Ask, Capabilities, ServedRow
from harness.served.vllm_answers import read_completion, read_generated, with_targets
from harness.types import UNKNOWN, EngineIdentity, Row

COMPLETIONS = "/v1/completions"
GENERATE = "/inference/v1/generate"
_INSTEAD = "using prompt_logprobs"


def connect_vllm(server: Server, line: Line, weights: ServedWeights) -> VllmServer:
    """Probe a server, with one small row where that is needed.

    Raises:
        EngineError: it stopped answering.
    """
    info = get_json(f"{server.base}/server_info?config_format=json")
    fixed_ids, note = _probe_fixed_ids(line, server.model)
    _, cap = look_up(info, "vllm_config.model_config.max_logprobs")
    _, dtype = look_up(info, "vllm_config.model_config.dtype")
    _, gpu = look_up(info, "system_env.nvidia_gpu_models")
    return VllmServer(
        line=line,
        model=server.model,
        capabilities=Capabilities(
            software="vllm",
            version=server.version,
            model=base_name(server.model),
            context=server.context,
            max_logprobs=cap if isinstance(cap, int) else None,
            fixed_ids=fixed_ids,
            note=note,
        ),
        identity=identity(
            "vllm",
            server.version,
            server.folder or server.model,
            weights=weights,
            compute_dtype=plain_dtype(dtype),
            device=" ".join(str(gpu).split()) if gpu else UNKNOWN,
            told=settings(info, VLLM),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """A probed server; see `harness.served.seam.ServedEngine`. ``model`` is the name it is served under."""

    line: Line
    model: str
    capabilities: Capabilities
    identity: EngineIdentity

    def run(
        self, rows: Sequence[Row], *, k: int, ask: Ask | None = None, temperature: float = 0.0
    ) -> Iterator[ServedRow]:
        """Rows with their targets, the server's top ``k``, and the ids of ``ask`` where the server scores chosen ids.

        Raises:
            EngineError: at once where a row is longer than the context or ``k`` above the cap; see the seam.
        """
        if k < 0 or (ask is not None and not self.capabilities.fixed_ids):
            raise ValueError("k is 0 or more; ask needs a server that scores chosen ids (capabilities.fixed_ids)")
        check_context(self.capabilities, rows)
        check_cap(self.capabilities, k)
        return self._completions(rows, k, temperature) if ask is None else self._chosen(rows, k, ask, temperature)

    def _completions(self, rows: Sequence[Row], k: int, temperature: float) -> Iterator[ServedRow]:
        def read(number: int, answer: Answer) -> ServedRow:
            check_status(answer, rows[number], k)
            return read_completion(rows[number], answer, k)

        return self.line.in_order((completion_of(self.model, row, k, temperature) for row in rows), read)

    def _chosen(self, rows: Sequence[Row], k: int, ask: Ask, temperature: float) -> Iterator[ServedRow]:
        # Only those of rows under way: asked ids are as large as answers.
        asked: dict[int, np.ndarray] = {}

        def questions() -> Iterator[Question]:
            for number, row in enumerate(rows):
                asked[number] = checked_ask(row, ask(row))
                yield generation_of(self.model, row, asked[number], k, temperature)

        def read(number: int, answer: Answer) -> ServedRow:
            asked_TM = asked.pop(number)
            check_status(answer, rows[number], max(k, asked_TM.shape[1] + 1))
            return read_generated(rows[number], answer, asked_TM, k)

        return self.line.in_order(questions(), read)


def completion_of(model: str, row: Row, k: int, temperature: float) -> Question:
    """The question for a row's targets and top ``k``."""
    body = {
        "model": model,
        "prompt": np.asarray(row.ids_T).tolist(),
        "max_tokens": NEW_TOKENS,
        "temperature": temperature,
        "prompt_logprobs": k,
        "return_token_ids": True,
        "add_special_tokens": False,
        "stream": False,
    }
    return Question(path=COMPLETIONS, body=msgspec.json.encode(body), about=f"row {row.index}")


def generation_of(model: str, row: Row, asked_TM: np.ndarray, k: int, temperature: float) -> Question:
    """The question for ids of our choice, each position's next token among them."""
    params: dict[str, Any] = {
        "max_tokens": NEW_TOKENS,
        "temperature": temperature,
        "detokenize": False,
        "prompt_logprob_token_ids": with_targets(row, asked_TM).tolist(),
    }
    body = {
        "model": model,
        "token_ids": np.asarray(row.ids_T).tolist(),
        "sampling_params": params | ({"prompt_logprobs": k} if k > 0 else {}),
        "return_token_ids": True,
        "stream": False,
    }
    return Question(path=GENERATE, body=msgspec.json.encode(body), about=f"row {row.index}")


def checked_ask(row: Row, asked_TM: np.ndarray) -> np.ndarray:
    """What the caller asks for one row, which must have a line for each scored position."""
    if asked_TM.ndim != 2 or len(asked_TM) != len(row.ids_T) - 1:
        raise ValueError(f"row {row.index}: ask gave {asked_TM.shape}, not [{len(row.ids_T) - 1}, M]")
    return asked_TM


def _probe_fixed_ids(line: Line, model: str) -> tuple[bool, str]:
    """Whether chosen ids of a row of three tokens are scored, and the line about why not."""
    row = Row(index=0, ids_T=np.array([1, 2, 3], np.int32), document="probe", domain="probe", sha256="")
    asked_TM = np.array([[1, -1], [0, 2]], np.int32)
    answer = line.ask(generation_of(model, row, asked_TM, 1, 0.0))
    status = f"POST {GENERATE} answers {answer.status}"
    if answer.status == 403:
        return False, f"{status}: started without --enable-scale-out; {_INSTEAD}"
    if answer.status in (404, 405):
        return False, f"{status}: this version does not have it; {_INSTEAD}"
    if answer.status != 200:
        return False, f"{status}: {first_words(answer.content)}; {_INSTEAD}"
    try:
        read_generated(row, answer, asked_TM, 1)
    except EngineError as error:
        return False, f"{status}, but {error.what.removeprefix('row 0: ')}; {_INSTEAD}"
    return True, ""
