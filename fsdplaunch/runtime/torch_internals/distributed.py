"""What torch keeps behind DTensors, ShardedTensors and process groups."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as TensorShard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdplaunch.runtime.torch_internals.tensors import argument_names, written_places

local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")
"""Return a DTensor's shard, the very object, which `to_local` may wrap."""
placements_of: Callable[[Any], Any] = operator.attrgetter("_spec.placements")
"""Return how a DTensor is placed, in a third of the time that its property takes."""


def with_local_tensor(tensor: Any, local: torch.Tensor) -> Any:
    """Return a DTensor like another over a shard on any device and of any dtype.

    `from_local` would move it, and asks other ranks for its shape.
    """
    spec = tensor._spec
    if local.dtype != spec.tensor_meta.dtype:
        spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return DTensor(local, spec, requires_grad=False)


def shape_and_offset(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a DTensor's shard and where in the full tensor it begins."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def silence_slow_exchanges() -> None:
    """Keep torch from logging that a tensor of two axes is gathered in two exchanges; from 2.12 on it does."""
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
        lambda record: "While redistributing from" not in record.getMessage()
    )


def operator_handlers() -> dict[Any, Any]:
    """Return DTensor's table of operators with handlers of their own, else empty, without effect."""
    handlers: dict[Any, Any] = getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})
    return handlers


def unscale_operator() -> Any:
    """Return the operator by which `GradScaler` unscales gradients and looks for overflows."""
    return torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale_function() -> Any:
    """Return the function of that operator, as subclasses of tensors are asked about it."""
    return torch._amp_foreach_non_finite_check_and_unscale_


def written_arguments(operator: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return what an operator writes into of what it is given, by its schema."""
    written = written_places(operator)
    by_name = {name for name, writes in zip(argument_names(operator), written, strict=True) if writes}
    return [each for each, writes in zip(args, written, strict=False) if writes] + [
        value for name, value in kwargs.items() if name in by_name
    ]


def is_random(operator: Any) -> bool:
    """Return whether an operator draws."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def is_elementwise(operator: Any) -> bool:
    """Return whether an operator computes each element by itself, as torch has tagged it.

    Not all versions tag what writes in place and what is for lists: then as what is named so without.
    """
    if torch.Tag.pointwise in operator.tags:
        return True
    name, _, overload = str(operator).removeprefix("aten.").partition(".")
    for_lists = name.startswith("_foreach_")
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_").removesuffix("_"), None)
    if packet is None or (not for_lists and not hasattr(packet, overload)):
        return False
    names = [each for each in packet.overloads() if "out" not in each] if for_lists else [overload]
    overloads = [getattr(packet, each) for each in names]
    # TorchScript's, of plain numbers and lists, stand among those of lists, without tags.
    of_tensors = [each for each in overloads if str(each._schema.arguments[0].type) == "Tensor"]
    return bool(of_tensors) and all(torch.Tag.pointwise in each.tags for each in of_tensors)


__all__ = ["ShardedTensor", "TensorShard"]  # Torch's own, under plain names


def with_local_shards(tensor: ShardedTensor, shards: list[Any]) -> ShardedTensor:
    """Return a ShardedTensor like another over other local shards."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, tensor.metadata(), process_group=tensor._process_group
    )


def default_store() -> Any:
    """Return the key-value store the ranks met in."""
    return distributed_c10d._get_default_store()


def default_timeout() -> float:
    """Return how many seconds collectives of all ranks wait on the CPU; 600 where torch is silent."""
    group = distributed_c10d.group.WORLD
    backend_of: Any = getattr(group, "_get_backend", None)
    try:
        return float(backend_of(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError, TypeError):
        return 600.0


def issued_collectives() -> int:
    """Return how many collectives this rank has issued in the default group; 0 where there is no group.

    By its sequence numbers, which torch compares to find ranks that call different collectives: one for each
    device's backend. Collectives that return before they are done count when they are issued.
    """
    group: Any = distributed_c10d.group.WORLD
    if group is None:
        return 0
    return sum(group._get_backend(device)._get_sequence_number_for_group() for device in group._device_types)


def all_gather(every: torch.Tensor, own: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> None:
    """Write the tensors of all ranks one after the other into one; collective.

    `all_gather_into_tensor` until 2.12, which warns from 2.13 on that it is called `all_gather_single`.
    """
    dist: Any = torch.distributed
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(every, own, group=group)
