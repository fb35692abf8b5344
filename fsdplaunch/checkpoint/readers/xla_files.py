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
from fsdplaunch.checkpoint.readers.rank_files import (
    MAX_DIRECTORY,
    MAX_STATE,
    MOST_OF_NAMES,
    SMALL_NAMES,
    FlatLayout,
    FlatParameterSpan,
    FoundTensors,
    OpenFile,
    all_ranks,
    check_still_there,
    reading,
    stored_tensor,
)
from fsdplaunch.checkpoint.readers.torch_zip import ReadWindow, TorchZipItem, member_bytes, read_zip
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription, read_state
from fsdplaunch.checkpoint.untrusted_files import InvalidFileError, check_count, check_counts, short
from fsdplaunch.errors import CheckpointError

XLA_FILE = re.compile(r"rank-?(?P<rank>\d+)-of-(?P<world>\d+)(-pytorch_model)?\.(bin|pth|pt)")
"""As transformers' Trainer, this package and torch_xla's documents name them."""
_SHARD = "_fsdp_shard"
_WRAPPERS = frozenset({"_orig_module", "_fsdp_wrapped_module", "_fpw_module"})
_FLAT = re.compile(r"flat_param_\d+")


def read_xla_files(folder: Path) -> tuple[CheckpointIndex, dict[ItemLocation, TorchZipItem]]:
    """Read what each rank's file says it holds.

    Returns:
        What the checkpoint holds, and where each slice's bytes are, by its place.

    Raises:
        CheckpointError: A file is damaged, hostile or missing, or they do not fit together.
    """
    names = _names(folder)
    found, ends = FoundTensors(folder), dict[str, int]()
    for rank, name in enumerate(names):
        ends[name] = _read_file(folder / name, rank, len(names), found)
    tensors = tuple(stored_tensor(folder, name, full) for name, full in found.tensors.items())
    return CheckpointIndex(tensors=tensors, values=(), files=ends), found.items


def _names(folder: Path) -> list[str]:
    """Return the files of all ranks, rank 0 first."""
    matches = [match for path in folder.iterdir() if (match := XLA_FILE.fullmatch(path.name))]
    check_still_there(folder, matches)
    worlds = {int(match["world"]) for match in matches}
    ranks = {int(match["rank"]): match[0] for match in matches}
    world = max(worlds)
    if len(worlds) > 1 or len(ranks) < len(matches):
        msg = f"{folder} holds the files of several saves: {min(ranks.values())} and others"
        raise CheckpointError(msg, hint="move the files of one of them into a folder of its own")
    return all_ranks(folder, {rank: name for rank, name in ranks.items() if rank < world}, world)


def _read_file(path: Path, rank: int, world: int, found: FoundTensors) -> int:
    """Add what one rank's file holds to `found` and return the file's size in bytes."""
    with reading(path) as window:
        try:
            _take_all(path, window, rank, world, found)
        except InvalidFileError:  # a ValueError, too, that says more
            raise
        except (LookupError, TypeError, ValueError):
            msg = "what it says of its slices is damaged"
            raise InvalidFileError(msg) from None
    return window.length


def _take_all(path: Path, window: ReadWindow, rank: int, world: int, found: FoundTensors) -> None:
    built = read_zip(window, MAX_DIRECTORY)
    raw = member_bytes(window, f"{built.prefix}/data.pkl", built, MAX_STATE)
    state = read_state(raw, f"{path}: its data.pkl")
    model, metadata = state.get("model"), state.get("shard_metadata")
    if not isinstance(model, dict) or not isinstance(metadata, dict):
        msg = "it has no model with shard_metadata beside it"
        raise InvalidFileError(msg)
    if (metadata.get("rank"), metadata.get("world_size")) != (rank, world):
        msg = "it says that it is of another rank, or of another number of ranks, than its name"
        raise InvalidFileError(msg)
    file = OpenFile(path.name, window, built)
    left = MOST_OF_NAMES * len(raw) + SMALL_NAMES  # of all names: a list of them may stand in many places
    for name, value in model.items():
        for own, shape, region, local in _pieces(metadata, str(name), value, rank, world):
            left -= len(own) + 1
            if left < 0:
                msg = "it names more parameters than a description of its size can"
                raise InvalidFileError(msg)
            found.add(file, tuple(own.split(".")), shape, [(region, local)], local.dtype)


def _pieces(
    metadata: Mapping[str, Any], name: str, value: Any, rank: int, world: int
) -> Iterator[tuple[str, tuple[int, ...], Region, TensorDescription]]:
    """Yield what an entry of a rank's model holds, as `slice_pieces` does."""
    if not isinstance(value, TensorDescription):
        msg = f"{short(name)} is a {type(value).__name__}, not a tensor"
        raise InvalidFileError(msg)
    if is_slice(name):
        yield from slice_pieces(metadata, name, value, rank=rank, world=world)
    elif rank == 0:  # every rank has the buffers
        yield own_name(name), value.shape, Region((0,) * len(value.shape), value.shape), value


def is_slice(name: str) -> bool:
    """Return whether an entry of a rank's model is a slice of parameters, not a buffer."""
    return any(part.startswith(_SHARD) for part in name.split("."))


def slice_pieces(
    metadata: Mapping[str, Any], name: str, value: TensorDescription, *, rank: int, world: int
) -> Iterator[tuple[str, tuple[int, ...], Region, TensorDescription]]:
    """Yield the rectangles of parameters that a slice holds.

    Args:
        metadata: What the slices of the model are, as torch_xla says it.
        name: The slice's.
        value: How the slice lies in its file, or in memory.
        rank: Whose it is.
        world: Of how many.

    Yields:
        Each parameter's name and shape, the elements of it, and where they are in the slice.

    Raises:
        LookupError, ValueError: The metadata does not say it, or says something else.
    """
    parts = name.split(".")
    cut = next(at for at, part in enumerate(parts) if part.startswith(_SHARD))
    unit, key = ".".join(parts[:cut]), ".".join(parts[cut:])
    name, shape = _original(unit, metadata["shard_info"][unit][key])
    if len(value.shape) != 1:
        yield from _rows(own_name(name), shape, value, rank)
        return
    spans = tuple(_spans(metadata, name, shape))
    part = value.shape[0]
    layout = FlatLayout(tuple(range(world)), part, part * world, spans)
    for span, region, local in layout.pieces(rank, value):
        yield span.names[0], span.shape, region, local


def sliced_parameters(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the full shapes of all parameters that a model's slices are of, by the model's own names."""
    originals = [_original(unit, info) for unit, keys in metadata["shard_info"].items() for info in keys.values()]
    return {span.names[0]: span.shape for name, shape in originals for span in _spans(metadata, name, shape)}


def _original(unit: str, info: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return the name and the shape of what a slice was cut from."""
    return ".".join(filter(None, (unit, str(info["_orig_name"])))), _shape(info["_orig_size"])


def _spans(metadata: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Iterator[FlatParameterSpan]:
    """Yield the parameters one after the other in what was cut: itself, or those that were flattened into it."""
    home, _, leaf = name.rpartition(".")
    if not _FLAT.fullmatch(leaf):
        yield FlatParameterSpan((own_name(name),), shape, 0)
        return
    names, shapes, _ = metadata["flatten_info"][name]
    start = 0
    for own, sizes in zip(names, shapes, strict=True):
        span = FlatParameterSpan((own_name(f"{home}.{own}"),), _shape(sizes), start)
        yield span
        start += math.prod(span.shape)


def _rows(
    name: str, shape: tuple[int, ...], value: TensorDescription, rank: int
) -> Iterator[tuple[str, tuple[int, ...], Region, TensorDescription]]:
    """Yield the rows of a parameter that a rank holds; those beyond its end are padding."""
    if not shape or value.shape[1:] != shape[1:] or value.strides != row_major(value.shape):
        msg = f"{short(name)} of shape {list(shape)} has a slice of shape {list(value.shape)}"
        raise InvalidFileError(msg)
    first = min(rank * value.shape[0], shape[0])
    sizes = (min(value.shape[0], shape[0] - first), *shape[1:])
    if sizes[0]:
        region = Region((first, *(0 for _ in shape[1:])), sizes)
        yield name, shape, region, replace(value, shape=sizes, strides=row_major(sizes))


def own_name(name: str) -> str:
    """Return the model's own name, without what torch_xla's wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _shape(value: Any) -> tuple[int, ...]:
    """Read a size, as torch_xla writes it: a list, or a torch.Size."""
    if not isinstance(value, list | tuple):
        return (check_count(value, "a size"),)
    return check_counts(tuple(value), "a size")
