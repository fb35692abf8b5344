"""What the runtime prints to the person who launched it: lines on rank 0's stderr, with the line of their script.

And which of torch's own warnings they need not see.
"""

import functools
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdplaunch.display_text import printable
from fsdplaunch.files import write_error
from fsdplaunch.runtime.rank import rank

unequal: list[str] = []
"""What was said to differ from one process, on this rank; `fsdplaunch check --compare` names it as the cause."""


def say_unequal(text: str) -> None:
    """Say once, on rank 0, that something is computed that one process would not compute; remember it on all."""
    if text not in unequal:
        unequal.append(text)
        say(text)


def say(text: str) -> None:
    """Write one line to stderr, on rank 0 only."""
    if rank() == 0:
        write_error(f"fsdplaunch: {printable(text)}\n")


def say_anywhere(text: str) -> None:
    """Write one line to stderr, on whichever rank finds something out that rank 0 may not know."""
    write_error(f"fsdplaunch: rank {rank()}: {printable(text)}\n")


@functools.cache
def is_user_file(file: str) -> bool:
    """Return whether a source file is the user's own: not of Python, of this package, or installed."""
    return not file.startswith(_FOREIGN) and "site-packages" not in file and "dist-packages" not in file


_FOREIGN = (
    str(Path(__file__).parents[1]) + "/",
    *{sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")},
    "<",
)


def script_line() -> str:
    """Return the line of the user's own code that is running: `train.py:31`."""
    return next(_running(), "the script")


def calling_lines() -> str:
    """Return the line of the user's own code that is running, and those that led to it.

    `train.py:31, called at train.py:80`: a function is at the same line for whoever calls it.
    """
    return ", called at ".join(_running())


def calling_stack() -> tuple[str | int, ...]:
    """Return the calls that are running of the user's code and of libraries, torch and this package aside.

    A library's training is at one line of the user's, and computes at many. Of each call the file, its function's
    first line and the place in its code: looked up for each operator, and the line itself takes longer to find.
    """
    frame, calls = sys._getframe(1), list[str | int]()
    while frame is not None:
        code = frame.f_code
        if _is_shown(code.co_filename, frame.f_globals.get("__name__")):
            calls += (code.co_filename, code.co_firstlineno, frame.f_lasti)
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(calls)


@functools.cache
def _is_shown(file: str, module: str | None) -> bool:
    by_torch = str(module).partition(".")[0] == "torch"
    return not by_torch and (not file.startswith(_FOREIGN) or "-packages" in file)


def calling_library() -> str | None:
    """Return the module of the library whose code is running, but for torch; None for the user's own code."""
    frame = sys._getframe(1)
    while frame is not None:
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if is_user_file(file):
            return None
        if module.partition(".")[0] not in ("torch", "fsdplaunch") and "-packages" in file:
            return module
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _running() -> Iterator[str]:
    """Yield the lines of the user's own code that are running, the innermost first."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            yield f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]


def being_built() -> Iterator[Any]:
    """Yield the objects whose constructors are running, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_varnames:
            yield frame.f_locals.get(code.co_varnames[0])
        frame = frame.f_back  # type: ignore[assignment]


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress notices of future changes, of typed storages (2.9's own), of ranks that load alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
