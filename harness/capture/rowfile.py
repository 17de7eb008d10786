"""One row of a capture as one Parquet file that can be memory-mapped.

The captured array is a non-nullable fixed-size binary column: uncompressed, PLAIN, one row group, one page, so its
bytes lie in the file exactly as in memory. bf16 does not exist in Parquet; bits are stored, the dtype is metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from harness.capture.manifest import TORCH_DTYPES
from harness.digest import tensor_bytes
from harness.errors import CaptureError
from harness.store import write_table

META_KEY = b"fidelity"
_INT_VIEWS = {torch.bfloat16: "<u2", torch.float16: "<u2", torch.float32: "<u4", torch.int32: "<i4"}


def corrupt(file: str, why: str) -> CaptureError:
    """The refusal of one row file, with the one repair there is."""
    return CaptureError(f"{file} is corrupt: {why}", f"delete {file} and run capture again: the other rows are kept")


def write_row_file(
    target: Path, arrays: Mapping[str, torch.Tensor], columns: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    """Write a row whole or not at all.

    Args:
        arrays: contiguous [T, W] tensors, each one fixed-size binary column.
        columns: float64 or int32 arrays with T entries.
        metadata: JSON-ready; stored in the schema.
    """
    fields, data = [], []
    for name, tensor in arrays.items():
        kind = pa.binary(tensor.shape[1] * tensor.element_size())
        data.append(pa.FixedSizeBinaryArray.from_buffers(kind, len(tensor), [None, pa.py_buffer(tensor_bytes(tensor))]))
        fields.append(pa.field(name, kind, nullable=False))
    for name, values in columns.items():
        data.append(pa.array(values))
        fields.append(pa.field(name, data[-1].type, nullable=False))
    note = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    table = pa.Table.from_arrays(data, schema=pa.schema(fields, metadata={META_KEY: note.encode()}))
    largest = max(tensor.nbytes for tensor in arrays.values())
    write_table(
        target,
        table,
        use_dictionary=False,
        compression="none",
        column_encoding={name: "PLAIN" for name in table.column_names},
        write_statistics=False,
        row_group_size=max(len(table), 1),
        write_batch_size=max(len(table), 1),
        data_page_size=largest + 1024,
    )


def read_metadata(path: Path) -> dict[str, Any]:
    """The JSON note in a row file's schema."""
    try:
        note = (pq.read_schema(path).metadata or {}).get(META_KEY)
        metadata = json.loads(note) if note else None
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise corrupt(path.name, str(error).splitlines()[0]) from error
    if not isinstance(metadata, dict):
        raise corrupt(path.name, "it has no fidelity metadata")
    return metadata


def read_columns(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    """Small columns as numpy arrays."""
    try:
        table = pq.read_table(path, columns=names, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path.name, str(error).splitlines()[0]) from error
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise corrupt(path.name, f"column {missing[0]} is missing")
    return {name: table.column(name).to_numpy() for name in names}


def read_array(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A [T, W] tensor of ``dtype``: a view of the file where that is proven to be safe, else a copy.

    The tensor is mapped copy-on-write: writing into it never reaches the file.

    Raises:
        CaptureError: the column is absent, not fixed-size binary, or no multiple of the dtype's size.
    """
    try:
        with pq.ParquetFile(path) as file:
            details, rows, index = file.metadata, file.metadata.num_rows, file.schema_arrow.get_field_index(name)
            kind = file.schema_arrow.field(index).type if index >= 0 else None
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path.name, str(error).splitlines()[0]) from error
    if kind is None or not pa.types.is_fixed_size_binary(kind) or kind.byte_width % dtype.itemsize:
        raise CaptureError(
            f"{path.name}: column {name} is {kind or 'missing'}, not fixed-size binary of {dtype}",
            "capture the teacher again with this version; a stored array is never reinterpreted as another dtype",
        )
    offset = page_offset(path, details, index, rows * kind.byte_width)
    if offset is None:
        raw = _decoded(path, name, rows, kind.byte_width)
    else:
        raw = np.memmap(path, dtype=np.uint8, mode="c", offset=offset, shape=(rows, kind.byte_width))
        raw = raw if offset % dtype.itemsize == 0 else np.array(raw)
    return torch.from_numpy(raw.view(_INT_VIEWS[dtype])).view(dtype)


def page_offset(path: Path, details: Any, column: int, size: int) -> int | None:
    """Where ``size`` raw bytes of a column begin in the file, or None where a plain view is not proven right."""
    if details.num_row_groups != 1 or details.schema.column(column).max_definition_level != 0 or size == 0:
        return None
    chunk = details.row_group(0).column(column)
    plain = set(chunk.encodings) <= {"PLAIN", "RLE"} and not chunk.has_dictionary_page
    if chunk.compression != "UNCOMPRESSED" or not plain or chunk.physical_type != "FIXED_LEN_BYTE_ARRAY":
        return None
    start, header = chunk.data_page_offset, chunk.total_compressed_size - size
    if not 0 < header <= 64:
        return None
    with path.open("rb") as file:
        file.seek(start)
        return start + header if _is_one_page(file.read(header), size) else None


def _is_one_page(header: bytes, size: int) -> bool:
    """True when a Thrift page header says: data page, ``size`` bytes, stored as they are.

    Its first three fields are type, uncompressed size and compressed size, each after the byte 0x15
    (next field, zigzag varint).
    """
    expected = bytes([0x15, 0x00]) + 2 * (bytes([0x15]) + _varint(2 * size))
    return header.startswith(expected)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _decoded(path: Path, name: str, rows: int, width: int) -> np.ndarray:
    """The column through the Parquet reader: any encoding, one copy."""
    try:
        chunk = pa.concat_arrays(pq.read_table(path, columns=[name]).column(name).chunks)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path.name, str(error).splitlines()[0]) from error
    bits = chunk.buffers()[1]
    if chunk.null_count or bits is None:
        raise corrupt(path.name, f"column {name} has {chunk.null_count} nulls")
    raw = np.frombuffer(memoryview(bits), dtype=np.uint8, count=rows * width, offset=chunk.offset * width)
    return raw.reshape(rows, width).copy()


def _missing(path: Path) -> CaptureError:
    return CaptureError(f"{path.name} is missing", "run `fidelity teacher capture` again: it adds what is missing")


def dtype_of(metadata: Mapping[str, Any], file: str) -> torch.dtype:
    """The dtype a row file declares."""
    name = metadata.get("key", {}).get("dtype")
    if name not in TORCH_DTYPES:
        raise corrupt(file, f"it declares dtype {name!r}")
    return TORCH_DTYPES[name]
