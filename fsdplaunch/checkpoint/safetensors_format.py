"""The safetensors format: headers of files and the index over several, read and written."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.checkpoint.dtypes import DTYPES, Dtype
from fsdplaunch.checkpoint.untrusted_files import (
    InvalidFileError,
    check_counts,
    open_regular,
    read_regular,
    refuse,
    short,
)
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import JsonError, parse_json

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER = 100_000_000
MAX_INDEX = 2**28
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
_ALIGNMENT = 8


class TensorHeader(NamedTuple):
    """One tensor of a file: its name, dtype, shape in elements, and size in bytes."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    nbytes: int


def file_order(entry: TensorHeader) -> tuple[int, str]:
    """Return what safetensors sorts tensors by: wide dtypes first, then by name."""
    return -entry.dtype.rank, entry.name


def header_bytes(entries: Sequence[TensorHeader], aliases: Mapping[str, str] | None = None) -> bytes:
    """Return everything that stands before the data of a file of ours: length, JSON, padding.

    The tensors are in file order, each starting where the previous one ends; `aliases` are further names of some
    of them, noted as safetensors' own save_model does.

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
        return [(SINGLE_NAME, sorted(groups[0], key=file_order))]
    return [
        (f"model-{number:05d}-of-{len(groups):05d}.safetensors", sorted(group, key=file_order))
        for number, group in enumerate(groups, 1)
    ]


def index_bytes(files: Mapping[str, Sequence[TensorHeader]]) -> bytes:
    """Return the index that says which file holds which tensor."""
    total = sum(entry.nbytes for entries in files.values() for entry in entries)
    where = {entry.name: name for name, entries in files.items() for entry in entries}
    return (
        json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"
    ).encode()


class HeaderEntry(NamedTuple):
    """What a header says of one tensor."""

    code: str  # what safetensors calls its dtype
    dtype: Dtype | None  # the dtype; None when it is not known
    shape: tuple[int, ...]  # values along each dimension
    first: int  # where its bytes begin in the file
    last: int  # where they end


class FileHeader(NamedTuple):
    """What stands before the data of a file."""

    entries: Mapping[str, HeaderEntry]  # the tensors by name, in the header's order
    metadata: Mapping[str, Any]  # what the writer noted besides
    start: int  # where the data begins, in bytes
    size: int  # bytes of the file


def read_header(path: Path) -> FileHeader:
    """Read the header of a safetensors file: 8 bytes of length and that much JSON.

    Raises:
        InvalidFileError: It does not fit the file, or is not that of a safetensors file.
        OSError: The file cannot be read.
    """
    with open(open_regular(path), "rb", closefd=True) as file:  # noqa: PTH123  (opened so as not to wait)
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER, size - 8):
            refuse(f"its header is declared to have {length} bytes, but the file has {size}")
        text = file.read(length)
    try:
        header = parse_json(text)
    except JsonError as problem:
        msg = f"it has no safetensors header: {short(str(problem))[1:-1]}"
        raise InvalidFileError(msg) from None
    metadata = header.pop("__metadata__", None) or {} if type(header) is dict else None
    if type(header) is not dict or type(metadata) is not dict:
        refuse("it has no safetensors header")
    entries, start = dict[str, HeaderEntry](), 8 + length
    for name, entry in header.items():
        try:
            code, sizes, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            msg = f"it has no safetensors header: the entry of {short(name)} is not a tensor's"
            raise InvalidFileError(msg) from None
        shape = check_counts(sizes, f"the shape of {short(name)}")
        first, last = check_counts((first, last), f"an offset of {short(name)}")
        entries[name] = HeaderEntry(code, _BY_CODE.get(code), shape, start + first, start + last)
    return FileHeader(entries, metadata, start, size)


def check_data(header: FileHeader) -> None:
    """Check that every tensor fills its bytes, that they are in the file, and that no two share any.

    Raises:
        InvalidFileError: With the name of a tensor that does not.
    """
    for name, entry in header.entries.items():
        nbytes, dtype = entry.last - entry.first, entry.dtype
        if nbytes < 0 or (dtype and nbytes * dtype.lanes != math.prod(entry.shape) * dtype.size):
            refuse(f"{short(name)} of shape {list(entry.shape)} does not fill its {nbytes} bytes")
        if entry.last > header.size:
            refuse(f"it is cut short: {short(name)} ends at byte {entry.last}, the file has {header.size}")
    spans = sorted((entry.first, entry.last, name) for name, entry in header.entries.items())
    for (_, end, one), (start, _, other) in pairwise(spans):
        if end > start:
            refuse(f"{short(one)} and {short(other)} share bytes")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return which file holds which tensor, as an index of several files says.

    Raises:
        InvalidFileError: It is not such an index.
    """
    try:
        listed = parse_json(read_regular(path, MAX_INDEX))["weight_map"]
    except InvalidFileError:
        raise
    except (ValueError, TypeError, KeyError) as problem:
        why = f": {short(str(problem))[1:-1]}" if isinstance(problem, JsonError) else ""
        msg = f"it is not an index of weight files{why}"
        raise InvalidFileError(msg) from None
    if type(listed) is not dict or not listed or not all(type(name) is str for name in listed.values()):
        refuse("its weight_map is not a table of file names")
    return listed
