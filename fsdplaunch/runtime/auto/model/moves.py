"""Keep hooks and gradients of a sharded model's parameters when it is moved or cast; refuse a move that cannot be.

The first is needed because torch exchanges sharded parameters underneath the Python objects, and leaves at the old
ones what `register_hook` registered: the script's own hooks, and those that place gradients as the shards.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.inspection.units import has_shards, is_unit
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.sharding.gradient_hooks import add_hook, hook_local_gradients, place_gradients
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import gathered_parameters
from fsdplaunch.runtime.torch_internals.modules import MOVE_METHOD


@contextmanager
def keeping_hooks(hook_context: HookContext) -> Iterator[None]:
    """Connect hooks again after a sharded model was moved; let none be moved to where other processes train it.

    What the script registers at shards is called with the gradients that torch sets, which calls none itself.
    """

    def move(original: Any) -> Any:
        def move_and_reconnect(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hook_context.ownership.ours:
                return original(self, *args, **kwargs)
            before = [param.dtype for param in self.parameters()]
            with _moving_gradients(self, args[0] if args else kwargs["fn"]):
                result = original(self, *args, **kwargs)
            place_gradients(self)
            if gathered_parameters(self) and self not in _refusing:
                _refusing.add(self)
                self.register_forward_pre_hook(_refusing_passes(before, script_line()), prepend=True)
            return result

        return move_and_reconnect

    def register(original: Any) -> Any:
        def register_hook(tensor: Any, hook: Any) -> Any:
            own = str(getattr(hook, "__module__", "")).startswith(("fsdplaunch.", "torch."))
            shards = hook_context.ownership.ours and isinstance(tensor, nn.Parameter)
            if not shards or own:
                return original(tensor, hook)
            handle = add_hook(tensor, hook)
            if hook_context.ownership.ranked:
                units = (each for model in hook_context.models for each in model.modules() if is_unit(each))
                hook_local_gradients(units, tensor)
            return handle

        return register_hook

    with (
        replaced(FSDPModule, MOVE_METHOD, move),
        replaced(nn.Module, "share_memory", _sharing),
        replaced(DTensor, "register_hook", register),
    ):
        yield


@contextmanager
def _moving_gradients(model: nn.Module, move: Callable[[Any], Any]) -> Iterator[None]:
    """Move the gradients of shards beside them: torch cannot exchange underneath what a backward has set."""
    gradients = [(p, p.grad) for p in model.parameters() if isinstance(p, DTensor) and p.grad is not None]
    for param, _ in gradients:
        param.grad = None
    yield
    with torch.no_grad():
        for param, gradient in gradients:
            param.grad = move(gradient)


_refusing: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Units that were moved or cast after they had computed."""


def _refusing_passes(dtypes: list[torch.dtype], line: str) -> Callable[..., None]:
    """Return a hook that refuses to compute in other dtypes than at first: torch would gather in those."""

    def refuse(module: nn.Module, _inputs: Any) -> None:
        if [param.dtype for param in module.parameters()] != dtypes:
            msg = f"{line} changed the dtype of {class_name(module)} after its first pass, which fixed it"
            raise ShardingError(msg, hint="change it before that, or use mixed_precision or torch.autocast")

    return refuse


def _sharing(original: Any) -> Any:
    def share_memory(self: nn.Module) -> Any:
        if has_shards(self):
            msg = (
                f"{script_line()} gives {class_name(self)} memory to share with processes of its own, and it is"
                " sharded: these would train copies that nobody reads"
            )
            hint = (
                "run the script with plain python; or have ranks do their work, and fsdplaunch.prepare the model"
            )
            raise ShardingError(msg, hint=hint)
        return original(self)

    return share_memory
