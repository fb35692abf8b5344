"""Have the kernel write a file's pages out while it is still being written.

Left to itself it starts when the file is synced, and the disk waits for the copy, then the copy for the disk.
"""

import ctypes
import sys
from collections.abc import Callable

# So much is handed over at once: enough for large requests, little enough to keep the disk busy from the start.
STRIDE = 16 * 2**20
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h

Start = Callable[[int, int, int], object]


def _kernel_start() -> Start | None:
    """Return the call that starts writing bytes (descriptor, offset, length), where the system has one."""
    start = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform.startswith("linux") else None
    if start is None:
        return None
    start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

    def call(fd: int, offset: int, length: int) -> object:
        # What it answers does not matter: that all bytes are on disk is for the sync at the end to say.
        return start(fd, offset, length, _SYNC_FILE_RANGE_WRITE)

    return call


class Writeback:
    """Follows a file that is written from its start to its end."""

    def __init__(self, fd: int) -> None:
        self.fd, self.begun = fd, 0
        self.start = _kernel_start()

    def reached(self, position: int) -> None:
        """Say that all bytes before `position` were written."""
        if self.start is not None and position - self.begun >= STRIDE:
            self.start(self.fd, self.begun, position - self.begun)
            self.begun = position
