"""Files whose bytes are on their way to disk while more are written, so that the final sync has little to do."""

import ctypes
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

STRETCH = 32 * 2**20
"""Bytes after which the kernel is asked to begin writing; by itself it waits until much of the memory is full."""
_BEGIN_WRITING = 2  # linux/fs.h: SYNC_FILE_RANGE_WRITE


class EarlyFile(io.BufferedWriter):
    """A file that asks for its data to be written out stretch by stretch."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), buffer_size=2**20)
        self._asked = 0
        self._reached = 0

    def write(self, data: Any, /) -> int:
        """Write, and every so often ask the kernel to begin."""
        count = super().write(data)
        self._reached += count
        if self._reached - self._asked >= STRETCH:
            _ask(self.fileno(), self._asked, self._reached - self._asked)
            self._asked = self._reached
        return count


class EarlyFileSystem(FileSystem):
    """Torch's files of a checkpoint, with such files for what is written."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        if mode == "wb":
            with EarlyFile(Path(path)) as file:
                yield file
            return
        with super().create_stream(path, mode) as stream:
            yield stream


def _ask(descriptor: int, start: int, count: int) -> None:
    """Begin to write a range, without waiting. Nothing depends on it: the file is synced in the end."""
    begin = _sync_file_range()
    if begin is not None:
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), _BEGIN_WRITING)


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    return cast("Callable[..., int] | None", getattr(ctypes.CDLL(None), "sync_file_range", None))
