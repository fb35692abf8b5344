"""Let `torch.func.functional_call` compute a sharded model with the tensors that the script gives it.

Needed because FSDP2 puts the gathered parameters of the model in the place of whatever stands there, when a pass
begins: what was given would have no effect, without a word.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.double_backward import full_parameters
from fsdplaunch.runtime.auto.state.unsharded_copy import as_before
from fsdplaunch.runtime.inspection.units import is_unit, reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import root_mixed_precision


@contextmanager
def computing_with_given_tensors(hook_context: HookContext) -> Iterator[None]:
    """Hook the functions that call a module with other parameters than its own."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def functional_call(module: nn.Module, given: Any, *args: Any, **kwargs: Any) -> Any:
            if hook_context.ownership.ours and not torch.compiler.is_compiling():
                if hook_context.full:  # in a transform, which shows the model with full parameters
                    return original(module, _with_full(given, hook_context.full), *args, **kwargs)
                merged = given if isinstance(given, Mapping) else {k: v for one in given for k, v in one.items()}
                if _replaces(module, merged):
                    return _call_unsharded(original, module, merged, args, kwargs)
            return original(module, given, *args, **kwargs)

        return functional_call

    with replaced(torch.func, "functional_call", make), replaced(stateless, "functional_call", make):
        yield


def _with_full(given: Any, full: Mapping[int, torch.Tensor]) -> Any:
    """Return what is given to a model with full parameters in the places of its shards."""
    if not isinstance(given, Mapping):
        return tuple(_with_full(each, full) for each in given)
    return {name: full.get(id(value), value) for name, value in given.items()}


def _replaces(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a module has shards, and any of what is given is something else than its own parameter."""
    reshard(module)
    own = dict(module.named_parameters(remove_duplicate=False))
    shards = any(isinstance(param, DTensor) for param in own.values())
    return shards and any(value is not own[name] for name, value in given.items() if name in own)


def _call_unsharded(original: Any, module: nn.Module, given: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Call a module without the hooks of sharding, with full parameters that have gradients. Collective."""
    units = (part for part in module.modules() if is_unit(part))
    dtype = next((root_mixed_precision(unit).param_dtype for unit in units), None)
    own = dict(module.named_parameters(remove_duplicate=False))
    tensors = {**own, **given}
    parameters = full_parameters({name: tensors[name] for name in own}, dtype)
    with ExitStack() as stack:
        for part in list(module.modules()):
            stack.enter_context(as_before(part))
        return original(module, {**tensors, **parameters}, *args, **kwargs)
