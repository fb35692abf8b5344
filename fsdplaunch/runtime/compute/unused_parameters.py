"""Let ranks use different parameters in one pass, as `find_unused_parameters=True` lets them.

Needed because FSDP2 averages the gradients that a rank has: ranks that have others would wait for each other, or
average different ones. A parameter that no rank used has no gradient, as under DistributedDataParallel.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import before_reducing_gradients
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import unsharded_parameters


def agree_on_unused(model: nn.Module) -> None:
    """Have every unit of a sharded model fill in zeros for gradients that only other ranks have."""
    for module in model.modules():
        before_reducing_gradients(module, _fill)


def agree_on_alternatives(model: nn.Module) -> None:
    """Do so in units with a list or dictionary of modules, of which a pass may call some: experts, heads."""
    for unit in model.modules():
        if is_unit(unit) and any(_are_alternatives(module) for module in _inside(unit)):
            before_reducing_gradients(unit, _fill)


def _inside(unit: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a unit, without those of units inside of it."""
    waiting = [unit]
    while waiting:
        module = waiting.pop()
        yield module
        waiting += [child for child in module.children() if not is_unit(child)]


def _are_alternatives(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    children = [child for child in module.children() if not is_unit(child)]
    return sum(any(True for _ in parameters_of(child)) for child in children) > 1


def _fill(group: Any) -> None:
    """Give parameters without a gradient zeros if another rank has one. Collective."""
    found = unsharded_parameters(group)
    used = torch.tensor([int(has) for _, has in found], dtype=torch.uint8)
    if not len(used):
        return
    everywhere = used.clone()
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    for (param, has), wanted in zip(found, everywhere.tolist(), strict=True):
        if wanted and not has:
            param.grad = torch.zeros_like(param)
