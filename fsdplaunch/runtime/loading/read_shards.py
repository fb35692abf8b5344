"""Which elements of a model's tensors this rank holds, and their bytes read straight into place."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from fsdplaunch.checkpoint.chunks import Region, flat_offset, row_major
from fsdplaunch.checkpoint.model_weights import StoredWeight, WeightFiles
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.inspection import clean_name, joined
from fsdplaunch.runtime.torch_internals.distributed import shape_and_offset
from fsdplaunch.runtime.torch_internals.fsdp import FlatParameter, flat_parameter, is_flat_parameter
from fsdplaunch.runtime.torch_internals.modules import is_persistent, own_tensors

Run = tuple[int, int]
"""First element in the flattened full tensor, and how many follow."""


class Rectangle(Region):
    """A rectangular shard: where it begins and how far it goes along each dimension."""

    def inner(self, shape: tuple[int, ...]) -> int:
        """Return the last dimension that is cut; below it, neighbours here are neighbours in the full tensor."""
        partial = [dim for dim, size in enumerate(self.sizes) if size != shape[dim]]
        return partial[-1] if partial else 0

    @property
    def inner_slices(self) -> tuple[slice, ...]:
        """Return what cuts rows of the full tensor to those of the shard."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets[1:], self.sizes[1:], strict=True))

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
    """What this rank holds of one tensor."""

    names: tuple[str, ...]  # all clean names of the tensor
    shape: tuple[int, ...]  # of the full tensor
    region: Rectangle  # which elements are here, of the tensor as it is cut
    local: torch.Tensor  # they themselves, in the region's order
    saved: bool = True  # whether a state dict holds the tensor

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """Return the shape that is cut: the tensor's own, or one dimension where FSDP1 has flattened it."""
        return self.shape if len(self.region.sizes) == len(self.shape) else (math.prod(self.shape),)


def local_shards(model: nn.Module) -> list[LocalShard]:
    """Return every parameter and buffer of a model, sharded by FSDP1, FSDP2 or not, each once."""
    names = {module: clean_name(name) for name, module in model.named_modules()}
    held: list[LocalShard] = []
    taken: dict[tuple[nn.Module, str], LocalShard] = {}  # what flat parameters hold; modules may show it as well
    for flat in _flat_parameters(model):
        for info, shape, span in zip(flat.infos, flat.shapes, flat.places, strict=True):
            name = joined(names[info.module], info.param_name)
            at, count = (span.intra_param_start_idx, span.numel_in_shard) if span.in_shard else (0, 0)
            start = span.offset_in_shard or 0
            local = flat.shard[start : start + count]
            region = Rectangle((at,), (count,))
            held.append(LocalShard(names=(name,), shape=tuple(shape), region=region, local=local))
            taken[info.module, info.param_name] = held[-1]
        for shared in flat.shared:
            one = taken[shared.prim_module, shared.prim_param_name]
            one.names += (joined(names[shared.module], shared.param_name),)
            taken[shared.module, shared.param_name] = one
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
    return [*held, *found.values()]


def _held(name: str, tensor: torch.Tensor, *, saved: bool) -> LocalShard:
    shape = tuple(tensor.shape)
    region, local = Rectangle((0,) * len(shape), shape), tensor.detach()
    if isinstance(tensor, DTensor):
        if any(isinstance(placement, Partial) for placement in tensor.placements):
            msg = f"{name} is a partial sum on each rank, which cannot be loaded from files"
            raise CheckpointError(msg, hint="load the weights before the model computes")
        sizes, offsets = shape_and_offset(tensor)
        region = Rectangle(offsets, sizes)
        with torch.no_grad():
            local = tensor.to_local()
    return LocalShard(names=(name,), shape=shape, region=region, local=local, saved=saved)


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


BUFFER = 8 * 1024 * 1024
"""Bytes that are read at once where they cannot be read into place: other dtypes, other devices."""
_MOST_AT_ONCE = 1 << 30
_SHORT_RUN = 16 * 1024


class ShardReader:
    """Open weight files of one rank, and the buffer that everything which needs one goes through."""

    def __init__(self, files: WeightFiles) -> None:
        self.files = files
        self.bytes_read = 0
        self._open: dict[int, int] = {}
        self._buffer: torch.Tensor | None = None

    def fill(self, held: LocalShard, weight: StoredWeight, *others: StoredWeight) -> None:
        """Read this rank's shard of a stored tensor into place, which may have another dtype and device."""
        source = source_dtype(weight, held.local.dtype)
        if not held.region.numel:
            return
        target = held.local if held.local.is_contiguous() else torch.empty_like(held.local).contiguous()
        is_direct = source == target.dtype and target.device.type == "cpu"
        if is_direct and not _is_scattered(held.region, held.cut_shape, source):
            flat, position = target.view(-1), 0
            for start, count in held.region.runs(held.cut_shape):
                self._pread(weight, start * source.itemsize, _memory(flat[position : position + count]))
                position += count
        else:
            for part, values in self._pieces(held, weight, target):
                _put(part, values, weight)
        for other in others:
            if (other.file, other.start) == (weight.file, weight.start):
                continue
            if not all(_is_same(part, values) for part, values in self._pieces(held, other, target)):
                msg = f"{weight.name} and {other.name} are one parameter in the model and differ in the files"
                raise CheckpointError(msg, hint="build the model without tied weights (tie_word_embeddings=False)")
        if target is not held.local:
            held.local.copy_(target)

    def _pieces(
        self, held: LocalShard, weight: StoredWeight, target: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield parts of the target, each with its values in the file, which the buffer holds until the next."""
        source, region, shape = source_dtype(weight, target.dtype), held.region, held.cut_shape
        if _is_scattered(region, shape, source):
            # Read whole rows, as many as the buffer takes at once, and keep this rank's shard of each.
            row, inner = math.prod(shape[1:]), region.inner_slices
            most = max(1, BUFFER // (row * source.itemsize))
            for done in range(0, region.sizes[0], most):
                rows = min(most, region.sizes[0] - done)
                full_rows = self._read((region.offsets[0] + done) * row, rows * row, weight, source)
                yield target[done : done + rows], full_rows.view(rows, *shape[1:])[(slice(None), *inner)]
            return
        flat, position, most = target.view(-1), 0, BUFFER // source.itemsize
        for start, count in region.runs(shape):
            for done in range(0, count, most):
                size = min(most, count - done)
                part = flat[position + done : position + done + size]
                yield part, self._read(start + done, size, weight, source)
            position += count

    def _read(self, start: int, count: int, weight: StoredWeight, source: torch.dtype) -> torch.Tensor:
        """Read elements into the buffer."""
        if self._buffer is None:
            self._buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        raw = self._buffer[: count * source.itemsize]
        self._pread(weight, start * source.itemsize, _memory(raw))
        return raw.view(source)

    def _pread(self, weight: StoredWeight, offset: int, memory: memoryview) -> None:
        if weight.file not in self._open:
            path = self.files.paths[weight.file]
            try:
                fd = self._open[weight.file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                msg = f"cannot open {path}: {error.strerror}"
                hint = "the first rank could; the folder must be on a file system that all nodes share"
                raise CheckpointError(msg, hint=hint) from None
            if (size := os.fstat(fd).st_size) != self.files.sizes[weight.file]:
                msg = f"{path} has {size} bytes here and {self.files.sizes[weight.file]} on the first rank"
                raise CheckpointError(msg, hint="copy the whole folder to every node, or share it")
        position = weight.start + offset
        while memory:
            got = os.preadv(self._open[weight.file], [memory[:_MOST_AT_ONCE]], position)
            if got == 0:
                msg = f"{self.files.paths[weight.file]} ends at byte {position}, inside {short(weight.name)}"
                raise CheckpointError(msg, hint="the file has changed since the headers were read; try again")
            position += got
            self.bytes_read += got
            memory = memory[got:]

    def close(self) -> None:
        """Close the files."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._buffer = None


def _is_scattered(region: Rectangle, shape: tuple[int, ...], source: torch.dtype) -> bool:
    """Say whether a region lies in the file as many short runs, in rows that are short enough to be read whole."""
    if region.inner(shape) == 0:
        return False
    row = math.prod(shape[1:]) * source.itemsize
    run = math.prod(region.sizes[region.inner(shape) :]) * source.itemsize
    return run < _SHORT_RUN and row <= BUFFER


def source_dtype(weight: StoredWeight, target: torch.dtype) -> torch.dtype:
    """Return a stored tensor's dtype, or raise where values of it may not become values of the target's dtype.

    Floats become floats of any size but 8 bits, whose values mean nothing without the scales beside them. Whole
    numbers become wider ones, nothing else becomes anything else.
    """
    source: torch.dtype | None = getattr(torch, weight.dtype.name, None) if weight.dtype is not None else None
    if source is None:
        msg = f"{short(weight.name)} is {weight.code} in the files, which cannot be read by element"
        raise CheckpointError(msg, hint="load this model with the library that wrote it")
    if source == target:
        return source
    if source.is_floating_point and target.is_floating_point:
        becomes = min(source.itemsize, target.itemsize) > 1
    elif source.is_complex or target.is_complex:
        becomes = source.is_complex and target.is_complex
    elif torch.bool in (source, target) or source.is_floating_point or target.is_floating_point:
        becomes = False
    else:
        here, there = torch.iinfo(source), torch.iinfo(target)
        becomes = here.min >= there.min and here.max <= there.max
    if becomes:
        return source
    msg = f"{short(weight.name)} is {weight.code} in the files, which {target} of the model cannot represent"
    hint = "build the model in the files' dtype"
    if source.is_floating_point and source.itemsize == 1:
        hint = "these are quantized weights; give the folder of the unquantized ones"
    raise CheckpointError(msg, hint=hint)


def _put(target: torch.Tensor, values: torch.Tensor, weight: StoredWeight) -> None:
    """Copy with conversion, and refuse values that are too large for a smaller range."""
    target.copy_(values)
    narrows = target.is_floating_point() and torch.finfo(target.dtype).max < torch.finfo(values.dtype).max
    if narrows and bool((target.isinf().to(values.device) & ~values.isinf()).any()):
        largest = values.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        msg = f"{short(weight.name)} holds {largest:g}, more than {target.dtype} can represent"
        raise CheckpointError(msg, hint="keep the model in bf16 or fp32")


def _is_same(target: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether values would be those of the target, byte by byte: NaN is equal."""
    one, other = (each.contiguous().view(torch.uint8) for each in (target, values.to(target)))
    return torch.equal(one, other)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, to be written into."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
