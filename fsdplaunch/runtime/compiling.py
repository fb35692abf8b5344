"""torch.compile as the configuration says: block by block before sharding, or the whole forward after it."""

from typing import Any

import torch
from torch import nn

from fsdplaunch.config.values import DYNAMO
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.settings import Compiling, Settings
from fsdplaunch.runtime.wrap import Units


def compile_blocks(units: Units, settings: Settings) -> None:
    """Compile the forward of each unit, recomputation included, and nothing of the gathering around it.

    The methods are exchanged, not the modules, so that no name in the model changes. Blocks of one class share
    what was compiled for the first.

    Raises:
        ShardingError: There are no units, or this torch has no such backend.
    """
    how = settings.compiling
    if how is None or not how.blocks:
        return
    if not units:
        msg = "dynamo_use_regional_compilation compiles blocks, and this model has none"
        raise ShardingError(msg, hint="leave it out, or choose a wrap policy other than NO_WRAP")
    for unit in units.values():
        _compile(unit, how)


def compile_whole(model: nn.Module, settings: Settings) -> None:
    """Compile the model's own forward, once its units are sharded.

    Raises:
        ShardingError: This torch has no such backend.
    """
    if settings.compiling is not None and not settings.compiling.blocks:
        _compile(model, settings.compiling)


def _compile(module: nn.Module, how: Compiling) -> None:
    from torch._dynamo import list_backends

    known = list_backends(exclude_tags=())
    if how.backend not in known:
        msg = f"dynamo_backend {how.backend.upper()} is not one this torch has"
        names = [name for name in DYNAMO.choices if name.lower() in known]
        raise ShardingError(msg, hint=f"it has {', '.join(names)}")
    compiled: Any = torch.compile(
        module.forward,
        backend=how.backend,
        mode=how.mode if how.backend == "inductor" else None,
        fullgraph=how.fullgraph,
        dynamic=True if how.dynamic else None,
    )
    module.__dict__["forward"] = compiled
