"""Change a run's weights in their last digits: how far that carries it is how far rounding can carry it."""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class LastDigits:
    """Changes each parameter of a process once, up or down by the rounding of its dtype, by chance of its own.

    Attributes:
        changed: The parameters, by id; kept alive, so that no id returns.
    """

    def __init__(self) -> None:
        self.changed: dict[int, nn.Parameter] = {}
        self._generator = torch.Generator("cpu").manual_seed(0)

    def install(self) -> RemovableHandle:
        """Begin to change the parameters of each module when it is called first; return what ends it."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        return register_module_forward_pre_hook(self._before_forward)

    def change(self, param: nn.Parameter) -> None:
        """Multiply each element by 1 plus or minus the dtype's epsilon; zeros stay zeros."""
        self.changed[id(param)] = param
        up = torch.randint(0, 2, param.shape, generator=self._generator, device="cpu").bool()
        epsilon = torch.finfo(param.dtype).eps
        one = torch.ones((), dtype=param.dtype)
        param.data.mul_(torch.where(up, one + epsilon, one - epsilon).to(param.device))

    def _before_forward(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        for param in module.parameters(recurse=False):
            if id(param) not in self.changed and _has_values(param):
                self.change(param)


def _has_values(param: nn.Parameter) -> bool:
    """Return whether a parameter is a plain tensor of real numbers: no lazy one, none of torch.func's."""
    return type(param) is nn.Parameter and param.is_floating_point() and not param.is_meta
