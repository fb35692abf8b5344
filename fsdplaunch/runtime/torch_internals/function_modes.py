"""Put a mode for torch's functions on its stack and take it off again, whatever else is there; all versions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

_stack: Any = overrides


def put_below(mode: TorchFunctionMode) -> None:
    """Put a mode below all others but that of `set_default_device`, which torch expects to be the lowest.

    That of `with torch.device(...)` is taken off from above, whatever is there.
    """
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    above = _taken(lambda each: each is default)
    _stack._push_mode(mode)
    _put_back(above)


def take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack; not inside of a function that it is called for, where it is not on it."""
    above = _taken(lambda each: each is mode)
    if _stack._len_torch_function_stack():
        _stack._pop_mode()
    _put_back(above)


def _taken(is_last: Callable[[Any], bool]) -> list[Any]:
    """Take the modes off that are above the first of which this holds, or all; return them, the highest first."""
    taken: list[Any] = []
    while _stack._len_torch_function_stack():
        mode = _stack._pop_mode()
        if is_last(mode):
            _stack._push_mode(mode)
            break
        taken.append(mode)
    return taken


def _put_back(taken: list[Any]) -> None:
    for mode in reversed(taken):
        _stack._push_mode(mode)
