"""Checkpoints of one torch.save file per rank, or of a single one with the full model; read without torch.

Written so: accelerate's LOCAL_STATE_DICT and `use_dcp=False`, verl's `model_world_size_N_rank_r.pt`, and
FULL_STATE_DICT's `pytorch_model_fsdp.bin`. Each file says which shard of each tensor it holds.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN, InvalidFileError, short
from fsdplaunch.checkpoint.item_location import ItemLocation
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex, NamePath, StoredValue
from fsdplaunch.checkpoint.readers.files_by_rank import all_ranks, check_still_there, reading
from fsdplaunch.checkpoint.readers.flat_params import read_flat_layouts
from fsdplaunch.checkpoint.readers.found_tensors import (
    FoundTensors,
    add_shard,
    found_tensor,
    note_bytes,
    stored_tensor,
)
from fsdplaunch.checkpoint.readers.mesh_regions import shard_region
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.readers.zip_directory import ReadWindow, ZipDirectory, member_bytes, read_zip
from fsdplaunch.checkpoint.regions import Region
from fsdplaunch.checkpoint.safe_pickle.rank_file_classes import ListedShards, MeshShard, read_state
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.errors import CheckpointError

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
        entries = _entries(state, (), 0)
        for name_path, value in _bounded(entries, len(raw)):
            _take(path.name, name_path, value, window, built, found)
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


def _take(
    file: str, path: NamePath, value: Any, window: ReadWindow, built: ZipDirectory, found: FoundTensors
) -> None:
    name = ".".join(map(str, path))
    if _FLAT.fullmatch(name):
        _take_flat(file, name, value, window, built, found)
    elif isinstance(value, MeshShard):
        place = note_bytes(file, value.local, value.dtype, name, window, built, found)
        found.on_meshes.append((file, name, value, place))
        found_tensor(found, file, name, path, value.dtype, value.shape)
    elif isinstance(value, ListedShards):
        found.sharded = True
        full = found_tensor(found, file, name, path, value.dtype, value.shape)
        for region, local in value.parts:
            place = note_bytes(file, local, value.dtype, name, window, built, found)
            add_shard(found, file, name, full, region, local, place)
    elif isinstance(value, TensorDescription):
        # Every rank has the full tensor: rank 0's is taken.
        if name not in found.tensors:
            full = found_tensor(found, file, name, path, value.dtype, value.shape)
            place = note_bytes(file, value, value.dtype, name, window, built, found)
            add_shard(found, file, name, full, Region((0,) * len(value.shape), value.shape), value, place)
    else:
        found.values.setdefault(name, StoredValue(name, path, ItemLocation(file, 0, 0)))


def _take_flat(
    file: str, name: str, value: Any, window: ReadWindow, built: ZipDirectory, found: FoundTensors
) -> None:
    """Add the parameters' pieces in a rank's shard of a flat parameter."""
    match = RANK_FILE.fullmatch(file)
    rank = int((match and match["rank"]) or 0)
    if found.layouts is None:
        number = 0 if match is None or match["number_of_model"] is None else int(match["number_of_model"])
        found.layouts = read_flat_layouts(found.folder, number)
    layout = found.layouts.get(name)
    if layout is None or not isinstance(value, TensorDescription):
        msg = (
            f"{found.folder / file} holds FSDP1's flat parameters (LOCAL_STATE_DICT), "
            "whose shapes only the model knows"
        )
        hint = "load it into the same model on as many ranks, and save that with SHARDED_STATE_DICT"
        raise CheckpointError(msg, hint=hint)
    found.sharded = True
    if rank not in layout.ranks:  # a copy, as under HYBRID_SHARD
        return
    for run, region, local in layout.pieces(rank, value):
        place = note_bytes(file, local, value.dtype, name, window, built, found)
        for own in run.names:
            full = found_tensor(found, file, own, tuple(own.split(".")), value.dtype, run.shape)
            add_shard(found, file, own, full, region, local, place)


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
        add_shard(found, file, name, found.tensors[name], shard_region(shard, extents[name]), shard.local, place)
