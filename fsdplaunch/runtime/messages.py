"""What the runtime tells the person who launched it: lines on rank 0's stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsdplaunch.runtime.rank import rank
from fsdplaunch.standard_streams import write_error
from fsdplaunch.terminal_text import printable

unequal: list[str] = []
"""What was said to differ from one process, on this rank; `fsdplaunch check --compare` names it as the cause."""


def say_unequal(text: str) -> None:
    """Say once, on rank 0, that something is computed that one process would not compute; remember it on all."""
    if text not in unequal:
        unequal.append(text)
        say(text)


def say(text: str) -> None:
    """Write one line to stderr, on rank 0 only."""
    if _once and text in _said:
        return
    if _once:
        _said.add(text)
    if rank() == 0:
        write_error(f"fsdplaunch: {printable(text)}\n")


@contextmanager
def saying_once() -> Iterator[None]:
    """Say nothing that was said in such a block before: a script may copy its model for every save."""
    _once.append(True)
    try:
        yield
    finally:
        _once.pop()


_once: list[bool] = []
_said: set[str] = set()


def say_anywhere(text: str) -> None:
    """Write one line to stderr, on whichever rank finds something out that rank 0 may not know."""
    write_error(f"fsdplaunch: rank {rank()}: {printable(text)}\n")
