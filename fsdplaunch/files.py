"""How files are written and read: whole or not at all, JSON of strangers within bounds, the kernel's own.

And the standard streams, closed before this process began, or left by a script as objects that only write:
trainers copy what they print to a file by a class with `write` alone, put in the place of both.

Standard library only.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

TIMES, SPARE = 20, 64 * 2**20
"""What a text may come to in memory: so many times its size, and so many bytes for any."""
# Bytes that Python takes, as seen in 3.11, for the smallest value of a kind, its place in what holds it included.
_LIST, _TABLE, _EMPTY_TABLE, _TEXT, _ITEM = 96, 200, 64, 56, 40
MEMORY, PROCESS = Path("/proc/meminfo"), Path("/proc/self/status")
"""Sizes of memory: this node's, this process's."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a hidden path beside `path` that becomes `path` when the block ends well.

    On any exception what stands there is removed, and `path` is left as it was. Other processes, also on other
    nodes that share the file system, may write the same file meanwhile.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def durable_file(path: Path, mode: str = "wb") -> Iterator[IO[bytes]]:
    """Open a file to write, and have it on disk when the block ends well."""
    with path.open(mode) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


class JsonError(ValueError):
    """The text is not JSON, or not one that this program reads."""


def parse_json(text: bytes | str) -> Any:
    """Return what a JSON text holds.

    Raises:
        JsonError: It is none, nested too deeply, or asks for much more memory than its size.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if _most_bytes(data) > TIMES * len(data) + SPARE:
        msg = f"its values would take more than {TIMES} times its size and {SPARE >> 20} MiB of memory"
        raise JsonError(msg)
    try:
        return json.loads(text)
    except RecursionError:
        msg = "it is nested too deeply"
        raise JsonError(msg) from None
    except ValueError as error:  # also numbers of thousands of digits, and bytes that are not text
        raise JsonError(str(error)) from None


def _most_bytes(data: bytes) -> int:
    """Return an upper limit of the memory that a text's values take; marks inside of texts are counted, too."""
    if len(data) * _LIST < SPARE:
        return 0
    return (
        data.count(b"[") * _LIST
        + data.count(b"{") * _TABLE
        - data.count(b"{}") * (_TABLE - _EMPTY_TABLE)
        + data.count(b'"') // 2 * _TEXT
        + data.count(b",") * _ITEM
        + len(data)
    )


class Maybe:
    """A kind that null passes, too."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def matches(value: Any, kind: Any) -> bool:
    """Return whether a value that somebody else has written is of a kind.

    Args:
        value: As `parse_json` returns it.
        kind: A type, a function that says so, a list of one kind, or a dict: the kinds of an object's fields.
            Fields that it does not name may be anything, those with a ? may be missing, * stands for all of them.
    """
    if isinstance(kind, Maybe):
        return value is None or matches(value, kind.kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(matches(item, kind[0]) for item in value)
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            return False
        if "*" in kind:
            return all(matches(item, kind["*"]) for item in value.values())
        plain = {name.removesuffix("?"): name for name in kind}
        return all(
            matches(value[name], kind[full]) if name in value else name != full for name, full in plain.items()
        )
    return isinstance(value, kind) if isinstance(kind, type) else bool(kind(value))


def read_text(path: Path) -> str:
    """Return a file's text; "" where it is not there or may not be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def read_size(path: Path, name: str) -> int | None:
    """Return one of the sizes that MEMORY or PROCESS names, in bytes: `MemTotal:  16301 kB`; else None."""
    lines = read_text(path).splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def write_error(text: str) -> None:
    """Write to stderr, the script's or, where that takes nothing, the process's own."""
    streams: tuple[Any, ...] = (sys.stderr, sys.__stderr__)
    for stream in streams:
        if callable(getattr(stream, "write", None)) and getattr(stream, "closed", False) is not True:
            stream.write(text)
            flush(stream)
            return


def flush_both() -> None:
    """Flush stdout and stderr, as far as they can be."""
    flush(sys.stdout)
    flush(sys.stderr)


def flush(stream: Any) -> None:
    """Flush a stream, if it can be."""
    if callable(getattr(stream, "flush", None)) and getattr(stream, "closed", False) is not True:
        stream.flush()


def open_missing_streams() -> None:
    """Give closed standard streams a place, or the next files that are opened take it."""
    for place in range(3):
        try:
            os.fstat(place)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
