"""Which buffers are rank 0's on all ranks: those that a DistributedDataParallel would send, and not the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.torch_internals.modules import IGNORED_NAMES


def sent_buffers(module: nn.Module, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers, by name, that a wrapper of a module sends before its passes.

    Args:
        module: What it is given.
        given: All its arguments.
    """
    ignored = getattr(module, IGNORED_NAMES, ())
    named = module.named_buffers() if sends_buffers(given) else ()
    return {name: buffer for name, buffer in named if name not in ignored and buffer.numel()}


def sends_buffers(given: dict[str, Any]) -> bool:
    """Return whether passes begin with rank 0's buffers: set under a newer name, an older one, or not at all."""
    values = [given.get(name) for name in ("forward_sync_buffers", "broadcast_buffers")]
    return bool(next((each for each in values if each is not None), True))


@contextmanager
def keeping_unsent_buffers(module: nn.Module, given: dict[str, Any]) -> Iterator[None]:
    """Give each rank back its own of the other buffers, which are rank 0's once a model is sharded."""
    sent = sent_buffers(module, given)
    own = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in sent}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in own and own[name].shape == buffer.shape and not own[name].is_meta:
                buffer.copy_(own[name])
