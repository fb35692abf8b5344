"""How a worker ends when something was raised: one record for the agent, one print, one exit status."""

import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from fsdplaunch.errors import EXIT_FAILED, LaunchError
from fsdplaunch.runtime.script import user_traceback
from fsdplaunch.standard_streams import write_error
from fsdplaunch.terminal_text import MOST, printable, shortened, text_of
from fsdplaunch.worker_status import BEGIN_HIDDEN, END_HIDDEN, MARKED

EXIT_INTERRUPTED = 130
_MOST_OF_STACK = 64 * 2**10
NOTE = "fsdplaunch: "
"""How a note begins that this package adds to another's error."""
_STDERR = 2
"""The process's own: what the script has in its place may be no file."""
STUCK_SECONDS = 30.0
"""How long a failed worker's threads and exit handlers may take before the process is ended."""


def conclude(failure: BaseException) -> int:
    """Record and print what ended the script, and return the status to exit with.

    Ctrl-C ends quietly with 130. `sys.exit(n)` keeps n. Anything else prints its traceback, from the user's first
    line on, and ends with 1. Errors of this package that no line of the user's raised print as one sentence.
    """
    if isinstance(failure, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    # The agent sees a failure only when the process is gone. A thread that waits in a collective for ranks that
    # wait for this one would keep it alive, so a C-level timer ends it and prints where it waited.
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True, file=_STDERR)
    if isinstance(failure, SystemExit):
        return _leave(failure)
    lines = user_traceback(failure)
    text = "".join(traceback.format_exception(type(failure), failure, lines))
    short = isinstance(failure, LaunchError) and lines is None
    words = text_of(failure)
    record(words if short else f"{type(failure).__name__}: {words}{_advice(failure)}", "" if short else text)
    with _for_the_file():
        if short:
            write_error(f"error: {printable(words)}\n")
        else:
            _print(failure, lines, text)
    return EXIT_FAILED


def _print(failure: BaseException, lines: TracebackType | None, text: str) -> None:
    """Call the hook: the script's, if it set one. Torch's reads the exception's traceback, not the argument."""
    try:
        sys.excepthook(type(failure), failure.with_traceback(lines), lines)
    except Exception:  # one of the script's own, or torch's, which flushes what may have no flush
        write_error(text)


def _advice(failure: BaseException) -> str:
    """Return what this package has noted at another's error, as the hint that the launcher's report prints."""
    notes = [
        str(note).removeprefix(NOTE) for note in getattr(failure, "__notes__", ()) if str(note).startswith(NOTE)
    ]
    return "\nhint: " + " ".join(notes).replace("\n", " ") if notes else ""


@contextmanager
def _for_the_file() -> Iterator[None]:
    """Mark what is printed as not for the terminal, where a launcher will report it; a script's own hook is."""
    own = sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch.")
    if os.environ.get(MARKED) != "1" or own:
        yield
        return
    write_error(BEGIN_HIDDEN.decode())
    try:
        yield
    finally:
        write_error(END_HIDDEN.decode())


def _leave(leaving: SystemExit) -> int:
    """Treat `sys.exit(value)` as the interpreter does, and record a value that means failure."""
    try:
        words = str(leaving.code)
    except Exception:
        words = text_of(leaving)
    record(f"SystemExit: {words}", "")
    if isinstance(leaving.code, int):
        return leaving.code
    if len(words) > MOST:
        with _for_the_file():
            write_error(f"{words}\n")
    write_error(f"{shortened(words)}\n")
    return EXIT_FAILED


def record(message: str, call_stack: str) -> None:
    """Write the failure where the elastic agent looks for it, in torch's layout.

    Written here and not by torch's own handler because a failure may come before torch is imported.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # Torch's own time stamp counts whole seconds; which rank failed first shows in the nanoseconds.
    now = time.time_ns()
    # The whole text is on the rank's error output; agents and launchers pass this on.
    call_stack, message = call_stack[-_MOST_OF_STACK:], shortened(message)
    details = {"py_callstack": call_stack, "timestamp": str(now // 10**9), "time_ns": now}
    data = {"message": {"message": message, "extraInfo": details}}
    try:
        Path(path).write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        write_error(f"cannot record the failure in {path}: {error.strerror}\n")
