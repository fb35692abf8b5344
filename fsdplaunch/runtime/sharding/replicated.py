"""Keep parameters that are left unsharded equal on all ranks, by averaging their gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.runtime.sharding.mesh import data_mesh


class ReplicatedParams:
    """The trained parameters that are not sharded.

    Torch leaves the gradients of ignored parameters as each rank computed them, so replicas drift apart from the
    first step on. Each gradient is averaged over all ranks of the mesh as soon as backward has added to it. Doing
    so after every backward of an accumulation is right, too: what was averaged before is equal everywhere.

    Attributes:
        paused: Whether gradients are left alone for now (`no_sync`).
    """

    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self.paused = False
        data = data_mesh(mesh)  # ranks that split layers together have equal gradients
        self.groups = [data.get_group(axis) for axis in range(data.ndim)]
        for param in params:
            param.register_post_accumulate_grad_hook(self._average)

    def _average(self, param: torch.Tensor) -> None:
        if self.paused or param.grad is None:
            return
        for group in self.groups:
            dist.all_reduce(param.grad, group=group)
            param.grad.div_(dist.get_world_size(group))


def keep_equal(left_out: Sequence[nn.Parameter], mesh: DeviceMesh) -> ReplicatedParams | None:
    """Average the gradients of all trained parameters that are not sharded; None if there are none."""
    trained = [param for param in left_out if param.requires_grad]
    return ReplicatedParams(trained, mesh) if trained else None
