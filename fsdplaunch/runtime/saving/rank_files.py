"""One file per rank with its shards, as accelerate writes with `use_dcp=False`: for as many ranks as saved it."""

from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.inspection.parameter_names import clean_name
from fsdplaunch.runtime.saving.dcp_files import State
from fsdplaunch.runtime.saving.model_and_optimizer import MODEL, OPTIMIZER
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.saving.small_files import write_large
from fsdplaunch.runtime.state_dict.named_states import renamed, renamed_optimizer
from fsdplaunch.runtime.state_dict.partial_optimizer import left_out_frozen
from fsdplaunch.runtime.torch_warnings import quiet_torch


def write_own_model(state: State, folder: Path, index: int) -> None:
    """Write this rank's shards of a model."""
    write_large(state, _file(folder, MODEL, index))


def write_own_optimizer(state: State, folder: Path, index: int) -> None:
    """Write this rank's shards of an optimizer's state."""
    write_large(state, _file(folder, OPTIMIZER, index))


def read_own_model(model: nn.Module, folder: Path, index: int) -> None:
    """Load this rank's shards of a model; every rank calls this.

    Raises:
        CheckpointError: The file is not there.
    """
    state = read_own(folder, MODEL, index)
    with quiet_torch():
        own_names = {clean_name(name): name for name in get_model_state_dict(model)}
        set_model_state_dict(model, renamed(state, lambda name: own_names.get(name, name)))


def read_own_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Load this rank's shards of an optimizer's state; every rank calls this.

    Raises:
        CheckpointError: The file is not there.
    """
    state = read_own(folder, OPTIMIZER, index)
    with quiet_torch(), left_out_frozen(model, optimizer):
        present: State = get_optimizer_state_dict(model, optimizer)
        own_names = {clean_name(name): name for group in present["param_groups"] for name in group["params"]}
        set_optimizer_state_dict(
            model, optimizer, renamed_optimizer(state, lambda name: own_names.get(name, name))
        )


def _file(folder: Path, stem: str, index: int) -> Path:
    return folder / f"{stem}_{index}_rank{dist.get_rank()}.bin"


def read_own(folder: Path, stem: str, index: int) -> State:
    """Return what this rank's file holds, names as they were saved.

    Raises:
        CheckpointError: The file is not there, is damaged, or holds what could run code.
    """
    path = _file(folder, stem, index)
    if not path.exists():
        msg = f"{path} is not there"
        raise CheckpointError(msg, hint="load on as many ranks as saved it, with the same use_dcp")
    state: State = read_plain(path)
    return state
