"""Questions to a server, several in flight, answers in the order asked: retries, timeouts, bounded look-ahead.

The event loop runs in the caller's thread while the caller waits for the next answer. An answer is read in a second
thread once its place at the server has gone to the next question and that has left; so the server works on one
question while the last answer is parsed, and at most ``concurrency + 1`` answers are in memory.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
)

from harness.errors import EngineError
from harness.served.fetch import TooLarge, headers, read
from harness.types import Row

Read = TypeVar("Read")

#: Tokens that an answer adds to a prompt: a server does not answer with none.
NEW_TOKENS = 1
#: Most characters of a server's own words in a message of ours.
WORDS = 160
#: Bytes of a refusal that are looked at for them.
LONGEST_ERROR = 1 << 16
CONNECT = 10.0
_CAP = re.compile(r"max(?:imum)? allowed\D{0,8}(-?\d+)|max_logprobs\D{0,8}(-?\d+)")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The way to one server: its address, how many questions may be there at once, and how long to wait."""

    base: str
    concurrency: int
    patience: Patience

    def in_order(self, questions: Iterable[Question], read: Callable[[int, Answer], Read]) -> Iterator[Read]:
        """Ask questions; ``read`` gets the number of a question and its answer, in another thread.

        Raises:
            EngineError: the server is gone, or whatever ``read`` raises, once the answers before it are given out.
        """
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            asking = _Asking(self)
            loop, tasks = runner.get_loop(), deque[asyncio.Task[Read]]()
            try:
                for number, question in enumerate(questions):
                    tasks.append(loop.create_task(asking.read_one(number, question, read)))
                    if len(tasks) > self.concurrency:
                        yield loop.run_until_complete(tasks.popleft())
                while tasks:
                    yield loop.run_until_complete(tasks.popleft())
            finally:
                loop.run_until_complete(asking.close(tasks))

    def ask(self, question: Question) -> Answer:
        """One question, whose answer may be of any status: the server's troubles (HTTP 5xx) are an answer too."""
        return asyncio.run(self._ask(question))

    async def _ask(self, question: Question) -> Answer:
        asking = _Asking(self)
        try:
            return await asking.answer(question, any_status=True)
        finally:
            await asking.close([])


class _Asking:
    """A client with as many places as questions may be at the server at once."""

    def __init__(self, line: Line) -> None:
        self.patience = line.patience
        self.places = asyncio.Semaphore(line.concurrency)
        self.leaving: set[asyncio.Event] = set()
        self.client = httpx.AsyncClient(
            base_url=line.base,
            headers={**headers(), "Content-Type": "application/json"},
            timeout=httpx.Timeout(line.patience.timeout, connect=CONNECT),
            limits=httpx.Limits(max_connections=line.concurrency, max_keepalive_connections=line.concurrency),
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

        def in_trouble(answer: Answer) -> bool:
            return not any_status and (answer.status == 429 or answer.status >= 500)

        trying = AsyncRetrying(
            retry=retry_if_exception_type(httpx.RequestError) | retry_if_result(in_trouble),
            wait=wait_exponential(self.patience.wait),
            stop=stop_after_attempt(self.patience.tries),
            retry_error_callback=lambda state: _give_up(question, state),
        )
        return await trying(self._post, question)

    async def _post(self, question: Question) -> Answer:
        left = asyncio.Event()

        async def trace(event: str, _: object) -> None:
            if event.endswith("send_request_body.complete"):
                left.set()

        self.leaving.add(left)
        start = time.perf_counter()
        request = self.client.build_request("POST", question.path, content=question.body, extensions={"trace": trace})
        try:
            fetched = await read(request, self.client, self.patience.timeout)
        finally:
            left.set()
            self.leaving.discard(left)
        return Answer(
            status=fetched.status,
            content=fetched.content,
            wire_bytes=fetched.wire_bytes,
            seconds=time.perf_counter() - start,
        )

    async def close(self, tasks: Iterable[asyncio.Task[Read]]) -> None:
        """Give up what is still under way."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.aclose()


def _give_up(question: Question, state: RetryCallState) -> Answer:
    assert state.outcome is not None
    error = state.outcome.exception()
    if error is None:
        answer: Answer = state.outcome.result()
        trouble = f"HTTP {answer.status}: {first_words(answer.content)}"
    else:
        trouble = f"{type(error).__name__}: {error}" if isinstance(error, TooLarge) else type(error).__name__
    raise EngineError(
        f"the server stopped answering at {question.about} ({trouble}; {state.attempt_number} tries)",
        "see the server's log (out of memory: a smaller --k, or --max-num-batched-tokens 2048) and start it again; "
        "run the same command again: it goes on from there",
    )


# ---- a server's refusals ---------------------------------------------------------------------------------------------


def check_status(answer: Answer, row: Row, wanted: int) -> None:
    """Refuse anything but an answer, with the server's own first words and what to do.

    Args:
        wanted: log-probabilities a position that were asked for.
    """
    if answer.status == 200:
        return
    words = first_words(answer.content)
    cap = _CAP.search(words)
    if answer.status == 400 and cap and "logprob" in words:
        raise EngineError(
            f"the server gives at most {cap[1] or cap[2]} log-probabilities a position, {wanted} are asked for",
            f"start it with --max-logprobs {wanted} (or -1), or ask for fewer with --k",
        )
    about = f"the server refuses row {row.index} ({len(row.ids_T)} tokens, {wanted} ids): HTTP {answer.status}: {words}"
    if answer.status in (401, 403):
        raise EngineError(about, "put the server's key into the environment variable OPENAI_API_KEY")
    if "context" in words:
        raise EngineError(about, f"start the server with a context of {len(row.ids_T) + NEW_TOKENS} or more")
    raise EngineError(about, "check the server's log, its vocabulary, and that it allows prompt log-probabilities")


def first_words(content: bytes) -> str:
    """The beginning of a server's error message, on one line, without what looks like an address or a path."""
    content = content[:LONGEST_ERROR]
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        message = content.decode(errors="replace")
    for key in ("error", "message", "detail"):
        message = message.get(key, message) if isinstance(message, dict) else message
    words = [word for word in str(message).split() if "://" not in word and not word.lstrip("('\"`[").startswith("/")]
    line = " ".join(words)
    return line if len(line) <= WORDS else f"{line[:WORDS]}..."
