"""The options of the commands, each declared once: its name, its type and what ``--help`` says of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UsageError
from harness.names import panel_folder, teacher_source, written_folder

#: The panel of the built-in example, and the default.
EXAMPLE_PANEL = Path("panels/example")


def _panel(given: Path | None) -> Path | None:
    return None if given is None else panel_folder(Path(given))


def _teacher(given: str | None) -> str | None:
    return None if given is None else teacher_source(given)


def written(given: Path | list[Path]) -> Path | list[Path]:
    """Callback of arguments that name what an earlier command wrote."""
    for folder in given if isinstance(given, (list, tuple)) else [given]:
        written_folder(Path(folder))
    return given


# What is measured, and on what.

RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
PanelOption = Annotated[Path, typer.Option(help="Panel: a folder, or a shipped one's name.", callback=_panel)]
#: Where a panel is not needed, but says more.
KnownPanelOption = Annotated[
    Path | None,
    typer.Option("--panel", help="Panel folder: its tokens, tokenizer and registration.", callback=_panel),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Folder, GGUF file, Hub id (or id@revision) or package:NAME; the recipe's if left out."),
]
SealOption = Annotated[str | None, typer.Option("--tokenizer", help="Digest of the tokenizer whose seal is meant.")]
ResealOption = Annotated[bool, typer.Option(help="Replace a seal that differs.")]
TeacherOption = Annotated[
    str | None,
    typer.Option(
        help="NAME.toml, a model, or a capture folder; else what the candidate's card says.", callback=_teacher
    ),
]
TeacherArgument = Annotated[
    str, typer.Argument(help="NAME.toml or a model: its weights are needed.", callback=_teacher)
]
RowsOption = Annotated[int | None, typer.Option(help="Only the first so many rows; the result says partial.")]

# How it is computed.

DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
ComputeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
PackedOption = Annotated[bool, typer.Option(help="Decode EXL3 weights at every use: less memory, slower.")]
BudgetOption = Annotated[
    str | None, typer.Option(help="Run layer by layer within so much memory: 4GiB, 500MB, auto; models of any size.")
]

# A model behind a server.

UrlOption = Annotated[str | None, typer.Option(help="Address of the server, such as http://localhost:8000.")]
ServedModelOption = Annotated[str | None, typer.Option(help="Model name on the server, where it has several.")]
KOption = Annotated[int, typer.Option("--k", min=1, help="Top tokens a position to ask a server for.")]
SamplesOption = Annotated[
    int, typer.Option(help="Ids drawn from the teacher's tail, where a server scores ids of our choice.")
]
ConcurrencyOption = Annotated[
    int,
    typer.Option(
        "--concurrency",
        "--num-concurrent",
        min=1,
        help="Requests in flight at a server; more than 1 may move its digits.",
    ),
]

SignOption = Annotated[
    Path | None, typer.Option("--sign", metavar="KEY", help="Sign the receipts with this private SSH key.")
]

# What stands beside it.

FloorOption = Annotated[
    Path | None, typer.Option(help="Run of `fidelity floor`: the teacher against itself, through this engine.")
]
AnchorsOption = Annotated[
    list[Path] | None, typer.Option("--anchor", help="Run folder of `fidelity anchor`; may be repeated.")
]
TailRangeOption = Annotated[
    float | None,
    typer.Option(help="Lower bounds: assume that ln(p/q) varies by at most so much outside the known tokens."),
]
#: For what reads a comparison again.
RunsOption = Annotated[
    list[Path] | None, typer.Option("--run", help="Run folder behind a comparison; may be repeated.")
]
DecodeOption = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Decode the worst positions with this: folder, GGUF, Hub id or package:NAME."),
]

# What comes out.

OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write; default: under reports/.")]
#: Where nothing can be guessed.
IntoOption = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for a script instead of tables.")]


def refuse_ignored(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Refuse options that were typed and that nothing would look at.

    Raises:
        UsageError: it names the first of them, and in which way it is ignored.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"{parameter.opts[0]} would be ignored {why}", f"leave {parameter.opts[0]} out")


def sign_receipts(folder: Path, key: Path | None) -> None:
    """Sign what a command wrote, where a key was given."""
    if key is None:
        return
    from harness.verify.signature import sign

    for name in sign(folder, key.expanduser()):
        typer.echo(f"signed {name}", err=True)
