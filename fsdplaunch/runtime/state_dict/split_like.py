"""Cut a full tensor, which this rank holds, to the part of it that this rank keeps."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def split_like(full: torch.Tensor, like: DTensor) -> DTensor:
    """Split a full tensor as another one is, on its device and without communication or gradients."""
    local = full.detach().to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
