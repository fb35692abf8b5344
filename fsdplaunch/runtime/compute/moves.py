"""Keep attributes, hooks and gradients of a sharded model's parameters when it is moved or cast.

Torch exchanges sharded parameters underneath the Python objects, and their attributes and hooks with them. What
`register_hook` registered would stay at the old ones: the script's own hooks, and those that place gradients as
the shards are.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.gradient_hooks import place_gradients
from fsdplaunch.runtime.sharding.optimizer_params import carrying_attributes
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import gathered_parameters
from fsdplaunch.runtime.torch_internals.modules import MOVE_METHOD

_units: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Those of models that this package has sharded."""
_refusing: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Units that were moved or cast after they had computed."""
_until_the_end = ExitStack()


def keep_through_moves(model: nn.Module) -> None:
    """Keep them for a model that `fully_shard` has just sharded."""
    _units.update(module for module in model.modules() if isinstance(module, FSDPModule))
    _watch_moves()


@functools.cache
def _watch_moves() -> None:
    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def move(unit: Any, *args: Any, **kwargs: Any) -> Any:
            if unit not in _units:
                return original(unit, *args, **kwargs)
            unit.reshard()
            before = [param.dtype for param in parameters_of(unit)]
            with carrying_attributes(unit), _moving_gradients(unit, args[0] if args else kwargs["fn"]):
                result = original(unit, *args, **kwargs)
            place_gradients(unit)
            if gathered_parameters(unit) and unit not in _refusing:
                _refusing.add(unit)
                unit.register_forward_pre_hook(_refusing_passes(before, script_line()), prepend=True)
            return result

        return move

    _until_the_end.enter_context(replaced(FSDPModule, MOVE_METHOD, watched))


@contextmanager
def _moving_gradients(model: nn.Module, move: Callable[[Any], Any]) -> Iterator[None]:
    """Move the gradients of shards beside them: torch cannot exchange underneath what a backward has set."""
    gradients = [(p, p.grad) for p in parameters_of(model) if isinstance(p, DTensor) and p.grad is not None]
    for param, _ in gradients:
        param.grad = None
    yield
    with torch.no_grad():
        for param, gradient in gradients:
            param.grad = move(gradient)


def _refusing_passes(dtypes: list[torch.dtype], line: str) -> Callable[..., None]:
    """Return a hook that refuses to compute in other dtypes than at first: torch would gather in those."""

    def refuse(module: nn.Module, _inputs: Any) -> None:
        if [param.dtype for param in parameters_of(module)] != dtypes:
            msg = f"{line} changed the dtype of {class_name(module)} after its first pass, which fixed it"
            raise ShardingError(msg, hint="change it before that, or use mixed_precision or torch.autocast")

    return refuse
