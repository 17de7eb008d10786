"""What a server refuses or would refuse: rows too long, too many log-probabilities; its own words about the rest."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx

from harness.errors import EngineError
from harness.served.address import headers
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


# Questions to a server, several in flight, answers in the order asked: retries, timeouts, bounded look-ahead.
#
# The event loop runs in the caller's thread while the caller waits for the next answer. An answer is read in a second
# thread once its place at the server has gone to the next question and that has left; so the server works on one
# question
# while the last answer is parsed, and at most ``concurrency + 1`` answers are in memory.

Read = TypeVar("Read")

#: Most characters of a server's own words in a message of ours.
WORDS = 160
CONNECT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds until an answer is given up, how often it is asked for, and the first wait in between, which doubles."""

    timeout: float = 600.0
    tries: int = 4
    wait: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """JSON for one address below the server's; ``about`` says in a message what was asked."""

    path: str
    body: bytes
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back. ``wire_bytes`` is the body as it travelled, ``seconds`` from sending to its last byte."""

    status: int
    content: bytes
    wire_bytes: int
    seconds: float


def in_order(
    base: str,
    questions: Iterable[Question],
    read: Callable[[int, Answer], Read],
    *,
    concurrency: int,
    patience: Patience,
) -> Iterator[Read]:
    """Ask questions below ``base``; ``read`` gets the number of a question and its answer, in another thread.

    Raises:
        EngineError: the server is gone, or whatever ``read`` raises, once the answers before it are given out.
    """
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        asking = _Asking(base, concurrency, patience)
        loop, tasks = runner.get_loop(), deque[asyncio.Task[Read]]()
        try:
            for number, question in enumerate(questions):
                tasks.append(loop.create_task(asking.read_one(number, question, read)))
                if len(tasks) > concurrency:
                    yield loop.run_until_complete(tasks.popleft())
            while tasks:
                yield loop.run_until_complete(tasks.popleft())
        finally:
            loop.run_until_complete(asking.close(tasks))


def ask(base: str, question: Question, patience: Patience, *, any_status: bool = False) -> Answer:
    """One question; ``any_status`` takes an answer of the server's troubles (HTTP 5xx) for an answer."""
    return asyncio.run(_ask(base, question, patience, any_status))


async def _ask(base: str, question: Question, patience: Patience, any_status: bool) -> Answer:
    asking = _Asking(base, 1, patience)
    try:
        return await asking.answer(question, any_status=any_status)
    finally:
        await asking.close([])


class _Asking:
    """A client with as many places as questions may be at the server at once."""

    def __init__(self, base: str, concurrency: int, patience: Patience) -> None:
        self.patience = patience
        self.places = asyncio.Semaphore(concurrency)
        self.leaving: set[asyncio.Event] = set()
        self.client = httpx.AsyncClient(
            base_url=base,
            headers={**headers(), "Content-Type": "application/json"},
            timeout=httpx.Timeout(patience.timeout, connect=CONNECT),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    async def read_one(self, number: int, question: Question, read: Callable[[int, Answer], Read]) -> Read:
        async with self.places:
            answer = await self.answer(question)
        await self._next_has_left()
        return await asyncio.to_thread(read, number, answer)

    async def _next_has_left(self) -> None:
        """Wait until the question that takes the free place is sent: parsing would keep it from leaving for long."""
        await asyncio.sleep(0)
        for left in list(self.leaving):
            await left.wait()

    async def answer(self, question: Question, *, any_status: bool = False) -> Answer:
        """Ask until there is an answer, or patience ends."""
        said = ""
        for attempt in range(self.patience.tries):
            if attempt:
                await asyncio.sleep(self.patience.wait * 2 ** (attempt - 1))
            start = time.perf_counter()
            try:
                response = await self._post(question)
            except httpx.RequestError as error:
                said = type(error).__name__
                continue
            if any_status or not (response.status_code == 429 or response.status_code >= 500):
                return _answer(response, time.perf_counter() - start)
            said = f"HTTP {response.status_code}: {first_words(response.content)}"
        raise EngineError(
            f"the server stopped answering at {question.about} ({said}; {self.patience.tries} tries)",
            "see the server's log (out of memory: a smaller --k, or --max-num-batched-tokens 2048) and start it again; "
            "run the same command again: it goes on from there",
        )

    async def _post(self, question: Question) -> httpx.Response:
        left = asyncio.Event()

        async def trace(event: str, _: object) -> None:
            if event.endswith("send_request_body.complete"):
                left.set()

        self.leaving.add(left)
        try:
            return await self.client.post(question.path, content=question.body, extensions={"trace": trace})
        finally:
            left.set()
            self.leaving.discard(left)

    async def close(self, tasks: Iterable[asyncio.Task[Read]]) -> None:
        """Give up what is still under way."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.aclose()


def _answer(response: httpx.Response, seconds: float) -> Answer:
    return Answer(
        status=response.status_code,
        content=response.content,
        wire_bytes=response.num_bytes_downloaded,
        seconds=seconds,
    )


def first_words(content: bytes) -> str:
    """The beginning of a server's error message, on one line, without what looks like an address or a path."""
    try:
        told = json.loads(content)
    except ValueError:
        told = content.decode(errors="replace")
    for key in ("error", "message", "detail"):
        told = told.get(key, told) if isinstance(told, dict) else told
    words = [word for word in str(told).split() if "://" not in word and not word.lstrip("('\"`[").startswith("/")]
    line = " ".join(words)
    return line if len(line) <= WORDS else f"{line[:WORDS]}..."
