"""The checks before a served candidate is scored, on a small exact server that does one thing wrong at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from harness.errors import EngineError, HarnessError, Refused, ScoreError
from harness.served.checks_answer import check_logits_grid
from harness.served.checks_server import check_cached, requests_at_work
from harness.served.preflight import Finding, check_row, examine
from harness.served.seam import ServedRow
from harness.types import UNKNOWN
from tests.served.made_server import (
    ROWS,
    Change,
    Request,
    Server,
    V,
    answers,
    check,
    counting,
    crowded,
    ends_change_beginnings,
    entry,
    log_softmax,
    logits_of,
    remembers,
    same,
    scaled,
    seam,
    shifted_lists,
)

# ---- a server with no faults -----------------------------------------------------------------------------------------


def test_every_check_passes_with_its_figure_on_an_honest_server():
    server = Server()
    found = check(
        server, teacher_nll_T=-server.answer(ROWS[1], Request(ROWS[1].ids_T, 0, 0, 1), 4, None).target_logprob_T
    )
    assert all(line.passed and line.figure for line in found.values())
    assert len(found) == len({line.name for line in found.values()}) >= 20
    assert found["the server ran the panel's token ids"].figure == "240 of 240 equal"
    assert found["counts"].figure == "239 positions of 240 tokens, 8 ids each"
    assert found["the same row twice"].figure == "max |difference| 0"
    assert found["NLL follows the teacher's"].figure.startswith("correlation 1.0000, mean |difference| 0.0000")
    assert found["tokens taken from a prefix cache"].figure == "0 in 10 rows"
    assert found["ids of our choice"].figure == "717 of 717, within 0 nats"
    assert found["nobody else uses the server"].figure == "unproven"
    # The probe, a row that begins like it, the probe again, warm, whole, moved, three together, asked.
    assert [len(r.ids_T) for r in server.requests] == [240, 240, 240, 240, 320, 313, 120, 320, 160, 240]
    assert np.array_equal(server.requests[1].ids_T[:120], ROWS[1].ids_T[:120])
    assert not np.array_equal(server.requests[1].ids_T, ROWS[1].ids_T[:240])


def test_means_of_the_alignment_are_those_of_the_full_distribution_where_k_is_the_vocabulary():
    """Independent computation: NLL of ids t, t + 1 and t + 2 at each position from the whole matrix."""
    found = check(Server(), k=V)
    ids = ROWS[1].ids_T[:240]
    logprobs_TV, at = log_softmax(logits_of(ids)), np.arange(1, 238)
    means = [-logprobs_TV[at, ids[at + 1 + shift]].mean() for shift in (-1, 0, 1)]
    expected = ", ".join(f"shift {s:+d}: {m:.3f}" for s, m in zip((-1, 0, 1), means, strict=True))
    assert found["NLL at shift 0 is the lowest"].figure == expected
    assert found["sum of probabilities"].figure == "mean 1.000000, from 1.000000 to 1.000000"


def test_with_k_of_one_alignment_is_unproven_not_wrong():
    assert check(Server(), k=1)["NLL at shift 0 is the lowest"].figure == "unproven"


# ---- one fault at a time ---------------------------------------------------------------------------------------------


WRONG_LOGITS: dict[str, tuple[Change, type[Refused], str]] = {
    "off by one (A 37)": (lambda _, x: np.roll(x, 1, axis=0), ScoreError, "outputs are off by one: mean NLL shift -1"),
    "off by one, later (A 37)": (lambda _, x: np.roll(x, -1, axis=0), ScoreError, "outputs are off by one"),
    "uniform (A 45)": (lambda _, x: 0 * x, ScoreError, r"that of a uniform output \(ln 97 = 4.5747\)"),
    "temperature (A 36)": (scaled, EngineError, "other log-probabilities at temperature 2: .*\n.*raw_logprobs"),
    "prefix cache (A 34)": (
        remembers(1.0),
        EngineError,
        "after a row with the same beginning: .* at position .*\n.*--no-enable-prefix-caching",
    ),
    "causality": (ends_change_beginnings, EngineError, "when more tokens follow.*\n.*--max-num-batched-tokens"),
    "batch (A 40)": (crowded, EngineError, "with other rows in flight.*\n.*--max-num-seqs 1"),
}


@pytest.mark.parametrize("fault", WRONG_LOGITS)
def test_wrong_numbers_are_refused(fault):
    change, kind, message = WRONG_LOGITS[fault]
    with pytest.raises(kind, match=message):
        check(Server(on_logits=change))


WRONG_ANSWERS: dict[str, tuple[Callable[[ServedRow], ServedRow], type[Refused], str]] = {
    "zeros (A 35)": (
        lambda a: replace(a, target_logprob_T=0 * a.target_logprob_T, logprobs_TK=0 * a.logprobs_TK),
        ScoreError,
        r"row 1: every log-probability is 0",
    ),
    "a BOS added (A 1)": (
        lambda a: replace(a, echoed_ids_T=np.r_[np.int32(1), a.echoed_ids_T]),
        EngineError,
        "row 1: the engine ran 241 tokens, the panel has 240",
    ),
    "another token (A 7)": (entry("echoed_ids_T", (5,), 3), EngineError, "row 1: the engine ran token 3 at index 5"),
    "a position dropped (A 18)": (
        lambda a: replace(a, target_logprob_T=a.target_logprob_T[:-1], ids_TK=a.ids_TK[1:]),
        EngineError,
        "row 1: 240 tokens have 239 scored positions, the server gave 238 targets and 238 lists",
    ),
    "a quiet cap (A 17)": (
        lambda a: replace(a, ids_TK=a.ids_TK[:, :5], logprobs_TK=a.logprobs_TK[:, :5]),
        EngineError,
        "row 1, position 0: 8 tokens were asked for, the server gave 5",
    ),
    "a NaN target (A 27)": (
        entry("target_logprob_T", (17,), np.nan),
        ScoreError,
        "row 1, position 17: the log-probability of the next token is NaN .1 such",
    ),
    "a NaN in the list (A 16)": (
        entry("logprobs_TK", (9, 3), np.nan),
        ScoreError,
        "row 1, position 9: the log-probability of a top token is NaN",
    ),
    "an impossible target": (
        entry("target_logprob_T", (3,), -np.inf),
        ScoreError,
        r"row 1, position 3: the log-probability of the next token is impossible",
    ),
    "-9999 (A 16)": (entry("logprobs_TK", (4, 7), -9999.0), ScoreError, "position 4: .* a sentinel"),
    "-3.4e38 (A 16)": (entry("target_logprob_T", (4,), -3.4028e38), ScoreError, "position 4: .* a sentinel"),
    "clipped at -100 (A 16)": (entry("logprobs_TK", (slice(4, 6), 7), -100.0), ScoreError, "clipped to -100 .2 such"),
    "above 0": (entry("logprobs_TK", (2, 0), 0.5), ScoreError, "position 2: .* above 0"),
    "beyond the vocabulary (A 13)": (entry("ids_TK", (6, 7), 97), EngineError, "row 1: id 97 in a vocabulary of 97"),
    "lists of another position (A 18)": (
        shifted_lists,
        EngineError,
        "row 1, position .*: the next token .* has log-probability .*\n.*which entry the server puts first",
    ),
    "cached tokens (B 32)": (
        lambda a: replace(a, cached_tokens=64),
        EngineError,
        "row 1: the server took 64 of 240 tokens from its prefix cache.*\n.*--no-enable-prefix-caching",
    ),
}


@pytest.mark.parametrize("fault", WRONG_ANSWERS)
def test_wrong_answers_are_refused(fault):
    change, kind, message = WRONG_ANSWERS[fault]
    with pytest.raises(kind, match=message):
        check(answers(change))


def test_an_id_twice_is_refused():
    def twice(answer: ServedRow) -> ServedRow:
        ids_TK = answer.ids_TK.copy()
        ids_TK[6, 1] = ids_TK[6, 2]
        return replace(answer, ids_TK=ids_TK)

    with pytest.raises(ScoreError, match="row 1, position 6: .* a list is with an id twice"):
        check(answers(twice))


@pytest.mark.parametrize(("chunk", "at", "told"), [(256, -1, 256), (256, 0, None), (300, -1, 300)])
def test_seams_of_chunked_prefill_are_refused(chunk, at, told):
    """The position before or after an edge, with the chunk's size told by the server or not."""
    server = Server(on_logits=seam(chunk, at), settings={"chunk_tokens": told or UNKNOWN})
    with pytest.raises(EngineError, match=f"edge of a prefill chunk of {chunk} moves"):
        check(server, [counting(640, 5, 0)])


def test_no_seams_where_no_row_is_longer_than_a_chunk():
    found = check(Server(settings={"chunk_tokens": 2048}))["seams of chunked prefill"]
    assert found.figure == "no seams" and "no row of 320 tokens is longer than a chunk of 2048" in found.note


def test_numbers_that_are_only_in_a_later_answer_are_looked_at_too():
    """A NaN at the edge of a chunk of the whole row, where the probe has none."""
    server = answers(entry("target_logprob_T", (300,), np.nan), after=4)
    server.on_answer = lambda request, a: entry("target_logprob_T", (300,), np.nan)(a) if len(a.ids_TK) > 300 else a
    with pytest.raises(ScoreError, match="row 1, position 300: the log-probability of the next token is NaN"):
        check(server)


def test_small_noise_is_told_not_refused():
    """What is not bit-equal has its largest difference, and where it is, in the line."""
    found = check(Server(on_logits=remembers(0.01)))["the same row twice"]
    assert not found.passed and found.figure.startswith("max |difference| 0.0") and "noise" in found.note
    exact = log_softmax(logits_of(ROWS[1].ids_T[:240]))
    moved = log_softmax(remembers(0.01)(Request(ROWS[1].ids_T[:240], 2, 0, 1), logits_of(ROWS[1].ids_T[:240])))
    listed = np.argsort(-exact, axis=1)[:, :8]
    largest = max(
        np.abs(np.take_along_axis(exact - moved, listed, 1))[:-1].max(),
        np.abs((exact - moved)[np.arange(239), ROWS[1].ids_T[1:240]]).max(),
    )
    assert float(found.figure.split()[2]) == pytest.approx(largest, rel=0.01)


# ---- what a server tells of itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(max_logprobs=5), "k = 8 is more than the server's cap of 5.*\n.*--max-logprobs 8, or ask for --k 5"),
        (Server(context=320), "1 rows do not fit .* of 320 .*: rows 1; the longest has 320 .*\n.*--max-model-len 321"),
        (Server(context=100, software="sglang"), "2 rows do not fit .*: rows 1, 2; .*\n.*--context-length 321"),
        (
            Server(settings={"speculative": "eagle3"}),
            r"decodes speculatively \(eagle3\)\n.*without --speculative-config",
        ),
    ],
)
def test_caps_and_settings_are_refused_before_anything_is_sent(server, message):
    """A cap on k, a context too short, and speculative decoding are known before a row is sent."""
    with pytest.raises(EngineError, match=message):
        check(server)
    assert server.requests == []


def test_what_a_server_does_not_tell_is_unproven():
    """A missing field is never 0."""
    server = Server(context=None, max_logprobs=None, settings={"speculative": UNKNOWN}, fixed_ids=False)
    server.on_answer = lambda request, answer: replace(answer, cached_tokens=None)
    found = check(server)
    assert found["tokens taken from a prefix cache"].figure == "unproven in 9 of 9 rows"
    assert "--no-enable-prefix-caching" in found["tokens taken from a prefix cache"].note
    for name in ("k within the server's cap", "rows fit the server's context", "speculative decoding is off"):
        assert "unproven" in found[name].figure and found[name].passed
    assert found["ids of our choice"].figure == "not served: top k only"


def test_sglang_gets_its_own_option():
    server = answers(lambda answer: replace(answer, cached_tokens=1))
    server.software = "sglang"
    with pytest.raises(EngineError, match="--disable-radix-cache"):
        check(server)


def test_a_row_with_cached_tokens_is_named_among_good_ones():
    """64 tokens on row 3."""
    good = [
        replace(Server().answer(counting(80), Request(counting(80).ids_T, 0, 0, 1), 4, None), index=i) for i in range(5)
    ]
    assert check_cached(good, "vllm").figure == "0 in 5 rows"
    with pytest.raises(EngineError, match="row 3: the server took 64 of 80 tokens"):
        check_cached([replace(a, cached_tokens=64 * (a.index == 3)) for a in good], "vllm")
    some = [replace(a, cached_tokens=None if a.index == 3 else 0) for a in good]
    assert check_cached(some, "vllm").figure == "unproven in 1 of 5 rows"


def test_every_row_of_a_panel_can_be_looked_at_alone():
    row = counting(50, 4, 7)
    answer = Server().answer(row, Request(row.ids_T, 0, 0, 1), 6, None)
    check_row(row, answer, k=6, vocab_size=V)
    with pytest.raises(EngineError, match="row 7, position 0: 9 tokens were asked for, the server gave 6"):
        check_row(row, answer, k=9, vocab_size=V)
    with pytest.raises(EngineError, match="row 7: the server took 3 of 50 tokens.*\n.*--no-enable.* / --disable-radix"):
        check_row(row, replace(answer, cached_tokens=3), k=6, vocab_size=V)


def test_asked_ids_that_are_left_out_or_mixed_up_are_refused():
    """A number for another id than the one asked for would pass for it."""

    def left_out(answer: ServedRow) -> ServedRow:
        return replace(answer, asked_TM=None if answer.asked_TM is None else answer.asked_TM * np.nan)

    def mixed(answer: ServedRow) -> ServedRow:
        return replace(answer, asked_TM=None if answer.asked_TM is None else np.roll(answer.asked_TM, 1, axis=0))

    with pytest.raises(EngineError, match="row 1: 717 ids were asked for, the server gave 0 numbers"):
        check(answers(left_out))
    with pytest.raises(EngineError, match=r"row 1, position \d+: id .* was asked for and has log-probability"):
        check(answers(mixed))


def test_mass_beyond_the_tokenizer_is_told():
    """Columns past the tokenizer that a candidate gives probability to."""
    honest = check(Server(), tokenizer_size=V)["ids of the vocabulary"]
    assert honest.passed and honest.figure.endswith("at most 0")
    server = Server(on_logits=lambda _, x: np.concatenate([x[:, :-1], x.max(1, keepdims=True)], axis=1))
    found = check(server, tokenizer_size=V - 1)["ids of the vocabulary"]
    assert not found.passed and float(found.figure.split()[-1]) > 0.3


# ---- notes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "power"), [(2**-3, 3), (2**-6, 6), (None, None)])
def test_rounded_logits_show(step, power):
    """Logits on a grid of bf16 (magnitude 16 to 32) or fp16, and float32."""
    rounded = same if step is None else lambda _, logits_TV: np.round(logits_TV / step) * step
    row = ROWS[1]
    answer = Server(on_logits=rounded).answer(row, Request(row.ids_T, 0, 0, 1), 20, None)
    answer = replace(answer, logprobs_TK=answer.logprobs_TK.astype(np.float32).astype(np.float64))
    figure = check_logits_grid(answer).figure
    assert figure.startswith(f"multiples of 2^-{power}: rounded" if power else "no grid down to")


def test_another_model_than_the_teachers_is_refused():
    server = Server()
    nll_T = -server.answer(ROWS[1], Request(ROWS[1].ids_T, 0, 0, 1), 4, None).target_logprob_T
    with pytest.raises(ScoreError, match="row 1: the NLL does not follow the teacher's .correlation"):
        check(server, teacher_nll_T=np.roll(nll_T, 7))


def test_a_shared_server_is_contaminated_not_refused():
    """Requests of others may move digits, and do not make them wrong."""
    counts = iter([0, 3])
    found = check(Server(), load=lambda: next(counts))["nobody else uses the server"]
    assert not found.passed and found.figure == "3 other requests" and found.note.startswith("contaminated")
    assert check(Server(), load=lambda: 0)["nobody else uses the server"].passed
    assert check(Server(), load=lambda: None)["nobody else uses the server"].figure == "unproven"
    assert requests_at_work("http://127.0.0.1:9/v1") is None


# ---- the order of things ---------------------------------------------------------------------------------------------


def test_all_refusals_are_found_in_one_examination():
    server = Server(on_logits=scaled, max_logprobs=5)
    found = list(examine(server, ROWS, k=8, vocab_size=V))
    refused = [finding.check.name for finding in found if finding.refusal]
    assert refused == ["k within the server's cap", "temperature does not reach the prompt"]
    assert all(finding.check.passed for finding in found if not finding.refusal)


def test_an_examination_ends_where_answers_are_not_the_rows():
    server = answers(entry("echoed_ids_T", (5,), 3))
    found = list(examine(server, ROWS, k=8, vocab_size=V))
    assert isinstance(found[-1], Finding) and found[-1].check.name == "the server ran the panel's token ids"
    assert found[-1].refusal is not None and len(server.requests) == 1


def test_a_server_that_crashes_on_a_shared_prefix_says_so():
    """Prefix caching and prompt log-probabilities."""

    def crash(request: Request, answer: ServedRow) -> ServedRow:
        if request.number:
            raise EngineError("the server answered HTTP 500", "see its log")
        return answer

    message = (
        "answered row 1, but not a row with the same beginning, or it again: .* HTTP 500\n.*--no-enable-prefix-cach"
    )
    with pytest.raises(EngineError, match=message):
        check(Server(on_answer=crash))


def test_rows_too_short_to_check_are_refused():
    with pytest.raises(HarnessError, match="the longest row has 5 tokens"):
        check(Server(), [counting(5)])
