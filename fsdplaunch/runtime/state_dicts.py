"""A model's and an optimizer's state, from and to files, in each of the three forms accelerate writes.

Names are those of the user's model, and formats are the master formats: what loads them need not know how they
were sharded. All functions are collective: every rank calls them.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.agreement import together
from fsdplaunch.runtime.optim_states import unshare_counts
from fsdplaunch.runtime.plain_files import read_plain, write_bytes
from fsdplaunch.runtime.safe_reader import SafePlanner, SafeReader

MODEL = "pytorch_model_fsdp"
OPTIMIZER = "optimizer"


def save_model(model: nn.Module, kind: str, folder: Path, index: int) -> None:
    """Write one model.

    Args:
        model: Sharded.
        kind: FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT.
        folder: Where to.
        index: The model's number; accelerate's names carry it.

    Raises:
        CheckpointError: LOCAL_STATE_DICT with parameters torch cannot load back.
    """
    with _quiet():
        if kind == "SHARDED_STATE_DICT":
            _write_sharded({"model": get_model_state_dict(model)}, folder / f"{MODEL}_{index}")
        elif kind == "FULL_STATE_DICT":
            _write_full(get_model_state_dict(model, options=_full(model)), folder / f"{_stem(MODEL, index)}.bin")
        else:
            with _local(model):
                state = {name: _own_part(value) for name, value in model.state_dict().items()}
                _write(state, folder / _local_name(index))


def load_model(model: nn.Module, folder: Path, index: int) -> None:
    """Read one model back, in whichever form the folder holds it.

    Raises:
        CheckpointError: Names or shapes do not fit the model, or the files are damaged.
    """
    with _quiet():
        if (folder / f"{MODEL}_{index}").is_dir():
            state = get_model_state_dict(model)
            _read_sharded({"model": state}, folder / f"{MODEL}_{index}", strict=True)
            set_model_state_dict(model, state)
        elif (file := folder / f"{_stem(MODEL, index)}.bin").exists():
            state = _read_full(file)
            set_model_state_dict(model, state, options=_from_rank_0())
        elif (folder / _local_name(index)).exists():
            with _local(model):
                _fill_in(model.state_dict(), read_plain(folder / _local_name(index)))
        else:
            msg = f"{folder} holds no model {index} for rank {dist.get_rank()}"
            raise CheckpointError(msg, hint="LOCAL_STATE_DICT loads on as many ranks as wrote it")


def save_optimizer(model: nn.Module, optimizer: Optimizer, kind: str, folder: Path, index: int) -> None:
    """Write one optimizer of a model."""
    with _quiet():
        if kind == "FULL_STATE_DICT":
            state = get_optimizer_state_dict(model, optimizer, options=_full(model))
            _write_full(unshare_counts(state), folder / f"{_stem(OPTIMIZER, index)}.bin")
        else:
            state = get_optimizer_state_dict(model, optimizer)
            _write_sharded({"optimizer": state}, folder / f"{OPTIMIZER}_{index}")


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Read one optimizer of a model back, in whichever form the folder holds it.

    Raises:
        CheckpointError: The folder holds none, or it does not fit.
    """
    with _quiet():
        if (folder / f"{OPTIMIZER}_{index}").is_dir():
            state = get_optimizer_state_dict(model, optimizer)
            absent = _read_sharded({"optimizer": state}, folder / f"{OPTIMIZER}_{index}", strict=False)
            set_optimizer_state_dict(model, optimizer, state)
            _forget(model, optimizer, absent)
        elif (file := folder / f"{_stem(OPTIMIZER, index)}.bin").exists():
            state = _read_full(file)
            set_optimizer_state_dict(model, optimizer, state, options=_from_rank_0())
        else:
            msg = f"{folder} holds no optimizer {index}"
            raise CheckpointError(msg, hint="leave the optimizer out, or load a checkpoint that has one")


def _stem(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _local_name(index: int) -> str:
    return f"{_stem(MODEL, index)}_rank{dist.get_rank()}.bin"


def _full(model: nn.Module) -> StateDictOptions:
    """Gather everything, on rank 0 only where torch can.

    Up to torch 2.13 version 1 frees tensors it moves to the host if they were there already, and the process dies;
    without the move every rank gets everything.
    """
    on_host = not torch.cuda.is_available()
    wrapped = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return StateDictOptions(full_state_dict=True, cpu_offload=not (wrapped and on_host))


def _from_rank_0() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _write_full(state: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        _write(state, path)


def _read_full(path: Path) -> dict[str, Any]:
    """Read a file on rank 0, and raise on all ranks if it cannot be; the others get an empty mapping."""
    state: dict[str, Any] = {}
    with together(f"read {path}"):
        if dist.get_rank() == 0:
            state = read_plain(path)
    return state


def _write(state: dict[str, Any], path: Path) -> None:
    box = io.BytesIO()
    torch.save(state, box)
    write_bytes(box.getbuffer(), path)


def _write_sharded(state: dict[str, Any], folder: Path) -> None:
    save(state, storage_writer=FileSystemWriter(folder))


def _read_sharded(state: dict[str, Any], folder: Path, *, strict: bool) -> set[str]:
    """Read into a state dict in place, and return the names it asks for that the checkpoint does not have.

    Raises:
        CheckpointError: Strict, and names differ either way.
    """
    reader = SafeReader(folder)
    stored = set(reader.read_metadata().state_dict_metadata)
    asked = set(_flat_names(state))
    absent = asked - stored
    if strict and stored != asked:
        left_over = sorted(stored - asked)
        words = f"lacks {', '.join(sorted(absent)[:4])}" if absent else f"has {', '.join(left_over[:4])} besides"
        msg = f"{folder} is of another model: it {words}"
        raise CheckpointError(msg, hint="build the model as it was when the checkpoint was saved")
    load(state, storage_reader=SafeReader(folder), planner=SafePlanner(allow_partial_load=not strict))
    return absent


def _flat_names(state: dict[str, Any]) -> list[str]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return list(flatten_state_dict(state)[0])


def _forget(model: nn.Module, optimizer: Optimizer, absent: set[str]) -> None:
    """Drop the state of parameters that had none when the checkpoint was saved: they had never had a gradient."""
    from fsdplaunch.runtime.names import named_parameters

    for name, param in named_parameters(model):
        if any(key.startswith(f"optimizer.state.{name}.") for key in absent):
            optimizer.state.pop(param, None)


def _own_part(value: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """This rank's part of a flat parameter, as a tensor: one that can be read back without running code."""
    if not isinstance(value, ShardedTensor):
        return value
    shards = value.local_shards()
    return shards[0].tensor if shards else torch.empty(0)


def _fill_in(present: dict[str, Any], read: dict[str, Any]) -> None:
    """Copy what was read into the model's own storage, of which its state dict holds views."""
    parts = {name: _own_part(value) for name, value in present.items()}
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    if {name: tuple(part.shape) for name, part in read.items()} != shapes:
        msg = "the flat shards are of another model, or of another number of ranks"
        raise CheckpointError(msg, hint="LOCAL_STATE_DICT loads into the same model on as many ranks as wrote it")
    with torch.no_grad():
        for name, part in parts.items():
            part.copy_(read[name])


@contextmanager
def _local(model: nn.Module) -> Iterator[None]:
    """Version 1's flat shards as they are."""
    if not isinstance(model, FullyShardedDataParallel) or model._use_orig_params:
        msg = "LOCAL_STATE_DICT cannot be loaded back into this model"
        hint = "set fsdp_state_dict_type to SHARDED_STATE_DICT, or fsdp_use_orig_params to false under version 1"
        raise CheckpointError(msg, hint=hint)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notices of future changes that torch's own functions give each other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
