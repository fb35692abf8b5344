"""Tensors of which a file tells before their values are here: filled when they are written, and freed after that.

Needed so that rank 0 holds one full tensor at a time, and not all that is in the file.
"""

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fsdplaunch.runtime.torch_internals.tensors import identity_of, storage_identity
from fsdplaunch.runtime.torch_internals.torch_save import around_writing

Fill = Callable[[], torch.Tensor]
SMALLEST = 1 << 16
"""Bytes below which a tensor is not worth a mapping of its own."""


class LateStorages:
    """The storages of one file. Their values are asked for in one order, by ranks that write and by others.

    Attributes:
        is_writing: Whether a storage that torch.save writes now is filled before.
    """

    def __init__(self) -> None:
        self.is_writing = False
        self._waiting: dict[int, tuple[torch.Tensor, mmap.mmap]] = {}
        self._fills: dict[int, Fill] = {}

    def tensor(self, shape: torch.Size, dtype: torch.dtype, fill: Fill) -> torch.Tensor:
        """Return a tensor in host memory that takes none until it is written.

        Args:
            shape: Of at least one element.
            dtype: Its dtype.
            fill: Returns its values, of the same shape and dtype.
        """
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # pages of shared memory would stay
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=private)
        late = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
        self._waiting[storage_identity(late)] = late, memory
        self._fills[storage_identity(late)] = fill
        return late

    def take_part(self, fill: Fill) -> None:
        """Remember what this rank, which does not write, has to take part in when others fill a storage."""
        self._fills[len(self._fills)] = fill

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Fill each storage before torch.save writes it, and free its memory then."""
        self.is_writing = True
        try:
            with around_writing(self._write):
                yield
        finally:
            self.is_writing = False

    def _write(self, storage: torch.UntypedStorage, go_on: Callable[[], None]) -> None:
        key = identity_of(storage)
        if key not in self._waiting:
            go_on()
            return
        late, memory = self._waiting[key]
        late.copy_(self._take(key)())
        go_on()
        memory.madvise(mmap.MADV_DONTNEED)

    def _take(self, key: int) -> Fill:
        """Return what gives the values of a storage, and forget it: it is asked once."""
        del self._waiting[key]
        return self._fills.pop(key)

    def drain(self) -> None:
        """Ask for all values that were not written, and drop them: other ranks ask for them as well."""
        for fill in self._fills.values():
            fill()
        self._fills.clear()
        self._waiting.clear()
