"""What a checkpoint's `.metadata` says: its tensors, their chunks, and where each chunk's bytes stand.

Only plain values of our own come out of the file; `records.py` has what may go in. Sizes are checked against
each other here, and against the files in `sources.py`.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from fsdplaunch.checkpoint.boxes import Box, find_tiling_fault
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.records import NAMES, Index, Info, Meta, TensorEntry, ValueEntry
from fsdplaunch.checkpoint.refusal import short
from fsdplaunch.checkpoint.unpickle import unpickle
from fsdplaunch.errors import CheckpointError

INDEX_NAME = ".metadata"
MAX_INDEX_BYTES = 256 * 2**20
MAX_CHUNKS_PER_TENSOR = 1_000_000
MAX_FILES = 1_000_000
_COPY_AGAIN = "copy the checkpoint again from where it was written"

NamePath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one item stands: a file of the checkpoint, a byte offset and a length in bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A rectangle of a tensor, in elements, and where its item stands."""

    box: Box
    place: Place


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the checkpoint.

    Attributes:
        name: Its full name in the checkpoint.
        path: The keys that lead to it in the saved state, outermost first.
        dtype: Its element type.
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
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.size


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One entry that is not a tensor, as a pickled item."""

    name: str
    path: NamePath
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """Everything that `.metadata` says, checked against itself.

    Attributes:
        tensors: The tensors, in the file's order.
        values: The entries that are not tensors.
        files: Every data file it refers to, with the end of the last item in it.
    """

    tensors: tuple[StoredTensor, ...]
    values: tuple[StoredValue, ...]
    files: Mapping[str, int] = field(default_factory=dict)

    @property
    def entries(self) -> tuple[StoredTensor | StoredValue, ...]:
        """Everything it holds."""
        return (*self.tensors, *self.values)


def read_index(folder: Path) -> CheckpointIndex:
    """Read `folder/.metadata`; nothing it names is imported or run.

    Raises:
        CheckpointError: When it is damaged, hostile, or contradicts itself.
    """
    path = folder / INDEX_NAME
    with path.open("rb") as file:
        fits = os.fstat(file.fileno()).st_size <= MAX_INDEX_BYTES
        data = file.read(MAX_INDEX_BYTES + 1) if fits else b""
    if not fits or len(data) > MAX_INDEX_BYTES:
        msg = f"{path} is larger than {MAX_INDEX_BYTES >> 20} MiB, more than an index is expected to need"
        raise CheckpointError(msg)
    return parse_index(data, where=str(path))


def parse_index(data: bytes, *, where: str) -> CheckpointIndex:
    """Return the index that the bytes of a `.metadata` file hold."""
    meta = unpickle(data, NAMES, where=where)
    if not isinstance(meta, Meta):
        msg = f"{where} holds a {type(meta).__name__}, not a checkpoint's metadata"
        raise CheckpointError(msg, hint=_COPY_AGAIN)
    places = _places(meta, where)
    tensors, values = [], []
    for name, entry in meta.state_dict_metadata.items():
        path = _path_of(name, meta, where)
        if isinstance(entry, TensorEntry):
            tensors.append(_tensor(name, path, entry, places, where))
        elif isinstance(entry, ValueEntry):
            values.append(StoredValue(name, path, _place_of(name, None, places, where)))
        else:
            msg = f"{where}: {short(str(name))} is a {type(entry).__name__}, not a tensor or a value"
            raise CheckpointError(msg, hint=_COPY_AGAIN)
    return CheckpointIndex(tensors=tuple(tensors), values=tuple(values), files=_file_ends(places))


def check_file_name(name: str, where: str) -> str:
    """Return `name` when it is the plain name of a file beside the index, refuse it otherwise."""
    if not name or name in {".", ".."} or "/" in name or "\\" in name or not name.isprintable() or len(name) > 255:  # noqa: PLR2004
        msg = f"{where} refers to {short(name)}, which is not the name of a file in the checkpoint's folder"
        raise CheckpointError(msg, hint="the checkpoint was altered; nothing was read from there")
    return name


Places = dict[tuple[str, tuple[int, ...] | None], Place]


def _places(meta: Meta, where: str) -> Places:
    places: Places = {}
    known: set[str] = set()
    for index, info in meta.storage_data.items():
        if not isinstance(index, Index) or not isinstance(info, Info):
            msg = f"{where}: an entry of its storage table is a {type(info).__name__}"
            raise CheckpointError(msg, hint=_COPY_AGAIN)
        if info.transforms:
            msg = f"{where}: {short(index.fqn)} is stored through {short(', '.join(info.transforms))}"
            raise CheckpointError(
                msg,
                hint="compressed checkpoints are not supported; load it with torch and save it without extensions",
            )
        if info.relative_path not in known:
            known.add(check_file_name(info.relative_path, where))
        places[index.fqn, index.offset] = Place(info.relative_path, info.offset, info.length)
    if len(known) > MAX_FILES:
        msg = f"{where} refers to {len(known)} files"
        raise CheckpointError(msg)
    _check_apart(places, where)
    return places


def _check_apart(places: Places, where: str) -> None:
    """Refuse items that share bytes: no writer does that, and a damaged offset shows this way."""
    spans = sorted((place.file, place.offset, place.length, name) for (name, _), place in places.items())
    for (file, offset, length, name), (other_file, other_offset, _, other) in pairwise(spans):
        if file == other_file and offset + length > other_offset:
            msg = f"{where}: {short(name)} and {short(other)} share bytes of {file}"
            raise CheckpointError(msg, hint=_COPY_AGAIN)


def _file_ends(places: Places) -> dict[str, int]:
    ends: dict[str, int] = {}
    for place in places.values():
        ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    return ends


def _place_of(name: str, offset: tuple[int, ...] | None, places: Places, where: str) -> Place:
    try:
        return places[name, offset]
    except KeyError:
        part = "" if offset is None else f" at {list(offset)}"
        msg = f"{where}: {short(name)}{part} has no bytes in any file"
        raise CheckpointError(msg, hint="the save did not finish; use an older checkpoint") from None


def _path_of(name: object, meta: Meta, where: str) -> NamePath:
    """Return the keys that lead to `name`; the name itself when the index does not say."""
    if type(name) is not str:
        msg = f"{where}: an entry is named by a {type(name).__name__}"
        raise CheckpointError(msg, hint=_COPY_AGAIN)
    paths = meta.planner_data
    if not isinstance(paths, dict) or not paths:
        return (name,)
    path = paths.get(name)
    if type(path) is not tuple or not path or not all(type(part) in {str, int} for part in path):
        msg = f"{where}: the path of {short(name)} is not a list of keys"
        raise CheckpointError(msg, hint=_COPY_AGAIN)
    if ".".join(map(str, path)) != name:
        msg = f"{where}: {short(name)} is said to stand at {short('.'.join(map(str, path)))}"
        raise CheckpointError(msg, hint=_COPY_AGAIN)
    return path


def _tensor(name: str, path: NamePath, entry: TensorEntry, places: Places, where: str) -> StoredTensor:
    """Return one tensor whose chunks tile it exactly."""
    if entry.dtype is None or entry.layout != "strided":
        msg = f"{where}: {short(name)} is a {short(entry.layout)} tensor"
        raise CheckpointError(msg, hint="only dense tensors can be merged")
    if len(entry.chunks) > MAX_CHUNKS_PER_TENSOR:
        msg = f"{where}: {short(name)} has {len(entry.chunks)} chunks"
        raise CheckpointError(msg)
    boxes = sorted(box for box in entry.chunks if math.prod(box.sizes))
    fault = find_tiling_fault(entry.shape, boxes)
    if fault is not None:
        msg = f"{where}: {short(name)} of shape {list(entry.shape)}: {fault}"
        raise CheckpointError(msg, hint="the save did not finish or the index is damaged; use another checkpoint")
    chunks = tuple(StoredChunk(box, _place_of(name, box.offsets, places, where)) for box in boxes)
    return StoredTensor(name, path, entry.dtype, entry.shape, chunks)
