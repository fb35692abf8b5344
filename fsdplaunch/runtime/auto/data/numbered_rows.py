"""Tell where a script computes with the numbers of its batch's rows, as evenly spaced times of a diffusion do.

Needed because `torch.arange(n) / n` is of this rank's rows on every rank: each computes with the numbers, and the
count, of the first ones. Numbers that only choose or compare (`logits[torch.arange(n), labels]`) stay whole.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import trains_on_batch
from fsdplaunch.runtime.auto.losses.first_batches.program import Call, Made, marks, name_of
from fsdplaunch.runtime.auto.rng.drawing_code import has_literal_size, has_size_of_rows
from fsdplaunch.runtime.patch import replaced

_COUNTING = ("arange", "linspace")
_COMPUTING = (
    *("add", "radd", "sub", "rsub", "subtract", "mul", "rmul", "multiply", "div", "rdiv", "truediv", "rtruediv"),
    *("true_divide", "divide", "remainder", "fmod", "mod", "float", "double", "half", "bfloat16", "to", "type"),
    *("neg", "pow", "rpow", "view", "reshape", "unsqueeze", "squeeze", "flatten", "expand", "repeat", "clone"),
)
"""What gives one number for each number, without the underscores of methods."""
_NUMBERED = "numbers for the batch's rows are made by their place: each rank makes those of its first rows"


@contextmanager
def noting_numbered_rows(hook_context: HookContext) -> Iterator[None]:
    """Note which calls count as many numbers as this rank has rows."""
    if not hook_context.divides_batch:
        yield
        return

    def make(original: Any) -> Any:
        @wraps(original)
        def count(*args: Any, **kwargs: Any) -> Any:
            numbers = original(*args, **kwargs)
            context = hook_context
            if not context.recorder.ended and context.batches.sizes and trains_on_batch(context):
                sizes = context.batches.sizes
                if (len(numbers) in sizes and not has_literal_size()) or has_size_of_rows(sizes):
                    _note(context)
            return numbers

        return count

    with ExitStack() as stack:
        for name in _COUNTING:
            stack.enter_context(replaced(torch, name, make))
        yield


def _note(context: HookContext) -> None:
    """Remember which recorded call has just counted; one inside of a module is not recorded."""
    calls = context.recorder.calls
    if calls and name_of(calls[-1].function) in _COUNTING:
        context.batches.numbered.add(len(calls) - 1)


def tell_numbered_rows(hook_context: HookContext) -> None:
    """Print where such numbers become fractions, before the backward pass that uses them."""
    noted, printed = hook_context.batches.numbered, hook_context.printed
    if not noted:
        return
    for line in dict.fromkeys(_fractions(hook_context.recorder.calls, noted)):
        if f"numbered {line}" not in printed:
            printed.add(f"numbered {line}")
            messages.say_unequal(f"{line}: {_NUMBERED}, which is not what one process computes")
    noted.clear()


def _fractions(calls: list[Call], noted: set[int]) -> Iterator[str]:
    """Yield the lines that compute fractions of what some calls have counted."""
    counted = set(noted)
    for number, call in enumerate(calls):
        given = (each.call for each in marks(call.args) if isinstance(each, Made))
        if name_of(call.function).strip("_") in _COMPUTING and not counted.isdisjoint(given):
            counted.add(number)
        if number in counted and call.fractions:
            yield call.line
