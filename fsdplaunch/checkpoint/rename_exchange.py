"""Swap two names of a file system in one step, so that each exists at every moment."""

import ctypes
import os
import sys
from pathlib import Path

# linux/fcntl.h and linux/fs.h
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def rename_exchange(one: Path, other: Path) -> bool:
    """Exchange two files or folders; False where the kernel or the file system cannot: then nothing is done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    if rename is None:
        return False
    done: int = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0
