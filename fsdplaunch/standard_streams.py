"""Stdout and stderr: closed before this process began, or left by a script as objects that only write.

Trainers copy what they print to a file by a class with `write` alone, put in the place of both.
"""

import os
import sys
from typing import Any


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
