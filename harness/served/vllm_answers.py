"""vLLM's answers as arrays: prompt log-probabilities of ``/v1/completions``, chosen ids of ``/inference/v1/generate``.

A position's entries are a dictionary of ids written as strings: the prompt's own token, then the top k, where an id
that is both stands once. So in k + 1 entries the own token is an extra, and in k entries it is one of the top.
"""

from __future__ import annotations

import base64
import binascii
import io

import msgspec
import numpy as np

from harness.served.http import Answer
from harness.served.seam import ServedRow, best_first, clean, decode, refused, tokens_run
from harness.types import Row

_POSITIONS = "see that prompt_logprobs are supported in this version, without streaming"
_VERSION = "check that this is a vLLM server, and its version"


class Entry(msgspec.Struct, gc=False):
    """One id's numbers; NaN arrives as null."""

    logprob: float | None = None
    rank: int | None = None


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: Details | None = None


class Choice(msgspec.Struct):
    prompt_logprobs: list[msgspec.Raw] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct):
    """The answer of ``/v1/completions``."""

    choices: list[Choice]
    usage: Usage | None = None


class Generated(msgspec.Struct):
    """The answer of ``/inference/v1/generate``."""

    prompt_logprobs: list[msgspec.Raw] | None = None
    prompt_token_id_logprobs: str | None = None
    prompt_token_ids: list[int] | None = None
    usage: Usage | None = None


_COMPLETION = msgspec.json.Decoder(Completion)
_GENERATED = msgspec.json.Decoder(Generated)
# A position at a time: the objects of a whole answer would take ten times its bytes.
_POSITION = msgspec.json.Decoder(dict[int, Entry] | None)


def read_completion(row: Row, answer: Answer, k: int) -> ServedRow:
    """Targets and top ``k`` of a row.

    Raises:
        EngineError: other ids than the row's, other counts, no number where one must be; with row and position.
    """
    content = decode(answer.content, _COMPLETION, row)
    if len(content.choices) != 1:
        raise refused(row, f"{len(content.choices)} answers to one prompt", _VERSION)
    choice = content.choices[0]
    echoed_T = _echoed(row, choice.prompt_token_ids)
    target_T, ids_TK, logprobs_TK = read_positions(row, choice.prompt_logprobs, k)
    return _row(row, answer, content.usage, echoed_T, target_T, ids_TK, logprobs_TK, None)


def read_generated(row: Row, answer: Answer, asked_TM: np.ndarray, k: int) -> ServedRow:
    """Targets, top ``k`` and chosen ids of a row that was asked for with `with_targets`."""
    content = decode(answer.content, _GENERATED, row)
    echoed_T = _echoed(row, content.prompt_token_ids)
    scores_TM = read_array(row, content.prompt_token_id_logprobs, (len(asked_TM), asked_TM.shape[1] + 1))
    used_TM = asked_TM >= 0
    values_TM = clean(scores_TM[:, :-1], used_TM, row, "an id that was asked for")
    target_T = clean(scores_TM[:, -1], np.ones(len(scores_TM), bool), row, "the next token")
    ids_TK, logprobs_TK = np.empty((len(target_T), 0), np.int32), np.empty((len(target_T), 0))
    if k > 0:
        _, ids_TK, logprobs_TK = read_positions(row, content.prompt_logprobs, k)
    known_TM = np.where(used_TM, values_TM, np.nan)
    return _row(row, answer, content.usage, echoed_T, target_T, ids_TK, logprobs_TK, known_TM)


def with_targets(row: Row, asked_TM: np.ndarray) -> np.ndarray:
    """The ids to ask for, and in a last column each position's own next token, whose log-probability is needed too."""
    targets_T1 = np.asarray(row.ids_T[1:], dtype=np.int32)[:, None]
    return np.concatenate([np.asarray(asked_TM, dtype=np.int32), targets_T1], axis=1)


def read_array(row: Row, encoded: str | None, shape: tuple[int, int]) -> np.ndarray:
    """Float64 of a base64 ``.npy`` array of exactly that shape; pickled objects are never loaded."""
    if encoded is None:
        raise refused(row, "the answer has no prompt_token_id_logprobs", "turn prefix caching off, or use a newer vLLM")
    try:
        values = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, binascii.Error) as error:
        raise refused(row, f"prompt_token_id_logprobs is no array ({error})", _VERSION) from error
    if values.shape != shape or values.dtype not in (np.float32, np.float64):
        shown = f"prompt_token_id_logprobs are {values.shape} {values.dtype}"
        raise refused(row, f"{shown}, float32 of {shape} ids were asked for", _VERSION)
    return values.astype(np.float64)


def _echoed(row: Row, ids: list[int] | None) -> np.ndarray:
    if ids is None:
        repair = "it must give them on return_token_ids: use vLLM 0.10.2 or newer"
        raise refused(row, "the answer does not tell the ids that were run", repair)
    return tokens_run(row, np.asarray(ids, dtype=np.int64))


def read_positions(row: Row, positions: list[msgspec.Raw] | None, k: int) -> tuple[np.ndarray, ...]:
    """``[T - 1]`` targets, ``[T - 1, k]`` ids and log-probabilities of the prompt's entries."""
    if positions is None:
        raise refused(row, "the answer has no log-probabilities of the prompt", _POSITIONS)
    if len(positions) != len(row.ids_T):
        raise refused(row, f"{len(positions)} entries for {len(row.ids_T)} tokens", _POSITIONS)
    if decode(positions[0], _POSITION, row) is not None:
        raise refused(row, "the first token has an entry, and nothing predicts it", "its entries are off by one")
    ids_TW, logprobs_TW, ranks_TW = _arrays(row, positions[1:], k + 1)
    target_TW = _targets(row, ids_TW)
    sizes_T = (ids_TW >= 0).sum(axis=1)
    extra_T = sizes_T == k + 1
    _check_sizes(row, sizes_T - extra_T, k)
    logprobs_TW = clean(logprobs_TW, ids_TW >= 0, row, "a token of its list")
    top_TW = np.where(target_TW & extra_T[:, None], -1, ids_TW)
    return logprobs_TW[target_TW], *best_first(top_TW, logprobs_TW, ranks_TW, k)


def _arrays(row: Row, positions: list[msgspec.Raw], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids (-1 where unused), log-probabilities (NaN where no number) and ranks, in the server's order."""
    ids_TW = np.full((len(positions), width), -1, np.int64)
    logprobs_TW = np.full(ids_TW.shape, np.nan)
    ranks_TW = np.zeros(ids_TW.shape)
    for t, raw in enumerate(positions):
        entries = decode(raw, _POSITION, row)
        if entries is None:
            raise refused(row, "null where the entries of the next token belong", _POSITIONS, position=t)
        size = len(entries)
        if size > width:
            what = f"{size} ids, {width - 1} and the next token were asked for"
            raise refused(row, what, _VERSION, position=t)
        ids_TW[t, :size] = list(entries)
        logprobs_TW[t, :size] = [entry.logprob for entry in entries.values()]
        ranks_TW[t, :size] = [entry.rank for entry in entries.values()]
    if ids_TW.max(initial=0) > np.iinfo(np.int32).max:
        raise refused(row, f"token id {ids_TW.max()}", _VERSION)
    return ids_TW, logprobs_TW, ranks_TW


def _targets(row: Row, ids_TW: np.ndarray) -> np.ndarray:
    """Mask of the entries of each position's own next token."""
    target_TW = ids_TW == np.asarray(row.ids_T[1:])[:, None]
    absent_T = ~target_TW.any(axis=1)
    if absent_T.any():
        t = int(absent_T.argmax())
        what = f"no entry of the next token {int(row.ids_T[t + 1])}"
        raise refused(row, what, "the server's positions are off by one, or it ran other ids", position=t)
    return target_TW


def _check_sizes(row: Row, listed_T: np.ndarray, k: int) -> None:
    """Lists of one length: only a whole vocabulary of fewer than ``k`` ids may be short, and that everywhere."""
    uneven_T = listed_T != listed_T.max(initial=0)
    if uneven_T.any():
        t = int(uneven_T.argmax())
        what = f"{listed_T[t]} top ids, elsewhere {listed_T.max()}, {k} were asked for"
        raise refused(row, what, "ask for a smaller --k", position=t)


def _row(
    row: Row,
    answer: Answer,
    usage: Usage | None,
    echoed_T: np.ndarray,
    target_T: np.ndarray,
    ids_TK: np.ndarray,
    logprobs_TK: np.ndarray,
    asked_TM: np.ndarray | None,
) -> ServedRow:
    details = usage.prompt_tokens_details if usage else None
    return ServedRow(
        index=row.index,
        echoed_ids_T=echoed_T,
        target_logprob_T=target_T,
        ids_TK=ids_TK,
        logprobs_TK=logprobs_TK,
        asked_TM=asked_TM,
        cached_tokens=details.cached_tokens if details else None,
        wire_bytes=answer.wire_bytes,
        seconds=answer.seconds,
    )
