"""Optimizers that train a part of what an FSDP1 unit holds.

FSDP1 gathers the state of a unit's parameters together, and refuses when one that requires gradients has none
because its optimizer leaves it out. Here it takes such a parameter for frozen, as the optimizer does.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import flat_parameter


@contextmanager
def left_out_frozen(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Have FSDP1 take parameters that an optimizer leaves out for frozen, while its state is gathered or split."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    left_out = [param for param in _shown(model) if param.requires_grad and id(param) not in trained]
    for param in left_out:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in left_out:
            param.requires_grad_(True)


def _shown(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP1's units show as the user's own, under `use_orig_params`."""
    flats = [flat for flat in map(flat_parameter, fsdp1_wrappers(model)) if flat is not None]
    return [param for flat in flats for param in flat.params]
