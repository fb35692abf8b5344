"""Let shards be updated in place by optimizers and by the script's own loops, and be filled by `torch.eye`."""

from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.mixtures import placed_as_updated
from fsdplaunch.runtime.auto.dtensor.shard_writes import FULL_WRITES
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard

_OPERATORS = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod"))
_OTHERS = frozenset(
    (
        *("requires_grad_", "detach_", "rename_", "share_memory_", "resize_", "resize_as_", "set_", "as_strided_"),
        *("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "apply_", "map_", "map2_"),
    )
)
"""Methods named as if they wrote, which change something else or take functions."""


def writing_methods() -> list[str]:
    """Return the names of the methods that write into a tensor, but for those that write into all of it."""
    named = (name for name in dir(torch.Tensor) if name in _OPERATORS or name[-1] == "_" != name[0])
    return [name for name in named if name not in _OTHERS and name not in FULL_WRITES]


class WrappedUpdates:
    """The methods of shards that write into them, wrapped from when something needs that until the hooks end.

    Not before: an optimizer calls six of them for each parameter and step. A step of torch's own optimizers needs
    it with a parameter of fewer rows than ranks and something that is placed otherwise. Elsewhere the handlers of
    operators do what is to be done.

    Args:
        ownership: Who shards.
        wrappers: Takes the wrappers away at its end.
    """

    def __init__(self, ownership: Ownership, wrappers: ExitStack) -> None:
        self._ownership, self._wrappers = ownership, wrappers
        self._wrapped = False

    def wrap(self) -> None:
        """Wrap them; once: a change of a class makes Python look up all that it had found in it before."""
        if self._wrapped or not self._ownership.ours:
            return
        self._wrapped = True
        for name in writing_methods():
            self._wrappers.enter_context(replaced(DTensor, name, self._wrapping))

    def _wrapping(self, original: Any) -> Any:
        return _update(original, self._ownership)


def _update(func: Any, ownership: Ownership) -> Any:
    """Make a method that brings operands to the placement of the shard they update, of which that may be a part.

    Older torch replicates a parameter of fewer rows than ranks to compute with it; none adds that to such a shard.
    """

    @wraps(func)
    def update_in_place(shard: Any, *operands: Any, **kwargs: Any) -> Any:
        if ownership.ours:
            operands = placed_as_updated(shard, operands)
        return func(shard, *operands, **kwargs)

    return update_in_place


def make_into(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill a shard given as `out=` with its part of what is made: torch makes all of it in each shard."""
    shard: Any = kwargs["out"]
    full = torch.empty(shard.shape, dtype=shard.dtype, device=shard.to_local().device)
    func(*args, **{**kwargs, "out": full})
    with torch.no_grad():
        shard.copy_(cut_to_shard(full, shard))
    return shard
