"""Notice that ranks go different ways through a model: a block, or a parameter, that only some ranks' rows use.

All ranks gather a block at once, and average its gradients at once. Where one rank calls another block, torch
joins shards of different blocks without a word if they are of one size, or waits for ever. A rank that calls the
blocks as they are listed and has all gradients looks at nothing else; one that leaves this way for the first time
meets all others before it goes on, and so do all, each time, where the model has gone several ways before.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime.auto.state.rank0.passes import check_all_ranks
from fsdplaunch.runtime.inspection.parameter_names import clean_name
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import before_reducing_gradients, names_without_gradient

_CALL_HINT = (
    "launch with --fsdp-auto-wrap-policy NO_WRAP, which gathers and averages the model as a whole, with zeros for"
    " what a rank's rows leave out of a ModuleList; or call every block and add its output times 0"
)
_GRADIENT_HINT = (
    "use every parameter on every rank: add the output of what its rows leave out times 0; or put such parts into"
    " an nn.ModuleList, of which ranks may use different ones"
)
_END = "the end"
_MOST_PLACES = 10_000


def note_paths(model: nn.Module, name: str) -> None:
    """Have every rank follow its way through a model that was just sharded.

    Args:
        model: Sharded.
        name: Its class's, for errors.
    """
    units = {clean_name(path): unit for path, unit in model.named_modules() if is_unit(unit) and unit is not model}
    if units:
        _follow_calls(model, units, name)


def note_gradients(model: nn.Module, name: str) -> None:
    """Have every rank look whether it has the gradients that are averaged.

    Args:
        model: Sharded.
        name: Its class's, for errors.
    """
    for unit in model.modules():
        before_reducing_gradients(unit, _look_at_gradients(name))


def _look_at_gradients(name: str) -> Callable[[Any], None]:
    ways = _Ways()

    def look(group: Any) -> None:
        missing = names_without_gradient(group)
        if ways.must_meet(id(group), missing, expected=not missing):
            _meet(f"a backward of {name}{_without(missing)}", _GRADIENT_HINT)
        ways.go(id(group), missing)

    return look


def _without(missing: tuple[str, ...]) -> str:
    what = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else "".join(missing)
    return f" without a gradient of {what}" if what else " with all gradients"


class _Ways:
    """What was done next at each place so far: the same on all ranks, for they meet where it is something new.

    Where more than one thing was done next, ranks meet each time: each knows all of them, and may choose another.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, set[Hashable]] = {}

    def must_meet(self, place: Hashable, then: Hashable, *, expected: bool) -> bool:
        """Return whether all ranks have to do this together, for another may do something else.

        Args:
            place: Where this rank is.
            then: What it does next.
            expected: Whether ranks do so that have not met.
        """
        known = self._next.get(place, set())
        return len(known | {then}) > 1 or not (known or expected)

    def go(self, place: Hashable, then: Hashable) -> None:
        """Remember what was done; forget all where it is too much, which all ranks do at once."""
        if len(self._next) > _MOST_PLACES:
            self._next.clear()
        self._next.setdefault(place, set()).add(then)


class _Path:
    """One rank's way through a model's units.

    A place is all that was called in a pass so far: blocks that are called several times in each pass, in the same
    order, are no choice. Outside of a pass of the model it is the unit that was called last.
    """

    def __init__(self, units: Iterable[str], name: str) -> None:
        self.name, self.listed, self.ways = name, set(itertools.pairwise(["", *units, _END])), _Ways()
        self.at, self.called, self.running = "", 0, False

    def begin(self, *_: Any) -> None:
        """Begin a pass of the model."""
        if not torch.compiler.is_compiling():
            self.at, self.called, self.running = "", 0, True

    def arrive(self, there: str) -> None:
        """Come to a unit, or to the end of the pass; errors as `_meet`."""
        if torch.compiler.is_compiling():
            return
        place = (self.running, self.called, self.at)
        if self.ways.must_meet(place, there, expected=(self.at, there) in self.listed):
            _meet(f"{there} of {self.name}" + (f" after {self.at}" if self.at else ""), _CALL_HINT)
        self.ways.go(place, there)
        self.running = self.running and there != _END
        self.called = hash((self.called, there)) if self.running else 0
        self.at = there


def _follow_calls(model: nn.Module, units: dict[str, nn.Module], name: str) -> None:
    path = _Path(units, name)

    def arriving(there: str) -> Callable[..., None]:
        return lambda *_: path.arrive(there)

    model.register_forward_pre_hook(path.begin)
    model.register_forward_hook(arriving(_END))
    for unit_name, unit in units.items():
        unit.register_forward_pre_hook(arriving(unit_name), prepend=True)  # before torch gathers it


def _meet(call: str, hint: str) -> None:
    """Wait for all ranks to go the same way.

    Raises:
        ShardingError: Others have gone another.
    """
    try:
        check_all_ranks(call, hint)
    except CheckpointError as error:
        msg = f"{script_line()}: {error.message}"
        raise ShardingError(msg, hint=hint) from None
