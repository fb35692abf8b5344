"""Put a mode for torch's functions on its stack and take it off again, whatever else is there; all versions."""

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

import torch.overrides as overrides


def put_below(mode: TorchFunctionMode) -> None:
    """Put a mode below all others but the one of a default device, which torch expects to be the lowest."""
    above = _taken(lambda each: isinstance(each, DeviceContext))
    overrides._push_mode(mode)
    _put_back(above)


def take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack; not inside of a function that it is called for, where it is not on it."""
    above = _taken(lambda each: each is mode)
    if overrides._len_torch_function_stack():
        overrides._pop_mode()
    _put_back(above)


def _taken(is_last: Callable[[Any], bool]) -> list[Any]:
    """Take the modes off that are above the first of which this holds, or all; return them, the highest first."""
    taken: list[Any] = []
    while overrides._len_torch_function_stack():
        mode = overrides._pop_mode()
        if is_last(mode):
            overrides._push_mode(mode)
            break
        taken.append(mode)
    return taken


def _put_back(taken: list[Any]) -> None:
    for mode in reversed(taken):
        overrides._push_mode(mode)
