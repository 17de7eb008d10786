"""Where text comes from: local files, packages, data sets; and what is taken out of files that are not plain text."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.errors import PanelError, UsageError
from harness.panel import build_panel
from harness.panel.packages import cache_folder, fetch, read_package
from harness.panel.recipe import DatasetSource, PackageSource, TextSource
from harness.panel.sources import extract, read_dataset, split
from tests.panel.made_panels import make_panel, words

COMMON = {"domain": "a", "rows": 1, "license": "none"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def text_source(**keys: Any) -> TextSource:
    return TextSource.model_validate({"kind": "text", "files": ["f"], **COMMON, **keys})


# --- local files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe not text", r"0\.txt is not UTF-8: invalid start byte at byte 0"),
        ("\ufeff".encode() + b"text", r"0\.txt starts with a byte order mark"),
        (b"one\ntwo\r\n", r"0\.txt, line 2: carriage return"),
    ],
)
def test_bytes_that_are_no_clean_text(tmp_path: Path, tokenizer_folder: Path, data: bytes, message: str) -> None:
    panel = make_panel(tmp_path / "p", files={"0.txt": data}, tokenizer=str(tokenizer_folder))
    with pytest.raises(PanelError, match=message):
        build_panel(panel)


def file_panel(folder: Path, files: str, tokenizer: Path) -> Path:
    body = f'[[sources]]\nkind = "text"\ndomain = "a"\nrows = 1\nlicense = "none"\nfiles = {files}\n'
    return make_panel(folder, files={"0.txt": words(60, 0)}, body=body, tokenizer=str(tokenizer))


def test_a_pinned_file_must_be_that_file(tmp_path: Path, tokenizer_folder: Path) -> None:
    right = sha256(words(60, 0).encode())
    assert build_panel(file_panel(tmp_path / "p", f'{{ "0.txt" = "{right}" }}', tokenizer_folder)).rows
    with pytest.raises(PanelError, match=rf"0\.txt has SHA-256 {right}, the recipe pins 0{{64}}"):
        build_panel(file_panel(tmp_path / "q", f'{{ "0.txt" = "{"0" * 64}" }}', tokenizer_folder))


@pytest.mark.parametrize(("path", "message"), [("../p2.txt", "outside of the panel"), ("1.txt", "cannot be read")])
def test_files_that_are_not_there(tmp_path: Path, tokenizer_folder: Path, path: str, message: str) -> None:
    (tmp_path / "p2.txt").write_text(words(60, 0))
    with pytest.raises(UsageError, match=message):
        build_panel(file_panel(tmp_path / "p", f'["{path}"]', tokenizer_folder))


def test_split_where_a_document_starts() -> None:
    text = " \n = One = \n\ntext\n = = Part = = \nmore\n = Two = \nlast\n"
    parts = split("w", text, text_source(document_start=r"^ = [^=\n]+ = ?$"))
    assert [(part.name, part.text) for part in parts] == [
        ("w#1", " = One = \n\ntext\n = = Part = = \nmore\n"),
        ("w#2", " = Two = \nlast\n"),
    ]


def test_excluded_documents_must_exist(tmp_path: Path, tokenizer_folder: Path) -> None:
    panel = file_panel(tmp_path / "p", '["0.txt"]\nexclude = ["1.txt"]', tokenizer_folder)
    with pytest.raises(PanelError, match=r"excludes documents it does not have: \['1.txt'\]"):
        build_panel(panel)


# --- extraction ------------------------------------------------------------------------------------------------------


def test_documentation_of_python_source() -> None:
    module, function = "A module. " * 25 + "End.", "A function. " * 25 + "End."
    code = f'"""{module}"""\nx = "short"\ny = f"{{x}} {"z" * 300}"\ndef f():\n    """{function}\n\n    More.\n    """\n'
    text = extract("m.py", code, text_source(extract="documentation"))
    assert text == f"{module}\n\n{function}\n\nMore.\n"
    with pytest.raises(PanelError, match="is not Python source"):
        extract("m.py", "def", text_source(extract="documentation"))


def test_records_of_yaml() -> None:
    yaml = 'a: !function x.y\nb:\n  c:\n  - {q: "One?", w: 1}\n  - {q: "Two?", w: 2}\n'
    source = text_source(extract="records", records="b.c", template="Q: {{ q }}\nA: {{ w }}\n")
    assert extract("f.yaml", yaml, source) == "Q: One?\nA: 1\n\nQ: Two?\nA: 2\n"
    with pytest.raises(PanelError, match="has no records at b.d"):
        extract("f.yaml", yaml, source.model_copy(update={"records": "b.d"}))
    with pytest.raises(PanelError, match="has no records") as caught:
        extract("f.yaml", "b: {c: [}", source)
    assert "\n" not in caught.value.what
    with pytest.raises(PanelError, match="template does not fit: 'z' is undefined"):
        extract("f.yaml", yaml, source.model_copy(update={"template": "{{ z }}"}))


# --- packages --------------------------------------------------------------------------------------------------------


def package(**keys: Any) -> PackageSource:
    return PackageSource.model_validate({"kind": "package", "name": "tiny-text", "version": "1.0", **COMMON, **keys})


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A real, tiny wheel with one text file."""
    file = tmp_path / "index" / "tiny_text-1.0-py3-none-any.whl"
    file.parent.mkdir()
    info = "tiny_text-1.0.dist-info"
    members = {
        "tiny_text/t.txt": words(60, 0),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny-text\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"tiny_text/t.txt,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file


@pytest.fixture
def offline_index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip sees the folder of the wheel and nothing else; the package cache is empty."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheel


def wheel_source(wheel: Path, **keys: Any) -> PackageSource:
    pinned = {"archive": wheel.name, "archive_sha256": sha256(wheel.read_bytes())}
    return package(files={"tiny_text/t.txt": sha256(words(60, 0).encode())}, **{**pinned, **keys})


def test_installed_files_are_taken_without_any_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    distribution = importlib.metadata.distribution("numpy")
    data = Path(str(distribution.locate_file("numpy/__init__.py"))).read_bytes()
    version = distribution.version
    monkeypatch.setattr(subprocess, "run", None)
    source = package(name="numpy", version=version, files={"numpy/__init__.py": sha256(data)})
    assert read_package(source) == {"numpy/__init__.py": data}


@pytest.mark.parametrize("keys", [{"version": "0.0.1"}, {"name": "surely-not-installed"}, {}])
def test_another_version_or_other_bytes_need_an_archive(keys: dict[str, str]) -> None:
    version = importlib.metadata.version("numpy")
    source = package(**{"name": "numpy", "version": version, "files": {"numpy/__init__.py": "0" * 64}, **keys})
    with pytest.raises(UsageError, match="is not installed with the files that the panel pins") as caught:
        read_package(source)
    assert caught.value.repair == f"pip install --no-deps {source.name}=={source.version}"


def test_a_wheel_is_fetched_by_hash_once(offline_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = wheel_source(offline_index)
    assert read_package(source) == {"tiny_text/t.txt": words(60, 0).encode()}
    monkeypatch.setattr(subprocess, "run", None)
    assert read_package(source) == {"tiny_text/t.txt": words(60, 0).encode()}, "the second time from the cache"


def test_fault_b40_a_damaged_archive_is_fetched_again(offline_index: Path) -> None:
    """A file with the right name and wrong bytes is never used."""
    source = wheel_source(offline_index)
    kept = cache_folder() / str(source.archive_sha256) / offline_index.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half a file")
    assert read_package(source) == {"tiny_text/t.txt": words(60, 0).encode()}
    assert kept.read_bytes() == offline_index.read_bytes()


def test_an_archive_with_other_bytes_is_refused(offline_index: Path) -> None:
    with pytest.raises(UsageError, match=r"tiny_text-1\.0-py3-none-any\.whl could not be fetched"):
        fetch(wheel_source(offline_index, archive_sha256="0" * 64))
    assert not list(cache_folder().rglob("*.whl"))


def test_an_archive_must_hold_the_files(offline_index: Path) -> None:
    source = wheel_source(offline_index).model_copy(update={"files": {"tiny_text/u.txt": "0" * 64}})
    with pytest.raises(PanelError, match="lacks a file"):
        read_package(source)


def in_cache(source: PackageSource, data: bytes) -> None:
    kept = cache_folder() / str(source.archive_sha256) / str(source.archive)
    kept.parent.mkdir(parents=True)
    kept.write_bytes(data)


def test_npm_tarballs_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo("package/t.txt")
        member.size = 5
        tar.addfile(member, BytesIO(b"hello"))
    data = buffer.getvalue()
    files = {"package/t.txt": sha256(b"hello")}
    source = package(index="npm", archive="tiny-1.0.tgz", archive_sha256=sha256(data), files=files)
    in_cache(source, data)
    assert read_package(source) == {"package/t.txt": b"hello"}


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg-deb")
def test_debian_packages_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    control = "Package: tiny-text\nVersion: 1.0\nArchitecture: all\nMaintainer: T <t@example.org>\nDescription: text\n"
    (root / "DEBIAN/control").write_text(control)
    (root / "usr/share/tiny").mkdir(parents=True)
    (root / "usr/share/tiny/t.txt").write_text("hello")
    built = tmp_path / "tiny-text_1.0_all.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", str(root), str(built)], check=True, capture_output=True
    )
    data = built.read_bytes()
    files = {"usr/share/tiny/t.txt": sha256(b"hello")}
    source = package(index="debian", archive=built.name, archive_sha256=sha256(data), files=files)
    in_cache(source, data)
    assert read_package(source) == {"usr/share/tiny/t.txt": b"hello"}


def test_no_client_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    files = {"t.txt": "0" * 64}
    with pytest.raises(UsageError, match=r"tiny\.tgz could not be fetched") as caught:
        fetch(package(index="npm", archive="tiny.tgz", archive_sha256="0" * 64, files=files))
    assert caught.value.repair == "install npm"


# --- data sets -------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A panel folder with a local Parquet data set of four records."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "p" / "data").mkdir(parents=True)
    records = {"text": [" = One = \n", words(60, 0), " = Two = \n", words(60, 1)], "number": [1, 2, 3, 4]}
    pq.write_table(pa.table(records), tmp_path / "p" / "data" / "train-00000-of-00001.parquet")
    return tmp_path / "p"


def dataset(**keys: Any) -> DatasetSource:
    return DatasetSource.model_validate({"kind": "dataset", "name": "./data", "split": "train", **COMMON, **keys})


def test_dataset_records_are_documents(dataset_folder: Path) -> None:
    texts, locks = read_dataset(dataset(), 3, dataset_folder)
    assert [text.name for text in texts] == [f"./data/train#{i}" for i in range(4)]
    assert texts[1].text == words(60, 0)
    assert (locks[0].source, locks[0].name, locks[0].revision) == (3, "./data/train", None)


def test_dataset_joined_and_split_again(dataset_folder: Path) -> None:
    texts, _ = read_dataset(dataset(join="", document_start=r"^ = [^=\n]+ = ?$"), 0, dataset_folder)
    assert [text.text for text in texts] == [" = One = \n" + words(60, 0), " = Two = \n" + words(60, 1)]


def test_dataset_reads_no_more_records_than_asked(dataset_folder: Path) -> None:
    texts, first = read_dataset(dataset(records=2), 0, dataset_folder)
    assert [text.text for text in texts] == [" = One = \n", words(60, 0)]
    _, all_records = read_dataset(dataset(), 0, dataset_folder)
    assert first[0].sha256 != all_records[0].sha256


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"field": "body"}, r"record 0 of ./data has no text field body \(it has text, number\)"),
        ({"field": "number"}, "has no text field number"),
        ({"split": "test"}, "could not be read"),
        ({"name": "./nothing"}, "could not be read"),
    ],
)
def test_dataset_that_cannot_be_read(dataset_folder: Path, keys: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_dataset(dataset(**keys), 0, dataset_folder)


def test_dataset_panel_from_end_to_end(dataset_folder: Path, tokenizer_folder: Path) -> None:
    body = '[[sources]]\nkind = "dataset"\ndomain = "a"\nrows = 2\nlicense = "none"\nname = "./data"\nsplit = "train"\n'
    panel = build_panel(make_panel(dataset_folder, files={}, body=body, rows=2, tokenizer=str(tokenizer_folder)))
    assert {row.document for row in panel.rows} == {"./data/train#1", "./data/train#3"}
    counts = json.loads((dataset_folder / "panel.lock.json").read_text())["counts"]
    assert (counts["read"], counts["short"]) == (4, 2)


def test_hub_dataset_without_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no network here")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    source = dataset(name="org/set", revision="main")
    with pytest.raises(UsageError, match="data set org/set could not be read") as caught:
        read_dataset(source, 0, tmp_path)
    assert "network" in caught.value.repair
    assert "\n" not in caught.value.what
