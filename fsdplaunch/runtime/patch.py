"""Change what is not ours: an attribute for a while, a module once it is imported, the first step of an optimizer.

A worker must not import a library that its script may never use, only to adapt it; nor a part of this package that
matters only where something else has imported it. Nothing here imports torch by itself.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Adapt = Callable[[Any], None]


def once_imported(name: str, adapt: Adapt) -> None:
    """Call `adapt(module)` right after a module is executed, or at once when it has been."""
    if name in sys.modules:
        adapt(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, after=adapt))


def before_import(name: str, start: Callable[[], None]) -> None:
    """Call `start()` right before a package is imported, or at once when it has been."""
    if name in sys.modules:
        start()
    else:
        sys.meta_path.insert(0, _Finder(name, before=start))


class _Finder(importlib.abc.MetaPathFinder):
    """Stands first in the search until one module is looked for, leaves, and finds it as the others do."""

    def __init__(self, name: str, *, before: Callable[[], None] | None = None, after: Adapt | None = None) -> None:
        self.name, self.before, self.after = name, before, after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Call `before`, find the module, and have its execution followed by `after`."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        if self.before is not None:
            self.before()
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None and self.after is not None:
            loader: Any = spec.loader
            execute, adapt = loader.exec_module, self.after

            def execute_and_adapt(module: ModuleType) -> None:
                execute(module)
                adapt(module)

            loader.exec_module = execute_and_adapt  # not its class's: the loader belongs to this one module
        return spec


def wrap(owner: Any, path: str, call: Callable[..., Any]) -> None:
    """Have `call(original, ...)` stand for a module's or class's function from now on, if there is one.

    The path is that of what is in the owner: `function`, or `Class.method`.
    """

    def make(original: Any) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return instead

    replace(owner, path, make)


def replace(owner: Any, path: str, make: Callable[[Any], Any]) -> None:
    """Put `make(original)` in the place of a function as `wrap` does: one call less where it is called often."""
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    found = inspect.getattr_static(owner, name, None)
    if found is None:
        return
    kind: Any = type(found) if isinstance(found, staticmethod | classmethod) else None
    original = getattr(owner, name) if kind is None else found.__func__
    instead = functools.wraps(original)(make(original))
    setattr(owner, name, instead if kind is None else kind(instead))


def wrap_once_imported(module: str, path: str, call: Callable[..., Any]) -> None:
    """Do what `wrap` does once a module of this name is imported, or at once when it has been."""
    once_imported(module, lambda imported: wrap(imported, path, call))


ABANDON_GROUP = "fsdplaunch.runtime.device.abandon_group"
GROUP_IS_ABANDONED = "fsdplaunch.runtime.device.group_is_abandoned"
PROCESSES_END = "fsdplaunch.runtime.auto.ddp.raise_refused"
MISSING_GRADIENTS_NOTE = "fsdplaunch.runtime.api.gradients.missing_gradients_note"
PRINT_SHARDED = "fsdplaunch.runtime.inspection.describe.print_waiting"
REPORT_END = "fsdplaunch.runtime.collectives.waits.report_end"
WEIGHTS_USED = "fsdplaunch.runtime.loading.pretrained.weights_used"
RANK0_SAVES_OPEN = "fsdplaunch.runtime.auto.rank0.service.is_open"
RANK0_SAVES_END = "fsdplaunch.runtime.auto.rank0.service.note_end"
RANK0_SAVES_CLOSE = "fsdplaunch.runtime.auto.rank0.service.close"
WAIT_FOR_COPIES = "fsdplaunch.runtime.saving.background_save.wait_for_copies"
THREADS_END = "fsdplaunch.runtime.state_dict.gather.raise_failed"
FINISH_SAVES = "fsdplaunch.runtime.saving.background_save.finish_saves"

XLA_TO_SAVE = "fsdplaunch.runtime.xla.saving.to_save"
XLA_READ = "fsdplaunch.runtime.xla.saving.read"
XLA_CLIP = "fsdplaunch.runtime.xla.wrappers.clip_norm"
XLA_NO_SYNC = "fsdplaunch.runtime.xla.wrappers.unsynchronized"

FINISH_RECORD = "fsdplaunch.comparison.record.finish"
FINISH_MEASUREMENT = "fsdplaunch.runtime.measuring.finish"


def call_if_imported(function: str, *arguments: Any) -> Any:
    """Call the function of this name and return what it does; None while nothing has imported its module."""
    module, _, name = function.rpartition(".")
    return getattr(sys.modules[module], name)(*arguments) if module in sys.modules else None


def before_first_step(optimizers: Any, check: Callable[[], None]) -> None:
    """Call a function once, before the first step of any optimizer of the module `torch.optim.optimizer`.

    The hook stays afterwards and does nothing: torch goes over its hooks at that moment, and fails when one of
    them is taken out while there are others.
    """
    called = False

    def call(*_: Any) -> None:
        nonlocal called
        if not called:
            called = True
            check()

    optimizers.register_optimizer_step_pre_hook(call)


_PACKAGE = str(Path(__file__).parents[1])


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(original)` in the place of `owner.name`, and the original back at the end.

    An attribute that a class only inherits, or does not have, is taken off it again; `make` then gets None.
    """
    own = vars(owner).get(name)
    setattr(owner, name, make(getattr(owner, name, None)))
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def original_of(function: Any) -> Any:
    """Return the function that was there before this package's stood in its place, or the function itself."""
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        if code is None or not str(code.co_filename).startswith(_PACKAGE):
            break
        function = function.__wrapped__
    return function


@contextmanager
def own_attribute(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Give one object an attribute that stands before its class's, and back at the end what it had itself."""
    before = vars(thing).get(name)
    vars(thing)[name] = value
    try:
        yield
    finally:
        del vars(thing)[name]
        if before is not None:
            vars(thing)[name] = before
