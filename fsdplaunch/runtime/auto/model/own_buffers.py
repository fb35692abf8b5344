"""Tell of buffers that each rank computes from its own rows: queues, codebooks and centres that a forward updates.

Needed because one process updates them by all rows: over ranks they part at the first pass, and what is evaluated
and saved is rank 0's. BatchNorm's statistics are computed over all rows.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.forward_hooks import original_name
from fsdplaunch.runtime.collectives.rank_group import from_all
from fsdplaunch.runtime.torch_internals.modules import BatchNorm, is_persistent, own_buffers

_KEY = "own buffers"


def tell_own_buffers(hook_context: HookContext) -> None:
    """Print which buffers are not the same on all ranks, once, at the first backward. Collective.

    Args:
        hook_context: This worker's. Modules without parameters count, too: a loss may keep a centre.
    """
    if _KEY in hook_context.printed or dist.get_world_size() == 1:
        return
    hook_context.printed.add(_KEY)
    sums = [dict(each) for each in from_all([*_sums(hook_context).items()])]
    names = [name for name, value in sums[0].items() if any(other.get(name, value) != value for other in sums)]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        messages.say_unequal(
            f"buffer {names[0].partition(' ')[2]}{more}: each rank computes it from its own rows, which is not"
            " what one process computes; what is evaluated and saved is rank 0's"
        )


@torch.no_grad()
def _sums(hook_context: HookContext) -> dict[str, float]:
    """Return for each buffer a number that another content changes, by the number of its module and its name."""
    found: dict[str, float] = {}
    for number, module in enumerate(hook_context.module_registry.alive()):
        for name, buffer in own_buffers(module):
            if _is_kept(module, name, buffer):
                value = buffer.double().nan_to_num().flatten()
                weights = torch.arange(1, len(value) + 1, dtype=torch.float64, device=value.device)
                found[f"{number} {name} of {original_name(module)}"] = float((value * weights).sum().item())
    return found


def _is_kept(module: nn.Module, name: str, buffer: torch.Tensor) -> bool:
    """Return whether a buffer is saved, has values, and is none of BatchNorm's."""
    plain = type(buffer) is torch.Tensor and not buffer.is_meta and not buffer.is_complex()
    return plain and is_persistent(module, name) and not isinstance(module, BatchNorm)
