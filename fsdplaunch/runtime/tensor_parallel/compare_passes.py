"""Compare what a model computes with something split with what it computes in full, on one batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import LaunchError, ShardingError
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.sharding.blocks import class_name
from fsdplaunch.runtime.torch_internals.wrappers import eagerly

_FP32, _TF32, _LOW_PRECISION = 1e-3, 1e-2, 0.2
_ALIGNMENT = "multiple of 16 bytes"
"""What torch's grouped matrix product says of a part whose rows are shorter, or not of that length."""
_AT_ONCE = 2**22
"""How many numbers are compared at once: in double precision all logits of a batch would be gigabytes."""


class FirstPass:
    """The first pass of a model with gradients, before which it is compared; passes of the comparison are none.

    Args:
        what: What is split, with the key that sets it.
        hint: What a model must be like.
        choose: Called with whether the next pass splits.
        computes_in: The dtype that sharding gathers parameters in; None for their own.
    """

    def __init__(
        self, what: str, hint: str, choose: Callable[[bool], None], computes_in: torch.dtype | None
    ) -> None:
        self.computes_in = computes_in
        self.what = what
        self.hint = hint
        self.choose = choose
        self.running = False
        self.done = False

    def compare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare once, on the first pass with gradients.

        Raises:
            ShardingError: The model computes something else when it is split, or cannot compute.
        """
        if self.done or not torch.is_grad_enabled():
            return
        self.running = self.done = True
        try:
            with torch.no_grad(), _repeatable(model):
                self._compare(model, args, kwargs)
        finally:
            self.running = False
            self.choose(True)

    def _compare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        random = torch.get_rng_state()
        self.choose(False)
        full = _activations(model(*args, **kwargs))
        torch.set_rng_state(random)
        self.choose(True)
        try:
            split = _activations(model(*args, **kwargs))
        except LaunchError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            msg = f"{script_line()}: {class_name(model)} cannot compute with {self.what}: {error}"
            raise ShardingError(msg, hint=self._hint_for(error)) from error
        tolerance = _tolerance(model, self.computes_in)
        if len(full) != len(split) or any(map(_differ, full, split, repeat(tolerance))):
            msg = f"{script_line()}: {class_name(model)} computes something else with {self.what}"
            raise ShardingError(msg, hint=self.hint)

    def _hint_for(self, error: Exception) -> str:
        """Return what to do about an error of torch; kernels for experts want parts of whole 16 bytes."""
        if _ALIGNMENT not in str(error):
            return self.hint
        return 'use smaller groups (tp_size), or experts_implementation: "eager" in the model\'s configuration'


@contextmanager
def _repeatable(model: nn.Module) -> Iterator[None]:
    """Let a model compute the same each time, without dropout, and take none of the run's random numbers."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it would not call attention by its name
    try:
        gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(gpus), eagerly():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True


def _tolerance(model: nn.Module, computes_in: torch.dtype | None) -> float:
    """Return how far results may be apart, as a part of their norm, by the dtypes that a model computes in."""
    dtypes = {param.dtype for param in model.parameters()} if computes_in is None else {computes_in}
    device = next((param.device.type for param in model.parameters()), "cpu")
    if torch.is_autocast_enabled(device) or not dtypes <= {torch.float32, torch.float64}:
        return _LOW_PRECISION
    return _TF32 if device == "cuda" and torch.get_float32_matmul_precision() != "highest" else _FP32


def _differ(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return True
    size = distance = 0.0
    for pair in zip(one.flatten().split(_AT_ONCE), other.flatten().split(_AT_ONCE), strict=True):
        expected, found = (part.double().nan_to_num(0, 0, 0) for part in pair)  # -inf is what masks leave
        size += expected.square().sum().item()
        distance += (expected - found).square().sum().item()
    return distance > tolerance**2 * size


def _activations(value: Any) -> list[torch.Tensor]:
    """Return the activations in a model's output."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _activations(item)]
