"""What a script computes of a batch until it calls backward: calls that can be made again with other tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdplaunch.runtime.torch_internals.tensors import change_count

READING = ("item", "__float__", "__int__", "__index__")
"""What returns a number of a tensor."""


class Made(NamedTuple):
    """In the place of a tensor among arguments: what an earlier call returned.

    Attributes:
        call: Its number.
        place: Which of its results; -1 for its first argument, which it has changed.
    """

    call: int
    place: int


class Given(NamedTuple):
    """In the place of a tensor that no recorded call has made: of the batch, of a model, or a constant.

    Attributes:
        number: Among those of the recording.
    """

    number: int


class Read(NamedTuple):
    """In the place of a number: what a call has read of a tensor, as `item` does.

    Attributes:
        call: Its number.
        value: As it was read.
    """

    call: int
    value: float


@dataclass(slots=True)
class Input:
    """A tensor that no recorded call has made.

    Attributes:
        tensor: Itself; None for one that is too large to be kept.
        changes: How often it had been changed.
    """

    tensor: torch.Tensor | None
    changes: int

    def is_intact(self) -> bool:
        """Return whether it still has the values that it was used with."""
        tensor = self.tensor
        if tensor is None or change_count(tensor) != self.changes:
            return False
        return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


@dataclass(slots=True)
class Call:
    """One call of a function of torch.

    Attributes:
        function: Torch's own.
        args: With `Made`, `Given` and `Read` in the places of tensors and numbers.
        kwargs: The same.
        grad: Whether gradients were on.
        autocast: The kind of device and the dtype that operations were cast to; None for none.
        line: Of the script.
        fractions: Whether it has returned a tensor of floating point numbers.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    grad: bool
    autocast: tuple[str, torch.dtype] | None
    line: str
    fractions: bool = False


@dataclass(slots=True)
class Program:
    """The calls that a result depends on, in their order.

    Attributes:
        calls: By their numbers.
        result: Of these.
    """

    calls: dict[int, Call]
    result: Made
    inputs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        every = (each for call in self.calls.values() for each in marks(call.args, call.kwargs))
        self.inputs = sorted({each.number for each in every if isinstance(each, Given)})

    def run(self, inputs: Mapping[int, torch.Tensor], change: Callable[[Call, Any], Any]) -> torch.Tensor:
        """Make the calls again; return the result.

        Args:
            inputs: What to take for each `Given`, by its number.
            change: Gets each call and a number among its arguments, and returns that to take; a `Read` for what
                is read when the calls are made again.
        """
        made = self.results(inputs, change)
        tensor: torch.Tensor = made[self.result.call][self.result.place]
        return tensor

    def results(
        self, inputs: Mapping[int, torch.Tensor], change: Callable[[Call, Any], Any]
    ) -> dict[int, list[Any]]:
        """Make the calls again; return what each of them returns, and behind that its first argument."""
        made: dict[int, list[Any]] = {}
        for number, call in self.calls.items():
            made[number] = _make(call, inputs, made, change)
        return made


def name_of(function: Any) -> str:
    """Return the name of a function of torch; of what gets an attribute that of the attribute."""
    name = getattr(function, "__name__", "")
    return str(getattr(function.__self__, "__name__", "") if name == "__get__" else name)


def _make(
    call: Call,
    inputs: Mapping[int, torch.Tensor],
    made: Mapping[int, list[Any]],
    change: Callable[[Call, Any], Any],
) -> list[Any]:
    """Make one call; return its results, and behind them its first argument."""

    def value_of(mark: Any) -> Any:
        if isinstance(mark, Given):
            return inputs[mark.number]
        if isinstance(mark, Made):
            return made[mark.call][mark.place]
        number = change(call, mark)
        return made[mark.call][0] if isinstance(number, Read) else number

    args, kwargs = mapped(value_of, call.args), mapped(value_of, call.kwargs)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.grad))
        if call.autocast is not None:
            stack.enter_context(torch.autocast(*call.autocast))
        result = call.function(*args, **kwargs)
    return [*results_of(result), args[0] if args else None]


def results_of(result: Any) -> list[Any]:
    """Return what a function has returned, one after the other."""
    if isinstance(result, list | tuple):
        return [each for part in result for each in results_of(part)]
    return [result]


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return arguments with each thing in them changed, also inside of lists, tuples, mappings and slices."""
    if isinstance(value, Made | Given | Read) or not isinstance(value, list | tuple | dict | slice):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(change, each) for name, each in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(change, each) for each in (value.start, value.stop, value.step)))
    changed = [mapped(change, each) for each in value]
    return changed if isinstance(value, list) else tuple(changed)


def marks(*values: Any) -> Iterator[Any]:
    """Yield each thing in arguments."""
    found: list[Any] = []
    mapped(found.append, list(values))
    yield from found


def sliced(calls: Sequence[Call], result: Made) -> Program:
    """Return the calls that a result depends on."""
    waiting, needed = [result.call], set[int]()
    while waiting:
        number = waiting.pop()
        if number in needed:
            continue
        needed.add(number)
        below = marks(calls[number].args, calls[number].kwargs)
        waiting += [each.call for each in below if isinstance(each, Made | Read)]
    return Program({number: calls[number] for number in sorted(needed)}, result)


def is_used(call: Call, calls: Sequence[Call]) -> bool:
    """Return whether anything was computed with what a call returned, or it is not among the calls any more.

    Args:
        call: Which.
        calls: All that were recorded, with those that read a number of a tensor: such a number may be printed.
    """
    places = [place for place, each in enumerate(calls) if each is call]
    reads = set[int]()
    for place, each in enumerate(calls[places[0] + 1 :], places[0] + 1) if places else ():
        given = {mark.call for mark in marks(each.args, each.kwargs) if isinstance(mark, Made | Read)}
        if given.isdisjoint({*places, *reads}):
            continue
        if name_of(each.function) not in READING:
            return True
        reads.add(place)
    return not places
