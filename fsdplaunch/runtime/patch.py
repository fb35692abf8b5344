"""Exchange one attribute of an object that is not ours for as long as a context lasts."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fsdplaunch.runtime.compat.import_hook import once_imported

_PACKAGE = str(Path(__file__).parents[1])


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(original)` in the place of `owner.name`, and the original back at the end.

    Args:
        owner: A class or a module.
        name: The attribute. One that a class only inherits, or does not have, is taken off it again.
        make: Gets the original, None if there is none, and returns what stands in its place. Code that
            `torch.jit.script` compiles gets the original where it is a function of torch.
    """
    from fsdplaunch.runtime.torch_internals.tensors import known_to_scripts, not_scripted, scripted_as

    own = vars(owner).get(name)
    original = getattr(owner, name, None)
    scripted = known_to_scripts(owner, original)
    instead = make(original)
    setattr(owner, name, instead)
    if scripted:
        scripted_as(instead, original)
    try:
        yield
    finally:
        if scripted:
            not_scripted(instead)
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def replaced_once_imported(module: str, path: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Do what `replaced` does from when a module is imported on, which this does not import.

    Args:
        module: Its name.
        path: Of what is in it: `function`, or `Class.method`.
        make: As for `replaced`.
    """
    owner, _, name = path.rpartition(".")
    with ExitStack() as hooks:
        running = [True]

        def adapt(imported: Any) -> None:
            if running:
                hooks.enter_context(replaced(getattr(imported, owner) if owner else imported, name, make))

        once_imported(module, adapt)
        try:
            yield
        finally:
            running.clear()


def original_of(function: Any) -> Any:
    """Return the function that was there before this package's stood in its place, or the function itself."""
    while hasattr(function, "__wrapped__") and _is_ours(function):
        function = function.__wrapped__
    return function


def _is_ours(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and str(code.co_filename).startswith(_PACKAGE)


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
