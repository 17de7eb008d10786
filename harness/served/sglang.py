"""An SGLang server over HTTP: rows through its own ``/generate``, which takes token ids and tells the top k.

Its ``token_ids_logprob`` is one list for all positions of a request, so ids of our choice a position cannot be asked.
In an answer the first token's log-probability is null and the sampled token's row is dropped, so T tokens have T - 1
numbers. The next token is not added to the top lists. Their flat form is a matrix in base64; whatever that cannot hold
comes nested.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from harness.served.address import Server, get_json
from harness.served.checks_server import check_context
from harness.served.http import NEW_TOKENS, Answer, Line, Question, check_status
from harness.served.identity import SGLANG, ServedWeights, Setting, base_name, identity, plain_dtype, settings
from harness.served.seam import Ask, Capabilities, ServedRow, best_first, clean, decode, refused, tokens_run
from harness.types import UNKNOWN, EngineIdentity, Row

GENERATE = "/generate"
NO_FIXED_IDS = "token_ids_logprob is one list for a whole request, not one a position; using top_logprobs_num"
_VERSION = "check that this is an SGLang server, and its version"
_ASKED = "see that the server supports return_logprob with logprob_start_len 0"
_VALUES = ("float32", "float64")
_IDS = ("int32", "int64")


def connect_sglang(server: Server, line: Line, weights: ServedWeights) -> SglangServer:
    """Read what a server tells of itself."""
    info = _first_told(server, "/server_info", "/get_server_info")
    model = _first_told(server, "/model_info", "/get_model_info")
    version = str(info.get("version", UNKNOWN))
    context = server.context or info.get("context_length")
    return SglangServer(
        line=line,
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
            str(model.get("model_path") or info.get("model_path") or server.model),
            weights=weights,
            compute_dtype=plain_dtype(info.get("dtype")),
            device=UNKNOWN,  # it tells no product name
            told=_settings(info),
        ),
    )


def _first_told(server: Server, *paths: str) -> dict[str, Any]:
    """What the server tells at the first of these paths that it has; nothing where it has none."""
    for path in paths:
        content = get_json(f"{server.base}{path}")
        if isinstance(content, dict):
            return content
    return {}


def _settings(info: dict[str, Any]) -> dict[str, Setting]:
    """The named settings; the prefix cache is told by what switches it off."""
    off = info.get("disable_radix_cache")
    return {**settings(info, SGLANG), "prefix_cache": not off if isinstance(off, bool) else UNKNOWN}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangServer:
    """A server that told of itself; see `harness.served.seam.ServedEngine`."""

    line: Line
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
        check_context(self.capabilities, rows)

        def read(number: int, answer: Answer) -> ServedRow:
            check_status(answer, rows[number], k)
            return read_generated(rows[number], answer, k)

        return self.line.in_order((generation_of(row, k, temperature) for row in rows), read)


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


# ---- answers ---------------------------------------------------------------------------------------------------------


class Token(msgspec.Struct, array_like=True, gc=False):
    """``[log-probability, id, text]``; the text is not asked for."""

    logprob: float | None
    id: int


class Meta(msgspec.Struct):
    """Of ``meta_info``, what is read."""

    cached_tokens: int | None = None
    input_token_logprobs: list[Token] | None = None
    input_top_logprobs: list[msgspec.Raw] | None = None
    input_top_logprobs_val_flat: list[float | None] | None = None
    input_top_logprobs_idx_flat: list[int] | None = None
    input_top_logprobs_val_flat_b64: str | None = None
    input_top_logprobs_idx_flat_b64: str | None = None
    input_top_logprobs_val_flat_b64_dtype: str = "float32"
    input_top_logprobs_idx_flat_b64_dtype: str = "int32"
    input_top_logprobs_shape: tuple[int, int] | None = None
    input_top_logprobs_null_prefix: int | None = None


class Generated(msgspec.Struct):
    meta_info: Meta


_GENERATED = msgspec.json.Decoder(Generated)
_POSITION = msgspec.json.Decoder(list[Token] | None)


def read_generated(row: Row, answer: Answer, k: int) -> ServedRow:
    """Targets and top ``k`` of a row.

    Raises:
        EngineError: other ids than the row's, other counts, no number where one must be; with row and position.
    """
    meta = decode(answer.content, _GENERATED, row).meta_info
    tokens = meta.input_token_logprobs
    if tokens is None:
        raise refused(row, "the answer has no log-probabilities of the prompt", _ASKED)
    ids_TK, logprobs_TK = read_top(row, meta, k)
    echoed_T = _echoed(row, [token.id for token in tokens], ids_TK)
    if tokens[0].logprob is not None:
        raise refused(row, "the first token has a log-probability, and nothing predicts it", _ASKED)
    values_T = np.array([token.logprob for token in tokens[1:]], dtype=np.float64)
    return ServedRow(
        index=row.index,
        echoed_ids_T=echoed_T,
        target_logprob_T=clean(values_T, np.ones(len(values_T), bool), row, "the next token"),
        ids_TK=ids_TK,
        logprobs_TK=logprobs_TK,
        asked_TM=None,
        cached_tokens=meta.cached_tokens,
        wire_bytes=answer.wire_bytes,
        seconds=answer.seconds,
    )


def _echoed(row: Row, told: list[int], top_TK: np.ndarray) -> np.ndarray:
    """The ids that were run: what is told, but for the last id of the vocabulary, which SGLang reports as 0.

    A 0 in place of another id is that quirk only where our id is higher than any other that the answer or the row has.
    """
    ours_T, told_T = np.asarray(row.ids_T, dtype=np.int64), np.asarray(told, dtype=np.int64)
    if len(ours_T) == len(told_T):
        last = max(int(ours_T.max()), int(top_TK.max(initial=0)))
        told_T = np.where((told_T == 0) & (ours_T == last), last, told_T)
    return tokens_run(row, told_T)


def read_top(row: Row, meta: Meta, k: int) -> tuple[np.ndarray, np.ndarray]:
    """``[T - 1, k]`` ids and log-probabilities, best first, from whichever form they came in."""
    count = len(row.ids_T) - 1
    if k == 0:
        return np.empty((count, 0), np.int32), np.empty((count, 0))
    flat = _flat(row, meta)
    ids_TW, values_TW = flat if flat else _nested(row, meta, k)
    if ids_TW.shape[1] > k:
        raise refused(row, f"{ids_TW.shape[1]} top ids a position, {k} were asked for", _VERSION)
    values_TW = clean(values_TW, ids_TW >= 0, row, "a token of its list")
    rank_TW = np.broadcast_to(np.arange(ids_TW.shape[1]), ids_TW.shape)
    ids_TK, logprobs_TK = best_first(ids_TW, values_TW, rank_TW, k)
    return ids_TK, logprobs_TK


def _flat(row: Row, meta: Meta) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and log-probabilities of the flat form; None where the answer is not in it."""
    values: np.ndarray
    ids: np.ndarray
    if meta.input_top_logprobs_val_flat_b64 is not None and meta.input_top_logprobs_idx_flat_b64 is not None:
        values = _buffer(row, meta.input_top_logprobs_val_flat_b64, meta.input_top_logprobs_val_flat_b64_dtype, _VALUES)
        ids = _buffer(row, meta.input_top_logprobs_idx_flat_b64, meta.input_top_logprobs_idx_flat_b64_dtype, _IDS)
    elif meta.input_top_logprobs_val_flat is not None and meta.input_top_logprobs_idx_flat is not None:
        values = np.array(meta.input_top_logprobs_val_flat, dtype=np.float64)
        ids = np.array(meta.input_top_logprobs_idx_flat, dtype=np.int64)
    else:
        return None
    shape = _shape(row, meta, len(values))
    if len(ids) != len(values):
        raise refused(row, f"{len(ids)} top ids for {len(values)} log-probabilities", _VERSION)
    return ids.reshape(shape).astype(np.int64), values.reshape(shape).astype(np.float64)


def _shape(row: Row, meta: Meta, numbers: int) -> tuple[int, int]:
    """``(T - 1, width)``; some versions count the empty row of the first token in the shape they tell."""
    count, told, empty = len(row.ids_T) - 1, meta.input_top_logprobs_shape, meta.input_top_logprobs_null_prefix
    rows, width = told or (0, 0)
    if told is None or empty != 1 or rows not in (count, count + 1) or numbers != count * width:
        shown = f"{numbers} top log-probabilities in the shape {told} after {empty} empty rows"
        raise refused(row, f"{shown}, for {count} positions", _ASKED)
    return count, width


def _buffer(row: Row, encoded: str, dtype: str, allowed: tuple[str, ...]) -> np.ndarray:
    """A little-endian array out of base64."""
    if dtype not in allowed:
        raise refused(row, f"top log-probabilities of dtype {dtype}", _VERSION)
    try:
        return np.frombuffer(base64.b64decode(encoded, validate=True), dtype=np.dtype(dtype).newbyteorder("<"))
    except (ValueError, binascii.Error) as error:
        raise refused(row, f"top log-probabilities that are no array ({error})", _VERSION) from error


def _nested(row: Row, meta: Meta, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids (-1 where unused) and log-probabilities of one list a token."""
    lists = meta.input_top_logprobs
    count = len(row.ids_T) - 1
    if lists is None:
        raise refused(row, "the answer has no top log-probabilities", _ASKED)
    if len(lists) != count + 1 or decode(lists[0], _POSITION, row) is not None:
        raise refused(row, f"{len(lists)} top lists for {count + 1} tokens, of which the first has none", _ASKED)
    ids_TW, values_TW = np.full((count, k), -1, np.int64), np.full((count, k), np.nan)
    for t, raw in enumerate(lists[1:]):
        top = decode(raw, _POSITION, row) or []
        if not 0 < len(top) <= k:
            raise refused(row, f"{len(top)} top ids, {k} were asked for", _ASKED, position=t)
        ids_TW[t, : len(top)] = [token.id for token in top]
        values_TW[t, : len(top)] = [token.logprob for token in top]
    return ids_TW, values_TW
