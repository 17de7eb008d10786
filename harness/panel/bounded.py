"""Limits on what a stranger's template or pattern may take: time, memory, and the size of its text."""

from __future__ import annotations

import re
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jinja2 import Environment, TemplateSyntaxError, nodes

from harness.errors import PanelError

#: Seconds for all that one file's template or pattern does.
SECONDS = 10.0
#: Bytes more than the process holds when it begins.
MEMORY = 2 << 30
#: Characters of one rendered text.
LONGEST = 32_000_000
_PLAIN = "write a template and pattern that only arrange the text"
#: A tag of transformers' own that marks what a model wrote.
_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Stop what takes too long or too much memory.

    Raises:
        PanelError: with the name of the file that is being rendered or split.
    """
    try:
        with _time_limit(), _memory_limit():
            yield
    except _TooLong as error:
        raise PanelError(f"{name}: a template or pattern of the panel takes over {SECONDS:.0f} s", _PLAIN) from error
    except MemoryError as error:
        raise PanelError(f"{name}: a template of the panel takes over {MEMORY >> 30} GiB", _PLAIN) from error


def refuse_powers(name: str, template: str) -> None:
    """Refuse ``**``: one power of two numbers can take hours, and nothing stops it once it has begun.

    A template that cannot be parsed is left to whoever renders it.
    """
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", template))
    except TemplateSyntaxError:
        return
    if tree.find(nodes.Pow) is not None:
        raise PanelError(f"{name}: a template of the panel computes a power (**)", _PLAIN)


def require_short(name: str, text: str) -> str:
    """The text, unless it is longer than any document."""
    if len(text) > LONGEST:
        raise PanelError(f"{name}: a template of the panel makes {len(text):,} characters", _PLAIN)
    return text


class _TooLong(BaseException):
    """No Exception: a template engine turns those into errors of its own."""


@contextmanager
def _time_limit() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ring(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLong


@contextmanager
def _memory_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else None
    wanted = None if pages is None else pages * resource.getpagesize() + MEMORY
    if wanted is None or (soft != resource.RLIM_INFINITY and soft < wanted):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
