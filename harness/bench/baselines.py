"""What people do today with torch: the two baselines that the kernels are held against."""

from __future__ import annotations

import torch
from torch.nn import functional

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def naive(teacher_TV: torch.Tensor, candidate_TV: torch.Tensor, targets_T: torch.Tensor) -> Results:
    """KL, NLL of both and top-1 agreement, float32 and whole: ``log_softmax`` twice, then ``kl_div``."""
    log_p = functional.log_softmax(teacher_TV.float(), dim=-1)
    log_q = functional.log_softmax(candidate_TV.float(), dim=-1)
    kl = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    at = targets_T[:, None]
    agree = log_p.argmax(-1) == log_q.argmax(-1)
    return kl, -log_p.gather(1, at)[:, 0], -log_q.gather(1, at)[:, 0], agree


class Chunked:
    """The same in chunks of a few rows, into buffers that are made once."""

    def __init__(self, vocab: int, rows: int = 4) -> None:
        self.rows = rows
        self.buffers = torch.empty(3, rows, vocab)

    def __call__(self, teacher_TV: torch.Tensor, candidate_TV: torch.Tensor, targets_T: torch.Tensor) -> Results:
        parts = [
            self._chunk(*(side[low : low + self.rows] for side in (teacher_TV, candidate_TV, targets_T)))
            for low in range(0, len(targets_T), self.rows)
        ]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]

    def _chunk(self, teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Results:
        log_p, log_q, work = (buffer[: len(targets)] for buffer in self.buffers)
        torch.log_softmax(teacher.float(), -1, out=log_p)
        torch.log_softmax(candidate.float(), -1, out=log_q)
        torch.sub(log_p, log_q, out=work)
        at = targets[:, None]
        nll = -log_p.gather(1, at)[:, 0], -log_q.gather(1, at)[:, 0]
        agree = log_p.argmax(-1) == log_q.argmax(-1)
        kl = work.mul_(log_p.exp_()).sum(-1)
        return kl, *nll, agree


def naive_head(
    teacher_TH: torch.Tensor, candidate_TH: torch.Tensor, weight_VH: torch.Tensor, targets_T: torch.Tensor
) -> Results:
    """Hidden states through a shared head in float32, logits whole, then `naive`."""
    wide = weight_VH.float().T
    return naive(teacher_TH.float() @ wide, candidate_TH.float() @ wide, targets_T)
