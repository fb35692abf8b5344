"""Where the items of a `.metadata` stand, and whether what it says fits together.

Chunks have to tile their tensor, each has to stand somewhere, and no two may share bytes: a save that did not
finish and a damaged number show this way. Whoever reads a checkpoint asks this first, be it to merge or to load.
"""

import math
import re
from typing import Any, NoReturn

from fsdplaunch.checkpoint.invalid_file import short
from fsdplaunch.checkpoint.item_location import ItemKey, ItemLocation
from fsdplaunch.checkpoint.regions import Region, find_tiling_fault
from fsdplaunch.checkpoint.safe_pickle.dcp_classes import ItemIndex, Metadata, StorageInfo, TensorEntry, ValueEntry
from fsdplaunch.errors import CheckpointError

MAX_CHUNKS_PER_TENSOR = 1_000_000
MAX_FILES = 1_000_000
COPY_AGAIN = "copy the checkpoint again from where it was written"
# What torch's ZStandard extension writes into the index; its version 1 is the only one there is.
_ZSTD = re.compile(r"stream\.zstd/1(\.[0-9.]*)?")

Places = dict[ItemKey, ItemLocation]
# What was found out about a shape and its chunks: they in order, or how they fail. A model's layers repeat it.
Tilings = dict[tuple[tuple[int, ...], tuple[Region, ...]], tuple[Region, ...] | str]


def check_places(meta: Metadata, places: Places, where: str) -> None:
    """Check that all chunks of an index are there, each in bytes of its own, and tile their tensors.

    Args:
        meta: The index.
        places: As `item_locations` returns them.
        where: The index, for messages.

    Raises:
        CheckpointError: They do not.
    """
    file_ends(places, where)
    tilings: Tilings = {}
    for name, entry in meta.state_dict_metadata.items():
        if isinstance(entry, TensorEntry):
            for offsets, _ in regions_of(name, entry, tilings, where):
                if (name, offsets) not in places:
                    place_of(name, offsets, places, where)
        elif isinstance(entry, ValueEntry):
            place_of(name, None, places, where)


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


def item_locations(meta: Metadata, where: str) -> Places:
    """Return where each item stands, by its key.

    Raises:
        CheckpointError: Something else stands there, or a file lies outside the checkpoint's folder.
    """
    places: Places = {}
    for key, value in meta.storage_data.items():
        place = value if type(value) is ItemLocation else _place(key, value, where)
        places[key if type(key) is ItemKey else ItemKey(key.fqn, key.offset)] = place
    known = {place.file for place in places.values()}
    if len(known) > MAX_FILES:
        msg = f"{where} refers to {len(known)} files"
        raise CheckpointError(msg)
    for name in known:
        check_file_name(name, where)
    return places


def _place(key: Any, info: Any, where: str) -> ItemLocation:
    """Return the place of an item whose record was read step by step."""
    if not isinstance(key, ItemIndex | ItemKey) or not isinstance(info, StorageInfo):
        msg = f"{where}: an entry of its storage table is a {type(info).__name__}"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    if info.transforms and not _is_packed(info):
        msg = f"{where}: {short(key.fqn)} is stored through {short(', '.join(info.transforms))}"
        raise CheckpointError(
            msg,
            hint="of torch's extensions only zstd is read; load it with torch and save it without extensions",
        )
    return ItemLocation(info.relative_path, info.offset, info.length)


def _is_packed(info: Any) -> bool:
    """Say whether an item went through torch's ZStandard extension and nothing else."""
    return (
        isinstance(info, StorageInfo) and len(info.transforms) == 1 and bool(_ZSTD.fullmatch(info.transforms[0]))
    )


def packed_items(meta: Metadata) -> frozenset[ItemLocation]:
    """Return the places of the items that are compressed."""
    infos = (info for info in meta.storage_data.values() if _is_packed(info))
    return frozenset(ItemLocation(info.relative_path, info.offset, info.length) for info in infos)


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
