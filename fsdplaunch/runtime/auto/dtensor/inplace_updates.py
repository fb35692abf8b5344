"""Updates that a script writes by hand change a shard in place, whatever form what they add has.

Needed because torch computes with a parameter of fewer rows than there are ranks as a whole, and then refuses to
add the whole to the shard: an optimizer of the script's own would fail at its first bias.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.patch import replaced

_IN_PLACE = (
    *("add_", "sub_", "mul_", "div_", "copy_", "lerp_", "addcmul_", "addcdiv_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
)


@contextmanager
def updating_shards(hook_context: HookContext) -> Iterator[None]:
    """Bring what is added to a shard, or multiplied with it, into its form before."""
    with ExitStack() as stack:
        for name in _IN_PLACE:
            update = _fitting(getattr(torch.Tensor, name), hook_context)
            stack.enter_context(replaced(DTensor, name, lambda _, update=update: update))  # type: ignore[misc]
        yield


def _fitting(change: Any, hook_context: HookContext) -> Any:
    def update(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if hook_context.ownership.ours:
            args = tuple(_fitted(arg, self) for arg in args)
        return change(self, *args, **kwargs)

    return update


def _fitted(value: Any, shard: DTensor) -> Any:
    if not isinstance(value, DTensor) or value.placements == shard.placements or value.shape != shard.shape:
        return value
    return value.redistribute(shard.device_mesh, shard.placements)
