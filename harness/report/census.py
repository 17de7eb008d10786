"""A census in the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from harness.exl3.census import Census, Group, Rate
from harness.exl3.claims import KINDS, Kind
from harness.report.table import Table

#: Lines shown of a long list; ``--json`` has all.
_LINES = 20
_SECTIONS = {"text": "", "mtp": " (MTP)", "vision": " (vision)"}


def census_tables(census: Census) -> Iterator[RenderableType]:
    """Scopes, rates by layer, what was left native, and what the config claims."""
    yield _scopes(census).rich
    if census.groups:
        yield _layers(census).rich
        parts = ", ".join(f"{name} {count:,}" for name, count in sorted(census.codebooks.items()))
        yield Text(f"codebooks (modules): {parts}; head: {census.head}")
    else:
        yield Text("no EXL3 tensor in these files")
    yield _native(census).rich
    if claims := _claims(census):
        yield Text(f"config.json claims: {claims}")
    yield from _list("contradicted by the tensors (the tensors count)", census.mismatches, "bold red")
    yield from _list("noticed", census.notes, "yellow")


def _scopes(census: Census) -> Table:
    title = f"{census.name}: {census.whole.bytes / 1e9:,.3f} GB in {census.shards} files"
    rows = [(name, *_rate(rate)) for name, rate in (*census.scopes.items(), *census.tables.items())]
    return Table(title, ("scope", "parts", "weights", "bytes", "mean K", "bits a weight"), rows)


def _rate(rate: Rate) -> tuple[str, ...]:
    mean = "" if rate.mean_k is None else f"{rate.mean_k:.3f}"
    return f"{rate.tensors:,}", f"{rate.weights:,}", f"{rate.bytes:,}", mean, f"{rate.bits_per_weight:.3f}"


def _layers(census: Census) -> Table:
    """One line a run of equal layers; a mixed cell shows the mean K and the Ks."""
    cells: dict[tuple[str, int], dict[Kind, list[Group]]] = defaultdict(lambda: defaultdict(list))
    for group in census.groups:
        cells[group.section, group.layer][group.kind].append(group)
    kinds = [kind for kind in KINDS if any(kind in row for row in cells.values())]
    means = [(section, layer, [_mean(row[k]) for k in kinds]) for (section, layer), row in sorted(cells.items())]
    rows = [(_layer_label(first, last) + _SECTIONS[section], *texts) for section, first, last, texts in _runs(means)]
    return Table("K by layer", ("layers", *kinds), rows)


def _layer_label(first: int, last: int) -> str:
    return "outside" if first < 0 else f"{first}" if first == last else f"{first}-{last}"


def _runs(rows: list[tuple[str, int, list[str]]]) -> list[tuple[str, int, int, list[str]]]:
    runs: list[tuple[str, int, int, list[str]]] = []
    for section, layer, texts in rows:
        if runs and layer >= 1 and (section, layer - 1, texts) == (runs[-1][0], runs[-1][2], runs[-1][3]):
            runs[-1] = section, runs[-1][1], layer, texts
        else:
            runs.append((section, layer, layer, texts))
    return runs


def _mean(groups: list[Group]) -> str:
    rates = sorted({group.bits for group in groups})
    if len(rates) < 2:
        return f"{rates[0]:g}" if rates else ""
    mean = sum(g.bits * g.weights for g in groups) / sum(g.weights for g in groups)
    return f"{mean:.2f} ({', '.join(f'{bits:g}' for bits in rates)})"


def _native(census: Census) -> Table:
    rows = [
        (n.kind + _SECTIONS[n.section], n.dtype, f"{n.tensors:,}", f"{n.weights:,}", f"{n.bytes:,}")
        for n in census.native
    ]
    return Table("kept as stored", ("part", "dtype", "tensors", "weights", "bytes"), rows, sides="llrrr")


def _claims(census: Census) -> str:
    plain = {key: value for key, value in census.claims.items() if isinstance(value, (str, int, float))}
    layers = census.claims.get("layer_bits")
    text = ", ".join(f"{key} {value}" for key, value in plain.items())
    return text + (f", layer_bits for {len(layers)} layers" if isinstance(layers, dict) else "")


def _list(title: str, lines: list[str], style: str) -> Iterator[Text]:
    if lines:
        yield Text(f"{title}:", style=style)
    for line in lines[:_LINES]:
        yield Text(f"  {line}")
    if len(lines) > _LINES:
        yield Text(f"  and {len(lines) - _LINES} more (--json shows all)")
