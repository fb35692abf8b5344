"""Tell where a script draws numbers one by one for the rows of a batch: every rank draws those of the first rows.

A line that, before a backward pass and outside of a model's passes, draws as many numbers as this rank has rows
draws them for its rows.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.row_order import tell_once, trains_on_batch
from fsdplaunch.runtime.auto.rng.drawing_code import has_size_of_rows
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import is_in_pass


def note_single(hook_context: HookContext, size: Any) -> None:
    """Note that something is drawn that is no number per row of the batch; tell where its size is of the rows.

    Args:
        hook_context: This worker's.
        size: Of what is drawn.
    """
    context = hook_context
    if not isinstance(size, tuple | list) or not trains_on_batch(context):
        return
    if has_size_of_rows(context.batches.sizes):
        tell_once(
            context,
            "size",
            f"{math.prod(size)} random numbers are drawn on each rank, as many as its own rows need",
        )
    count_single(context)


def count_single(hook_context: HookContext) -> None:
    """Count one number, or what is drawn by one call, for the line that draws it."""
    context = hook_context
    if trains_on_batch(context) and not any(is_in_pass(model) for model in list(context.models)):
        line = script_line()
        context.batches.single[line] = context.batches.single.get(line, 0) + 1


@contextmanager
def drawing_items(hook_context: HookContext) -> Iterator[None]:
    """Read a batch: what its items draw is told for the dataset, and is no draw of the line that reads it."""
    noted = dict(hook_context.batches.single)
    try:
        yield
    finally:
        hook_context.batches.single.clear()
        hook_context.batches.single.update(noted)


def tell_single(hook_context: HookContext) -> None:
    """Print which lines have drawn for the rows of the batch, at the backward pass that uses it."""
    for line, count in hook_context.batches.single.items():
        key = f"single draws {line}"
        if count > 1 and count in hook_context.batches.sizes and key not in hook_context.printed:
            hook_context.printed.add(key)
            messages.say_unequal(
                f"{line}: {count} random numbers are drawn one by one, as many as a rank has rows: each rank draws"
                " the same, which is not what one process draws for all rows"
            )
    hook_context.batches.single.clear()
