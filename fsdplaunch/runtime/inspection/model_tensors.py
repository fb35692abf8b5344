"""A model's parameters and buffers, each once, with all places where modules hold it."""

from dataclasses import dataclass, field

import torch
from torch import nn

from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.torch_internals.modules import own_tensors, put_tensor

Spec = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, whether it has storage."""
Specs = dict[str, Spec]
"""By name."""


@dataclass(slots=True, kw_only=True)
class ModelTensor:
    """One parameter or buffer, wherever it is registered.

    Attributes:
        name: Its first clean name.
        names: All its clean names.
        spec: Its shape and dtype here, and whether it has storage.
        places: Each module that holds it, and under which attribute.
        materialized: Whether it has storage on the device and rank 0's values.
    """

    name: str
    spec: Spec
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    materialized: bool = False

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
