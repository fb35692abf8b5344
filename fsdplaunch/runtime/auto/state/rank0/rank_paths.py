"""Notice that ranks go different ways through a model: a block, or a parameter, that only some ranks' rows use.

All ranks gather a block at once, and average its gradients at once. Where one rank calls another block, torch
joins shards of different blocks without a word if they are of one size, or waits for ever. A rank that calls the
blocks as they are listed and has all gradients looks at nothing else; one that leaves this way for the first time
meets all others before it goes on.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdplaunch.errors import CheckpointError, ShardingError
from fsdplaunch.runtime.auto.script_line import script_line
from fsdplaunch.runtime.auto.state.rank0.passes import check_all_ranks
from fsdplaunch.runtime.inspection.parameter_names import clean_name
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.torch_internals.fsdp2 import before_reducing_gradients, names_without_gradient

_CALL_HINT = (
    "launch with --fsdp-auto-wrap-policy NO_WRAP, which gathers and averages the model as a whole, with zeros for"
    " what a rank's rows leave out of a ModuleList; or call every block and add its output times 0"
)
_GRADIENT_HINT = (
    "use every parameter on every rank: add the output of what its rows leave out times 0; or put such parts into"
    " an nn.ModuleList, of which ranks may use different ones"
)
_END = "the end"


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
    known: set[tuple[str, ...]] = set()

    def look(group: Any) -> None:
        missing = names_without_gradient(group)
        if missing and missing not in known:
            what = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
            _meet(f"a backward of {name} without a gradient of {what}", _GRADIENT_HINT)
            known.add(missing)

    for unit in model.modules():
        before_reducing_gradients(unit, look)


def _follow_calls(model: nn.Module, units: dict[str, nn.Module], name: str) -> None:
    known = set(itertools.pairwise(["", *units, _END]))
    at = [""]

    def arriving(there: str) -> Callable[..., None]:
        def arrive(*_: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if (at[0], there) not in known:
                _meet(f"{there} of {name}" + (f" after {at[0]}" if at[0] else ""), _CALL_HINT)
                known.add((at[0], there))
            at[0] = there

        return arrive

    def begin(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            at[0] = ""

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(arriving(_END))
    for path, unit in units.items():
        unit.register_forward_pre_hook(arriving(path), prepend=True)  # before torch gathers it


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
