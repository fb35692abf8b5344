"""Read fields of the plugin that hold torch's own objects or functions, and make such objects."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.plugin.plugin_values import plain
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import wrap_policy_runner


def allocate(module: nn.Module) -> nn.Module:
    """Give a module's own tensors storage, without values, where this worker computes."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return module.to_empty(device=device, recurse=False)


def names_in(value: list[str] | str | None) -> list[str]:
    """Return the names in a list, or in a text separated by commas."""
    return value.split(",") if isinstance(value, str) else list(value or ())


def is_function(policy: Any) -> bool:
    """Return whether a wrap policy is a function, or an object of torch's that works as one."""
    return callable(policy) or wrap_policy_runner(policy) is not None


def plain_or_none(name: str, value: Any) -> Any:
    """Return a field's value as the configuration would hold it; None for objects that it cannot hold."""
    if isinstance(value, CPUOffload | OffloadPolicy):
        return offloads_params(value)
    if name == "ignored_modules" and not isinstance(value, str):
        return None
    return None if name == "auto_wrap_policy" and is_function(value) else plain(value)


def offloads_params(value: Any) -> bool:
    """Return whether torch's object, of either FSDP version, offloads parameters."""
    return value.offload_params if isinstance(value, CPUOffload) else isinstance(value, CPUOffloadPolicy)


def offload_policy(given: Any, *, on: bool, one: bool) -> CPUOffload | OffloadPolicy:
    """Return torch's object for offloading: the one given, or one made.

    Args:
        given: What the field holds.
        on: Whether to offload, where an object is made.
        one: Whether it is for FSDP1.

    Raises:
        UsageError: An object of the other FSDP version is given.
    """
    if isinstance(given, CPUOffload if one else OffloadPolicy):
        kept: CPUOffload | OffloadPolicy = given
        return kept
    if isinstance(given, CPUOffload | OffloadPolicy):
        msg = f"cpu_offload must not be {type(given).__name__} under fsdp_version {1 if one else 2}"
        raise UsageError(msg, hint="give a flag, or the other class")
    if one:
        return CPUOffload(offload_params=on)
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on else OffloadPolicy()
