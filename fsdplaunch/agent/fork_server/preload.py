"""Import once what every worker needs, and judge whether this process may then be forked. Runs in the fork server.

A fork copies only the thread that forks. Locks that another thread holds at that moment stay held for ever in the
child, and CUDA refuses to work in a child of a process that has used it. Modules that start threads or open the
GPU when they are imported therefore rule out forking; the workers then start as fresh interpreters.
"""

import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Preloaded:
    """What came of it.

    Attributes:
        obstacle: Why workers cannot be forked from this process, or None when they can.
        notes: What the user should be told once.
        before: The variables as they were before anything was imported.
        changes: Variables that importing changed, with their value before (None: absent) and after. Importing in a
            fresh interpreter would have changed them, too.
    """

    obstacle: str | None = None
    notes: tuple[str, ...] = ()
    before: Mapping[str, str] = field(default_factory=dict)
    changes: Mapping[str, tuple[str | None, str]] = field(default_factory=dict)


def import_all(names: Iterable[str], *, before: Mapping[str, str]) -> Preloaded:
    """Import modules one after the other; one that fails is named in a note, and left to the script.

    Args:
        names: Module names.
        before: The variables as they were before anything was imported.
    """
    notes: list[str] = []
    obstacle = None
    collecting = gc.isenabled()
    gc.disable()  # nothing that importing makes is garbage; looking for some costs a fifth of the time
    try:
        for name in names:
            note = _import(name)
            notes += [note] if note else []
            obstacle = obstacle or _obstacle(name)
    finally:
        if collecting:
            gc.enable()
    changes = {name: (before.get(name), now) for name, now in os.environ.items() if before.get(name) != now}
    return Preloaded(obstacle=obstacle, notes=tuple(notes), before=before, changes=changes)


def freeze() -> None:
    """Keep the collector away from everything there is, so that children share its memory."""
    gc.collect()
    gc.freeze()


def _import(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a module may even raise SystemExit; the script will see it
        return (
            f"launch.preload: importing {name} failed ({type(error).__name__}: {error}); workers go on without it"
        )
    return None


def _obstacle(name: str) -> str | None:
    if uses_gpu():
        return f"importing {name} opened the GPU"
    if has_threads():
        return f"importing {name} started threads"
    return None


def uses_gpu() -> bool:
    """Return whether this process has used a GPU: torch says so, or it holds one of the driver's devices open."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return True
    return any(target.startswith("/dev/nvidia") for target in _open_files())


def _open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    targets = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        try:
            targets.append(str(entry.readlink()))
        except OSError:
            continue  # the descriptor of this very listing
    return targets


def fork() -> int:
    """Fork, without the warning that Python 3.12 gives where there are threads: here they have been thought of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def has_threads() -> bool:
    """Return whether this process has a second thread that would not survive a fork in good order.

    Libraries with helper threads of their own may end them around a fork (OpenBLAS does, and starts them again
    when it needs them). So a child is made and thrown away first; the threads that are left then are the others.
    """
    folder = Path("/proc/self/task")
    if not folder.is_dir() or len(list(folder.iterdir())) == 1:
        return False
    child = fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return len(list(folder.iterdir())) > 1
