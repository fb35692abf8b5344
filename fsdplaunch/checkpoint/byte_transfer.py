"""Bytes at the speed of the disk: copied inside the kernel, and written back early."""

import errno
import os
from collections.abc import Callable

from fsdplaunch.errors import CheckpointError

# One call copies at most this much, so that progress moves, Ctrl-C is heard, and the disk has work early.
STEP = 16 * 2**20
BUFFER = 8 * 2**20
_UNSUPPORTED = {
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
    errno.EBADF,
    errno.ETXTBSY,
}


def write_all(target: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(target, view, offset)
        view = view[written:]
        offset += written


def read_all(source: int, offset: int, count: int) -> bytes:
    """Return `count` bytes from `offset` on, or what the file has of them."""
    parts = []
    while count and (part := os.pread(source, count, offset)):
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


class Copier:
    """Copies runs inside the kernel, as `cp` does; once that proves unsupported here, through a buffer."""

    def __init__(self) -> None:
        self.in_kernel = True

    def copy(
        self,
        source: int,  # descriptor to read
        offset: int,
        target: int,  # descriptor to write
        target_offset: int,
        length: int,
        *,
        tick: Callable[[int], None],  # called with the number of bytes after each step
    ) -> None:
        """Copy `length` bytes from `source` at `offset` to `target` at `target_offset`.

        Raises:
            CheckpointError: When the source ends early.
            OSError: When reading or writing fails.
        """
        done = 0
        while done < length:
            count, copied = min(STEP, length - done), 0
            if self.in_kernel:
                try:
                    copied = os.copy_file_range(source, target, count, offset + done, target_offset + done)
                except OSError as problem:
                    if problem.errno not in _UNSUPPORTED:
                        raise
                # Some file systems answer 0 instead of an error; only the plain read tells the end of a file.
                self.in_kernel = copied > 0
            if not copied:
                data = os.pread(source, min(count, BUFFER), offset + done)
                write_all(target, data, target_offset + done)
                copied = len(data)
            if not copied:
                msg = f"a data file ends {length - done} bytes early"
                hint = "it changed while it was read; merge again when nothing writes to it"
                raise CheckpointError(msg, hint=hint)
            done += copied
            tick(copied)


# So much is handed over at once: enough for large requests, little enough to keep the disk busy from the start.
STRIDE = 16 * 2**20


class Writeback:
    """Follows a file that is written from its start to its end, and has the kernel begin to write it out.

    That is what Linux does where it is told that pages are not needed: those that are written already it forgets.
    """

    def __init__(self, fd: int) -> None:
        self.fd, self.begun = fd, 0

    def reached(self, position: int) -> None:
        """Say that all bytes before `position` were written."""
        if position - self.begun >= STRIDE:
            os.posix_fadvise(self.fd, self.begun, position - self.begun, os.POSIX_FADV_DONTNEED)
            self.begun = position
