"""The few rows that the checks on a server send: each is sent once, when its answer is first looked at, alone.

They are a probe row, a row with the same beginning, the probe again, the probe at another temperature, a whole row,
that row without a few tokens, that row among others, and the probe with ids of our choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from harness.errors import EngineError
from harness.preflight import part_of, probes_of
from harness.served.preflight_answer import check_whole
from harness.served.seam import Ask, ServedEngine, ServedRow
from harness.types import Row

#: Fewer tokens say nothing about positions.
LEAST = 8
#: A temperature far from 1: log-probabilities that follow it halve.
WARM = 2.0
#: Tokens left out of the moved row, after the ones that stay: a token that begins every text must stay.
KEPT, DROPPED = 4, 7


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
        got = list(self._engine.run(rows, k=self._k, ask=ask, temperature=temperature))
        if len(got) != len(rows):
            raise EngineError(f"{len(rows)} rows were sent, {len(got)} answers came", "see the server's log")
        self.given += got
        for row, answer in zip(rows, got, strict=True):
            if checked:
                check_whole(row, answer, self._k, self._vocab_size)
        return got
