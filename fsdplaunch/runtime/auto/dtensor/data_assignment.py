"""`param.data = tensor` gives a sharded parameter another value.

Needed because torch exchanges what the Python object says of itself and leaves the shard as it was, without a
word: scripts swap averaged weights in and out in this way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.patch import replaced
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals import param_groups, put_shard


@contextmanager
def assigning_shards(hook_context: HookContext) -> Iterator[None]:
    """Exchange the shard itself, and tell torch's sharding."""
    data: Any = torch.Tensor.data

    def assign(self: Any, value: Any) -> None:
        holder = (
            _holder_of(self, hook_context) if hook_context.ownership.ours and self.shape == value.shape else None
        )
        if holder is None:
            data.__set__(self, value)
            return
        put_shard(holder, self, _as_shard(value, self).detach().contiguous())

    with replaced(DTensor, "data", lambda _: property(data.__get__, assign)):
        yield


def _as_shard(value: Any, param: Any) -> torch.Tensor:
    """This rank's part of a value, of the parameter's own format and on its device."""
    if isinstance(value, DTensor):
        local = value.redistribute(param.device_mesh, param.placements).to_local()
    else:
        local = cut_to_shard(value, param).to_local()
    shard: torch.Tensor = local.to(param.to_local().device, param.dtype)
    return shard


def _holder_of(param: DTensor, hook_context: HookContext) -> Any:
    """What holds the parameter in torch's sharding; None for tensors that are no parameters of sharded models."""
    if not isinstance(param, nn.Parameter):
        return None
    for model in list(hook_context.models):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                for group in param_groups(module):
                    for held in group.fsdp_params:
                        if held.sharded_param is param:
                            return held
    return None
