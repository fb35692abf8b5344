"""Refuse what a script exchanges of shards by collectives of its own."""

from typing import Any

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.script_line import script_line

COLLECTIVES = (
    *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "scatter_", "alltoall_"),
)
"""The operators by which torch.distributed exchanges tensors."""


def refuse_collective(_op: Any, _args: Any, _kwargs: Any) -> Any:
    """Refuse the script's own collectives: ranks' gradients are averaged already.

    Raises:
        ShardingError: Always.
    """
    msg = f"{script_line()} exchanges parameters or gradients of a sharded model: they are averaged already"
    hint = (
        "give the model to DistributedDataParallel; or launch with --hide-ranks, if the script then trains in one"
    )
    raise ShardingError(msg, hint=f"{hint} process, or with --shard off, which leaves all to the script")
