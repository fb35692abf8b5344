"""What a script exchanges of shards by collectives of its own: refused, but for what all ranks have anyway.

A shard stands for the full tensor, which is the same on all ranks: to broadcast it exchanges nothing. Torch would
exchange each rank's part as if it were all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor, operator_handlers
from fsdplaunch.runtime.torch_internals.operators import exchanges

_COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_"),
)
"""The operators by which torch.distributed exchanges tensors."""
_HINT = (
    "leave the exchange out: what is given to DistributedDataParallel has the same parameters and gradients on all"
    " ranks; or launch with --hide-ranks, if the script then trains in one process, or with --shard off"
)


@contextmanager
def refusing_collectives(hook_context: HookContext) -> Iterator[None]:
    """Refuse collectives that a script calls with shards of models that were sharded for it."""

    def refuse(op: Any, args: Any, kwargs: Any) -> Any:
        if not hook_context.ownership.ours or torch.compiler.is_compiling():
            return op(*args, **kwargs)
        raise _refusal()

    def broadcast(op: Any, args: Any, kwargs: Any) -> Any:
        tensors, *rest = args
        if not hook_context.ownership.ours:
            return op(*args, **kwargs)
        nothing = [local_tensor(each).new_empty(0) for each in tensors if isinstance(each, DTensor)]
        return tensors, op(nothing, *rest, **kwargs)[1]

    table, packets = operator_handlers(), [getattr(torch.ops.c10d, name) for name in _COLLECTIVES]
    before = dict(table)
    table.update({getattr(packet, each): refuse for packet in packets for each in packet.overloads()})
    table[torch.ops.c10d.broadcast_.default] = broadcast
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def refuse_functional(func: Any) -> None:
    """Refuse a functional collective that a script calls with shards.

    Raises:
        ShardingError: The function is one.
    """
    if exchanges(func):
        raise _refusal()


def _refusal() -> ShardingError:
    msg = f"{script_line()} exchanges parameters or gradients of a sharded model: they are averaged already"
    return ShardingError(msg, hint=_HINT)
