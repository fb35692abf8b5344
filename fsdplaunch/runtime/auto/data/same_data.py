"""Tell where ranks hold different data, which are then divided once more: by rank, or split by chance.

Needed because every rank is to have all rows: a script that takes `data[rank::world]` itself, or splits them by
`random.SystemRandom` or a seed of the time, trains on a part of a part, or on other rows on each rank.
"""

from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.script_line import script_line

_LOOKED_AT = 32
"""Values of a tensor or a list, evenly spaced, by which it is compared."""
_MOST_OBJECTS = 2000
_VALUES = (int, float, str, PurePath)


def tell_other_data(data: Any, hook_context: HookContext) -> None:
    """Print once that ranks have different data. Collective.

    Args:
        data: Of a loader that is divided, or the first items of a stream.
        hook_context: This worker's.
    """
    facts = from_all((_length(data), _fingerprint(data)))
    if all(fact == facts[0] for fact in facts) or "other data" in hook_context.printed:
        return
    hook_context.printed.add("other data")
    lengths = " and ".join(dict.fromkeys(f"{length} items" for length, _ in facts if length))
    messages.say_unequal(
        f"{script_line()}: ranks hold different data{lengths and f' ({lengths})'}, as where a script takes its"
        " rank's part of them, or splits them by chance: what each has is divided over the ranks once more, which"
        " is not what one process trains on\n"
        "  try  give all ranks all rows, split by a seed that is a number"
    )


def _length(data: Any) -> int:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return 0


def _fingerprint(data: Any) -> str:
    """Return what is the same for data that hold the same values; nothing that differs by process counts."""
    found, waiting, kept = blake2b(digest_size=8), deque([data]), dict[int, Any]()
    while waiting and len(kept) < _MOST_OBJECTS:
        each = waiting.popleft()
        if id(each) not in kept:
            kept[id(each)] = each  # or its id may become another's
            values, inside = _look(each)
            found.update(repr(values).encode())
            waiting += [held for held in inside if not isinstance(held, _VALUES)]
    return found.hexdigest()


def _look(value: Any) -> tuple[Any, Sequence[Any]]:
    """Return what can be compared of a value, and what it holds: tensors, arrays, lists of numbers or texts."""
    if isinstance(value, torch.Tensor):
        plain = value.device.type == "cpu" and value.layout == torch.strided and not value.is_complex()
        return (_of_array(value, lambda rows: float(rows.double().sum())) if plain else ()), ()
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        numbers = value.dtype.kind in "biuf"
        return _of_array(value, lambda rows: float(rows.sum(dtype=float)) if numbers else rows.tolist()), ()
    if isinstance(value, list | tuple | range | np.ndarray):
        some = list(value[:: _step(value)]) if isinstance(value, Sequence) or value.ndim else []
        return ((len(value), [each for each in some if isinstance(each, _VALUES)]) if len(some) > 1 else ()), some
    if isinstance(value, dict):
        keys = [each for each in islice(value, _LOOKED_AT) if isinstance(each, _VALUES)]
        return (len(value), keys), list(islice(value.values(), _LOOKED_AT))
    held = hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)
    return (), list(vars(value).values()) if held else []


def _of_array(value: Any, of_rows: Callable[[Any], Any]) -> Any:
    return (tuple(value.shape), of_rows(value[:: _step(value)])) if value.ndim and len(value) else ()


def _step(value: Any) -> int:
    return max(len(value) // _LOOKED_AT, 1)
