"""PROVENANCE.json: where an artifact comes from, each field with how it is known and from what.

``stated`` was written by somebody and is repeated, ``counted`` follows from the files, ``verified`` was held against
its source by another receipt. A table of licences is a table, no legal advice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from harness.artifact.equality import Equality
from harness.artifact.manifest import JSON, TEXT
from harness.artifact.sources import Folder
from harness.artifact.summary import Artifact, summarise
from harness.exl3.files import read_json
from harness.measure.receipt import load_measurement
from harness.records import Sealed, Strict, load_json

FORMAT: Literal["exl3-fidelity/provenance/1"] = "exl3-fidelity/provenance/1"
FILE = "PROVENANCE.json"
How = Literal["stated", "counted", "verified", "unknown"]


class Fact(Strict):
    """A value, how it is known, and the evidence."""

    value: JsonValue
    how: How
    evidence: str


class Provenance(Sealed):
    """The receipt ``PROVENANCE.json``."""

    format: Literal["exl3-fidelity/provenance/1"] = FORMAT
    base: dict[str, Fact]
    sources: list[Fact]
    plan_sha256: Fact
    converter: Fact
    calibration: Fact
    codebooks: Fact
    bits: Fact
    manifest_sha256: Fact
    equality: Fact
    measurements: list[Fact]
    license_lines: list[Fact]


_UNKNOWN = "nothing here says"


def derive(
    folder: Folder, card: Mapping[str, Any], *, equality: Path | None = None, runs: Sequence[Path] = ()
) -> Provenance:
    """Everything that can be said of where a folder comes from.

    Args:
        card: the front matter of its README, empty where there is none.
        equality: receipt of `fidelity artifact equality`.
        runs: run folders of measurements of it.
    """
    counted = summarise(folder)
    found = None if equality is None else load_json(equality, Equality, "make it with `fidelity artifact equality`")
    return Provenance(
        base=_base(card),
        sources=_sources(found),
        plan_sha256=_fact(None if found is None else found.plan_sha256, "verified", "the equality receipt"),
        converter=_converter(folder),
        calibration=_calibration(folder),
        codebooks=Fact(value=dict(counted.codebooks), how="counted", evidence="the markers in the shard headers"),
        bits=Fact(value=_rates(counted), how="counted", evidence="the shard headers"),
        manifest_sha256=_manifest(folder),
        equality=_fact(None if found is None else found.seal, "verified", "the seal of the equality receipt"),
        measurements=[_measured(run) for run in runs],
        license_lines=_licences(folder, card),
    )


def _fact(value: JsonValue, how: How, evidence: str) -> Fact:
    if value in (None, ""):
        return Fact(value=None, how="unknown", evidence=_UNKNOWN)
    return Fact(value=value, how=how, evidence=evidence)


def _base(card: Mapping[str, Any]) -> dict[str, Fact]:
    base = card.get("base_model")
    name = base[0] if isinstance(base, list) and base else base
    return {
        "repo": _fact(name if isinstance(name, str) else None, "stated", "base_model of README.md"),
        "relation": _fact(_text(card.get("base_model_relation")), "stated", "base_model_relation of README.md"),
        "license": _fact(_text(card.get("license")), "stated", "license of README.md"),
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _sources(found: Equality | None) -> list[Fact]:
    if found is None:
        return []
    facts = []
    for letter, source in zip("AB", found.sources, strict=False):
        tensors = found.counts.get(letter, 0) + found.counts.get("both", 0)
        value: JsonValue = {"name": source.name, "commit": source.commit, "tensors": tensors}
        facts.append(Fact(value=value, how="verified", evidence=f"{found.looked_at:,} tensors compared by their bytes"))
    return facts


def _converter(folder: Folder) -> Fact:
    block = _block(folder)
    version = block.get("version")
    return _fact(_text(version), "stated", "quantization_config.version of config.json")


def _calibration(folder: Folder) -> Fact:
    value = _block(folder).get("calibration")
    return _fact(value if isinstance(value, dict) else None, "stated", "quantization_config.calibration of config.json")


def _block(folder: Folder) -> dict[str, Any]:
    config = read_json(folder.path / "config.json")
    for holder in (config, config.get("text_config")):
        if isinstance(holder, dict) and isinstance(holder.get("quantization_config"), dict):
            return holder["quantization_config"]
    return {}


def _rates(counted: Artifact) -> JsonValue:
    return {name: round(scope.bits_per_weight, 5) for name, scope in counted.scopes.items()}


def _manifest(folder: Folder) -> Fact:
    for name in (JSON, TEXT):
        if name in folder.files:
            content = folder.read(name, 0, folder.files[name].bytes)
            return Fact(value=hashlib.sha256(content).hexdigest(), how="counted", evidence=name)
    return _fact(None, "unknown", "")


def _measured(run: Path) -> Fact:
    measurement = load_measurement(run)
    value: JsonValue = {"name": measurement.name, "key": measurement.key}
    return Fact(value=value, how="verified", evidence=f"the seal of its measurement.json on {measurement.panel.name}")


def _licences(folder: Folder, card: Mapping[str, Any]) -> list[Fact]:
    files = sorted(path for path in folder.files if path.upper().startswith(("LICENSE", "NOTICE")))
    return [
        _fact(_text(card.get("license")), "stated", "license of README.md"),
        _fact(_text(card.get("license_name")), "stated", "license_name of README.md"),
        Fact(
            value=list(files),
            how="counted" if files else "unknown",
            evidence="files of the artifact" if files else _UNKNOWN,
        ),
    ]


def differences(stored: Provenance, now: Provenance) -> list[str]:
    """Fields in which a stored record differs from what is derived now."""
    was, found = (record.model_dump(mode="json", exclude={"seal"}) for record in (stored, now))
    return [f"{name}: stated {was[name]}, derived {found[name]}" for name in was if was[name] != found[name]]
