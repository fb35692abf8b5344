"""Find the script's models: where they are moved, compiled, given storage, or known by their parameters. Rule 1.

Moving a model to the device is the last moment at which the full model need not be on any one device, and the
first at which it is complete. An optimizer gets parameters only, and a parameter does not know its module: the
modules that exist are recorded, weakly.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.adopt_model import adopt_model
from fsdplaunch.runtime.inspection.parameter_names import unwrapped
from fsdplaunch.runtime.inspection.units import is_sharded, is_unit
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import being_built, script_line
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.torch_internals.modules import CALL_METHOD, parse_move


@contextmanager
def finding_models(hook_context: HookContext) -> Iterator[None]:
    """Record modules as they are made; shard models that are moved, compiled or given storage."""
    found = _Found(hook_context)
    with ExitStack() as stack:
        for owner, name, make in (
            (nn.Module, "__init__", found.noting),
            (nn.Module, "__setstate__", found.noting),
            (nn.Module, "to", found.shard_then_move),
            (nn.Module, "cuda", found.shard_then_cuda),
            (nn.Module, "to_empty", found.empty_in_host_memory),
            (torch, "compile", found.shard_then_compile),
        ):
            stack.enter_context(replaced(owner, name, make))
        yield


class _Found:
    """What one worker does with the models that it finds."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context

    def noting(self, original: Any) -> Any:
        registry = self.hook_context.module_registry

        def note_and_go_on(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            registry.note(module)
            return original(module, *args, **kwargs)

        note_and_go_on.__wrapped__ = original  # type: ignore[attr-defined]
        return note_and_go_on

    def shard_then_move(self, original: Any) -> Any:
        def to(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            device, dtype = parse_move(args, kwargs)
            if self._is_ours(module, device, f"moves {type(module).__name__} to {device}"):
                if dtype is not None:
                    original(module, dtype)
                self._shard(module, f"moves it to {device}")
            return original(module, *args, **kwargs)

        return to

    def shard_then_cuda(self, original: Any) -> Any:
        def cuda(module: nn.Module, device: Any = None) -> Any:
            at = torch.device("cuda") if device is None else torch.device("cuda", torch.device(device).index)
            if self._is_ours(module, at, f"moves {type(module).__name__}"):
                self._shard(module, "moves it to the GPU")
            return original(module, device)

        return cuda

    def empty_in_host_memory(self, original: Any) -> Any:
        """Give a model without storage its storage in host memory: on the device it would be in full."""

        def to_empty(module: nn.Module, *, device: Any, recurse: bool = True) -> Any:
            on_gpu = self.hook_context.device.type == "cuda" and device is not None
            if on_gpu and self._is_ours(module, torch.device(device), f"gives {type(module).__name__} storage"):
                device = "cpu"
            return original(module, device=device, recurse=recurse)

        return to_empty

    def shard_then_compile(self, original: Any) -> Any:
        def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
            module = getattr(model, "__self__", model)  # `model.compile()` compiles one of its methods
            if isinstance(module, nn.Module):
                if self._is_ours(module, self.hook_context.device, f"compiles {type(module).__name__}"):
                    self._shard(module, "compiles it")
                kwargs = _without_full_graph(model, module, kwargs)
            return original(model, *args, **kwargs)

        return compile_

    def _is_ours(self, module: nn.Module, device: torch.device | None, what: str) -> bool:
        """Return whether a module goes to the kind of device that this worker computes on, and is to be sharded.

        It is for a complete model that has something to train. It is not for a submodule, nor while a larger
        module that will hold it is being built.
        """
        own, ownership = self.hook_context.device, self.hook_context.ownership
        if device is None or device.type != own.type or is_sharded(module):
            return False
        if isinstance(module, DistributedDataParallel) or ownership.only_replicas:
            return False
        params = list(nn.Module.parameters(module))
        if not any(param.requires_grad for param in params) or any(is_lazy(param) for param in params):
            return False  # lazy ones get their shapes in a first pass
        inside = any(isinstance(each, nn.Module) for each in being_built())
        if inside or not self.hook_context.module_registry.is_root(unwrapped(module)) or not ownership.claim(what):
            return False
        if device.index is not None and device.index != own.index:
            msg = f"{script_line()} {what}, and this worker's GPU is {own}"
            raise ShardingError(
                msg,
                hint='say "cuda", which is each worker\'s own; or launch with --hide-ranks, which makes it cuda:0',
            )
        return True

    def _shard(self, module: nn.Module, what: str) -> None:
        adopt_model(unwrapped(module), self.hook_context, what=what)


def _without_full_graph(compiled: Any, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the options without `fullgraph` where hooks are called, which no graph holds."""
    hooked = getattr(
        compiled, "__name__", ""
    ) == CALL_METHOD or any(  # of `model.compile()`: all modules' hooks, too
        is_unit(part) and not (getattr(compiled, "__name__", "") == "forward" and part is module)
        for part in module.modules()
    )
    if not kwargs.get("fullgraph") or not hooked:
        return kwargs
    name = class_name(module)
    messages.say(f"{script_line()}: {name} is compiled without fullgraph: no graph holds the hooks that gather it")
    return {**kwargs, "fullgraph": False}
