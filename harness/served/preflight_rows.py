"""Rows for checks on a server whose model is known only by what it serves: text of a panel, in the server's own tokens.

Only checks use such rows. What is measured are a sealed panel's ids, never text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from harness.errors import UsageError
from harness.panel import ensure_built
from harness.panel.seal import find_seal
from harness.served.address import Server, headers, json_of
from harness.types import Row

#: Tokens of such a row: one edge of a chunk of 256 lies in it, and a CPU takes seconds for it.
LENGTH = 512


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
    rows = [_tokenized(server, path, index, length) for index, path in enumerate(texts)]
    found = [row for row in rows if row is not None]
    if found and len(found) == len(rows):
        source = (
            f"text of {example.name} in the server's own tokens, {', '.join(str(len(r.ids_T)) for r in found)} of them"
        )
        return ProbeRows(rows=found, source=source, tokenizer_size=None)
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
        content = json_of(httpx.post(f"{server.base}/tokenize", json=body, headers=headers(), timeout=30))
    except httpx.HTTPError:
        return None
    ids = content.get("tokens") if isinstance(content, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) for i in ids):
        return None
    ids_T = np.array(ids[:length], dtype=np.int32)
    return Row(index=index, ids_T=ids_T, document=path.name, domain="probe", sha256="")
