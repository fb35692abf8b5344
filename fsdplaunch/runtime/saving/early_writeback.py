"""Files whose bytes are on their way to disk while more are written, so that the final sync has little to do."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from fsdplaunch.checkpoint.writeback import Writeback


class EarlyFile(io.BufferedWriter):
    """A file that the kernel begins to write out while it grows."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), buffer_size=2**20)
        self._writeback = Writeback(self.fileno())
        self._written = 0

    def write(self, data: Any, /) -> int:
        """Write, and every so often have the kernel begin."""
        count = super().write(data)
        self._written += count
        self._writeback.reached(self._written)
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
