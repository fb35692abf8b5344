"""Call what is registered by `p.register_hook` with the gradients of shards.

Needed because FSDP2 sets and adds up the gradients of shards by itself: torch's hooks of tensors, which clamp or
mask gradients on their way, are never called there, without a word. What is registered at a full parameter is lost
when its shard comes in its place, as well.

Gradients that the arithmetic of a script brings to shards, a penalty in the loss, are split as the shards are:
torch keeps such a result full where a parameter has fewer rows than there are ranks.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from fsdplaunch.runtime.inspection.parameter_names import named_parameters
from fsdplaunch.runtime.torch_internals.tensors import gradient_hooks, has_backward_hooks, renew_backward_hooks

Hook = Callable[[Any], Any]


class _Hooked:
    """The hooks of one shard. It holds them itself, and this: weak references would keep torch from moving it.

    Attributes:
        hooks: In the order in which they were registered.
        shard: Whose.
        before: The gradient that the running backward pass adds to; None where there is none.
    """

    def __init__(self, shard: Any) -> None:
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self.shard = shard
        self.before: Any = None
        shard.register_post_accumulate_grad_hook(self.call)
        _hooked.add(self)

    def begin(self) -> None:
        """Keep the gradient that a backward pass adds to."""
        self.before = None if self.shard.grad is None or not self.hooks else torch.clone(self.shard.grad)

    @torch.no_grad()
    def call(self, shard: Any) -> None:
        """Give what a backward pass has added to the gradient to the hooks, and add what they return instead."""
        if not self.hooks or shard.grad is None:
            return
        before = self.before
        new = shard.grad if before is None else shard.grad - before
        for hook in list(self.hooks.values()):
            instead = hook(new)
            new = new if instead is None else instead
        shard.grad = new if before is None else before + new
        self.begin()  # the pass may add to it again


_hooked: "weakref.WeakSet[_Hooked]" = weakref.WeakSet()


def add_hook(shard: Any, hook: Hook) -> RemovableHandle:
    """Have a hook called with each gradient that a backward pass computes for a shard."""
    _watch_backward()
    owners = (getattr(each, "__self__", None) for each in gradient_hooks(shard)[1])
    hooked = next((each for each in owners if isinstance(each, _Hooked)), None) or _Hooked(shard)
    handle = RemovableHandle(hooked.hooks)
    hooked.hooks[handle.id] = hook
    return handle


@functools.cache
def _watch_backward() -> None:
    """Have every backward pass from now on begin with what gradients are before it."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        hooked = list(_hooked)
        for each in hooked:
            each.begin()
        try:
            return original(*args, **kwargs)
        finally:
            for each in hooked:
                each.before = None

    torch.autograd.backward = backward


@contextmanager
def carrying_hooks(model: nn.Module) -> Iterator[None]:
    """Register at a model's shards what was registered at its full parameters, when it is sharded inside.

    Args:
        model: Not sharded yet.
    """
    full = {name: gradient_hooks(param) for name, param in named_parameters(model)}
    yield
    for name, shard in named_parameters(model):
        if not isinstance(shard, DTensor) or name not in full:
            continue
        before, after = full[name]
        for hook in before:
            add_hook(shard, hook)
        for hook in after:
            shard.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def place_gradients(model: nn.Module) -> None:
    """Split every gradient that arithmetic brings to a shard as the shard is; passes cost nothing more.

    Args:
        model: Sharded by `fully_shard`.
    """
    for param in model.parameters():
        if not isinstance(param, DTensor):
            continue
        trained = param.requires_grad
        param.requires_grad_(True)  # torch takes hooks for these only, and a frozen one may be trained later
        if has_backward_hooks(param):
            renew_backward_hooks(param)
        else:
            param.register_hook(_fit_to(param))  # type: ignore[no-untyped-call]
        param.requires_grad_(trained)


def _fit_to(param: DTensor) -> Any:
    mesh, placements = param.device_mesh, param.placements

    @unserializable_hook  # type: ignore[untyped-decorator]
    def fit(gradient: Any) -> Any:
        if not isinstance(gradient, DTensor) or gradient.placements == placements:
            return None
        return gradient.redistribute(mesh, placements)

    return fit
