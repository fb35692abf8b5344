"""Let rank 0 save alone what a library or the script itself has sharded, as it may save what this package has."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.rank0.pulling import open_once
from fsdplaunch.runtime.first_step import models_of_others
from fsdplaunch.runtime.inspection.parameter_names import named_parameters


def serve_models_of_others(hook_context: HookContext) -> None:
    """Connect the ranks before shards are first trained by a script whose models this package has not sharded.

    All ranks make that step: its gradients were reduced over them. The hook stays afterwards and does nothing.

    Args:
        hook_context: This worker's.
    """
    waiting = [hook_context.size > 1]

    def serve(optimizer: Optimizer, *_: Any) -> None:
        if waiting[0] and _trains_shards(optimizer):
            waiting[0] = False
            if not hook_context.ownership.ours:
                _serve(hook_context)

    register_optimizer_step_pre_hook(serve)


def _trains_shards(optimizer: Optimizer) -> bool:
    return any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"])


def _serve(hook_context: HookContext) -> None:
    models = _told_apart([model for model in models_of_others() if _has_own_shards(model)])
    for model in models:
        hook_context.note_foreign_model(model)
    open_once(hook_context)


def _has_own_shards(model: nn.Module) -> bool:
    """Return whether each rank has shards that it can hand over by itself: under FSDP2, not FSDP1."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return False
    return any(isinstance(param, DTensor) for param in model.parameters())


def _told_apart(models: list[nn.Module]) -> list[nn.Module]:
    """Return models in an order that is the same on all ranks, without those that look alike.

    Nothing else tells which one of two is meant: they were made by code that this package does not follow.
    """
    looks = [_look(model) for model in models]
    known = [(look, number) for number, look in enumerate(looks) if looks.count(look) == 1]
    return [models[number] for _, number in sorted(known)]


def _look(model: nn.Module) -> str:
    shapes = [(name, tuple(param.shape)) for name, param in named_parameters(model)]
    return f"{type(model).__name__} {shapes}"
