"""Weights and optimizers of a checkpoint by name, whichever number of processes saved them. Needs no torch_xla."""

from collections.abc import Callable, Collection, Iterator, Mapping
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
from fsdplaunch.checkpoint.readers.xla_files import is_slice, own_name, slice_pieces, sliced_parameters
from fsdplaunch.checkpoint.safe_pickle.tensor_classes import TensorDescription
from fsdplaunch.checkpoint.untrusted_files import COPY_AGAIN, short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.model_and_optimizer import MODEL
from fsdplaunch.runtime.saving.plain_files import read_plain

Shape = tuple[int, ...]
_AS_IT_WAS = "build the model as it was when the checkpoint was saved"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The weights of one model of a checkpoint."""

    where: Path  # its file or folder
    shapes: Mapping[str, Shape]  # full shapes by the model's own names
    read: Callable[[str, Region], torch.Tensor]  # returns a rectangle of a weight, in host memory


@contextmanager
def open_weights(folder: Path, index: int) -> Iterator[StoredWeights]:
    """Open a model of a checkpoint by its number, full or by ranks, of PyTorch/XLA or of torch's FSDP."""
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
        msg = f"{path} holds something other than weights"
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
    """Return the full shapes of what a process's state dict holds, by the model's own names.

    The metadata says what the slices in it are; None where all are full.
    """
    full = {own_name(name): shape for name, shape in shapes.items() if metadata is None or not is_slice(name)}
    return full if metadata is None else full | sliced_parameters(metadata)


def check_fit(stored: StoredWeights, own: Mapping[str, Shape], further: Collection[str] = ()) -> None:
    """Refuse a checkpoint of another model: it has other names, but for `further` ones, or other full shapes."""
    wrong = sorted(set(own) ^ (set(stored.shapes) - set(further)))
    if wrong:
        verb = "lacks" if wrong[0] in own else "has"
        msg = f"{stored.where} is from another model: it {verb} {short(wrong[0])}"
        raise CheckpointError(msg, hint=_AS_IT_WAS)
    for name, shape in own.items():
        if stored.shapes[name] != shape:
            there = list(stored.shapes[name])
            msg = f"{short(name)} has shape {there} in {stored.where}, {list(shape)} in the model"
            raise CheckpointError(msg, hint=_AS_IT_WAS)


def values_of(
    name: str, shape: Shape, dtype: torch.dtype, metadata: Mapping[str, Any] | None, stored: StoredWeights
) -> torch.Tensor:
    """Return a tensor of a process's state dict with its values, zeros where it is padding.

    Of which process it is, and what the slices are, says the metadata; None where all tensors are full.
    """
    if metadata is None or not is_slice(name):
        return stored.read(own_name(name), Region((0,) * len(shape), shape)).to(dtype)
    values = torch.zeros(shape, dtype=dtype)
    here = TensorDescription(DTYPES["float32"], shape, row_major(shape), 0, "")
    pieces = slice_pieces(metadata, name, here, rank=metadata["rank"])
    for own, _, region, local in pieces:
        values.as_strided(local.shape, local.strides, local.start).copy_(stored.read(own, region))
    return values


NAMES = "parameters"
"""The entry of a file that says what each of the optimizer's parameters is: its names, and its shape there."""


def read_optimizer(folder: Path, file_name: str, own: list[list[Any]]) -> dict[str, Any]:
    """Read the state that this process's optimizer had, whose parameters' names and shapes are `own`."""
    path = folder / file_name
    if not path.is_file():
        others = sorted(each.name for each in folder.glob("rank0-of-*-optimizer.bin"))
        msg = f"{folder} holds no {file_name}, but {others[0]}" if others else f"{folder} holds no {file_name}"
        raise CheckpointError(msg, hint="load on as many processes as saved it, or leave the optimizer out")
    file = read_plain(path)
    state = file.get("optimizer") if isinstance(file, dict) else None
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        msg = f"{path} holds no optimizer's state"
        raise CheckpointError(msg, hint=COPY_AGAIN)
    if file.get(NAMES) != own:
        msg = f"{path} is from an optimizer of other parameters, or of another order or shape"
        raise CheckpointError(msg, hint="build the optimizer and wrap the model as when it was saved")
    return state
