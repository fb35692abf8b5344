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
from fsdplaunch.runtime.auto.patch import replaced
from fsdplaunch.runtime.auto.script_line import script_line
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
            if torch.compiler.is_compiling() or not training or not self._is_over_ranks():
                return original(  # type: ignore[no-any-return]
                    input, running_mean, running_var, weight, bias, training, momentum, eps
                )
            mean, variance, count = _statistics(input)
            if running_mean is not None and running_var is not None:
                _follow(running_mean, mean, momentum)
                _follow(running_var, variance * (count / max(count - 1, 1)), momentum)
            return _normalised(input, mean, variance, weight, bias, eps)

        return batch_norm

    def _is_over_ranks(self) -> bool:
        context = self.hook_context
        keeps = context.keeps_batch and context.size > 1
        return self.synchronises or (keeps and _is_share(context))

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


def _is_share(hook_context: HookContext) -> bool:
    """Return whether the pass that runs was given this rank's share of a batch, not rows that all ranks have."""
    context, batches = hook_context, hook_context.batches
    evaluates = batches.complete and not torch.is_grad_enabled()  # as update_bn does, in training mode
    return bool(context.ownership.ours and context.models and batches.current and not evaluates)


def _statistics(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return mean and variance of each channel over all ranks' rows, and the number of its values. Collective.

    In two steps, for a variance as exact as torch's. Shapes `[channels]`, in fp32 at the least.
    """
    values = given if given.dtype in (torch.float32, torch.float64) else given.float()
    dims = [dim for dim in range(given.dim()) if dim != 1]
    own = given.numel() // max(given.size(1), 1)
    total = _added_up(torch.cat([values.sum(dims), values.new_full((1,), float(own))]))
    count = float(total[-1].item())
    mean = total[:-1] / count
    variance = _added_up((values - _per_channel(mean, given)).square().sum(dims)) / count
    return mean, variance, count


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
