"""Keep parameters that are left unsharded equal on all ranks, by averaging their gradients."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Replicas:
    """The trained parameters of ignored modules.

    Torch leaves the gradients of ignored parameters as each rank computed them, so copies drift apart from the
    first step on. Each gradient is averaged over all ranks of the mesh as soon as backward has added to it. Doing
    so after every backward of an accumulation is right, too: the part averaged before is equal everywhere.

    Attributes:
        paused: Whether gradients are left alone for now (`no_sync`).
    """

    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self.paused = False
        self.groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        for param in params:
            param.register_post_accumulate_grad_hook(self._average)

    def _average(self, param: torch.Tensor) -> None:
        if self.paused or param.grad is None:
            return
        for group in self.groups:
            dist.all_reduce(param.grad, group=group)
            param.grad.div_(dist.get_world_size(group))


def keep_equal(ignored: Sequence[nn.Module], mesh: DeviceMesh) -> Replicas | None:
    """Average the gradients of all trained parameters below the ignored modules; None if there are none."""
    params = {id(p): p for module in ignored for p in module.parameters() if p.requires_grad}
    return Replicas(list(params.values()), mesh) if params else None
