"""Checkpoints of PyTorch/XLA: one torch.save file per rank, of `XlaFullyShardedDataParallel`; read without torch.

Each holds `model`, the rank's slices, and `shard_metadata`, which says what they are of. A parameter, or all of a
unit that were flattened into one, is padded and cut into equal runs of elements; or cut into equal runs of rows.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplaunch.checkpoint.chunks import ItemLocation, Region, row_major
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex
from fsdplaunch.checkpoint.readers.rank_files import FoundTensors, RankFile, all_ranks, reading
from fsdplaunch.checkpoint.readers.torch_zip import TorchZipItem
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, check_count, check_counts, refuse, short
from fsdplaunch.errors import CheckpointError

XLA_FILE = re.compile(r"rank-?(?P<rank>\d+)-of-(?P<world>\d+)(-pytorch_model)?\.(bin|pth|pt)")
"""As transformers' Trainer, this package and torch_xla's documents name them."""
_SHARD = "_fsdp_shard"
_WRAPPERS = frozenset({"_orig_module", "_fsdp_wrapped_module", "_fpw_module"})
_FLAT = re.compile(r"flat_param_\d+")
Slice = tuple[str, tuple[int, ...], Region, TensorDescription]


def read_xla_files(folder: Path) -> tuple[CheckpointIndex, dict[ItemLocation, TorchZipItem]]:
    """Read what each rank's file says it holds.

    Returns:
        What the checkpoint holds, and where each slice's bytes are, by its place.

    Raises:
        CheckpointError: A file is damaged, hostile or missing, or they do not fit together.
    """
    matches = [match for path in folder.iterdir() if (match := XLA_FILE.fullmatch(path.name))]
    worlds = {int(match["world"]) for match in matches}
    ranks = {int(match["rank"]): match[0] for match in matches}
    world = max(worlds, default=0)
    if len(worlds) > 1 or len(ranks) < len(matches):
        msg = f"{folder} holds the files of several saves: {min(ranks.values())} and others"
        raise CheckpointError(msg, hint="move the files of one of them into a folder of its own")
    names = all_ranks(folder, {rank: name for rank, name in ranks.items() if rank < world}, world)
    found = FoundTensors(folder)
    for rank, name in enumerate(names):
        with reading(folder / name) as file:
            try:
                _take_all(file, rank, world, found)
            except InvalidFileError:  # a ValueError, too, that says more
                raise
            except (LookupError, TypeError, ValueError):
                refuse("its description of the slices is damaged")
        found.sizes[name] = file.window.length
    return found.index(), found.items


def _take_all(file: RankFile, rank: int, world: int, found: FoundTensors) -> None:
    model, metadata = file.state.get("model"), file.state.get("shard_metadata")
    if not isinstance(model, dict) or not isinstance(metadata, dict):
        refuse("it does not hold both a model and shard_metadata")
    if (metadata.get("rank"), metadata.get("world_size")) != (rank, world):
        refuse("its rank or number of ranks differs from that in its file name")
    left = file.most_of_names
    for key, value in model.items():
        name = str(key)
        if not isinstance(value, TensorDescription):
            refuse(f"{short(name)} is a {type(value).__name__}, not a tensor")
        pieces: Iterator[Slice] = iter(())
        if is_slice(name):
            pieces = slice_pieces(metadata, name, value, rank=rank)
        elif rank == 0:  # every rank has the buffers
            whole = Region((0,) * len(value.shape), value.shape)
            pieces = iter([(own_name(name), value.shape, whole, value)])
        for own, shape, region, local in pieces:
            left -= len(own) + 1
            if left < 0:
                refuse("it names more parameters than a file of its size can describe")
            found.add(file, tuple(own.split(".")), (local.dtype, shape), [(region, local)])


def is_slice(name: str) -> bool:
    """Return whether an entry of a rank's model is a slice of parameters, not a buffer."""
    return any(part.startswith(_SHARD) for part in name.split("."))


def slice_pieces(
    metadata: Mapping[str, Any], name: str, value: TensorDescription, *, rank: int
) -> Iterator[Slice]:
    """Yield the rectangles of parameters that a slice of a rank's holds; `value` is how it lies in file or memory.

    What the slices of the model are is in the metadata, as torch_xla says it.

    Yields:
        Each parameter's name and shape, the elements of it, and where they are in the slice.

    Raises:
        LookupError, ValueError: The metadata does not say it, or says something else.
    """
    parts = name.split(".")
    cut = next(at for at, part in enumerate(parts) if part.startswith(_SHARD))
    unit, key = ".".join(parts[:cut]), ".".join(parts[cut:])
    name, shape = _original(unit, metadata["shard_info"][unit][key])
    if len(value.shape) != 1:  # by rows; those beyond the parameter's end are padding
        if not shape or value.shape[1:] != shape[1:] or value.strides != row_major(value.shape):
            refuse(f"{short(name)} of shape {list(shape)} has a slice of shape {list(value.shape)}")
        first = min(rank * value.shape[0], shape[0])
        sizes = (min(value.shape[0], shape[0] - first), *shape[1:])
        if sizes[0]:
            region = Region((first, *(0 for _ in shape[1:])), sizes)
            yield own_name(name), shape, region, replace(value, shape=sizes, strides=row_major(sizes))
        return
    if value.strides not in {(1,), ()}:
        refuse(f"{short(name)} has a slice that is not contiguous")
    first, last = rank * value.shape[0], (rank + 1) * value.shape[0]
    for own, sizes, at in _spans(metadata, name, shape):
        begin, end = max(first, at), min(last, at + math.prod(sizes))
        for start, region in rectangles(sizes, begin - at, end - at):
            here, steps = value.start + at + start - first, row_major(region.sizes)
            yield own, sizes, region, replace(value, shape=region.sizes, strides=steps, start=here)


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, Region]]:
    """Cut the elements `begin` to `end` of a row-major tensor into rectangles of consecutive elements.

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
    # What is left of the row before them, and of the one after; both ends may lie in one row.
    partial = [(first - 1, begin, first * row), (last, last * row, end)] if first <= last else [(last, begin, end)]
    for number, (at, start, stop) in enumerate(partial):
        if number and first < last:
            yield first * row, Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
        for inside, (offsets, sizes) in rectangles(shape[1:], start - at * row, stop - at * row):
            yield at * row + inside, Region((at, *offsets), (1, *sizes))


def sliced_parameters(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of all parameters that a model's slices are of, by the model's own names."""
    originals = [_original(unit, info) for unit, keys in metadata["shard_info"].items() for info in keys.values()]
    return {own: sizes for name, shape in originals for own, sizes, _ in _spans(metadata, name, shape)}


def _original(unit: str, info: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of what a slice was cut from."""
    return ".".join(filter(None, (unit, str(info["_orig_name"])))), _shape(info["_orig_size"])


def _spans(
    metadata: Mapping[str, Any], name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield the parameters one after the other in what was cut: itself, or those that were flattened into it.

    Each with its shape, and the place of its first element.
    """
    home, _, leaf = name.rpartition(".")
    if not _FLAT.fullmatch(leaf):
        yield own_name(name), shape, 0
        return
    names, shapes, _ = metadata["flatten_info"][name]
    start = 0
    for own, listed in zip(names, shapes, strict=True):
        sizes = _shape(listed)
        yield own_name(f"{home}.{own}"), sizes, start
        start += math.prod(sizes)


def own_name(name: str) -> str:
    """Return the model's own name, without what torch_xla's wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        return (check_count(value, "a size"),)
    return check_counts(tuple(value), "a size")
