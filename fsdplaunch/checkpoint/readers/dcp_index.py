"""What a checkpoint's `.metadata` says: its tensors, their chunks, and where each chunk's bytes stand.

Only plain values of our own come out of the file; `dcp_classes.py` has what may go in. Sizes are checked against
each other in `dcp_places.py`, and against the files in `data_files.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.index_file import INDEX_NAME, MAX_INDEX_BYTES
from fsdplaunch.checkpoint.invalid_file import InvalidFileError, short
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.dcp_places import (
    COPY_AGAIN,
    Places,
    Tilings,
    file_ends,
    item_locations,
    packed_items,
    place_of,
    regions_of,
)
from fsdplaunch.checkpoint.regions import Region
from fsdplaunch.checkpoint.regular_file import read_regular
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import (
    INDEX_NAMES,
    Metadata,
    TensorEntry,
    ValueEntry,
    resolve_chunks,
)
from fsdplaunch.checkpoint.safe_pickle.unpickle import unpickle
from fsdplaunch.errors import CheckpointError

# Bytes of an index for one chunk of a tensor, at the least.
_BYTES_PER_CHUNK = 16

NamePath = tuple[str | int, ...]


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, in elements, and where its item stands."""

    region: Region
    place: ItemLocation


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint.

    Attributes:
        name: Its full name in the checkpoint.
        path: The keys that lead to it in the saved state, outermost first.
        dtype: Its dtype.
        shape: Its global shape.
        chunks: What it is made of, without empty chunks, sorted by offset.
    """

    name: str
    path: NamePath
    dtype: Dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One entry that is not a tensor, as a pickled item."""

    name: str
    path: NamePath
    place: ItemLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """Everything that `.metadata` says, checked against itself.

    Attributes:
        tensors: The tensors, in the file's order.
        values: The entries that are not tensors.
        files: Every data file it refers to, with the end of the last item in it.
        packed: Places of the items that are compressed.
    """

    tensors: tuple[StoredTensor, ...]
    values: tuple[StoredValue, ...]
    files: Mapping[str, int] = field(default_factory=dict)
    packed: frozenset[ItemLocation] = frozenset()

    @property
    def entries(self) -> tuple[StoredTensor | StoredValue, ...]:
        """Return everything it holds."""
        return (*self.tensors, *self.values)


def read_index(folder: Path) -> CheckpointIndex:
    """Read `folder/.metadata`; nothing it names is imported or run.

    Raises:
        CheckpointError: When it is damaged, hostile, or contradicts itself.
    """
    where = str(folder / INDEX_NAME)
    return _checked_index(read_metadata(folder), where)


def read_metadata(folder: Path) -> Metadata:
    """Return the records of `folder/.metadata` before they are compared with each other.

    Raises:
        CheckpointError: When it is damaged, hostile, or too large.
    """
    path = folder / INDEX_NAME
    try:
        data = read_regular(path, MAX_INDEX_BYTES)
    except InvalidFileError as problem:
        msg = f"{path} {str(problem).removeprefix('it ')}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    return parse_metadata(data, where=str(path))


def parse_index(data: bytes, *, where: str) -> CheckpointIndex:
    """Return the index that the bytes of a `.metadata` file hold."""
    return _checked_index(parse_metadata(data, where=where), where)


def parse_metadata(data: bytes, *, where: str) -> Metadata:
    """Return the records that the bytes of a `.metadata` file hold."""
    meta = unpickle(data, INDEX_NAMES, where=where)
    if not isinstance(meta, Metadata):
        msg = f"{where} holds a {type(meta).__name__}, not a checkpoint's metadata"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    try:
        resolve_chunks(meta.state_dict_metadata.values(), len(data) // _BYTES_PER_CHUNK)
    except InvalidFileError as problem:
        msg = f"{where} is not a checkpoint that is safe to read: {problem}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    return meta


def _checked_index(meta: Metadata, where: str) -> CheckpointIndex:
    places = item_locations(meta, where)
    files = file_ends(places, where)
    tilings: Tilings = {}
    tensors, values = [], []
    for name, entry in meta.state_dict_metadata.items():
        path = _path_of(name, meta, where)
        if isinstance(entry, TensorEntry):
            tensors.append(_tensor(name, path, entry, places, tilings, where))
        elif isinstance(entry, ValueEntry):
            values.append(StoredValue(name, path, place_of(name, None, places, where)))
        else:
            msg = f"{where}: {short(str(name))} is a {type(entry).__name__}, not a tensor or a value"
            raise CheckpointError(msg, hint=COPY_AGAIN)
    return CheckpointIndex(tensors=tuple(tensors), values=tuple(values), files=files, packed=packed_items(meta))


def _path_of(name: object, meta: Metadata, where: str) -> NamePath:
    """Return the keys that lead to `name`; the name itself when the index does not say."""
    if type(name) is not str:
        msg = f"{where}: an entry is named by a {type(name).__name__}"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    paths = meta.planner_data
    if not isinstance(paths, dict) or not paths:
        return (name,)
    path = paths.get(name)
    # A path as long as its name at most: its parts may all be one long text, and many names may share it.
    if type(path) is not tuple or not path or not all(type(part) in {str, int} for part in path[: len(name) + 2]):
        msg = f"{where}: the path of {short(name)} is not a list of keys"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    if not _leads_to(path, name):
        msg = f"{where}: {short(name)} has the path {short('.'.join(str(part)[:80] for part in path[:9]))}"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    return path


def _leads_to(path: tuple[Any, ...], name: str) -> bool:
    """Say whether `path`, joined by dots, is `name`, without joining what is longer."""
    rest = len(name) + 1
    for part in path:
        rest -= len(str(part)) + 1
        if rest < 0:
            return False
    return ".".join(map(str, path)) == name


def _tensor(
    name: str, path: NamePath, entry: TensorEntry, places: Places, tilings: Tilings, where: str
) -> StoredTensor:
    """Return one tensor whose chunks tile it exactly."""
    if entry.dtype is None or entry.layout != "strided":
        msg = f"{where}: {short(name)} is a {short(entry.layout)} tensor"
        raise CheckpointError(msg, hint="only dense tensors can be merged")
    regions = regions_of(name, entry, tilings, where)
    try:
        chunks = tuple([StoredChunk(region, places[name, region[0]]) for region in regions])  # type: ignore[index]
    except KeyError:
        chunks = tuple(StoredChunk(region, place_of(name, region.offsets, places, where)) for region in regions)
    return StoredTensor(name, path, entry.dtype, entry.shape, chunks)
