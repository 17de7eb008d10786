"""manifest.json: what a capture is, row by row, and the digest by which measurements name it.

It is written last. A row file repeats the capture's key in its own metadata, so a folder without a manifest
(a run that was stopped) still knows what it holds.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from harness.digest import json_digest
from harness.errors import CaptureError
from harness.records import Strict, first_problem
from harness.store import write_json
from harness.types import EngineIdentity

FORMAT = "exl3-fidelity/capture/1"
MANIFEST = "manifest.json"

#: What a model is called: notes, no part of its identity. The same bytes elsewhere are the same teacher.
LABELS = ("model", "revision")

Form = Literal["hidden", "logits"]
DtypeName = Literal["bfloat16", "float16", "float32"]
CutPoint = Literal[
    "after_final_norm_before_lm_head",  # hidden states that go straight into the head
    "lm_head_output_minus_row_max",  # logits, shifted so that the largest is 0
]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
DTYPE_NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


class CaptureKey(Strict):
    """What every row of one capture shares; two captures with one key are the same work.

    ``norm_sha256`` is null: hidden states are captured past the final norm. It keeps its place in the format, so that
    captures keep their digests.
    """

    form: Form
    dtype: DtypeName
    cut_point: CutPoint
    head_sha256: str | None
    norm_sha256: None = None
    panel_sha256: str
    identity: EngineIdentity

    def flat(self) -> dict[str, Any]:
        """One level of names, for comparisons and messages: ``identity.model`` and so on."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "identity"}
        for name, value in asdict(self.identity).items():
            if name == "settings":
                values.update({f"identity.settings.{k}": v for k, v in sorted(value.items())})
            else:
                values[f"identity.{name}"] = value
        return values

    def content(self) -> dict[str, Any]:
        """The key without the names that its teacher goes by."""
        named = self.model_dump()
        return named | {"identity": {k: v for k, v in named["identity"].items() if k not in LABELS}}


def differences(stored: CaptureKey, wanted: CaptureKey) -> list[str]:
    """``name: stored value, not wanted value`` for each field that differs."""
    left, right = stored.flat(), wanted.flat()
    names = [*left, *(name for name in right if name not in left)]
    return [f"{n}: {left.get(n)}, not {right.get(n)}" for n in names if left.get(n) != right.get(n)]


class RowEntry(Strict):
    """One row file: digests of the token ids, of the captured array alone, and of the whole file."""

    row: int
    file: str
    positions: int
    document: str
    domain: str
    ids_sha256: str
    states_sha256: str
    file_sha256: str


class Manifest(Strict):
    """``sha256`` covers the key and each row's ids and captured array: not places, names of files or BLAS digits."""

    format: Literal["exl3-fidelity/capture/1"] = "exl3-fidelity/capture/1"
    sha256: str
    key: CaptureKey
    panel_name: str
    width: int
    rows_planned: int
    rows_present: int
    positions_planned: int
    positions_present: int
    rows: list[RowEntry]


def capture_digest(key: CaptureKey, rows: list[RowEntry]) -> str:
    """Digest of a capture's content, the same wherever it lies."""
    content = [[entry.row, entry.ids_sha256, entry.states_sha256] for entry in rows]
    return json_digest({"key": key.content(), "rows": content})


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, the last file of a capture."""
    write_json(folder / MANIFEST, manifest.model_dump())


def load_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json.

    Raises:
        CaptureError: absent, unreadable, of another format, without a cut point, or edited by hand.
    """
    try:
        document = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError as error:
        rows = len(list(folder.glob("row-*.parquet")))
        what = f"{folder.name} holds {rows} row files and no {MANIFEST}: its capture did not end"
        raise CaptureError(what, "run `fidelity teacher capture` again: it goes on at the first missing row") from error
    except ValueError as error:
        raise CaptureError(f"{folder.name}/{MANIFEST} is not JSON: {error}", _AGAIN) from error
    _require_cut_point(folder, document)
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        raise CaptureError(f"{folder.name}/{MANIFEST}: {first_problem(error)}", _AGAIN) from error
    if manifest.sha256 != capture_digest(manifest.key, manifest.rows):
        raise CaptureError(f"{folder.name}/{MANIFEST} was edited: its sha256 does not fit its rows", _AGAIN)
    return manifest


_AGAIN = f"delete {MANIFEST} and run `fidelity teacher capture` again: whole row files are kept"


def _require_cut_point(folder: Path, document: Any) -> None:
    """Hidden states are unusable when nobody says whether the final norm was applied: never guess."""
    key = document.get("key") if isinstance(document, dict) else None
    if not isinstance(key, dict) or not key.get("cut_point"):
        raise CaptureError(
            f"{folder.name}/{MANIFEST} does not say where the hidden states were cut (before or after the final norm)",
            "capture the teacher again, or have its publisher declare `cut_point`",
        )
