"""Which rank holds which chunk of a tensor, for all ranks, as every rank can work it out from mesh and shape."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdplaunch.runtime.torch_internals.sharded_tensor import ShardedTensor

Numbers = tuple[int, ...]


class UnknownLayoutError(Exception):
    """Not every rank can know where the shards of a tensor are."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor.

    Attributes:
        offsets: Its first element's place in the tensor; None for a value that is no tensor.
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
