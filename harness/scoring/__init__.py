"""Scores of a candidate against its teacher, position by position: KL both ways, NLL, agreement, entropy."""

from harness.scoring.blas import Blas, blas_choice
from harness.scoring.score import TeacherStats, score_hidden, score_logits, score_outputs, teacher_stats

__all__ = [
    "Blas",
    "TeacherStats",
    "blas_choice",
    "score_hidden",
    "score_logits",
    "score_outputs",
    "teacher_stats",
]
