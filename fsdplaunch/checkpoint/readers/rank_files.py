"""Checkpoints of one torch.save file per rank, or of a single one with the full model; read without torch."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.checkpoint.chunks import ItemLocation, Region, find_tiling_fault
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.readers.dcp_index import (
    CheckpointIndex,
    NamePath,
    StoredChunk,
    StoredTensor,
    StoredValue,
)
from fsdplaunch.checkpoint.readers.torch_zip import (
    ReadWindow,
    TorchZipItem,
    ZipDirectory,
    file_window,
    locate_data,
    read_whole,
)
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import ListedShards, MeshShard, TensorDescription, read_state
from fsdplaunch.checkpoint.untrusted_files import (
    COPY_AGAIN,
    InvalidFileError,
    open_regular,
    refuse,
    short,
)
from fsdplaunch.errors import CheckpointError

RANK_FILE = re.compile(
    r"(?P<stem>pytorch_model_fsdp(_\d+)?)(_rank(?P<rank>\d+))?\.bin"
    r"|(?P<verl>model_world_size_(?P<world>\d+))_rank_(?P<number>\d+)\.pt"
)
_MAX_RANKS = 100_000
_MAX_DEPTH = 16
# Characters of all full names together, for each byte of the description and to begin with.
_MOST_OF_NAMES = 4
_SMALL_NAMES = 2**20
_FLAT = re.compile(r"(.*\.)?_?flat_param(_\d+)?")


def all_ranks(folder: Path, names: Mapping[int, str], world: int) -> list[str]:
    """Return the files of all ranks, rank 0 first; `names` are there, by rank, and there are to be `world`.

    Raises:
        CheckpointError: One is missing, or there are more than can be.
    """
    if not names:
        msg = f"{folder} was changed while it was read: its files have gone"
        raise CheckpointError(msg, hint="read it when nothing writes to it")
    missing = [] if world > _MAX_RANKS else sorted(set(range(world)) - set(names))
    if missing or world > _MAX_RANKS:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")  # noqa: PLR2004
        msg = f"{folder} lacks the files of {len(missing)} of {world} ranks: {shown}"
        raise CheckpointError(msg, hint="copy the files of all ranks into one folder")
    return [names[rank] for rank in sorted(names)]


class RankFile(NamedTuple):
    """One rank's file while it is read."""

    name: str
    window: ReadWindow  # its bytes
    built: ZipDirectory  # its table of contents
    state: dict[Any, Any]  # the dictionary that it holds, with a description for each tensor
    most_of_names: int  # how many characters the names in it may have: one dictionary may stand in many places


@contextmanager
def reading(path: Path) -> Iterator[RankFile]:
    """Open a rank's file; what turns out to be wrong with it inside the block is an error that names it.

    Raises:
        CheckpointError: It cannot be opened or read, or what it says is not what such files say.
    """
    fd = -1
    try:
        fd = open_regular(path)
        window = file_window(fd)
        built, raw = read_whole(window)
        state = read_state(raw, f"{path}: its data.pkl")
        yield RankFile(path.name, window, built, state, _MOST_OF_NAMES * len(raw) + _SMALL_NAMES)
    except InvalidFileError as problem:
        msg = f"{path} cannot be read: {problem}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None
    finally:
        if fd >= 0:
            os.close(fd)


@dataclass(slots=True)
class FoundTensor:
    """A tensor as its shards are found."""

    path: NamePath
    dtype: Dtype
    shape: tuple[int, ...]
    shards: dict[Region, ItemLocation] = field(default_factory=dict)


@dataclass(slots=True)
class FoundTensors:
    """What the files of a folder hold, as they are read, and the size of each."""

    folder: Path
    tensors: dict[str, FoundTensor] = field(default_factory=dict)
    values: dict[str, StoredValue] = field(default_factory=dict)
    items: dict[ItemLocation, TorchZipItem] = field(default_factory=dict)
    on_meshes: list[tuple[str, str, MeshShard, ItemLocation]] = field(default_factory=list)
    sharded: bool = False
    sizes: dict[str, int] = field(default_factory=dict)

    def place(
        self, file: RankFile, path: NamePath, kind: tuple[Dtype, Any], local: TensorDescription
    ) -> ItemLocation:
        """Note where a shard's bytes are and return their place; all files must say the same of the tensor."""
        (dtype, shape), name = kind, ".".join(map(str, path))
        if local.dtype.name != dtype.name:
            refuse(f"{short(name)} is {dtype.name}, its shard {local.dtype.name}")
        full = self.tensors.setdefault(name, FoundTensor(path, dtype, shape))
        if (full.dtype.name, full.shape) != (dtype.name, shape):
            here = f"{dtype.name} of shape {list(shape)}"
            msg = f"{self.folder}: {short(name)} is {here} in {file.name}, but not in another file"
            raise CheckpointError(msg, hint="the files are from different saves")
        item = locate_data(file.window, file.built, local)
        first = item.data_offset + local.start * dtype.size
        place = ItemLocation(file.name, first, item.data_length)
        item = item._replace(data_offset=item.data_offset - first)
        if self.items.setdefault(place, item) != item:
            refuse(f"{short(name)} and another tensor describe the same bytes differently")
        return place

    def add(
        self,
        file: RankFile,
        path: NamePath,
        kind: tuple[Dtype, tuple[int, ...]],
        shards: Iterable[tuple[Region, TensorDescription]],
    ) -> None:
        """Add shards of a tensor, whose dtype and shape are `kind`, that a file holds."""
        self.tensors.setdefault(".".join(map(str, path)), FoundTensor(path, *kind))
        for region, local in shards:
            place = self.place(file, path, kind, local)
            self.add_placed(file.name, ".".join(map(str, path)), region, local, place)

    def add_placed(
        self, file: str, name: str, region: Region, local: TensorDescription, place: ItemLocation
    ) -> None:
        """Add a shard whose place is noted to a tensor that is known."""
        if local.shape != region.sizes:
            shapes = f"of shape {list(local.shape)} instead of {list(region.sizes)}"
            msg = f"{self.folder / file}: {short(name)} has a shard {shapes}"
            raise CheckpointError(msg, hint="files of other ranks are missing, or from another save")
        self.tensors[name].shards.setdefault(region, place)  # ranks that hold the same shard each write it

    def index(self) -> CheckpointIndex:
        """Return what the checkpoint holds.

        Raises:
            CheckpointError: Shards of a tensor are missing, or overlap.
        """
        tensors = []
        for name, full in self.tensors.items():
            regions = sorted(region for region in full.shards if region.numel)
            fault = find_tiling_fault(full.shape, regions)
            if fault is not None:
                msg = f"{self.folder}: {short(name)} of shape {list(full.shape)}: {fault}"
                raise CheckpointError(msg, hint="copy the files of all ranks into one folder")
            chunks = tuple(StoredChunk(region, full.shards[region]) for region in regions)
            tensors.append(StoredTensor(name, full.path, full.dtype, full.shape, chunks))
        return CheckpointIndex(tensors=tuple(tensors), values=tuple(self.values.values()), files=self.sizes)


def read_rank_files(folder: Path) -> tuple[CheckpointIndex, dict[ItemLocation, TorchZipItem]]:
    """Read what each file says it holds.

    Returns:
        What the checkpoint holds, and where each shard's bytes are, by its place.

    Raises:
        CheckpointError: When a file is damaged or hostile, when files are missing, or shards do not fit together.
    """
    groups: dict[str, dict[int, str]] = {}
    world = 0
    for path in folder.iterdir():
        match = RANK_FILE.fullmatch(path.name)
        if match:
            ranked = match["rank"] or match["number"]
            stem = (match["stem"] or match["verl"]) + ("" if ranked is None else " by rank")
            groups.setdefault(stem, {})[int(ranked or 0)] = path.name
            world = int(match["world"] or 0)
    if len(groups) > 1:
        shown = ", ".join(sorted(min(group.values()) for group in groups.values()))
        msg = f"{folder} holds {len(groups)} models: {shown}"
        raise CheckpointError(msg, hint="move the files of one of them into a folder of its own")
    ranks = next(iter(groups.values()), {})
    names, found = all_ranks(folder, ranks, world or max(ranks, default=0) + 1), FoundTensors(folder)
    for name in names:
        with reading(folder / name) as file:
            left = file.most_of_names
            for name_path, value in _entries(file.state, (), 0):
                left -= sum(len(part) if type(part) is str else 1 for part in name_path) + 1
                if left < 0:
                    refuse(f"its names take up more than {_MOST_OF_NAMES} times its size")
                _take(file, name_path, value, found)
        found.sizes[name] = file.window.length
    _place_on_meshes(found)
    if len(names) > 1 and not found.sharded:
        msg = f"{folder} holds {len(names)} files of plain tensors: nothing says how they fit together"
        raise CheckpointError(msg, hint="save with SHARDED_STATE_DICT, or merge with the tool that wrote them")
    return found.index(), found.items


def _entries(state: dict[Any, Any], path: NamePath, depth: int) -> Iterator[tuple[NamePath, Any]]:
    if depth > _MAX_DEPTH:
        refuse(f"its dictionaries nest more than {_MAX_DEPTH} deep")
    for key, value in state.items():
        if type(key) not in {str, int}:
            refuse(f"an entry is named by a {type(key).__name__}")
        if isinstance(value, dict) and value:
            yield from _entries(value, (*path, key), depth + 1)
        else:
            yield (*path, key), value


def _take(file: RankFile, path: NamePath, value: Any, found: FoundTensors) -> None:
    name = ".".join(map(str, path))
    if _FLAT.fullmatch(name):
        where = found.folder / file.name
        msg = f"{where} holds FSDP1's flat parameters (LOCAL_STATE_DICT), whose shapes only the model knows"
        hint = "load it into the same model on the same number of ranks, and save that with SHARDED_STATE_DICT"
        raise CheckpointError(msg, hint=hint)
    if isinstance(value, MeshShard):
        place = found.place(file, path, (value.dtype, value.shape), value.local)
        found.on_meshes.append((file.name, name, value, place))
    elif isinstance(value, ListedShards):
        found.sharded = True
        found.add(file, path, (value.dtype, value.shape), value.parts)
    elif isinstance(value, TensorDescription):
        if name not in found.tensors:  # every rank has the full tensor: rank 0's is taken
            region = Region((0,) * len(value.shape), value.shape)
            found.add(file, path, (value.dtype, value.shape), [(region, value)])
    else:
        found.values.setdefault(name, StoredValue(name, path, ItemLocation(file.name, 0, 0)))


def _place_on_meshes(found: FoundTensors) -> None:
    """Resolve which rectangle each shard on a mesh is; the mesh is as large as the ranks' places in it say."""
    extents: dict[str, tuple[int, ...]] = {}
    for _, name, shard, _ in found.on_meshes:
        known = extents.get(name, (0,) * len(shard.coordinates))
        if len(shard.coordinates) != len(shard.placements) or len(known) != len(shard.coordinates):
            msg = f"{found.folder}: {short(name)} is placed on meshes that do not match"
            raise CheckpointError(msg, hint=COPY_AGAIN)
        extents[name] = tuple(max(size, at + 1) for size, at in zip(known, shard.coordinates, strict=True))
    for file, name, shard, place in found.on_meshes:
        found.sharded = True
        # As torch cuts: into parts of equal size, the last ones smaller or empty.
        offsets, sizes = [0] * len(shard.shape), list(shard.shape)
        for dim, count, at in zip(shard.placements, extents[name], shard.coordinates, strict=True):
            if dim is None:
                continue
            if not -len(sizes) <= dim < len(sizes):
                msg = f"a tensor of {len(sizes)} dimensions is cut along dimension {dim}"
                raise CheckpointError(msg, hint=COPY_AGAIN)
            step = -(-sizes[dim] // count)
            start = min(step * at, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(step, sizes[dim] - start)
        found.add_placed(file, name, Region(tuple(offsets), tuple(sizes)), shard.local, place)
