"""Give what makes a program of a model, TorchScript or ONNX, a copy with full parameters.

Needed because it would make one of the hooks that gather parameters, and fails in them. The program is what one
process makes: plain, with full parameters in it.
"""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.gather import ShardGatherer, tensors_of
from fsdplaunch.runtime.auto.state.scripted import telling_unequal
from fsdplaunch.runtime.auto.state.unsharded_copy import unsharded_copy
from fsdplaunch.runtime.inspection.units import has_shards, reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.tensors import resolving_as_torch

_EXPORTS = (
    (torch.jit, "trace"),
    (torch.jit, "script"),
    (torch.onnx, "export"),
    (torch.export, "export"),
)


@contextmanager
def exporting_full_models(hook_context: HookContext) -> Iterator[None]:
    """Hook the functions that are given a module first."""

    def make(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def export(model: Any, *args: Any, **kwargs: Any) -> Any:
            sharded = hook_context.ownership.ours and _is_sharded(model)
            return original(_full_copy(model, name) if sharded else model, *args, **kwargs)

        return export

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.jit, "script", functools.partial(telling_unequal, hook_context)))
        stack.enter_context(resolving_as_torch())
        for owner, name in _EXPORTS:
            call = f"{owner.__name__}.{name}"
            stack.enter_context(replaced(owner, name, functools.partial(make, call)))
        yield


def _is_sharded(model: Any) -> bool:
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return False
    reshard(model)
    return has_shards(model)


def _full_copy(model: nn.Module, call: str) -> nn.Module:
    """Return a plain copy of a sharded module. Collective, or on rank 0 alone."""
    gathering = ShardGatherer(call, keep=True)
    with gathering.finish("gather the model"):
        return unsharded_copy(model, gathering.full_or_own, tensors_of(model))
