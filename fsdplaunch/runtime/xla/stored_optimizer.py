"""Optimizer state of PyTorch/XLA's files, cut anew for another number of processes. Needs no torch_xla."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdplaunch.checkpoint.invalid_file import COPY_AGAIN, short
from fsdplaunch.checkpoint.readers.files_by_rank import all_ranks
from fsdplaunch.errors import CheckpointError
from fsdplaunch.name_lists import listed
from fsdplaunch.runtime.saving.plain_files import read_plain

State = dict[str, Any]
_FILE = re.compile(r"rank(?P<rank>\d+)-of-(?P<world>\d+)-optimizer\.bin")
NAMES = "parameters"
"""The entry of a file that tells what each of the optimizer's parameters is, in its order: lists of names."""
_AS_IT_WAS = "build the optimizer, and wrap the model, as when the checkpoint was saved"
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
        raise CheckpointError(msg, hint=_AS_IT_WAS)
    for names, here in zip(file.get(NAMES) or (), own, strict=False):
        if tuple(names) != here.names:
            msg = f"{path} has {_named(names)} where this optimizer trains {_named(here.names)}"
            raise CheckpointError(msg, hint=_AS_IT_WAS)
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
