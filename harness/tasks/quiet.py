"""lm-eval without its own bars and advice: there is one progress display, and problems are raised, not logged."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Silence bars and log lines of lm-eval and datasets; tqdm has no switch that works after it is imported."""
    import lm_eval.api.task
    import lm_eval.models.api_models as api

    silent = functools.partial(lm_eval.api.task.tqdm, disable=True)
    gather = functools.partial(api.tqdm_asyncio.gather, disable=True)
    with ExitStack() as stack:
        stack.enter_context(_no_dataset_bars())
        for name in ("lm_eval", "datasets"):
            stack.enter_context(_level(logging.getLogger(name), logging.CRITICAL))
        stack.enter_context(_swapped(lm_eval.api.task, "tqdm", silent))
        stack.enter_context(_swapped(api, "tqdm", silent))
        stack.enter_context(_swapped(api.tqdm_asyncio, "gather", gather))
        yield


@contextmanager
def _no_dataset_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


@contextmanager
def _level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__[name] if name in vars(owner) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
