"""What each rank writes of a sharded state, decided by every rank alone and by all of them alike.

torch gathers every rank's plan on one and sends each back, which takes minutes at 1,024 ranks; mesh and shape tell
every rank what all of them hold.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor

Held = tuple[int, tuple[int, ...] | None, tuple[int, ...]]
"""A rank, and offsets and sizes of a chunk that it has; None and () for a value that is not a tensor."""


class UnknownLayoutError(Exception):
    """Not every rank can know where the shards of a tensor are."""


class Layout:
    """The chunks of a tensor, of what all ranks hold in their order."""

    __slots__ = ("by_rank", "chunks", "holders")

    def __init__(self, held: Iterable[Held], world: int) -> None:
        # Chunks that begin at the same place are one, as for torch: those that are empty, at a tensor's end.
        numbers: dict[tuple[int, ...] | None, int] = {}
        self.chunks: list[ChunkStorageMetadata | None] = []  # as torch's index lists them; None for a value
        self.holders: list[list[int]] = []  # the ranks that have each chunk
        self.by_rank: list[list[int]] = [[] for _ in range(world)]  # the numbers of each rank's chunks
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
    """Return what is equal for values of one layout on all ranks, and what yields the chunks."""
    if isinstance(value, DTensor):
        return _describe_dtensor(value, world)
    if isinstance(value, ShardedTensor):  # of FSDP1 without a mesh
        msg = "a tensor has no mesh"
        raise UnknownLayoutError(msg)
    if isinstance(value, torch.Tensor):
        shape = tuple(value.shape)
        return shape, lambda: ((rank, (0,) * len(shape), shape) for rank in range(world))
    return None, lambda: ((rank, None, ()) for rank in range(world))


def _describe_dtensor(tensor: DTensor, world: int) -> tuple[Any, Callable[[], Iterable[Held]]]:
    shape, mesh = tuple(tensor.shape), tensor.device_mesh.mesh
    ranks = mesh.flatten().tolist()
    splits: list[int | None] = []  # for each axis of the mesh the dimension that it splits
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            msg = f"{placement} is not a plain placement"
            raise UnknownLayoutError(msg)
        splits.append(placement.dim % tensor.dim() if isinstance(placement, Shard) else None)
    used = [dim for dim in splits if dim is not None]
    if len(set(used)) < len(used):
        msg = "two axes of the mesh split one dimension"
        raise UnknownLayoutError(msg)
    if sorted(ranks) != list(range(world)):
        msg = "a tensor's mesh does not hold all ranks"
        raise UnknownLayoutError(msg)

    def chunks() -> list[Held]:
        """Return each rank's chunk, split as `torch.chunk` does."""
        held: list[Held] = []
        for place, rank in zip(itertools.product(*map(range, mesh.shape)), ranks, strict=True):
            offsets, sizes = [0] * len(shape), list(shape)
            for dim, coordinate, count in zip(splits, place, mesh.shape, strict=True):
                if dim is not None:
                    step = -(-shape[dim] // count)
                    offsets[dim] = min(shape[dim], step * coordinate)
                    sizes[dim] = min(shape[dim], step * (coordinate + 1)) - offsets[dim]
            held.append((rank, tuple(offsets), tuple(sizes)))
        return sorted(held)

    return (shape, tuple(mesh.shape), tuple(ranks), tuple(splits)), chunks


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or value of a state: flattened name, chunks, and a tensor's full shape, dtype and the like."""

    name: str
    layout: Layout
    size: torch.Size | None
    properties: TensorProperties | None

    def index_of(self, chunk: int) -> MetadataIndex:
        """Return what torch's index calls one of its items."""
        place = self.layout.chunks[chunk]
        return MetadataIndex(self.name) if place is None else MetadataIndex(self.name, place.offsets, chunk)


class SharedPlan:
    """Which rank writes which chunk, found by every rank alone, or an UnknownLayoutError where it cannot know.

    The state is flattened, as this rank has it; `paths` say where each entry was before.
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
            size, properties = None, None
            if isinstance(value, torch.Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                size, properties = value.size(), TensorProperties.create_from_tensor(local)
            digest.update(repr((name, type(value).__name__ if size else "", properties, key)).encode())
            self.entries.append(Entry(name, layouts[key], size, properties))
        self.digest = digest.digest()

    def _held_by(self, rank: int) -> Iterator[tuple[Entry, int, bool]]:
        """Yield the entry and the chunk of each item of a rank, and whether it writes it: copies go round."""
        for number, entry in enumerate(self.entries):
            for chunk in entry.layout.by_rank[rank]:
                holders = entry.layout.holders[chunk]
                yield entry, chunk, holders[number % len(holders)] == rank

    def written_by(self, rank: int) -> Iterator[tuple[Entry, int]]:
        """Yield the entry and the chunk of each item that a rank writes, in the order of its plan."""
        return ((entry, chunk) for entry, chunk, is_written in self._held_by(rank) if is_written)

    def own_plan(self, local: SavePlan, rank: int) -> SavePlan:
        """Return what is left of a rank's local plan, which must be what the others think this rank has."""
        held = list(self._held_by(rank))
        if len(held) != len(local.items):
            msg = "this rank has other items than planned"
            raise UnknownLayoutError(msg)
        items = []
        for (entry, chunk, is_written), item in zip(held, local.items, strict=True):
            index, planned = entry.index_of(chunk), entry.layout.chunks[chunk]
            sizes = None if item.tensor_data is None else item.tensor_data.chunk.sizes
            if item.index != index or sizes != (None if planned is None else planned.sizes):
                msg = f"this rank has another part of {entry.name} than planned"
                raise UnknownLayoutError(msg)
            if is_written:
                items.append(replace(item, index=index))
        return replace(local, items=items)
