"""Shard where training begins, when the source gave a reason to wait: no one else has sharded by then.

Training begins where a loader is read, or a model called, after an optimizer was built on full parameters. A
loader that begins its iterator where it is built is read at the first batch.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.data.late_iterator import LateIterator, asked_by_constructor
from fsdplaunch.runtime.auto.detect.optimizers import regroup
from fsdplaunch.runtime.patch import replaced


@contextmanager
def sharding_when_training_begins(hook_context: HookContext) -> Iterator[None]:
    """Hook calls of modules and readings of loaders, from when the decision is put off until it is made."""
    with ExitStack() as hooks:
        waiting = _Waiting(hook_context, hooks)
        hook_context.ownership.put_off, hook_context.ownership.on_decision = waiting.start, waiting.stop
        yield


class _Waiting:
    """The hooks of one worker that stand only while the decision is open: every module's call passes them."""

    def __init__(self, hook_context: HookContext, hooks: ExitStack) -> None:
        self.hook_context = hook_context
        self.hooks = hooks
        self.started = False

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.hooks.enter_context(replaced(nn.Module, "__call__", self._calling))
            self.hooks.enter_context(replaced(DataLoader, "__iter__", self._reading))

    def stop(self) -> None:
        self.started = False
        self.hooks.close()

    def _calling(self, original: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if module.training and torch.is_grad_enabled():
                self._look(module)
            return original(module, *args, **kwargs)

        return call

    def _reading(self, original: Any) -> Any:
        def iterate(loader: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(loader)
            return LateIterator(lambda: begin(loader)) if asked_by_constructor() else begin(loader)

        def begin(loader: Any) -> Any:
            if self.started:
                self._look(None)
            return original(loader)

        return iterate

    def _look(self, module: nn.Module | None) -> None:
        """Decide if an optimizer trains full parameters: of the module, or of any."""
        trained = {
            id(param)
            for optimizer in self.hook_context.built_optimizers()
            for group in optimizer.param_groups
            for param in group["params"]
            if not isinstance(param, DTensor)
        }
        if trained and (module is None or any(id(param) in trained for param in module.parameters())):
            self._decide()

    def _decide(self) -> None:
        self.stop()
        for optimizer in self.hook_context.built_optimizers():
            regroup(optimizer, self.hook_context, now=True)
