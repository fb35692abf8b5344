"""Arithmetic on shards that torch gets wrong is done on whole tensors.

Needed because torch's loss functions scale the gradient of a sharded tensor by the size of the shard, and average
the means of unequal shards, as `mean` does in torch 2.7 to 2.9; because the largest value of an empty shard is an
error on the ranks that have one, while the others wait; and because norms by column are taken for finished before
they are added up, in 2.7 all sums. Operators that older versions lack come along. None of this is in a model's own
passes, where parameters are whole: it is penalties, and statistics.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.torch_internals import (
    finishing_results,
    knows_operator,
    operator_handlers,
    tree_leaves,
    tree_map,
)

_LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_WHOLE = ("std", *(name + end for name in _LOSSES for end in ("", "_backward")))
_EXTREMES = ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "linalg_vector_norm")


@contextmanager
def computing_whole(hook_context: HookContext) -> Iterator[None]:
    """Gather what these operations need whole, and finish what they leave to be added up."""
    handlers = operator_handlers()
    kept = dict(handlers)
    for names, needs_whole in ((_WHOLE, _always), (_EXTREMES, _has_empty_shards), (["mean"], _has_unequal_shards)):
        handlers.update(dict.fromkeys(_overloads(names), _handler(hook_context, handlers, needs_whole)))
    if not knows_operator(torch.ops.aten.masked_fill_.Scalar):
        handlers[torch.ops.aten.masked_fill_.Scalar] = _fill

    def finish(result: Any) -> Any:
        return tree_map(_added_up, result) if hook_context.ownership.ours else result

    try:
        with finishing_results(finish):
            yield
    finally:
        handlers.clear()
        handlers.update(kept)


def _overloads(names: Iterable[str]) -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _handler(hook_context: HookContext, handlers: dict[Any, Any], needs_whole: Callable[[Any], bool]) -> Any:
    """What torch's dispatcher calls in place of such an operation on sharded tensors."""

    def compute(op: Any, args: Any, kwargs: Any) -> Any:
        if hook_context.ownership.ours and needs_whole(args[0]):
            args, kwargs = tree_map(_gathered, (args, kwargs))
            if _is_whole((args, kwargs)):
                return _computed_plain(op, args, kwargs)
        own = handlers.pop(op)  # torch's own way now
        try:
            result = op(*args, **kwargs)
        finally:
            handlers[op] = own
        return tree_map(_added_up, result) if hook_context.ownership.ours else result

    return compute


def _is_whole(arguments: Any) -> bool:
    """Whether every tensor is a gathered one, or a number; torch refuses others beside sharded ones."""
    tensors = [value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)]
    return all(isinstance(tensor, DTensor) or tensor.numel() == 1 for tensor in tensors)


def _computed_plain(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute on gathered tensors without DTensor, of which older versions have not every operation."""
    mesh = next(value.device_mesh for value in tree_leaves((args, kwargs)) if isinstance(value, DTensor))
    args, kwargs = tree_map(
        lambda value: value.to_local() if isinstance(value, DTensor) else value, (args, kwargs)
    )

    def wrapped(value: Any) -> Any:
        whole = [Replicate()] * mesh.ndim
        return DTensor.from_local(value, mesh, whole) if isinstance(value, torch.Tensor) else value

    return tree_map(wrapped, op(*args, **kwargs))


def _fill(op: Any, args: Any, _: Any) -> Any:
    """Fill shards by a mask in place, as the gradient of a norm does; torch 2.7 to 2.10 cannot."""
    shards, mask, value = args
    whole = (mask.full_tensor() if isinstance(mask, DTensor) else mask).expand(shards.shape)
    mesh = shards.device_mesh
    own = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim).redistribute(placements=shards.placements)
    op(shards.to_local(), own.to_local(), value)
    return shards


def _gathered(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    shards: DTensor = value.detach()  # type: ignore[assignment]  # its autograd is the operation's
    return shards.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def _added_up(value: Any) -> Any:
    partial = isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)
    return _gathered(value) if partial else value


def _always(_: Any) -> bool:
    return True


def _has_empty_shards(tensor: Any) -> bool:
    """Whether some rank has nothing of a tensor; all but the last parts are of one size, rounded up."""
    return any(-(-rows // ranks) * (ranks - 1) >= rows for rows, ranks in _cuts(tensor))


def _has_unequal_shards(tensor: Any) -> bool:
    return any(rows % ranks for rows, ranks in _cuts(tensor))


def _cuts(tensor: Any) -> Iterator[tuple[int, int]]:
    """Sizes of a tensor's sharded dimensions, each with the number of its parts."""
    for axis, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if isinstance(placement, Shard):
            yield tensor.size(placement.dim), tensor.device_mesh.size(axis)
