"""Keep identical on all ranks what each of them trains its shards by, where ranks have losses of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.batch.in_pass import batch_norm_over
from fsdplaunch.runtime.auto.batch.rank_rows import RankRows
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.calls import original_name
from fsdplaunch.runtime.auto.rank0.position import trains_shards
from fsdplaunch.runtime.auto.rank0.service import check_all_ranks
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import BatchNorm, is_persistent, own_buffers


@contextmanager
def identical_across_ranks(hook_context: HookContext) -> Iterator[None]:
    """Rule 2, the default mode: align buffers at `model.eval()`, and what `ReduceLROnPlateau` decides by.

    Running statistics are those of each worker's own batches: validation losses, and what is decided by them,
    would differ. A SyncBatchNorm uses the rows of all workers, on the CPU as well, where torch refuses it.
    """
    with (
        replaced(nn.Module, "train", lambda train: _turning(train, hook_context)),
        replaced(ReduceLROnPlateau, "step", lambda step: _averaging_metrics(step, hook_context)),
        replaced(nn.SyncBatchNorm, "forward", lambda forward: _synchronising(forward, hook_context)),
    ):
        yield


def _turning(train: Any, hook_context: HookContext) -> Any:
    """Make `Module.train`: what ranks have of their own is aligned where a model turns to evaluation."""
    inside = False

    @wraps(train)
    def turn(self: nn.Module, mode: bool = True) -> Any:
        nonlocal inside
        if inside:  # it calls itself for every module below
            return train(self, mode)
        turns = not mode and self.training and self in hook_context.models
        if turns and not hook_context.ownership.ranked and not hook_context.keeps_batch:
            check_all_ranks(f"{original_name(self)}.eval()")
            _align(self)
        inside = True
        try:
            return train(self, mode)
        finally:
            inside = False
            if hook_context.streams.diverged:
                hook_context.streams.evaluate(now=not any(model.training for model in list(hook_context.models)))

    return turn


def _averaging_metrics(step: Any, hook_context: HookContext) -> Any:
    @wraps(step)
    def step_alike(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        apart = hook_context.size > 1 and hook_context.ownership.ours and not hook_context.keeps_batch
        if apart and trains_shards(self.optimizer):
            metrics = _mean_metric(float(metrics), hook_context)
        return step(self, metrics, *args, **kwargs)

    return step_alike


def _synchronising(forward: Any, hook_context: HookContext) -> Any:
    @wraps(forward)
    def normalise(module: Any, given: torch.Tensor) -> torch.Tensor:
        if given.device.type != "cpu" or not hook_context.ownership.ours:
            return forward(module, given)  # type: ignore[no-any-return]
        if not module.training or hook_context.keeps_batch or not hook_context.models:
            return BatchNorm.forward(module, given)
        return _over_all_ranks(module, given)

    return normalise


def _over_all_ranks(norm: Any, given: torch.Tensor) -> torch.Tensor:
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        momentum = 1 / float(norm.num_batches_tracked) if momentum is None else momentum
    everyone = RankRows(dist.get_world_size(), dist.get_rank(), dist.get_world_size())
    return batch_norm_over(
        everyone.sum,
        given,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        momentum=momentum or 0.0,
        eps=norm.eps,
    )


@torch.no_grad()
def _align(model: nn.Module) -> None:
    """Average BatchNorm's statistics over all workers, and give all of them rank 0's other buffers. Collective.

    Buffers that are not saved with the model are derived from its configuration, and left alone.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return
    for module in model.modules():
        for name, buffer in own_buffers(module):
            if not is_persistent(module, name):
                continue
            if isinstance(module, BatchNorm) and buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(ranks)
            else:
                dist.broadcast(buffer, src=0)


def _mean_metric(metric: float, hook_context: HookContext) -> float:
    """Return a metric, or its mean where ranks have different ones, which is printed. Collective."""
    check_all_ranks("ReduceLROnPlateau.step", "call scheduler.step(metric) on all ranks")
    ranks: list[float] = from_all(metric)
    if len(set(map(str, ranks))) == 1:
        return metric
    if "plateau" not in hook_context.printed:
        hook_context.printed.add("plateau")
        other = next(each for each in ranks if str(each) != str(ranks[0]))
        messages.say(
            f"{script_line()}: ReduceLROnPlateau is given {ranks[0]:.6g} on rank 0 and {other:.6g} on another,"
            " each of its own rows: the mean of all ranks decides"
        )
    return float(torch.tensor(ranks, dtype=torch.float64).mean())
