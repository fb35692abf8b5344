"""Handlers of operators that are given a mixture: shards and plain tensors, or shards of different placements."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.own_numbers import note_numbers
from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler, finish, full_tensor, is_partial, placed_like
from fsdplaunch.runtime.state_dict.split_like import split_like
from fsdplaunch.runtime.torch_internals.dtensor import placements_of


def update_mixed(read: Handler) -> Handler:
    """Return a handler of updates in place: a plain tensor gets full operands, a shard those of its own part.

    Plain are averages of weights that were copied before sharding.

    Args:
        read: Computes with full tensors.
    """

    def compute(func: Any, args: Any, kwargs: Any) -> Any:
        target = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        if not isinstance(target, DTensor):
            if target is not args[0] and any(isinstance(each, DTensor) for each in args[0]):
                return _apart(compute, func, args, kwargs)
            return read(func, args, kwargs)
        note_numbers((*args[1:], *kwargs.values()))
        if target is args[0]:
            operands = placed_as_updated(target, args[1:])
            return func(target, *(operands if is_partial(target) else cut_as_updated(target, operands)), **kwargs)
        if not all(isinstance(each, DTensor) for each in args[0]):
            return _apart(compute, func, args, kwargs)
        return func(args[0], *(_cut_each(each, args[0]) for each in args[1:]), **kwargs)

    return compute


def _apart(compute: Handler, func: Any, args: Any, kwargs: Any) -> None:
    """Update the shards of a list, and then its plain tensors: an average's parameters, and its buffers."""
    for of_shards in (True, False):
        places = [place for place, each in enumerate(args[0]) if isinstance(each, DTensor) is of_shards]
        given = [
            [each[place] for place in places]
            if isinstance(each, list | tuple) and len(each) == len(args[0])
            else each
            for each in args
        ]
        compute(func, given, kwargs)


def _cut_each(operand: Any, shards: Sequence[Any]) -> Any:
    """Return a list of operands with plain tensors cut as the shards that they update; any other itself."""
    if not isinstance(operand, list | tuple) or len(operand) != len(shards):
        return operand
    return [
        _made_like(shard, each) if isinstance(each, torch.Tensor) else each
        for each, shard in zip(operand, shards, strict=True)
    ]


def placed_as_updated(shard: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return operands placed as the shard that they update: optimizers look here often, and nothing is made."""
    for operand in operands:
        if isinstance(operand, DTensor) and placements_of(operand) != placements_of(shard):
            return tuple(placed_like(shard, each) for each in operands)
    return operands


def cut_as_updated(shard: Any, operands: tuple[Any, ...]) -> list[Any]:
    """Return operands of which plain tensors of the updated shard's shape are cut as it is."""
    return [split_like(each, shard) if _is_plain_of(shard.shape, each) else each for each in operands]


def combine_mixed(read: Handler, ownership: Ownership) -> Handler:
    """Return a handler of `average * decay + parameter`, full; a loss and a gradient want a shard.

    Where the script has ranks of its own, what each has copied before its model is sharded may differ, as its
    initial weights do: then the full tensor is computed in any order, of this rank's.

    Args:
        read: Computes with full tensors.
        ownership: Who shards, and whether the script has ranks.
    """

    def compute(func: Any, args: Any, kwargs: Any) -> Any:
        operands = args if ownership.ranked else args[:1]  # Python turns `plain + shard` round
        full = not torch.is_grad_enabled() and any(is_plain(each) and each.dim() for each in operands)
        return read(func, args, kwargs) if full else _combine(func, args, kwargs)

    return compute


def _combine(func: Any, args: Any, kwargs: Any) -> Any:
    """Cut a plain tensor of a parameter's shape that is computed with its shard.

    What is still to be added up over the ranks, as `weight.t() @ weight` is, is added up before.
    """
    like = next((arg for arg in args if isinstance(arg, DTensor)), None)
    if like is not None and like.dim():
        note_numbers((*args, *kwargs.values()))
        if is_partial(like) and any(_is_plain_of(like.shape, arg) for arg in args):
            args = finish(list(args))
            like = next(arg for arg in args if isinstance(arg, DTensor))
        args = [split_like(arg, like) if _is_plain_of(like.shape, arg) else arg for arg in args]
    return func(*args, **kwargs)


def copy_each(_func: Any, args: Any, kwargs: Any) -> None:
    """Copy one tensor after the other: torch cannot copy many to shards at once, as optimizers of a stack do."""
    for target, source in zip(args[0], args[1], strict=True):
        target.copy_(_made_like(target, source), **kwargs)


def _made_like(target: Any, source: Any) -> Any:
    """Return a tensor, sharded or plain, as another one is."""
    if not isinstance(target, DTensor):
        return full_tensor(source)
    return placed_like(target, split_like(source, target) if _is_plain_of(target.shape, source) else source)


def _is_plain_of(shape: Any, value: Any) -> bool:
    return is_plain(value) and value.shape == shape


def is_plain(value: Any) -> bool:
    """Return whether a value is a tensor and no shard."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
