"""The safetensors format: reading a header; header bytes for tensors in its own order, files, and their index."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.invalid_file import InvalidFileError
from fsdplaunch.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
_ALIGNMENT = 8


class TensorHeader(NamedTuple):
    """One tensor of a file: its name, element type, shape in elements, and size in bytes."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    nbytes: int


def in_file_order(entries: Iterable[TensorHeader]) -> list[TensorHeader]:
    """Return the entries as safetensors writes them: wide element types first, then by name."""
    return sorted(entries, key=lambda entry: (-entry.dtype.rank, entry.name))


def header_bytes(entries: Sequence[TensorHeader], aliases: Mapping[str, str] | None = None) -> bytes:
    """Return everything that stands before the data: length, JSON, padding.

    Args:
        entries: The tensors in file order, each starting where the previous one ends.
        aliases: Further names of some of them, noted as safetensors' own save_model does.

    Raises:
        CheckpointError: When the header would be larger than safetensors reads.
    """
    header: dict[str, object] = {"__metadata__": {**(aliases or {}), "format": "pt"}}
    position = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype.code,
            "shape": list(file_shape(entry.dtype, entry.shape)),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        msg = f"{len(entries)} tensors need a header of {len(text)} bytes, safetensors reads at most {MAX_HEADER}"
        raise CheckpointError(msg, hint="merge into several files with a smaller max_shard_size")
    return len(text).to_bytes(8, "little") + text


def file_shape(dtype: Dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that the header states; packed 4-bit floats count each value."""
    return (*shape[:-1], shape[-1] * dtype.lanes) if dtype.lanes > 1 and shape else shape


def split_into_files(entries: Sequence[TensorHeader], max_bytes: int) -> list[tuple[str, list[TensorHeader]]]:
    """Return file names and their tensors, each file at most `max_bytes` of data unless one tensor is larger."""
    groups: list[list[TensorHeader]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.nbytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.nbytes
    if len(groups) == 1:
        return [(SINGLE_NAME, in_file_order(groups[0]))]
    return [
        (f"model-{number:05d}-of-{len(groups):05d}.safetensors", in_file_order(group))
        for number, group in enumerate(groups, 1)
    ]


def index_bytes(files: Mapping[str, Sequence[TensorHeader]]) -> bytes:
    """Return the index that says which file holds which tensor."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    where = {entry.name: name for name, entries in files.items() for entry in entries}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    ).encode()


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a safetensors file's header, where its data starts, and its size in bytes.

    Raises:
        InvalidFileError: The header does not fit the file, or is no table.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", closefd=True) as file:  # noqa: PTH123  (without NONBLOCK a named pipe would wait for ever)
        size = os.fstat(fd).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER, size - 8):
            msg = f"its header is said to have {length} bytes, the file has {size}"
            raise InvalidFileError(msg)
        header = json.loads(file.read(length))
    if type(header) is not dict:
        msg = "its header is not a table"
        raise InvalidFileError(msg)
    return header, 8 + length, size
