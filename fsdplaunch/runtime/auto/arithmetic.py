"""Arithmetic on shards that torch gets wrong is done on whole tensors.

Needed because torch's loss functions scale the gradient of a sharded tensor by the size of the shard, and average
the means of unequal shards; because the largest value of an empty shard is an error on the ranks that have one,
while the others wait; and because norms by column are taken for finished before they are added up. None of this is
in a model's own passes, where parameters are whole: it is penalties, and statistics.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.auto.job import Job
from fsdplaunch.runtime.torch_internals import operator_handlers, tree_map

_LOSSES = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
_EXTREMES = ("max", "min", "amax", "amin", "aminmax", "linalg_vector_norm")


@contextmanager
def computing_whole(job: Job) -> Iterator[None]:
    """Gather what these operations need whole, and finish what they leave to be added up."""
    handlers = operator_handlers()
    kept = dict(handlers)
    losses = _overloads([name + end for name in _LOSSES for end in ("", "_backward")])
    handlers.update(dict.fromkeys(losses, _handler(job, handlers, lambda _: True)))
    handlers.update(dict.fromkeys(_overloads(_EXTREMES), _handler(job, handlers, _has_empty_shards)))
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(kept)


def _overloads(names: Iterable[str]) -> list[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


def _handler(job: Job, handlers: dict[Any, Any], needs_whole: Callable[[Any], bool]) -> Any:
    """What torch's dispatcher calls in place of such an operation on sharded tensors."""

    def compute(op: Any, args: Any, kwargs: Any) -> Any:
        if job.ownership.ours and needs_whole(args[0]):
            args, kwargs = tree_map(_gathered, (args, kwargs))
        own = handlers.pop(op)  # torch's own way now
        try:
            result = op(*args, **kwargs)
        finally:
            handlers[op] = own
        return tree_map(_added_up, result) if job.ownership.ours else result

    return compute


def _gathered(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def _added_up(value: Any) -> Any:
    partial = isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements)
    return _gathered(value) if partial else value


def _has_empty_shards(tensor: Any) -> bool:
    """Whether some rank has nothing of a tensor; all but the last parts are of one size, rounded up."""
    if not isinstance(tensor, DTensor):
        return False
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            rows, ranks = tensor.size(placement.dim), tensor.device_mesh.size(axis)
            if -(-rows // ranks) * (ranks - 1) >= rows:
                return True
    return False
