"""Checks made before a candidate is scored: each is one line with its figure, or a refusal with its repair."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from harness.errors import EngineError, ScoreError
from harness.measure.repeat import check_same, difference_of
from harness.measure.rows import one_sided
from harness.types import Check, Engine, Head, Hidden, Logits, Row, RowOutputs

#: A mean NLL this close to 0 or to ln V is no language model's.
DEGENERATE = 0.01
#: Tokens of the first row that the checks run on.
PROBE = 256


def probes_of(row: Row) -> list[Row]:
    """r0, r1, r0: the beginning of a row, a row with the same first half, and r0 again.

    An engine that keeps what it computed for a prefix, and uses it wrongly, changes r0.
    """
    probe = part_of(row, row.ids_T[:PROBE])
    half = len(probe.ids_T) // 2
    beside = part_of(row, np.concatenate([probe.ids_T[:half], probe.ids_T[half:][::-1]]))
    return [probe, beside, probe]


def part_of(row: Row, ids_T: np.ndarray) -> Row:
    """Some of a row's tokens under its name; no row of a panel, so it has no digest."""
    return Row(index=row.index, ids_T=ids_T, document=row.document, domain=row.domain, sha256="")


def check_probes(
    engine: Engine, probes: Sequence[Row], outputs: Iterator[RowOutputs]
) -> tuple[list[Check], Hidden | Logits]:
    """Look at what an engine gave for `probes_of` a row, taken from ``outputs`` of them and maybe more rows.

    Returns:
        The checks, and the first probe's outputs, which the end of the run must give again (`check_end`).
    """
    first, beside, again = (next(outputs) for _ in probes)
    probe = probes[0]
    for row, out in zip(probes, (first, beside, again), strict=True):
        check_echo(row, out)
    ids = np.asarray(probe.ids_T)
    # Shift s asks whether the outputs at position t predict token t + 1 + s.
    inner = _cut(first.outputs, 1, -2)
    nll = {s: one_sided(inner, engine.head, ids[2 + s : len(ids) - 1 + s]).nll for s in (-1, 0, 1)}
    vocab = engine.head.vocab_size if engine.head else int(_values(inner).shape[-1])
    return [
        Check(name="the engine ran the panel's token ids", passed=True, figure=f"{len(ids)} of {len(ids)} equal"),
        check_not_degenerate(nll[0], vocab),
        check_alignment(nll),
        check_repeat(probe, first.outputs, again.outputs, engine.head),
        _cut_point(engine),
    ], first.outputs


def check_echo(row: Row, out: RowOutputs) -> None:
    """Refuse outputs of other tokens than the panel's."""
    check_ids(row, out.echoed_ids_T)


def check_ids(row: Row, echoed_ids_T: np.ndarray) -> None:
    """Refuse token ids that an engine says it ran and that are not the row's."""
    ours, theirs = row.ids_T, echoed_ids_T
    if len(ours) != len(theirs):
        raise EngineError(
            f"row {row.index}: the engine ran {len(theirs)} tokens, the panel has {len(ours)}",
            "turn off added special tokens and truncation in the engine",
        )
    differ = np.flatnonzero(ours != theirs)
    if len(differ):
        at = int(differ[0])
        raise EngineError(
            f"row {row.index}: the engine ran token {theirs[at]} at index {at}, the panel has {ours[at]}",
            "send token ids, not text, and turn off added special tokens",
        )


def check_not_degenerate(nll_T: np.ndarray, vocab_size: int | None) -> Check:
    """Refuse an engine whose NLL is 0 nearly everywhere, or that of a uniform distribution over a known vocabulary."""
    mean, uniform = _finite_mean(nll_T), math.log(vocab_size) if vocab_size else math.inf
    if abs(mean - uniform) < DEGENERATE:
        raise ScoreError(
            f"the mean NLL is {mean:.4f}, that of a uniform output (ln {vocab_size} = {uniform:.4f})",
            "the weights are not loaded: check the checkpoint",
        )
    zeros = float(np.mean(nll_T == 0))
    if abs(mean) < DEGENERATE and zeros > 0.5:
        raise ScoreError(f"NLL = 0 on {zeros:.0%} of positions", "turn off speculative decoding in the engine")
    figure = (
        f"mean {mean:.4f}, ln V {uniform:.4f}" if vocab_size else f"mean {mean:.4f}, the vocabulary's size is unknown"
    )
    return Check(name="NLL is a language model's", passed=True, figure=figure)


def check_alignment(nll: dict[int, np.ndarray]) -> Check:
    """The NLL of the next token must beat that of the token before and after it."""
    means = {shift: _finite_mean(values) for shift, values in nll.items()}
    text = ", ".join(f"shift {shift:+d}: {means[shift]:.3f}" for shift in sorted(means))
    if min(means, key=lambda shift: means[shift]) != 0:
        raise ScoreError(
            f"outputs are off by one: mean NLL {text}",
            "check which position the engine reports first, and that the panel is of its tokenizer",
        )
    return Check(name="NLL at shift 0 is the lowest", passed=True, figure=text)


def check_repeat(row: Row, first: Hidden | Logits, again: Hidden | Logits, head: Head | None) -> Check:
    """The same row again after one that begins like it: an engine that keeps a prefix wrongly is found out."""
    return check_same(
        row.index,
        difference_of(first, again, head, np.asarray(row.ids_T[1:])),
        name="the same row twice",
        cause="after a row with the same beginning",
        repair="turn off the engine's prefix cache: what it keeps of one row changes the next",
    )


def check_end(row: Row, first: Hidden | Logits, again: RowOutputs, head: Head | None) -> Check:
    """The first row again after all others: an engine that begins to keep something on the way is found out."""
    check_echo(row, again)
    return check_same(
        row.index,
        difference_of(first, again.outputs, head, np.asarray(row.ids_T[1:])),
        name="the first row again at the end",
        cause="after the panel's other rows",
        repair="the engine carries something from row to row, so no row of this run is kept: turn off its caches",
    )


def check_support(teacher_columns: int, candidate_columns: int, teacher_vocab: int, candidate_vocab: int) -> Check:
    """Both sides are normalised over one vocabulary; columns past it are padding."""
    if teacher_vocab != candidate_vocab:
        raise ScoreError(
            f"the teacher has {teacher_vocab} tokens and the candidate {candidate_vocab}",
            "they are not of one model family, or the teacher file needs its vocab_size",
        )
    extra = (teacher_columns - teacher_vocab, candidate_columns - candidate_vocab)
    padding = f"padding columns: teacher {extra[0]}, candidate {extra[1]}"
    return Check(name="one vocabulary on both sides", passed=True, figure=f"{teacher_vocab} tokens; {padding}")


def _finite_mean(nll_T: np.ndarray) -> float:
    """Mean over the positions that have an NLL: single NaN positions are the receipt's business, not a refusal."""
    finite = nll_T[np.isfinite(nll_T)]
    if not len(finite):
        raise ScoreError("the engine's outputs are NaN or infinite everywhere", "check the weights and the dtype")
    return float(finite.mean())


def _cut_point(engine: Engine) -> Check:
    figure = "outputs are logits" if engine.head is None else f"max |logit - head(input)| {engine.head_deviation:.3g}"
    return Check(name="hidden states are the head's own input", passed=True, figure=figure)


def _values(outputs: Hidden | Logits) -> torch.Tensor:
    return outputs.states_TH if isinstance(outputs, Hidden) else outputs.logits_TV


def _cut(outputs: Hidden | Logits, start: int, end: int) -> Hidden | Logits:
    if isinstance(outputs, Hidden):
        return Hidden(states_TH=outputs.states_TH[start:end])
    return Logits(logits_TV=outputs.logits_TV[start:end])
