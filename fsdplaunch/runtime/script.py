"""Run a user's script as `python SCRIPT` or `python -m MODULE` would, and record how it ended.

`runpy` is not used: it puts the old `__main__` back and empties the script's namespace when the script ends,
but exit handlers, threads, `multiprocessing` children and pickled objects of the script still need both. Here the
new `__main__` module stays for the rest of the process, as it does under the interpreter itself.
"""

import builtins
import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fsdplaunch.display_text import MOST, printable, shortened, text_of
from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.files import write_error
from fsdplaunch.run_dir import BEGIN_HIDDEN, END_HIDDEN, MARKED, note_start


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTarget:
    """What the command line names."""

    name: str  # the script's path or the module's name, as written
    is_module: bool
    arguments: tuple[str, ...]  # what the script finds in `sys.argv[1:]`


def parse_target(argv: list[str]) -> ScriptTarget:
    """Read `[-m] SCRIPT_OR_MODULE [ARGS...]`; everything after the name belongs to the script."""
    is_module = argv[:1] == ["-m"]
    rest = argv[1:] if is_module else argv
    if not rest:
        msg = "no script to run"
        raise UsageError(msg, hint="name a script, or a module after -m")
    return ScriptTarget(name=rest[0], is_module=is_module, arguments=tuple(rest[1:]))


def run_target(target: ScriptTarget) -> None:
    """Execute the target as `__main__`; whatever it raises, SystemExit included, comes out."""
    if target.is_module:
        _set_first_path(str(Path.cwd()))
        spec = importlib.util.find_spec(target.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target.name}.__main__")
        module, code = _found(spec, target.name)
    else:
        module, code = _script(target.name)
    sys.argv = [str(module.__file__) if target.is_module else target.name, *target.arguments]
    sys.modules["__main__"] = module
    note_start("script")
    exec(code, module.__dict__)  # noqa: S102  (running the user's program is the purpose)


def _script(name: str) -> tuple[ModuleType, CodeType]:
    file = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  (as python does: absolute, and otherwise as written)
    path = Path(file)
    if path.is_dir() or zipfile.is_zipfile(path):
        _set_first_path(str(path))
        return _found(importlib.machinery.PathFinder.find_spec("__main__", [str(path)]), name)
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        msg = f"cannot read script {name}: {error.strerror}"
        raise UsageError(msg, hint="give the path of a Python file, or a module after -m") from None
    _set_first_path(str(path.resolve().parent))
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    return _main_module(file=file, loader=loader), compile(source, file, "exec", dont_inherit=True)


def _found(spec: importlib.machinery.ModuleSpec | None, name: str) -> tuple[ModuleType, CodeType]:
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        msg = f"no module to run at {name}"
        raise UsageError(msg, hint="check the name and the folder the launch is started in")
    code = loader.get_code(spec.name)
    module = _main_module(file=spec.origin, loader=loader)
    module.__dict__.update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    return module, code


def _main_module(*, file: str | None, loader: Any) -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=file, __loader__=loader, __builtins__=builtins, __cached__=None, __annotations__={}
    )
    return module


def _set_first_path(folder: str) -> None:
    """Put the script's folder where python puts it, in place of the folder this worker was started in."""
    if sys.flags.safe_path:
        return
    if sys.path and sys.path[0] in ("", str(Path.cwd())):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


EXIT_INTERRUPTED = 130
_MOST_OF_STACK = 64 * 2**10
NOTE = "fsdplaunch: "  # how a note begins that this package adds to another's error
_STDERR = 2  # the process's own: what the script has in its place may be no file
STUCK_SECONDS = 30.0  # how long a failed worker's threads and exit handlers may take before the process is ended


def conclude(failure: BaseException) -> int:
    """Record and print what ended the script, and return the status to exit with.

    Ctrl-C ends quietly with 130. `sys.exit(n)` keeps n. Anything else prints its traceback, from the user's first
    line on, and ends with 1. Errors of this package that no line of the user's raised print as one sentence and
    end with their own status.
    """
    if isinstance(failure, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    # The agent sees a failure only when the process is gone. A thread that waits in a collective for ranks that
    # wait for this one would keep it alive, so a C-level timer ends it and prints where it waited.
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True, file=_STDERR)
    if isinstance(failure, SystemExit):
        # Treat `sys.exit(value)` as the interpreter does, and record a value that means failure.
        try:
            words = str(failure.code)
        except Exception:
            words = text_of(failure)
        status = failure.code if isinstance(failure.code, int) else EXIT_FAILED
        record(f"SystemExit: {words}", "", status & 0xFF)
        if isinstance(failure.code, int):
            return status
        if len(words) > MOST:
            with _for_the_file():
                write_error(f"{words}\n")
        write_error(f"{shortened(words)}\n")
        return EXIT_FAILED
    lines, above = failure.__traceback__, (str(Path(__file__).parent) + os.sep, "<frozen importlib")
    while lines is not None and lines.tb_frame.f_code.co_filename.startswith(above):
        lines = lines.tb_next  # to the user's first line, if one was reached
    text = "".join(traceback.format_exception(type(failure), failure, lines))
    short = isinstance(failure, LaunchError) and lines is None
    words = _words_of(failure)
    notes = [str(note) for note in getattr(failure, "__notes__", ())]  # this package's are hints in the report
    advice = " ".join(note.removeprefix(NOTE) for note in notes if note.startswith(NOTE)).replace("\n", " ")
    named = f"{type(failure).__name__}: {words}" + (f"\nhint: {advice}" if advice else "")
    status = failure.exit_code if isinstance(failure, LaunchError) and short else EXIT_FAILED
    record(words if short else named, "" if short else text, status)
    with _for_the_file():
        if short:
            write_error(f"error: {printable(words)}\n")
        else:
            try:
                sys.excepthook(type(failure), failure.with_traceback(lines), lines)
            except Exception:  # one of the script's own, or torch's, which flushes what may have no flush
                write_error(text)
    return status


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


def _words_of(failure: BaseException) -> str:
    """Return an exception's text; of a CheckpointException, which holds those of several ranks, what they say."""
    said: dict[str, list[str]] = {}
    if type(failure).__name__ == "CheckpointException":
        for rank, (error, *_) in failure.failures.items():  # type: ignore[attr-defined]
            said.setdefault(f"{type(error).__name__}: {text_of(error)}", []).append(str(rank))
    return "\n".join(f"{text} (rank {', '.join(ranks)})" for text, ranks in said.items()) or text_of(failure)


def record(message: str, call_stack: str, status: int) -> None:
    """Write the failure where the elastic agent looks for it, in torch's layout, with the status to come.

    The launcher may end this process, because of another one's failure, before it has exited. Written here and not
    by torch's own handler because a failure may come before torch is imported.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # Torch's own time stamp counts whole seconds; which rank failed first shows in the nanoseconds.
    now = time.time_ns()
    # The whole text is on the rank's error output; agents and launchers pass this on.
    call_stack, message = call_stack[-_MOST_OF_STACK:], shortened(message)
    details = {"py_callstack": call_stack, "timestamp": str(now // 10**9), "time_ns": now, "status": status}
    data = {"message": {"message": message, "extraInfo": details}}
    try:
        Path(path).write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        write_error(f"cannot record the failure in {path}: {error.strerror}\n")
