"""What `model.state_dict()` holds for a while: full tensors, shards, or FSDP1's flat shards."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.inspection import clean_name
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, fsdp_modules, full_tensor, refuse_of_xla
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.plugin import state_config, state_dict_name
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.gather import split_like
from fsdplaunch.runtime.torch_internals.fsdp import shows_original_parameters, without_mesh


def _local(model: nn.Module) -> AbstractContextManager[None]:
    """Return what has FSDP1 take its flat shards, where it can load them back."""
    units: list[Any] = fsdp1_wrappers(model)
    if any(map(shows_original_parameters, units)):
        msg = "LOCAL_STATE_DICT cannot be loaded back into a model with use_orig_params"
        raise UsageError(msg, hint="use SHARDED_STATE_DICT, or set fsdp_use_orig_params to false")
    if dist.get_world_size(units[0].process_group) < dist.get_world_size():  # torch finds the ranks of one replica
        msg = "LOCAL_STATE_DICT cannot hold a model with replicas (HYBRID_SHARD)"
        raise UsageError(msg, hint="use SHARDED_STATE_DICT")
    return without_mesh(units)


@contextmanager
def state_dict_type(
    model: nn.Module,
    state_dict_type: StateDictType | str | None = None,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Have `model.state_dict()` and `model.load_state_dict()` speak one kind of state dict inside the context.

    A full state is gathered, so every rank calls `state_dict`; under `rank0_only` all but the first get an empty
    one. A full state to load is given on every rank.

    Args:
        model: Sharded by either version, or with sharded modules inside.
        state_dict_type: `full_state_dict`, `sharded_state_dict`, `local_state_dict`, their first words, or torch's
            object; what the plugin says when left out.
        state_dict_config: Torch's options; the plugin's, or those that fit the type, when left out.
        optim_state_dict_config: The same for the optimizer's; used by FSDP1's functions.

    Raises:
        UsageError: It is not such a type, FSDP2 has no such type, or nothing of the model is sharded. Or flat
            shards of a model that has replicas, or was made with `use_orig_params`.
    """
    refuse_of_xla(model, "state_dict_type")
    prepared = registered(model)
    if state_dict_type is None and prepared is not None:
        state_dict_type = prepared.plugin.state_dict_type
        state_dict_config = state_dict_config or prepared.plugin.state_dict_config
        optim_state_dict_config = optim_state_dict_config or prepared.plugin.optim_state_dict_config
    kind = StateDictType[state_dict_name(state_dict_type or StateDictType.FULL_STATE_DICT)]
    options = _safe(state_config(kind, state_dict_config), model)
    optimizer_options = _safe(state_config(kind, optim_state_dict_config, of_optimizer=True), model)
    roots = fsdp_modules(model, root_only=True)
    if not roots:
        msg = f"nothing of this {type(model).__name__} is sharded, so its state dict has one kind only"
        raise UsageError(msg, hint="use what fsdplaunch.prepare returns")
    if isinstance(roots[0], FullyShardedDataParallel):
        local = _local(model) if kind is StateDictType.LOCAL_STATE_DICT else nullcontext()
        kinds = FullyShardedDataParallel.state_dict_type(model, kind, options, optimizer_options)
        with quiet_torch(), local, kinds:
            yield
    else:
        if kind is StateDictType.LOCAL_STATE_DICT:
            msg = "fsdp_version 2 has no state_dict_type LOCAL_STATE_DICT"
            raise UsageError(msg, hint="use SHARDED_STATE_DICT")
        with _converted(model, kind, options):
            yield


def _safe(options: Any, model: nn.Module) -> Any:
    """Keep FSDP1 from moving to the host what is there already: up to torch 2.13 the process dies of it."""
    on_host = next((param.device.type == "cpu" for param in model.parameters()), True)
    return replace(options, offload_to_cpu=False) if on_host and options.offload_to_cpu else options


_entered: "weakref.WeakKeyDictionary[nn.Module, list[object]]" = weakref.WeakKeyDictionary()
"""The contexts that are open for a model of FSDP2, the innermost last: it alone decides."""


@contextmanager
def _converted(model: nn.Module, kind: StateDictType, options: Any) -> Iterator[None]:
    """Convert FSDP2's DTensors to full tensors on the way out, and full tensors to them on the way in."""
    full = kind is StateDictType.FULL_STATE_DICT
    empty = isinstance(options, FullStateDictConfig) and options.rank0_only and dist.get_rank() != 0

    def give(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if nested[-1] is not mine:
            return
        for name in [name for name in state if name.startswith(prefix)]:
            value = full_tensor(state[name]) if full else state[name]
            state[name] = value.cpu() if options.offload_to_cpu and hasattr(value, "cpu") else value
            if empty:
                del state[name]

    def take(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in model.named_parameters(remove_duplicate=False):
            key = prefix + clean_name(name)
            value = state.get(key)
            if isinstance(param, DTensor) and value is not None and not isinstance(value, DTensor):
                state[key] = split_like(value, param)

    mine = object()
    nested = _entered.setdefault(model, [])
    nested.append(mine)
    hooks = [model.register_state_dict_post_hook(give), model.register_load_state_dict_pre_hook(take)]
    try:
        yield
    finally:
        nested.remove(mine)
        for hook in hooks:
            hook.remove()
