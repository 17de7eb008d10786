"""What a server refuses or would refuse: rows too long, too many log-probabilities; its own words about the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.errors import EngineError
from harness.served.http import Answer, first_words
from harness.types import Row

#: Tokens that an answer adds to a prompt: a server does not answer with none.
NEW_TOKENS = 1
_CAP = re.compile(r"max(?:imum)? allowed\D{0,8}(-?\d+)|max_logprobs\D{0,8}(-?\d+)")


def check_context(rows: Sequence[Row], context: int | None, option: str) -> None:
    """Refuse rows that do not fit, before anything is asked."""
    longest = max(rows, key=lambda row: len(row.ids_T), default=None)
    if longest is None or context is None:
        return
    needed = len(longest.ids_T) + NEW_TOKENS
    if needed > context:
        raise EngineError(
            f"row {longest.index} has {len(longest.ids_T)} tokens, the server's context is {context}",
            f"start the server with {option} {needed} or more, or use a panel of shorter rows",
        )


def check_cap(wanted: int, cap: int | None) -> None:
    """Refuse more log-probabilities a position than the server gives; -1 is no cap, None is not told."""
    if cap is not None and 0 <= cap < wanted:
        raise _above_cap(wanted, str(cap))


def _above_cap(wanted: int, cap: str) -> EngineError:
    return EngineError(
        f"the server gives at most {cap} log-probabilities a position, {wanted} are asked for",
        f"start it with --max-logprobs {wanted} (or -1), or ask for fewer with --k",
    )


def check_status(answer: Answer, row: Row, wanted: int) -> None:
    """Refuse anything but an answer, with the server's own first words and what to do."""
    if answer.status == 200:
        return
    said = first_words(answer.content)
    cap = _CAP.search(said)
    if answer.status == 400 and cap and "logprob" in said:
        raise _above_cap(wanted, cap.group(1) or cap.group(2))
    about = f"the server refuses row {row.index} ({len(row.ids_T)} tokens, {wanted} ids): HTTP {answer.status}: {said}"
    if answer.status in (401, 403):
        raise EngineError(about, "put the server's key into the environment variable OPENAI_API_KEY")
    if "context" in said:
        raise EngineError(about, f"start the server with a context of {len(row.ids_T) + NEW_TOKENS} or more")
    raise EngineError(about, "check the server's log, its vocabulary, and that it allows prompt log-probabilities")
