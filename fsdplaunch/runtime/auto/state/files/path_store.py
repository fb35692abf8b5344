"""Let ranks know what others do at a path, through the process group's store.

Nothing here is collective: ranks need not come to the same path, or at the same time.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from fsdplaunch.runtime.collectives.hang_detector import store

_Answer = TypeVar("_Answer")
PATIENCE_SECONDS = 60.0
"""How long what another rank does at a path is waited for: it may have died in it."""
_PAUSE_SECONDS = 0.005


def is_rank(process: int) -> bool:
    """Return whether this is a rank's own process, in its group: not one that it forked, nor after the run.

    Args:
        process: The rank's process id.
    """
    return os.getpid() == process and dist.is_initialized()


def from_open_folder(kwargs: dict[str, Any]) -> bool:
    """Return whether a path is given relative to an open folder, `dir_fd=`: it has no name that others know."""
    return any(value is not None for name, value in kwargs.items() if name.endswith("dir_fd"))


def key_of(group: str, text: str) -> str:
    """Return the key of the store for a path, or for a call with its paths.

    Args:
        group: What is kept under the key, a word or several with `/` between.
        text: The path or call; may hold bytes that are no text, as `os.fsdecode` gives them.
    """
    return f"fsdplaunch/{group}/{hashlib.sha256(os.fsencode(text)).hexdigest()[:24]}"


def answers() -> bool:
    """Return whether the store does; it ends with its rank."""
    return _asked(lambda: store().check(["fsdplaunch"]) is not None, otherwise=False)


def count(key: str, amount: int) -> int:
    """Add to a count that all ranks share.

    Returns:
        What it has come to; 0 where the store has ended.
    """
    return _asked(lambda: int(store().add(key, amount)), otherwise=0)


def note(key: str, value: str = "") -> None:
    """Let the others know something; nothing where the store has ended."""
    _asked(lambda: store().set(key, value), otherwise=None)


def is_noted(key: str) -> bool:
    """Return whether a rank has noted this; False where the store has ended."""
    return _asked(lambda: bool(store().check([key])), otherwise=False)


def noted(key: str) -> str | None:
    """Return what was noted last; None for nothing, and where the store has ended."""
    return _asked(lambda: str(store().get(key).decode()) if store().check([key]) else None, otherwise=None)


def forget(*keys: str) -> None:
    """Remove notes and counts; nothing where the store has ended."""
    _asked(lambda: [store().delete_key(key) for key in keys], otherwise=[])


def take(key: str, free: str, owner: str) -> str | None:
    """Take what one rank at a time has, where it is free.

    Args:
        key: Names it.
        free: What is noted while no rank has it; an empty text where nothing has been noted.
        owner: What to note.

    Returns:
        What is noted then; None where the store has ended.
    """
    return _asked(lambda: str(store().compare_set(key, free, owner).decode()), otherwise=None)


def wait_for_note(key: str, seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait until a rank has noted something, or the store has ended, or for some seconds.

    Returns:
        Whether it is noted.
    """
    wait_until(lambda: is_noted(key) or not answers(), seconds)
    return is_noted(key)


def _asked(ask: Callable[[], _Answer], *, otherwise: _Answer) -> _Answer:
    """Return the store's answer; another where it has ended with its rank, which it may at any call."""
    try:
        return ask()
    except RuntimeError:
        return otherwise


@contextmanager
def counted(key: str) -> Iterator[None]:
    """Count something as under way."""
    count(key, 1)
    try:
        yield
    finally:
        count(key, -1)


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until other ranks have done something, or for some seconds.

    Args:
        condition: Tells whether they have.
        seconds: How long at most.
    """
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
