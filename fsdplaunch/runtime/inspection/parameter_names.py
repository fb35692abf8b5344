"""Parameter and module names as the user wrote the model, whatever wrappers stand in between."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.torch_internals.wrappers import WRAPPER_ATTRIBUTES, compiled_module

_DEFAULTS = {"prefix": "", "recurse": True, "remove_duplicate": True}


def clean_name(name: str) -> str:
    """Take the wrappers' own attribute names out of a dotted name."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def joined(*parts: str) -> str:
    """Return the dotted name of what has these names one inside the other; empty ones are the model itself."""
    return ".".join(part for part in parts if part)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile put a wrapper around; any other one itself."""
    return compiled_module(model) or model


def named_parameters(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield as `module.named_parameters`, with the names the model had before anything was wrapped in it.

    A class's own method may take fewer arguments than torch's (torchrl's losses), and gives what it gives.
    """
    given: dict[str, Any] = {"prefix": prefix, "recurse": recurse, "remove_duplicate": remove_duplicate}
    other = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    try:
        named = module.named_parameters(**other)
    except TypeError:
        named = nn.Module.named_parameters(module, **given)
    for name, param in named:
        yield clean_name(name), param


def parameters_of(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    """Yield a module's parameters as torch knows them: a class may have a `parameters` of its own."""
    for _, param in nn.Module.named_parameters(module, recurse=recurse):
        yield param


@contextmanager
def listing_as_torch(model: nn.Module) -> Iterator[None]:
    """Let torch list the parameters of modules whose classes list them in a way of their own, which takes less."""
    with ExitStack() as stack:
        for module in model.modules():
            for name in ("parameters", "named_parameters"):
                torchs = getattr(nn.Module, name)
                if getattr(type(module), name) is not torchs and not type(module).__module__.startswith("torch."):
                    stack.enter_context(own_attribute(module, name, partial(torchs, module)))
        yield


def named_buffers(
    module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield as `module.named_buffers`, with the names the model had before anything was wrapped in it."""
    for name, buffer in module.named_buffers(prefix, recurse, remove_duplicate):
        yield clean_name(name), buffer


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that has several, in the model's order.

    Sharing is found by identity, never by equal values.
    """
    holders: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(param), []).append(clean_name(name))
    return tuple(tuple(names) for names in holders.values() if len(names) > 1)


def count(numel: int) -> str:
    """Write a number of parameters the way people say it: `12.3 M`."""
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if numel >= size:
            return f"{numel / size:.1f}{unit}"
    return str(numel)
