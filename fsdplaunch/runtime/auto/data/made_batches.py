"""Divide batches that a dataset makes itself, of a loader with `batch_size=None`, where the global batch is kept.

All ranks read every batch, in one order and with one stream of random numbers, and each keeps its rows.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.samplers import own_share
from fsdplaunch.runtime.auto.rng.single_draws import drawing_items
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.data_loaders import iterator_methods, set_iterator_methods


def read_made_batches(loader: Any, iterate: Any, hook_context: HookContext) -> Any:
    """Begin to read a loader that makes no batches, for training, and give this rank's rows of each item.

    Args:
        loader: As the script made it.
        iterate: The loader's own `__iter__`.
        hook_context: This worker's.
    """
    with hook_context.streams.shared():
        iterator = iterate(loader)
    next_data, reset = iterator_methods(iterator)
    first: list[int] = []

    def next_share(iterator: Any = iterator) -> Any:
        hook_context.batches.complete = False
        with hook_context.streams.shared(), drawing_items(hook_context):
            item = next_data(iterator)
        rows = rows_of(item)
        _tell(rows, hook_context)
        if not rows:
            return item
        every = list(range(rows))
        first[:] = first or every
        return _taken(item, own_share(every, first, hook_context), rows)

    set_iterator_methods(iterator, next_share, functools.partial(reset, iterator))
    return iterator


def rows_of(item: Any) -> int:
    """Return how many rows an item has that is a batch; 0 where it is a single sample, or nothing that is known.

    All that it holds has as many, and something has more dimensions: one text is a row of numbers as well.
    """
    leaves = list(_leaves(item))
    arrays = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray)]
    sizes = {int(array.shape[0]) if array.ndim else 0 for array in arrays}
    lone = any(isinstance(leaf, int | float) for leaf in leaves)
    deep = any(array.ndim > 1 for array in arrays)
    return sizes.pop() if deep and not lone and len(sizes) == 1 else 0


def _taken(value: Any, rows: list[int], every: int) -> Any:
    """Return rows of a batch, whatever holds them; what there is one of for each row, such as names, as well."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value[rows[0] : rows[-1] + 1] if rows[-1] - rows[0] < len(rows) else value[rows]
    if isinstance(value, Mapping):
        taken: Any = copy.copy(value)
        for key, each in value.items():
            taken[key] = _taken(each, rows, every)
        return taken
    if isinstance(value, list | tuple):
        holds = any(isinstance(leaf, torch.Tensor | np.ndarray) for leaf in _leaves(value))
        if not holds and len(value) != every:
            return value
        chosen = [_taken(each, rows, every) for each in value] if holds else [value[row] for row in rows]
        return type(value)(*chosen) if hasattr(value, "_fields") else type(value)(chosen)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what is in lists and mappings of any kind."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _tell(rows: int, hook_context: HookContext) -> None:
    """Print once what becomes of the loader's items."""
    if "made batches" in hook_context.printed:
        return
    hook_context.printed.add("made batches")
    if rows:
        messages.say(f"{script_line()}: the loader makes no batches: its items, of {rows} rows, are divided")
    else:
        hook_context.batches.compares = False
        messages.say(
            f"{script_line()}: the loader makes no batches, and its items are none that could be divided: all"
            f" {hook_context.data.size} ranks compute the same, as one process, and as slow"
        )
