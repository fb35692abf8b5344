"""Tell where ranks hold different data, which are then divided once more: by rank, or split by chance.

Needed because every rank is to have all rows: a script that takes `data[rank::world]` itself, or splits them by
`random.SystemRandom` or a seed of the time, trains on a part of a part, or on other rows on each rank.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.script_line import script_line
from fsdplaunch.runtime.collectives.rank_group import from_all

_LOOKED_AT = 32
"""Values of a tensor or a list, evenly spaced, by which it is compared."""
_DEEPEST = 3
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
    found = blake2b(digest_size=8)
    for part in _parts(data, _DEEPEST):
        found.update(part)
    return found.hexdigest()


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    """Yield something of each value that a dataset holds: of tensors, arrays, and lists of numbers or texts."""
    if isinstance(value, torch.Tensor):
        if value.dim() and len(value) and value.device.type == "cpu" and not value.is_sparse:
            yield repr((tuple(value.shape), float(value[:: _step(value)].double().sum()))).encode()
    elif isinstance(value, np.ndarray):
        if value.ndim and len(value):
            yield repr((value.shape, value[:: _step(value)].tolist())).encode()
    elif isinstance(value, list | tuple | range):
        if len(value) > 1:
            yield repr(
                (len(value), [each for each in value[:: _step(value)] if isinstance(each, _VALUES)])
            ).encode()
        yield from _inside(value[:: _step(value)], depth) if not isinstance(value, range) else ()
    elif isinstance(value, dict):
        yield repr(
            (len(value), [each for each in islice(value, _LOOKED_AT) if isinstance(each, _VALUES)])
        ).encode()
        yield from _inside(islice(value.values(), _LOOKED_AT), depth)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from _inside(vars(value).values(), depth)


def _inside(values: Any, depth: int) -> Iterator[bytes]:
    if depth:
        for each in values:
            yield from _parts(each, depth - 1)


def _step(value: Any) -> int:
    return max(len(value) // _LOOKED_AT, 1)
