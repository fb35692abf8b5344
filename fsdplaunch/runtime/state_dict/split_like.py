"""Cut a full tensor, which this rank holds, to the part of it that this rank keeps."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def split_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """Split a full tensor as another one is, on its device and without communication or gradients."""
    local = full.detach().to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def cut_to_shard(value: Any, param: nn.Parameter) -> Any:
    """Return this rank's shard of a tensor of the parameter's shape; a copy of what has another shape."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != param.shape or not isinstance(param, DTensor):
        return value.clone()  # step counts: two optimizers must not count on one tensor
    return split_like(value, param)
