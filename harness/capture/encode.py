"""From an engine's outputs to the arrays that are stored, with every check that must fail before a file exists.

Hidden states are stored as they come. Logits are stored minus their row's maximum, where a 16-bit float is fine
around the tokens that matter (raw bf16 logits would cost 1e-4 nats and flip top tokens), and a row whose
distribution does not survive that is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.capture.manifest import DTYPE_NAMES, DtypeName
from harness.digest import tensor_digest
from harness.errors import CaptureError
from harness.scoring import TeacherStats
from harness.types import Head, Hidden, Logits, Row

#: A stored distribution may differ by this much, in nats and in total probability.
ROUNDTRIP_LIMIT = 1e-6
_WIDE = 'set capture_dtype = "float32" in the teacher\'s TOML file'
_CHUNK = 1 << 21  # logits worked on at a time: 16 MB in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One row ready to be written: a wide array [T-1, W], narrow columns [T-1], and the digest of the array."""

    name: str
    array: torch.Tensor
    columns: dict[str, np.ndarray]
    sha256: str


def encode_hidden(row: Row, outputs: Hidden, head: Head, dtype: torch.dtype, stats: TeacherStats) -> Encoded:
    """Hidden states of the scored positions, bit for bit.

    Raises:
        CaptureError: wrong shape or dtype, a non-finite state, or statistics that do not cover the scored positions.
    """
    states = outputs.states_TH
    scored = len(row.ids_T) - 1
    if states.shape != (scored + 1, head.weight_VH.shape[1]):
        wanted = (scored + 1, head.weight_VH.shape[1])
        raise CaptureError(f"row {row.index}: states are {tuple(states.shape)}, not {wanted}", _ENGINE)
    if states.dtype != dtype:
        raise CaptureError(
            f"row {row.index}: states are {states.dtype} and this capture holds {dtype}",
            "open the capture with the dtype that the engine computes in; nothing is rounded on the way",
        )
    states = states[:scored].detach().cpu().contiguous()
    _require_finite(row, states)
    return Encoded(name="states", array=states, columns=_stat_columns(row, stats), sha256=tensor_digest(states))


def encode_logits(row: Row, outputs: Logits, dtype: torch.dtype) -> Encoded:
    """Logits minus their row's maximum as fp16 or fp32, and statistics of what is stored (in float64).

    Raises:
        CaptureError: bf16 asked for, NaN or +inf, a value that fp16 cannot hold, or a position whose round trip is
            off by 1e-6 nats or more.
    """
    if dtype not in (torch.float16, torch.float32):
        raise CaptureError(
            f"logits cannot be stored as {dtype}: it would move every KL by 1e-4 nats or more",
            _WIDE,
        )
    scored = len(row.ids_T) - 1
    logits = outputs.logits_TV
    if logits.ndim != 2 or len(logits) != scored + 1:
        raise CaptureError(f"row {row.index}: logits are {tuple(logits.shape)}, not [{scored + 1}, V]", _ENGINE)
    step = max(1, _CHUNK // logits.shape[1])
    targets = np.asarray(row.ids_T[1:], dtype=np.int64)
    parts = [
        _shifted(row, start, logits[start : min(start + step, scored)], targets[start : start + step], dtype)
        for start in range(0, scored, step)
    ]
    stored = torch.cat([part[0] for part in parts])
    columns = {name: np.concatenate([part[1][name] for part in parts]) for name in parts[0][1]}
    _require_roundtrip(row, columns.pop("kl"), columns.pop("excess"))
    columns["target"] = targets.astype(np.int32)
    return Encoded(name="logits", array=stored, columns=columns, sha256=tensor_digest(stored))


_ENGINE = "check the engine: it must return one entry per token of the row"


def _require_finite(row: Row, states: torch.Tensor) -> None:
    bad = ~torch.isfinite(states).all(1)
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        raise CaptureError(
            f"row {row.index}, position {position}: a hidden state is not finite ({int(bad.sum())} such positions)",
            "a teacher must be finite everywhere: check its weights, or compute in float32",
        )


def _stat_columns(row: Row, stats: TeacherStats) -> dict[str, np.ndarray]:
    scored = len(row.ids_T) - 1
    columns = {name: np.asarray(getattr(stats, field), dtype=np.float64) for name, field in FLOAT_STATS.items()}
    columns["top1"] = np.asarray(stats.top1, dtype=np.int32)
    for name, values in columns.items():
        if values.shape != (scored,):
            raise CaptureError(f"row {row.index}: {values.shape} {name} for {scored} scored positions", _ENGINE)
        if not np.isfinite(values).all():
            where = int(np.flatnonzero(~np.isfinite(values))[0])
            raise CaptureError(f"row {row.index}, position {where}: {name} is {values[where]}", _NOT_FINITE)
    columns["target"] = np.asarray(row.ids_T[1:], dtype=np.int32)
    return columns


FLOAT_STATS = {"logsumexp": "lse", "nll": "nll", "entropy": "entropy", "p_top1": "p_top1"}
_NOT_FINITE = "a teacher must give every token of the panel a probability: check its head and its vocabulary"


def minus_row_max(logits_TV: torch.Tensor) -> torch.Tensor:
    """Float32 logits minus their row's maximum, rounded as a capture's are: a model is at distance 0 from itself.

    Rows without a finite maximum stay as they are.
    """
    step = max(1, _CHUNK // logits_TV.shape[1])
    pieces = []
    for start in range(0, len(logits_TV), step):
        piece = logits_TV[start : start + step].detach().cpu().double()
        top = piece.amax(1, keepdim=True)
        pieces.append((piece - torch.where(torch.isfinite(top), top, 0.0)).float())
    return torch.cat(pieces) if pieces else logits_TV


def _shifted(
    row: Row, start: int, logits: torch.Tensor, targets: np.ndarray, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """Stored values of some positions, and their statistics with the round-trip errors ``kl`` and ``excess``."""
    exact = logits.detach().cpu().double().numpy()
    top = exact.max(1, keepdims=True)
    bad = ~np.isfinite(top[:, 0]) | np.isnan(exact).any(1)
    if bad.any():
        where = start + int(np.flatnonzero(bad)[0])
        raise CaptureError(f"row {row.index}, position {where}: a logit is NaN or +inf, or all are -inf", _NOT_FINITE)
    exact -= top
    stored = torch.from_numpy(exact).to(dtype)
    wide = stored.double().numpy()
    lost = np.isinf(wide) & np.isfinite(exact)
    if lost.any():
        where = start + int(np.flatnonzero(lost.any(1))[0])
        raise CaptureError(
            f"row {row.index}, position {where}: a logit lies {-exact[lost].max():.0f} below the maximum, past fp16",
            _WIDE,
        )
    return stored, _logit_stats(exact, wide, targets)


def _logit_stats(exact: np.ndarray, wide: np.ndarray, targets: np.ndarray) -> dict[str, np.ndarray]:
    every = np.arange(len(wide))
    lse_exact = np.log(np.exp(exact).sum(1))
    lse = np.log(np.exp(wide).sum(1))
    p_exact, p = np.exp(exact - lse_exact[:, None]), np.exp(wide - lse[:, None])
    with np.errstate(invalid="ignore"):  # -inf - -inf where both probabilities are 0: no contribution
        change = np.where(p_exact > 0, exact - wide, 0.0)
        surprise = np.where(p > 0, wide, 0.0)
    return {
        "logsumexp": lse,
        "nll": lse - wide[every, targets],
        "entropy": lse - (p * surprise).sum(1),
        "p_top1": p.max(1),
        "top1": wide.argmax(1).astype(np.int32),
        "kl": (p_exact * change).sum(1) - (lse_exact - lse),
        "excess": p.sum(1) - 1.0,
    }


def _require_roundtrip(row: Row, kl: np.ndarray, excess: np.ndarray) -> None:
    for what, errors in (("nats from the engine's", np.abs(kl)), ("off in total probability", np.abs(excess))):
        worst = int(errors.argmax())
        if not errors[worst] < ROUNDTRIP_LIMIT:
            raise CaptureError(
                f"row {row.index}, position {worst}: stored logits would be {errors[worst]:.2g} {what}; "
                f"the limit is {ROUNDTRIP_LIMIT:g}",
                _WIDE,
            )


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """``bfloat16`` and so on; other dtypes cannot be stored."""
    if dtype not in DTYPE_NAMES:
        raise CaptureError(f"a capture cannot hold {dtype}", f"use one of {', '.join(DTYPE_NAMES.values())}")
    return DTYPE_NAMES[dtype]
