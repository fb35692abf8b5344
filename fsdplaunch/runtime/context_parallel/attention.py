"""Attention over sequences that are split: each rank computes some of the heads over all positions (Ulysses)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.script_line import script_line
from fsdplaunch.runtime.context_parallel.exchanges import exchanged

_HEADS, _POSITIONS, _DIMENSIONS = 1, 2, 4


class SplitAttention(TorchFunctionMode):
    """While this is active, scaled_dot_product_attention is over the positions of all ranks."""

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._check(query)
        groups = query.size(_HEADS) // key.size(_HEADS)
        if key.size(_HEADS) % self.axis.size():  # too few heads of keys and values to divide: one for each query's
            key, value = (each.repeat_interleave(groups, _HEADS) for each in (key, value))
            kwargs.pop("enable_gqa", None)
        query, key, value = (
            exchanged(each, self.axis, split=_HEADS, join=_POSITIONS) for each in (query, key, value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
        return exchanged(mixed, self.axis, split=_POSITIONS, join=_HEADS)

    def _check(self, query: torch.Tensor) -> None:
        ranks = self.axis.size()
        if query.dim() != _DIMENSIONS:
            msg = f"{script_line()}: attention over {query.dim()} dimensions cannot be split (cp_size)"
            raise ShardingError(msg, hint="let it be batch x heads x positions x width, or leave cp_size out")
        if query.size(_HEADS) % ranks:
            heads = query.size(_HEADS)
            msg = f"{script_line()}: {heads} attention heads cannot be divided by {ranks} ranks (cp_size)"
            raise ShardingError(msg, hint=f"use a cp_size that divides {heads}")
