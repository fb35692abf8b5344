"""Let a forked worker end without taking apart what it shares with the others.

At its end an interpreter destroys every module, and the C library every static object. In a fork that means
copying the pages of torch only to free them: 0.3 s of processor time for each worker. What the script made ends as
ever: its modules, its objects with `__del__`, its unflushed files, its exit handlers, those of C code it loaded.
"""

import atexit
import ctypes
import gc
import os
import sys
from types import ModuleType

_INJECTING = ("LD_PRELOAD", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
"""Variables that load profilers and checkers into a process; they may count on the C library's exit."""
_shared: dict[str, ModuleType] = {}


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


def _let_go() -> None:
    """Take the shared modules out of the interpreter's list, which it would destroy."""
    if not _shared:
        return
    gc.collect()  # finalizers that are due now may still want to import
    for name, module in _shared.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
