"""PEFT's adapters of a sharded model alone, under the names accelerate saves them with. Every rank calls these."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.runtime.inspection.parameters import clean_name, named_parameters
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.saving.model_and_optimizer import (
    MODEL,
    StateToSave,
    read_full,
    read_own,
    read_sharded,
    shape_of,
)
from fsdplaunch.runtime.state_dict.named_states import renamed

State = dict[str, Any]


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model is PEFT's, sharded or not."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(_inner(model), peft.PeftModel)


def only_adapters(part: StateToSave, model: nn.Module) -> StateToSave:
    """Return of a model that is to be saved its active adapter.

    Args:
        part: The whole model, in the form in which it is to be saved.
        model: Sharded, of PEFT.

    Raises:
        UsageError: The form is LOCAL_STATE_DICT, or the adapter consists of more than parameters of the model.
    """
    sharded = part.kind == "SHARDED_STATE_DICT"
    state = part.state["model"] if sharded else part.state
    chosen = {saved: state[name] for saved, name in _names(model, state, part.kind).items()}
    aliases = {name: first for name, first in part.aliases.items() if name in chosen and first in chosen}
    return replace(part, state={"model": chosen} if sharded else chosen, aliases=aliases)


def load_adapters(model: nn.Module, folder: Path, index: int, *, kind: str, use_dcp: bool) -> None:
    """Load what was saved of a model's active adapter; everything else stays as it is.

    Args:
        model: Sharded, of PEFT.
        folder: The checkpoint's.
        index: The model's number.
        kind: FULL_STATE_DICT or SHARDED_STATE_DICT.
        use_dcp: False reads the file of this rank.

    Raises:
        CheckpointError: There is none, or it does not fit.
        UsageError: As in `only_adapters`.
    """
    with quiet_torch():
        state: State = get_model_state_dict(model)
        own_names = {clean_name(name): name for name in state}
        state = renamed(state, clean_name)
        names = _names(model, state, kind)
        part = {saved: state[name] for saved, name in names.items()}
        if kind == "FULL_STATE_DICT":
            file = _present(folder / (f"{MODEL}.bin" if index == 0 else f"{MODEL}_{index}.bin"))
            full = read_full(file, {saved: shape_of(value) for saved, value in part.items()})
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
            full = {own_names[names[saved]]: value for saved, value in full.items()}
            set_model_state_dict(model, full, options=options)
            return
        if use_dcp:
            read_sharded({"model": part}, _present(folder / f"{MODEL}_{index}"), strict=True)
        else:
            part = read_own(folder, MODEL, index)
        state |= {names[saved]: value for saved, value in part.items() if saved in names}
        set_model_state_dict(model, renamed(state, own_names.__getitem__))


def _names(model: nn.Module, state: Mapping[str, Any], kind: str) -> dict[str, str]:
    """Return the name that each parameter of the adapter is saved under, and its own.

    Under FSDP2 accelerate saves a full state's trained parameters under their own names; otherwise PEFT chooses.
    """
    if kind == "LOCAL_STATE_DICT":
        msg = "LOCAL_STATE_DICT holds flat shards, in which adapters cannot be found"
        raise UsageError(msg, hint="use SHARDED_STATE_DICT with adapter_only")
    if kind == "FULL_STATE_DICT" and not isinstance(model, FullyShardedDataParallel):
        return {name: name for name, param in named_parameters(model) if param.requires_grad and name in state}
    from peft import get_peft_model_state_dict  # the model is PEFT's

    inner = _inner(model)
    # PEFT compares names with the places of its layers: wrappers of units among them, or it finds none inside.
    places = {clean_name(f"{place}.x")[:-2]: place for place, _ in inner.named_modules()}
    parts = {name: name.rpartition(".") for name in state}
    in_tree = {f"{places.get(home, home)}{dot}{leaf}": state[name] for name, (home, dot, leaf) in parts.items()}
    chosen = get_peft_model_state_dict(inner, state_dict=in_tree, adapter_name=inner.active_adapter)
    chosen = renamed(chosen, clean_name)
    own = {id(value): name for name, value in state.items()}
    strange = [saved for saved, value in chosen.items() if id(value) not in own]
    if strange:
        msg = f"adapter_only: {strange[0]} is not a parameter of the model"
        raise UsageError(msg, hint="leave adapter_only out: the adapters are saved with everything else")
    return {saved: own[id(value)] for saved, value in chosen.items()}


def _inner(model: nn.Module) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def _present(path: Path) -> Path:
    if not path.exists():
        msg = f"{path} is not there"
        raise CheckpointError(msg, hint="save with the same state_dict_type and adapter_only")
    return path
