"""Copies of a sharded model: as what it was before it was sharded, or as another model, sharded in the same way.

Needed because torch refuses to copy or to pickle a sharded module, and averages of weights start as copies.
"""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.inspection import named_parameters, parameters_of
from fsdplaunch.runtime.inspection.describe import announcing
from fsdplaunch.runtime.inspection.units import original_class, replace_modules, reshard
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.sharding.mesh import ShardTarget, own_device
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.sharding.shard import shard_model
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, await_main_thread
from fsdplaunch.runtime.torch_internals.modules import HOOK_TABLES, SHARDING_MARKS, checkpointed_module

_OURS = ("torch.distributed.fsdp", "fsdplaunch.")


def unsharded_copy(
    model: nn.Module, give: Callable[[nn.Parameter], Any], memo: dict[int, Any] | None = None
) -> nn.Module:
    """Copy a model's modules as what they were before sharding, without wrappers and hooks of sharding.

    The model has its shards in place; `give` returns the copy's parameter for each of them. Without `memo`, which
    is as `copy.deepcopy` has it, the copy shares the model's buffers.
    """
    memo = {id(buffer): buffer for buffer in model.buffers()} if memo is None else memo
    for param in parameters_of(model):
        memo[id(param)] = give(param)
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(as_before(module))
        copied: nn.Module = copy.deepcopy(model, memo)
    inner = {module: checkpointed_module(module) for module in copied.modules()}
    replace_modules(copied, {module: below for module, below in inner.items() if below is not None})
    return copied


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """Show a module as what it was before it was sharded."""
    kept, kind = dict(module.__dict__), type(module)
    if isinstance(module, FSDPModule):
        module.__class__ = original_class(module)
    ours = {key for name in HOOK_TABLES for key, hook in kept[name].items() if _is_ours(hook)}
    for name in HOOK_TABLES:
        module.__dict__[name] = OrderedDict((key, hook) for key, hook in kept[name].items() if key not in ours)
    for name, value in kept.items():  # attributes that sharding has put there: functions, objects of this package
        added = type(value).__module__.startswith("fsdplaunch.") or (callable(value) and _is_ours(value))
        if (added and not isinstance(value, nn.Module)) or name.startswith(SHARDING_MARKS):
            del module.__dict__[name]
    try:
        yield
    finally:
        module.__class__ = kind
        module.__dict__.clear()
        module.__dict__.update(kept)


def _is_ours(hook: Any) -> bool:
    """Return whether a function was put there by sharding."""
    hook = getattr(hook, "hook", hook)  # torch wraps some
    function = getattr(hook, "__func__", hook)
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return str(home).startswith(_OURS)


def allow_deepcopy(model: nn.Module, attach: Callable[[nn.Module, nn.Module], None]) -> None:
    """Let `copy.deepcopy` copy this sharded model, and any module inside of it.

    Its copy is another sharded model, which `attach(copy, model)` makes behave as the script expects; that of a
    module inside has full parameters.
    """
    _allow(model, model.modules(), attach)


def allow_deepcopy_of_units(model: nn.Module) -> None:
    """Let `copy.deepcopy` copy a model that the script has prepared, and its units; others torch copies itself.

    Torch cannot pickle units either, which is said where a script tries to.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.__dict__["__reduce_ex__"] = _refuse_pickling
    _allow(model, units, lambda copied, _: allow_deepcopy_of_units(copied))


def _refuse_pickling(_protocol: int) -> Any:
    msg = f"{script_line()} pickles a model that prepare has sharded"
    raise CheckpointError(msg, hint='save its state_dict() under fsdplaunch.state_dict_type(model, "full")')


def _allow(model: nn.Module, modules: Iterable[nn.Module], attach: Callable[[nn.Module, nn.Module], None]) -> None:
    for module in modules:
        module.__dict__["__deepcopy__"] = _copier(weakref.ref(module), attach if module is model else None)


def _copier(module: "weakref.ref[nn.Module]", attach: Callable[..., None] | None) -> Callable[..., nn.Module]:
    return lambda memo: _copied(module(), memo, attach)  # no partial: `as_before` knows functions of this package


def _copied(model: Any, memo: dict[int, Any], attach: Callable[[nn.Module, nn.Module], None] | None) -> nn.Module:
    """Return another model with the same values, sharded in the same way. Collective.

    One of plain torch where rank 0 is alone, and of a module inside of the model, which has nothing to `attach`.
    """
    prepared = registered(model)
    await_main_thread(f"copy.deepcopy at {script_line()}")  # which computes with full parameters
    reshard(model)
    gathering = ShardGatherer("copy.deepcopy", keep=True)
    if attach is not None:
        gathering.meet()

    def full(param: nn.Parameter) -> Any:
        return gathering.full(param) if isinstance(param, DTensor) else copy.deepcopy(param)

    def as_meta(param: nn.Parameter) -> Any:
        if not isinstance(param, DTensor):
            return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)
        empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
        return nn.Parameter(empty, requires_grad=param.requires_grad)

    if attach is None or not gathering.together:
        copied = unsharded_copy(model, full, memo)
        gathering.leave()
        return copied
    copied = unsharded_copy(model, as_meta, memo)
    if prepared is None:
        return copied
    plugin = copy.copy(prepared.plugin)
    plugin.param_init_fn = _zeros  # some values, until the other model's are copied
    context = None if prepared.sequences is None else prepared.sequences.axis
    place = ShardTarget(mesh=prepared.mesh, device=own_device(prepared.mesh), context=context)
    with announcing(None):
        shard_model(copied, plugin, place)
    values = dict(named_parameters(model))
    with torch.no_grad():
        for name, param in named_parameters(copied):
            param.copy_(values[name])
    attach(copied, model)
    return copied


def _zeros(module: nn.Module) -> None:
    for param in parameters_of(module, recurse=False):
        param.zero_()
