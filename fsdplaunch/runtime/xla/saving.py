"""Checkpoints under PyTorch/XLA: one file per process with its shards and what they are, or the full model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch_xla import runtime
from torch_xla.distributed.fsdp import consolidate_sharded_state_dicts

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.saving.full_state_writer import storable
from fsdplaunch.runtime.saving.model_and_optimizer import MODEL, OPTIMIZER, StateToSave
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.saving.small_files import write_large
from fsdplaunch.runtime.torch_internals.tensors import tree_map
from fsdplaunch.runtime.xla import devices
from fsdplaunch.runtime.xla.parameters import own_name
from fsdplaunch.runtime.xla.watch import wrapper_classes

State = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState(StateToSave):
    """What one process writes into a file of its own, under the name that transformers' Trainer gives it.

    Attributes:
        stem: What the file holds, the end of its name.
    """

    stem: str

    def write(self, folder: Path, group: dist.ProcessGroup | None = None) -> None:  # noqa: ARG002  (nobody waits)
        """Write it; under SPMD one process does so for all."""
        if devices.is_spmd() and dist.get_rank() != 0:
            return
        own = folder / self.name
        own.mkdir(exist_ok=True)
        write_large(self.state, own / _file_name(self.stem))


def to_save(models: list[nn.Module], optimizers: list[Optimizer], form: str) -> list[StateToSave] | None:
    """Return what is to be written of models that PyTorch/XLA shards; None where it shards none of them.

    Args:
        models: All of a checkpoint.
        optimizers: All of a checkpoint.
        form: FULL_STATE_DICT or SHARDED_STATE_DICT; under SPMD every process sees full tensors and writes those.
    """
    if not any(isinstance(model, wrapper_classes()) for model in models):
        return None
    devices.run_step()
    states = [_model(model, form, index) for index, model in enumerate(models)]
    return [*states, *(_optimizer(each, index) for index, each in enumerate(optimizers))]


def read(folder: Path, models: list[nn.Module], optimizers: list[Optimizer]) -> bool | None:
    """Load what `to_save` wrote, on as many processes; None where PyTorch/XLA shards none of the models.

    Raises:
        CheckpointError: There is none, or it is of another model.
    """
    if not any(isinstance(model, wrapper_classes()) for model in models):
        return None
    for index, model in enumerate(models):
        _read_model(folder, model, index)
    for index, optimizer in enumerate(optimizers):
        _read_optimizer(folder, optimizer, index)
    devices.run_step()
    return True


def _model(model: nn.Module, form: str, index: int) -> StateToSave:
    state = _on_host(dict(model.state_dict()))
    if devices.is_spmd():
        return _full({own_name(name): value for name, value in state.items()}, _aliases(model), index)
    unit: Any = model
    metadata = unit.get_shard_metadata()
    if form != "FULL_STATE_DICT":
        both = {"model": state, "shard_metadata": metadata}
        return RankState(kind="SHARDED_STATE_DICT", name=f"{MODEL}_{index}", state=both, stem="pytorch_model")
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (metadata["rank"], state))
    in_order = [each for _, each in sorted(everyones, key=lambda pair: int(pair[0]))]
    return _full(dict(consolidate_sharded_state_dicts(in_order, metadata)), {}, index)


def _full(state: State, aliases: Mapping[str, str], index: int) -> StateToSave:
    end = "" if index == 0 else f"_{index}"
    safe = f"model{end}.safetensors" if storable(state) else None
    return StateToSave(
        kind="FULL_STATE_DICT", name=f"{MODEL}{end}", state=state, safe_name=safe, aliases=dict(aliases)
    )


def _optimizer(optimizer: Optimizer, index: int) -> StateToSave:
    state = {"optimizer": _on_host(optimizer.state_dict())}
    return RankState(kind="SHARDED_STATE_DICT", name=f"{OPTIMIZER}_{index}", state=state, stem="optimizer")


def _on_host(state: Any) -> Any:
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, state)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return the further names of each parameter that has several, with its first."""
    first: dict[int, str] = {}
    named = [(own_name(name), param) for name, param in model.named_parameters(remove_duplicate=False)]
    return {name: first[id(param)] for name, param in named if first.setdefault(id(param), name) != name}


def _file_name(stem: str) -> str:
    rank, count = (0, 1) if devices.is_spmd() else (runtime.global_ordinal(), runtime.world_size())
    return f"rank{rank}-of-{count}-{stem}.bin"


def _read_model(folder: Path, model: nn.Module, index: int) -> None:
    if devices.is_spmd():
        path = folder / f"{MODEL}{'' if index == 0 else f'_{index}'}.bin"
        _copy(read_plain(_present(path)), {own_name(name): value for name, value in _tensors(model)}, path)
        return
    path = folder / f"{MODEL}_{index}" / _file_name("pytorch_model")
    own = dict(model.state_dict())
    _copy(_read(path)["model"], own, path)


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(model.state_dict().items())


def _copy(stored: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy stored values into a model's own tensors, which stay split as they are.

    Raises:
        CheckpointError: Names or shapes are others.
    """
    wrong = sorted(set(stored) ^ set(own)) or [name for name in own if own[name].shape != stored[name].shape]
    if wrong:
        msg = f"{path} is of another model or another number of processes: {wrong[0]} differs"
        raise CheckpointError(msg, hint="build the model as it was; merge-weights makes a full one of all files")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name].to(tensor.device))
            if devices.is_spmd():
                devices.split_largest_dim(tensor)


def _read_optimizer(folder: Path, optimizer: Optimizer, index: int) -> None:
    path = folder / f"{OPTIMIZER}_{index}" / _file_name("optimizer")
    stored = _read(path)["optimizer"]
    try:
        optimizer.load_state_dict(stored)
    except ValueError as error:
        msg = f"{path} is of another optimizer: {error}"
        raise CheckpointError(msg, hint="build it as it was when the checkpoint was saved") from None
    if devices.is_spmd():
        for values in optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor) and value.device.type == "xla":
                    devices.split_largest_dim(value)


def _read(path: Path) -> State:
    """Return what a process's own file holds: tensors, sizes and dtypes; nothing in it is executed."""
    state: State = torch.load(_present(path), map_location="cpu", weights_only=True)
    return state


def _present(path: Path) -> Path:
    if not path.is_file():
        msg = f"{path} is not there"
        raise CheckpointError(msg, hint="load on as many processes as saved it, with the same xla_fsdp_v2")
    return path
