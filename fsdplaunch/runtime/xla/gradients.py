"""Gradients of models that `XlaFullyShardedDataParallel` shards; under SPMD torch sees full ones."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.torch_internals.xla import is_xla_shard
from fsdplaunch.runtime.xla.watch import wrapper_classes


def clip_norm(parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor | None:
    """Clip by the norm over all processes; None for what this class does not shard.

    Raises:
        ShardingError: Parameters are given in place of the model.
    """
    per_device = wrapper_classes()[0]
    model: Any = parameters
    if isinstance(parameters, per_device):
        norm: torch.Tensor = model.clip_grad_norm_(max_norm, norm_type)
        return norm
    if isinstance(parameters, nn.Module):
        return None
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(map(is_xla_shard, given)):
        msg = "the norm of shards of PyTorch/XLA is not that of their model"
        raise ShardingError(msg, hint="give clip_grad_norm_ the model that prepare returned")
    return None


def unsynchronized(model: nn.Module) -> AbstractContextManager[Any] | None:
    """Return what keeps a model's gradients from being exchanged; None for what this class does not shard."""
    wrapper: Any = model
    return wrapper.no_sync() if isinstance(model, wrapper_classes()[0]) else None
