"""The folder (0700) in which warm interpreters listen, one socket each.

It stands in XDG_RUNTIME_DIR, which the system empties at logout, or else in /tmp under the user's number. It is
opened once and looked at through its descriptor, so that nothing can be put in its place between look and use.
"""

import os
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

_NAME = "fsdplaunch_warm"
"""Not the prefix of `fsdplaunch.private_dir`, whose folders go with their processes."""
_SUFFIX = ".sock"
_FALLBACK = "/tmp"  # noqa: S108  (the folder in it is checked: owner, mode, no link)
_OTHERS = 0o077
_CREDENTIALS = struct.Struct("@iII")


class UnsafeFolderError(Exception):
    """The folder is not this user's alone."""


def folder_path(environ: Mapping[str, str]) -> str:
    """Return where the folder is, or would be."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and _is_private(runtime):  # noqa: PTH117  (a text among texts)
        return f"{runtime}/{_NAME}"
    return f"{_FALLBACK}/{_NAME}-{os.geteuid()}"


def _is_private(path: str) -> bool:
    with suppress(OSError):
        found = os.stat(path)  # noqa: PTH116
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return False


@contextmanager
def opened_folder(path: str, *, make: bool = False) -> Iterator[int]:
    """Give a descriptor of the folder.

    Args:
        path: The folder.
        make: Make it where it is not there.

    Raises:
        FileNotFoundError: It is not there.
        UnsafeFolderError: It is a link, another user's, or others may enter it.
    """
    if make:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)  # noqa: PTH102
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        msg = f"{path} is no folder of its own ({error.strerror})"
        raise UnsafeFolderError(msg) from None
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
            msg = f"{path} is not yours alone (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})"
            raise UnsafeFolderError(msg)
        yield folder
    finally:
        os.close(folder)


def socket_names(folder: int) -> list[str]:
    """Return the names of the sockets in an opened folder, without their suffix."""
    return sorted(name.removesuffix(_SUFFIX) for name in os.listdir(folder) if name.endswith(_SUFFIX))


def listen(folder: int, name: str) -> tuple[socket.socket, tuple[int, int]]:
    """Listen under a name, in the place of what listened there before; return the socket and its file's identity.

    Raises:
        OSError: The folder has gone, or is full.
    """
    own = f".{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with suppress(FileNotFoundError):
        os.unlink(own, dir_fd=folder)
    listener.bind(f"/proc/self/fd/{folder}/{own}")
    listener.listen(16)
    os.rename(own, name + _SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
    found = os.stat(name + _SUFFIX, dir_fd=folder, follow_symlinks=False)
    return listener, (found.st_dev, found.st_ino)


def connect(folder: int, name: str) -> socket.socket | None:
    """Connect to what listens under a name, as this user; None where nothing does. A dead socket is removed."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        end.connect(f"/proc/self/fd/{folder}/{name}{_SUFFIX}")  # refused where many wait that it has not answered
        end.setblocking(True)
        if peer_user(end) == os.geteuid():
            return end
    except ConnectionRefusedError:  # it was killed
        with suppress(OSError):
            os.unlink(name + _SUFFIX, dir_fd=folder)
    except OSError:
        pass
    end.close()
    return None


def peer_user(end: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel knows it."""
    _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)


def is_at(path: str, name: str, identity: tuple[int, int]) -> bool:
    """Return whether the socket's file is still the one that `listen` made."""
    with suppress(OSError):
        found = os.lstat(f"{path}/{name}{_SUFFIX}")
        return (found.st_dev, found.st_ino) == identity
    return False


def remove(path: str, name: str) -> None:
    """Remove a socket's file."""
    with suppress(OSError):
        os.unlink(f"{path}/{name}{_SUFFIX}")  # noqa: PTH108
