"""What a checkpoint's `.metadata` says: its tensors, their chunks, and where each chunk's bytes stand.

It is checked for fitting together; the data files are not opened here.
"""

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdplaunch.checkpoint.chunks import ItemKey, ItemLocation, Region, find_tiling_fault
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.manifest import INDEX_NAME, MAX_INDEX_BYTES
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import Metadata, TensorEntry, read_records
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, read_regular, short
from fsdplaunch.errors import CheckpointError


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


MAX_CHUNKS_PER_TENSOR = 1_000_000
MAX_FILES = 1_000_000
COPY_AGAIN = "copy the checkpoint again from where it was written"

Places = dict[ItemKey, ItemLocation]
# What was found out about a shape and its chunks: they in order, or how they fail. A model's layers repeat it.
Tilings = dict[tuple[tuple[int, ...], tuple[Region, ...]], tuple[Region, ...] | str]


def check_places(meta: Metadata, where: str) -> None:
    """Check that all chunks of an index are there, each in bytes of its own, and tile their tensors.

    Raises:
        CheckpointError: They do not.
    """
    places = meta.places
    file_ends(places, where)
    tilings: Tilings = {}
    for name, entry in meta.entries.items():
        if entry is None:
            place_of(name, None, places, where)
            continue
        for offsets, _ in regions_of(name, entry, tilings, where):
            if (name, offsets) not in places:
                place_of(name, offsets, places, where)


def regions_of(name: str, entry: TensorEntry, tilings: Tilings, where: str) -> tuple[Region, ...]:
    """Return a tensor's chunks in order, without empty ones.

    Raises:
        CheckpointError: They do not tile it.
    """
    if len(entry.chunks) > MAX_CHUNKS_PER_TENSOR:
        msg = f"{where}: {short(name)} has {len(entry.chunks)} chunks"
        raise CheckpointError(msg)
    key = (entry.shape, tuple(entry.chunks))
    regions = tilings.get(key)
    if regions is None:
        regions = tilings[key] = _tiling(*key)
    if isinstance(regions, str):
        msg = f"{where}: {short(name)} of shape {list(entry.shape)}: {regions}"
        raise CheckpointError(msg, hint="the save did not finish or the index is damaged; use another checkpoint")
    return regions


def _tiling(shape: tuple[int, ...], chunks: tuple[Region, ...]) -> tuple[Region, ...] | str:
    """Return the chunks in order, without empty ones, or how they fail to tile the shape."""
    regions = sorted(region for region in chunks if math.prod(region.sizes))
    return find_tiling_fault(shape, regions) or tuple(regions)


def check_files(places: Places, where: str) -> None:
    """Check that items stand in files beside the index.

    Raises:
        CheckpointError: A file lies outside the checkpoint's folder, or there are too many.
    """
    known = {place.file for place in places.values()}
    if len(known) > MAX_FILES:
        msg = f"{where} refers to {len(known)} files"
        raise CheckpointError(msg)
    for name in known:
        check_file_name(name, where)


def file_ends(places: Places, where: str) -> dict[str, int]:
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
            _refuse_shared(file, offset, places, where)
        ends[file] = end = offset + length
    return ends


def _refuse_shared(file: str, offset: int, places: Places, where: str) -> NoReturn:
    """Name the two items that share the byte at `offset`."""
    here = [key.fqn for key, place in places.items() if place.file == file and _holds(place, offset)]
    msg = f"{where}: {' and '.join(short(name) for name in here[:2])} share bytes of {file}"
    raise CheckpointError(msg, hint=COPY_AGAIN)


def _holds(place: ItemLocation, offset: int) -> bool:
    return place.offset <= offset < place.offset + max(place.length, 1)


def place_of(name: str, offset: tuple[int, ...] | None, places: Places, where: str) -> ItemLocation:
    """Return where an item stands.

    Raises:
        CheckpointError: Nowhere.
    """
    try:
        return places[ItemKey(name, offset)]
    except KeyError:
        part = "" if offset is None else f" at {list(offset)}"
        msg = f"{where}: {short(name)}{part} has no bytes in any file"
        raise CheckpointError(msg, hint="the save did not finish; use an older checkpoint") from None


def check_file_name(name: str, where: str) -> str:
    """Return `name` when it is the plain name of a file beside the index, refuse it otherwise."""
    if not name or name in {".", ".."} or "/" in name or "\\" in name or not name.isprintable() or len(name) > 255:  # noqa: PLR2004
        msg = f"{where} refers to {short(name)}, which is not the name of a file in the checkpoint's folder"
        raise CheckpointError(msg, hint="the checkpoint was altered; nothing was read from there")
    return name


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
        places: Where each item of a sharded checkpoint stands, those of empty chunks as well.
    """

    tensors: tuple[StoredTensor, ...]
    values: tuple[StoredValue, ...]
    files: Mapping[str, int] = field(default_factory=dict)
    places: tuple[ItemLocation, ...] = ()

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
    try:
        meta = read_records(data, where)
    except InvalidFileError as problem:
        msg = f"{where} is not a checkpoint that is safe to read: {problem}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    check_files(meta.places, where)
    return meta


def _checked_index(meta: Metadata, where: str) -> CheckpointIndex:
    places = meta.places
    files = file_ends(places, where)
    tilings: Tilings = {}
    tensors, values = [], []
    for name, entry in meta.entries.items():
        path = _path_of(name, meta, where)
        if entry is None:
            values.append(StoredValue(name, path, place_of(name, None, places, where)))
        else:
            tensors.append(_tensor(name, path, entry, places, tilings, where))
    listed = tuple(places.values())
    return CheckpointIndex(tensors=tuple(tensors), values=tuple(values), files=files, places=listed)


def _path_of(name: str, meta: Metadata, where: str) -> NamePath:
    """Return the keys that lead to `name`; the name itself when the index does not say."""
    paths = meta.paths
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
    if entry.layout != "strided":
        msg = f"{where}: {short(name)} is a {short(entry.layout)} tensor"
        raise CheckpointError(msg, hint="only dense tensors can be merged")
    regions = regions_of(name, entry, tilings, where)
    try:
        chunks = tuple([StoredChunk(region, places[name, region[0]]) for region in regions])  # type: ignore[index]
    except KeyError:
        chunks = tuple(StoredChunk(region, place_of(name, region.offsets, places, where)) for region in regions)
    return StoredTensor(name, path, entry.dtype, entry.shape, chunks)
