"""Call a function when a module has been imported, now or later.

A worker must not import a library that its script may never use, only to adapt it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Adapt = Callable[[Any], None]


def once_imported(name: str, adapt: Adapt) -> None:
    """Call `adapt(module)` right after module `name` is executed, or at once when it has been.

    Args:
        name: Dotted name of the module.
        adapt: Called once, before the importing statement sees the module.
    """
    if name in sys.modules:
        adapt(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, adapt))


def before_import(name: str, start: Callable[[], None]) -> None:
    """Call `start()` right before a package is imported, or at once when it has been.

    For what adapts several of its modules by `once_imported`: it need not be imported itself until then.
    """
    if name in sys.modules:
        start()
    else:
        sys.meta_path.insert(0, _Starting(name, start))


class _Starting(importlib.abc.MetaPathFinder):
    """Stands first in the search until one package is looked for, and leaves."""

    def __init__(self, name: str, start: Callable[[], None]) -> None:
        self.name = name
        self.start = start

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Call the function when the package is looked for, and find it as the others do."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        self.start()
        return _found_by_others(fullname, path, target)


class _Waiting(importlib.abc.MetaPathFinder):
    """Stands first in the search, finds one module as the others would, and leaves."""

    def __init__(self, name: str, adapt: Adapt) -> None:
        self.name = name
        self.adapt = adapt

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find module `name` with the finders behind this one, and have its execution followed by `adapt`."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = _found_by_others(fullname, path, target)
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, self.adapt)
        return spec


def _found_by_others(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _follow(loader: Any, adapt: Adapt) -> None:
    """Replace the loader's own method, not its class's: the loader belongs to this one module."""
    execute = loader.exec_module

    def execute_and_adapt(module: ModuleType) -> None:
        execute(module)
        adapt(module)

    loader.exec_module = execute_and_adapt
