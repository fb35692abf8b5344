"""A model's parameters and buffers: their names as the user wrote the model, and the places that hold them.

Whatever wrappers stand in between.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.torch_internals.modules import WRAPPER_ATTRIBUTES, compiled_module, own_tensors, put_tensor

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
def parameters_listed_by_torch(model: nn.Module) -> Iterator[None]:
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


def living_modules() -> list[nn.Module]:
    """Return all modules that there are in this process."""
    # isinstance would ask proxies, which import what they stand for
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that has several, in the model's order.

    Sharing is found by identity, never by equal values.
    """
    holders: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(param), []).append(clean_name(name))
    return tuple(tuple(names) for names in holders.values() if len(names) > 1)


Spec = tuple[tuple[int, ...], torch.dtype, bool]  # shape, dtype, whether it has storage
Specs = dict[str, Spec]  # by name


@dataclass(slots=True, kw_only=True)
class ModelTensor:
    """One parameter or buffer, wherever it is registered."""

    name: str  # its first clean name
    spec: Spec  # its shape and dtype here, and whether it has storage
    names: list[str] = field(default_factory=list)  # all its clean names
    places: list[tuple[nn.Module, str]] = field(default_factory=list)  # each module, and the attribute in it
    materialized: bool = False  # with storage on the device and rank 0's values

    @property
    def tensor(self) -> torch.Tensor:
        """Return what the modules hold now. Not kept: a full tensor must go as soon as its shards are made."""
        module, attribute = self.places[0]
        tensor: torch.Tensor = getattr(module, attribute)
        return tensor

    def exchange(self, new: torch.Tensor) -> None:
        """Put another tensor in all places; in those of a parameter it becomes one, with its attributes."""
        old = self.tensor
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        new.__dict__.update(old.__dict__)
        for module, attribute in self.places:
            put_tensor(module, attribute, new)


def model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return every parameter and buffer of a model that is not sharded, each once, with all its places."""
    found: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor in own_tensors(module):
            name = clean_name(joined(prefix, attribute))
            spec = (tuple(tensor.shape), tensor.dtype, not tensor.is_meta)
            entry = found.setdefault(id(tensor), ModelTensor(name=name, spec=spec))
            entry.names.append(name)
            entry.places.append((module, attribute))
    return list(found.values())
