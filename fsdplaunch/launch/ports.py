"""Whether a port is free here, and who holds it otherwise. In the command line."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def find_holder(port: int) -> str | None:
    """Return who listens on a port, in words; None when it is free.

    Args:
        port: 0 is always free.
    """
    return None if port == 0 or is_free(port) else _holder(port)


def is_free(port: int) -> bool:
    """Return whether a server could listen on all addresses now, as torch's store does."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104  (see above)
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
            trial.listen(1)
            return True
    return False


def describe_process(pid: int) -> str:
    """Return a process's number, user and program, as far as they can be seen."""
    folder = Path(f"/proc/{pid}")
    words = []
    with suppress(OSError, KeyError, ImportError):
        import pwd

        words.append(f"user {pwd.getpwuid(folder.stat().st_uid).pw_name}")
    with suppress(OSError):
        words.append((folder / "comm").read_text(encoding="utf-8", errors="replace").strip())
    return f"process {pid} ({', '.join(words) or 'of another user or container'})"


def _holder(port: int) -> str:
    inodes = {inode for name in ("tcp", "tcp6") for inode in _listeners(name, port)}
    for link in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with suppress(OSError):
            target = str(link.readlink())
            if target.startswith("socket:[") and target[8:-1] in inodes:
                return describe_process(int(link.parts[2]))
    return "another program"


def _listeners(name: str, port: int) -> Iterator[str]:
    """Return the kernel's numbers of the sockets that listen on a port."""
    with suppress(OSError):
        for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if int(words[1].rpartition(":")[2], 16) == port and words[3] == "0A":  # LISTEN, proc(5)
                yield words[9]
