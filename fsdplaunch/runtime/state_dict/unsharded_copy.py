"""Show and copy a sharded model as what it was before it was sharded."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.inspection.replace_modules import replace_modules
from fsdplaunch.runtime.inspection.units import original_class
from fsdplaunch.runtime.torch_internals.modules import HOOK_TABLES, SHARDING_MARKS
from fsdplaunch.runtime.torch_internals.wrappers import checkpointed_module

_OURS = ("torch.distributed.fsdp", "fsdplaunch.")


def unsharded_copy(
    model: nn.Module, give: Callable[[nn.Parameter], Any], memo: dict[int, Any] | None = None
) -> nn.Module:
    """Copy a model's modules as what they were before sharding, without wrappers and hooks of sharding.

    Args:
        model: Sharded, with its shards in place.
        give: The copy's parameter for each of the model's.
        memo: As `copy.deepcopy` has it; left out, the copy shares the model's buffers.
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
    for name, value in kept.items():
        if _is_added(value) or name.startswith(SHARDING_MARKS):
            del module.__dict__[name]
    try:
        yield
    finally:
        module.__class__ = kind
        module.__dict__.clear()
        module.__dict__.update(kept)


def _is_added(value: Any) -> bool:
    """Return whether a module's attribute was put there by sharding: a function, or an object of this package."""
    if isinstance(value, nn.Module):
        return False
    return type(value).__module__.startswith("fsdplaunch.") or (callable(value) and _is_ours(value))


def _is_ours(hook: Any) -> bool:
    """Return whether a function was put there by sharding."""
    hook = getattr(hook, "hook", hook)  # torch wraps some
    function = getattr(hook, "__func__", hook)
    home = getattr(function, "__globals__", {}).get("__name__", "")
    return str(home).startswith(_OURS)
