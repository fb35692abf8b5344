"""torch.compile as configured: block by block before sharding, or the full forward after it."""

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from fsdplaunch.config.schema.kinds import DYNAMO
from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime.sharding.settings import Compiling, Settings
from fsdplaunch.runtime.sharding.wrap import Units


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


def compile_model(model: nn.Module, settings: Settings) -> None:
    """Compile the model's own forward, once its units are sharded.

    Raises:
        ShardingError: This torch has no such backend.
    """
    if settings.compiling is not None and not settings.compiling.blocks:
        _compile(model, settings.compiling)


def _compile(module: nn.Module, how: Compiling) -> None:
    known = torch.compiler.list_backends(exclude_tags=())
    if how.backend not in known:
        msg = f"dynamo_backend {how.backend.upper()} is not one this torch has"
        names = [name for name in DYNAMO.choices if name.lower() in known]
        raise ShardingError(msg, hint=f"it has {', '.join(names)}")
    module.__dict__["forward"] = CompiledForward(module, how, module.__dict__.get("forward"))


class CompiledForward:
    """A module's forward, compiled when it is first called; a copy of the module gets one of its own."""

    def __init__(self, module: nn.Module, how: Compiling, given: Callable[..., Any] | None = None) -> None:
        self.module = module
        self.how = how
        self.given = given
        self.run: Callable[..., Any] | None = None
        functools.update_wrapper(self, self._plain(), updated=())

    def _plain(self) -> Callable[..., Any]:
        """Return the forward that is compiled: the class's, unless the module was given another."""
        return self.given or MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; what is compiled is the plain forward."""
        if self.run is None:
            self.run = torch.compile(
                self._plain(),
                backend=self.how.backend,
                mode=self.how.mode if self.how.backend == "inductor" else None,
                fullgraph=self.how.fullgraph,
                dynamic=True if self.how.dynamic else None,
            )
        return self.run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        """Return one that computes with the copy of the module, not with this module."""
        return CompiledForward(copy.deepcopy(self.module, memo), self.how, copy.deepcopy(self.given, memo))
