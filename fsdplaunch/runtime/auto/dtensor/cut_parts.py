"""Cut a parameter into parts that have gradients: `first, second = weight.chunk(2)`, `for row in weight.unbind()`.

Needed because torch does not cut a shard into the rows that it is split by, and makes plain zeros of the gradients
of parts that a loss leaves out, which it then cannot put together with the shards of the others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdplaunch.runtime.auto.dtensor.shard_handlers import replicated
from fsdplaunch.runtime.auto.dtensor.shard_parts import is_part, remember_parts, taken_of
from fsdplaunch.runtime.torch_internals.dtensor import detached_view

_JOINED = {"unbind": torch.stack}
"""How parts are put together again; all others are cut and concatenated."""


class PartsWithGradients:
    """A handler of functions that take parts of a tensor.

    What is written into the parts, by `.data` or `detach()`, is written into the shard.

    Attributes:
        begun: Called where there are parts: what writes into them has to be seen from then on.
    """

    def __init__(self, begun: Callable[[], None]) -> None:
        self.begun = begun

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what a function takes of the full tensor, or of any tensor that has no gradients."""
        shard, *rest = args
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and shard.requires_grad):
            return func(shard, *rest, **kwargs)
        take = partial(taken_of, func, rest, kwargs)
        full = replicated(shard)
        several = isinstance(take(torch.empty(shard.shape, device="meta")), tuple | list)
        cut: Any = _Cut.apply
        result = cut(full, take, _dim(func, rest, kwargs), _join(func)) if several else take(full)
        remember_parts(result, shard, take)
        self.begun()
        return result

    def shape(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Give a parameter another shape in a loss; torch cannot where ranks have unequal numbers of its rows."""
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            shard = args[0]
            if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and shard.requires_grad):
                raise
        return self(func, args, kwargs)


def detached(func: Any, args: Any, kwargs: Any) -> Any:
    """Detach a view of a parameter that was changed since, of which torch fails to find the gradient."""
    (view,) = args
    result = detached_view(view)
    if result is None:
        return func(view, **kwargs)
    if is_part(view):
        remember_parts(result, view, torch.Tensor.detach)
    return result


class _Cut(torch.autograd.Function):
    """Parts of a tensor, of which a loss need not use all.

    Takes a replicated shard, what cuts it, the dimension, and what puts parts together; gives the parts.
    """

    @staticmethod
    def forward(ctx: Any, full: Any, take: Any, dim: int, join: Any) -> Any:
        ctx.set_materialize_grads(False)  # torch's zeros would be plain
        parts = tuple(take(full))
        ctx.dim, ctx.join, ctx.shapes = dim, join, [each.shape for each in parts]
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        some = next((each for each in grads if each is not None), None)
        if some is None:
            return None, None, None, None
        whole = [
            _zeros_like(some, shape) if each is None else replicated(each)
            for each, shape in zip(grads, ctx.shapes, strict=True)
        ]
        return ctx.join(whole, ctx.dim), None, None, None


def _zeros_like(gradient: Any, shape: torch.Size) -> Any:
    local = torch.zeros(shape, dtype=gradient.dtype, device=gradient.device)
    mesh = gradient.device_mesh
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _dim(func: Any, rest: Any, kwargs: Any) -> int:
    """Return the dimension that a function cuts: of `unbind` the first argument, of others the second."""
    place = 0 if func.__name__ in _JOINED else 1
    return int(kwargs.get("dim", rest[place] if len(rest) > place else 0))


def _join(func: Any) -> Any:
    return _JOINED.get(func.__name__, torch.cat)
