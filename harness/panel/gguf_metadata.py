"""The scalar metadata of a GGUF file, read from its header alone.

gguf.GGUFReader builds arrays for all 150,000 vocabulary entries first (5 s for SmolLM2); three numbers are wanted here.
Layout: magic, version, tensor count, entry count, then entries of key, type and value, all little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from harness.errors import UsageError

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
#: struct formats of the scalar types by GGUF type number.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Scalar = int | float | bool | str


def gguf_scalars(file: Path) -> dict[str, Scalar]:
    """Every metadata entry that is a number, a flag or a string; arrays are skipped."""
    with file.open("rb") as stream:
        if stream.read(4) != MAGIC:
            raise UsageError(f"{file.name} is not a GGUF file", "name a GGUF file")
        try:
            _version, _tensors, entries = struct.unpack("<IQQ", stream.read(20))
            found = (_entry(stream) for _ in range(entries))
            return {key: value for key, value in found if value is not None}
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise UsageError(
                f"the GGUF header of {file.name} cannot be read: {error}", "fetch the file again"
            ) from error


def _entry(stream: BinaryIO) -> tuple[str, Scalar | None]:
    key = _string(stream).decode()
    (kind,) = struct.unpack("<I", stream.read(4))
    if kind == STRING:
        return key, _string(stream).decode()
    if kind == ARRAY:
        _skip_array(stream)
        return key, None
    return key, _scalar(stream, kind)


def _scalar(stream: BinaryIO, kind: int) -> Scalar:
    layout = f"<{SCALARS[kind]}"
    value: Scalar = struct.unpack(layout, stream.read(struct.calcsize(layout)))[0]
    return value


def _string(stream: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", stream.read(8))
    return stream.read(length)


def _skip_array(stream: BinaryIO) -> None:
    kind, count = struct.unpack("<IQ", stream.read(12))
    if kind in SCALARS:
        stream.seek(count * struct.calcsize(f"<{SCALARS[kind]}"), 1)
        return
    for _ in range(count):
        if kind == STRING:
            _string(stream)
        else:
            _skip_array(stream)
