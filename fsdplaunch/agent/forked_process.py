"""Make a forked process what a freshly started `python -u` would be, and let it end fast. In the worker-to-be.

What a fork inherits and an exec would not: session, standard streams, variables, signal handling, the state of
random number generators, the command line that `ps` shows.

At its end an interpreter destroys every module, and the C library every static object. In a fork that means
copying the pages of torch only to free them: 0.3 s of processor time for each worker. What the script made ends as
ever: its modules, its objects with `__del__`, its unflushed files, its exit handlers, those of C code it loaded.

What is left alone is still alive when the interpreter has ended, and libraries that count their objects then
(triton, built with nanobind) would report hundreds as leaked. So the process ends one step earlier: after the
script's modules, before the interpreter's own state.
"""

import atexit
import ctypes
import gc
import io
import os
import random
import signal
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdplaunch.parent_death import die_with_parent

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""What a shell answers for a command that is not there or cannot be executed."""
_INJECTING = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables that load profilers and checkers into a process; they may count on the C library's exit."""
_ENDING_IN_C = ("mpi4py.MPI",)
"""Modules whose last handler only the interpreter's complete end calls (Py_AtExit)."""
_shared: dict[str, ModuleType] = {}
_status: list[int] = []
"""The status this process is about to end with, once that is known."""


def become_worker(
    request: Mapping[str, Any],  # as `ForkServer.start_worker` sends it
    *,
    # What each variable was before the imports, and after: that stays where nobody says otherwise.
    changes: Mapping[str, tuple[str | None, str]],
    streams: Sequence[int],  # descriptors of its standard input, output and error output
    parent: int,  # the process id of the fork server, which it must not outlive
) -> None:
    """Turn this process, just forked, into the worker that was requested. Does not return when it executes."""
    die_with_parent(signal.SIGKILL, parent=parent)
    os.setsid()
    for place, descriptor in enumerate(streams):
        os.dup2(descriptor, place, inheritable=True)
    for descriptor in streams:
        os.close(descriptor)
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    environ = request["environ"]
    if request["execute"]:
        argv = request["argv"]
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and ignored signals stay ignored across an exec
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        try:
            os.execvpe(argv[0], argv, environ)  # noqa: S606  (no shell is the point)
        except OSError as error:  # said on its error output, as a shell would
            os.write(2, f"{argv[0]}: {(error.strerror or str(error)).lower()}\n".encode())
            os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)
    set_environ(environ | {name: new for name, (old, new) in changes.items() if environ.get(name) == old})
    renew_streams()
    renew_randomness()
    sys.orig_argv = request["shown_as"]
    show_as(request["shown_as"])
    gc.enable()


def set_environ(environ: Mapping[str, str]) -> None:
    """Replace the variables, in the C library too, where native code reads them."""
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)


def renew_streams() -> None:
    """Make the standard streams anew: the inherited ones remember what their descriptors were."""
    for place, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        old = getattr(sys, name)  # None where it was closed at the interpreter's start
        manner = {"encoding": old.encoding, "errors": old.errors} if old is not None else {"encoding": "utf-8"}
        raw: Any = io.FileIO(place, mode, closefd=False)
        raw.name = f"<{name}>"
        # Python -u itself wraps the raw stream for what is written, without a buffer.
        stream: Any = io.BufferedReader(raw) if mode == "r" else raw
        text: Any = io.TextIOWrapper(stream, **manner, newline="\n", write_through=True)
        text.mode = mode
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def renew_randomness() -> None:
    """Give each worker a state of its own, as separate interpreters have; torch's begins alike on a node."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def leave_files() -> None:
    """Let go of the inherited folder and standard streams: nobody waits for the end of their output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(nothing, place)
    os.close(nothing)
    os.chdir("/")


def show_as(argv: Sequence[str]) -> None:
    """Write another command line where `ps` and `pgrep -f` read it, as far as the present one's room allows."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
        text = b"\0".join(map(os.fsencode, argv))[: max(0, end - start - 1)]
        if start and text:
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))


def register_last() -> None:
    """Have the exit of this process and of its forks end with `_let_go`. Call before anything else registers."""
    atexit.register(_let_go)


def share_modules() -> None:
    """Remember the modules there are; forks made from now on leave them alone at their exit.

    So do torch's finalizers of them, which would take every operator out of its registry.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        if (alive := finalizer.peek()) is not None and str(alive[1].__module__).startswith("torch."):
            finalizer.atexit = False
    own = ("__main__", "sys", "builtins")
    _shared.update({name: module for name, module in sys.modules.items() if name not in own})
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_shared))  # for ever: outlives this module's own end


def skip_shared_destructors() -> None:
    """Have this process's exit stop short of the C++ destructors of libraries that are loaded now.

    Exit handlers run last in, first out: those registered from now on run before these two, which flush C's own
    files and end the process with its status. Only glibc can do that; elsewhere everything is destroyed.
    """
    libc = ctypes.CDLL(None)
    if any(os.environ.get(name) for name in _INJECTING) or not hasattr(libc, "on_exit"):
        return
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


@contextmanager
def noting_status() -> Iterator[None]:
    """Note the status that the body gives this process: 0, or what it hands to `sys.exit`."""
    try:
        yield
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            _status.append(leaving.code)
        raise
    _status.append(0)


class _End:
    def __init__(self, status: int) -> None:
        # Bound here: no module can be counted on when the finalizer runs. C's exit, for the handlers of C code.
        self._status, self._collect, self._exit = status, gc.collect, ctypes.PyDLL(None).exit

    def __del__(self) -> None:
        self._collect()
        self._exit(self._status)


def _let_go() -> None:
    """Take the shared modules out of the interpreter's list, which it would destroy, and set the process's end.

    The last thing the interpreter clears while finalizers run is `sys`, in the order in which its names were set.
    """
    if not _shared:
        return
    gc.collect()  # finalizers that are due now may still want to import
    with suppress(Exception):  # a stream that takes nothing more, of which the interpreter tells
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        if _status and not any(name in sys.modules for name in _ENDING_IN_C):
            sys.fsdplaunch_end = _End(_status[-1])  # type: ignore[attr-defined]
    for name, module in _shared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
