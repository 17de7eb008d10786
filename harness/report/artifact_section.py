"""The card's section "Artifact": sizes, bits, layers by K, sources and provenance, from the artifact's receipts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.artifact.equality import Equality
from harness.artifact.provenance import Fact, Provenance
from harness.artifact.summary import Artifact
from harness.errors import UsageError
from harness.records import Sealed, load_json, read_format
from harness.report.table import Table
from harness.store import atomic_path

#: Receipt by its ``format``: its class, and its name beside the card.
RECEIPTS: dict[str, tuple[type[Sealed], str]] = {
    "exl3-fidelity/artifact/1": (Artifact, "artifact.json"),
    "exl3-fidelity/equality/1": (Equality, "equality.json"),
    "exl3-fidelity/provenance/1": (Provenance, "PROVENANCE.json"),
}
_AGAIN = "make it again with `fidelity artifact`"


def copy_artifact_receipts(files: Sequence[Path], home: Path) -> None:
    """Put receipts of the artifact beside the card's others, under the names of their kinds.

    Raises:
        UsageError: a file is none of them.
    """
    for file in files:
        kind = RECEIPTS.get(read_format(file) or "")
        if kind is None:
            raise UsageError(
                f"{file.name} is no receipt of an artifact",
                "name what `fidelity artifact show|equality --out` or `artifact provenance` wrote",
            )
        load_json(file, kind[0], _AGAIN, UsageError)
        if file.resolve() != (home / kind[1]).resolve():
            with atomic_path(home / kind[1]) as temporary:
                shutil.copyfile(file, temporary)


def artifact_section(home: Path) -> dict[str, Any] | None:
    """What the section shows of the receipts in ``home``; None where there is none of what the artifact holds."""
    found = {name: load_json(home / name, kind, _AGAIN) for kind, name in RECEIPTS.values() if (home / name).is_file()}
    held, equal, origin = (found.get(name) for _, name in RECEIPTS.values())
    if not isinstance(held, Artifact):
        return None
    return {
        "scopes": _scopes(held),
        "kinds": _kinds(held),
        "lines": [*_layers(held), *_sources(equal if isinstance(equal, Equality) else None)],
        "provenance": _provenance(origin) if isinstance(origin, Provenance) else None,
        "notes": held.mismatches,
    }


def _scopes(held: Artifact) -> Table:
    rows = [
        (
            name,
            f"{scope.bytes:,}",
            f"{scope.bits_per_weight:.4f}",
            "" if scope.mean_k is None else f"{scope.mean_k:.4f}",
        )
        for name, scope in held.scopes.items()
    ]
    return Table("Counted in the tensors", ("part", "bytes", "bits per weight", "mean K"), rows)


def _kinds(held: Artifact) -> Table:
    whole = held.scopes["whole file"].bytes
    rows = [(name, f"{size:,}", f"{100 * size / whole:.1f} %") for name, size in held.bytes_by_kind.items()]
    return Table("By kind", ("tensors", "bytes", "share"), rows)


def _layers(held: Artifact) -> list[str]:
    lines = [
        f"Routed experts at K={layer.k:g}: {layer.main} layers of the main stack"
        + (f" and {layer.mtp} prediction layers" if layer.mtp else "")
        for layer in held.routed_layers
    ]
    codebooks = ", ".join(f"{name} ({count:,} linears)" for name, count in held.codebooks.items())
    lines.append(f"Codebooks: {codebooks or 'none'}; head: {held.head}")
    if held.ranks > 1:
        lines.append(f"Stored in {held.ranks} tensor-parallel ranks")
    return lines


def _sources(equal: Equality | None) -> list[str]:
    if equal is None:
        return []
    names = "; ".join(
        f"{letter} is {source.name}" + (f" at `{source.commit[:12]}`" if source.commit else "")
        for letter, source in zip("AB", equal.sources, strict=False)
    )
    counts = ", ".join(f"{name} {count:,}" for name, count in equal.counts.items())
    told = (
        "as planned" if equal.plan_sha256 and equal.faithful else "faithful" if equal.faithful else "NOT what they make"
    )
    return [f"Sources: {names}; {equal.looked_at:,} of {equal.tensors:,} tensors compared by bytes: {counts} ({told})"]


def _provenance(origin: Provenance) -> Table:
    facts: list[tuple[str, Fact]] = [(f"base {name}", fact) for name, fact in origin.base.items()]
    facts += [(name, getattr(origin, name)) for name in ("converter", "calibration", "manifest_sha256", "plan_sha256")]
    rows = [(name.replace("_", " "), _shown(fact.value), fact.how, fact.evidence) for name, fact in facts]
    return Table("Provenance", ("field", "value", "how it is known", "evidence"), rows, sides="llll")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    text = "unknown" if value is None else str(value)
    return f"{text[:12]}..." if len(text) == 64 else text
