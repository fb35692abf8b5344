"""Remember what a copy of a sharded tensor was made from, and find the same copy on another rank.

Scripts save `{name: value.cpu() for name, value in model.state_dict().items()}`. Where rank 0 alone made the
copy, the others have what it was made from, and rank 0 can make the copy again. A share, `(1 - decay) * value`,
counts as one, for averages that rank 0 alone keeps. Where all ranks made it (the best weights so far, an average
kept in a dict), they have it too, made from the same values by the same calls.
"""

import functools
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdplaunch.runtime.auto.state.rank0.position import Position
from fsdplaunch.runtime.auto.state.rank0.shard_names import ShardName, changes, identity, numbered
from fsdplaunch.runtime.inspection.accessors import as_bytes
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor

_METHODS = (
    *("detach", "clone", "cpu", "cuda", "to", "type", "float", "half", "bfloat16", "double", "contiguous"),
    "__deepcopy__",
)
_MARK = "fsdplaunch_copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """How a tensor was made.

    Attributes:
        source: From this one.
        changes: How often that had been changed then.
        calls: By these methods with these arguments, one after the other.
        begun: How often the copy itself had been changed when it was made.
        place: Where the script was then: steps and passes made.
    """

    source: DTensor
    changes: int
    calls: tuple[tuple[str, Any, Any], ...]
    begun: int
    place: tuple[int, int]

    def again(self, full: torch.Tensor) -> torch.Tensor:
        """Make the copy of the full tensor, in host memory."""
        for name, args, kwargs in self.calls:
            full = getattr(full, name)(*args, **kwargs)
        return full.cpu()

    def is_of(self, shard: DTensor, copied: DTensor) -> bool:
        """Return whether a copy's shard is what would be made now: `.data` has changes of its own, not counted."""
        now, then = self.again(local_tensor(shard).detach()), local_tensor(copied).detach().cpu()
        return torch.equal(as_bytes(now), as_bytes(then))

    def __deepcopy__(self, memo: Any) -> "Copy":
        """Return itself: where a copy came from is not copied with it."""
        return self


_made: "weakref.WeakValueDictionary[int, DTensor]" = weakref.WeakValueDictionary()
"""The copies that are alive, by their ids, in the order in which they were made."""


def living_copies() -> list[DTensor]:
    """Return the copies that are alive."""
    return list(_made.values())


def copied_from(tensor: DTensor) -> Copy | None:
    """Return how a tensor was made; None if it is no copy, or if it or its source was changed since."""
    copy: Copy | None = tensor.__dict__.get(_MARK)
    if copy is None or changes(tensor) != copy.begun or changes(copy.source) != copy.changes:
        return None
    return copy


def named_copies(names: dict[tuple[Any, ...], ShardName]) -> Iterator[tuple[ShardName, DTensor]]:
    """Yield the copies that are alive, with names that are the same on every rank that made them.

    Of copies that were made alike, those unchanged are equal. Those changed since have numbers in their names, and
    how many there are: where only one rank made a further one, no name is the same.

    Args:
        names: Of the tensors that may have been copied, by identity.
    """
    made = dict(names)
    alike: dict[ShardName, list[DTensor]] = {}
    for tensor in living_copies():
        name = name_of_copy(tensor, lambda source: made.get(identity(source)))
        if name is not None:
            made[identity(tensor)] = name
            alike.setdefault(name, []).append(tensor)
    for name, tensors in alike.items():
        for number, tensor in enumerate(tensors):
            changed = changes(tensor) != tensor.__dict__[_MARK].begun
            yield numbered(name, number, len(tensors)) if changed else name, tensor


def name_of_copy(tensor: DTensor, name_of: Callable[[DTensor], ShardName | None]) -> ShardName | None:
    """Return how a copy was made, and how often it was changed since.

    Args:
        tensor: Any shard.
        name_of: Names what it is a copy of.

    Returns:
        None for what is no copy, and where its source has no name.
    """
    copy: Copy | None = tensor.__dict__.get(_MARK)
    if copy is None:
        return None
    source = name_of(copy.source)
    made = *copy.place, copy.changes, _text(copy.calls), changes(tensor) - copy.begun
    return None if source is None else json.dumps(["copy", source, *made])


def _text(calls: tuple[tuple[str, Any, Any], ...]) -> str:
    """Return what was called, without devices, which differ between ranks."""
    words = [
        (name, [str(each) for each in (*args, *kwargs.values()) if not isinstance(each, str | torch.device)])
        for name, args, kwargs in calls
    ]
    return str(words)


@contextmanager
def remembering_copies(position: Position) -> Iterator[None]:
    """Mark what the methods that copy a sharded tensor return.

    Args:
        position: Where the script is.
    """

    def marking(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if result is not self and type(result) is DTensor and not torch.compiler.is_compiling():
                made = ("clone", (), {}) if name == "__deepcopy__" else (name, args, kwargs)
                remember_copy(result, self, made, (position.steps, position.passes))
            return result

        return copy

    def enter(*_: Any) -> None:
        _stepping.append(True)

    def leave(*_: Any) -> None:
        _stepping.clear()

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(enter).remove)
        stack.callback(register_optimizer_step_post_hook(leave).remove)
        for name in _METHODS:
            stack.enter_context(replaced(DTensor, name, functools.partial(marking, name)))
        yield


def in_optimizer_step() -> bool:
    """Return whether an optimizer of torch's steps."""
    return bool(_stepping)


_stepping: list[bool] = []
"""Not empty inside of an optimizer's step: state that begins as a copy shall not keep the gradient alive."""


def remember_copy(result: Any, source: Any, call: tuple[str, Any, Any], place: tuple[int, int]) -> None:
    """Mark what one rank can make again of a shard.

    Args:
        result: The copy.
        source: Of this.
        call: A method's name, with its arguments.
        place: Steps and passes that were made before.
    """
    result.__dict__.pop(_MARK, None)  # a deep copy has its source's
    if _stepping or identity(result) == identity(source):
        return
    if any(isinstance(each, torch.Tensor) for each in call[1]):
        return
    calls: tuple[Any, ...] = (call,)
    earlier = copied_from(source)
    if earlier is not None:
        source, calls = earlier.source, (*earlier.calls, call)
    begun = changes(result)
    result.__dict__[_MARK] = Copy(source=source, changes=changes(source), calls=calls, begun=begun, place=place)
    _made[id(result)] = result
