"""Let a forked worker end without taking apart what it shares with the others.

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
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

_INJECTING = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables that load profilers and checkers into a process; they may count on the C library's exit."""
_ENDING_IN_C = ("mpi4py.MPI",)
"""Modules whose last handler only the interpreter's complete end calls (Py_AtExit)."""
_shared: dict[str, ModuleType] = {}
_status: list[int] = []
"""The status this process is about to end with, once that is known."""


def register_last() -> None:
    """Have the exit of this process and of its forks end with `_let_go`. Call before anything else registers."""
    atexit.register(_let_go)


def share_modules() -> None:
    """Remember the modules there are; forks made from now on leave them alone at their exit."""
    kept = {name: module for name, module in sys.modules.items() if name not in ("__main__", "sys", "builtins")}
    _shared.update(kept)
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
    """Ends the process when it is finalized."""

    def __init__(self, status: int) -> None:
        # Bound here: no module can be counted on when the finalizer runs.
        self._status = status
        self._collect: Callable[[], int] = gc.collect
        self._exit = ctypes.PyDLL(None).exit  # C's, for the exit handlers of C code

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
    if _status and not any(name in sys.modules for name in _ENDING_IN_C) and _are_flushed():
        sys.fsdplaunch_end = _End(_status[-1])  # type: ignore[attr-defined]
    for name, module in _shared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def _are_flushed() -> bool:
    """Return whether the standard streams take what is left in them; if not, the interpreter says so."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except Exception:  # a stream of the script's own may raise anything
        return False
    return True
