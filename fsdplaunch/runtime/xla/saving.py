"""Checkpoints under PyTorch/XLA: one file per process with its shards and what they are, or the full model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_xla
from torch import nn
from torch.optim import Optimizer
from torch_xla import runtime
from torch_xla.distributed.fsdp import consolidate_sharded_state_dicts

from fsdplaunch.checkpoint.readers.xla_files import own_name
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.saving.full_state_file import storable
from fsdplaunch.runtime.saving.model_and_optimizer import MODEL, OPTIMIZER, StateToSave
from fsdplaunch.runtime.saving.plain_files import write_large
from fsdplaunch.runtime.torch_internals.tensors import tree_map
from fsdplaunch.runtime.xla import devices
from fsdplaunch.runtime.xla.stored import (
    NAMES,
    check_fit,
    open_weights,
    parameter_shapes,
    read_optimizer,
    values_of,
)
from fsdplaunch.runtime.xla.wrappers import parameters_after, shared_names, wrapper_classes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState(StateToSave):
    """What one process writes into a file of its own, under the name that transformers' Trainer gives it."""

    stem: str  # what the file holds, the end of its name

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, int]:  # noqa: ARG002
        """Write it; under SPMD one process does so for all, and nobody waits."""
        if not runtime.is_spmd() or dist.get_rank() == 0:
            own = folder / self.name
            own.mkdir(exist_ok=True)
            write_large(self.state, own / _file_name(self.stem))
        return {}


def _file_name(stem: str) -> str:
    rank, count = (0, 1) if runtime.is_spmd() else (runtime.global_ordinal(), runtime.world_size())
    return f"rank{rank}-of-{count}-{stem}.bin"


def to_save(models: list[nn.Module], optimizers: list[Optimizer], form: str) -> list[StateToSave] | None:
    """Return what is to be written of a checkpoint's models that PyTorch/XLA shards; None where it shards none.

    Under SPMD every process sees full tensors and writes those, whichever form is asked for.
    """
    if not any(isinstance(model, wrapper_classes()) for model in models):
        return None
    torch_xla.sync()
    found = [_model(model, form, index) for index, model in enumerate(models)]
    for index, optimizer in enumerate(optimizers):
        state = {"optimizer": _on_host(optimizer.state_dict()), NAMES: _trained(models, optimizer)}
        name = f"{OPTIMIZER}_{index}"
        found.append(RankState(kind="SHARDED_STATE_DICT", name=name, state=state, stem="optimizer"))
    return found


def _model(model: nn.Module, form: str, index: int) -> StateToSave:
    state, aliases = _on_host(dict(model.state_dict())), dict[str, str]()
    unit: Any = model
    if runtime.is_spmd():
        state, aliases = {own_name(name): value for name, value in state.items()}, _aliases(model)
    else:
        metadata = unit.get_shard_metadata()
        if form != "FULL_STATE_DICT":
            both = {"model": state, "shard_metadata": metadata}
            name = f"{MODEL}_{index}"
            return RankState(kind="SHARDED_STATE_DICT", name=name, state=both, stem="pytorch_model")
        everyones = from_all((metadata["rank"], state))
        in_order = [each for _, each in sorted(everyones, key=lambda pair: int(pair[0]))]
        state = dict(consolidate_sharded_state_dicts(in_order, metadata))
    end = "" if index == 0 else f"_{index}"
    safe = f"model{end}.safetensors" if storable(state) else None
    return StateToSave(kind="FULL_STATE_DICT", name=f"{MODEL}{end}", state=state, safe_name=safe, aliases=aliases)


def _on_host(state: Any) -> Any:
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, state)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the further names of each parameter that has several, with its first."""
    first: dict[int, str] = {}
    named = [(own_name(name), param) for name, param in model.named_parameters(remove_duplicate=False)]
    return {name: first[id(param)] for name, param in named if first.setdefault(id(param), name) != name}


def _trained(models: list[nn.Module], optimizer: Optimizer) -> list[list[Any]]:
    """Return the names and the shape here of what an optimizer trains, in its order."""
    names: dict[int, tuple[str, ...]] = {}
    for model in models:
        for name, param in parameters_after(model).items():
            names[id(param)] = (*names.get(id(param), ()), name)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [[*names.get(id(param), ()), list(param.shape)] for param in params]


def read(folder: Path, models: list[nn.Module], optimizers: list[Optimizer]) -> bool | None:
    """Load what `to_save` wrote; None where PyTorch/XLA shards none of the models."""
    if not any(isinstance(model, wrapper_classes()) for model in models):
        return None
    for index, model in enumerate(models):
        _read_model(folder, model, index)
    for index, optimizer in enumerate(optimizers):
        path = folder / f"{OPTIMIZER}_{index}"
        stored = read_optimizer(path, _file_name("optimizer"), _trained(models, optimizer))
        try:
            optimizer.load_state_dict(stored)
        except ValueError as error:
            msg = f"{path} is from another optimizer: {error}"
            raise CheckpointError(msg, hint="build it as it was when the checkpoint was saved") from None
        for value in (value for values in optimizer.state.values() for value in values.values()):
            if runtime.is_spmd() and isinstance(value, torch.Tensor) and value.device.type == "xla":
                devices.split_largest_dim(value)
    torch_xla.sync()
    return True


def _read_model(folder: Path, model: nn.Module, index: int) -> None:
    """Copy stored values into a model's own tensors, which stay split as they are."""
    unit: Any = model
    metadata = None if runtime.is_spmd() else unit.get_shard_metadata()
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    further = set(_aliases(model)) if runtime.is_spmd() else shared_names(model)
    own = {name: tensor for name, tensor in state.items() if own_name(name) not in further}
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    with open_weights(folder, index) as stored, torch.no_grad():
        check_fit(stored, parameter_shapes(shapes, metadata), further)
        for name, tensor in own.items():
            values = values_of(name, shapes[name], tensor.dtype, metadata, stored)
            tensor.copy_(values.to(tensor.device))
            if runtime.is_spmd():
                devices.split_largest_dim(tensor)
