"""Compute with full tensors what the script computes of shards and of plain tensors that its rows decide.

A loss, an output or a batch is this rank's own. So the gradient that a full tensor gets is another one on each
rank, and is averaged over the ranks as those of a pass are; each then keeps the part of its shard.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.mixtures import is_plain
from fsdplaunch.runtime.auto.dtensor.own_numbers import note_numbers
from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler
from fsdplaunch.runtime.torch_internals.graphs.node_kinds import mark_rows

_ELEMENTWISE = ("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract")
_OF_FULL = ("where", "maximum", "minimum", "dot", "inner", "outer", "matmul", "mm", "mv")
"""With a plain tensor of any shape: cut as the shard is, it would be a part of another result or gradient."""
_ELEMENTWISE_METHODS = (
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__add__", "__radd__", "__sub__", "__rsub__"),
    *_ELEMENTWISE,
)
METHODS = (*_ELEMENTWISE_METHODS, *_OF_FULL, "__matmul__", "__rmatmul__")
"""What a shard is computed with plain tensors by, operators above all: Python asks the shard first."""
FUNCTIONS = (*_ELEMENTWISE, *_OF_FULL, "bmm", "addmm", "baddbmm", "einsum")
"""The same as functions, of which the plain tensor may be the first argument."""


def compute_full(
    names: Iterable[str],
    read: Handler,
    otherwise: dict[str, Handler],
    is_rows: Callable[[torch.Tensor], bool],
) -> dict[str, Handler]:
    """Return a handler for each name, which gathers shards where what they are computed with is no part of them.

    Args:
        names: Of the methods or functions.
        read: Computes with full tensors.
        otherwise: By name, what else computes it with plain tensors; torch, where there is none.
        is_rows: Returns whether a plain tensor may be of this rank's rows: what is made of it is no penalty then.
    """

    def handler(name: str) -> Handler:
        torchs = otherwise.get(name, _by_torch)
        needs_full = _needs_full if name in _ELEMENTWISE_METHODS else _is_mixed

        def compute(func: Any, args: Any, kwargs: Any) -> Any:
            given = (*args, *kwargs.values())
            if torch.compiler.is_compiling() or not needs_full(given):
                note_numbers(given)
                return torchs(func, args, kwargs)
            result = read(func, args, kwargs)
            if any(is_rows(value) for value in given if is_plain(value)):
                mark_rows(result)
            return result

        return compute

    return {name: handler(name) for name in names}


def with_plain(func: Any, handler: Handler, ownership: Ownership) -> Any:
    """Return a method that a handler computes where it is given plain tensors; optimizers call it with numbers.

    Args:
        func: Torch's.
        handler: Of a call with plain tensors.
        ownership: Who shards.
    """

    @wraps(func)
    def compute(*args: Any, **kwargs: Any) -> Any:
        for value in args:  # by no call of a function, since optimizers come here often
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and ownership.ours:
                return handler(func, args, kwargs)
        return func(*args, **kwargs)

    return compute


def with_shards(func: Any, handler: Handler, ownership: Ownership) -> Any:
    """Return a function that a handler computes where it is given shards.

    Args:
        func: Torch's.
        handler: Of a call with shards.
        ownership: Who shards.
    """

    @wraps(func)
    def compute(*args: Any, **kwargs: Any) -> Any:
        for value in args:  # by no call of a function, since models' passes come here
            if isinstance(value, DTensor) and ownership.ours:
                return handler(func, args, kwargs)
        return func(*args, **kwargs)

    return compute


def _by_torch(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _is_mixed(values: Iterable[Any]) -> bool:
    """Return whether some are shards and others plain tensors."""
    kinds = {is_plain(value) for value in values if isinstance(value, torch.Tensor) and value.dim()}
    return len(kinds) > 1


def _needs_full(values: Iterable[Any]) -> bool:
    """Return whether some are plain tensors that have gradients, or other shapes than the shards have."""
    given = [value for value in values if isinstance(value, torch.Tensor)]
    plain = [value for value in given if is_plain(value)]
    if not plain or len(plain) == len(given):
        return False
    shapes = {value.shape for value in given if isinstance(value, DTensor)}
    return any(
        (value.requires_grad and torch.is_grad_enabled()) or (value.numel() > 1 and value.shape not in shapes)
        for value in plain
    )
