"""Numbers that a card states, beside those that are counted: bits per weight, sizes, layers.

A statement agrees where the counted number has its digits, rounds where a neighbouring rounding has them (GB for GiB,
the routed experts for the whole), and contradicts where nothing counted does. Where a known mistake gives the stated
number, the formula is printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.artifact.summary import Artifact

Status = Literal["agrees", "rounds", "contradicts"]

_NUMBER = r"(?P<number>\d[\d,]*(?:\.\d+)?)"
_BITS = re.compile(rf"{_NUMBER}\s*(?:-\s*)?(?:bpw\b|bits?[\s/-]+(?:per[\s-]+)?weights?\b)", re.IGNORECASE)
_SIZE = re.compile(rf"{_NUMBER}\s*(?P<unit>GiB|GB|MiB|MB|TB|TiB|bytes)\b")
_LAYERS = re.compile(
    r"(?P<number>\d+)\s+of\s+(?:the\s+)?(?P<whole>\d+)\s+(?P<what>(?:\w+[\s-]+){0,2}?layers)", re.IGNORECASE
)
_UNITS = {"bytes": 1, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30, "TB": 1e12, "TiB": 2**40}
#: What scales and markers add to K in common parlance: 2.05 is "K=2".
_USUAL_EXTRA = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A number of a card with its line, the counted one nearest to it, and how a mistake would give it."""

    line: int
    stated: str
    status: Status
    counted: str
    formula: str = ""


def statements(text: str, artifact: Artifact) -> list[Statement]:
    """Every number of a card that can be counted."""
    found: list[Statement] = []
    for number, line in enumerate(text.split("\n"), 1):
        found += [_bits(number, match, artifact) for match in _BITS.finditer(line)]
        found += [_size(number, match, artifact) for match in _SIZE.finditer(line)]
        found += [made for match in _LAYERS.finditer(line) if (made := _layers(number, match, artifact)) is not None]
    return found


def _digits(number: str) -> tuple[float, int]:
    plain = number.replace(",", "")
    return float(plain), len(plain.partition(".")[2])


def _same(stated: str, counted: float) -> bool:
    value, decimals = _digits(stated)
    return abs(counted - value) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def _bits(line: int, match: re.Match[str], artifact: Artifact) -> Statement:
    stated, text = match["number"], match.group().strip()
    counted = list(_rates(artifact))
    hits = [(name, value) for name, value in counted if _same(stated, value)]
    value, _ = _digits(stated)
    name, near = (hits or sorted(counted, key=lambda entry: abs(entry[1] - value)))[0]
    told = f"{near:.5f} {name}"
    if hits:
        status: Status = "agrees" if name == counted[0][0] or "whole" in name else "rounds"
        return Statement(line=line, stated=text, status=status, counted=told)
    return Statement(line=line, stated=text, status="contradicts", counted=told, formula=_formula(stated, artifact))


def _rates(artifact: Artifact) -> Iterator[tuple[str, float]]:
    """Every counted rate: those of whole scopes first, then mean K."""
    for name in ("routed experts", "all quantised", "whole file"):
        if name in artifact.scopes:
            yield f"bits per weight of {name}", artifact.scopes[name].bits_per_weight
    for name, scope in artifact.scopes.items():
        if ", " in name:
            yield f"bits per weight of {name}", scope.bits_per_weight
    for name, scope in artifact.scopes.items():
        if scope.mean_k is not None:
            yield f"mean K of {name}", scope.mean_k


def _formula(stated: str, artifact: Artifact) -> str:
    """A known mistake that gives the stated rate; empty where none does."""
    for formula, value in _mistakes(artifact):
        if _same(stated, value):
            return f"{formula} = {value:.4f}"
    return ""


def _mistakes(artifact: Artifact) -> Iterator[tuple[str, float]]:
    layers = artifact.routed_layers
    if not layers:
        return
    least = layers[0].k + _USUAL_EXTRA
    total = artifact.index_total_bytes
    if total:
        size, stale = artifact.scopes["whole file"].bytes / 1e9, total / 1e9
        yield (
            f"{least:g} x {size:.3f} / {stale:.3f} (the rate of the smaller release, scaled by sizes)",
            (least * size / stale),
        )
    every = sum(layer.all for layer in layers)
    # Layers without routed experts, counted as if they had some, at the lowest rate.
    for dense in sorted({0, max(0, (artifact.decoder_layers or every) - every)}):
        counts = [layer.all for layer in layers]
        counts[0] += dense
        terms = " + ".join(f"{n}*{layer.k + _USUAL_EXTRA:g}" for n, layer in zip(counts, layers, strict=True))
        mean = sum(n * (layer.k + _USUAL_EXTRA) for n, layer in zip(counts, layers, strict=True)) / sum(counts)
        what = f" ({dense} dense layers counted as routed)" if dense else " (layers, not weights)"
        yield f"({terms})/{sum(counts)}{what}", mean


def _size(line: int, match: re.Match[str], artifact: Artifact) -> Statement:
    stated, unit = match["number"], match["unit"]
    sizes = [("of all files", artifact.file_bytes), ("of all tensors", artifact.scopes["whole file"].bytes)]
    sizes += [(f"of {name}", scope.bytes) for name, scope in artifact.scopes.items() if name != "whole file"]
    sizes += [(f"of {name}", size) for name, size in artifact.bytes_by_kind.items()]
    text = match.group().strip()
    for name, size in sizes:
        if _same(stated, size / _UNITS[unit]):
            return Statement(line=line, stated=text, status="agrees", counted=f"{size:,} bytes {name}")
    other = {"GB": "GiB", "GiB": "GB", "MB": "MiB", "MiB": "MB", "TB": "TiB", "TiB": "TB"}.get(unit, unit)
    for name, size in sizes:
        if other != unit and _same(stated, size / _UNITS[other]):
            return Statement(line=line, stated=text, status="rounds", counted=f"{stated} {other} {name}, not {unit}")
    value, _ = _digits(stated)
    name, size = min(sizes, key=lambda entry: abs(entry[1] / _UNITS[unit] - value))
    near = f"{size / _UNITS[unit]:,.3f} {unit} {name}" if unit != "bytes" else f"{size:,} bytes {name}"
    index = artifact.index_total_bytes
    formula = "total_size of a stale index file" if index and _same(stated, index / _UNITS[unit]) else ""
    return Statement(line=line, stated=text, status="contradicts", counted=near, formula=formula)


def _layers(line: int, match: re.Match[str], artifact: Artifact) -> Statement | None:
    """``N of M layers``: held against the layers of each K, main stack and prediction layers."""
    if not artifact.routed_layers:
        return None
    number, whole = int(match["number"]), int(match["whole"])
    main, every = (sum(getattr(layer, part) for layer in artifact.routed_layers) for part in ("main", "all"))
    told = "; ".join(
        f"K={layer.k:g}: {layer.all} of {every} with prediction layers, {layer.main} of {main} in the main stack"
        for layer in artifact.routed_layers
    )
    pairs = {(layer.all, every) for layer in artifact.routed_layers}
    pairs |= {(layer.main, main) for layer in artifact.routed_layers}
    status: Status = "agrees" if (number, whole) in pairs else "contradicts"
    return Statement(line=line, stated=match.group(), status=status, counted=f"layers with routed experts: {told}")
