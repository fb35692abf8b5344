"""Scaled losses where ranks split layers: an overflow in the part of one rank makes all of them skip the step.

Torch looks at the first gradient for the ranks that have to agree, and refuses gradients of which some are split
over more axes than others.
"""

from typing import Any

import torch.distributed as dist

from fsdplaunch.runtime.inspection.accessors import local_tensor
from fsdplaunch.runtime.sharding.mesh import split_groups
from fsdplaunch.runtime.torch_internals.dtensor import operator_handlers, unscale_operator


def agree_on_overflows() -> None:
    """Let `torch.amp.GradScaler` find an overflow on all ranks that have parts of the gradients, from now on."""
    operator_handlers()[unscale_operator()] = _unscale


def _unscale(operator: Any, args: Any, _kwargs: Any) -> None:
    gradients, found, inverse_scale = args
    operator([local_tensor(gradient) for gradient in gradients], local_tensor(found), local_tensor(inverse_scale))
    groups = {id(group): group for gradient in gradients for group in split_groups(gradient)}
    for group in groups.values():
        dist.all_reduce(local_tensor(found), dist.ReduceOp.MAX, group=group)
