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
from fsdplaunch.runtime.inspection.parameters import clean_name, joined
from fsdplaunch.runtime.torch_internals.distributed import shape_and_offset
from fsdplaunch.runtime.torch_internals.fsdp import FlatParameter, flat_parameter, is_flat_parameter
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

    def fill(self, held: LocalShard, weight: StoredWeight) -> None:
        """Read this rank's shard of a tensor into place.

        Args:
            held: What to fill; `local` may have another dtype than the file and may be on a GPU.
            weight: The full tensor in its file, of the same shape.

        Raises:
            CheckpointError: The file has changed or cannot be read, or the dtype cannot hold the values.
        """
        source = source_dtype(weight, held.local.dtype)
        if not held.region.numel:
            return
        target = held.local if held.local.is_contiguous() else torch.empty_like(held.local).contiguous()
        flat = target.view(-1)
        direct = source == target.dtype and target.device.type == "cpu"
        region = held.region
        if isinstance(region, Rectangle) and _is_scattered(region, held.shape, source):
            self._by_rows(weight, region, held.shape, source, target)
        else:
            position = 0
            for start, count in held.region.runs(held.shape):
                piece = flat[position : position + count]
                self._into(weight, start, source, piece, direct=direct)
                position += count
        if target is not held.local:
            held.local.copy_(target)

    def _by_rows(
        self,
        weight: StoredWeight,
        region: Rectangle,
        shape: tuple[int, ...],
        source: torch.dtype,
        target: torch.Tensor,
    ) -> None:
        """Read whole rows, as many as the buffer takes at once, and keep this rank's shard of each."""
        row = math.prod(shape[1:])
        most = max(1, BUFFER // (row * source.itemsize))
        inner = tuple(slice(at, at + size) for at, size in zip(region.offsets[1:], region.sizes[1:], strict=True))
        for done in range(0, region.sizes[0], most):
            rows = min(most, region.sizes[0] - done)
            full_rows = self._read((region.offsets[0] + done) * row, rows * row, weight, source)
            _put(target[done : done + rows], full_rows.view(rows, *shape[1:])[(slice(None), *inner)], weight)

    def _into(
        self, weight: StoredWeight, start: int, source: torch.dtype, piece: torch.Tensor, *, direct: bool
    ) -> None:
        if direct:
            self._pread(weight, start * source.itemsize, _memory(piece))
            return
        most = BUFFER // source.itemsize
        for done in range(0, piece.numel(), most):
            count = min(most, piece.numel() - done)
            _put(piece[done : done + count], self._read(start + done, count, weight, source), weight)

    def same(self, held: LocalShard, one: StoredWeight, other: StoredWeight) -> bool:
        """Say whether two tensors of the files are equal, byte by byte, in this rank's shard."""
        first, second = (source_dtype(each, held.local.dtype) for each in (one, other))
        if first != second:
            return False
        half = BUFFER // 2 // first.itemsize
        for start, count in held.region.runs(held.shape):
            for done in range(0, count, half):
                size = min(half, count - done)
                mine = self._read(start + done, size, one, first, at=0)
                theirs = self._read(start + done, size, other, first, at=half)
                if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
                    return False
        return True

    def _read(
        self, start: int, count: int, weight: StoredWeight, source: torch.dtype, at: int = 0
    ) -> torch.Tensor:
        """Read elements into the buffer, `at` elements from its beginning."""
        if self._buffer is None:
            self._buffer = torch.empty(BUFFER, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        size = source.itemsize
        raw = self._buffer[at * size : (at + count) * size]
        self._pread(weight, start * size, _memory(raw))
        return raw.view(source)

    def _pread(self, weight: StoredWeight, offset: int, memory: memoryview) -> None:
        fd = self._descriptor(weight.file)
        position = weight.start + offset
        while memory:
            got = os.preadv(fd, [memory[:_MOST_AT_ONCE]], position)
            if got == 0:
                msg = f"{self.files.paths[weight.file]} ends at byte {position}, inside of {short(weight.name)}"
                raise CheckpointError(msg, hint="the file has changed since the headers were read; try again")
            position += got
            self.bytes_read += got
            memory = memory[got:]

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            path = self.files.paths[file]
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                msg = f"cannot open {path}: {error.strerror}"
                hint = "the first rank could; the folder must be on a file system that all nodes share"
                raise CheckpointError(msg, hint=hint) from None
            self._open[file] = fd
            size = os.fstat(fd).st_size
            if size != self.files.sizes[file]:
                msg = f"{path} has {size} bytes here and {self.files.sizes[file]} on the first rank"
                raise CheckpointError(msg, hint="copy the whole folder to every node, or share it")
        return self._open[file]

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
    """Return a stored tensor's dtype, if values of it may become values of the target's dtype.

    Floats become floats of any size but 8 bits, whose values mean nothing without the scales beside them. Whole
    numbers become wider ones, nothing else becomes anything else.

    Raises:
        CheckpointError: They may not.
    """
    source = getattr(torch, weight.dtype.name, None) if weight.dtype is not None else None
    if source is None:
        msg = f"{short(weight.name)} is {weight.code} in the files, which cannot be read by element"
        raise CheckpointError(msg, hint="load this model with the library that wrote it")
    if source == target or _becomes(source, target):
        return source  # type: ignore[no-any-return]
    msg = f"{short(weight.name)} is {weight.code} in the files, which {target} of the model cannot represent"
    hint = "build the model in the files' dtype"
    if source.is_floating_point and source.itemsize == 1:
        hint = "these are quantized weights; give the folder of the unquantized ones"
    raise CheckpointError(msg, hint=hint)


def _becomes(source: torch.dtype, target: torch.dtype) -> bool:
    if source.is_floating_point and target.is_floating_point:
        return min(source.itemsize, target.itemsize) > 1
    if source.is_complex or target.is_complex:
        return source.is_complex and target.is_complex
    integers = torch.bool not in (source, target) and not target.is_floating_point
    return integers and not source.is_floating_point and torch.can_cast(source, target) and _wider(source, target)


def _wider(source: torch.dtype, target: torch.dtype) -> bool:
    here, there = torch.iinfo(source), torch.iinfo(target)
    return here.min >= there.min and here.max <= there.max


def _put(target: torch.Tensor, values: torch.Tensor, weight: StoredWeight) -> None:
    """Copy with conversion, and refuse values that are too large for a smaller range."""
    target.copy_(values)
    narrows = target.is_floating_point() and torch.finfo(target.dtype).max < torch.finfo(values.dtype).max
    if narrows and bool((target.isinf().to(values.device) & ~values.isinf()).any()):
        largest = values.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        msg = f"{short(weight.name)} holds {largest:g}, more than {target.dtype} can represent"
        raise CheckpointError(msg, hint="keep the model in bf16 or fp32")


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous CPU tensor's bytes, to be written into."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array)
