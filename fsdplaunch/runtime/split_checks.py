"""What ranks must do alike that split layers or sequences: inputs, random numbers, gradients.

Before the first pass with gradients, the model's output is compared with what it computes unsplit.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import optimizer as optimizers

from fsdplaunch.display_text import listed
from fsdplaunch.errors import LaunchError, ShardingError
from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.inspection import named_parameters
from fsdplaunch.runtime.inspection.units import local_tensor
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import before_first_step
from fsdplaunch.runtime.sharding.checks import extremes, unequal
from fsdplaunch.runtime.sharding.mesh import splits_layer
from fsdplaunch.runtime.sharding.wrap import class_name
from fsdplaunch.runtime.torch_internals.modules import eagerly, untraced

_FP32, _TF32, _LOW_PRECISION = 1e-3, 1e-2, 0.2
_ALIGNMENT = "multiple of 16 bytes"
"""What torch's grouped matrix product says of a part whose rows are shorter, or not of that length."""
_AT_ONCE = 2**22
"""How many numbers are compared at once: in double precision all logits of a batch would be gigabytes."""


class FirstPass:
    """The first pass of a model with gradients, before which it is compared; the comparison's own do not count.

    Args:
        what: What is split, with the key that sets it.
        hint: What a model must be like.
        choose: Called with whether the next pass splits.
        computes_in: The dtype that sharding gathers parameters in; None for their own.
    """

    def __init__(
        self, what: str, hint: str, choose: Callable[[bool], None], computes_in: torch.dtype | None
    ) -> None:
        self.what, self.hint, self.choose, self.computes_in = what, hint, choose, computes_in
        self.running = self.done = False

    def compare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Compare once, on the first pass with gradients."""
        if self.done or not torch.is_grad_enabled():
            return
        self.running = self.done = True
        try:
            with torch.no_grad(), _repeatable(model):
                random = torch.get_rng_state()
                self.choose(False)
                full = _activations(model(*args, **kwargs))
                torch.set_rng_state(random)
                self.choose(True)
                split = self._split_pass(model, args, kwargs)
        finally:
            self.running = False
            self.choose(True)
        tolerance = _tolerance(model, self.computes_in)
        if len(full) != len(split) or any(map(_differ, full, split, repeat(tolerance))):
            msg = f"{script_line()}: {class_name(model)} computes different values with {self.what}"
            raise ShardingError(msg, hint=self.hint)

    def _split_pass(self, model: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor]:
        try:
            return _activations(model(*args, **kwargs))
        except LaunchError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            msg = f"{script_line()}: {class_name(model)} cannot compute with {self.what}: {error}"
            aligned = (
                'use smaller groups (tp_size), or experts_implementation: "eager" in the model\'s configuration'
            )
            raise ShardingError(msg, hint=aligned if _ALIGNMENT in str(error) else self.hint) from error


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


def _activations(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(output) if tensor.is_floating_point()]


def draw_alike(axis: DeviceMesh) -> None:
    """Give the ranks of an axis the first one's random states, torch's: they drop out what all of them have."""
    states = [torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None]
    on_cpu, on_gpu = RankGroup([axis.get_group()]).from_first(states)
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)


def check_first_inputs(
    model: nn.Module,
    axis: DeviceMesh,
    device: torch.device,
    together: str,
    *,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Compare the inputs of the model's first forward over the ranks of an axis; later ones cost nothing.

    The error says what they do `together`. `unless` says whether a forward is given other inputs on purpose.
    """
    compared = False

    def compare(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal compared  # the hook stays: another one may run the model, in whose pass this one could not go
        if compared or unless():
            return
        compared = True
        facts = {"inputs": _fingerprint(_tensors((args, kwargs)))}
        if module.training and any(isinstance(each, nn.Dropout) and each.p > 0 for each in module.modules()):
            facts["random numbers"] = torch.get_rng_state()
        different = unequal(facts, [axis.get_group()], device)
        if different:
            ranks, number = ", ".join(map(str, axis.mesh.tolist())), "RANK // (tp_size * cp_size)"
            msg = f"ranks {ranks} {together}, and would drop out different activations"
            hint = f"seed torch by {number}, not by RANK"
            if different[0] == "inputs":
                msg = f"ranks {ranks} {together}, and their inputs differ: they need the same batch"
                hint = f"divide data by fsdplaunch.prepare(loader), or by {number}"
            raise ShardingError(msg, hint=hint)

    model.register_forward_pre_hook(untraced(compare), prepend=True, with_kwargs=True)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _fingerprint(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return two numbers that differ where shapes or values do: the elements, and their sum weighted by place."""
    elements, total = 0, 0.0
    for tensor in tensors:
        flat = tensor.detach().double().flatten()
        elements += flat.numel()
        total += float((flat * torch.arange(1, flat.numel() + 1, device=flat.device)).sum())
    return torch.tensor([float(elements), total], dtype=torch.float64)


_TOLERANCE = 1e-2


def check_first_gradients(model: nn.Module, axis: DeviceMesh, device: torch.device) -> None:
    """Compare, before the first optimizer step, the gradients of what the ranks of an axis do not split.

    By the sum and the norm of each rank's shards.
    """
    held = weakref.ref(model)

    def facts(param: nn.Parameter) -> tuple[float, float]:
        if param.grad is None:
            return 0.0, 0.0
        gradient = local_tensor(param.grad).double()
        return float(gradient.sum()), float(gradient.norm())

    def compare() -> None:
        sharded = held()
        named = named_parameters(sharded) if sharded is not None else ()
        alike = {name: param for name, param in named if not splits_layer(param) and param.requires_grad}
        if not alike:
            return
        mine = torch.tensor([facts(param) for param in alike.values()], dtype=torch.float64, device=device)
        low, high = extremes(mine, [axis.get_group()])
        size = high[:, 1:].clamp(min=torch.finfo(torch.float32).tiny)
        apart = ((high - low) > _TOLERANCE * size).any(dim=1).tolist()
        different = [name for name, differs in zip(alike, apart, strict=True) if differs]
        if different:
            msg = f"ranks that split layers (tp_size) have different gradients of {listed(different, 3)}"
            style = "give its module the style replicated_with_grad_allreduce in the plan"
            raise ShardingError(msg, hint=f"it is computed with in parts: {style}, sharding.tensor_parallel_plan")

    before_first_step(optimizers, compare)
