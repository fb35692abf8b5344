"""What each rank writes of a sharded state, decided by every rank alone and by all of them alike.

torch gathers every rank's plan on one and sends each back, which takes minutes at 1,024 ranks; mesh and shape tell
every rank what all of them hold.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.torch_internals.distributed import ShardedTensor

Numbers = tuple[int, ...]


class UnknownLayoutError(Exception):
    """Not every rank can know where the shards of a tensor are."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        offsets: Its first element's place in the tensor; None for a value that is not a tensor.
        sizes: Its shape.
        holders: The ranks that have it, in their order.
    """

    offsets: Numbers | None
    sizes: Numbers
    holders: tuple[int, ...]


class Layout:
    """The chunks of a tensor.

    Attributes:
        chunks: Each once, in the order of the ranks.
        by_rank: The numbers of each rank's chunks.
        copies: Which chunks more than one rank has.
    """

    __slots__ = ("by_rank", "chunks", "copies")

    def __init__(self, held: Iterable[tuple[int, Numbers | None, Numbers]], world: int) -> None:
        """Sort chunks that are given as rank, offsets and sizes, in the order of ranks.

        Chunks that begin at the same place are one, as for torch: those that are empty, at a tensor's end.
        """
        places: dict[Numbers | None, tuple[Numbers, list[int]]] = {}
        numbers: dict[Numbers | None, int] = {}
        by_rank: list[list[int]] = [[] for _ in range(world)]
        for rank, offsets, sizes in held:
            places.setdefault(offsets, (sizes, []))[1].append(rank)
            by_rank[rank].append(numbers.setdefault(offsets, len(numbers)))
        self.chunks = tuple(Chunk(offsets, sizes, tuple(ranks)) for offsets, (sizes, ranks) in places.items())
        self.by_rank = [tuple(each) for each in by_rank]
        self.copies = frozenset(number for number, each in enumerate(self.chunks) if len(each.holders) > 1)


class Layouts:
    """Finds layouts, each once: a model's layers repeat them.

    Args:
        world: How many ranks there are.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._known: dict[Any, Layout] = {}

    def find(self, value: Any) -> tuple[Any, Layout]:
        """Return what is equal for values of one layout on all ranks, and the layout.

        Raises:
            UnknownLayoutError: This rank cannot know what the others hold of it.
        """
        key, held = self._describe(value)
        layout = self._known.get(key)
        if layout is None:
            layout = self._known[key] = Layout(held(), self._world)
        return key, layout

    def _describe(self, value: Any) -> tuple[Any, Any]:
        if isinstance(value, DTensor):
            shape, ranks, splits = tuple(value.shape), value.device_mesh.mesh, _splits(value)
            if sorted(ranks.flatten().tolist()) != list(range(self._world)):
                msg = "a tensor's mesh does not hold all ranks"
                raise UnknownLayoutError(msg)
            key = (shape, tuple(ranks.shape), tuple(ranks.flatten().tolist()), splits)
            return key, lambda: _of_mesh(shape, ranks, splits)
        if isinstance(value, ShardedTensor):
            shards = _shards(value)
            return shards, lambda: shards
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            return shape, lambda: ((rank, (0,) * len(shape), shape) for rank in range(self._world))
        return None, lambda: ((rank, None, ()) for rank in range(self._world))


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


def _of_mesh(
    shape: Numbers, ranks: torch.Tensor, splits: Sequence[int | None]
) -> list[tuple[int, Numbers, Numbers]]:
    """Return each rank's chunk, split as `torch.chunk` does."""
    held = []
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


def _shards(tensor: ShardedTensor) -> tuple[tuple[int, Numbers, Numbers], ...]:
    """Return rank, offsets and sizes of each shard of FSDP1's tensors.

    Raises:
        UnknownLayoutError: A shard has no rank.
    """
    shards = []
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
        nbytes: Bytes of the full tensor, at least 1: what it weighs when copies are shared out.
    """

    name: str
    layout: Layout
    size: torch.Size | None
    properties: TensorProperties | None
    nbytes: int


class SharedPlan:
    """Which rank writes which chunk, found by every rank alone: what torch decides with all plans at hand.

    Args:
        state: Flattened, as this rank has it.
        paths: Where each entry was before it was flattened.
        world: How many ranks there are.

    Raises:
        UnknownLayoutError: This rank cannot know what the others have.
    """

    def __init__(self, state: Mapping[str, Any], paths: Mapping[str, Any], world: int) -> None:
        layouts, digest = Layouts(world), hashlib.sha256(repr((world, sorted(paths.items()))).encode())
        self.world, self.paths = world, paths
        self.entries: list[Entry] = []
        for name, value in state.items():
            key, layout = layouts.find(value)
            entry = _entry(name, value, layout)
            digest.update(repr((name, type(value).__name__ if entry.size else "", entry.properties, key)).encode())
            self.entries.append(entry)
        self.digest = digest.digest()
        self._writers = self._share_out()
        self._orders: dict[int, list[int]] = {}

    def _share_out(self) -> dict[tuple[int, int], int]:
        """Return who writes each chunk that several ranks have: the one with the least until then.

        Chunks come in the order in which the ranks, one after the other, list them.
        """
        loads = [0] * self.world
        writers: dict[tuple[int, int], int] = {}
        left = sum(len(entry.layout.copies) for entry in self.entries)
        for rank in range(self.world):
            if not left:
                break
            for number, entry in enumerate(self.entries):
                for chunk in entry.layout.by_rank[rank]:
                    if chunk not in entry.layout.copies:
                        loads[rank] += entry.nbytes
                    elif (number, chunk) not in writers:
                        holders = set(entry.layout.chunks[chunk].holders)  # torch takes the first in a set's order
                        chosen = min(holders, key=loads.__getitem__)
                        loads[chosen] += entry.nbytes
                        writers[number, chunk] = chosen
                        left -= 1
        return writers

    def writer(self, entry: int, chunk: int) -> int:
        """Return the rank that writes a chunk."""
        writer = self._writers.get((entry, chunk))
        return self.entries[entry].layout.chunks[chunk].holders[0] if writer is None else writer

    def written_by(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the entry and the chunk of each item that a rank writes, in the order of its plan."""
        writers = self._writers
        for number, entry in enumerate(self.entries):
            for chunk in entry.layout.by_rank[rank]:
                if chunk not in entry.layout.copies or writers[number, chunk] == rank:
                    yield number, chunk

    def order(self, entry: int) -> Sequence[int]:
        """Return the chunks of an entry in the order of the ranks that write them: so the index lists them."""
        layout = self.entries[entry].layout
        numbers = range(len(layout.chunks))
        if not layout.copies:
            return numbers
        if entry not in self._orders:
            self._orders[entry] = sorted(numbers, key=lambda chunk: (self.writer(entry, chunk), chunk))
        return self._orders[entry]

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
            self._check(number, chunk, item)
            if self.writer(number, chunk) == rank:
                items.append(item if item.tensor_data is None else replace(item, index=self._index(number, chunk)))
        return replace(local, items=items)

    def _index(self, entry: int, chunk: int) -> MetadataIndex:
        place = chunk if not self.entries[entry].layout.copies else self.order(entry).index(chunk)
        return MetadataIndex(self.entries[entry].name, self.entries[entry].layout.chunks[chunk].offsets, place)

    def _check(self, entry: int, chunk: int, item: WriteItem) -> None:
        known, planned = self.entries[entry], self.entries[entry].layout.chunks[chunk]
        offsets = None if item.index.offset is None else tuple(item.index.offset)
        data = item.tensor_data
        sizes = () if data is None else tuple(data.chunk.sizes)
        is_value = item.type is WriteItemType.BYTE_IO
        if (item.index.fqn, offsets, sizes, is_value) != (
            known.name,
            planned.offsets,
            planned.sizes,
            known.size is None,
        ):
            msg = f"this rank has another part of {known.name} than planned"
            raise UnknownLayoutError(msg)


def _entry(name: str, value: Any, layout: Layout) -> Entry:
    if isinstance(value, ShardedTensor):
        found = value.metadata().tensor_properties
        properties = TensorProperties(
            dtype=found.dtype,
            layout=found.layout,
            requires_grad=found.requires_grad,
            memory_format=found.memory_format,
            pin_memory=found.pin_memory,
        )
        return Entry(name, layout, value.metadata().size, properties, _nbytes(value.metadata().size, found.dtype))
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        properties = TensorProperties.create_from_tensor(local)
        return Entry(name, layout, value.size(), properties, _nbytes(value.size(), value.dtype))
    return Entry(name, layout, None, None, 1)


def _nbytes(size: torch.Size, dtype: torch.dtype) -> int:
    return size.numel() * dtype.itemsize or 1
