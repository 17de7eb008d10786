"""One row of a capture as one Parquet file that can be memory-mapped.

The captured array is a non-nullable fixed-size binary column: uncompressed, PLAIN, one row group, one page, so its
bytes lie in the file exactly as in memory. bf16 does not exist in Parquet; bits are stored, the dtype is metadata.
An array past Parquet's limit of 2 GiB a page is cut into several, and read as a copy.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from harness.digest import tensor_bytes
from harness.errors import CaptureError
from harness.store import write_table

META_KEY = b"fidelity"
#: Bytes of one page: its header counts them in a signed 32-bit number.
PAGE_BYTES = 2**31 - 2**20
_INT_VIEWS = {torch.bfloat16: "<u2", torch.float16: "<u2", torch.float32: "<u4"}


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
    # A page ends only after a batch: all rows are one batch and one page, or each batch is a page.
    batch = len(table) if largest <= PAGE_BYTES else PAGE_BYTES // (largest // len(table))
    write_table(
        target,
        table,
        use_dictionary=False,
        compression="none",
        column_encoding={name: "PLAIN" for name in table.column_names},
        write_statistics=False,
        row_group_size=max(len(table), 1),
        write_batch_size=max(batch, 1),
        data_page_size=largest + 1024 if batch == len(table) else 1,
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


def read_row_file(
    path: Path, arrays: Mapping[str, torch.dtype], columns: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]:
    """Wide columns as [T, W] tensors of the given dtypes, and narrow ones as numpy arrays.

    A tensor is a view of the file where that is proven to be safe, else a copy. It is mapped copy-on-write: writing
    into it never reaches the file.

    Raises:
        CaptureError: a column is absent, or a wide one is not fixed-size binary in elements of its dtype.
    """
    mapped = _mapped(path)
    try:
        with pq.ParquetFile(pa.BufferReader(mapped)) as file:
            wide = {name: _array(path.name, mapped, file, name, dtype) for name, dtype in arrays.items()}
            missing = [name for name in columns if name not in file.metadata.schema.names]
            if missing:
                raise corrupt(path.name, f"column {missing[0]} is missing")
            table = file.read(columns=list(columns), use_threads=False) if columns else None
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path.name, str(error).splitlines()[0]) from error
    return wide, {name: table.column(name).to_numpy() for name in columns} if table is not None else {}


def read_array(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One wide column; see `read_row_file`."""
    return read_row_file(path, {name: dtype})[0][name]


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except ValueError as error:
        raise corrupt(path.name, "it is empty") from error


def _array(file_name: str, mapped: mmap.mmap, file: pq.ParquetFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    details = file.metadata
    index = details.schema.names.index(name) if name in details.schema.names else -1
    found, width = "missing", 0
    if index >= 0:
        kind = details.schema.column(index)
        found, width = kind.physical_type, kind.length or 0
    if found != "FIXED_LEN_BYTE_ARRAY" or width % dtype.itemsize:
        raise CaptureError(
            f"{file_name}: column {name} is {found} of width {width}, not fixed-size binary of {dtype}",
            "capture the teacher again with this version; a stored array is never reinterpreted as another dtype",
        )
    rows, size = details.num_rows, details.num_rows * width
    offset = page_offset(mapped, details, index, size)
    if offset is None:
        raw = _decoded(file_name, file, name, size)
    else:
        raw = np.frombuffer(mapped, dtype=np.uint8, count=size, offset=offset)
        raw = raw if offset % dtype.itemsize == 0 else raw.copy()
    return torch.from_numpy(raw.view(_INT_VIEWS[dtype]).reshape(rows, -1)).view(dtype)


def page_offset(mapped: mmap.mmap | bytes, details: pq.FileMetaData, column: int, size: int) -> int | None:
    """Where ``size`` raw bytes of a column begin in the file, or None where a plain view is not proven right."""
    if details.num_row_groups != 1 or details.schema.column(column).max_definition_level != 0 or size == 0:
        return None
    chunk = details.row_group(0).column(column)
    plain = set(chunk.encodings) <= {"PLAIN", "RLE"} and not chunk.has_dictionary_page
    if chunk.compression != "UNCOMPRESSED" or not plain or chunk.physical_type != "FIXED_LEN_BYTE_ARRAY":
        return None
    start, header = chunk.data_page_offset, chunk.total_compressed_size - size
    if not 0 < header <= 64 or start + header + size > len(mapped):
        return None
    return start + header if _is_one_page(mapped[start : start + header], size) else None


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


def _decoded(file_name: str, file: pq.ParquetFile, name: str, size: int) -> np.ndarray:
    """The column's bytes through the Parquet reader: any encoding, one copy."""
    chunk = pa.concat_arrays(file.read(columns=[name], use_threads=False).column(name).chunks)
    bits = chunk.buffers()[1]
    if chunk.null_count or bits is None:
        raise corrupt(file_name, f"column {name} has {chunk.null_count} nulls")
    width = size // max(len(chunk), 1)
    return np.frombuffer(memoryview(bits), dtype=np.uint8, count=size, offset=chunk.offset * width).copy()


def _missing(path: Path) -> CaptureError:
    return CaptureError(f"{path.name} is missing", "run `fidelity teacher capture` again: it adds what is missing")
