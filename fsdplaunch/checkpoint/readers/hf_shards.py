"""Sharded safetensors, as torch's HuggingFaceStorageWriter(save_distributed=True) writes them.

Every rank's file is a safetensors file of its own; its metadata says at which offsets of the full tensor each
shard stands. There is no index: the full tensors' shapes are what the shards add up to. A gap is refused; that the
shards of the last rank are missing cannot be seen.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.checkpoint.chunks import ItemLocation, Region, find_tiling_fault, row_major
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.readers.dcp_index import MAX_FILES, CheckpointIndex, StoredChunk, StoredTensor
from fsdplaunch.checkpoint.readers.rank_files import check_still_there, refuse
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.checkpoint.safetensors_format import HeaderEntry, check_data, read_header
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, InvalidFileError, check_counts, short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import parse_json

SHARD_FILE = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


@dataclass(slots=True)
class _ShardedTensor:
    """A tensor as its shards are found."""

    dtype: Dtype
    shards: dict[Region, ItemLocation] = field(default_factory=dict)


def read_shards(folder: Path) -> tuple[CheckpointIndex, dict[ItemLocation, TorchZipItem]]:
    """Read the headers of all shard files.

    Returns:
        What the checkpoint holds, and where each shard's bytes are, by its place.

    Raises:
        CheckpointError: When a file is damaged, or shards are missing.
    """
    names = sorted(path.name for path in folder.iterdir() if SHARD_FILE.fullmatch(path.name))
    _check_numbers(folder, names)
    sharded: dict[str, _ShardedTensor] = {}
    ends: dict[str, int] = {}
    for name in names:
        ends[name] = _read_file(folder / name, sharded)
    tensors = tuple(_tensor(folder, name, full, names) for name, full in sharded.items())
    items = {chunk.place: _item(tensor.dtype, chunk) for tensor in tensors for chunk in tensor.chunks}
    return CheckpointIndex(tensors=tensors, values=(), files=ends), items


def _check_numbers(folder: Path, names: list[str]) -> None:
    """Check that every file number up to the stated total is there, from some rank."""
    found = [(int(match[2]), int(match[3])) for match in map(SHARD_FILE.fullmatch, names) if match]
    check_still_there(folder, found)
    total = max(total for _, total in found)
    missing = sorted(set(range(1, min(total, MAX_FILES) + 1)) - {number for number, _ in found})
    if missing or total > MAX_FILES or len(names) > MAX_FILES:
        msg = (
            f"{folder} lacks shard-*-model-{(missing or [total])[0]:05d}-of-{total:05d}.safetensors of every rank"
        )
        raise CheckpointError(msg, hint="bring the files of all ranks together")


def _read_file(path: Path, tensors: dict[str, _ShardedTensor]) -> int:
    """Add the shards in one file to `tensors` and return where its data ends."""
    try:
        header = read_header(path)
        check_data(header)
        sharding = parse_json(header.metadata.get(_SHARDING, "{}"))
        for name, entry in header.entries.items():
            offsets = sharding.get(name, {}).get("saved_offsets", [0] * len(entry.shape))
            _add_shard(path.name, name, entry, tuple(offsets), tensors)
    except InvalidFileError as problem:
        refuse(path, str(problem))
    except (ValueError, TypeError, AttributeError):
        refuse(path, "its header is not that of a sharded safetensors file")
    return max((entry.last for entry in header.entries.values()), default=header.start)


def _add_shard(
    file: str, name: str, entry: HeaderEntry, offsets: tuple[int, ...], tensors: dict[str, _ShardedTensor]
) -> None:
    """Note one tensor of a file, which is a shard of the full one."""
    dtype, shape = entry.dtype, entry.shape
    if dtype is None or dtype.lanes > 1:
        msg = f"{short(name)} is {short(entry.code)}, which is not known"
        raise InvalidFileError(msg)
    check_counts(offsets, f"the place of {short(name)}")
    full = tensors.setdefault(name, _ShardedTensor(dtype))
    known = next(iter(full.shards), None)
    if len(offsets) != len(shape) or full.dtype is not dtype or (known and len(known.sizes) != len(shape)):
        msg = f"{short(name)} is {dtype.name} of shape {list(shape)} at {list(offsets)}, which fits no other shard"
        raise InvalidFileError(msg)
    # Ranks that hold the same shard may each write it.
    full.shards.setdefault(Region(offsets, shape), ItemLocation(file, entry.first, entry.last - entry.first))


def _tensor(folder: Path, name: str, full: _ShardedTensor, files: list[str]) -> StoredTensor:
    regions = sorted(full.shards)
    filled = [region for region in regions if region.numel]
    ends = [map(sum, zip(region.offsets, region.sizes, strict=True)) for region in filled or regions]
    shape = tuple(map(max, zip(*ends, strict=True)))
    fault = find_tiling_fault(shape, filled)
    if fault is not None:
        here = {int(match[1]) for match in map(SHARD_FILE.fullmatch, files) if match}
        gone = sorted(set(range(1, max(here) + 1)) - here)
        msg = f"{folder}: {short(name)} of shape {list(shape)}: {fault}"
        hint = (
            f"there is no file of shard {gone[0]}; bring the files of all ranks together" if gone else COPY_AGAIN
        )
        raise CheckpointError(msg, hint=hint)
    chunks = tuple(StoredChunk(region, full.shards[region]) for region in filled)
    return StoredTensor(name, (name,), full.dtype, shape, chunks)


def _item(dtype: Dtype, chunk: StoredChunk) -> TorchZipItem:
    """Return the shard's bytes as an item that is nothing but them."""
    description = TensorDescription(dtype, chunk.region.sizes, row_major(chunk.region.sizes), 0, "")
    return TorchZipItem(description, 0, chunk.place.length, None)
