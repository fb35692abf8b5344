"""Host memory for the copies of one save's tensors.

One buffer per process holds them. It stays between saves, as large as the largest: fresh memory costs more than
the copying.
"""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.torch_internals.dtensor import local_tensor, with_local_tensor
from fsdplaunch.runtime.torch_internals.sharded_tensor import ShardedTensor, TensorShard, with_local_shards

_ALIGNMENT = 64
State = Any


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of this rank and where its copy goes.

    Attributes:
        source: The tensor.
        place: Host memory of the same shape and dtype, at first without its values.
        is_shard: Whether it is a shard of a sharded tensor.
    """

    source: torch.Tensor
    place: torch.Tensor
    is_shard: bool


class HostBuffer:
    """Memory for one save at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def place(self, state: State) -> tuple[State, list[PlacedTensor]]:
        """Return `state` with a place in this buffer for each tensor of this rank, and what is to be copied there.

        Dictionaries, lists and tuples are made anew; other values are kept, they are not changed in place.

        Returns:
            The new state, and what is to be copied.
        """
        tensors = {id(tensor): (tensor, is_shard) for tensor, is_shard in _tensors(state)}
        sizes = [tensor.numel() * tensor.element_size() for tensor, _ in tensors.values()]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._reserve(sum(rooms))
        memory, position = self._memory.numpy(), 0
        placed: dict[int, PlacedTensor] = {}
        for (tensor, is_shard), size, room in zip(tensors.values(), sizes, rooms, strict=True):
            placed[id(tensor)] = PlacedTensor(tensor.detach(), _place(memory, position, size, tensor), is_shard)
            position += room
        return _rebuilt(state, {key: each.place for key, each in placed.items()}), list(placed.values())

    def _reserve(self, size: int) -> None:
        if size <= len(self._memory):
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
        if torch.cuda.is_available():
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # a five-hundredth of the page faults
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)


def _place(memory: Any, position: int, size: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return room for a tensor, as a storage by itself: of a part of one, torch writes a copy or all of it."""
    if not size:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=position)
    return flat.view(tensor.dtype).view(tensor.shape)


def _tensors(state: State) -> Iterator[tuple[torch.Tensor, bool]]:
    """Return this rank's tensors of a state, in its order, each with whether it is a shard."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)
    elif isinstance(state, DTensor):
        yield local_tensor(state), True
    elif isinstance(state, ShardedTensor):
        yield from ((shard.tensor, True) for shard in state.local_shards())
    elif isinstance(state, torch.Tensor):
        yield state, False


def _rebuilt(state: State, places: dict[int, torch.Tensor]) -> State:
    if isinstance(state, dict):
        return {key: _rebuilt(value, places) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_rebuilt(value, places) for value in state)
    if isinstance(state, DTensor):
        # Not from_local: that would move the copy back to the mesh's device.
        return with_local_tensor(state, places[id(local_tensor(state))])
    if isinstance(state, ShardedTensor):
        shards = [TensorShard(places[id(shard.tensor)], shard.metadata) for shard in state.local_shards()]
        return with_local_shards(state, shards)
    return places[id(state)] if isinstance(state, torch.Tensor) else state
