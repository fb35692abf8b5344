"""What the runtime tells the person who launched it: lines on rank 0's stderr."""

import sys

from fsdplaunch.runtime.rank import rank
from fsdplaunch.terminal_text import printable

unequal: list[str] = []
"""What was said to differ from one process, on this rank; `fsdplaunch check --compare` names it as the cause."""


def say_unequal(text: str) -> None:
    """Say, on rank 0, that something is computed that one process would not compute; remember it on all."""
    unequal.append(text)
    say(text)


def say(text: str) -> None:
    """Write one line to stderr, on rank 0 only."""
    if rank() == 0:
        sys.stderr.write(f"fsdplaunch: {printable(text)}\n")
        sys.stderr.flush()


def say_anywhere(text: str) -> None:
    """Write one line to stderr, on whichever rank finds something out that rank 0 may not know."""
    sys.stderr.write(f"fsdplaunch: rank {rank()}: {printable(text)}\n")
    sys.stderr.flush()
