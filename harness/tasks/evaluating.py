"""lm-eval's own evaluation of all tasks of a suite in one go, every prompt held against the suite's seal first.

lm-eval runs without its own bars and advice: there is one progress display, and problems are raised, not logged.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from harness.errors import IncomparableError
from harness.tasks.asking import Prompt, prompts_digest
from harness.tasks.loading import Loaded
from harness.tasks.suite import SealedTask, Suite, SuiteLock

if TYPE_CHECKING:
    from harness.tasks.asking import AskingLM

#: lm-eval's standard error of a mean needs no resampling; other metrics get this many.
BOOTSTRAP = 100


def evaluate_suite(
    lm: AskingLM, suite: Suite, loaded: Loaded, lock: SuiteLock | None, *, limit: int | None
) -> tuple[dict[str, list[Any]], dict[str, Any], bool]:
    """Ask everything.

    Args:
        limit: the first so many documents of each task, instead of the suite's own limits.

    Returns:
        lm-eval's samples by task, its results by task and group, and whether every prompt was the sealed one.
    """
    from lm_eval.evaluator import evaluate

    seal = SealCheck(loaded, lock)
    lm.before(seal)
    chosen = first_documents(suite, loaded, limit)
    evaluated = evaluate(
        lm=lm,
        task_dict={"tasks": loaded.tasks, "groups": loaded.groups},
        samples=chosen or None,
        bootstrap_iters=BOOTSTRAP,
        log_samples=True,
        apply_chat_template=False,
    )
    return evaluated["samples"], evaluated["results"], seal.whole


def first_documents(suite: Suite, loaded: Loaded, limit: int | None) -> dict[str, list[int]]:
    """The documents of every task that is limited, by number."""
    chosen = {}
    for leaf, entry in loaded.entry_of.items():
        most = limit or suite.entry(entry).limit
        if most is not None:
            chosen[leaf] = list(range(min(most, len(loaded.tasks[leaf].eval_docs))))
    return chosen


class SealCheck:
    """Holds the prompts of each task against the seal; ``whole`` when each was sealed and is the same."""

    def __init__(self, loaded: Loaded, lock: SuiteLock | None) -> None:
        self._loaded, self._lock = loaded, lock
        self.whole = False

    def __call__(self, requests: Sequence[Any], _prompts: Sequence[Prompt]) -> None:
        """Refuse a task whose items are as many as sealed and are others.

        Raises:
            IncomparableError: prompts or the task's definition are not those that were sealed.
        """
        if self._lock is None:
            return
        for task, digest in self._lock.definitions.items():
            if self._loaded.configs.get(task, digest) != digest:
                raise _not_sealed(task, "definition is")
        asked = sealed_tasks(requests, self._loaded)
        same = [_holds(task, self._lock.tasks.get(task), now) for task, now in asked.items()]
        self.whole = bool(same) and all(same) and not self._loaded.missing


def _holds(task: str, sealed: SealedTask | None, now: SealedTask) -> bool:
    if sealed is None or sealed.n != now.n:
        return False
    if sealed.prompts_sha256 == now.prompts_sha256 and sealed.config_sha256 == now.config_sha256:
        return True
    raise _not_sealed(task, "prompts are" if sealed.prompts_sha256 != now.prompts_sha256 else "definition is")


def _not_sealed(task: str, what: str) -> IncomparableError:
    return IncomparableError(
        f"{task}: its {what} not what the suite was sealed with",
        "use the lm-eval version and the data that the suite names, or seal it anew with --seal",
    )


def sealed_tasks(requests: Sequence[Any], loaded: Loaded) -> dict[str, SealedTask]:
    """What a seal says of each task that these requests ask."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for request in requests:
        if request.idx == 0:
            target = loaded.tasks[request.task_name].doc_to_target(request.doc)
            pairs.setdefault(request.task_name, []).append((_hash(request.arguments[0]), _hash(str(target))))
    return {
        task: SealedTask(n=len(hashes), prompts_sha256=prompts_digest(hashes), config_sha256=loaded.configs[task])
        for task, hashes in pairs.items()
    }


def _hash(text: str) -> str:
    """lm-eval's ``hash_string``."""
    return hashlib.sha256(text.encode()).hexdigest()


def seal_suite(suite: Suite, loaded: Loaded, definitions: dict[str, str], lm_eval_version: str) -> SuiteLock:
    """The seal of a suite: every prompt of every task whose documents are there, built and hashed without a model.

    Args:
        definitions: digests of the definitions of all other tasks.
    """
    requests: list[Any] = []
    chosen: Mapping[str, list[int]] = first_documents(suite, loaded, None)
    for leaf, task in loaded.tasks.items():
        task.build_all_requests(samples=chosen.get(leaf))
        requests += task.instances
    return SuiteLock(
        name=suite.name,
        suite_sha256=suite.sha256,
        lm_eval=lm_eval_version,
        tasks=sealed_tasks(requests, loaded),
        unsealed=tuple(entry.task for entry in loaded.missing),
        definitions=definitions,
    )


# ---- quiet -----------------------------------------------------------------------------------------------------------


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
