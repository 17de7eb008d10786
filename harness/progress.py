"""The one progress display: phase, item, rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

console = Console(stderr=True)
#: Seconds between the lines of a phase where there is no terminal.
EVERY = 30.0
#: The display on the screen, if there is one: phases inside phases become further lines of it.
_live: list[Progress] = []

#: ``advance(items_done, units_done)`` of a phase.
Advance = Callable[[int, float], None]


class RateColumn(ProgressColumn):
    """Units a second since the phase began, such as ``812 tokens/s``."""

    def render(self, task: Task) -> Text:
        done, elapsed = task.fields.get("units", 0.0), task.elapsed or 0.0
        rate = done / elapsed if elapsed > 0 else 0.0
        return Text(f"{rate:,.0f} {task.fields.get('unit', 'items')}/s")


@contextmanager
def phase(title: str, *, total: int, unit: str, item: str = "row") -> Iterator[Advance]:
    """Show one phase of long work.

    Args:
        title: what is being done, for example ``teacher``.
        total: number of items of the phase.
        unit: what the rate counts, for example ``tokens``.
        item: what an item is called.
    """
    if not console.is_terminal:
        with _plain_phase(title, total, unit, item) as advance:
            yield advance
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[item]}"),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        if not _live:
            _live.append(stack.enter_context(Progress(*columns, console=console)))
            stack.callback(_live.clear)
        progress = _live[0]
        task = progress.add_task(title, total=total, unit=unit, item=item, units=0.0)

        def advance(items: int, units: float) -> None:
            so_far = progress.tasks[progress.task_ids.index(task)].fields["units"]
            progress.update(task, advance=items, units=so_far + units)

        yield advance


def quiet_transformers() -> None:
    """Keep transformers' own bars and advice out of our one progress display; its errors still raise."""
    import transformers.utils.logging as hf_logging
    from huggingface_hub.utils import disable_progress_bars

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    disable_progress_bars()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


@contextmanager
def _plain_phase(title: str, total: int, unit: str, item: str) -> Iterator[Advance]:
    """A line at the start, every `EVERY` seconds whether or not an item was done, and at the end: for logs and CI."""
    start = time.monotonic()
    done, units = 0, 0.0

    def line() -> str:
        elapsed = max(time.monotonic() - start, 1e-9)
        left = elapsed / done * (total - done) if done else float("nan")
        rate = f"{units / elapsed:,.0f} {unit}/s" if done else f"{elapsed:.0f} s"
        return f"{title}: {item} {done}/{total}, {rate}" + (f", {left:.0f} s left" if 0 < done < total else "")

    def advance(items: int, more: float) -> None:
        nonlocal done, units
        done, units = done + items, units + more

    ended = threading.Event()

    def every() -> None:
        while not ended.wait(EVERY):
            print(line(), file=sys.stderr, flush=True)

    if total:
        print(f"{title}: {total} {item}{'s' if total > 1 else ''}", file=sys.stderr, flush=True)
    teller = threading.Thread(target=every, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        ended.set()
        teller.join()
        if total:
            print(line(), file=sys.stderr, flush=True)
