"""Normalise by the statistics of the global batch where it is kept: BatchNorm as one process has it.

Needed because BatchNorm is the one layer whose rows know of each other, and each rank has only its share of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import nn

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import BatchNorm


@contextmanager
def normalising_global_batch(hook_context: HookContext) -> Iterator[None]:
    """Let batch norm in training use all ranks' rows, where the configuration keeps the global batch.

    SyncBatchNorm uses them in any case, on the CPU as well, where torch refuses it over several ranks.
    """
    norm = _BatchNorm(hook_context)
    with (
        replaced(F, "batch_norm", norm.function),
        replaced(nn.SyncBatchNorm, "forward", norm.synchronised),
    ):
        yield


class _BatchNorm:
    """What stands in the place of torch's on one worker."""

    def __init__(self, hook_context: HookContext) -> None:
        self.hook_context = hook_context
        self.synchronises = False
        """Whether a SyncBatchNorm computes on the CPU."""

    def function(self, original: Any) -> Any:
        """Make the function that all kinds of BatchNorm call."""

        @wraps(original)
        def batch_norm(
            input: torch.Tensor,  # noqa: A002  (torch's name for it)
            running_mean: torch.Tensor | None,
            running_var: torch.Tensor | None,
            weight: torch.Tensor | None = None,
            bias: torch.Tensor | None = None,
            training: bool = False,
            momentum: float = 0.1,
            eps: float = 1e-5,
        ) -> torch.Tensor:
            weight, bias = _in_dtype_of(running_mean, weight), _in_dtype_of(running_mean, bias)
            counts = training and not torch.compiler.is_compiling()
            sums = self._sums_over_ranks(input) if counts else None
            if sums is None:
                return original(  # type: ignore[no-any-return]
                    input, running_mean, running_var, weight, bias, training, momentum, eps
                )
            mean, variance, count = _statistics(input, *sums)
            if running_mean is not None and running_var is not None:
                _follow(running_mean, mean, momentum)
                _follow(running_var, variance * (count / max(count - 1, 1)), momentum)
            return _normalised(input, mean, variance, weight, bias, eps)

        return batch_norm

    def _sums_over_ranks(self, given: torch.Tensor) -> tuple[torch.Tensor, float] | None:
        """Return the sums over all ranks' rows; None where this rank normalises by those that it is given."""
        context = self.hook_context
        if self.synchronises:
            return _sums(given, known=True)
        if context.keeps_batch and context.size > 1 and _may_be_share(context):
            return _sums(given, known=bool(context.batches.current))
        return None

    def synchronised(self, original: Any) -> Any:
        """Make SyncBatchNorm's forward, which goes the way of BatchNorm where the tensors are on the CPU."""

        @wraps(original)
        def forward(module: Any, given: torch.Tensor) -> torch.Tensor:
            context = self.hook_context
            if given.device.type != "cpu" or not context.ownership.ours:
                return original(module, given)  # type: ignore[no-any-return]
            self.synchronises = module.training and bool(context.models) and not context.keeps_batch
            try:
                return BatchNorm.forward(module, given)
            finally:
                self.synchronises = False

        return forward


def _in_dtype_of(running: torch.Tensor | None, param: torch.Tensor | None) -> Any:
    """Return a parameter in the dtype of the statistics: CPUs have no function for bf16 ones beside fp32."""
    mixed = param is not None and running is not None and param.device.type == "cpu"
    return param.to(running.dtype) if mixed and param is not None and running is not None else param


def _may_be_share(hook_context: HookContext) -> bool:
    """Return whether the pass that runs may have this rank's share of a batch, as it may on every rank."""
    context, batches = hook_context, hook_context.batches
    evaluates = batches.complete and not torch.is_grad_enabled()  # as update_bn does, in training mode
    return bool(context.ownership.ours and context.models and batches.divided and not evaluates)


def _sums(given: torch.Tensor, *, known: bool) -> tuple[torch.Tensor, float] | None:
    """Return each channel's sum over all ranks' rows, and the number of its values. Collective.

    Args:
        given: What is normalised here.
        known: Whether the pass was given as many rows as this rank's share has. Nodes of graphs, points and what
            else a row has several of are as many as it happens: what ranks have tells then whether it is a share.

    Returns:
        None where all ranks have the same rows.
    """
    values = _exact(given)
    own = given.numel() // max(given.size(1), 1)
    total = _added_up(torch.cat([values.sum(_others(given)), values.new_tensor([own, float(known)])]))
    if int(total[-1].item()) < dist.get_world_size() and _are_alike(values):
        return None
    return total[:-2], float(total[-2].item())


@torch.no_grad()
def _are_alike(values: torch.Tensor) -> bool:
    """Return whether all ranks have the same numbers. Collective."""
    own = values.double().sum()
    extremes = torch.stack([own, -own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    return bool(extremes[0] == -extremes[1])


def _statistics(given: torch.Tensor, sums: torch.Tensor, count: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean and variance of each channel over all ranks' rows, and the number of its values. Collective.

    In two steps, for a variance as exact as torch's. Shapes `[channels]`, in fp32 at the least.
    """
    mean = sums / count
    deviations = _exact(given) - _per_channel(mean, given)
    return mean, _added_up(deviations.square().sum(_others(given))) / count, count


def _exact(given: torch.Tensor) -> torch.Tensor:
    return given if given.dtype in (torch.float32, torch.float64) else given.float()


def _others(given: torch.Tensor) -> list[int]:
    """Return the dimensions but that of the channels."""
    return [dim for dim in range(given.dim()) if dim != 1]


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of theirs, for each rank's loss depends on it."""

    @staticmethod
    def forward(_ctx: Any, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _added_up(own: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor = _SumOverRanks.apply(own)  # type: ignore[no-untyped-call]
    return total


def _per_channel(value: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return value.view(1, -1, *[1] * (given.dim() - 2))


@torch.no_grad()
def _follow(running: torch.Tensor, value: torch.Tensor, momentum: float) -> None:
    running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _normalised(
    given: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    scale = torch.rsqrt(variance + eps)
    result = (given - _per_channel(mean, given)) * _per_channel(scale, given)
    if weight is not None:
        result = result * _per_channel(weight, given)
    if bias is not None:
        result = result + _per_channel(bias, given)
    return result.to(given.dtype)


def tell_compiled(model: nn.Module, hook_context: HookContext) -> None:
    """Print where a model is compiled whose BatchNorm should use all ranks' rows: compiled, it uses its own."""
    norms = any(isinstance(module, BatchNorm) for module in model.modules())
    if norms and hook_context.keeps_batch and hook_context.size > 1:
        messages.say_unequal(
            f"{script_line()}: compiled, BatchNorm normalises by each rank's own rows, which is not what one"
            " process computes"
        )
