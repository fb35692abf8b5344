"""What files of ranks hold, as they are read one after the other: tensors, their shards, where the bytes are."""

from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.dcp_index import NamePath, StoredChunk, StoredTensor, StoredValue
from fsdplaunch.checkpoint.readers.flat_params import FlatLayout
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem, locate_data
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow, ZipDirectory
from fsdplaunch.checkpoint.regions import Region, find_tiling_fault
from fsdplaunch.checkpoint.safe_pickle.rank_file_classes import MeshShard
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.errors import CheckpointError


@dataclass(slots=True)
class FoundTensor:
    """A tensor as its shards are found."""

    path: NamePath
    dtype: Dtype
    shape: tuple[int, ...]
    shards: dict[Region, ItemLocation] = field(default_factory=dict)


@dataclass(slots=True)
class FoundTensors:
    """What the files hold, as they are read."""

    folder: Path
    tensors: dict[str, FoundTensor] = field(default_factory=dict)
    values: dict[str, StoredValue] = field(default_factory=dict)
    items: dict[ItemLocation, TorchZipItem] = field(default_factory=dict)
    on_meshes: list[tuple[str, str, MeshShard, ItemLocation]] = field(default_factory=list)
    layouts: dict[str, FlatLayout] | None = None
    sharded: bool = False


def note_bytes(
    file: str,
    local: TensorDescription,
    dtype: Dtype,
    name: str,
    window: ReadWindow,
    built: ZipDirectory,
    found: FoundTensors,
) -> ItemLocation:
    """Note where a shard's bytes are and return their place."""
    if local.dtype.name != dtype.name:
        msg = f"{short(name)} is {dtype.name}, its shard {local.dtype.name}"
        raise InvalidFileError(msg)
    item = locate_data(window, built, local)
    first = item.data_offset + local.start * dtype.size
    place = ItemLocation(file, first, item.data_length)
    item = item._replace(data_offset=item.data_offset - first)
    if found.items.setdefault(place, item) != item:
        msg = f"{short(name)} and another tensor see the same bytes in different ways"
        raise InvalidFileError(msg)
    return place


def found_tensor(
    found: FoundTensors, file: str, name: str, path: NamePath, dtype: Dtype, shape: tuple[int, ...]
) -> FoundTensor:
    """Return the tensor of this name, as far as its shards are known; all files must say the same of it."""
    full = found.tensors.setdefault(name, FoundTensor(path, dtype, shape))
    if (full.dtype.name, full.shape) != (dtype.name, shape):
        here = f"{dtype.name} of shape {list(shape)}"
        msg = f"{found.folder}: {short(name)} is {here} in {file}, in another file it is not"
        raise CheckpointError(msg, hint="the files are from different saves")
    return full


def add_shard(
    found: FoundTensors,
    file: str,
    name: str,
    full: FoundTensor,
    region: Region,
    local: TensorDescription,
    place: ItemLocation,
) -> None:
    """Add a shard to a tensor."""
    if local.shape != region.sizes:
        shapes = f"of shape {list(local.shape)} where {list(region.sizes)} belongs"
        msg = f"{found.folder / file}: {short(name)} has a shard {shapes}"
        raise CheckpointError(msg, hint="files of other ranks are missing, or from another save")
    full.shards.setdefault(region, place)  # ranks that hold the same shard each write it


def stored_tensor(folder: Path, name: str, full: FoundTensor) -> StoredTensor:
    """Return a tensor whose shards are all there.

    Raises:
        CheckpointError: Some are not, or they overlap.
    """
    regions = sorted(region for region in full.shards if region.numel)
    fault = find_tiling_fault(full.shape, regions)
    if fault is not None:
        msg = f"{folder}: {short(name)} of shape {list(full.shape)}: {fault}"
        raise CheckpointError(msg, hint="bring the files of all ranks together")
    chunks = tuple(StoredChunk(region, full.shards[region]) for region in regions)
    return StoredTensor(name, full.path, full.dtype, full.shape, chunks)
