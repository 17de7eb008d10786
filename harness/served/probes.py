"""The few rows that the checks on a server send: each is sent once, when its answer is first looked at, alone.

They are a probe row, a row with the same beginning, the probe again, the probe at another temperature, a whole row,
that row without a few tokens, that row among others, and the probe with ids of our choice.

A server whose model is known only by what it serves is sent text of a panel in its own tokens. Only checks use such
rows: what is measured are a sealed panel's ids, never text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from harness.errors import EngineError, UsageError
from harness.measure.preflight import part_of, probes_of
from harness.panel import ensure_built
from harness.panel.seal import find_seal
from harness.served.address import Server
from harness.served.checks_answer import check_whole
from harness.served.fetch import fetch
from harness.served.seam import Ask, ServedEngine, ServedRow
from harness.types import Row

#: Fewer tokens say nothing about positions.
LEAST = 8
#: A temperature far from 1: log-probabilities that follow it halve.
WARM = 2.0
#: Tokens left out of the moved row, after the ones that stay: a token that begins every text must stay.
KEPT, DROPPED = 4, 7
#: Tokens of a row made of text: one edge of a chunk of 256 lies in it, and a CPU takes seconds for it.
LENGTH = 512


class Probe:
    """The rows that are sent, and their answers, each asked for once, when first looked at, alone."""

    def __init__(self, engine: ServedEngine, rows: Sequence[Row], k: int, vocab_size: int | None) -> None:
        self._engine, self._k, self._vocab_size = engine, k, vocab_size
        self.whole_row = max(rows, key=lambda row: len(row.ids_T))
        if len(self.whole_row.ids_T) < LEAST:
            raise EngineError(
                f"the longest row has {len(self.whole_row.ids_T)} tokens",
                f"check with a row of at least {LEAST} tokens",
            )
        whole_T = self.whole_row.ids_T
        self.row, self._beside, _ = probes_of(part_of(self.whole_row, whole_T[: len(whole_T) - len(whole_T) // 4]))
        self.given: list[ServedRow] = []

    @cached_property
    def first(self) -> ServedRow:
        return self._ask([self.row], checked=False)[0]

    @cached_property
    def again(self) -> ServedRow:
        """The probe after a row that begins like it."""
        self._ask([self._beside])
        return self._ask([self.row])[0]

    @cached_property
    def warm(self) -> ServedRow:
        return self._ask([self.row], temperature=WARM)[0]

    @cached_property
    def whole(self) -> ServedRow:
        return self._ask([self.whole_row])[0]

    @cached_property
    def moved(self) -> ServedRow:
        ids_T = self.whole_row.ids_T
        return self._ask([part_of(self.whole_row, np.concatenate([ids_T[:KEPT], ids_T[KEPT + DROPPED :]]))])[0]

    @cached_property
    def among(self) -> ServedRow:
        """The whole row in flight with a shorter one on either side."""
        ids_T = self.row.ids_T
        before, after = part_of(self.row, ids_T[: len(ids_T) // 2]), part_of(self.row, ids_T[len(ids_T) // 3 :])
        return self._ask([before, self.whole_row, after])[1]

    @cached_property
    def asked(self) -> ServedRow:
        """The probe with three ids asked at each position: its next token, the token before, the server's best."""
        ids_T = self.row.ids_T
        ask_TM = np.stack([ids_T[1:], ids_T[:-1], self.first.ids_TK[:, 0]], axis=1).astype(np.int32)
        return self._ask([self.row], ask=lambda _: ask_TM)[0]

    def _ask(
        self, rows: list[Row], temperature: float = 0.0, ask: Ask | None = None, checked: bool = True
    ) -> list[ServedRow]:
        """Send rows together; but for the first answer, which is looked at check by check, each must be whole."""
        answers = list(self._engine.run(rows, k=self._k, ask=ask, temperature=temperature))
        if len(answers) != len(rows):
            raise EngineError(f"{len(rows)} rows were sent, {len(answers)} answers came", "see the server's log")
        self.given += answers
        for row, answer in zip(rows, answers, strict=True):
            if checked:
                check_whole(row, answer, self._k, self._vocab_size)
        return answers


# ---- rows where no teacher is named ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRows:
    """Rows, where they are from in one line, and the size of their tokenizer where it is known."""

    rows: list[Row]
    source: str
    tokenizer_size: int | None


def rows_for(server: Server, panel: Path | None, example: Path) -> ProbeRows:
    """The sealed rows of ``panel``; without one, the example's prose in the server's tokens, else the example's rows.

    Raises:
        UsageError: neither panel nor example is here.
    """
    if panel is not None:
        return _sealed(panel, "as its default seal has them; the served model must be of that tokenizer")
    texts = sorted((example / "text").glob("prose-*.txt"))
    length = min(LENGTH, server.context - 1) if server.context else LENGTH
    made = [_tokenized(server, path, index, length) for index, path in enumerate(texts)]
    rows = [row for row in made if row is not None]
    if rows and len(rows) == len(made):
        counts = ", ".join(str(len(row.ids_T)) for row in rows)
        source = f"text of {example.name} in the server's own tokens, {counts} of them"
        return ProbeRows(rows=rows, source=source, tokenizer_size=None)
    return _sealed(
        example, "for the server tells no tokens (/tokenize): checks of the NLL mean something only if it fits"
    )


def _sealed(panel: Path, why: str) -> ProbeRows:
    if not (panel / "panel.toml").is_file():
        raise UsageError(f"{panel} is no panel", "name a panel's folder with --panel")
    sealed, (_, lock) = ensure_built(panel), find_seal(panel)
    source = f"those of {sealed.name} for the tokenizer {lock.tokenizer.name}, {why}"
    return ProbeRows(rows=list(sealed.rows), source=source, tokenizer_size=lock.tokenizer.vocabulary)


def _tokenized(server: Server, path: Path, index: int, length: int) -> Row | None:
    """A text's first tokens as the server makes them; None where it does not."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": path.read_text(encoding="utf-8"),
        "add_special_tokens": True,
    }
    try:
        content = fetch("POST", f"{server.base}/tokenize", body=body).json
    except httpx.HTTPError:
        return None
    ids = content.get("tokens") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        return None
    ids_T = np.array(ids[:length], dtype=np.int32)
    return Row(index=index, ids_T=ids_T, document=path.name, domain="probe", sha256="")
