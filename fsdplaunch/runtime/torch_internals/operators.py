"""torch's operators themselves: attention kernels with the logsumexp of each row, and what draws random numbers.

By the logsumexps, results of attention to parts of the keys add up to that to all.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

_ATEN: Any = torch.ops.aten
FUNCTIONAL_COLLECTIVES: Any = torch.ops._c10d_functional
"""The operators that exchange tensors of ranks and return the result; all versions."""
_ON_CPU = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ALIGNED = 8
"""What the width of a head must be a multiple of: torch pads others before it calls the kernels of GPUs."""
_ROWS = 32
"""What the efficient kernel rounds the number of logsumexps up to; those beyond the last row are infinite."""

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def exchanges(function: Any) -> bool:
    """Return whether a function is one of these, by itself or by one of its overloads; all versions."""
    return str(getattr(function, "__module__", "")).endswith(f".{FUNCTIONAL_COLLECTIVES.name}")


def operator_name(operator: Any) -> str:
    """Return an operator's name without its library if that is torch's own, as in `add_`; all versions."""
    return str(operator._schema.name).removeprefix("aten::")


def argument_names(operator: Any) -> list[str]:
    """Return the names of what an operator is given, in order; all versions."""
    return [each.name for each in operator._schema.arguments]


def written_places(operator: Any) -> list[bool]:
    """Return for each argument of an operator, in order, whether it is written into; all versions."""
    return [each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments]


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One of torch's kernels, both ways.

    Attributes:
        forward: (query, key, value, is_causal, scale) -> the result, the logsumexp of each row (batch x heads x
            rows, fp32 or fp64), and what else backward is given. Tensors are batch x heads x positions x width,
            with as many heads of keys as of queries.
        backward: (gradient, query, key, value, result, logsumexp, what else, is_causal, scale) -> gradients of
            query, key and value. Result and logsumexp may be those over more keys than these: the gradients are
            then what comes of these keys.
    """

    forward: Forward
    backward: Backward


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionKernel | None:
    """Return the kernel that torch would choose without mask and dropout; None where it has none that does this.

    All versions. The switches of torch.nn.attention.sdpa_kernel hold.

    Args:
        query: Batch x heads x positions x width.
        key: The same, with as many heads or fewer: the kernel is given as many.
        value: As key.
    """
    widths = {each.size(-1) for each in (query, key, value)}
    if query.device.type == "cpu":
        fits = len(widths) == 1 and query.dtype in _ON_CPU and torch.backends.cuda.flash_sdp_enabled()
        return CPU if fits else None
    if query.device.type != "cuda" or any(width % _ALIGNED for width in widths):
        return None
    key, value = (each[:, :1].expand(-1, query.size(1), -1, -1) for each in (key, value))
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    if torch.backends.cuda.can_use_flash_attention(asked):
        return FLASH
    return EFFICIENT if torch.backends.cuda.can_use_efficient_attention(asked) else None


def _cpu(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    attention = _ATEN._scaled_dot_product_flash_attention_for_cpu
    return *attention(query, key, value, 0.0, is_causal, scale=scale), ()


def _cpu_backward(
    gradient: Any, query: Any, key: Any, value: Any, result: Any, sums: Any, _: Any, is_causal: bool, scale: float
) -> Any:
    backward = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(gradient, query, key, value, result, sums, 0.0, is_causal, scale=scale)


def _flash(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    attention = _ATEN._scaled_dot_product_flash_attention
    result, sums, *more = attention(query, key, value, 0.0, is_causal, scale=scale)
    return result, sums, tuple(more[:6])  # where sequences begin and end, the longest, the random state


def _flash_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    sums: Any,
    more: Any,
    is_causal: bool,
    scale: float,
) -> Any:
    backward = _ATEN._scaled_dot_product_flash_attention_backward
    *limits, seed, offset = more
    return backward(gradient, query, key, value, result, sums, *limits, 0.0, is_causal, seed, offset, scale=scale)


def _efficient(query: Any, key: Any, value: Any, is_causal: bool, scale: float) -> Any:
    attention = _ATEN._scaled_dot_product_efficient_attention
    result, sums, *more = attention(query, key, value, None, True, 0.0, is_causal, scale=scale)
    return result, sums[..., : query.size(-2)], tuple(more)


def _efficient_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    result: Any,
    sums: Any,
    more: Any,
    is_causal: bool,
    scale: float,
) -> Any:
    backward = _ATEN._scaled_dot_product_efficient_attention_backward
    sums = pad(sums, (0, -sums.size(-1) % _ROWS), value=float("inf"))
    wanted = [True, True, True, False]
    found = backward(gradient, query, key, value, None, result, sums, *more, 0.0, wanted, is_causal, scale=scale)
    return found[:3]


CPU = AttentionKernel(_cpu, _cpu_backward)
FLASH = AttentionKernel(_flash, _flash_backward)
EFFICIENT = AttentionKernel(_efficient, _efficient_backward)
"""All versions have the three, with these arguments in this order."""


def below() -> AbstractContextManager[Any]:
    """Return a context in which operators are torch's own again, without gradients; all versions."""
    guard: AbstractContextManager[Any] = torch._C._AutoDispatchBelowAutograd()
    return guard
