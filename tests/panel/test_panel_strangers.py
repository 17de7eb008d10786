"""A stranger's panel: its templates, patterns, archives and names run nothing and reach nothing."""

from __future__ import annotations

import hashlib
import io
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.errors import PanelError, UsageError
from harness.panel import bounded, packages
from harness.panel.recipe import PackageSource, TextSource
from harness.panel.sources import read_plain, records, split

SHA = hashlib.sha256(b"text").hexdigest()


def source(**fields: object) -> TextSource:
    given = {"kind": "text", "domain": "d", "rows": 1, "license": "MIT", "files": ["a.txt"], **fields}
    return TextSource.model_validate(given)


def package(**fields: object) -> PackageSource:
    given = {
        "kind": "package",
        "domain": "d",
        "rows": 1,
        "license": "MIT",
        "name": "thing",
        "version": "1.0",
        "archive": "thing-1.0.tar.gz",
        "archive_sha256": "a" * 64,
        "files": {"thing/a.txt": SHA},
        **fields,
    }
    return PackageSource.model_validate(given)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes over"),
        ("{{ 'x' * 9000000000 }}", "takes over"),
        ("{{ 'x' * 40000000 }}", "characters"),
        ("{{ 2 ** 999999999 }}", "power"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not fit"),
        ("{{ 1 / 0 }}", "does not fit"),
        ("{{ record.pop('a') }}", "does not fit"),
    ],
)
def test_a_template_is_bounded(template: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 1.0)
    start = time.monotonic()
    with pytest.raises(PanelError, match=words):
        records("a.yaml", "a: 1", source(extract="records", template=template))
    assert time.monotonic() - start < 8


def test_a_pattern_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", 1.0)
    with pytest.raises(PanelError, match="takes over"):
        split("a.txt", "a" * 40 + "!", source(document_start=r"(a+)+$"))


def test_honest_templates_and_patterns_stay(tmp_path: Path) -> None:
    """Bold text in a template is text, no power."""
    made = records("a.yaml", "- {a: 1}\n- {a: 2}", source(extract="records", template="**{{ a }}**"))
    assert made == "**1**\n\n**2**\n"
    (tmp_path / "a.txt").write_text("# one\ntext\n# two\ntext\n")
    assert len(read_plain(source(document_start="^# "), 0, tmp_path)[0]) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "thing @ git+https://example.org/x"},
        {"name": "--index-url=https://example.org"},
        {"name": "thing\n--index-url https://example.org"},
        {"name": "thing\n"},
        {"name": "../thing"},
        {"version": "1.0 --pre"},
        {"version": "1.0\n"},
        {"archive": "../../thing.whl"},
        {"archive": "-thing.whl"},
        {"files": {"../thing": SHA}},
        {"files": {"/etc/passwd": SHA}},
    ],
)
def test_names_are_names(fields: dict[str, object]) -> None:
    """Nothing that a client of a registry reads as an option or another place, nothing outside the cache."""
    with pytest.raises(ValidationError):
        package(**fields)


def test_scopes_and_epochs_are_names_too() -> None:
    assert package(name="@types/node", index="npm").name == "@types/node"
    assert package(version="1:2.3~rc1-4+b1", index="debian").version == "1:2.3~rc1-4+b1"


def test_sources_are_never_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packages.subprocess, "run", lambda *a, **k: pytest.fail("a client was run"))
    with pytest.raises(UsageError, match="no wheel, and pip runs code"):
        packages.read_package(package())


def tarred(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    file = folder / "thing-1.0.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file


def test_a_link_in_an_archive_is_no_file(tmp_path: Path) -> None:
    link = tarfile.TarInfo("thing/a.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(PanelError, match="lacks a file"):
        packages._from_archive(tarred(tmp_path, (link, b"")), package())
    plain = tarfile.TarInfo("thing/a.txt")
    assert packages._from_archive(tarred(tmp_path, (plain, b"text")), package()) == {"thing/a.txt": b"text"}


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LARGEST", 1000)
    file = tmp_path / "thing.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("thing/a.txt", b"0" * 100_000)
    with pytest.raises(PanelError, match="unpacks to 100,000 bytes"):
        packages._from_archive(file, package())


def test_a_broken_archive_is_one_line(tmp_path: Path) -> None:
    for name in ("thing.whl", "thing-1.0.tar.gz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(PanelError, match="cannot be unpacked"):
            packages._from_archive(tmp_path / name, package())
