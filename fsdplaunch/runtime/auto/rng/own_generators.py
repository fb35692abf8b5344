"""Find the random generators that a loader's dataset keeps for itself, such as `self.rng` or one of its module's.

Needed because each rank reads its own rows only, from a generator that begins alike on all ranks: where one
process draws on from row to row, every rank draws for its first row what the batch's first row was to get.
"""

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from fsdplaunch.runtime.script_line import is_user_file

_MOST_OBJECTS = 2000
_MOST_ITEMS = 64
"""Of a list, or of a mapping: what holds more are data."""
_KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class OwnGenerators:
    """The generators that items are drawn from, apart from those of Python, numpy and torch that all share.

    Args:
        roots: The dataset, and what else makes batches.
        order: Generators that draw the order, which is not the items' own.
    """

    def __init__(self, *roots: Any, order: Iterable[Any] = ()) -> None:
        shared: list[Any] = [random.getstate, np.random.get_state]
        left_out = {id(each.__self__) for each in shared} | {
            id(each) for each in (torch.default_generator, *order)
        }
        self.found = [each for each in _generators(roots) if id(each) not in left_out]
        self._before = self.states()

    def states(self) -> list[Any]:
        """Return what can be compared of each."""
        return [_state(each) for each in self.found]

    def drew(self) -> bool:
        """Return whether anything was drawn since this was asked last."""
        before, self._before = self._before, self.states()
        return before != self._before


def _state(generator: Any) -> Any:
    """Return a generator's state, of types that compare to one truth value."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state(legacy=True)
        _, numbers, *position = state
        return (numbers.tobytes(), *position)
    return str(generator.bit_generator.state)


def _generators(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the generators that can be reached from objects of the user's own."""
    waiting, seen = list(roots), set[int]()
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _KINDS):
            yield each
        else:
            waiting += _held(each)


def _held(value: Any) -> list[Any]:
    """Return what an object holds, or what a function can reach; nothing of data."""
    for kinds, look in _LOOKS:
        if isinstance(value, kinds):
            return look(value)
    return [*vars(value).values(), *_methods(type(value))] if hasattr(value, "__dict__") else []


def _nothing(_: Any) -> list[Any]:
    return []


def _few(values: Any) -> list[Any]:
    return list(values) if len(values) <= _MOST_ITEMS else []


def _of_module(module: ModuleType) -> list[Any]:
    """Return the functions and generators of a module of the user's own."""
    own = is_user_file(vars(module).get("__file__") or "<")
    return [each for each in vars(module).values() if isinstance(each, (FunctionType, *_KINDS))] if own else []


def _methods(kind: type) -> list[Any]:
    """Return the methods of the user's own classes, and what else these hold."""
    return [
        value for cls in kind.__mro__ if not cls.__module__.startswith("torch.") for value in vars(cls).values()
    ]


def _reached(function: FunctionType) -> list[Any]:
    """Return what a function of the user's own has from around it: closures, defaults, names of its module."""
    if not is_user_file(function.__code__.co_filename):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    named = [function.__globals__.get(name) for name in _names(function.__code__)]
    return [*cells, *(function.__defaults__ or ()), *named]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code, and in that of functions inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


_LOOKS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (dict, lambda value: _few(value.values())),
    ((list, tuple), _few),
    (functools.partial, lambda value: [value.func, *value.args, *value.keywords.values()]),
    (MethodType, lambda value: [value.__func__, value.__self__]),
    (FunctionType, _reached),
    (ModuleType, _of_module),
    ((type, type(None), torch.Tensor, np.ndarray, str, bytes, int, float), _nothing),
)
"""How to look into objects of some kinds."""
