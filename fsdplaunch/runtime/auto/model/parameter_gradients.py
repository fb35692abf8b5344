"""Give `torch.autograd.grad` by a sharded model's parameters what one process gets, as shards.

Needed because the graph of a pass ends in the gathered parameters, which FSDP2 keeps for itself: torch calls the
sharded ones unused.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import gathered_parameters


def sharded_parameters(inputs: Sequence[Any], models: Sequence[nn.Module]) -> list[Any]:
    """Return for each input the sharded parameter that it is, or that it was gathered from; None for any other."""
    units = [module for model in models for module in model.modules() if is_unit(module)]
    gathered = {id(full): shard for unit in units for full, shard in gathered_parameters(unit)}
    return [value if isinstance(value, DTensor) else gathered.get(id(value)) for value in inputs]


def gradients_by_backward(
    outputs: Sequence[Any],
    params: Sequence[Any],
    given: Any,
    retain_graph: bool | None,
    models: Sequence[nn.Module],
) -> tuple[Any, ...]:
    """Return the gradients of sharded parameters by a backward pass, and leave those that were there.

    Args:
        outputs: What is differentiated.
        params: Sharded.
        given: Gradients of the outputs; None for ones.
        retain_graph: As torch has it.
        models: All that are sharded.
    """
    every = {id(param): param for model in models for param in model.parameters()}
    every |= {id(param): param for param in params}
    before = [(param, param.grad) for param in every.values()]
    for param in every.values():
        param.grad = None
    try:
        inspect.unwrap(torch.autograd.backward)(outputs, given, retain_graph)
        return tuple(param.grad for param in params)
    finally:
        for param, gradient in before:
            param.grad = gradient
