"""Which elements of each of a model's tensors this rank holds, whoever sharded it, and where it is in memory."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from fsdplaunch.checkpoint.regions import Region, flat_offset, row_major
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.torch_internals.dtensor import shape_and_offset
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import FlatParameter, flat_parameter, is_flat_parameter
from fsdplaunch.runtime.torch_internals.modules import is_persistent, own_tensors

Run = tuple[int, int]
"""First element in the flattened full tensor, and how many follow."""


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` to `stop` of a tensor that was flattened row by row."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.stop - self.start

    def runs(self, shape: tuple[int, ...]) -> Iterator[Run]:  # noqa: ARG002  (as for a rectangle)
        """Return the elements as runs of neighbours in the full tensor, in the order of the shard's own memory."""
        if self.numel:
            yield self.start, self.numel


class Rectangle(Region):
    """A rectangular shard: where it begins and how far it goes along each dimension."""

    def inner(self, shape: tuple[int, ...]) -> int:
        """Return the last dimension that is cut; below it, neighbours here are neighbours in the full tensor."""
        partial = [dim for dim, size in enumerate(self.sizes) if size != shape[dim]]
        return partial[-1] if partial else 0

    def runs(self, shape: tuple[int, ...]) -> Iterator[Run]:
        """Return the elements as runs of neighbours in the full tensor, in the order of the shard's own memory."""
        if not self.numel:
            return
        split = self.inner(shape)
        strides = row_major(shape)
        length = math.prod(self.sizes[split:])
        starts = [flat_offset(shape, self.offsets)]
        for dim in range(split):
            starts = [start + step * strides[dim] for start in starts for step in range(self.sizes[dim])]
        for start in starts:
            yield start, length


@dataclass(slots=True, kw_only=True)
class LocalShard:
    """What this rank holds of one tensor.

    Attributes:
        names: All clean names of the tensor.
        shape: Of the full tensor.
        region: Which elements are here.
        local: They themselves, in the region's order.
        saved: Whether a state dict holds the tensor.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    region: Span | Rectangle
    local: torch.Tensor
    saved: bool = True


def local_shards(model: nn.Module) -> list[LocalShard]:
    """Return every parameter and buffer of a model, sharded by FSDP1, FSDP2 or not, each once.

    Raises:
        CheckpointError: A parameter is split in a way that has no place in a file.
    """
    names = {module: clean_name(name) for name, module in model.named_modules()}
    flat, taken = _flat(model, names)
    found: dict[int, LocalShard] = {}
    for module, name in names.items():
        for attribute, tensor in own_tensors(module):
            if (module, attribute) in taken or is_flat_parameter(tensor):
                continue
            full = joined(name, attribute)
            if id(tensor) in found:
                found[id(tensor)].names += (full,)
            else:
                found[id(tensor)] = _held(full, tensor, saved=is_persistent(module, attribute))
    return [*flat, *found.values()]


def _held(name: str, tensor: torch.Tensor, *, saved: bool) -> LocalShard:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        region = Rectangle((0,) * len(shape), shape)
        return LocalShard(names=(name,), shape=shape, region=region, local=tensor.detach(), saved=saved)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        msg = f"{name} is kept as summands, which no file holds"
        raise CheckpointError(msg, hint="load the weights before the model computes")
    sizes, offsets = shape_and_offset(tensor)
    with torch.no_grad():
        local = tensor.to_local()
    return LocalShard(names=(name,), shape=shape, region=Rectangle(offsets, sizes), local=local, saved=saved)


def _flat(model: nn.Module, names: dict[nn.Module, str]) -> tuple[list[LocalShard], set[tuple[nn.Module, str]]]:
    """Return what flat parameters hold, and under which attributes modules may show the same as well."""
    held: list[LocalShard] = []
    taken: set[tuple[nn.Module, str]] = set()
    for flat in _flat_parameters(model):
        first: dict[tuple[nn.Module, str], LocalShard] = {}
        for info, shape, span in zip(flat.infos, flat.shapes, flat.places, strict=True):
            region = (
                Span(span.intra_param_start_idx, span.intra_param_end_idx + 1) if span.in_shard else Span(0, 0)
            )
            start = span.offset_in_shard or 0
            one = LocalShard(
                names=(joined(names[info.module], info.param_name),),
                shape=tuple(shape),
                region=region,
                local=flat.shard[start : start + region.numel],
            )
            first[info.module, info.param_name] = one
        for shared in flat.shared:
            one = first[shared.prim_module, shared.prim_param_name]
            one.names += (joined(names[shared.module], shared.param_name),)
            taken.add((shared.module, shared.param_name))
        held += first.values()
        taken |= set(first)
    return held, taken


def _flat_parameters(model: nn.Module) -> Iterator[FlatParameter]:
    units = FullyShardedDataParallel.fsdp_modules(model)
    return (flat for unit in units if (flat := flat_parameter(unit)) is not None)


def clear_padding(model: nn.Module) -> None:
    """Set the elements of flat parameters that belong to no parameter to zero, so that no chance value is kept."""
    for flat in _flat_parameters(model):
        end = 0
        places = [(p.offset_in_shard, p.numel_in_shard) for p in flat.places if p.in_shard]
        for start, count in [*sorted(places), (flat.shard.numel(), 0)]:
            flat.shard[end:start].zero_()
            end = start + count
