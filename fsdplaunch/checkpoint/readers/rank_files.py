"""Checkpoints of one torch.save file per rank, or of a single one with the full model; read without torch."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fsdplaunch.checkpoint.chunks import ItemLocation, Region, find_tiling_fault, row_major
from fsdplaunch.checkpoint.dtypes import Dtype
from fsdplaunch.checkpoint.manifest import MANIFEST_NAME, model_entry
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
    locate_data,
    member_bytes,
    read_zip,
)
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import ListedShards, MeshShard, TensorDescription, read_state
from fsdplaunch.checkpoint.untrusted_files import (
    COPY_AGAIN,
    InvalidFileError,
    check_count,
    check_counts,
    open_regular,
    read_exactly,
    short,
)
from fsdplaunch.errors import CheckpointError

MAX_RANKS = 100_000


def check_still_there(folder: Path, files: Sized) -> None:
    """Check that a folder that was found to hold a checkpoint's files still does.

    Raises:
        CheckpointError: They have gone since.
    """
    if not files:
        msg = f"{folder} was changed while it was read: its files have gone"
        raise CheckpointError(msg, hint="read it when nothing writes to it")


def all_ranks(folder: Path, names: Mapping[int, str], world: int) -> list[str]:
    """Return the files of all ranks, rank 0 first.

    Args:
        folder: Where they are.
        names: Those that are there, by rank.
        world: How many there are to be.

    Raises:
        CheckpointError: One is missing, or there are more than can be.
    """
    missing = [] if world > MAX_RANKS else sorted(set(range(world)) - set(names))
    if missing or world > MAX_RANKS:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")  # noqa: PLR2004
        msg = f"{folder} lacks the files of {len(missing)} of {world} ranks: {shown}"
        raise CheckpointError(msg, hint="bring the files of all ranks together")
    return [names[rank] for rank in sorted(names)]


@contextmanager
def reading(path: Path) -> Iterator[ReadWindow]:
    """Give a file's bytes, all of it; what turns out to be wrong with it is an error that names it.

    Raises:
        CheckpointError: It cannot be opened or read, or what it says is not what such files say.
    """
    try:
        fd = open_regular(path)
    except InvalidFileError as problem:
        refuse(path, str(problem))
    try:
        yield ReadWindow(lambda offset, count: read_exactly(fd, offset, count), os.fstat(fd).st_size)
    except (InvalidFileError, UnicodeDecodeError) as problem:
        refuse(path, str(problem) if isinstance(problem, InvalidFileError) else "a text in it is damaged")
    finally:
        os.close(fd)


def refuse(path: Path, reason: str) -> NoReturn:
    """Raise the error of a file that cannot be read."""
    msg = f"{path} cannot be read: {reason}"
    raise CheckpointError(msg, hint=COPY_AGAIN) from None


@dataclass(frozen=True, slots=True)
class FlatParameterSpan:
    """A parameter in a flat parameter.

    Attributes:
        names: All its names.
        shape: Its shape.
        start: Its first element's place in the flat parameter.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """One flat parameter.

    Attributes:
        ranks: The ranks that hold its parts, in the order of the parts; others hold replicas.
        part: Elements of each part but the last.
        numel: Elements in all.
        runs: Its parameters; padding lies between them.
    """

    ranks: tuple[int, ...]
    part: int
    numel: int
    runs: tuple[FlatParameterSpan, ...]

    def pieces(
        self, rank: int, local: TensorDescription
    ) -> Iterator[tuple[FlatParameterSpan, Region, TensorDescription]]:
        """Yield the rectangles of parameters that a rank holds, and where each is in its file.

        Args:
            rank: One of `ranks`.
            local: The rank's part, of one dimension.

        Raises:
            InvalidFileError: The part has another size than the rank's place in the order gives it.
        """
        first = min(self.ranks.index(rank) * self.part, self.numel)
        last = min(first + self.part, self.numel)
        if local.shape != (last - first,) or local.strides not in {(1,), ()}:
            msg = f"its flat parameter has shape {list(local.shape)} where [{last - first}] belongs"
            raise InvalidFileError(msg)
        for run in self.runs:
            begin, end = max(first, run.start), min(last, run.start + math.prod(run.shape))
            for start, region in rectangles(run.shape, begin - run.start, end - run.start):
                here = local.start + run.start + start - first
                yield run, region, replace(local, shape=region.sizes, strides=row_major(region.sizes), start=here)


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, Region]]:
    """Cut the elements `begin` to `end` of a row-major tensor into rectangles of consecutive elements.

    Args:
        shape: The tensor's shape.
        begin: The first element.
        end: One past the last.

    Yields:
        Each rectangle's first element, and the rectangle; in their order.
    """
    if begin >= end:
        return
    if len(shape) <= 1:
        yield begin, Region((begin,) * len(shape), (end - begin,) * len(shape))
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows: first to last
    if first > last:  # both ends in one row
        yield from _inside(shape, last, begin, end)
        return
    yield from _inside(shape, first - 1, begin, first * row)
    if first < last:
        offsets, sizes = (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        yield first * row, Region(offsets, sizes)
    yield from _inside(shape, last, last * row, end)


def _inside(shape: tuple[int, ...], at: int, begin: int, end: int) -> Iterator[tuple[int, Region]]:
    """Yield the rectangles within row `at`."""
    row = at * math.prod(shape[1:])
    for start, (offsets, sizes) in rectangles(shape[1:], begin - row, end - row):
        yield row + start, Region((at, *offsets), (1, *sizes))


def read_flat_layouts(folder: Path, number: int) -> dict[str, FlatLayout]:
    """Read what the manifest of a checkpoint says about the flat parameters of one of its models.

    Args:
        folder: The checkpoint.
        number: The model's number.

    Returns:
        By the flat parameter's name; empty without a manifest that says it.

    Raises:
        InvalidFileError: What it says is not a layout.
    """
    flat = model_entry(folder, number).get("flat_parameters")
    try:
        return {str(name): _layout(value) for name, value in flat.items()} if isinstance(flat, dict) else {}
    except (LookupError, TypeError):
        msg = f"what {MANIFEST_NAME} beside it says about flat parameters cannot be read"
        raise InvalidFileError(msg) from None


def _layout(entry: Any) -> FlatLayout:
    ranks = tuple(check_count(rank, "a rank") for rank in entry["ranks"])
    part = check_count(entry["part"], "a part")
    runs, start = list[FlatParameterSpan](), 0
    for names, sizes in entry["runs"]:
        shape = check_counts(tuple(sizes), "a shape")
        if names:
            runs.append(FlatParameterSpan(tuple(map(str, names)), shape, start))
        start += math.prod(shape)
    if len(set(ranks)) != len(ranks) or part * len(ranks) < start:
        msg = "the manifest's shards do not make up its flat parameter"
        raise InvalidFileError(msg)
    return FlatLayout(ranks, part, start, tuple(runs))


def shard_region(shard: MeshShard, mesh: tuple[int, ...]) -> Region:
    """Return the rectangle of a rank, as torch cuts: into parts of equal size, the last ones smaller or empty.

    Args:
        shard: The shard, with the rank's place in the mesh.
        mesh: The mesh's shape.
    """
    offsets, sizes = [0] * len(shard.shape), list(shard.shape)
    for axis in _order_of_cuts(shard, mesh):
        placement, count, at = shard.placements[axis], mesh[axis], shard.coordinates[axis]
        dim = placement.dim
        if dim is None:
            continue
        if not -len(sizes) <= dim < len(sizes):
            msg = f"a tensor of {len(sizes)} dimensions is cut along dimension {dim}"
            raise CheckpointError(msg, hint=COPY_AGAIN)
        step = -(-sizes[dim] // count)
        start = min(step * at, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(step, sizes[dim] - start)
    return Region(tuple(offsets), tuple(sizes))


def _order_of_cuts(shard: MeshShard, mesh: tuple[int, ...]) -> list[int]:
    """Return the mesh's axes in the order in which they cut a tensor: those that cut what others cut come last.

    FSDP cuts parameters along an axis before that of tensor parallelism, which had cut them already; torch calls
    such a placement strided, by as many as the later axes cut.
    """
    plain = [axis for axis, placement in enumerate(shard.placements) if placement.cuts == 1]
    strided = [axis for axis, placement in enumerate(shard.placements) if placement.cuts != 1]
    for axis in strided:
        dim = shard.placements[axis].dim
        later = (mesh[other] for other in plain if other > axis and shard.placements[other].dim == dim)
        if len(strided) > 1 or math.prod(later) != shard.placements[axis].cuts:
            msg = "a tensor is placed by _StridedShard, and not as FSDP cuts what tensor parallelism has cut"
            raise CheckpointError(
                msg, hint="save it with SHARDED_STATE_DICT, whose index says where each shard is"
            )
    return plain + strided


class OpenFile(NamedTuple):
    """One rank's file while it is read: its name, its bytes, and its table of contents."""

    name: str
    window: ReadWindow
    built: ZipDirectory


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

    def place(self, file: OpenFile, name: str, dtype: Dtype, local: TensorDescription) -> ItemLocation:
        """Note where a shard's bytes are, and return their place."""
        if local.dtype.name != dtype.name:
            msg = f"{short(name)} is {dtype.name}, its shard {local.dtype.name}"
            raise InvalidFileError(msg)
        item = locate_data(file.window, file.built, local)
        first = item.data_offset + local.start * dtype.size
        place = ItemLocation(file.name, first, item.data_length)
        item = item._replace(data_offset=item.data_offset - first)
        if self.items.setdefault(place, item) != item:
            msg = f"{short(name)} and another tensor see the same bytes in different ways"
            raise InvalidFileError(msg)
        return place

    def tensor(self, file: OpenFile, path: NamePath, dtype: Dtype, shape: tuple[int, ...]) -> FoundTensor:
        """Return the tensor at a path, as far as its shards are known; all files must say the same of it."""
        name = ".".join(map(str, path))
        full = self.tensors.setdefault(name, FoundTensor(path, dtype, shape))
        if (full.dtype.name, full.shape) != (dtype.name, shape):
            here = f"{dtype.name} of shape {list(shape)}"
            msg = f"{self.folder}: {short(name)} is {here} in {file.name}, in another file it is not"
            raise CheckpointError(msg, hint="the files are from different saves")
        return full

    def add(
        self,
        file: OpenFile,
        path: NamePath,
        shape: tuple[int, ...],
        shards: Iterable[tuple[Region, TensorDescription]],
        dtype: Dtype,
    ) -> None:
        """Add shards of a tensor of `shape` that a file holds."""
        self.tensor(file, path, dtype, shape)
        name = ".".join(map(str, path))
        for region, local in shards:
            self.add_placed(file.name, name, region, local, self.place(file, name, dtype, local))

    def add_placed(
        self, file: str, name: str, region: Region, local: TensorDescription, place: ItemLocation
    ) -> None:
        """Add a shard whose place is noted to a tensor that is known."""
        if local.shape != region.sizes:
            shapes = f"of shape {list(local.shape)} where {list(region.sizes)} belongs"
            msg = f"{self.folder / file}: {short(name)} has a shard {shapes}"
            raise CheckpointError(msg, hint="files of other ranks are missing, or from another save")
        self.tensors[name].shards.setdefault(region, place)  # ranks that hold the same shard each write it


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


RANK_FILE = re.compile(
    r"(?P<stem>pytorch_model_fsdp(_(?P<number_of_model>\d+))?)(_rank(?P<rank>\d+))?\.bin"
    r"|(?P<verl>model_world_size_(?P<world>\d+))_rank_(?P<number>\d+)\.pt"
)
MAX_DIRECTORY = 64 * 2**20
MAX_STATE = 256 * 2**20
MAX_DEPTH = 16
# Characters of all full names together, for each byte of the description and to begin with.
MOST_OF_NAMES = 4
SMALL_NAMES = 2**20
_FLAT = re.compile(r"(.*\.)?_?flat_param(_\d+)?")


def read_rank_files(folder: Path) -> tuple[CheckpointIndex, dict[ItemLocation, TorchZipItem]]:
    """Read what each file says it holds.

    Returns:
        What the checkpoint holds, and where each shard's bytes are, by its place.

    Raises:
        CheckpointError: When a file is damaged or hostile, when files are missing, or shards do not fit together.
    """
    names = _rank_names(folder)
    found, ends = FoundTensors(folder), dict[str, int]()
    for name in names:
        ends[name] = _read_file(folder / name, found)
    _place_on_meshes(found)
    if len(names) > 1 and not found.sharded:
        msg = f"{folder} holds {len(names)} files of plain tensors: nothing says how they fit together"
        raise CheckpointError(msg, hint="save with SHARDED_STATE_DICT, or merge with the tool that wrote them")
    tensors = tuple(stored_tensor(folder, name, full) for name, full in found.tensors.items())
    index = CheckpointIndex(tensors=tensors, values=tuple(found.values.values()), files=ends)
    return index, found.items


def _rank_names(folder: Path) -> list[str]:
    """Return the files of one model, rank 0 first, all there."""
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
    check_still_there(folder, groups)
    ranks = next(iter(groups.values()))
    world = world or max(ranks) + 1
    return all_ranks(folder, ranks, world)


def _read_file(path: Path, found: FoundTensors) -> int:
    """Add what one file holds to `found` and return the file's size in bytes."""
    with reading(path) as window:
        built = read_zip(window, MAX_DIRECTORY)
        raw = member_bytes(window, f"{built.prefix}/data.pkl", built, MAX_STATE)
        state = read_state(raw, f"{path}: its data.pkl")
        file = OpenFile(path.name, window, built)
        for name_path, value in _bounded(_entries(state, (), 0), len(raw)):
            _take(file, name_path, value, found)
    return window.length


def _bounded(entries: Iterator[tuple[NamePath, Any]], size: int) -> Iterator[tuple[NamePath, Any]]:
    """Yield entries as long as a file of this size can hold so many: one dictionary may stand in many places.

    Args:
        entries: Keys and values.
        size: Bytes of the description.
    """
    left = MOST_OF_NAMES * size + SMALL_NAMES
    for path, value in entries:
        left -= sum(len(part) if type(part) is str else 1 for part in path) + 1
        if left < 0:
            msg = f"the names in it have more than {MOST_OF_NAMES} times its size"
            raise InvalidFileError(msg)
        yield path, value


def _entries(state: dict[Any, Any], path: NamePath, depth: int) -> Iterator[tuple[NamePath, Any]]:
    """Yield everything in nested dictionaries with the keys that lead to it."""
    if depth > MAX_DEPTH:
        msg = f"its dictionaries nest more than {MAX_DEPTH} deep"
        raise InvalidFileError(msg)
    for key, value in state.items():
        if type(key) not in {str, int}:
            msg = f"an entry is named by a {type(key).__name__}"
            raise InvalidFileError(msg)
        if isinstance(value, dict) and value:
            yield from _entries(value, (*path, key), depth + 1)
        else:
            yield (*path, key), value


def _take(file: OpenFile, path: NamePath, value: Any, found: FoundTensors) -> None:
    name = ".".join(map(str, path))
    if _FLAT.fullmatch(name):
        _take_flat(file, name, value, found)
    elif isinstance(value, MeshShard):
        place = found.place(file, name, value.dtype, value.local)
        found.on_meshes.append((file.name, name, value, place))
        found.tensor(file, path, value.dtype, value.shape)
    elif isinstance(value, ListedShards):
        found.sharded = True
        found.add(file, path, value.shape, value.parts, value.dtype)
    elif isinstance(value, TensorDescription):
        if name not in found.tensors:  # every rank has the full tensor: rank 0's is taken
            region = Region((0,) * len(value.shape), value.shape)
            found.add(file, path, value.shape, [(region, value)], value.dtype)
    else:
        found.values.setdefault(name, StoredValue(name, path, ItemLocation(file.name, 0, 0)))


def _take_flat(file: OpenFile, name: str, value: Any, found: FoundTensors) -> None:
    """Add the parameters' pieces in a rank's shard of a flat parameter."""
    match = RANK_FILE.fullmatch(file.name)
    if found.layouts is None:
        found.layouts = read_flat_layouts(found.folder, int((match and match["number_of_model"]) or 0))
    layout = found.layouts.get(name)
    if layout is None or not isinstance(value, TensorDescription):
        msg = (
            f"{found.folder / file.name} holds FSDP1's flat parameters (LOCAL_STATE_DICT), "
            "whose shapes only the model knows"
        )
        hint = "load it into the same model on as many ranks, and save that with SHARDED_STATE_DICT"
        raise CheckpointError(msg, hint=hint)
    found.sharded = True
    rank = int((match and match["rank"]) or 0)
    if rank not in layout.ranks:  # a copy, as under HYBRID_SHARD
        return
    for run, region, local in layout.pieces(rank, value):
        for own in run.names:
            found.add(file, tuple(own.split(".")), run.shape, [(region, local)], value.dtype)


def _place_on_meshes(found: FoundTensors) -> None:
    """Resolve which rectangle each shard on a mesh is; the mesh is as large as the ranks' places in it say."""
    extents: dict[str, tuple[int, ...]] = {}
    for _, name, shard, _ in found.on_meshes:
        known = extents.get(name, (0,) * len(shard.coordinates))
        if len(shard.coordinates) != len(shard.placements) or len(known) != len(shard.coordinates):
            msg = f"{found.folder}: {short(name)} lies on meshes that do not fit each other"
            raise CheckpointError(msg, hint=COPY_AGAIN)
        extents[name] = tuple(max(size, at + 1) for size, at in zip(known, shard.coordinates, strict=True))
    for file, name, shard, place in found.on_meshes:
        found.sharded = True
        found.add_placed(file, name, shard_region(shard, extents[name]), shard.local, place)
