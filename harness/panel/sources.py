"""The text of a panel's sources, by document, with the digest of every file that it came from."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from harness.errors import PanelError, UsageError
from harness.panel.bounded import bounded, refuse_powers, require_short
from harness.panel.packages import read_package
from harness.panel.recipe import ChatSource, DatasetSource, FileText, PackageSource, PlainText, TextSource
from harness.panel.seal import LockFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One document as text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """The bytes of one source file and the name under which it is recorded."""

    name: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def read_plain(source: TextSource | PackageSource, number: int, folder: Path) -> tuple[list[Text], list[LockFile]]:
    """Documents and digests of a source made of files."""
    texts: list[Text] = []
    locks: list[LockFile] = []
    for file in source_files(source, folder):
        text, normalised = decode(file, source)
        texts += split(file.name, extract(file.name, text, source), source)
        newlines: Literal["lf", "normalised"] = "normalised" if normalised else "lf"
        locks.append(LockFile(source=number, name=file.name, sha256=file.sha256, newlines=newlines))
    return texts, locks


def source_files(source: TextSource | PackageSource | ChatSource, folder: Path) -> Iterator[SourceFile]:
    """All files of a source, each checked against the digest that the recipe pins."""
    if isinstance(source, PackageSource):
        contents = read_package(source)
        for path in source.files:
            yield checked(f"{source.name}/{path}", contents[path], source.files[path])
        return
    pinned: Mapping[str, str | None] = source.files if isinstance(source.files, dict) else dict.fromkeys(source.files)
    for path, sha256 in pinned.items():
        yield checked(path, _local(folder, path), sha256)


def checked(name: str, data: bytes, sha256: str | None) -> SourceFile:
    file = SourceFile(name=name, data=data)
    if sha256 is not None and file.sha256 != sha256:
        hint = " (its line endings were converted to CRLF)" if b"\r\n" in data else ""
        raise PanelError(
            f"{name} has SHA-256 {file.sha256}, the recipe pins {sha256}{hint}",
            "restore the file, or correct the recipe if the change was meant",
        )
    return file


def _local(folder: Path, path: str) -> bytes:
    inside = _inside(folder, path)
    try:
        return inside.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{folder.name}/{path} cannot be read: {error.strerror}", "correct the recipe's files"
        ) from error


def _inside(folder: Path, path: str) -> Path:
    """A path below the panel's folder; refuses one that ``..`` or a link takes out of it."""
    inside = (folder / path).resolve()
    if not inside.is_relative_to(folder.resolve()):
        raise UsageError(f"{path} lies outside of the panel's folder", "put the text into the panel's folder")
    return inside


def decode(file: SourceFile, source: PlainText) -> tuple[str, bool]:
    """UTF-8 text with LF endings, and whether CR LF had to be normalised to get it."""
    try:
        text = file.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PanelError(f"{file.name} is not UTF-8: {error.reason} at byte {error.start}", "convert it") from error
    if text.startswith("\ufeff"):
        raise PanelError(f"{file.name} starts with a byte order mark", "save it without one")
    if "\r" not in text:
        return text, False
    if source.newlines == "reject":
        line = text[: text.index("\r")].count("\n") + 1
        raise PanelError(
            f"{file.name}, line {line}: carriage return (CR LF line endings make other tokens)",
            'convert it to LF, or set newlines = "normalise" in the recipe; the seal records that',
        )
    return text.replace("\r\n", "\n").replace("\r", "\n"), True


def split(name: str, text: str, source: PlainText) -> list[Text]:
    """Cut a text where a line matches ``document_start``; what stands before the first match is a document too."""
    if source.document_start is None:
        return [Text(name=name, text=text)]
    with bounded(name):
        starts = [match.start() for match in re.finditer(source.document_start, text, flags=re.MULTILINE)]
    edges = [0, *(start for start in starts if start > 0), len(text)]
    parts = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    return [Text(name=f"{name}#{index}", text=part) for index, part in enumerate(parts) if part.strip()]


def read_dataset(source: DatasetSource, number: int, folder: Path) -> tuple[list[Text], list[LockFile]]:
    """Documents of a Hugging Face dataset, and the digest of the text that was read."""
    revision = None if source.is_local else _commit(source)
    records = list(_records(source, folder, revision))
    name = "/".join(part for part in (source.name, source.config, source.split) if part)
    digest = hashlib.sha256()
    for record in records:
        data = record.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    lock = LockFile(source=number, name=name, sha256=digest.hexdigest(), revision=revision)
    return _documents(name, records, source), [lock]


def _documents(name: str, records: Sequence[str], source: DatasetSource) -> list[Text]:
    if source.join is not None:
        return split(name, source.join.join(records), source)
    return [part for index, record in enumerate(records) for part in split(f"{name}#{index}", record, source)]


def _commit(source: DatasetSource) -> str:
    """The commit that the recipe's revision is now."""
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.name, revision=source.revision).sha
    except Exception as error:  # any client, HTTP or offline error: the message is what the user needs
        raise _unreachable(source, error) from error
    if commit is None:
        raise UsageError(f"data set {source.name} has no revision {source.revision}", "correct the recipe")
    return commit


def _records(source: DatasetSource, folder: Path, revision: str | None) -> Iterable[str]:
    """The text field of each record that is read, in the data set's own order."""
    import datasets

    name = str(_inside(folder, source.name)) if source.is_local else source.name
    try:
        table = datasets.load_dataset(
            name, source.config, split=source.split, revision=revision, streaming=source.records is not None
        )
        for index, record in enumerate(table):
            if index == source.records:
                return
            yield _field(record, source, index)
    except UsageError:
        raise
    except Exception as error:
        raise _unreachable(source, error) from error


def _field(record: dict[str, Any], source: DatasetSource, index: int) -> str:
    value = record.get(source.field)
    if not isinstance(value, str):
        raise UsageError(
            f"record {index} of {source.name} has no text field {source.field} (it has {', '.join(record)})",
            "correct the recipe's field",
        )
    return value


def _unreachable(source: DatasetSource, error: Exception) -> UsageError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UsageError(
        f"data set {source.name} could not be read: {first}",
        "check name, config, split and revision, and the network; a panel from packages needs no Hub",
    )


# Readable text out of files that are not plain text: documentation in Python source, records in YAML or JSON.

#: String literals from this many characters on count as documentation.
LONG = 200


class RecordLoader(yaml.SafeLoader):
    """YAML in which unknown tags, such as lm-eval's ``!function``, stand for nothing."""


RecordLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def extract(name: str, text: str, source: FileText) -> str:
    """The text that a source takes out of one file."""
    if source.extract == "documentation":
        return documentation(name, text)
    if source.extract == "records":
        return records(name, text, source)
    return text


def documentation(name: str, text: str) -> str:
    """The long string literals of Python source in order, dedented and joined by blank lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # other people's escapes such as "\\d"
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise PanelError(f"{name} is not Python source: {error}", 'set extract = "text"') from error
    strings = sorted(_long_strings(tree), key=lambda node: (node.lineno, node.col_offset))
    return "\n\n".join(inspect.cleandoc(str(node.value)) for node in strings) + "\n"


def _long_strings(node: ast.AST) -> Iterator[ast.Constant]:
    """Long string constants below ``node``; pieces of f-strings differ between Python versions and are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and len(child.value) >= LONG:
            yield child
        elif not isinstance(child, ast.JoinedStr):
            yield from _long_strings(child)


def records(name: str, text: str, source: FileText) -> str:
    """``source.template`` rendered for each record (its keys, and itself as ``record``), joined by blank lines."""
    try:
        with bounded(name):
            value: Any = yaml.load(text, Loader=RecordLoader)
        for key in source.records.split(".") if source.records else ():
            value = value[key]
    except (yaml.YAMLError, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise PanelError(f"{name} has no records at {source.records}: {problem}", "correct the recipe") from error
    refuse_powers(name, source.template or "")
    found = value if isinstance(value, list) else [value]
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
    try:
        with bounded(name):
            template = environment.from_string(source.template or "")
            rendered = [require_short(name, template.render(record, record=record).strip()) for record in found]
        return require_short(name, "\n\n".join(rendered) + "\n")
    except (TemplateError, ArithmeticError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise PanelError(f"{name}: the recipe's template does not fit: {error}", "correct the recipe") from error
