"""Signatures by the real ssh-keygen, through the command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fault_cases.command import measured
from tests.fault_cases.statements import fidelity

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def make_key(folder: Path, name: str) -> Path:
    key = folder / name
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(key)]
    subprocess.run(command, check=True, capture_output=True)
    return key


def allow(folder: Path, **keys: Path) -> Path:
    file = folder / "signers"
    file.write_text("".join(f"{name} {key.with_suffix('.pub').read_text()}" for name, key in keys.items()))
    return file


def test_a_signature_says_who_wrote_a_receipt(
    tmp_path: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path
) -> None:
    ours, other = make_key(tmp_path, "ours"), make_key(tmp_path, "other")
    measured(tmp_path, exl3_folder, teacher_folder, panel_folder, "run", "--sign", str(ours))
    signers = allow(tmp_path, maker=ours)
    code, said = fidelity(tmp_path, "verify", "run", "--panel", panel_folder, "--signers", signers)
    assert code == 0 and "signed      measurement.json by maker" in said, said
    code, said = fidelity(tmp_path, "verify", "run", "--panel", panel_folder, "--signers", allow(tmp_path, maker=other))
    assert code == 1 and "is signed by nobody in the file of signers" in said
    forged(tmp_path / "run")
    code, said = fidelity(tmp_path, "verify", "run", "--panel", panel_folder, "--signers", allow(tmp_path, maker=ours))
    assert code == 1 and "was changed after maker signed it" in said
    (tmp_path / "run" / "measurement.json.sig").unlink()
    code, said = fidelity(tmp_path, "verify", "run", "--panel", panel_folder, "--signers", signers)
    assert code == 1 and "measurement.json is not signed" in said


def forged(folder: Path) -> None:
    """The name changed and the seal made again, as a forger would."""
    import json

    from harness.store import write_receipt

    document = json.loads((folder / "measurement.json").read_text())
    write_receipt(folder / "measurement.json", document | {"name": "another"})


def test_bad_keys_and_signers_are_one_line(
    tmp_path: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(tmp_path, exl3_folder, teacher_folder, panel_folder, "run")
    again = ["measure", exl3_folder, "--teacher", teacher_folder, "--panel", panel_folder, "--out", "run"]
    (tmp_path / "no-key").write_text("hello")
    for arguments, line in (
        ([*again, "--sign", "gone"], "there is no key gone"),
        ([*again, "--sign", "no-key"], "ssh-keygen did not sign measurement.json"),
        (["verify", "run", "--signers", "gone"], "there is no file gone"),
    ):
        code, said = fidelity(tmp_path, *arguments)
        assert code in (2, 3) and line in said and "repair:" in said and "Traceback" not in said, said
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = fidelity(tmp_path, *again, "--sign", "no-key")
    assert code == 3 and "ssh-keygen is not installed" in said
