"""Let rank 0 save alone what a library or the script has sharded, as what this package has sharded for it."""

import zlib
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.pulling import open_once
from fsdplaunch.runtime.first_step import sharded_models
from fsdplaunch.runtime.inspection.parameter_names import named_parameters

_FIRST = 1 << 32
"""More than the numbers of models that this package has sharded for the script."""


def serve_models_of_others(hook_context: HookContext) -> None:
    """Connect the ranks before shards are first trained, where this package does not shard for the script.

    All ranks make that step: its gradients were reduced over them. The hook stays afterwards and does nothing.

    Args:
        hook_context: This worker's.
    """
    waiting = [hook_context.size > 1]

    def serve(optimizer: Optimizer, *_: Any) -> None:
        if waiting[0] and _trains_shards(optimizer):
            waiting[0] = False
            if not hook_context.ownership.ours:
                _serve(hook_context)

    register_optimizer_step_pre_hook(serve)


def _trains_shards(optimizer: Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _serve(hook_context: HookContext) -> None:
    models = [model for model in sharded_models() if _has_own_shards(model)]
    looks = [_look(model) for model in models]
    for model, look in zip(models, looks, strict=True):
        if looks.count(look) == 1:  # nothing else tells which one of two is meant
            hook_context.numbers[model] = look
    open_once(hook_context)


def _has_own_shards(model: nn.Module) -> bool:
    """Return whether each rank has shards that it can hand over by itself: under FSDP2, not FSDP1."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return False
    return any(isinstance(param, DTensor) for param in model.parameters())


def _look(model: nn.Module) -> int:
    """Return a number that models have in common if they look alike, on whatever rank."""
    shapes = [(name, tuple(param.shape)) for name, param in named_parameters(model)]
    return zlib.crc32(f"{type(model).__name__} {shapes}".encode()) + _FIRST
