"""What each rank writes of a sharded state, decided by every rank alone and by all of them alike."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from fsdplaunch.runtime.saving.sharded.layouts import Layout, Layouts, UnknownLayoutError
from fsdplaunch.runtime.torch_internals.sharded_tensor import ShardedTensor


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
