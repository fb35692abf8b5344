"""Ways through a sharded model that ranks go apart: a block, or a parameter, that only some ranks' rows use.

All ranks gather a block at once, and average its gradients at once. Where they call different blocks, torch joins
shards of different blocks without a word if they are of one size, or waits for ever.
"""

import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime.auto.rank0.passes import computes_alone
from fsdplaunch.runtime.auto.rank0.service import check_all_ranks
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


class _Ways:
    """What was done next at each place so far: the same on all ranks, because they meet where it is something new.

    A rank that does what is expected asks nobody. Where several things were done, ranks meet each time: each knows
    all of them, and may choose another.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, set[Hashable]] = {}

    def go(self, place: Hashable, then: Hashable, *, expected: bool, call: str, hint: str) -> None:
        """Do something next; together with all ranks where another may do something else.

        Raises:
            ShardingError: Others do.
        """
        known = self._next.get(place, set())
        if len(known | {then}) > 1 or not (known or expected):
            try:
                check_all_ranks(call, hint)
            except CheckpointError as error:
                msg = f"{script_line()}: {error.message}"
                raise ShardingError(msg, hint=hint) from None
        if len(self._next) > _MOST_PLACES:  # on all ranks at once
            self._next.clear()
        self._next.setdefault(place, set()).add(then)


def note_gradients(model: nn.Module, name: str) -> None:
    """Have every rank look whether it has the gradients that are averaged; a model that was just sharded."""
    ways = _Ways()

    def look(group: Any) -> None:
        missing = names_without_gradient(group)
        what = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else "".join(missing)
        call = f"a backward of {name}" + (f" without a gradient of {what}" if what else " with all gradients")
        ways.go(id(group), missing, expected=not missing, call=call, hint=_GRADIENT_HINT)

    for unit in model.modules():
        before_reducing_gradients(unit, look)


def note_paths(model: nn.Module, name: str) -> None:
    """Have every rank follow its way through the units of a model that was just sharded.

    A place is all that was called in a pass so far: blocks that are called several times in each pass, in the same
    order, are no choice. Outside of a pass of the model it is the unit that was called last.
    """
    units = {clean_name(path): unit for path, unit in model.named_modules() if is_unit(unit) and unit is not model}
    listed, ways = set(itertools.pairwise(["", *units, _END])), _Ways()
    at, called, running, alone = "", 0, False, False

    def begin(*_: Any) -> None:
        nonlocal at, called, running, alone
        alone = computes_alone()
        if not torch.compiler.is_compiling() and not alone:
            at, called, running = "", 0, True

    def arrive(there: str) -> None:
        nonlocal at, called, running
        ends_alone = alone and there == _END  # rank 0 has its shards again by then
        if torch.compiler.is_compiling() or computes_alone() or ends_alone:
            return
        call = f"{there} of {name}" + (f" after {at}" if at else "")
        ways.go((running, called, at), there, expected=(at, there) in listed, call=call, hint=_CALL_HINT)
        running = running and there != _END
        called = hash((called, there)) if running else 0
        at = there

    def arriving(there: str) -> Callable[..., None]:  # no partial, which copies of the model would keep
        return lambda *_: arrive(there)

    if units:
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(arriving(_END))
    for unit_name, unit in units.items():
        unit.register_forward_pre_hook(arriving(unit_name), prepend=True)  # before it is gathered
