"""Files that nobody vouches for: opened without waiting, read up to a limit, checked, refused in safe words."""

import errno
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from fsdplaunch.checkpoint.byte_transfer import read_all

COPY_AGAIN = "copy the checkpoint again, or use an older one"
"""What to do about a damaged file; a hint of errors."""


class InvalidFileError(ValueError):
    """The bytes hold something that has no place in this kind of file."""


class MissingFileError(InvalidFileError):
    """There is no such file."""


class UnreadableError(InvalidFileError):
    """The file is there, and the system cannot read it: a disk or a server that fails, or no permission."""


def refuse(reason: str) -> NoReturn:
    """Raise the error of a file that says what such files do not say.

    Raises:
        InvalidFileError: Always.
    """
    raise InvalidFileError(reason)


def short(text: str, limit: int = 80) -> str:
    """Return `text` as a quoted, escaped and bounded piece of an error message."""
    shown = ascii(text if len(text) <= limit else text[:limit] + "...")
    return shown if len(shown) <= 2 * limit else shown[: 2 * limit] + "..."


MAX_DIMENSIONS = 64
LARGEST = 2**63 - 1


def check_count(value: Any, what: str) -> int:
    """Return `value` when it is a size or offset that fits a file."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        refuse(f"{what} is {value if type(value) is int and abs(value) < 2**128 else type(value).__name__}")
    return value


def check_counts(value: Any, what: str) -> tuple[int, ...]:
    """Return `value` when it is a tuple of sizes or offsets that fit a file."""
    if type(value) is not tuple or len(value) > MAX_DIMENSIONS:
        refuse(f"{what} is not a short tuple")
    for item in value:
        check_count(item, what)
    return value  # the same object: a file may refer to it a million times


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: None,
}


def real_path(path: Path) -> Path:
    """Return where a path leads, through every link; links that lead in a circle lead to themselves."""
    return Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a circle, before Python 3.13


def odd_kind(path: Path) -> str | None:
    """Return what `path` is when it is there and not a regular file, nor a link to one, else None."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "no file")
    except OSError as problem:
        return "a link that leads nowhere" if path.is_symlink() else None if is_missing(problem) else "unreadable"


def is_missing(problem: OSError) -> bool:
    """Return whether an error says that nothing is there; any other says nothing about that."""
    return isinstance(problem, FileNotFoundError | NotADirectoryError) or problem.errno == errno.ELOOP


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Raises:
        InvalidFileError: It is something else, or cannot be opened.
    """
    try:
        # Without NONBLOCK a named pipe would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        kind = odd_kind(path)
        if kind not in (None, "unreadable"):
            refuse(f"it is not a regular file but {kind}")
        msg = f"it cannot be opened: {problem.strerror}"
        raise (MissingFileError if is_missing(problem) else UnreadableError)(msg) from None
    try:
        kind = _KINDS.get(stat.S_IFMT(os.fstat(fd).st_mode), "no file")
    except OSError as problem:
        os.close(fd)
        msg = f"it cannot be read: {problem.strerror}"
        raise UnreadableError(msg) from None
    if kind is not None:
        os.close(fd)
        refuse(f"it is not a regular file but {kind}")
    return fd


def read_regular(path: Path, limit: int) -> bytes:
    """Return all of a regular file of at most `limit` bytes.

    Raises:
        InvalidFileError: It is something else, larger, or cannot be read.
    """
    try:
        with open(open_regular(path), "rb", closefd=True) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as problem:  # of a disk that fails, or a file of the kernel's
        msg = f"it cannot be read: {problem.strerror}"
        raise UnreadableError(msg) from None
    if size > limit or len(data) > limit:
        refuse(f"it is larger than {limit >> 20} MiB, more than such a file is expected to need")
    return data


def read_exactly(fd: int, offset: int, count: int) -> bytes:
    """Return `count` bytes of an open file from `offset` on.

    Raises:
        InvalidFileError: The file ends before.
    """
    data = read_all(fd, offset, count)
    if len(data) != count:
        refuse(f"it ends at {offset + len(data)} bytes")
    return data
