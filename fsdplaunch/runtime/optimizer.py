"""Make an optimizer that was built on full parameters train the sharded ones.

Parameters are matched by what they are called in the model, never by address: addresses are reused, names are not.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from fsdplaunch.errors import ShardingError

_SUCCESSOR = "fsdplaunch_successor"
"""Attribute of a full parameter that names the sharded one, for optimizers that are prepared later."""


def note_successors(old: Mapping[str, torch.Tensor], new: Mapping[str, nn.Parameter]) -> None:
    """Remember on each full parameter which sharded parameter took its name.

    Args:
        old: The full parameters by clean name.
        new: The model's parameters after sharding, by clean name.
    """
    for name, tensor in old.items():
        if name in new:
            setattr(tensor, _SUCCESSOR, new[name])


def repoint(optimizer: Optimizer, known: Mapping[int, str]) -> None:
    """Exchange an optimizer's parameters, and the state it has for them, for the sharded ones, in place.

    Args:
        optimizer: Built on the full parameters, or already on the sharded ones.
        known: The names of all sharded parameters of prepared models, by their id.

    Raises:
        ShardingError: It holds a parameter of no prepared model.
    """
    for index, group in enumerate(optimizer.param_groups):
        group["params"] = [
            _exchange(optimizer, param, known, where=f"parameter {position} of group {index}")
            for position, param in enumerate(group["params"])
        ]


def _exchange(optimizer: Optimizer, param: Any, known: Mapping[int, str], *, where: str) -> Any:
    if id(param) in known:
        return param
    new = getattr(param, _SUCCESSOR, None)
    if new is None or id(new) not in known:
        msg = f"the optimizer trains {where}, of shape {tuple(param.shape)}, that no prepared model holds"
        raise ShardingError(msg, hint="pass the model it belongs to to fsdplaunch.prepare, before or with it")
    if param in optimizer.state:
        state = optimizer.state.pop(param)
        optimizer.state[new] = {key: _like(value, param, new) for key, value in state.items()}
    return new


def _like(value: Any, old: torch.Tensor, new: nn.Parameter) -> Any:
    """A state value split as its parameter is, if it has the parameter's shape; anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != old.shape or not isinstance(new, DTensor):
        return value
    spread = distribute_tensor(value.to(new.device), new.device_mesh, new.placements)
    return spread.to(new.dtype) if value.is_floating_point() and value.dtype == old.dtype else spread
