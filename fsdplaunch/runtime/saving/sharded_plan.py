"""What each rank writes of a sharded state, decided by every rank alone and by all of them alike.

torch gathers every rank's plan on one and sends each back, which takes minutes at 1,024 ranks; mesh and shape tell
every rank what all of them hold.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor

Numbers = tuple[int, ...]
Held = tuple[int, Numbers | None, Numbers]
"""A rank, and offsets and sizes of a chunk that it has; None and () for a value that is not a tensor."""


class UnknownLayoutError(Exception):
    """Not every rank can know where the shards of a tensor are."""


class Layout:
    """The chunks of a tensor.

    Args:
        held: All that ranks have, in the order of the ranks.
        world: How many ranks there are.

    Attributes:
        chunks: As torch's index lists them; None for a value.
        holders: The ranks that have each chunk.
        by_rank: The numbers of each rank's chunks.
    """

    __slots__ = ("by_rank", "chunks", "holders")

    def __init__(self, held: Iterable[Held], world: int) -> None:
        # Chunks that begin at the same place are one, as for torch: those that are empty, at a tensor's end.
        numbers: dict[Numbers | None, int] = {}
        self.chunks: list[ChunkStorageMetadata | None] = []
        self.holders: list[list[int]] = []
        self.by_rank: list[list[int]] = [[] for _ in range(world)]
        for rank, offsets, sizes in held:
            number = numbers.setdefault(offsets, len(numbers))
            if number == len(self.chunks):
                is_value = offsets is None
                chunk = None if is_value else ChunkStorageMetadata(torch.Size(offsets or ()), torch.Size(sizes))
                self.chunks.append(chunk)
                self.holders.append([])
            self.holders[number].append(rank)
            self.by_rank[rank].append(number)


def _describe(value: Any, world: int) -> tuple[Any, Callable[[], Iterable[Held]]]:
    """Return what is equal for values of one layout on all ranks, and what yields the chunks.

    Raises:
        UnknownLayoutError: This rank cannot know what the others hold of it.
    """
    if isinstance(value, DTensor):
        shape, ranks, splits = tuple(value.shape), value.device_mesh.mesh, _splits(value)
        if sorted(ranks.flatten().tolist()) != list(range(world)):
            msg = "a tensor's mesh does not hold all ranks"
            raise UnknownLayoutError(msg)
        key = (shape, tuple(ranks.shape), tuple(ranks.flatten().tolist()), splits)
        return key, lambda: _of_mesh(shape, ranks, splits)
    if isinstance(value, ShardedTensor):
        shards = _shards(value)
        return shards, lambda: shards
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        return shape, lambda: ((rank, (0,) * len(shape), shape) for rank in range(world))
    return None, lambda: ((rank, None, ()) for rank in range(world))


def _splits(tensor: DTensor) -> tuple[int | None, ...]:
    """Return for each axis of the mesh the dimension that it splits, or None.

    Raises:
        UnknownLayoutError: Placements of another kind, or two that split one dimension.
    """
    splits: list[int | None] = []
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            msg = f"{placement} is not a plain placement"
            raise UnknownLayoutError(msg)
        splits.append(placement.dim % tensor.dim() if isinstance(placement, Shard) else None)
    used = [dim for dim in splits if dim is not None]
    if len(set(used)) < len(used):
        msg = "two axes of the mesh split one dimension"
        raise UnknownLayoutError(msg)
    return tuple(splits)


def _of_mesh(shape: Numbers, ranks: torch.Tensor, splits: Sequence[int | None]) -> list[Held]:
    """Return each rank's chunk, split as `torch.chunk` does."""
    held: list[Held] = []
    coordinates = itertools.product(*map(range, ranks.shape))
    for place, rank in zip(coordinates, ranks.flatten().tolist(), strict=True):
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, coordinate, count in zip(splits, place, ranks.shape, strict=True):
            if dim is not None:
                step = -(-shape[dim] // count)
                offsets[dim] = min(shape[dim], step * coordinate)
                sizes[dim] = min(shape[dim], step * (coordinate + 1)) - offsets[dim]
        held.append((rank, tuple(offsets), tuple(sizes)))
    return sorted(held)


def _shards(tensor: ShardedTensor) -> tuple[Held, ...]:
    """Return each shard of FSDP1's tensors.

    Raises:
        UnknownLayoutError: A shard has no rank.
    """
    shards: list[Held] = []
    for shard in tensor.metadata().shards_metadata:
        rank = None if shard.placement is None else shard.placement.rank()
        if rank is None:
            msg = "a shard has no rank"
            raise UnknownLayoutError(msg)
        shards.append((rank, tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
    return tuple(sorted(shards, key=lambda each: each[0]))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or value of a state.

    Attributes:
        name: Its flattened name.
        layout: Where its chunks are.
        size: Its full shape; None for a value.
        properties: Its dtype and the like; None for a value.
    """

    name: str
    layout: Layout
    size: torch.Size | None
    properties: TensorProperties | None


class SharedPlan:
    """Which rank writes which chunk, found by every rank alone.

    Args:
        state: Flattened, as this rank has it.
        paths: Where each entry was before it was flattened.
        world: How many ranks there are.

    Raises:
        UnknownLayoutError: This rank cannot know what the others have.
    """

    def __init__(self, state: Mapping[str, Any], paths: Mapping[str, Any], world: int) -> None:
        digest = hashlib.sha256(repr((world, sorted(paths.items()))).encode())
        layouts: dict[Any, Layout] = {}  # a model's layers repeat them
        self.world, self.paths = world, paths
        self.entries: list[Entry] = []
        for name, value in state.items():
            key, held = _describe(value, world)
            if key not in layouts:
                layouts[key] = Layout(held(), world)
            size, properties = _properties(value)
            digest.update(repr((name, type(value).__name__ if size else "", properties, key)).encode())
            self.entries.append(Entry(name, layouts[key], size, properties))
        self.digest = digest.digest()

    def _is_written(self, rank: int, number: int, chunk: int) -> bool:
        """Say whether a rank writes a chunk that it has: copies go round, by the entry's number."""
        holders = self.entries[number].layout.holders[chunk]
        return holders[number % len(holders)] == rank

    def written_by(self, rank: int) -> Iterator[tuple[Entry, int]]:
        """Yield the entry and the chunk of each item that a rank writes, in the order of its plan."""
        for number, entry in enumerate(self.entries):
            for chunk in entry.layout.by_rank[rank]:
                if self._is_written(rank, number, chunk):
                    yield entry, chunk

    def own_plan(self, local: SavePlan, rank: int) -> SavePlan:
        """Return what is left of a rank's local plan.

        Raises:
            UnknownLayoutError: The local plan is not what the others think this rank has.
        """
        listed = [
            (number, chunk) for number, entry in enumerate(self.entries) for chunk in entry.layout.by_rank[rank]
        ]
        if len(listed) != len(local.items):
            msg = "this rank has other items than planned"
            raise UnknownLayoutError(msg)
        items = []
        for (number, chunk), item in zip(listed, local.items, strict=True):
            index = index_of(self.entries[number], chunk)
            _check(self.entries[number], chunk, index, item)
            if self._is_written(rank, number, chunk):
                items.append(replace(item, index=index))
        return replace(local, items=items)


def index_of(entry: Entry, chunk: int) -> MetadataIndex:
    """Return what torch's index calls an item."""
    place = entry.layout.chunks[chunk]
    return MetadataIndex(entry.name) if place is None else MetadataIndex(entry.name, place.offsets, chunk)


def _check(entry: Entry, chunk: int, index: MetadataIndex, item: WriteItem) -> None:
    planned = entry.layout.chunks[chunk]
    sizes = None if item.tensor_data is None else item.tensor_data.chunk.sizes
    if item.index != index or sizes != (None if planned is None else planned.sizes):
        msg = f"this rank has another part of {entry.name} than planned"
        raise UnknownLayoutError(msg)


def _properties(value: Any) -> tuple[torch.Size | None, TensorProperties | None]:
    """Return a tensor's full size and what its index says of it besides; nothing for other values."""
    if isinstance(value, ShardedTensor):
        found = value.metadata().tensor_properties
        properties = TensorProperties(
            dtype=found.dtype,
            layout=found.layout,
            requires_grad=found.requires_grad,
            memory_format=found.memory_format,
            pin_memory=found.pin_memory,
        )
        return value.metadata().size, properties
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return value.size(), TensorProperties.create_from_tensor(local)
    return None, None
