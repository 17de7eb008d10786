"""The checks before a served candidate is scored: a few requests, each check one line with its figure or a refusal.

Nothing is stored and nothing is scored here. The requests are a probe row, a row with the same beginning, the probe
again, the probe at another temperature, a whole row, that row without a few tokens, and that row among others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from harness.errors import EngineError, Refused
from harness.preflight import part_of, probes_of
from harness.receipt import Check
from harness.served import preflight_answer as answers
from harness.served import preflight_pairs as pairs
from harness.served import preflight_server as server
from harness.served.seam import UNKNOWN, Ask, Capabilities, ServedEngine, ServedRow
from harness.types import Row

#: Fewer tokens say nothing about positions.
LEAST = 8
#: A temperature far from 1: log-probabilities that follow it halve.
WARM = 2.0
#: Tokens left out of the moved row, after the ones that stay: a token that begins every text must stay.
KEPT, DROPPED = 4, 7

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
    found = []
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
        found.append(finding.check)
    return found


def check_row(row: Row, answer: ServedRow, *, k: int, vocab_size: int | None, software: str = UNKNOWN) -> None:
    """What every row must pass before it is scored and stored: its tokens, counts, numbers, ids; nothing from a cache.

    Raises:
        EngineError, ScoreError: with row, position and repair.
    """
    _check_numbers(row, answer, k, vocab_size)
    server.check_cached([answer], software)


def _check_numbers(row: Row, answer: ServedRow, k: int, vocab_size: int | None) -> None:
    answers.check_tokens(row, answer)
    answers.check_counts(row, answer, k, vocab_size)
    answers.check_numbers(answer)
    answers.check_vocabulary(row, answer, vocab_size, None)


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
    told, probe = engine.capabilities, Probe(engine, rows, k, vocab_size)
    before = load() if load else None
    yield from _each(_about_server(engine, rows, k, vocab_size or tokenizer_size))
    gate = list(_until_refused(_about_shape(probe, k, vocab_size)))
    yield from gate
    if gate[-1].refusal:
        return
    yield from _each(_about_answer(probe, vocab_size, tokenizer_size, teacher_nll_T))
    yield from _each(_about_pairs(probe, told.software, server.chunk_of(engine.identity)))
    yield _finding("asked ids", lambda: _check_asked(probe, told))
    yield _finding("prefix cache", lambda: server.check_cached(probe.given, told.software))
    yield _finding("load", lambda: server.check_alone(before, load() if load else None))


class Probe:
    """The rows that are sent, and their answers, each asked for once, when first looked at, alone."""

    def __init__(self, engine: ServedEngine, rows: Sequence[Row], k: int, vocab_size: int | None) -> None:
        self._engine, self._k, self._vocab_size = engine, k, vocab_size
        self.whole_row = max(rows, key=lambda row: len(row.ids_T))
        if len(self.whole_row.ids_T) < LEAST:
            raise EngineError(
                f"the longest row has {len(self.whole_row.ids_T)} tokens",
                f"check with a row of at least {LEAST} tokens",
            )
        whole_T = self.whole_row.ids_T
        self.row, self._beside, _ = probes_of(part_of(self.whole_row, whole_T[: len(whole_T) - len(whole_T) // 4]))
        self.given: list[ServedRow] = []

    @cached_property
    def first(self) -> ServedRow:
        return self._ask([self.row], checked=False)[0]

    @cached_property
    def again(self) -> ServedRow:
        """The probe after a row that begins like it."""
        self._ask([self._beside])
        return self._ask([self.row])[0]

    @cached_property
    def warm(self) -> ServedRow:
        return self._ask([self.row], temperature=WARM)[0]

    @cached_property
    def whole(self) -> ServedRow:
        return self._ask([self.whole_row])[0]

    @cached_property
    def moved(self) -> ServedRow:
        ids_T = self.whole_row.ids_T
        return self._ask([part_of(self.whole_row, np.concatenate([ids_T[:KEPT], ids_T[KEPT + DROPPED :]]))])[0]

    @cached_property
    def among(self) -> ServedRow:
        """The whole row in flight with a shorter one on either side."""
        ids_T = self.row.ids_T
        before, after = part_of(self.row, ids_T[: len(ids_T) // 2]), part_of(self.row, ids_T[len(ids_T) // 3 :])
        return self._ask([before, self.whole_row, after])[1]

    @cached_property
    def asked(self) -> ServedRow:
        """The probe with three ids asked at each position: its next token, the token before, the server's best."""
        ids_T = self.row.ids_T
        ask_TM = np.stack([ids_T[1:], ids_T[:-1], self.first.ids_TK[:, 0]], axis=1).astype(np.int32)
        return self._ask([self.row], ask=lambda _: ask_TM)[0]

    def _ask(
        self, rows: list[Row], temperature: float = 0.0, ask: Ask | None = None, checked: bool = True
    ) -> list[ServedRow]:
        """Send rows together; but for the first answer, which is looked at check by check, each must be whole."""
        got = list(self._engine.run(rows, k=self._k, ask=ask, temperature=temperature))
        if len(got) != len(rows):
            raise EngineError(f"{len(rows)} rows were sent, {len(got)} answers came", "see the server's log")
        self.given += got
        for row, answer in zip(rows, got, strict=True):
            if checked:
                _check_numbers(row, answer, self._k, self._vocab_size)
        return got


def _about_server(engine: ServedEngine, rows: Sequence[Row], k: int, vocab_size: int | None) -> Iterator[_Step]:
    told = engine.capabilities
    yield "k within the server's cap", partial(server.check_cap, told, k)
    yield "rows fit the server's context", partial(server.check_context, told, rows)
    yield "speculative decoding is off", partial(server.check_speculative, engine.identity, told.software)
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
    yield "targets agree with the lists", partial(answers.check_target, row, first)
    yield "NLL is a language model's", partial(answers.check_language_model, first, size)
    yield "NLL at shift 0 is the lowest", partial(answers.check_position, row, first)
    yield "logits dtype", partial(answers.grid, first)
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
    figure = f"{len(probe.row.ids_T)} tokens in {answer.seconds:.2f} s, {answer.wire_bytes / 1e3:.0f} kB"
    return Check(name="the server answers", passed=True, figure=figure)


def _check_repeat(probe: Probe, software: str) -> Check:
    """r0, a row with the same beginning, r0 again (FAULTS A 33, A 34)."""
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
    """FAULTS A 36."""
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
    """FAULTS A 40: what else is in the batch."""
    return pairs.check_same(
        probe.whole,
        probe.among,
        name="a row among others is the row alone",
        cause="with other rows in flight",
        repair="let it run one request at a time (vLLM: --max-num-seqs 1, SGLang: --max-running-requests 1)",
    )


def _check_asked(probe: Probe, told: Capabilities) -> Check:
    """Where the server scores ids of our choice, it scores all of them, at their positions (FAULTS A 20)."""
    if not told.fixed_ids:
        return Check(name="ids of our choice", passed=True, figure="not served: top k only", note=told.note)
    return answers.check_asked(probe.row, probe.first, probe.asked.asked_TM)
