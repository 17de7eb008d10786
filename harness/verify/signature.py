"""Signatures of receipts by ``ssh-keygen -Y``: who wrote a record, which a seal alone does not say.

A signature lies beside its record (``measurement.json.sig``) and covers every byte of it, the seal included. It is
made with anybody's own SSH key, and checked against a file of allowed signers, as for commits.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness.errors import Refused, UsageError

NAMESPACE = "exl3-fidelity"
#: Records that carry a seal, by file name.
SEALED_FILES = (
    "measurement.json", "comparison.json", "tasks.json", "task-comparison.json", "card.json",
    "artifact.json", "equality.json", "PROVENANCE.json",
)  # fmt: skip
_INSTALL = "install OpenSSH (ssh-keygen 8.2 or later)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What a signature comes to: ``signer`` where it holds, else ``problem``."""

    file: str
    signer: str = ""
    problem: str = ""


def sealed_files(folder: Path) -> list[Path]:
    """Every sealed record in a folder and below it."""
    return sorted(file for name in SEALED_FILES for file in folder.rglob(name))


def sign(folder: Path, key: Path) -> list[str]:
    """Sign every record of a folder with a private key; names of the signatures.

    Raises:
        UsageError: no such key, or nothing to sign.
        Refused: ssh-keygen is missing or does not sign.
    """
    if not key.is_file():
        raise UsageError(f"there is no key {key.name}", "name a private SSH key: --sign ~/.ssh/id_ed25519")
    files = sealed_files(folder)
    if not files:
        raise UsageError(f"{folder.name} holds no receipt", "sign the folder of a run, a comparison or a card")
    made = []
    for file in files:
        target = file.with_name(f"{file.name}.sig")
        target.unlink(missing_ok=True)
        done = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, str(file))
        if done.returncode or not target.is_file():
            raise Refused(f"ssh-keygen did not sign {file.name}: {_first(done)}", "name a private SSH key of yours")
        made.append(target.relative_to(folder).as_posix())
    return made


def check_signatures(folder: Path, signers: Path) -> list[Signed]:
    """Hold every record of a folder against its signature and a file of allowed signers.

    Raises:
        UsageError: no such file.
        Refused: ssh-keygen is missing.
    """
    if not signers.is_file():
        raise UsageError(
            f"there is no file {signers.name}", "a line of it is: name namespaces=... ssh-ed25519 KEY (man ssh-keygen)"
        )
    return [_checked(folder, file, signers) for file in sealed_files(folder)]


def _checked(folder: Path, file: Path, signers: Path) -> Signed:
    name, signature = file.relative_to(folder).as_posix(), file.with_name(f"{file.name}.sig")
    if not signature.is_file():
        return Signed(file=name, problem="is not signed")
    found = _ssh_keygen("find-principals", "-f", str(signers), "-s", str(signature))
    names = found.stdout.decode(errors="replace").split("\n")[0].strip()
    if found.returncode or not names:
        return Signed(file=name, problem="is signed by nobody in the file of signers")
    arguments = ("-f", str(signers), "-I", names, "-n", NAMESPACE, "-s", str(signature))
    if _ssh_keygen("verify", *arguments, content=file.read_bytes()).returncode:
        return Signed(file=name, problem=f"was changed after {names} signed it, or is signed for something else")
    return Signed(file=name, signer=names)


def _ssh_keygen(what: str, *arguments: str, content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise Refused("ssh-keygen is not installed", _INSTALL)
    return subprocess.run([program, "-Y", what, *arguments], input=content or b"", capture_output=True, check=False)


def _first(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().split("\n")
    return lines[0] or f"exit code {done.returncode}"
