"""lm-eval's own task definitions, with their documents from the Hub, from a folder, or from the lm_eval package.

Local documents come in through a copy of the definition's folder, made for one run in a temporary place, to which one
line is added (``custom_dataset``); prompts and hashes are those of the stock task. Documents are processed once, right
after seeding: GPQA shuffles its choices with the global generator each time they are asked for.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.digest import json_digest
from harness.errors import EngineError, UsageError
from harness.tasks import local
from harness.tasks.local import tasks_folder
from harness.tasks.receipt import Missing
from harness.tasks.suite import Entry, Suite

#: Where the definitions of a family lie in lm_eval, and the template that all of them include.
MMLU = ("mmlu/default", "_default_template_yaml")
GPQA = {
    "zeroshot": ("gpqa/zeroshot", "_gpqa_zeroshot_yaml"),
    "n_shot": ("gpqa/n_shot", "_gpqa_n_shot_yaml"),
    "cot_zeroshot": ("gpqa/cot_zeroshot", "_gpqa_cot_zeroshot_yaml"),
    "cot_n_shot": ("gpqa/cot_n_shot", "_gpqa_cot_n_shot_yaml"),
    "generative_n_shot": ("gpqa/generative", "_gpqa_generative_n_shot_yaml"),
}
#: What tells where documents come from, and is no part of what a task asks.
NO_MEANING = ("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata")

_MODULE = "fidelity_data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an entry's documents come from; ``sha256`` is that of local files and empty for the Hub.

    "none" is for definitions alone: one empty row stands for all documents.
    """

    kind: Literal["hub", "local", "wheel", "none"]
    sha256: str = ""
    custom: dict[str, str] | None = None


@dataclass(slots=True)
class Loaded:
    """Tasks ready to be asked: by leaf the suite's entry (``entry_of``) and its definition's digest (``configs``)."""

    tasks: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    entry_of: dict[str, str] = field(default_factory=dict)
    configs: dict[str, str] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    def leaves(self, entry: str) -> list[str]:
        """The leaf tasks of one entry, in lm-eval's order."""
        return [leaf for leaf, owner in self.entry_of.items() if owner == entry]


def find_sources(suite: Suite, data: Path | None) -> tuple[dict[str, Source], list[Missing]]:
    """Where each entry's documents are; what is known to be missing is said before anything is loaded.

    Raises:
        UsageError: ``data`` is no folder, or holds nothing that the suite asks.
    """
    if data is not None and not data.is_dir():
        raise UsageError(f"--data {data.name} is not a folder", "name the folder that holds mmlu/ or gpqa_diamond.csv")
    sources: dict[str, Source] = {}
    missing: list[Missing] = []
    for entry in suite.tasks:
        source = _source(entry, data)
        if isinstance(source, str):
            missing.append(Missing(task=entry.name, why=source))
        else:
            sources[entry.name] = source
    if not sources:
        raise UsageError(f"nothing of suite {suite.name} can be run: {missing[0].why}", "see --data")
    return sources, missing


def _source(entry: Entry, data: Path | None) -> Source | str:
    """The entry's source, or why it has none."""
    is_mmlu, gpqa = _is_mmlu(entry.name), _gpqa_parts(entry.name)
    if entry.source == "wheel":
        if not is_mmlu:
            return "the lm_eval package carries development questions of MMLU only"
        return Source(kind="wheel", custom={"kind": "wheel", "folder": ""})
    if data is not None and is_mmlu:
        root = local.mmlu_root(data)
        if root is None:
            return f"{data.name} holds no <subject>/test file"
        digest = local.data_digest(local.mmlu_files(root), root)
        return Source(kind="local", sha256=digest, custom={"kind": "mmlu", "folder": str(root.resolve())})
    if data is not None and gpqa:
        file = local.gpqa_file(data, gpqa[0])
        if file is None:
            return f"{data.name} holds no {gpqa[0]}.csv, .jsonl or .parquet; the set is gated: ask for it on the Hub"
        digest = local.data_digest([file], data)
        return Source(kind="local", sha256=digest, custom={"kind": "gpqa", "folder": str(file.resolve())})
    # GPQA is read through memory from the Hub too: its terms forbid copies in the clear.
    return Source(kind="hub", custom={"kind": "gpqa", "folder": ""} if gpqa else None)


def _is_mmlu(name: str) -> bool:
    return (tasks_folder() / MMLU[0] / f"{name}.yaml").is_file() or name in (
        "mmlu",
        *(f"mmlu_{g}" for g in ("stem", "other", "social_sciences", "humanities")),
    )


def _gpqa_parts(name: str) -> tuple[str, str] | None:
    """``("gpqa_diamond", "zeroshot")``."""
    parts = name.split("_", 2)
    return (f"gpqa_{parts[1]}", parts[2]) if len(parts) == 3 and parts[0] == "gpqa" and parts[2] in GPQA else None


def load_tasks(suite: Suite, sources: dict[str, Source], missing: Sequence[Missing], folder: Path) -> Loaded:
    """Load every entry that has a source; a gated or absent set is missing, the rest goes on.

    Args:
        folder: a temporary folder for copies of definitions.

    Raises:
        UsageError: lm-eval knows no such task, or nothing could be loaded.
    """
    loaded = load_what_is_there(suite, sources, missing, folder)
    if not loaded.tasks:
        raise UsageError(f"nothing of suite {suite.name} can be run: {loaded.missing[0].why}", "see --data")
    return loaded


def load_what_is_there(suite: Suite, sources: dict[str, Source], missing: Sequence[Missing], folder: Path) -> Loaded:
    """`load_tasks` that may find nothing."""
    loaded = Loaded(missing=list(missing))
    for entry in suite.tasks:
        if entry.name not in sources:
            continue
        try:
            with _no_stale_maps():
                _load_entry(loaded, suite, entry, sources[entry.name], folder / entry.name)
        except EngineError as error:
            loaded.missing.append(Missing(task=entry.name, why=error.what))
    return loaded


def load_definitions(suite: Suite, names: Sequence[str], folder: Path) -> dict[str, str]:
    """Digests of the definitions of entries whose documents are not here, by leaf; MMLU and GPQA alone can do that."""
    loaded = Loaded()
    none = Source(kind="none", custom={"kind": "none", "folder": ""})
    for name in names:
        if _family(name) is not None:
            _load_entry(loaded, suite, suite.entry(name), none, folder / name)
    return loaded.configs


def _load_entry(loaded: Loaded, suite: Suite, entry: Entry, source: Source, folder: Path) -> None:
    from lm_eval.tasks import TaskManager

    random.seed(suite.seeds.random)
    family = _family(entry.name)
    if source.custom is not None and family is not None:
        manager = TaskManager(include_path=str(_redirected(family, source.custom, folder)), include_defaults=False)
    elif family is not None:
        manager = TaskManager(include_path=str(tasks_folder() / family[0]), include_defaults=False)
    else:
        manager = TaskManager()
    stock = _documents(manager, entry, source)
    if twice := set(stock["tasks"]) & set(loaded.tasks):
        raise UsageError(f"{sorted(twice)[0]} is in two entries of suite {suite.name}", "ask it once")
    for name, task in stock["tasks"].items():
        _prepare(task, suite, entry)
        loaded.configs[name] = config_digest(task)
        if source.kind != "none":
            _process_once(task, suite.seeds.random)
        loaded.tasks[name], loaded.entry_of[name] = task, entry.name
    loaded.groups |= stock["groups"]
    loaded.sources[entry.name] = source


def _documents(manager: Any, entry: Entry, source: Source) -> dict[str, Any]:
    """lm-eval's tasks of one entry; what the Hub refuses becomes one line."""
    if entry.name not in manager.task_index:
        raise UsageError(f"lm-eval knows no task {entry.name}", "see `lm_eval ls tasks` for the names")
    from datasets.exceptions import DatasetsError

    try:
        stock: dict[str, Any] = manager.load([entry.name])
    except (OSError, DatasetsError) as error:
        if source.kind != "hub":
            raise
        raise EngineError(
            f"its documents cannot be had from the Hub ({type(error).__name__})",
            "connect, log in with `hf auth login` where the set is gated, or point --data at local files",
        ) from error
    return stock


def _family(name: str) -> tuple[str, str] | None:
    gpqa = _gpqa_parts(name)
    if gpqa:
        return GPQA[gpqa[1]]
    return MMLU if _is_mmlu(name) else None


def _redirected(family: tuple[str, str], custom: dict[str, str], folder: Path) -> Path:
    """A copy of the family's definitions whose documents come from `harness.tasks.local.load`."""
    place, template = family
    shutil.copytree(tasks_folder() / place, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / template).read_text(encoding="utf-8").rstrip("\n")
    text += f"\ncustom_dataset: !function {_MODULE}.load\ndataset_kwargs: {json.dumps(custom)}\n"
    (folder / template).write_text(text, encoding="utf-8")
    (folder / f"{_MODULE}.py").write_text("from harness.tasks.local import load  # noqa: F401\n", encoding="utf-8")
    return folder


def _prepare(task: Any, suite: Suite, entry: Entry) -> None:
    """Shots and few-shot seed, as lm-eval's own entry point sets them."""
    if entry.num_fewshot and task.config.fewshot_split and not len(task.dataset[task.config.fewshot_split]):
        raise UsageError(
            f"{task.task_name}: {entry.num_fewshot} shots are asked and there is no {task.config.fewshot_split} split",
            "add that split to the data folder, or ask for no shots",
        )
    task.set_config(key="num_fewshot", value=entry.num_fewshot)
    task.set_fewshot_seed(seed=suite.seeds.fewshot)


def _process_once(task: Any, seed: int) -> None:
    """Let the task's own ``process_docs`` run once, right after seeding, and keep what it made."""
    process = task.config.process_docs
    if process is None:
        return
    split = task.config.test_split or task.config.validation_split
    random.seed(seed)
    task.dataset[split] = process(task.dataset[split])
    task.set_config(key="process_docs", value=None)


@contextmanager
def _no_stale_maps() -> Iterator[None]:
    """Keep ``datasets`` from answering a shuffle with that of another seed (its cache does not see the seed)."""
    import datasets

    before = datasets.is_caching_enabled()
    datasets.disable_caching()
    try:
        yield
    finally:
        if before:
            datasets.enable_caching()


def config_digest(task: Any) -> str:
    """Digest of what a task asks and how it is scored; where its documents lie is no part of it."""
    config = {key: value for key, value in task.dump_config().items() if key not in NO_MEANING}
    config["version"] = task.VERSION
    return json_digest(json.loads(json.dumps(config, default=_source_text)))


def _source_text(value: Any) -> str:
    """A function by its source, so that two copies of it count the same."""
    return inspect.getsource(value) if callable(value) else str(value)
