"""Refuse a script that divides layers over ranks by itself: the launcher would take them for the same on each.

Tensor parallel layers exchange activations inside of the model's pass, stages of a pipeline send them to each
other. By their parameters they cannot be told from replicas.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.detect.import_scan import makes_a_group
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp2 import pass_look

_IN_LAYERS = ("all_reduce", "all_gather", "all_to_all", "all_to_all_single", "reduce_scatter", "broadcast")
_BETWEEN_STAGES = ("send", "recv", "batch_isend_irecv")  # torch compares isend and irecv by identity
_HINT = (
    "launch with --shard off, which leaves all to the script; or with --shard always, if every rank has all layers"
)


@contextmanager
def refusing_layers_divided_by_hand(hook_context: HookContext) -> Iterator[None]:
    """Look at what a script exchanges by itself: inside of a pass, or from one rank to another."""

    def watched(original: Any, what: str) -> Any:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not _is_torchs(sys._getframe(1)) and _may_divide(hook_context) and not _of_shards(args):
                _check(what, hook_context)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for names, what in ((_IN_LAYERS, _INSIDE), (_BETWEEN_STAGES, _OUTSIDE)):
            for name in names:
                stack.enter_context(replaced(dist, name, lambda function, what=what: watched(function, what)))  # type: ignore[misc]
        yield


_INSIDE = "exchanges tensors of ranks inside of a model's pass"
_OUTSIDE = "exchanges tensors with another rank"


def _may_divide(hook_context: HookContext) -> bool:
    """Return whether models are sharded for a script that has made a group and gives them to no wrapper."""
    ownership = hook_context.ownership
    ours = bool(ownership.ours) and not ownership.ranked and ownership.setting != "always"
    return ours and hook_context.size > 1 and len(hook_context.models) > 0 and makes_a_group()


def _is_torchs(frame: Any) -> bool:
    """Return whether torch or this package calls, but for torch's collectives that have gradients."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("torch", "fsdplaunch") and not name.startswith("torch.distributed.nn")


def _of_shards(args: Any) -> bool:
    """Return whether shards are exchanged, such as gradients in a hook: refused for what they are."""
    held = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else (arg,))]
    return any(isinstance(each, DTensor) for each in held)


def _check(what: str, hook_context: HookContext) -> None:
    """Raise where a model may be one rank's part of another.

    Raises:
        ShardingError: With the script's line.
    """
    models = list(hook_context.models)
    computing = next((model for model in models if pass_look(model)()), None)
    if what == _INSIDE and computing is None:
        return
    model = computing or models[0]
    name = type(model).__name__.removeprefix("FSDP")
    msg = (
        f"{script_line()} {what}, as where layers are divided over ranks by hand: {name} was sharded at"
        f" {hook_context.models[model]}, as if each rank had the same"
    )
    raise ShardingError(msg, hint=_HINT)
