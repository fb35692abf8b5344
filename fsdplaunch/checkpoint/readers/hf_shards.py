"""Sharded safetensors, as torch's HuggingFaceStorageWriter(save_distributed=True) writes them.

Every rank's file is a safetensors file of its own; its metadata says at which offsets of the whole tensor each
part stands. There is no index: the whole tensors' shapes are what the parts add up to. A gap is refused; that the
parts of the last rank are missing cannot be seen.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from fsdplaunch.checkpoint.checked_ints import check_count, check_counts
from fsdplaunch.checkpoint.dtypes import DTYPES, Dtype
from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.dcp_index import MAX_FILES, CheckpointIndex, StoredChunk, StoredTensor
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.regions import Region, find_tiling_fault, row_major
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.checkpoint.safetensors_format import read_header
from fsdplaunch.errors import CheckpointError

SHARD_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"
_CODES = {dtype.code: dtype for dtype in DTYPES.values() if dtype.code and dtype.lanes == 1}
_DAMAGED = "copy the checkpoint again, or use an older one"


@dataclass(slots=True)
class _Whole:
    """A tensor as its parts are found."""

    dtype: Dtype
    parts: dict[Region, ItemLocation] = field(default_factory=dict)


def read_shards(folder: Path) -> tuple[CheckpointIndex, dict[ItemLocation, TorchZipItem]]:
    """Read the headers of all shard files.

    Returns:
        What the checkpoint holds, and where each part's bytes are, by its place.

    Raises:
        CheckpointError: When a file is damaged, or parts are missing.
    """
    names = sorted(path.name for path in folder.iterdir() if SHARD_FILE.fullmatch(path.name))
    _check_numbers(folder, names)
    wholes: dict[str, _Whole] = {}
    ends: dict[str, int] = {}
    for name in names:
        ends[name] = _read_file(folder / name, wholes)
    tensors = tuple(_tensor(folder, name, whole, names) for name, whole in wholes.items())
    items = {chunk.place: _item(tensor.dtype, chunk) for tensor in tensors for chunk in tensor.chunks}
    return CheckpointIndex(tensors=tensors, values=(), files=ends), items


def _check_numbers(folder: Path, names: list[str]) -> None:
    """Check that every file number up to the stated total is there, from some rank."""
    found = [(int(match[2]), int(match[3])) for match in map(SHARD_FILE.fullmatch, names) if match]
    total = max(total for _, total in found)
    missing = sorted(set(range(1, min(total, MAX_FILES) + 1)) - {number for number, _ in found})
    if missing or total > MAX_FILES or len(names) > MAX_FILES:
        msg = (
            f"{folder} lacks shard-*-model-{(missing or [total])[0]:05d}-of-{total:05d}.safetensors of every rank"
        )
        raise CheckpointError(msg, hint="bring the files of all ranks together")


def _read_file(path: Path, wholes: dict[str, _Whole]) -> int:
    """Add the parts of one file to `wholes` and return where its data ends."""
    try:
        header, start, size = read_header(path)
        metadata = header.pop("__metadata__", None) or {}
        sharding = json.loads(metadata.get(_SHARDING, "{}"))
        spans = [
            _add_part(path.name, start, size, name, entry, sharding, wholes) for name, entry in header.items()
        ]
        _check_apart(spans)
    except InvalidFileError as problem:
        _refuse(path, str(problem))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        _refuse(path, "its header is not that of a sharded safetensors file")
    return max((end for _, end in spans), default=start)


def _add_part(
    file: str, start: int, size: int, name: str, entry: Any, sharding: Any, wholes: dict[str, _Whole]
) -> tuple[int, int]:
    """Note one tensor of a file and return where its bytes begin and end."""
    dtype = _CODES.get(entry["dtype"])
    shape = check_counts(tuple(entry["shape"]), f"the shape of {short(name)}")
    first, last = (start + check_count(at, f"an offset of {short(name)}") for at in entry["data_offsets"])
    if dtype is None:
        msg = f"{short(name)} is {short(str(entry['dtype']))}, which is not known"
        raise InvalidFileError(msg)
    if last > size or last - first != math.prod(shape) * dtype.size:
        msg = f"{short(name)} of shape {list(shape)} does not fill bytes {first} to {last} of {size}"
        raise InvalidFileError(msg)
    told = sharding.get(name, {}).get("saved_offsets", [0] * len(shape))
    offsets = check_counts(tuple(told), f"the place of {short(name)}")
    whole = wholes.setdefault(name, _Whole(dtype))
    known = next(iter(whole.parts), None)
    if len(offsets) != len(shape) or whole.dtype is not dtype or (known and len(known.sizes) != len(shape)):
        msg = f"{short(name)} is {dtype.name} of shape {list(shape)} at {list(offsets)}, which fits no other part"
        raise InvalidFileError(msg)
    # Ranks that hold the same part may each write it.
    whole.parts.setdefault(Region(offsets, shape), ItemLocation(file, first, last - first))
    return first, last


def _check_apart(spans: Iterable[tuple[int, int]]) -> None:
    for (_, end), (start, _) in pairwise(sorted(spans)):
        if end > start:
            msg = f"two of its tensors share the bytes at {start}"
            raise InvalidFileError(msg)


def _tensor(folder: Path, name: str, whole: _Whole, files: list[str]) -> StoredTensor:
    boxes = sorted(whole.parts)
    filled = [box for box in boxes if box.numel]
    ends = [map(sum, zip(box.offsets, box.sizes, strict=True)) for box in filled or boxes]
    shape = tuple(map(max, zip(*ends, strict=True)))
    fault = find_tiling_fault(shape, filled)
    if fault is not None:
        here = {int(match[1]) for match in map(SHARD_FILE.fullmatch, files) if match}
        gone = sorted(set(range(1, max(here) + 1)) - here)
        msg = f"{folder}: {short(name)} of shape {list(shape)}: {fault}"
        hint = f"there is no file of shard {gone[0]}; bring the files of all ranks together" if gone else _DAMAGED
        raise CheckpointError(msg, hint=hint)
    chunks = tuple(StoredChunk(box, whole.parts[box]) for box in filled)
    return StoredTensor(name, (name,), whole.dtype, shape, chunks)


def _item(dtype: Dtype, chunk: StoredChunk) -> TorchZipItem:
    """Return the part's bytes as an item that is nothing but them."""
    description = TensorDescription(dtype, chunk.box.sizes, row_major(chunk.box.sizes), 0, "")
    return TorchZipItem(description, 0, chunk.place.length, None)


def _refuse(path: Path, reason: str) -> NoReturn:
    msg = f"{path} cannot be read: {reason}"
    raise CheckpointError(msg, hint=_DAMAGED) from None
