"""From documents to rows: windows of token ids, the choice among them, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from harness.digest import ids_digest
from harness.errors import PanelError
from harness.panel.recipe import ChatSource, Recipe
from harness.panel.tokenizer import Tokenizer, adds_bos
from harness.types import Row

#: Tokens of the pieces that near-duplicates are counted in.
SHINGLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document of a source: its name in the panel and its token ids without any added BOS."""

    name: str
    ids_T: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """``ids_T`` cut from a document, starting at its token ``start``."""

    document: str
    start: int
    ids_T: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Bos:
    """What a recipe's policy comes to for one tokenizer: the id, and whether each row gets it."""

    token_id: int | None
    added: bool


def bos_of(recipe: Recipe, tokenizer: Tokenizer) -> Bos:
    """Resolve ``never``, ``always`` and ``tokenizer``."""
    added = recipe.bos == "always" or (recipe.bos == "tokenizer" and adds_bos(tokenizer))
    if added and tokenizer.bos_token_id is None:
        raise PanelError("the recipe wants a BOS on each row, and the tokenizer has none", 'set bos = "never"')
    return Bos(token_id=tokenizer.bos_token_id, added=added)


def windows_of(document: Document, recipe: Recipe, bos: Bos) -> list[Window]:
    """All full, disjoint windows of a document, in order; the last exact one included.

    With the tokenizer's own policy a document that already starts with BOS (a chat template wrote it) keeps
    that one, and its other windows get it too; under ``always`` it would get a second, which `check_bos` refuses.
    """
    ids_T = document.ids_T
    own = recipe.bos == "tokenizer" and len(ids_T) > 0 and bos.token_id is not None and ids_T[0] == bos.token_id
    added, skipped = bos.added or own, int(own)
    body = recipe.length - int(added)
    head = np.array([bos.token_id] if added else [], dtype=np.int32)
    starts = range(skipped, len(ids_T) - body + 1, body)
    # The first window of a document that writes its BOS itself begins with it, so with the document.
    return [
        Window(
            document=document.name,
            start=s if s > 1 or bos.added else 0,
            ids_T=np.concatenate([head, ids_T[s : s + body]]).astype(np.int32),
        )
        for s in starts
    ]


def join(documents: Sequence[Document], separator: int | None) -> list[Document]:
    """All documents end to end, with the tokenizer's EOS between them, as one."""
    pieces: list[np.ndarray] = []
    for document in documents:
        pieces += [document.ids_T] + ([] if separator is None else [np.array([separator], dtype=np.int32)])
    name = f"{documents[0].name} .. {documents[-1].name}" if len(documents) > 1 else documents[0].name
    return [Document(name=name, ids_T=np.concatenate(pieces[: len(pieces) if separator is None else -1]))]


def choose(windows: Sequence[Sequence[Window]], number: int, recipe: Recipe) -> list[Window]:
    """Take the rows of source ``number``: one window of each document before any gives a second.

    Documents and windows are ordered by a hash of seed, source, name and start, so the choice is the same on every
    machine and does not move when another source changes.
    """
    source = recipe.sources[number]
    per_document = source.rows if recipe.cross_documents else source.rows_per_document
    queues = [sorted(some, key=lambda w: _order(recipe.seed, number, w.document, w.start)) for some in windows if some]
    queues.sort(key=lambda queue: _order(recipe.seed, number, queue[0].document, -1))
    chosen = [queue[turn] for turn in range(per_document) for queue in queues if turn < len(queue)]
    return chosen[: source.rows]


def _order(seed: int, source: int, document: str, start: int) -> str:
    return hashlib.sha256(f"{seed}\0{source}\0{document}\0{start}".encode()).hexdigest()


def interleave(per_source: Sequence[Sequence[Window]], recipe: Recipe) -> list[tuple[int, Window]]:
    """Source numbers and windows, one of each domain in turn, so the first rows already span the domains."""
    queues: dict[str, list[tuple[int, Window]]] = {}
    for number, windows in enumerate(per_source):
        queues.setdefault(recipe.sources[number].domain, []).extend((number, window) for window in windows)
    most = max(len(queue) for queue in queues.values())
    return [queue[turn] for turn in range(most) for queue in queues.values() if turn < len(queue)]


def make_rows(order: Sequence[tuple[int, Window]], recipe: Recipe) -> list[Row]:
    return [
        Row(
            index=index,
            ids_T=window.ids_T,
            document=window.document,
            domain=recipe.sources[number].domain,
            sha256=ids_digest(window.ids_T),
        )
        for index, (number, window) in enumerate(order)
    ]


def check_rows(rows: Sequence[Row], sources: Sequence[int], recipe: Recipe, tokenizer: Tokenizer) -> float:
    """Refuse rows that are short, identical, too alike, or wrong in BOS or special tokens.

    Args:
        rows: all rows in order.
        sources: the number of each row's source.

    Returns:
        The largest share of token 8-grams that two rows have in common.
    """
    check_lengths(rows, recipe.length)
    check_bos(rows, recipe, tokenizer)
    check_special(rows, sources, recipe, tokenizer)
    check_identical(rows)
    return check_near_duplicates(rows, recipe.near_duplicates)


def check_lengths(rows: Sequence[Row], length: int) -> None:
    short = [f"row {row.index} ({len(row.ids_T)})" for row in rows if len(row.ids_T) != length]
    if short:
        raise PanelError(f"rows without exactly {length} tokens: {', '.join(short)}", "give longer documents")


def check_bos(rows: Sequence[Row], recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse two BOS in front, none where the tokenizer wants one, and one in a part of a document's rows."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    _check_all_or_none(rows, bos)
    for row in rows:
        first = [int(token) for token in row.ids_T[:2]]
        if first == [bos, bos] and not recipe.allow_double_bos:
            raise PanelError(
                f"double BOS at row {row.index} ({row.document}): it starts with {first}",
                'the text or template already writes a BOS: set bos = "tokenizer", or allow_double_bos = true',
            )
        if first[0] != bos and adds_bos(tokenizer) and not recipe.allow_missing_bos:
            raise PanelError(
                f"missing BOS at row {row.index} ({row.document}): the tokenizer adds {bos}, the row starts with "
                f"{first[0]}",
                'set bos = "tokenizer", or allow_missing_bos = true if the model is really used without',
            )


def _check_all_or_none(rows: Sequence[Row], bos: int) -> None:
    """A BOS that a text or a template writes is in a document's first window alone: another context than the rest."""
    seen: dict[str, Row] = {}
    for row in rows:
        first = seen.setdefault(row.document, row)
        if (int(row.ids_T[0]) == bos) != (int(first.ids_T[0]) == bos):
            with_it, without = (first, row) if int(first.ids_T[0]) == bos else (row, first)
            raise PanelError(
                f"row {with_it.index} of {row.document} starts with BOS and row {without.index} of it does not",
                'set bos = "tokenizer": every row then gets the BOS that the text or its template writes at the '
                "beginning; or rows_per_document = 1",
            )


def check_special(rows: Sequence[Row], sources: Sequence[int], recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Refuse plain text that spells special tokens such as ``<|im_start|>``: it becomes their ids."""
    special = set(tokenizer.all_special_ids)
    for row, number in zip(rows, sources, strict=True):
        source = recipe.sources[number]
        if isinstance(source, ChatSource) or source.allow_special or recipe.cross_documents:
            continue
        body = row.ids_T[1:] if bos_of(recipe, tokenizer).added else row.ids_T
        found = sorted(special & set(body.tolist()))
        if found:
            raise PanelError(
                f"row {row.index} ({row.document}) spells special tokens in plain text: "
                + ", ".join(tokenizer.convert_ids_to_tokens(found)),
                "exclude that document, or set allow_special = true in its source",
            )


def check_identical(rows: Sequence[Row]) -> None:
    seen: dict[str, Row] = {}
    for row in rows:
        if row.sha256 in seen:
            other = seen[row.sha256]
            raise PanelError(
                f"rows {other.index} ({other.document}) and {row.index} ({row.document}) are identical",
                "put one of the two documents into its source's exclude list",
            )
        seen[row.sha256] = row


def check_near_duplicates(rows: Sequence[Row], limit: float) -> float:
    """Refuse rows that share more than ``limit`` of their token 8-grams; the largest share of all is returned."""
    found = sorted(overlaps(rows), key=lambda pair: -pair[2])
    bad = [
        f"rows {rows[i].index} ({rows[i].document}) and {rows[j].index} ({rows[j].document}): {share:.0%}"
        for i, j, share in found
        if share > limit
    ]
    if bad:
        more = f"; and {len(bad) - 5} more pairs" if len(bad) > 5 else ""
        raise PanelError(
            f"near-duplicates, by the share of token {SHINGLE}-grams in common (limit {limit:.0%}): "
            + "; ".join(bad[:5])
            + more,
            "put one document of each pair into its source's exclude list, or raise near_duplicates",
        )
    return found[0][2] if found else 0.0


def overlaps(rows: Sequence[Row]) -> Iterator[tuple[int, int, float]]:
    """Pairs of rows with common token 8-grams: both numbers, and common / the smaller set (exact, no sketch)."""
    if not rows:
        return
    grams = [_shingles(row.ids_T) for row in rows]
    sizes = np.array([len(some) for some in grams])
    _, column = np.unique(np.concatenate(grams), return_inverse=True)
    ones = np.ones(len(column), dtype=np.int32)
    member = sparse.csr_matrix((ones, column, np.concatenate([[0], np.cumsum(sizes)])))
    common = sparse.triu(member @ member.T, k=1).tocoo()
    for i, j, count in zip(common.row, common.col, common.data, strict=True):
        yield int(i), int(j), float(count / min(sizes[i], sizes[j]))


def _shingles(ids_T: np.ndarray) -> np.ndarray:
    """Distinct token 8-grams, each as 32 opaque bytes."""
    if len(ids_T) < SHINGLE:
        return np.empty(0, dtype=f"V{4 * SHINGLE}")
    windows = np.lib.stride_tricks.sliding_window_view(ids_T.astype("<i4"), SHINGLE)
    return np.unique(np.ascontiguousarray(windows).view(f"V{4 * SHINGLE}").reshape(-1))
