"""Modules that hold one module and run it in their own way: compiled, checkpointed, offloaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn

COMPILED_ATTRIBUTE = "_orig_mod"
WRAPPER_ATTRIBUTES = frozenset({"_checkpoint_wrapped_module", COMPILED_ATTRIBUTE, "_fsdp_wrapped_module"})
"""The attributes that hold a module inside a wrapper: of torch.compile, and of all that wrap; all versions."""


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile's wrapper holds; None for any other module; all versions."""
    if COMPILED_ATTRIBUTE not in module._modules:  # a ScriptModule's has no get
        return None
    return module._modules[COMPILED_ATTRIBUTE]


def is_compiled(module: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return whether a module is compiled, in place or inside of one of these wrappers; all versions."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or any(compiled_module(each) is module for each in modules)


def computes_compiled(model: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return whether a model, a part of it or what holds it is compiled, by one of these wrappers or in place."""
    held = [inner for inner in map(compiled_module, modules) if inner is not None]
    parts = set(model.modules())
    in_place = any(getattr(part, "_compiled_call_impl", None) is not None for part in parts)
    return in_place or any(inner in parts or model in inner.modules() for inner in held)


def checkpointed_module(module: nn.Module) -> nn.Module | None:
    """Return the module that activation checkpointing's wrapper holds; None for any other module; all versions."""
    inner: nn.Module | None = getattr(module, "_checkpoint_wrapped_module", None)
    return inner


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace into; all versions.

    Where nothing was compiled it is called as it is: importing the compiler would take a second.
    """
    disabled: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args)

    return call


def is_made_by_compiler(module: nn.Module) -> bool:
    """Return whether the compiler makes a module for itself, as it does of a step's parameters; all versions."""
    graphs = isinstance(module, torch.fx.GraphModule) and torch.compiler.is_compiling()
    return graphs or type(module).__module__.startswith("torch._dynamo.")


def compiles_backward(caller: str) -> bool:
    """Return whether the compiler asks for gradients, by the name of the calling module; all versions.

    It asks twice: what it traces with hands the call on by its public name.
    """
    return caller.startswith(("torch._functorch._aot_autograd.", "torch.fx.experimental.proxy_tensor"))


def eagerly() -> AbstractContextManager[Any]:
    """Return what keeps forwards from being compiled, where torch's compiler is imported; all versions."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
