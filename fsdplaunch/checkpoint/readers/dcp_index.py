"""What a checkpoint's `.metadata` says: its tensors, their chunks, and where each chunk's bytes stand.

It is checked for fitting together; the data files are not opened here.
"""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.checkpoint.chunks import ItemKey, ItemLocation, Region, find_tiling_fault
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.manifest import INDEX_NAME, MAX_INDEX_BYTES
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import Metadata, TensorEntry, read_records
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, read_regular, short
from fsdplaunch.errors import CheckpointError

_MAX_CHUNKS_PER_TENSOR = 1_000_000
_MAX_FILES = 1_000_000
_COPY_AGAIN = "copy the checkpoint again from where it was written"
_UNFINISHED = "the save did not finish or the index is damaged; use another checkpoint"
Places = Mapping[ItemKey, ItemLocation]
# What was found out about a shape and its chunks: they in order, or how they fail. A model's layers repeat it.
Tilings = dict[tuple[tuple[int, ...], tuple[Region, ...]], tuple[Region, ...] | str]
NamePath = tuple[str | int, ...]


@contextmanager
def gc_pause() -> Iterator[None]:
    """Stop the search for cycles inside the block: with so many objects it would take a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class StoredChunk(NamedTuple):
    """A rectangle of a tensor, in elements, and where its item stands."""

    region: Region
    place: ItemLocation


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint."""

    name: str  # its full name in the checkpoint
    path: NamePath  # the keys that lead to it in the saved state, outermost first
    dtype: Dtype
    shape: tuple[int, ...]  # its global shape
    chunks: tuple[StoredChunk, ...]  # what it is made of, without empty chunks, sorted by offset

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
    """Everything that `.metadata` says, checked against itself."""

    tensors: tuple[StoredTensor, ...]  # the tensors, in the file's order
    values: tuple[StoredValue, ...]  # the entries that are not tensors
    # Every data file it refers to, with the end of the last item in it.
    files: Mapping[str, int] = field(default_factory=dict)
    # Where each item of a sharded checkpoint stands, those of empty chunks as well.
    places: Places = field(default_factory=dict)

    @property
    def entries(self) -> tuple[StoredTensor | StoredValue, ...]:
        """Return everything it holds."""
        return (*self.tensors, *self.values)


def read_index(folder: Path) -> CheckpointIndex:
    """Read `folder/.metadata`; nothing it names is imported or run.

    Raises:
        CheckpointError: When it is damaged, hostile, or contradicts itself.
    """
    path = folder / INDEX_NAME
    try:
        data = read_regular(path, MAX_INDEX_BYTES)
    except InvalidFileError as problem:
        msg = f"{path} {str(problem).removeprefix('it ')}"
        raise CheckpointError(msg, hint=_COPY_AGAIN) from None
    return parse_index(data, where=str(path))


def parse_index(data: bytes, *, where: str) -> CheckpointIndex:
    """Return the index that the bytes of a `.metadata` file hold."""
    try:
        meta = read_records(data, where)
    except InvalidFileError as problem:
        msg = f"{where} is not a checkpoint that is safe to read: {problem}"
        raise CheckpointError(msg, hint=_COPY_AGAIN) from None
    files = {place.file for place in meta.places.values()}
    if len(files) > _MAX_FILES:
        msg = f"{where} refers to {len(files)} files, at most {_MAX_FILES} are read"
        raise CheckpointError(msg)
    for name in files:
        if name in {"", ".", ".."} or {*"/\\"} & {*name} or not name.isprintable() or len(name) > 255:  # noqa: PLR2004
            msg = f"{where} refers to {short(name)}, which is not the name of a file in the checkpoint's folder"
            raise CheckpointError(msg, hint="the checkpoint was altered; nothing was read from there")
    ends = _file_ends(meta.places, where)
    tilings: Tilings = {}
    tensors, values = [], []
    for name, entry in meta.entries.items():
        path = _path_of(name, meta, where)
        if entry is None:
            values.append(StoredValue(name, path, _place_of(name, None, meta.places, where)))
            continue
        if entry.layout != "strided":
            msg = f"{where}: {short(name)} is a {short(entry.layout)} tensor"
            raise CheckpointError(msg, hint="only dense tensors can be read")
        regions = _regions_of(name, entry, tilings, where)
        chunks = tuple([StoredChunk(region, _place_of(name, region[0], meta.places, where)) for region in regions])
        tensors.append(StoredTensor(name, path, entry.dtype, entry.shape, chunks))
    return CheckpointIndex(tensors=tuple(tensors), values=tuple(values), files=ends, places=meta.places)


def _file_ends(places: Places, where: str) -> dict[str, int]:
    """Return where the last item of each file ends.

    Items that share bytes are refused: no writer does that, and a damaged offset shows this way.
    """
    ends: dict[str, int] = {}
    last = ""
    end = 0
    for file, offset, length in sorted(places.values()):
        if file != last:
            last, end = file, 0
        if offset < end:
            here = [
                short(key.fqn)
                for key, place in places.items()
                if place.file == file and place.offset <= offset < place.offset + max(place.length, 1)
            ]
            msg = f"{where}: {' and '.join(here[:2])} share bytes of {file}"
            raise CheckpointError(msg, hint=_COPY_AGAIN)
        ends[file] = end = offset + length
    return ends


def _regions_of(name: str, entry: TensorEntry, tilings: Tilings, where: str) -> tuple[Region, ...]:
    """Return a tensor's chunks in order, without empty ones; they have to tile it."""
    if len(entry.chunks) > _MAX_CHUNKS_PER_TENSOR:
        msg = f"{where}: {short(name)} has {len(entry.chunks)} chunks, at most {_MAX_CHUNKS_PER_TENSOR} are read"
        raise CheckpointError(msg)
    key = (entry.shape, tuple(entry.chunks))
    regions = tilings.get(key)
    if regions is None:
        full = sorted(region for region in entry.chunks if math.prod(region.sizes))
        regions = tilings[key] = find_tiling_fault(entry.shape, full) or tuple(full)
    if isinstance(regions, str):
        msg = f"{where}: {short(name)} of shape {list(entry.shape)}: {regions}"
        raise CheckpointError(msg, hint=_UNFINISHED)
    return regions


def _place_of(name: str, offset: tuple[int, ...] | None, places: Places, where: str) -> ItemLocation:
    try:
        return places[name, offset]  # type: ignore[index]  # as an ItemKey hashes, and made faster
    except KeyError:
        part = "" if offset is None else f" at {list(offset)}"
        msg = f"{where}: {short(name)}{part} has no bytes in any file"
        raise CheckpointError(msg, hint="the save did not finish; use an older checkpoint") from None


def _path_of(name: str, meta: Metadata, where: str) -> NamePath:
    """Return the keys that lead to `name`; the name itself when the index does not say."""
    paths = meta.paths
    if not isinstance(paths, dict) or not paths:
        return (name,)
    path: Any = paths.get(name)
    # A path as long as its name at most: its parts may all be one long text, and many names may share it.
    if type(path) is not tuple or not path or not all(type(part) in {str, int} for part in path[: len(name) + 2]):
        msg = f"{where}: the path of {short(name)} is not a list of keys"
        raise CheckpointError(msg, hint=_COPY_AGAIN)
    rest = len(name) + 1
    for part in path:
        rest -= len(str(part)) + 1
        if rest < 0:
            break
    if rest or ".".join(map(str, path)) != name:
        msg = f"{where}: {short(name)} has the path {short('.'.join(str(part)[:80] for part in path[:9]))}"
        raise CheckpointError(msg, hint=_COPY_AGAIN)
    return path
