"""The card's section "Artifact": from receipts, re-derived by `verify`, counted again from the quant itself."""

from __future__ import annotations

import json
from pathlib import Path

from harness.store import write_receipt
from tests.fault_cases.command import measured
from tests.fault_cases.statements import done, fidelity


def test_a_card_tells_what_the_quant_holds(
    tmp_path: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path
) -> None:
    measured(tmp_path, exl3_folder, teacher_folder, panel_folder, "run")
    done(tmp_path, "artifact", "show", exl3_folder, "--out", "artifact.json")
    done(tmp_path, "artifact", "provenance", exl3_folder, "--out", "PROVENANCE.json", "--run", "run")
    receipts = ["--artifact", "artifact.json", "--artifact", "PROVENANCE.json"]
    done(tmp_path, "card", "run", "--out", "card", "--positions", "--no-pictures", *receipts)
    text = (tmp_path / "card" / "README.md").read_text()
    counted = json.loads((tmp_path / "artifact.json").read_text())
    whole = counted["scopes"]["whole file"]
    assert f"| whole file | {whole['bytes']:,} | {whole['bits_per_weight']:.4f} |" in text
    assert "## Artifact" in text and "Codebooks: mcg (6 linears)" in text and "| converter |" in text
    verify = ["verify", "card", "--panel", panel_folder]
    code, said = fidelity(tmp_path, *verify, "--checkpoint", exl3_folder)
    assert code == 0 and "counted again from" in said, said
    assert "NOT CHECKED artifact.json" in fidelity(tmp_path, *verify)[1]
    changed = counted | {"bytes_by_kind": counted["bytes_by_kind"] | {"mlp, EXL3 K=3": 1}}
    write_receipt(tmp_path / "card" / "fidelity" / "artifact.json", changed)
    code, said = fidelity(tmp_path, *verify, "--checkpoint", exl3_folder)
    assert code == 1 and "artifact.json.bytes_by_kind" in said and "README.md" in said


def test_other_files_are_refused(tmp_path: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    measured(tmp_path, exl3_folder, teacher_folder, panel_folder, "run")
    for name, text in (("a.json", "{}"), ("b.json", "hello"), ("c.json", '{"format": "exl3-fidelity/artifact/1"}')):
        (tmp_path / name).write_text(text)
        code, said = fidelity(tmp_path, "card", "run", "--out", "card", "--no-pictures", "--artifact", name)
        assert code in (2, 3) and "repair:" in said and "Traceback" not in said and "fault of ours" not in said, said
