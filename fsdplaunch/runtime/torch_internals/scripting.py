"""How `torch.jit.script` knows torch's functions: C++ ones by identity, those in Python by their source."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_instead_of: dict[int, Callable[..., Any]] = {}
"""By the identity of what stands for a function of torch written in Python: that function; all versions."""


def known_to_scripts(owner: Any, original: Any) -> bool:
    """Return whether a thing is a function of torch, which scripted code may name.

    To be asked before another stands in its place: torch lists its own at the first question; all versions.
    """
    if not isinstance(owner, ModuleType) or owner.__name__.partition(".")[0] != "torch" or not callable(original):
        return False
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table()
    return True


def scripted_as(instead: Any, original: Any) -> None:
    """Let `torch.jit.script` compile `original` where code names what stands in its place; all versions."""
    builtins: Any = torch.jit._builtins
    if name := builtins._find_builtin(original):
        builtins._register_builtin(instead, name)
    else:
        _instead_of[id(instead)] = original


def not_scripted(instead: Any) -> None:
    """Forget what `scripted_as` was told; all versions."""
    builtins: Any = torch.jit._builtins
    builtins._get_builtin_table().pop(id(instead), None)
    _instead_of.pop(id(instead), None)


@contextmanager
def resolving_as_torch() -> Iterator[None]:
    """Look up the names in a function of torch where torch wrote it, not where its stand-in was; all versions."""
    internal: Any = torch._jit_internal
    resolve = internal.createResolutionCallbackFromClosure

    def of_original(function: Any) -> Any:
        return resolve(_original(function))

    internal.createResolutionCallbackFromClosure = of_original
    try:
        yield
    finally:
        internal.createResolutionCallbackFromClosure = resolve


def _original(function: Any) -> Any:
    while id(function) in _instead_of:
        function = _instead_of[id(function)]
    return function
