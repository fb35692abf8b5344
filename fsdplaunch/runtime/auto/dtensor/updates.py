"""Let shards be updated in place, by optimizers and by the script's own loops, and be filled as `out=`."""

from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.shard_handlers import placed_like
from fsdplaunch.runtime.auto.dtensor.shard_parts import written_back
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import placements_of


def update(func: Any, ownership: Ownership) -> Any:
    """Make a method that brings operands to the placement of the shard they update.

    torch replicates a parameter of fewer rows than ranks to compute with it, and refuses to add that to a shard.
    Optimizers come here several times per parameter and step: it is one call, which looks and makes nothing.
    """

    @wraps(func)
    def update_in_place(shard: Any, *operands: Any, **kwargs: Any) -> Any:
        for operand in operands:
            if isinstance(operand, DTensor) and placements_of(operand) != placements_of(shard) and ownership.ours:
                operands = tuple(placed_like(shard, each) for each in operands)
                break
        result = func(shard, *operands, **kwargs)
        if "fsdplaunch_part" in shard.__dict__:
            written_back(shard)
        return result

    return update_in_place


def make_into(func: Any, args: Any, kwargs: Any) -> Any:
    """Fill a shard given as `out=` with its part of what is made: torch makes all of it in each shard."""
    shard: Any = kwargs["out"]
    full = torch.empty(shard.shape, dtype=shard.dtype, device=shard.to_local().device)
    func(*args, **{**kwargs, "out": full})
    with torch.no_grad():
        shard.copy_(cut_to_shard(full, shard))
    return shard
