"""Read torch's distributed checkpoints without letting the pickles in them run code, and with their checksums.

Torch unpickles a checkpoint's index, and every value in it that is not a tensor, with the full unpickler: whoever
wrote the file decides what runs. It compares no checksum either. Here the index and the tensors are read as
merge-weights reads them, and values are checked by the same interpreter before torch reads them as plain ones.
"""

import functools
import io
import operator
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdplaunch.checkpoint.chunks import ItemKey, ItemLocation, Region
from fsdplaunch.checkpoint.manifest import INDEX_NAME
from fsdplaunch.checkpoint.readers.data_files import DataFiles, check_save
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, gc_pause, read_index
from fsdplaunch.checkpoint.readers.torch_zip import parse_item
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, InvalidFileError, short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.plain_files import load_plain
from fsdplaunch.runtime.torch_internals.late_imports import StorageInfo, set_element

MAX_VALUE = 2**30


class SafeReader(FileSystemReader):
    """Torch's reader of a checkpoint folder, with an index that cannot run code and is read once."""

    _index: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read the index; a CheckpointError if it names a class or function that no index needs."""
        if self._index is None:
            folder = Path(self.path)
            with gc_pause():
                self._index = _to_torch(read_index(folder), str(folder / INDEX_NAME))
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, file by file, each item compared with its checksum."""
        infos = [(self.storage_data[item.storage_index], item) for item in plan.items]
        wanted = [(ItemLocation(info.relative_path, info.offset, info.length), item) for info, item in infos]
        wanted.sort(key=operator.itemgetter(0))
        ends = {place.file: place.offset + place.length for place, _ in wanted}
        with DataFiles(Path(self.path), ends) as files:
            stored: Any = self.storage_data
            check_save(files, stored.places_in(ends))
            for place, item in wanted:
                if item.type is not LoadItemType.BYTE_IO:
                    _fill(planner, item, _read_tensor(files, place))
                elif place.length > MAX_VALUE:
                    reason = f"{place.length} bytes are more than a value is expected to need"
                    raise _unreadable(files, place, reason)
                else:
                    planner.load_bytes(item, io.BytesIO(files.read(place, 0, place.length)))
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _read_tensor(files: DataFiles, place: ItemLocation) -> torch.Tensor:
    try:
        item = parse_item(files.window(place))[0]
    except InvalidFileError as problem:
        raise _unreadable(files, place, str(problem)) from None
    data = bytearray(files.read(place, item.data_offset, item.data_length))
    if item.crc is not None and crc32(data, 0) != item.crc:
        raise _unreadable(files, place, "its bytes do not match their checksum")
    found = item.description
    dtype = getattr(torch, found.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or not found.dtype.size:
        raise _unreadable(files, place, f"its dtype is {found.dtype.name}")
    if not data:
        return torch.empty(found.shape, dtype=dtype)
    complete = len(data) - len(data) % found.dtype.size
    flat = torch.frombuffer(data, dtype=torch.uint8, count=complete).view(dtype)
    return flat.as_strided(found.shape, found.strides, found.start)


def _fill(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != tensor.size():
        msg = f"{short(item.storage_index.fqn)} has shape {list(tensor.size())}, expected {list(target.size())}"
        raise CheckpointError(msg, hint="index and data are from different saves")
    target.copy_(tensor)
    planner.commit_tensor(item, target)


def _unreadable(files: DataFiles, place: ItemLocation, reason: str) -> CheckpointError:
    msg = f"{files.folder / place.file}: the item at byte {place.offset} cannot be read: {reason}"
    return CheckpointError(msg, hint=COPY_AGAIN)


def _to_torch(index: CheckpointIndex, where: str) -> Metadata:
    @functools.cache  # a model's layers repeat them
    def chunk(region: Region) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))

    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for tensor in index.tensors:
        dtype = getattr(torch, tensor.dtype.name, None)
        if not isinstance(dtype, torch.dtype):
            msg = f"{where}: {short(tensor.name)} is {tensor.dtype.name}, which this torch does not have"
            raise CheckpointError(msg, hint="load it with the torch that wrote it")
        chunks = [chunk(region) for region, _ in tensor.chunks]
        entries[tensor.name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(tensor.shape), chunks)
    entries |= {value.name: BytesStorageMetadata() for value in index.values}
    paths = {entry.name: entry.path for entry in index.entries}
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=_StorageData(index))


class _StorageData(dict[MetadataIndex, StorageInfo]):
    """Where each item stands, in torch's words for those that this rank reads: an index may list a million."""

    def __init__(self, index: CheckpointIndex) -> None:
        super().__init__()
        self._locations = index.places

    def places_in(self, files: Container[str]) -> Iterator[ItemLocation]:
        """Yield where each item of some files stands."""
        return (place for place in self._locations.values() if place.file in files)

    def __missing__(self, key: MetadataIndex) -> StorageInfo:
        return StorageInfo(*self._locations[ItemKey(key.fqn, key.offset)])


class SafePlanner(DefaultLoadPlanner):
    """Torch's planner, reading values that are not tensors as plain ones."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read one value that is not a tensor."""
        name = read_item.dest_index.fqn
        plain = load_plain(value.getvalue(), short(name))
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], plain)
        else:
            self.state_dict[name] = plain
