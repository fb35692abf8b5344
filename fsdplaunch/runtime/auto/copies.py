"""Copies of sharded models: `copy.deepcopy` gives another sharded model, and a plain one serves to be written.

Needed because torch refuses to copy or to pickle a sharded module, and averages of weights start as copies.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime import shard
from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.auto.visits import give_back
from fsdplaunch.runtime.names import named_parameters
from fsdplaunch.runtime.prepared import prepared_of
from fsdplaunch.runtime.shard import Place, shard_model
from fsdplaunch.runtime.torch_internals import HOOK_TABLES, SHARDING_MARKS, checkpointed_module
from fsdplaunch.runtime.tree import replace_modules

_OURS = ("torch.distributed.fsdp", "fsdplaunch.")


def allow_copies(model: nn.Module, job: Job) -> None:
    """Let `copy.deepcopy` copy this sharded model: torch gives the class a method that refuses."""
    setattr(type(model), "__deepcopy__", lambda self, memo: _copied(self, memo, job))  # noqa: B010


def plain_copy(model: nn.Module, give: Callable[[nn.Parameter], Any], memo: dict[int, Any]) -> nn.Module:
    """Copy a model's modules as what they were before sharding, without wrappers and hooks of sharding.

    Args:
        model: Sharded, with its shards in place.
        give: The copy's parameter for each of the model's.
        memo: As `copy.deepcopy` has it.
    """
    for param in model.parameters():
        memo[id(param)] = give(param)
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_as_before(module))
        copied: nn.Module = copy.deepcopy(model, memo)
    inner = {module: checkpointed_module(module) for module in copied.modules()}
    replace_modules(copied, {module: below for module, below in inner.items() if below is not None})
    return copied


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Show a module as what it was before it was sharded."""
    kept, kind = dict(module.__dict__), type(module)
    if isinstance(module, FSDPModule):
        module.__class__ = kind.__mro__[2]  # [FSDP<Name>, FSDPModule, Name, ...]
    ours = {key for name in HOOK_TABLES for key, hook in kept[name].items() if _is_ours(hook)}
    for name in HOOK_TABLES:
        module.__dict__[name] = OrderedDict((key, hook) for key, hook in kept[name].items() if key not in ours)
    for name, value in kept.items():
        if name.startswith(SHARDING_MARKS) or (
            callable(value) and _is_ours(value) and not isinstance(value, nn.Module)
        ):
            del module.__dict__[name]
    try:
        yield
    finally:
        module.__class__ = kind
        module.__dict__.clear()
        module.__dict__.update(kept)


def _is_ours(hook: Any) -> bool:
    """Whether a function was put there by sharding."""
    function = getattr(hook, "__func__", hook)
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return str(home).startswith(_OURS)


def _copied(model: Any, memo: dict[int, Any], job: Job) -> nn.Module:
    """Another model with the same values, sharded in the same way."""
    prepared = prepared_of(model)
    give_back(model)
    metas: dict[int, Any] = {}

    def as_meta(param: nn.Parameter) -> Any:
        if not isinstance(param, DTensor):
            return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        if id(param) not in metas:
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            metas[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
        return metas[id(param)]

    copied = plain_copy(model, as_meta, memo)
    if prepared is None:
        return copied
    plugin = copy.copy(prepared.plugin)
    plugin.param_init_fn = _zeros
    place = Place(mesh=prepared.mesh, device=shard._own_device(prepared.mesh))
    shard_model(copied, plugin, place)
    values = dict(named_parameters(model))
    with torch.no_grad():
        for name, param in named_parameters(copied):
            param.copy_(values[name])
    from fsdplaunch.runtime.auto.adopt import settle

    settle(copied, job, job.models[model])
    return copied


def _zeros(module: nn.Module) -> None:
    """Some value, until the other model's is copied."""
    for param in module.parameters(recurse=False):
        param.zero_()
