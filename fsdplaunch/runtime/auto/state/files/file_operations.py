"""Have what a script does with a file that all ranks saved be done once: rename it, copy it, remove it.

`torch.save(state, tmp); os.replace(tmp, path)` is one line after the other in one process. Over ranks rank 0 has
written the one file there is; the second rank to rename it would find none, and one that is late would remove what
rank 0 has made since. So all ranks meet at such a line, and rank 0 does it.
"""

import functools
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.files.path_store import from_open_folder
from fsdplaunch.runtime.auto.state.gather import ShardGatherer
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.collectives.rank_group import from_rank_0
from fsdplaunch.runtime.patch import replaced

_MOVES, _REMOVALS = ("rename", "replace"), ("remove", "unlink")
_WITH_TARGET = (*((os, name) for name in (*_MOVES, "link", "symlink")), (shutil, "copyfile"))
_OF_ONE_PATH = (*((os, name) for name in _REMOVALS), (shutil, "rmtree"))


@contextmanager
def doing_once(hook_context: HookContext) -> Iterator[None]:
    """Let operations on files that all ranks saved be done by rank 0, while the others wait for it."""
    doing = _Doing(hook_context)
    with ExitStack() as stack:
        for owner, name in _WITH_TARGET:
            stack.enter_context(replaced(owner, name, doing.with_target(name)))
        for owner, name in _OF_ONE_PATH:
            stack.enter_context(replaced(owner, name, doing.of_one_path(name)))
        yield


class _Doing:
    """The operations of one rank."""

    def __init__(self, hook_context: HookContext) -> None:
        self.rank = hook_context.rank
        self.saved = hook_context.saved
        self.process = os.getpid()

    def with_target(self, name: str) -> Callable[[Any], Any]:
        """Return what stands for an operation with a source and a target."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def operate(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
                source, target = _text(src, kwargs), _text(dst, kwargs)
                if source and name == "symlink":  # told from where the link is
                    source = os.path.join(os.path.dirname(target), source)  # noqa: PTH118, PTH120
                if not self._is_saved(source, target):
                    return original(src, dst, *args, **kwargs)
                done = self._once(name, original, src, dst, *args, **kwargs)
                if name in _MOVES:
                    self._drop_own(source)
                self.saved.remove(target)
                self.saved.move(source, target, keep=name not in _MOVES)
                return done

            return operate

        return make

    def of_one_path(self, name: str) -> Callable[[Any], Any]:
        """Return what stands for a removal; one of names that differ by rank is each rank's own."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def operate(path: Any, *args: Any, **kwargs: Any) -> Any:
                gone = _text(path, kwargs)
                if not self._is_saved(gone):
                    return original(path, *args, **kwargs)
                call = self._once if self.saved.same(gone) else _own
                done = call(name, original, path, *args, **kwargs)
                self.saved.remove(gone)
                return done

            return operate

        return make

    def _is_saved(self, *paths: str) -> bool:
        if not self.saved.touched(*filter(None, paths)) or rank0_saves() is None:
            return False
        return os.getpid() == self.process and not _by_this_package()

    def _drop_own(self, source: str) -> None:
        """Remove the file that this rank has made under a name of its own, and rank 0 has not written."""
        if self.rank and not self.saved.same(source) and os.path.isfile(source):  # noqa: PTH113
            os.unlink(source)  # noqa: PTH108

    def _once(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Have rank 0 do it, where all ranks are here or it is alone; the others raise what it raises."""
        gathering = ShardGatherer(f"{original.__module__.replace('posix', 'os')}.{name}", keep=self.rank == 0)
        gathering.meet()
        done, failure = None, None
        try:
            if self.rank == 0:
                done = inspect.unwrap(original)(*args, **kwargs)
        except OSError as error:
            failure = error
        if gathering.together:
            done, failure = from_rank_0((done, failure))
        else:
            gathering.leave()
        if failure is not None:
            raise failure
        return done


def _own(_name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def _by_this_package() -> bool:
    """Return whether not the script does this, but a save of this package's or of a library that it calls."""
    frame = sys._getframe(3)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module == "fsdplaunch.runtime.script":
            return False
        if module.startswith("fsdplaunch."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _text(path: Any, kwargs: dict[str, Any]) -> str:
    """Return a path as text; "" for what is none, or is from an open folder."""
    named = isinstance(path, str | os.PathLike) and not from_open_folder(kwargs)
    return os.fsdecode(path) if named else ""
