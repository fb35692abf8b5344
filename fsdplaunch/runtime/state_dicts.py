"""A model's and an optimizer's state, from and to files, in each of the three forms accelerate writes.

Names are those of the user's model, and formats are the master formats: what loads them need not know how they
were sharded. All functions are collective: every rank calls them.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime import state_files as files
from fsdplaunch.runtime.names import clean_name, named_parameters
from fsdplaunch.runtime.optim_states import unshare_counts

MODEL = "pytorch_model_fsdp"
OPTIMIZER = "optimizer"
State = dict[str, Any]


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
            state = _renamed(get_model_state_dict(model), clean_name)
            files.write_sharded({"model": state}, folder / f"{MODEL}_{index}")
        elif kind == "FULL_STATE_DICT":
            state = _renamed(get_model_state_dict(model, options=_full(model)), clean_name)
            files.write_whole(state, folder / f"{_stem(MODEL, index)}.bin")
        else:
            with _local(model):
                files.write_flat(model.state_dict(), folder / _local_name(index))


def load_model(model: nn.Module, folder: Path, index: int) -> None:
    """Read one model back, in whichever form the folder holds it.

    Raises:
        CheckpointError: Names or shapes do not fit the model, or the files are damaged.
    """
    with _quiet():
        if (folder / _local_name(index)).exists():
            with _local(model):
                files.read_flat(model.state_dict(), folder / _local_name(index))
            return
        state: State = get_model_state_dict(model)
        own_names = {clean_name(name): name for name in state}
        state = _renamed(state, clean_name)
        if (folder / f"{MODEL}_{index}").is_dir():
            files.read_sharded({"model": state}, folder / f"{MODEL}_{index}", strict=True)
            set_model_state_dict(model, _renamed(state, own_names.__getitem__))
        elif (file := folder / f"{_stem(MODEL, index)}.bin").exists():
            shapes = {name: files.shape_of(value) for name, value in state.items()}
            whole = _renamed(files.read_whole(file, shapes), own_names.__getitem__)
            set_model_state_dict(model, whole, options=_from_rank_0())
        else:
            msg = f"{folder} holds no model {index} for rank {dist.get_rank()}"
            raise CheckpointError(msg, hint="LOCAL_STATE_DICT loads on as many ranks as wrote it")


def save_optimizer(model: nn.Module, optimizer: Optimizer, kind: str, folder: Path, index: int) -> None:
    """Write one optimizer of a model."""
    with _quiet():
        if kind == "FULL_STATE_DICT":
            state = get_optimizer_state_dict(model, optimizer, options=_full(model))
            state = _renamed_optimizer(unshare_counts(state), clean_name)
            files.write_whole(state, folder / f"{_stem(OPTIMIZER, index)}.bin")
        else:
            state = _renamed_optimizer(get_optimizer_state_dict(model, optimizer), clean_name)
            files.write_sharded({"optimizer": state}, folder / f"{OPTIMIZER}_{index}")


def load_optimizer(model: nn.Module, optimizer: Optimizer, folder: Path, index: int) -> None:
    """Read one optimizer of a model back, in whichever form the folder holds it.

    Raises:
        CheckpointError: The folder holds none, or it does not fit.
    """
    sharded, whole = folder / f"{OPTIMIZER}_{index}", folder / f"{_stem(OPTIMIZER, index)}.bin"
    if not sharded.is_dir() and not whole.exists():
        msg = f"{folder} holds no optimizer {index}"
        raise CheckpointError(msg, hint="leave the optimizer out, or load a checkpoint that has one")
    with _quiet():
        state: State = get_optimizer_state_dict(model, optimizer)
        own_names = {clean_name(name): name for group in state["param_groups"] for name in group["params"]}
        if sharded.is_dir():
            state = _renamed_optimizer(state, clean_name)
            absent = files.read_sharded({"optimizer": state}, sharded, strict=False)
            stateless = {name for name in own_names if any(key.startswith(_state_of(name)) for key in absent)}
            options = None
        else:
            state = files.read_whole_optimizer(whole, set(own_names))
            stateless = _stateless(state, own_names)
            options = _from_rank_0(strict=False)  # names are checked; state may be missing
        restored = _renamed_optimizer(state, own_names.__getitem__)
        set_optimizer_state_dict(model, optimizer, restored, options=options)
    for name, param in named_parameters(model):
        if name in stateless:  # it had never had a gradient when the checkpoint was saved
            optimizer.state.pop(param, None)


def _state_of(name: str) -> str:
    """What the flattened names of a parameter's state in a sharded checkpoint begin with."""
    return f"optimizer.state.{name}."


def _renamed(state: State, rename: Callable[[str], str]) -> State:
    return {rename(name): value for name, value in state.items()}


def _renamed_optimizer(state: State, rename: Callable[[str], str]) -> State:
    if not state:
        return state
    groups = [{**group, "params": [rename(name) for name in group["params"]]} for group in state["param_groups"]]
    return {"state": _renamed(state["state"], rename), "param_groups": groups}


def _stateless(whole: State, names: Iterable[str]) -> set[str]:
    """The parameters a whole optimizer state has nothing for; rank 0 holds it and tells."""
    box = [set(names) - set(whole.get("state", {}))]
    dist.broadcast_object_list(box, src=0)
    return box[0]


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


def _from_rank_0(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)


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
