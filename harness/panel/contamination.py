"""Which rows quote other text, such as a quantiser's calibration set: runs of 13 words in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from harness.panel.tokenizer import Tokenizer, check_tokenizer
from harness.types import Panel

#: Words of a run that counts as a quotation.
RUN = 13
#: A word, or one Chinese or Japanese character.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def quoted_rows(panel: Panel, tokenizer: Tokenizer, texts: Iterable[str]) -> dict[int, int]:
    """Rows that share a run of 13 words with any of ``texts``, and how many of their own runs are shared.

    Case, punctuation and line breaks do not count. A row that is missing from the result is clean.

    Raises:
        PanelError: the tokenizer is not the panel's.
    """
    check_tokenizer(panel, tokenizer)
    own = {row.index: set(runs(tokenizer.decode(row.ids_T))) for row in panel.rows}
    everything = set().union(*own.values())
    shared: set[tuple[str, ...]] = set()
    for text in texts:
        shared.update(run for run in runs(text) if run in everything)
    found = {index: len(mine & shared) for index, mine in own.items()}
    return {index: count for index, count in found.items() if count}


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """All runs of 13 words of a text, in order."""
    words: Sequence[str] = WORD.findall(text.lower())
    return (tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1))
