"""Weights and optimizers of a checkpoint by name, whichever number of processes saved them. Needs no torch_xla."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdplaunch.checkpoint.chunks import Region, row_major
from fsdplaunch.checkpoint.dtypes import DTYPES
from fsdplaunch.checkpoint.merge.plan import PlannedTensor, plan_alone
from fsdplaunch.checkpoint.merge.weight_names import select_weights
from fsdplaunch.checkpoint.merge.write import gather_block
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint, open_checkpoint
from fsdplaunch.checkpoint.readers.rank_files import all_ranks
from fsdplaunch.checkpoint.readers.xla_files import is_slice, own_name, slice_pieces, sliced_parameters
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, short
from fsdplaunch.display_text import listed
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.model_and_optimizer import MODEL
from fsdplaunch.runtime.saving.plain_files import read_plain

Shape = tuple[int, ...]
_AS_IT_WAS = "build the model as it was when the checkpoint was saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The weights of one model of a checkpoint.

    Attributes:
        where: Its file or folder.
        shapes: Full shapes by the model's own names.
        read: Returns a rectangle of a weight, in host memory.
    """

    where: Path
    shapes: Mapping[str, Shape]
    read: Callable[[str, Region], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPiece:
    """A rectangle of a parameter that a process holds.

    Attributes:
        name: The parameter's own name.
        region: The elements of it.
        sizes: Their sizes in the process's tensor.
        strides: Their strides there, in elements.
        start: The first one's place there, in elements.
    """

    name: str
    region: Region
    sizes: Shape
    strides: Shape
    start: int


@contextmanager
def open_weights(folder: Path, index: int) -> Iterator[StoredWeights]:
    """Open a model of a checkpoint, full or by ranks, of PyTorch/XLA or of torch's FSDP.

    Args:
        folder: The checkpoint.
        index: The model's number.

    Raises:
        CheckpointError: It is not there, or is damaged.
    """
    sharded, full = folder / f"{MODEL}_{index}", folder / f"{MODEL}{'' if index == 0 else f'_{index}'}.bin"
    if full.is_file():
        yield _of_full(full, read_plain(full))
    elif sharded.is_dir():
        with open_checkpoint(sharded) as opened:
            yield _of_ranks(opened)
    else:
        msg = f"{folder} holds no model {index}: neither {full.name} nor {sharded.name}"
        raise CheckpointError(msg, hint="name the folder of a checkpoint that save_checkpoint wrote")


def _of_full(path: Path, state: Any) -> StoredWeights:
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        msg = f"{path} holds other things than weights"
        raise CheckpointError(msg, hint="name the folder of a checkpoint that save_checkpoint wrote")

    def read(name: str, region: Region) -> torch.Tensor:
        tensor: torch.Tensor = state[name]
        inside = tuple(slice(at, at + size) for at, size in zip(region.offsets, region.sizes, strict=True))
        return tensor[inside]

    return StoredWeights(where=path, shapes={name: tuple(value.shape) for name, value in state.items()}, read=read)


def _of_ranks(opened: OpenCheckpoint) -> StoredWeights:
    tensors = select_weights(opened.index, where=str(opened.folder)).tensors
    items = opened.items(tensor for _, tensor in tensors)
    planned: dict[str, PlannedTensor] = {name: plan_alone(tensor, items) for name, tensor in tensors}

    def read(name: str, region: Region) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, planned[name].dtype.name)
        if not region.numel:
            return torch.empty(region.sizes, dtype=dtype)
        block = gather_block(planned[name], region, opened.sources.read_piece)
        return torch.frombuffer(block, dtype=dtype).view(region.sizes)

    shapes = {name: plan.shape for name, plan in planned.items()}
    return StoredWeights(where=opened.folder, shapes=shapes, read=read)


def parameter_shapes(shapes: Mapping[str, Shape], metadata: Mapping[str, Any] | None) -> dict[str, Shape]:
    """Return the full shapes of a model's parameters and buffers, by its own names.

    Args:
        shapes: Of the tensors of a process's state dict, by name.
        metadata: What the slices among them are; None where all are full.
    """
    full = {own_name(name): shape for name, shape in shapes.items() if metadata is None or not is_slice(name)}
    return full if metadata is None else full | sliced_parameters(metadata)


def held_pieces(name: str, shape: Shape, metadata: Mapping[str, Any] | None) -> list[HeldPiece]:
    """Return what a tensor of a process's state dict holds of which parameters.

    Args:
        name: The tensor's.
        shape: Its shape.
        metadata: What the slices are, and of which process; None where all tensors are full.
    """
    value = TensorDescription(DTYPES["float32"], shape, row_major(shape), 0, "")
    if metadata is None or not is_slice(name):
        found = iter([(own_name(name), shape, Region((0,) * len(shape), shape), value)])
    else:
        found = slice_pieces(metadata, name, value, rank=metadata["rank"], world=metadata["world_size"])
    return [
        HeldPiece(name=own, region=region, sizes=local.shape, strides=local.strides, start=local.start)
        for own, _, region, local in found
    ]


def check_fit(stored: StoredWeights, own: Mapping[str, Shape], further: Collection[str] = ()) -> None:
    """Refuse a checkpoint of another model.

    Args:
        stored: The checkpoint's.
        own: Full shapes of the model's parameters and buffers.
        further: Other names of some of them, which a checkpoint may hold as well.

    Raises:
        CheckpointError: Names or shapes are others.
    """
    wrong = sorted(set(own) ^ (set(stored.shapes) - set(further)))
    if wrong:
        verb = "lacks" if wrong[0] in own else "has"
        msg = f"{stored.where} is of another model: it {verb} {short(wrong[0])}"
        raise CheckpointError(msg, hint=_AS_IT_WAS)
    for name, shape in own.items():
        if stored.shapes[name] != shape:
            there = list(stored.shapes[name])
            msg = f"{short(name)} has shape {there} in {stored.where}, {list(shape)} in the model"
            raise CheckpointError(msg, hint=_AS_IT_WAS)


def values_of(pieces: list[HeldPiece], stored: StoredWeights, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Return a process's tensor with its values, zeros where it is padding.

    Args:
        pieces: What it holds.
        stored: Where they are read from.
        shape: Its shape.
        dtype: Its dtype.
    """
    values = torch.zeros(shape, dtype=dtype)
    for piece in pieces:
        place = values.as_strided(piece.sizes, piece.strides, piece.start)
        place.copy_(stored.read(piece.name, piece.region))
    return values


State = dict[str, Any]
_FILE = re.compile(r"rank(?P<rank>\d+)-of-(?P<world>\d+)-optimizer\.bin")
NAMES = "parameters"
"""The entry of a file that tells what each of the optimizer's parameters is, in its order: lists of names."""
_OPTIMIZER_AS_IT_WAS = "build the optimizer, and wrap the model, as when the checkpoint was saved"
_COUNTS = "step"
"""The one name under which torch's optimizers keep what is not as large as the parameter, and may look so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlice:
    """What a process holds of what an optimizer trains as one parameter.

    Attributes:
        names: The model's own names of what it is; several where they were flattened into one.
        full: The shape that was cut: a parameter's, or the length of several that were flattened into one.
        shape: The shape of this process's slice.
        rank: This process's number; 0 where tensors are full.
        world: Of how many; 1 where tensors are full.
    """

    names: tuple[str, ...]
    full: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    world: int


def read_optimizer(folder: Path, own: Sequence[OwnSlice]) -> State:
    """Read an optimizer's state as this process is to have it, whichever number of processes saved it.

    Args:
        folder: Holds one file of each process that saved.
        own: What the optimizer trains here, in its order.

    Raises:
        CheckpointError: Files are missing or damaged, or are of another optimizer or model.
    """
    files = _files(folder)
    if own and len(files) == own[0].world:
        state = _read(files[own[0].rank], own)
        if all(_is_as_here(values, own[place]) for place, values in state["state"].items()):
            return state
    states = [_read(path, own) for path in files]
    found = {
        place: {name: _cut(_all_of(states, place, name), own[place], folder, name) for name in values}
        for place, values in states[0]["state"].items()
    }
    return {**states[0], "state": found}


def _files(folder: Path) -> list[Path]:
    """Return the files of all processes, rank 0's first."""
    matches = (
        [match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))] if folder.is_dir() else []
    )
    worlds = {int(match["world"]) for match in matches}
    if len(worlds) != 1:
        what = "the files of several saves" if worlds else "no optimizer that PyTorch/XLA's processes saved"
        msg = f"{folder} holds {what}"
        raise CheckpointError(msg, hint="leave the optimizer out, or load a checkpoint that has one")
    named = {int(match["rank"]): match[0] for match in matches}
    return [folder / name for name in all_ranks(folder, named, worlds.pop())]


def _read(path: Path, own: Sequence[OwnSlice]) -> State:
    """Return what one process saved, if it is of an optimizer like this one."""
    file = read_plain(path)
    state = file.get("optimizer") if isinstance(file, dict) else None
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        msg = f"{path} holds no optimizer's state"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    stored = sum(len(group["params"]) for group in state["param_groups"])
    if stored != len(own):
        msg = f"{path} is of an optimizer of {stored} parameters, this one has {len(own)}"
        raise CheckpointError(msg, hint=_OPTIMIZER_AS_IT_WAS)
    for names, here in zip(file.get(NAMES) or (), own, strict=False):
        if tuple(names) != here.names:
            msg = f"{path} has {_named(names)} where this optimizer trains {_named(here.names)}"
            raise CheckpointError(msg, hint=_OPTIMIZER_AS_IT_WAS)
    return state


def _named(names: Sequence[str]) -> str:
    return listed([short(name) for name in names], 3)


def _is_as_here(values: State, own: OwnSlice) -> bool:
    tensors = [value for name, value in values.items() if isinstance(value, torch.Tensor) and name != _COUNTS]
    return all(value.shape == own.shape or not value.dim() for value in tensors)


def _all_of(states: Sequence[State], place: int, name: str) -> list[Any]:
    """Return what each process saved of one value."""
    try:
        return [state["state"][place][name] for state in states]
    except LookupError:
        msg = f"the processes saved other optimizers: not all have {name} of parameter {place}"
        raise CheckpointError(msg, hint=COPY_AGAIN) from None


def _cut(saved: list[Any], own: OwnSlice, folder: Path, name: str) -> Any:
    """Return this process's slice of a value; what is not of the parameter's size stays as it is."""
    first = saved[0]
    if not isinstance(first, torch.Tensor) or name == _COUNTS or not (first.dim() or own.full == ()):
        return first
    # Rows and runs of elements both follow each other in memory; what is beyond the parameter is padding.
    elements = first.flatten() if len(saved) == 1 else torch.cat([each.flatten() for each in saved])
    numel = math.prod(own.full)
    if elements.numel() < numel:
        msg = f"{folder}: {name} of {_named(own.names)} has {elements.numel()} values of {numel}"
        raise CheckpointError(msg, hint="load on as many processes as saved it, or leave the optimizer out")
    return _slice(elements[:numel].view(own.full), own)


def _slice(full: torch.Tensor, own: OwnSlice) -> torch.Tensor:
    """Return a process's slice of a full tensor: a run of its elements, or of its rows, padded with zeros."""
    if own.shape == own.full and own.world == 1:
        return full
    rows = full.flatten() if len(own.shape) == 1 else full
    held = rows[own.rank * own.shape[0] : (own.rank + 1) * own.shape[0]]
    padded = rows.new_zeros(own.shape)
    padded[: len(held)] = held
    return padded
