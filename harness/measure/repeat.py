"""The same tokens twice: how far two answers are apart, and whether that is rounding, noise, or other numbers.

One rule for both lanes. Two answers that are not bit-equal are an engine's noise up to `TOLERANCE`, and told with their
figure; above it they are not of one distribution, and refused. Up to `QUIET` the check holds: float32 sums in another
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.errors import EngineError
from harness.types import Check, Head, Hidden, Outputs

#: Largest change in nats of one token's log-probability between two answers that is still an engine's noise.
TOLERANCE = 0.5
#: Largest mean change in nats that is.
MEAN_TOLERANCE = 0.1
#: No KL that is printed is moved by so many nats at a position.
QUIET = 1e-3
#: Likeliest tokens of a position that are compared, beside the next one: noise of the tail is no matter.
LIKELIEST = 64
#: Positions whose logits are in memory at a time.
PIECE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How two answers differ over their common positions, in nats: ``at`` is the position of the largest change."""

    equal: bool
    largest: float
    mean: float
    at: int

    @property
    def figure(self) -> str:
        where = "" if self.equal else f" at position {self.at}, mean {self.mean:.2g}"
        return f"max |difference| {self.largest:.3g}{where}"


def check_same(row: int, change: Difference, *, name: str, cause: str, repair: str) -> Check:
    """Two answers to the same tokens: bit-equal, or their largest difference is told, or refused above the tolerance.

    Args:
        row: the row's number in the panel.
        cause: what was different between them, as in ``after a row with the same beginning``.

    Raises:
        EngineError: they are not of one distribution.
    """
    if not (change.largest <= TOLERANCE and change.mean <= MEAN_TOLERANCE):
        raise EngineError(
            f"row {row}: the same tokens have other log-probabilities {cause}: {change.figure} nats "
            f"(above {TOLERANCE:g}, or {MEAN_TOLERANCE:g} in the mean)",
            repair,
        )
    if change.largest <= QUIET:
        note = "" if change.equal else f"differs {cause}, by less than {QUIET:g}"
        return Check(name=name, passed=True, figure=change.figure, note=note)
    note = f"differs {cause}: within {TOLERANCE:g}, noise that is part of every number"
    return Check(name=name, passed=False, figure=change.figure, note=note)


def difference_of(first: Outputs, again: Outputs, head: Head | None, next_T: np.ndarray) -> Difference:
    """Compare what an engine gave twice, through its head: the next and the likeliest tokens' log-probabilities.

    Args:
        first, again: outputs of the same tokens, of which the first ``len(next_T)`` positions count.
        next_T: the next token at each position.
    """
    a, b = _values(first), _values(again)
    if torch.equal(a.nan_to_num(), b.nan_to_num()):
        return Difference(equal=True, largest=0.0, mean=0.0, at=0)
    parts = [
        _change(a[start : start + PIECE], b[start : start + PIECE], head, next_T[start : start + PIECE])
        for start in range(0, len(next_T), PIECE)
    ]
    next_change_T, worst_T = (np.concatenate(side) for side in zip(*parts, strict=True))
    at = int(worst_T.argmax())
    return Difference(equal=False, largest=float(worst_T[at]), mean=float(next_change_T.mean()), at=at)


def _change(a: torch.Tensor, b: torch.Tensor, head: Head | None, next_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Change of the next token's log-probability, and the largest of it and the likeliest tokens', each ``[T]``."""
    count = len(next_T)
    before, after = _log_probabilities(a[:count], head), _log_probabilities(b[:count], head)
    change_TV = torch.where(before == after, 0.0, (before - after).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    change_TV[before.isnan() & after.isnan()] = 0.0
    likeliest = before.nan_to_num(nan=-torch.inf).topk(min(LIKELIEST, before.shape[1]), dim=1).indices
    target = torch.from_numpy(np.asarray(next_T, dtype=np.int64)).to(change_TV.device)[:, None]
    next_change = change_TV.gather(1, target)
    worst = torch.cat([next_change, change_TV.gather(1, likeliest)], dim=1).amax(dim=1)
    return next_change[:, 0].cpu().numpy(), worst.cpu().numpy()


def _log_probabilities(values: torch.Tensor, head: Head | None) -> torch.Tensor:
    from harness.engines.head import head_logits

    logits = values.float() if head is None else head_logits(head, values)
    return logits[:, : head.vocab_size if head else None].double().log_softmax(dim=1)


def _values(outputs: Outputs) -> torch.Tensor:
    return outputs.states_TH if isinstance(outputs, Hidden) else outputs.logits_TV
