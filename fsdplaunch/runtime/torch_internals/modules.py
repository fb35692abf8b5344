"""What torch keeps behind modules (tables, hooks), the wrappers around them, and its data loaders."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import utils
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

if TYPE_CHECKING:
    from torch import nn


__all__ = [
    "BatchNorm",
    "CheckpointImpl",
    "CheckpointWrapper",
    "IncompatibleKeys",
    "OffloadWrapper",
    "checkpoint_wrapper",
    "offload_wrapper",
]
"""Torch's own, under plain names."""
SEND_STATES = (utils, "_sync_module_states")
"""What sends rank 0's parameters and buffers to the others, except those it is to ignore."""
BUILTIN_HOOK = "_register_builtin_comm_hook"
"""The method of DistributedDataParallel that has C++ average gradients, by a kind of hook."""
IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module that names what DistributedDataParallel is to leave alone."""
MOVE_METHOD = "_apply"
"""The method of a module that `to`, `cuda` and `half` end in."""
CALL_METHOD = "_call_impl"
"""The method of a module that calls hooks and forward, which `module.compile()` compiles."""
HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""A module's tables of hooks."""
SHARDING_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "__composable_api_state_key")
"""What the names of sharding's notes on a module begin with."""


def before_state_dict(module: nn.Module, function: Callable[[], None]) -> None:
    """Call a function before a module's `state_dict` does anything, torch's own hooks included."""
    handle = module.register_state_dict_pre_hook(lambda *_: function())
    hooks: Any = module._state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)


forward_hooks: Callable[[nn.Module], dict[int, Any]] = operator.attrgetter("_forward_hooks")
"""Return a module's own table of what is called after its forward, as it is."""


def is_built(module: nn.Module) -> bool:
    """Return whether a module's constructor has begun."""
    return "_modules" in module.__dict__


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters with their attributes, whatever its class lists, one under each."""
    return ((name, param) for name, param in module._parameters.items() if param is not None)


def own_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own buffers with their attributes, one under each."""
    return ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own parameters, then its buffers, with their attributes."""
    return chain(own_parameters(module), own_buffers(module))


def own_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a module holds, one that it holds twice under both attributes."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


def put_tensor(module: nn.Module, attribute: str, tensor: Any) -> None:
    """Put a tensor in the place of a module's parameter or buffer, without what assignment does."""
    table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
    table[attribute] = tensor


def put_child(module: nn.Module, attribute: str, child: nn.Module) -> None:
    """Put a module in the place of another that `module` holds."""
    module._modules[attribute] = child


def is_persistent(module: nn.Module, attribute: str) -> bool:
    """Return whether a module's state dict holds one of its tensors."""
    return attribute not in module._non_persistent_buffers_set


def set_persistent(module: nn.Module, attribute: str, *, persistent: bool) -> None:
    """Say whether a module's state dict is to hold one of its buffers."""
    names = module._non_persistent_buffers_set
    (names.discard if persistent else names.add)(attribute)


def share_tables(module: nn.Module, other: nn.Module) -> None:
    """Let a module have the very parameters, buffers and children of another."""
    for table in ("_parameters", "_buffers", "_modules"):
        module.__dict__[table] = other.__dict__[table]


def parse_move(args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and dtype that arguments of `Module.to` name."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


TOTAL_NORM = "_get_total_norm"
"""The function by which torch's `clip_grad_norm_` finds the norm over all gradients; 2.9 to 2.13."""


COMPILED_ATTRIBUTE = "_orig_mod"
WRAPPER_ATTRIBUTES = frozenset({"_checkpoint_wrapped_module", COMPILED_ATTRIBUTE, "_fsdp_wrapped_module"})
"""The attributes that hold a module inside a wrapper: of torch.compile, and of all that wrap."""


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile's wrapper holds; None for any other module."""
    if COMPILED_ATTRIBUTE not in module._modules:  # a ScriptModule's has no get
        return None
    return module._modules[COMPILED_ATTRIBUTE]


def is_compiled(module: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return whether a module is compiled, in place or inside of one of these wrappers."""
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    return in_place or any(compiled_module(each) is module for each in modules)


def computes_compiled(model: nn.Module, modules: Iterable[nn.Module]) -> bool:
    """Return whether a model, a part of it or what holds it is compiled, by one of these wrappers or in place."""
    held = [inner for inner in map(compiled_module, modules) if inner is not None]
    parts = set(model.modules())
    in_place = any(getattr(part, "_compiled_call_impl", None) is not None for part in parts)
    return in_place or any(inner in parts or model in inner.modules() for inner in held)


def checkpointed_module(module: nn.Module) -> nn.Module | None:
    """Return the module that activation checkpointing's wrapper holds; None for any other module."""
    inner: nn.Module | None = getattr(module, "_checkpoint_wrapped_module", None)
    return inner


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace into.

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
    """Return whether the compiler makes a module for itself, as it does of a step's parameters."""
    graphs = isinstance(module, torch.fx.GraphModule) and (torch.compiler.is_compiling() or makes_graph())
    return graphs or type(module).__module__.startswith("torch._dynamo.")


def makes_graph() -> bool:
    """Return whether the compiler traces a graph, with tensors without values."""
    return torch._guards.TracingContext.try_get() is not None


def eagerly() -> AbstractContextManager[Any]:
    """Return what keeps forwards from being compiled, where torch's compiler is imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def draws_all_items(sampler: Any) -> bool:
    """Return whether a RandomSampler was made without `num_samples`."""
    return sampler._num_samples is None


def begin_process(local_rank: int, local_processes: int) -> None:
    """Tell torch_xla's runtime (2.9) which of its host's processes this is, before anything uses a device."""
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, local_processes)


def is_xla_shard(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is a shard that `XlaFullyShardedDataParallel` keeps."""
    return hasattr(tensor, "_is_sharded")


name_in_unit: Callable[[Any], str] = operator.attrgetter("_orig_name")
"""Return the dotted name, inside its unit, of the parameter that a shard of XlaFullyShardedDataParallel is of."""
