"""Shard a model for its script as it is moved to the device, compiled, or given to an optimizer.

The first of these is the last moment at which the full model need not be on any one device, and the first at
which it is complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.adopt_model import adopt_model
from fsdplaunch.runtime.auto.model.batch_norm import tell_compiled
from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.inspection.units import is_sharded, is_unit
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import being_built, script_line
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.torch_internals.modules import CALL_METHOD, parse_move


def is_due(module: nn.Module, device: torch.device | None, hook_context: HookContext) -> bool:
    """Return whether moving a module to a device is the moment to shard it.

    It is for a complete model that has something to train and goes to the kind of device this worker computes on.
    It is not for a submodule, nor while a larger module that will hold it is being built.
    """
    if device is None or device.type != hook_context.device.type:
        return False
    if is_sharded(module) or isinstance(module, DistributedDataParallel) or hook_context.ownership.only_replicas:
        return False
    params = list(module.parameters())
    if not any(param.requires_grad for param in params) or any(is_lazy(param) for param in params):
        return False  # lazy ones get their shapes in a first pass
    inside = any(isinstance(each, nn.Module) for each in being_built())
    return not inside and hook_context.module_registry.is_root(unwrapped(module))


@contextmanager
def sharding_on_move(hook_context: HookContext) -> Iterator[None]:
    """Shard a model that is moved to the device, before it is: it must not land there in full."""

    def shard_then_move(original: Any) -> Any:
        def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            device, dtype = parse_move(args, kwargs)
            if is_due(self, device, hook_context) and hook_context.ownership.claim(
                f"moves {type(self).__name__} to {device}"
            ):
                if dtype is not None:
                    original(self, dtype)
                adopt_model(unwrapped(self), hook_context, what=f"moves it to {device}")
            return original(self, *args, **kwargs)

        return to

    def shard_then_cuda(original: Any) -> Any:
        def cuda(self: nn.Module, device: Any = None) -> Any:
            if is_due(self, torch.device("cuda"), hook_context) and hook_context.ownership.claim(
                f"moves {type(self).__name__}"
            ):
                adopt_model(unwrapped(self), hook_context, what="moves it to the GPU")
            return original(self, device)

        return cuda

    with replaced(nn.Module, "to", shard_then_move), replaced(nn.Module, "cuda", shard_then_cuda):
        yield


@contextmanager
def sharding_on_compile(hook_context: HookContext) -> Iterator[None]:
    """Shard a model before torch.compile traces it."""

    def shard_then_compile(original: Any) -> Any:
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            hook_context.recorder.end()  # the compiler would have to know its mode
            module = _module_of(model)
            if module is not None:
                _shard_compiled(module, hook_context)
                kwargs = _without_full_graph(model, module, kwargs)
            return original(model, *args, **kwargs)

        return compile_

    with replaced(torch, "compile", shard_then_compile):
        yield


def _module_of(compiled: Any) -> nn.Module | None:
    """Return the module that is compiled, or whose method is: `model.compile()` compiles one of its methods."""
    owner = getattr(compiled, "__self__", compiled)
    return owner if isinstance(owner, nn.Module) else None


def _shard_compiled(module: nn.Module, hook_context: HookContext) -> None:
    due = is_due(module, hook_context.device, hook_context)
    if due and hook_context.ownership.claim(f"compiles {type(module).__name__}"):
        adopt_model(unwrapped(module), hook_context, what="compiles it")
    if unwrapped(module) in hook_context.models:
        tell_compiled(unwrapped(module), hook_context)
        hook_context.stop_marking()  # hooks that go would have the compiler begin again


def _without_full_graph(compiled: Any, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options without `fullgraph` where hooks are called, which no graph holds."""
    if not kwargs.get("fullgraph") or not _calls_hooks(compiled, module):
        return kwargs
    name = class_name(module)
    messages.say(f"{script_line()}: {name} is compiled without fullgraph: no graph holds the hooks that gather it")
    return {**kwargs, "fullgraph": False}


def _calls_hooks(compiled: Any, module: nn.Module) -> bool:
    name = getattr(compiled, "__name__", "")
    if name == CALL_METHOD:  # of `model.compile()`: the hooks of all modules, too
        return True
    return any(is_unit(part) and not (name == "forward" and part is module) for part in module.modules())


@contextmanager
def building_in_host_memory(hook_context: HookContext) -> Iterator[None]:
    """Give a model without storage its storage in host memory: on the device it would be in full."""

    def empty_on_cpu(original: Any) -> Any:
        def to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> Any:
            due = (
                hook_context.device.type == "cuda"
                and device is not None
                and is_due(self, torch.device(device), hook_context)
            )
            if due and hook_context.ownership.claim(f"gives {type(self).__name__} storage"):
                device = "cpu"
            return original(self, device=device, recurse=recurse)

        return to_empty

    with replaced(nn.Module, "to_empty", empty_on_cpu):
        yield
