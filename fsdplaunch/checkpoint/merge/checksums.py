"""Check the stored checksums of what a merge takes, while it copies.

The kernel moves data from file to file: nothing passes through here. Threads read each chunk again, from the
page cache it was just copied through, while the next ones are copied. A damaged chunk ends the merge before its
output appears.
"""

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from fsdplaunch.checkpoint.crc32 import crc32
from fsdplaunch.checkpoint.invalid_file import short
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.readers.pieces import Piece
from fsdplaunch.errors import CheckpointError

# Reading and checking this much is quicker than handing it to a thread.
_SMALL = 64 * 2**10
_BUFFER = 2**20
_MAX_THREADS = 4
_DAMAGED = "the checkpoint is damaged there; copy it again or use an older one"


class ChecksumCheck:
    """Checks chunks of one checkpoint, each once; leaving the block without an error waits for all of them.

    Args:
        sources: The checkpoint's files.
        wanted: Whether to check at all.
        processes: How many processes do so at once, and share the processors.
    """

    def __init__(self, sources: DataFiles, *, wanted: bool = True, processes: int = 1) -> None:
        self._sources, self._wanted = sources, wanted
        self._done: set[tuple[str, int, int]] = set()
        self._waiting: deque[tuple[str, Piece, Future[int]]] = deque()
        self._threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // processes))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fsdplaunch-checksum")
        self._local = threading.local()
        self.checked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._waiting:
                self._compare()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, piece: Piece) -> None:
        """Check the chunk `piece` of the tensor `name`, now or soon.

        Raises:
            CheckpointError: This chunk, or one before it, does not match its checksum.
        """
        place = (piece.place.file, piece.file_offset, piece.place.offset if piece.packed else piece.data_length)
        if not self._wanted or piece.crc is None or place in self._done:
            return
        self._done.add(place)  # many tensors may lie in one storage
        self.checked += piece.data_length
        if piece.packed or piece.data_length <= _SMALL:
            check_crc(self._sources, name, piece, crc_of(piece, self._sources))
            return
        while len(self._waiting) > self._threads:
            self._compare()
        fd = os.dup(self._sources.descriptor(piece.place.file))
        self._waiting.append((name, piece, self._pool.submit(self._crc_in_file, fd, piece)))

    def _compare(self) -> None:
        name, piece, future = self._waiting.popleft()
        check_crc(self._sources, name, piece, future.result())

    def _crc_in_file(self, fd: int, piece: Piece) -> int:
        """Return the checksum of what stands in the file, and close the descriptor."""
        try:
            if not hasattr(self._local, "buffer"):
                self._local.buffer = memoryview(bytearray(_BUFFER))
            buffer, crc, position, left = self._local.buffer, 0, piece.file_offset, piece.data_length
            while left and (count := os.preadv(fd, [buffer[: min(left, _BUFFER)]], position)):
                crc = crc32(buffer[:count], crc)
                position += count
                left -= count
            return crc
        finally:
            os.close(fd)


def crc_of(piece: Piece, sources: DataFiles) -> int:
    """Return the checksum of a chunk's data, decompressed if it has to be."""
    crc = 0
    for offset in range(0, piece.data_length, _BUFFER):
        crc = crc32(sources.read_piece(piece, offset, min(_BUFFER, piece.data_length - offset)), crc)
    return crc


def check_crc(sources: DataFiles, name: str, piece: Piece, crc: int) -> None:
    """Compare the checksum of a chunk of the tensor `name` with the stored one, if there is one.

    Raises:
        CheckpointError: They differ.
    """
    if piece.crc is None or piece.crc == crc:
        return
    path = sources.folder / piece.place.file
    msg = f"{path}: the bytes of {short(name)} at {piece.file_offset} do not match their checksum"
    raise CheckpointError(msg, hint=_DAMAGED)
