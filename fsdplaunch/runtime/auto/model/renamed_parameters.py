"""Refuse to give a shard another name, as pruning and parametrizations do: torch gathers it by its first."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.model.forward_hooks import late_parameter
from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import places_of_shards
from fsdplaunch.runtime.torch_internals.wrappers import is_made_by_compiler


@contextmanager
def refusing_renames(hook_context: HookContext) -> Iterator[None]:
    """Raise where a script registers a shard of a model that was sharded for it under another name."""

    def register(original: Any) -> Any:
        @functools.wraps(original)
        def register_parameter(self: nn.Module, name: str, param: Any) -> None:
            if (
                isinstance(param, DTensor)
                and not _is_gathering(sys._getframe(1))
                and not is_made_by_compiler(self)
            ):
                _check(self, name, param, hook_context)
            original(self, name, param)

        return register_parameter

    with replaced(nn.Module, "register_parameter", register):
        yield


_SETTERS = 4
"""Calls between FSDP2 and this, where a module's class has a way of its own to set attributes, as nn.LSTM has."""


def _is_gathering(frame: Any) -> bool:
    """Return whether torch puts back a shard that it has gathered, which it does in every pass."""
    for _ in range(_SETTERS):
        if frame is None:
            return False
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed.fsdp"):
            return True
        frame = frame.f_back
    return False


def _check(module: nn.Module, name: str, param: DTensor, hook_context: HookContext) -> None:
    for model, line in hook_context.models.items():
        for unit in filter(is_unit, model.modules()):
            for shard, places in places_of_shards(unit):
                if shard is param and not any(module is home and name == known for home, known in places):
                    raise late_parameter(model, name, line)
