"""Remember tensors that every rank has made like a shard, and find the same one on another rank.

An optimizer that is none of torch's keeps its state in tables of its own: `state["mean"] = torch.zeros_like(p)`.
All ranks run the same lines, so the third tensor that was made after the fifth pass is the third on each.
"""

import functools
import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.state.rank0.copies import in_optimizer_step
from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.shard_names import ShardName, changes, identity
from fsdplaunch.runtime.patch import replaced

_MAKERS = (
    *((torch, name) for name in ("zeros_like", "ones_like", "full_like", "empty_like")),
    *((DTensor, name) for name in ("new_zeros", "new_ones", "new_full", "new_empty")),
)
_MARK = "fsdplaunch_made"


@dataclass(slots=True)
class _Place:
    """Where in the script tensors were made.

    Attributes:
        counts: Optimizer steps and passes that had been made.
        made: How many tensors were made there.
    """

    counts: tuple[int, int]
    made: int = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """How a tensor was made: which it is, for what is copied with it is no longer of it, where, and as which."""

    of: "weakref.ref[Any]"
    place: _Place
    number: int
    begun: int

    def __deepcopy__(self, memo: Any) -> "_Made":
        """Return itself."""
        return self


_made: "weakref.WeakValueDictionary[int, DTensor]" = weakref.WeakValueDictionary()


@contextmanager
def remembering_made(position: Position) -> Iterator[None]:
    """Mark tensors that are made like shards, but for those that an optimizer of torch's makes in its step.

    Args:
        position: Where the script is.
    """
    last = _Place((-1, -1))

    def marking(original: Any) -> Any:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if type(result) is DTensor and not torch.compiler.is_compiling() and not in_optimizer_step():
                mark(result)
            return result

        return make

    def mark(result: Any) -> None:
        nonlocal last
        counts = position.steps, position.passes
        if last.counts != counts:
            last = _Place(counts)
        result.__dict__[_MARK] = _Made(weakref.ref(result), last, last.made, changes(result))
        last.made += 1
        _made[id(result)] = result

    with ExitStack() as stack:
        for owner, name in _MAKERS:
            stack.enter_context(replaced(owner, name, marking))
        yield


def named_made(known: dict[tuple[Any, ...], Any]) -> Iterator[tuple[ShardName, DTensor]]:
    """Yield those that are alive, with names that are the same on every rank that made them.

    How many were made at a place is in their names, too: where only one rank made a further one, none is the same.

    Args:
        known: By identity, tensors that have other names.
    """
    for tensor in list(_made.values()):
        made: _Made | None = tensor.__dict__.get(_MARK)
        if made is not None and made.of() is tensor and identity(tensor) not in known:
            where = *made.place.counts, made.place.made, made.number, changes(tensor) - made.begun
            yield json.dumps(["made", *where, tuple(tensor.shape), str(tensor.dtype)]), tensor
