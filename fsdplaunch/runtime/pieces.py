"""Cut a whole tensor, which this rank holds, to the part of it that this rank keeps."""

import inspect
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

# torch >= 2.7 cuts without sending when it is told so; before, rank 0's values are sent, which are the same.
_NO_SENDING: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
)


def cut(whole: torch.Tensor, like: DTensor) -> DTensor:
    """Split a whole tensor as another one is, on its device and without communication where torch can."""
    local = whole.to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, **_NO_SENDING)
