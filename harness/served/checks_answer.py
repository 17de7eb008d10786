"""Checks on one answer of a server: whose tokens, how many numbers, of which vocabulary, and do they make sense.

Suffixes as in `harness.types`; every check is one line with its figure, or a refusal with row, position and repair.
"""

from __future__ import annotations

import numpy as np

from harness.errors import EngineError, ScoreError
from harness.measure.preflight import check_alignment, check_ids, check_not_degenerate
from harness.measure.repeat import TOLERANCE
from harness.served.seam import ServedRow
from harness.types import Check, Row

#: Most that probabilities may add up to above 1, and how far from 1 where the whole vocabulary is there.
MASS_TOLERANCE = 1e-4
#: Mass on ids that no token has, above which it is told.
OUTSIDE_TOLERANCE = 1e-6
#: Largest difference in nats between two places where one answer tells the same log-probability.
SAME_NUMBER = 1e-3
#: No log-probability of a language model is that low: it stands for "not computed".
IMPOSSIBLE = -1000.0
#: What some servers write for everything below it; a log-probability is exactly that at most by chance, once.
CLIP = -100.0
#: Lowest correlation of the NLL with the teacher's that is still the same model.
CORRELATION = 0.5


def check_whole(row: Row, answer: ServedRow, k: int, vocab_size: int | None) -> None:
    """What every answer must pass before its numbers are used: the row's tokens, all counts, numbers, known ids."""
    check_tokens(row, answer)
    check_counts(row, answer, k, vocab_size)
    check_numbers(answer)
    check_vocabulary(row, answer, vocab_size, None)
    check_reach(answer, vocab_size)


def check_tokens(row: Row, answer: ServedRow) -> Check:
    """The server ran the panel's token ids."""
    check_ids(row, answer.echoed_ids_T)
    count = len(row.ids_T)
    return Check(name="the server ran the panel's token ids", passed=True, figure=f"{count} of {count} equal")


def check_counts(row: Row, answer: ServedRow, k: int, vocab_size: int | None) -> Check:
    """``T - 1`` positions of ``k`` entries each: fewer positions or entries are never scored."""
    wanted, given = len(row.ids_T) - 1, len(answer.target_logprob_T)
    if given != wanted or len(answer.ids_TK) != wanted or answer.ids_TK.shape != answer.logprobs_TK.shape:
        raise EngineError(
            f"row {row.index}: {len(row.ids_T)} tokens have {wanted} scored positions, the server gave {given} targets "
            f"and {len(answer.ids_TK)} lists",
            "see that the first token's empty entry is skipped and that no position is dropped",
        )
    used_T = (answer.ids_TK >= 0).sum(axis=1)
    least, asked = int(used_T.min()), min(k, vocab_size or k)
    if least < asked and answer.asked_TM is None:
        at = int(used_T.argmin())
        raise EngineError(
            f"row {row.index}, position {at}: {k} tokens were asked for, the server gave {least}",
            "raise the server's cap of log-probabilities, or ask for a smaller --k",
        )
    return Check(name="counts", passed=True, figure=f"{wanted} positions of {len(row.ids_T)} tokens, {least} ids each")


def check_numbers(answer: ServedRow) -> Check:
    """No NaN, nothing above 0, and no number that only stands for "not computed"."""
    used_TK = answer.ids_TK >= 0
    for what, values in (("the next token", answer.target_logprob_T[:, None]), ("a top token", answer.logprobs_TK)):
        _refuse_where(answer, np.isnan(values) & (used_TK if values.shape == used_TK.shape else True), what, "NaN")
    targets = answer.target_logprob_T
    _refuse_where(answer, np.isneginf(targets)[:, None], "the next token", "impossible (-inf)")
    known = np.concatenate([targets[:, None], np.where(used_TK, answer.logprobs_TK, 0.0)], axis=1)
    _refuse_where(answer, np.isfinite(known) & (known <= IMPOSSIBLE), "a token", "a sentinel, not a log-probability,")
    if (known == CLIP).sum() > 1:
        _refuse_where(answer, known == CLIP, "a token", f"clipped to {CLIP:g}")
    _refuse_where(answer, known > SAME_NUMBER, "a token", "above 0")
    dropped = int((np.isneginf(answer.logprobs_TK) & used_TK).sum())
    note = "" if dropped == 0 else "they count as not observed, in the tail"
    return Check(name="finite log-probabilities", passed=True, figure=f"0 NaN, {dropped} of -inf", note=note)


def check_vocabulary(row: Row, answer: ServedRow, vocab_size: int | None, tokenizer_size: int | None) -> Check:
    """Every id is one of the declared vocabulary; the mass beyond the tokenizer is told."""
    ids_TK = answer.ids_TK
    highest = max(int(ids_TK.max(initial=-1)), int(np.max(row.ids_T)))
    if vocab_size is not None and highest >= vocab_size:
        place = f"id {highest} in a vocabulary of {vocab_size}"
        raise EngineError(f"row {row.index}: {place}", "panel, teacher and server are not of one model family")
    size = tokenizer_size or vocab_size
    if size is None:
        return Check(
            name="ids of the vocabulary", passed=True, figure=f"highest {highest}", note="its size is unproven"
        )
    beyond = ids_TK >= size
    mass = float(np.exp(np.where(beyond, answer.logprobs_TK, -np.inf)).sum(axis=1).max(initial=0.0))
    figure = f"highest {highest}, tokens {size}; mass beyond the tokenizer at most {mass:.2g}"
    note = "" if mass <= OUTSIDE_TOLERANCE else "the model gives probability to ids that no token has"
    return Check(name="ids of the vocabulary", passed=mass <= OUTSIDE_TOLERANCE, figure=figure, note=note)


def check_mass(answer: ServedRow, vocab_size: int | None) -> Check:
    """Probabilities of distinct ids, best first, adding up to at most 1, and to 1 over a whole vocabulary."""
    _check_order(answer)
    mass_T = np.exp(np.where(answer.ids_TK >= 0, answer.logprobs_TK, -np.inf)).sum(axis=1)
    at = int(mass_T.argmax())
    if (answer.logprobs_TK[answer.ids_TK >= 0] == 0).all():
        raise ScoreError(
            f"row {answer.index}: every log-probability is 0", "turn off speculative decoding in the server"
        )
    if mass_T[at] > 1 + MASS_TOLERANCE:
        raise ScoreError(
            f"row {answer.index}, position {at}: the probabilities of {answer.ids_TK.shape[1]} ids add up to "
            f"{mass_T[at]:.6f}",
            "the server's log-probabilities are rounded to 16 bits or not normalised: ask for raw ones in float32",
        )
    low, whole = float(mass_T.min()), vocab_size is not None and answer.ids_TK.shape[1] >= vocab_size
    if whole and low < 1 - MASS_TOLERANCE:
        raise ScoreError(
            f"row {answer.index}, position {int(mass_T.argmin())}: the whole vocabulary adds up to {low:.6f}",
            "the server scales or masks its log-probabilities: ask for raw ones at temperature 1",
        )
    mean = float(mass_T.mean())
    return Check(
        name="sum of probabilities", passed=True, figure=f"mean {mean:.6f}, from {low:.6f} to {mass_T[at]:.6f}"
    )


def check_reach(answer: ServedRow, vocab_size: int | None) -> Check:
    """The listed probabilities, and at most the last one for each id that is not listed, can add up to 1.

    So it is for every distribution; raw logits, log-probabilities that were scaled or shifted, and lists with values
    masked fall short of it somewhere.
    """
    name = "log-probabilities of a distribution"
    if vocab_size is None:
        return Check(name=name, passed=True, figure="not known: the size of the vocabulary is not")
    listed = answer.ids_TK >= 0
    logs = np.where(listed, answer.logprobs_TK, -np.inf)
    mass_T = np.exp(logs).sum(axis=1)
    last_T = np.exp(np.where(listed, answer.logprobs_TK, np.inf).min(axis=1))
    reach_T = mass_T + np.maximum(vocab_size - listed.sum(axis=1), 0) * last_T
    at = int(reach_T.argmin())
    if reach_T[at] < 1 - MASS_TOLERANCE:
        raise ScoreError(
            f"row {answer.index}, position {at}: {int(listed[at].sum())} ids hold {mass_T[at]:.4g}, and {vocab_size:,} "
            f"cannot hold more than {reach_T[at]:.4g}: no log-probabilities, but logits, or scaled, shifted or masked "
            "values",
            "ask for raw log-probabilities (vLLM: --logprobs-mode raw_logprobs; SGLang: no logit processors)",
        )
    return Check(name=name, passed=True, figure=f"every position can add up to 1, the tightest to {reach_T[at]:.6f}")


def check_target(row: Row, answer: ServedRow) -> Check:
    """The next token's log-probability is the one in the top list, or below the list's last."""
    listed_T, in_list_T = _looked_up(answer, np.asarray(row.ids_T[1:]))
    differs_T = np.abs(answer.target_logprob_T - listed_T)
    wrong_T = np.where(in_list_T, differs_T > SAME_NUMBER, answer.target_logprob_T > listed_T + SAME_NUMBER)
    if wrong_T.any():
        at = int(wrong_T.argmax())
        place = "listed" if in_list_T[at] else "at least as likely as the last one listed, which is"
        raise EngineError(
            f"row {row.index}, position {at}: the next token {int(row.ids_T[at + 1])} has log-probability "
            f"{answer.target_logprob_T[at]:.4f}, {place} {listed_T[at]:.4f}",
            "targets and lists are of different positions: check which entry the server puts first",
        )
    figure = f"in the list at {in_list_T.mean():.1%} of positions, equal to {SAME_NUMBER:g} nats there"
    return Check(name="targets agree with the lists", passed=True, figure=figure)


def check_language_model(answer: ServedRow, vocab_size: int | None) -> Check:
    """Refuse NLL 0 nearly everywhere, or that of a uniform output."""
    return check_not_degenerate(-answer.target_logprob_T, vocab_size)


def check_position(row: Row, answer: ServedRow) -> Check:
    """The lists know the next token better than the token before or after it.

    A token that is not in a list counts as being as likely as the list's last: an upper bound of what it is.
    """
    ids, inner = np.asarray(row.ids_T), slice(1, -1)
    nll = {}
    for shift in (-1, 0, 1):
        shifted_T = ids[2 + shift : len(ids) - 1 + shift]
        nll[shift] = -_looked_up(answer, shifted_T, inner)[0]
    if answer.ids_TK.shape[1] < 2 or float(nll[0].mean()) in (float(nll[-1].mean()), float(nll[1].mean())):
        return Check(name="NLL at shift 0 is the lowest", passed=True, figure="unproven", note="k is too small to tell")
    return check_alignment(nll)


def check_logits_grid(answer: ServedRow) -> Check:
    """Whether the logits were rounded to 16 bits: differences of log-probabilities at one position lie on a grid then.

    The rounding of a grid of step g costs up to about g^2 / 24 nats a position.
    """
    best = answer.logprobs_TK[:, :1]
    differences = (best - answer.logprobs_TK)[(answer.ids_TK >= 0) & np.isfinite(answer.logprobs_TK)]
    differences = differences[differences > 0]
    name = "logits dtype"
    for power in range(1, 10):
        step = 2.0**-power
        off = np.abs(differences - step * np.round(differences / step))
        # float32 log-probabilities of 0 to -30 are themselves only known to 2e-6.
        if len(differences) and np.mean(off < 1e-5) > 0.99:
            figure = f"multiples of 2^-{power}: rounded to 16 bits, up to {step**2 / 24:.1g} nats a position"
            return Check(name=name, passed=True, figure=figure, note="part of the served lane's own floor")
    return Check(name=name, passed=True, figure="no grid down to 2^-9: float32, or fp16 near 0")


def check_asked(row: Row, first: ServedRow, asked_TM: np.ndarray | None) -> Check:
    """Every asked id has its log-probability, the one that the top list tells.

    Args:
        first: the row's answer without asking.
        asked_TM: log-probabilities of the next token, the token before it and the list's first, ``[T - 1, 3]``.
    """
    ids_TM = np.stack([row.ids_T[1:], row.ids_T[:-1], first.ids_TK[:, 0]], axis=1)
    if asked_TM is None or asked_TM.shape != ids_TM.shape or not np.isfinite(asked_TM).all():
        got = "none" if asked_TM is None else f"{int(np.isfinite(asked_TM).sum())} numbers"
        raise EngineError(
            f"row {row.index}: {ids_TM.size} ids were asked for, the server gave {got}",
            "measure with top k only, or see which ids the server leaves out",
        )
    worst = 0.0
    for column in range(ids_TM.shape[1]):
        listed_T, in_list_T = _looked_up(first, ids_TM[:, column])
        off_T = asked_TM[:, column] - listed_T
        off_T = np.where(in_list_T, np.abs(off_T), np.maximum(off_T, 0.0))
        worst = max(worst, float(off_T.max()))
        if off_T.max() > TOLERANCE:
            at = int(off_T.argmax())
            raise EngineError(
                f"row {row.index}, position {at}: id {ids_TM[at, column]} was asked for and has log-probability "
                f"{asked_TM[at, column]:.4f}, the list says {'' if in_list_T[at] else 'at most '}{listed_T[at]:.4f}",
                "the server mixes up positions or ids: measure with top k only",
            )
    return Check(
        name="ids of our choice", passed=True, figure=f"{ids_TM.size} of {ids_TM.size}, within {worst:.2g} nats"
    )


def check_teacher(answer: ServedRow, teacher_nll_T: np.ndarray) -> Check:
    """The server runs a version of the teacher: its NLL goes up and down with the teacher's."""
    nll_T = -answer.target_logprob_T
    theirs = np.asarray(teacher_nll_T, dtype=np.float64)[: len(nll_T)]
    correlation = float(np.corrcoef(nll_T, theirs)[0, 1])
    figure = f"correlation {correlation:.4f}, mean |difference| {np.abs(nll_T - theirs).mean():.4f} nats"
    if correlation < CORRELATION:
        raise ScoreError(
            f"row {answer.index}: the NLL does not follow the teacher's ({figure})",
            "see that the server runs the candidate of this teacher",
        )
    return Check(name="NLL follows the teacher's", passed=True, figure=figure)


def _check_order(answer: ServedRow) -> None:
    values = np.where(answer.ids_TK >= 0, answer.logprobs_TK, -np.inf)
    with np.errstate(invalid="ignore"):
        rises = np.diff(values, axis=1) > SAME_NUMBER
    _refuse_where(answer, rises, "a list", "not in order")
    ids = np.sort(np.where(answer.ids_TK >= 0, answer.ids_TK, -1), axis=1)
    _refuse_where(answer, (np.diff(ids, axis=1) == 0) & (ids[:, 1:] >= 0), "a list", "with an id twice")


def _looked_up(answer: ServedRow, ids_T: np.ndarray, at: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability of one id at each position, the list's last where it is not listed; and whether it is."""
    lists, values = answer.ids_TK[at], answer.logprobs_TK[at]
    hit_TK = lists == ids_T[:, None]
    last_T = np.where(lists >= 0, values, np.inf).min(axis=1)
    hit_T = np.where(hit_TK, values, -np.inf).max(axis=1)
    in_list_T = hit_TK.any(axis=1)
    return np.where(in_list_T, hit_T, last_T), in_list_T


def _refuse_where(answer: ServedRow, wrong: np.ndarray, what: str, state: str) -> None:
    count = int(np.count_nonzero(wrong))
    if count:
        at = int(np.argwhere(wrong)[0][0])
        raise ScoreError(
            f"row {answer.index}, position {at}: the log-probability of {what} is {state} ({count} such values)",
            "look at the server's log and dtype; such numbers are not scored",
        )
