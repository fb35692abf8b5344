"""Gradients of shards: the hooks that a script registers for them, and those that only some ranks have.

FSDP2 sets and adds up the gradients of shards by itself: torch's hooks of tensors, which clamp or mask gradients,
are never called there, without a word. What is registered at a full parameter is lost when its shard comes in its
place, as well. Under DistributedDataParallel hooks are given each rank's own full gradient, before it is averaged:
there they are called where a pass computes with the full parameter.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle, unserializable_hook

from fsdplaunch.runtime.inspection import named_parameters, parameters_of
from fsdplaunch.runtime.inspection.units import full_tensor, is_unit
from fsdplaunch.runtime.patch import wrap
from fsdplaunch.runtime.state_dict.gather import split_like
from fsdplaunch.runtime.torch_internals.fsdp import (
    before_reducing_gradients,
    on_first_gather,
    unsharded_parameters,
)
from fsdplaunch.runtime.torch_internals.tensors import gradient_hooks, renew_backward_hooks

Hook = Callable[[Any], Any]
Table = OrderedDict[int, Hook]  # by the numbers that their handles have


class _Hooked:
    """The hooks of one shard. It holds them itself, and this: weak references would keep torch from moving it."""

    def __init__(self, shard: Any, hooks: Table | None = None) -> None:
        self.hooks: Table = OrderedDict() if hooks is None else hooks  # handles that the script has remove from it
        self.shard = shard
        self.local = False  # whether they are called with this rank's own gradient
        self.before: Any = None  # the gradient that the running backward pass adds to
        with _taking_hooks(shard):
            shard.register_post_accumulate_grad_hook(self.call)
        _hooked.add(self)
        _watch_backward()

    def begin(self) -> None:
        kept = self.hooks and not self.local and self.shard.grad is not None
        self.before = torch.clone(self.shard.grad) if kept else None

    def hook_full(self, full: Any) -> None:
        """Call the hooks with what a backward pass computes for the full parameter on this rank."""
        with _taking_hooks(full):
            full.register_hook(self._changed)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def changed_apart(self, gradient: Any) -> Any:
        """Call the hooks with what arithmetic with the shard brings, full: a pass of the model brings the rest."""
        if not self.hooks or not isinstance(gradient, DTensor):
            return None
        return split_like(self._changed(full_tensor(gradient)), self.shard)

    @torch.no_grad()
    def _changed(self, gradient: torch.Tensor) -> torch.Tensor:
        for hook in list(self.hooks.values()):
            instead = hook(gradient)
            gradient = gradient if instead is None else instead
        return gradient

    @torch.no_grad()
    def call(self, shard: Any) -> None:
        """Give what a backward pass has added to the gradient to the hooks, and add what they return instead."""
        if not self.hooks or shard.grad is None or self.local:
            return
        before = self.before
        new = self._changed(shard.grad if before is None else shard.grad - before)
        shard.grad = new if before is None else before + new
        self.begin()  # the pass may add to it again


_hooked: "weakref.WeakSet[_Hooked]" = weakref.WeakSet()


def add_hook(shard: Any, hook: Hook) -> RemovableHandle:
    """Have a hook called with each gradient that a backward pass computes for a shard."""
    hooked = _of_shard(shard) or _Hooked(shard)
    handle = RemovableHandle(hooked.hooks)
    hooked.hooks[handle.id] = hook
    return handle


def hook_local_gradients(units: Iterable[nn.Module], only: Any = None) -> None:
    """Call hooks of units' shards, or of one only, with each rank's own full gradients, not averaged yet."""
    for unit in units:
        for shard, when_gathered in on_first_gather(unit):
            hooked = _of_shard(shard) if only is None or shard is only else None
            if hooked is not None and not hooked.local:
                hooked.local = True
                when_gathered(hooked.hook_full)
                with _taking_hooks(shard):
                    shard.register_hook(hooked.changed_apart)


def _of_shard(shard: Any) -> _Hooked | None:
    owners = (getattr(each, "__self__", None) for each in gradient_hooks(shard)[1].values())
    return next((each for each in owners if isinstance(each, _Hooked)), None)


@contextmanager
def _taking_hooks(param: Any) -> Iterator[None]:
    """Let a frozen parameter take hooks, which torch refuses: it may be trained later."""
    trained = param.requires_grad
    param.requires_grad_(True)
    yield
    param.requires_grad_(trained)


@functools.cache
def _watch_backward() -> None:
    """Have every backward pass from now on begin with what gradients are before it."""

    def begin_and_compute(backward: Any, *args: Any, **kwargs: Any) -> Any:
        hooked = list(_hooked)
        for each in hooked:
            each.begin()
        try:
            return backward(*args, **kwargs)
        finally:
            for each in hooked:
                each.before = None

    wrap(torch.autograd, "backward", begin_and_compute)


@contextmanager
def reattach_hooks_to_shards(model: nn.Module) -> Iterator[None]:
    """Register at a model's shards what was registered at its full parameters, when it is sharded inside."""
    full = {name: gradient_hooks(param) for name, param in named_parameters(model)}

    def call_all(hooks: Table, shard: Any) -> None:
        for hook in list(hooks.values()):
            hook(shard)

    yield
    for name, shard in named_parameters(model):
        if isinstance(shard, DTensor) and name in full:
            before, after = full[name]
            if before:
                _Hooked(shard, before)
            if after:
                with _taking_hooks(shard):
                    shard.register_post_accumulate_grad_hook(functools.partial(call_all, after))  # type: ignore[no-untyped-call]


def place_gradients(model: nn.Module) -> None:
    """Split every gradient that arithmetic brings to a shard of FSDP2 as the shard is; passes cost no more."""
    for param in parameters_of(model):
        if isinstance(param, DTensor):
            with _taking_hooks(param):
                if not renew_backward_hooks(param):
                    param.register_hook(_fit_to(param))  # type: ignore[no-untyped-call]


def _fit_to(param: DTensor) -> Any:
    mesh, placements = param.device_mesh, param.placements

    @unserializable_hook  # type: ignore[untyped-decorator]
    def fit(gradient: Any) -> Any:
        if not isinstance(gradient, DTensor) or gradient.placements == placements:
            return None
        return gradient.redistribute(mesh, placements)

    return fit


def agree_on_unused(model: nn.Module) -> None:
    """Have every unit of a sharded model fill in zeros for gradients that only other ranks have."""
    for module in model.modules():
        before_reducing_gradients(module, _fill)


def agree_on_alternatives(model: nn.Module) -> None:
    """Do so in units with a list or dictionary of modules, of which a pass may call some: experts, heads."""
    for unit in model.modules():
        waiting = [unit] if is_unit(unit) else []
        while waiting:
            module = waiting.pop()
            children = [child for child in module.children() if not is_unit(child)]
            waiting += children
            some = sum(any(True for _ in parameters_of(child)) for child in children) > 1
            if some and isinstance(module, nn.ModuleList | nn.ModuleDict):
                before_reducing_gradients(unit, _fill)


def _fill(group: Any) -> None:
    """Give parameters without a gradient zeros if another rank has one. Collective."""
    found = unsharded_parameters(group)
    used = torch.tensor([int(has) for _, has in found], dtype=torch.uint8)
    if not len(used):
        return
    everywhere = used.clone()
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    for (param, has), wanted in zip(found, everywhere.tolist(), strict=True):
        if wanted and not has:
            param.grad = torch.zeros_like(param)
