"""Answers as they come, so that a killed run goes on at the first missing one.

One JSON line an answer, keyed by a digest of the model, its settings and the prompt: another model's file can answer
nothing (FAULTS A 51), and no text of a question is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.errors import EngineError

FILE = "answers.jsonl"
Answer = tuple[float, bool]


class Answers:
    """Log-likelihoods by request, read from and appended to ``folder/answers.jsonl``.

    Args:
        key: digest of everything but the prompt that an answer depends on.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file, self._key = folder / FILE, key
        self._known: dict[str, Answer] = {}
        self._read()

    def _read(self) -> None:
        """Take every whole line; what a killed process left half written is dropped."""
        if not self._file.is_file():
            return
        text = self._file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        for line in whole.splitlines():
            entry = json.loads(line)
            self._known[entry["request"]] = (float(entry["loglikelihood"]), bool(entry["greedy"]))
        if whole != text:
            self._file.write_text(whole, encoding="utf-8")

    def __len__(self) -> int:
        return len(self._known)

    def name(self, context: str, answer: str) -> str:
        """Digest of model, settings and prompt."""
        return hashlib.sha256(json.dumps([self._key, context, answer]).encode()).hexdigest()

    def get(self, context: str, answer: str) -> Answer | None:
        """The stored answer, if there is one."""
        return self._known.get(self.name(context, answer))

    def add(self, context: str, answer: str, found: Answer) -> None:
        """Store one answer at once; one that is no number is refused."""
        value = float(found[0])
        if not math.isfinite(value):
            raise EngineError(f"the model gave a log-likelihood of {value}", "check its weights and compute dtype")
        name = self.name(context, answer)
        if name in self._known:
            return
        self._known[name] = (value, bool(found[1]))
        line = json.dumps({"request": name, "loglikelihood": value, "greedy": bool(found[1])})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def discard(self) -> None:
        """Remove the file once the receipt stands."""
        self._file.unlink(missing_ok=True)


class Recorder:
    """lm-eval's cache hook: takes every answer as soon as a model has it."""

    def __init__(self, answers: Answers, advance: Any = None) -> None:
        self._answers, self._advance = answers, advance

    def add_partial(self, attr: str, request: Iterable[Any], found: Any) -> None:
        """Called by lm-eval's models with the request and its answer."""
        if attr != "loglikelihood":
            return
        context, answer = request
        self._answers.add(context, answer, found)
        if self._advance is not None:
            self._advance(1, 1)
