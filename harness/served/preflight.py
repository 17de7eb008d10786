"""The checks before a served candidate is scored: a few requests, each check one line with its figure or a refusal.

Nothing is stored and nothing is scored here; `harness.served.probes` says what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from harness.errors import EngineError, Refused
from harness.served import checks_answer as answers
from harness.served import checks_pair as pairs
from harness.served import checks_server as server
from harness.served.probes import DROPPED, KEPT, WARM, Probe
from harness.served.seam import Capabilities, ServedEngine, ServedRow
from harness.types import UNKNOWN, Check, Row

#: Requests of others at work on a server, when none of ours are; None where it does not tell.
Load = Callable[[], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check's line; ``refusal`` is why nothing may be scored, where it failed so."""

    check: Check
    refusal: Refused | None = None


def check_served(
    engine: ServedEngine,
    rows: Sequence[Row],
    *,
    k: int,
    vocab_size: int | None,
    tokenizer_size: int | None = None,
    teacher_nll_T: np.ndarray | None = None,
    load: Load | None = None,
) -> list[Check]:
    """All checks on a served engine; the first refusal is raised.

    Args:
        rows: the rows that will be measured. The longest is the whole row, its beginning (at most three quarters of
            it, and 256 tokens) the probe.
        k: top tokens a position that the measurement will ask for.
        vocab_size: columns of the teacher's softmax; None where no teacher is known.
        tokenizer_size: tokens of the tokenizer, where ids beyond them may exist.
        teacher_nll_T: the teacher's NLL of the longest row (the first of that length), ``[T - 1]``.
        load: tells how many requests the server has at work; asked before and after the checks.

    Raises:
        EngineError, ScoreError: with row, position and repair.
    """
    checks = []
    for finding in examine(
        engine,
        rows,
        k=k,
        vocab_size=vocab_size,
        tokenizer_size=tokenizer_size,
        teacher_nll_T=teacher_nll_T,
        load=load,
    ):
        if finding.refusal:
            raise finding.refusal
        checks.append(finding.check)
    return checks


def require_k(engine: ServedEngine, rows: Sequence[Row], k: int) -> None:
    """Ask for ``k`` tokens on a row of two, before a teacher is run for a server that will not give them.

    ``k`` is at most the vocabulary: more kills some servers.

    Raises:
        EngineError: the server's cap, or its refusal.
    """
    server.check_cap(engine.capabilities, k)
    shortest = min(rows, key=lambda row: len(row.ids_T))
    begun = replace(shortest, ids_T=shortest.ids_T[:2])
    for _ in engine.run([begun], k=k, ask=None):
        pass


def check_row(row: Row, answer: ServedRow, *, k: int, vocab_size: int | None, software: str = UNKNOWN) -> None:
    """What every row must pass before it is scored and stored: its tokens, counts, numbers, ids; nothing from a cache.

    Raises:
        EngineError, ScoreError: with row, position and repair.
    """
    answers.check_whole(row, answer, k, vocab_size)
    server.check_cached([answer], software)


def examine(
    engine: ServedEngine,
    rows: Sequence[Row],
    *,
    k: int,
    vocab_size: int | None,
    tokenizer_size: int | None = None,
    teacher_nll_T: np.ndarray | None = None,
    load: Load | None = None,
) -> Iterator[Finding]:
    """`check_served` check by check, going on after a refusal as far as the server answers at all."""
    can, probe = engine.capabilities, Probe(engine, rows, k, vocab_size)
    before = load() if load else None
    yield from _each(_about_server(engine, rows, k, vocab_size or tokenizer_size))
    gate = list(_until_refused(_about_shape(probe, k, vocab_size)))
    yield from gate
    if gate[-1].refusal:
        return
    yield from _each(_about_answer(probe, vocab_size, tokenizer_size, teacher_nll_T))
    yield from _each(_about_pairs(probe, can.software, server.chunk_of(engine.identity)))
    yield _finding("asked ids", lambda: _check_asked(probe, can))
    yield _finding("prefix cache", lambda: server.check_cached(probe.given, can.software))
    yield _finding("load", lambda: server.check_alone(before, load() if load else None))


def _about_server(engine: ServedEngine, rows: Sequence[Row], k: int, vocab_size: int | None) -> Iterator[_Step]:
    can = engine.capabilities
    yield "k within the server's cap", partial(server.check_cap, can, k)
    yield "rows fit the server's context", partial(server.check_context, can, rows)
    yield "speculative decoding is off", partial(server.check_speculative, engine.identity, can.software)
    yield "raw log-probabilities", partial(server.check_mode, engine.identity)
    yield "the server's memory", partial(server.check_memory, rows, vocab_size)


def _about_shape(probe: Probe, k: int, vocab_size: int | None) -> Iterator[_Step]:
    yield "the server answers", lambda: _answers(probe)
    yield "the server ran the panel's token ids", lambda: answers.check_tokens(probe.row, probe.first)
    yield "counts", lambda: answers.check_counts(probe.row, probe.first, k, vocab_size)


def _about_answer(
    probe: Probe, vocab_size: int | None, tokenizer_size: int | None, teacher_nll_T: np.ndarray | None
) -> Iterator[_Step]:
    row, first, size = probe.row, probe.first, vocab_size or tokenizer_size
    yield "finite log-probabilities", partial(answers.check_numbers, first)
    yield "ids of the vocabulary", partial(answers.check_vocabulary, row, first, vocab_size, tokenizer_size)
    yield "sum of probabilities", partial(answers.check_mass, first, vocab_size)
    yield "log-probabilities of a distribution", partial(answers.check_reach, first, size)
    yield "targets agree with the lists", partial(answers.check_target, row, first)
    yield "NLL is a language model's", partial(answers.check_language_model, first, size)
    yield "NLL at shift 0 is the lowest", partial(answers.check_position, row, first)
    yield "logits dtype", partial(answers.check_logits_grid, first)
    if teacher_nll_T is not None:
        yield "NLL follows the teacher's", partial(answers.check_teacher, first, teacher_nll_T)


def _about_pairs(probe: Probe, software: str, chunk: int | None) -> Iterator[_Step]:
    yield "the same row twice", lambda: _check_repeat(probe, software)
    yield "temperature does not reach the prompt", lambda: _check_temperature(probe)
    yield "a row's beginning does not depend on its end", lambda: _check_prefix(probe, software)
    yield "seams of chunked prefill", lambda: _check_seams(probe, chunk)
    yield "a row among others", lambda: _check_among(probe)


#: A check's name, for the line of a refusal, and the check.
_Step = tuple[str, Callable[[], Check]]


def _each(steps: Iterator[_Step]) -> Iterator[Finding]:
    for name, check in steps:
        yield _finding(name, check)


def _until_refused(steps: Iterator[_Step]) -> Iterator[Finding]:
    for finding in _each(steps):
        yield finding
        if finding.refusal:
            return


def _finding(name: str, check: Callable[[], Check]) -> Finding:
    try:
        return Finding(check=check())
    except Refused as refusal:
        return Finding(check=Check(name=name, passed=False, figure="refused", note=refusal.what), refusal=refusal)


def _answers(probe: Probe) -> Check:
    answer = probe.first
    figure = f"{len(probe.row.ids_T)} tokens, {answer.wire_bytes / 1e3:.0f} kB"
    return Check(name="the server answers", passed=True, figure=figure)


def _check_repeat(probe: Probe, software: str) -> Check:
    """r0, a row with the same beginning, r0 again."""
    repair = f"start the server with {server.option(software, 'cache')}"
    first = probe.first
    try:
        again = probe.again
    except EngineError as error:
        raise EngineError(
            f"the server answered row {first.index}, but not a row with the same beginning, or it again: {error.what}",
            f"{repair}: prefix caching and prompt log-probabilities crash together in some versions; see its log",
        ) from error
    return pairs.check_same(
        first,
        again,
        name="the same row twice",
        cause="after a row with the same beginning",
        repair=f"{repair}: its prefix cache changes results",
    )


def _check_temperature(probe: Probe) -> Check:
    """A server that scales log-probabilities by sampling parameters is found out."""
    return pairs.check_same(
        probe.first,
        probe.warm,
        name="temperature does not reach the prompt",
        cause=f"at temperature {WARM:g}",
        repair="ask for raw log-probabilities: the server scales them by sampling parameters (vLLM: --logprobs-mode "
        "raw_logprobs)",
    )


def _check_prefix(probe: Probe, software: str) -> Check:
    return pairs.check_same(
        probe.first,
        probe.whole,
        name="a row's beginning does not depend on its end",
        cause="when more tokens follow",
        repair=f"set {server.option(software, 'chunk')} above the length of a row: its chunked prefill changes results",
    )


def _check_seams(probe: Probe, chunk: int | None) -> Check:
    name, length = "seams of chunked prefill", len(probe.whole_row.ids_T)
    if length <= (chunk or min(pairs.CHUNKS)) + DROPPED:
        what = f"no row of {length} tokens is longer than a chunk of {chunk}" if chunk else "the rows are short"
        return Check(name=name, passed=True, figure="no seams" if chunk else server.UNPROVEN, note=what)
    return pairs.check_seams(probe.whole, probe.moved, KEPT, DROPPED, chunk)


def _check_among(probe: Probe) -> Check:
    """What else is in the batch must not move a number."""
    return pairs.check_same(
        probe.whole,
        probe.among,
        name="a row among others is the row alone",
        cause="with other rows in flight",
        repair="let it run one request at a time (vLLM: --max-num-seqs 1, SGLang: --max-running-requests 1)",
    )


def _check_asked(probe: Probe, can: Capabilities) -> Check:
    """Where the server scores ids of our choice, it scores all of them, at their positions."""
    if not can.fixed_ids:
        return Check(name="ids of our choice", passed=True, figure="not served: top k only", note=can.note)
    return answers.check_asked(probe.row, probe.first, probe.asked.asked_TM)
