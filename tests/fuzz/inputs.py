"""Small real inputs and what is done to them: one file of a folder is changed, everything else stays."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import tiny
from tests.fault_cases.statements import fidelity

#: Values that a field of a record is replaced with.
VALUES: tuple[Any, ...] = (
    None, -1, 0, 1e308, 2**70, "", "x", [], {}, True, "nan", "../../../etc/passwd", "\x1b[31mred\x1b[0m", "\u202e",
    "0" * 9999, [[]], {"a": None}, "lots", -0.5, "\ud7ff",
)  # fmt: skip


Change = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Kind:
    """Files that are changed, by pattern below the base folder, and the commands that then read them."""

    name: str
    files: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    sealed: bool = False


MEASURE = ("measure", "cand", "--teacher", "teacher", "--panel", "panel", "--rows", "1", "--out", "again")
CAPTURED = ("measure", "cand", "--teacher", "captures/made", "--panel", "panel", "--rows", "1", "--out", "again")
COMPARE = ("compare", "other", "run", "--out", "c")
VERIFY_BOTH = ("verify", "comparison", "--run", "run", "--run", "other")
CAPTURE = ("teacher", "capture", "teacher.toml", "--panel", "panel", "--rows", "1")
CARD = ("card", "run", "--out", "card", "--no-pictures")
TASKS = ("tasks", "cand", "--suite", "suite.toml", "--data", "panel")
KINDS = (
    Kind(
        "checkpoint headers",
        ("cand/*.safetensors", "cand/*.json"),
        (("exl3", "inspect", "cand"), ("artifact", "show", "cand")),
    ),
    Kind("checkpoint, measured", ("cand/*.safetensors", "cand/config.json", "cand/tokenizer*.json"), (MEASURE,)),
    Kind(
        "panels",
        ("panel/panel.toml", "panel/*.json", "panel/*.parquet"),
        (("panel", "verify", "panel"), ("panel", "show", "panel")),
    ),
    Kind("recipes", ("panel/panel.toml", "panel/text/*"), (("panel", "build", "panel", "--reseal"),)),
    Kind("captures", ("captures/*/*.json", "captures/*/*.parquet", "captures/heads/*"), (CAPTURED,)),
    Kind("receipts", ("run/measurement.json",), (("verify", "run", "--panel", "panel"),), sealed=True),
    Kind("receipts, compared", ("run/measurement.json",), (COMPARE,)),
    Kind("run.json", ("run/run.json",), (COMPARE, ("report", "run"))),
    Kind("positions", ("run/positions.parquet",), (("verify", "run"), COMPARE)),
    Kind("comparisons", ("comparison/comparison.json",), (VERIFY_BOTH,), sealed=True),
    Kind("cards", ("card/fidelity/card.json", "card/fidelity/*/measurement.json"), (("verify", "card"),), sealed=True),
    Kind("front matter", ("card/README.md",), (CARD,)),
    Kind("reports", ("run/measurement.json", "run/positions.parquet"), (("report", "run"),)),
    Kind("manifests", ("cand/sha256-manifest.txt", "cand/EXL3_MANIFEST.json"), (("artifact", "manifest", "cand"),)),
    Kind("teachers", ("teacher.toml", "teacher/*.json"), (CAPTURE,)),
    Kind("suites", ("suite.toml",), (TASKS,)),
)


def make_base(folder: Path) -> Path:
    """Everything that is changed later: models, panel, capture, two runs, a comparison, a card."""
    base = folder / "base"
    (base / "teacher").mkdir(parents=True)
    tiny.save_llama(base / "teacher")
    (base / "panel").mkdir()
    tiny.write_panel(base / "panel", base / "teacher", rows=4, length=48)
    done(base, "panel", "build", "panel")
    done(base, "exl3", "quantize", "teacher", "cand", "--bits", "3", "--modules", "mlp")
    done(base, "exl3", "quantize", "teacher", "cand4", "--bits", "4", "--modules", "mlp")
    for out, candidate in (("run", "cand"), ("other", "cand4")):
        done(base, "measure", candidate, "--teacher", "teacher", "--panel", "panel", "--out", out)
    captures = shutil.move(str(base / "teachers" / "captures"), base / "captures")
    made = next(folder for folder in Path(captures).iterdir() if folder.name != "heads")
    made.rename(made.with_name("made"))
    done(base, "compare", "other", "run", "--out", "comparison")
    (base / "card").mkdir()
    (base / "card" / "README.md").write_text("---\nlicense: mit\ntags:\n- mine\n---\n# A card\n\ntext\n")
    done(base, "card", "run", "--out", "card", "--positions", "--no-pictures")
    done(base, "artifact", "manifest", "cand", "--write")
    (base / "teacher.toml").write_text('name = "t"\nmodel = "teacher"\ncompute_dtype = "float32"\n')
    (base / "suite.toml").write_text('name = "s"\nlm_eval = "0.4.13"\nprimary = "mmlu"\n[[tasks]]\nname = "mmlu"\n')
    return base


def done(folder: Path, *arguments: str) -> None:
    code, said = fidelity(folder, *arguments)
    if code != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {said}")


def copy_of(base: Path, target: Path) -> Path:
    """The base folder again, its files shared until one is changed."""
    shutil.copytree(base, target, copy_function=os.link)
    return target


def change(file: Path, rng: random.Random) -> str:
    """Change one file; what was done."""
    data = file.read_bytes()
    how: list[tuple[str, Callable[[bytes, random.Random], bytes]]] = [
        ("bytes", flipped),
        ("cut", cut),
        ("whole", whole),
    ]
    if file.suffix == ".json":
        how += [("field", field_of_json)] * 5
    elif file.suffix in (".toml", ".md", ".txt"):
        how += [("line", line)] * 4
    elif file.suffix in (".safetensors",):
        how += [("header", header)] * 4
    name, make = rng.choice(how)
    try:
        made = make(data, rng)
    except (ValueError, UnicodeError):
        name, made = "bytes", flipped(data, rng)
    file.unlink()  # the base folder keeps its own
    file.write_bytes(made)
    return name


def flipped(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 2, 8, 64))):
        out[rng.randrange(len(out))] = rng.randrange(256)
    return bytes(out)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def whole(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"", b"null", b"[]", b"{}", b"\xff\xfe\x00", b"[" * 100_000, b"<html>", data + data, b"---\n"))


def field_of_json(data: bytes, rng: random.Random) -> bytes:
    """One value anywhere in the document replaced, or one key removed."""
    document = json.loads(data)
    spots: list[tuple[Any, Any]] = []
    stack = [document]
    while stack:
        node = stack.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            spots.append((node, key))
            stack.append(node[key])
    if not spots:
        return whole(data, rng)
    node, key = rng.choice(spots)
    if isinstance(node, dict) and rng.random() < 0.25:
        del node[key]
    else:
        node[key] = rng.choice(VALUES)
    return json.dumps(document).encode()


def line(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode().split("\n")
    at = rng.randrange(len(lines))
    key = lines[at].partition("=")[0] or "x "
    lines[at] = rng.choice(
        (
            "", "=", f"{key}= {json.dumps(rng.choice(VALUES))}", f"{key}= 'a", "[[x]]", "---", "a: b: c", "- {",
            "\t\x00", "*a", "&a [*a, *a]", lines[at] * 2, "license: [", "{% for i in range(10**9) %}x{% endfor %}",
        )
    )  # fmt: skip
    return "\n".join(lines).encode()


def header(data: bytes, rng: random.Random) -> bytes:
    """A field of a safetensors header replaced; lengths no longer fit, or names do not."""
    length = int.from_bytes(data[:8], "little")
    made = field_of_json(data[8 : 8 + length], rng)
    size = len(made) if rng.random() < 0.7 else rng.choice((0, 1, 2**40, len(made) + 5))
    return size.to_bytes(8, "little") + made + data[8 + length :]
