"""Attention over sequences that are split.

Each rank computes some of the heads over all positions (Ulysses). Where the ranks do not divide the heads, keys
and values go around in a ring.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from fsdplaunch.config.schema.kinds import SequenceAttentionName
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.context_parallel.exchanges import exchanged, own_piece
from fsdplaunch.runtime.context_parallel.part_attention import Scoring
from fsdplaunch.runtime.context_parallel.ring import ring_attention
from fsdplaunch.runtime.script_line import script_line

_HEADS, _POSITIONS, _DIMENSIONS = 1, 2, 4
_ATTENTION = nn.functional.scaled_dot_product_attention
_MODULES = nn.functional.multi_head_attention_forward
"""What nn.MultiheadAttention calls, and by it nn.TransformerEncoderLayer."""


class SplitAttention(TorchFunctionMode):
    """While this is active, scaled_dot_product_attention is over the positions of all ranks."""

    def __init__(self, axis: DeviceMesh, way: SequenceAttentionName) -> None:
        super().__init__()
        self.axis = axis
        self.way = way

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            return attend(self.axis, self.way, *args, **(kwargs or {}))
        with _called_instead(partial(attend, self.axis, self.way)) if func is _MODULES else nullcontext():
            return func(*args, **(kwargs or {}))


@contextmanager
def _called_instead(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let nn.MultiheadAttention call this for scaled_dot_product_attention: no mode is active inside of it."""
    nn.functional.scaled_dot_product_attention = function
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = _ATTENTION


def attend(
    axis: DeviceMesh,
    way: SequenceAttentionName,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Return scaled_dot_product_attention of this rank's positions with all.

    Args:
        axis: The ranks that split sequences.
        way: `heads`, `ring`, or `auto`: heads where the ranks divide them.
        query: Batch x heads x this rank's positions x width, as are key and value.
        key: With as many heads or fewer (enable_gqa).
        value: As key.
        attn_mask: That of all positions.
        dropout_p: As the function has it.
        is_causal: The same.
        kwargs: The same.

    Raises:
        ShardingError: The tensors have other dimensions, the mask is not that of all positions, or the heads
            cannot be divided as configured.
    """
    if query.dim() != _DIMENSIONS:
        msg = f"{script_line()}: attention over {query.dim()} dimensions cannot be split (cp_size)"
        raise ShardingError(msg, hint="let it be batch x heads x positions x width, or leave cp_size out")
    if attn_mask is not None:
        _check_mask(attn_mask, axis.size() * query.size(_POSITIONS), axis.size() * key.size(_POSITIONS))
    heads, divides = query.size(_HEADS), query.size(_HEADS) % axis.size() == 0
    if way == "ring" or (way == "auto" and not divides):
        scale = kwargs.get("scale")
        scale = query.size(-1) ** -0.5 if scale is None else scale
        scoring = Scoring(scale=scale, is_causal=is_causal, dropout=dropout_p)
        return ring_attention(axis, query, key, value, attn_mask, scoring)
    if not divides:
        msg = f"{script_line()}: {heads} attention heads cannot be divided by {axis.size()} ranks (cp_size)"
        raise ShardingError(msg, hint="set sharding.context_parallel_attention: auto, or another cp_size")
    if attn_mask is not None and attn_mask.dim() == _DIMENSIONS and attn_mask.size(_HEADS) != 1:
        attn_mask = own_piece(attn_mask, axis, _HEADS)
    return _own_heads(axis, query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


def _check_mask(mask: torch.Tensor, rows: int, keys: int) -> None:
    if mask.dim() < _POSITIONS or mask.size(-2) not in (1, rows) or mask.size(-1) not in (1, keys):
        wanted = f"that of all {rows} x {keys} positions (cp_size)"
        msg = f"{script_line()}: a mask of {tuple(mask.shape)} is not {wanted}"
        raise ShardingError(msg, hint="give attention a mask of full sequences, or is_causal")


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
