"""Numbers in a script's calls that are its rows: `len(x)` is that of all ranks' rows in one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fsdplaunch.runtime.auto.losses.first_batches.program import Call, Program, Read, marks, name_of
from fsdplaunch.runtime.auto.losses.written_numbers import is_written

_SIZED = frozenset(
    (
        *("view", "reshape", "expand", "repeat", "tile", "unflatten", "broadcast_to", "arange", "zeros", "ones"),
        *("full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "eye", "linspace", "narrow", "split"),
        *("__getitem__", "__setitem__", "one_hot", "bincount", "repeat_interleave", "tensor", "as_tensor"),
    )
)
"""Functions that are given numbers of rows."""
_ARITHMETIC = frozenset(
    (
        *("mul", "mul_", "div", "div_", "true_divide", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
        *("multiply", "divide", "__imul__", "__itruediv__", "__idiv__"),
    )
)
"""Functions that are given numbers to multiply or to divide by."""
Change = Callable[[Call, Any], Any]


def as_given(_call: Call, number: Any) -> Any:
    """Return a number as the script gave it."""
    return number.value if isinstance(number, Read) else number


def may_be_read(function: str, number: float) -> bool:
    """Return whether a number that a function is given may be one that was read: no place, power or dimension."""
    return function in _ARITHMETIC or (type(number) is float and not number.is_integer())


def of_all_rows(rows: int, together: int, *, sizes: bool, factors: bool) -> Change:
    """Return what takes the number of all ranks' rows for that of this rank.

    Args:
        rows: Of this rank.
        together: Of all.
        sizes: Whether sizes of tensors are changed.
        factors: Whether what is multiplied and divided by is.
    """
    changed = (_SIZED if sizes else frozenset()) | (_ARITHMETIC if factors else frozenset())

    def change(call: Call, number: Any) -> Any:
        name = name_of(call.function)
        if type(number) is int and number > 1 and name in changed and number % rows == 0:
            exact = number == rows or name in ("view", "reshape", "expand")
            return number // rows * together if exact else number
        if type(number) is float and factors and name in _ARITHMETIC and not is_written(number):
            return _scaled(number, rows, together)
        return number

    return change


def _scaled(number: float, rows: int, together: int) -> float:
    """Return a number that may be of rows, or one divided by them, for all rows."""
    if number == rows:
        return float(together)
    inverse = 1 / number if number else 0.0
    return 1 / together if abs(inverse - rows) < rows * 1e-9 else number


class Signature(NamedTuple):
    """What a call is, apart from tensors; alike on all ranks that compute the same.

    Attributes:
        name: Of its function.
        given: What it is given; None in the places of numbers of Python's.
        numbers: These.
    """

    name: str
    given: tuple[Any, ...]
    numbers: tuple[float, ...]


def signatures_of(program: Program) -> list[Signature]:
    """Return what each call of a program is."""
    return [_signature(call) for call in program.calls.values()]


def _signature(call: Call) -> Signature:
    every = list(marks(call.args, call.kwargs))
    given = tuple(None if type(each) in (int, float) else _shown(each) for each in every)
    return Signature(name_of(call.function), given, tuple(each for each in every if type(each) in (int, float)))


def _shown(mark: Any) -> str:
    if isinstance(mark, Read):
        return f"read {mark.call}"
    return repr(mark) if isinstance(mark, tuple | bool | str) else ""


def has_unclear(program: Program) -> bool:
    """Return whether a program multiplies by numbers that the script may have computed of its rows."""
    numbers = (
        each
        for call in program.calls.values()
        if name_of(call.function) in _ARITHMETIC
        for each in marks(call.args, call.kwargs)
    )
    return any(type(each) is float and each not in (0.0, 1.0) and not is_written(each) for each in numbers)
