"""Let `torch.func.functional_call` compute a sharded model with the tensors that the script gives it.

Needed because FSDP2 puts the gathered parameters of the model in the place of whatever stands there, when a pass
begins: what was given would have no effect, without a word. Transforms of torch.func do not fit FSDP2's hooks.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import stateless

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.shards.values import gathered
from fsdplaunch.runtime.inspection.units import is_unit, reshard
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import calling_lines
from fsdplaunch.runtime.state_dict.unsharded_copy import as_before
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import root_mixed_precision
from fsdplaunch.runtime.torch_internals.tensors import is_in_transform

_HINT = "run this script in one process: --num-processes 1 --shard off"


@contextmanager
def computing_with_given_tensors(hook_context: HookContext) -> Iterator[None]:
    """Rule 3: what calls a module with other parameters than its own computes with these."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def functional_call(module: nn.Module, given: Any, *args: Any, **kwargs: Any) -> Any:
            if hook_context.ownership.ours and not torch.compiler.is_compiling():
                merged = given if isinstance(given, Mapping) else {k: v for one in given for k, v in one.items()}
                if _replaces(module, merged):
                    return _call_unsharded(original, module, merged, args, kwargs)
            return original(module, given, *args, **kwargs)

        return functional_call

    with replaced(torch.func, "functional_call", make), replaced(stateless, "functional_call", make):
        yield


def _replaces(module: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a module has shards, and any of what is given is something else than its own parameter."""
    reshard(module)
    own = dict(module.named_parameters(remove_duplicate=False))
    shards = any(isinstance(param, DTensor) for param in own.values())
    return shards and any(value is not own[name] for name, value in given.items() if name in own)


def _call_unsharded(original: Any, module: nn.Module, given: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    """Call a module without the hooks of sharding, with full parameters that have gradients. Collective.

    Raises:
        ShardingError: A transform of torch.func differentiates by what is given.
    """
    if is_in_transform():
        msg = f"{calling_lines()}: torch.func for the parameters of a sharded model would lose gradients"
        raise ShardingError(msg, hint=_HINT)
    units = (part for part in module.modules() if is_unit(part))
    dtype = next((root_mixed_precision(unit).param_dtype for unit in units), None)
    own = dict(module.named_parameters(remove_duplicate=False))
    tensors = {**own, **given}
    full = {id(tensors[name]): _full(tensors[name], dtype) for name in own}
    with ExitStack() as stack:
        for part in list(module.modules()):
            stack.enter_context(as_before(part))
        return original(module, {**tensors, **{name: full[id(tensors[name])] for name in own}}, *args, **kwargs)


def _full(param: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    full = gathered(param, keeps_batch=False) if isinstance(param, DTensor) else param
    return full.to(dtype) if dtype is not None and full.is_floating_point() else full
