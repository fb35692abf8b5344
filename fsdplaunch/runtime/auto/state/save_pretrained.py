"""Let a transformers model's `save_pretrained` write what one process would have written, once."""

from typing import Any

from torch import nn

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.state.gather import ShardGatherer, tensors_of
from fsdplaunch.runtime.auto.state.late_files import late_gatherer, writing_late
from fsdplaunch.runtime.auto.state.saved_paths import note_saved, path_of
from fsdplaunch.runtime.auto.state.unsharded_copy import unsharded_copy
from fsdplaunch.runtime.torch_internals.tensors import tree_map


def save_full(model: Any, hook_context: HookContext) -> None:
    """Let a model's `save_pretrained`, if it has one, write once, and full tensors; rank 0 holds one at a time."""
    if not hasattr(model, "save_pretrained"):
        return

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        gathering = late_gatherer("save_pretrained", keep=hook_context.rank == 0)
        args, kwargs = tree_map(gathering.full_or_own, (args, kwargs))  # a state may be given
        plain: Any = _full_copy(model, gathering)
        with writing_late(gathering, "write what save_pretrained was given"):
            if hook_context.rank == 0:
                plain.save_pretrained(*args, **kwargs)
        if gathering.together:
            note_saved(hook_context.saved, path_of(args[0] if args else kwargs.get("save_directory")))

    model.__dict__["save_pretrained"] = save_pretrained


def _full_copy(model: nn.Module, gathering: ShardGatherer) -> nn.Module:
    """Return the model as one process would have it, its parameters gathered when they are needed."""
    return unsharded_copy(model, gathering.full_or_own, tensors_of(model))
