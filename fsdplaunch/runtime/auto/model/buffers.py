"""Align buffers over all workers when a model turns to evaluation.

Needed because each worker's running statistics are those of its own batches: validation losses, and what is
decided by them, would differ between workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.forward_hooks import original_name
from fsdplaunch.runtime.auto.state.rank0.passes import check_all_ranks
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.modules import BatchNorm, is_persistent, own_buffers


@contextmanager
def aligning_buffers(hook_context: HookContext) -> Iterator[None]:
    """Align the buffers of a sharded model at `model.eval()`."""

    def turn(original: Any) -> Any:
        def train(self: nn.Module, mode: bool = True) -> Any:
            if not mode and self.training and self in hook_context.models and not hook_context.ownership.ranked:
                check_all_ranks(f"{original_name(self)}.eval()")
                align(self)
            return original(self, mode)

        return train

    with replaced(nn.Module, "train", turn):
        yield


@torch.no_grad()
def align(model: nn.Module) -> None:
    """Average BatchNorm's statistics over all workers, and give all of them rank 0's other buffers. Collective.

    Args:
        model: Whose buffers. Those that are not saved with it are derived from its configuration, and left alone.
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
