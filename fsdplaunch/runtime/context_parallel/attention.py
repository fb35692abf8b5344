"""Attention over sequences that are split.

Each rank computes some of the heads over all positions (Ulysses). Where the ranks do not divide the heads, each
computes all heads for its own positions, with the keys and values of all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.script_line import script_line
from fsdplaunch.runtime.context_parallel.exchanges import exchanged, gathered, own_piece

_HEADS, _POSITIONS, _DIMENSIONS = 1, 2, 4
_ATTENTION = nn.functional.scaled_dot_product_attention


class SplitAttention(TorchFunctionMode):
    """While this is active, scaled_dot_product_attention is over the positions of all ranks."""

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__()
        self.axis = axis

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _ATTENTION:
            return func(*args, **(kwargs or {}))
        return attend(self.axis, *args, **(kwargs or {}))


def attend(
    axis: DeviceMesh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return scaled_dot_product_attention of this rank's positions with all.

    Args:
        axis: The ranks that split sequences.
        query: Batch x heads x this rank's positions x width, as are key and value.
        key: With as many heads or fewer (enable_gqa).
        value: As key.
        args: Further ones, as the function has them; a mask is that of all positions.
        kwargs: The same.

    Raises:
        ShardingError: The tensors have other dimensions.
    """
    if query.dim() != _DIMENSIONS:
        msg = f"{script_line()}: attention over {query.dim()} dimensions cannot be split (cp_size)"
        raise ShardingError(msg, hint="let it be batch x heads x positions x width, or leave cp_size out")
    if query.size(_HEADS) % axis.size():
        return _own_positions(axis, query, key, value, *args, **kwargs)
    return _own_heads(axis, query, key, value, *args, **kwargs)


def _own_heads(
    axis: DeviceMesh, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    groups = query.size(_HEADS) // key.size(_HEADS)
    if key.size(_HEADS) % axis.size():  # too few heads of keys and values to divide: one for each query's
        key, value = (each.repeat_interleave(groups, _HEADS) for each in (key, value))
        kwargs.pop("enable_gqa", None)
    query, key, value = (exchanged(each, axis, split=_HEADS, join=_POSITIONS) for each in (query, key, value))
    mixed = _ATTENTION(query, key, value, *args, **kwargs)
    return exchanged(mixed, axis, split=_POSITIONS, join=_HEADS)


def _own_positions(
    axis: DeviceMesh,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Attend from this rank's positions to those of all; where it is causal, to those before."""
    key, value = (gathered(each, axis, _POSITIONS) for each in (key, value))
    length = query.size(_POSITIONS)
    if is_causal:
        seen = length * (axis.get_local_rank() + 1)
        key, value = (each.narrow(_POSITIONS, 0, seen) for each in (key, value))
        attn_mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril(seen - length)
    elif attn_mask is not None and attn_mask.size(-2) != 1:
        attn_mask = own_piece(attn_mask, axis, -2)
    return _ATTENTION(query, key, value, attn_mask, dropout_p, **kwargs)
