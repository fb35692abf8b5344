"""The forward pass of a sharded model that a script runs through DistributedDataParallel.

As torch's wrapper does: gradients are averaged or only added up, decided when a pass begins; buffers are rank 0's.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.api.gradients import set_gradient_sync
from fsdplaunch.runtime.auto.state.rank0.passes import is_alone_without_compiling, turns_on_all_ranks
from fsdplaunch.runtime.auto.state.rank0.shard_names import changes
from fsdplaunch.runtime.inspection.units import is_unit, original_class
from fsdplaunch.runtime.patch import replaced
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import (
    drop_local_gradients,
    group_refs,
    take_local_gradients,
)
from fsdplaunch.runtime.torch_internals.tensors import overwriting_uncounted
from fsdplaunch.runtime.torch_internals.wrappers import compiled_module, untraced


class Forward:
    """One wrapper's passes.

    Args:
        model: Sharded.
        buffers: Those that are rank 0's when a pass begins.
    """

    def __init__(self, model: nn.Module, *, buffers: Sequence[torch.Tensor]) -> None:
        self.model = model
        self.syncs = True
        self.buffers = buffers
        self.joins = self.told = self.is_alone = False
        self.groups = [ref for unit in model.modules() if is_unit(unit) for ref in group_refs(unit)]
        _forwards.add(self)
        self.before, self.after = untraced(self.begin), untraced(self.end)  # made once: that takes long

    def begin(self, ddp: Any) -> None:
        """Do what comes before a pass.

        Args:
            ddp: The wrapper, whose `require_backward_grad_sync` the script and `no_sync` set.
        """
        if self.joins:
            _check_all_go_on(going_on=True)
        if self.model not in _trained and self.model.training and torch.is_grad_enabled():
            _trained.add(self.model)
            turns_on_all_ranks(self.model)
            _check_changed_alike(self.model)
        if ddp.require_backward_grad_sync != self.syncs:
            self.syncs = bool(ddp.require_backward_grad_sync)
            _accumulating.add(self)
            set_gradient_sync(self.model, on=self.syncs)
        self.is_alone = False
        if ddp.require_forward_param_sync and self.buffers:
            self.is_alone = not turns_on_all_ranks(self.model)
            if not self.is_alone:
                self._send_buffers()

    def computing(self, module: nn.Module) -> nn.Module:
        """Return what computes a pass: the model itself, not compiled, where rank 0 makes it alone."""
        if compiled_module(module) is not self.model:
            return module
        trains = self.model.training and torch.is_grad_enabled()
        return self.model if not trains and is_alone_without_compiling(self.model) else module

    def end(self, ddp: Any) -> None:
        """Note whether the next pass is to begin with rank 0's buffers: after one that averages, as torch does."""
        if not self.is_alone:  # the other ranks do not note it
            ddp.require_forward_param_sync = torch.is_grad_enabled() and ddp.require_backward_grad_sync

    @torch.no_grad()
    def _send_buffers(self) -> None:
        """Overwrite buffers with rank 0's, all of one dtype and device at once. Collective.

        Not counted as a change, as under torch's wrapper: an earlier pass may still wait for its backward.
        """
        kinds: dict[Any, list[torch.Tensor]] = {}
        for buffer in self.buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        for kind in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in kind])
            dist.broadcast(flat, src=0)
            with overwriting_uncounted(kind):
                for buffer, part in zip(kind, flat.split([each.numel() for each in kind]), strict=True):
                    buffer.copy_(part.view_as(buffer))

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Let a loop run in which ranks may have unequal numbers of batches: where they do, it is an error.

        Raises:
            ShardingError: Some ranks have come to their end and others have not; on all of them.
        """
        self.joins = True
        try:
            yield
        finally:
            self.joins = False
        _check_all_go_on(going_on=False)


_forwards: "weakref.WeakSet[Forward]" = weakref.WeakSet()
_trained: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that were called in training mode."""
_accumulating: "weakref.WeakSet[Forward]" = weakref.WeakSet()
"""Those that have ever made a pass that averages nothing."""


@contextmanager
def clearing_local_gradients() -> Iterator[None]:
    """Let `zero_grad` clear what passes inside of `no_sync` have added up, as under torch's wrapper.

    Needed because FSDP2 keeps that beside the gradients of the shards, until a pass averages it.
    """

    def of_optimizer(original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
            original(self, set_to_none)
            if _accumulating:
                _clear(param for group in self.param_groups for param in group["params"])

        return zero_grad

    def of_module(original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
            original(self, set_to_none)
            if _accumulating:
                _clear(self.parameters())

        return zero_grad

    with replaced(Optimizer, "zero_grad", of_optimizer), replaced(nn.Module, "zero_grad", of_module):
        yield


@contextmanager
def averaging_local_gradients() -> Iterator[None]:
    """Average before an optimizer's step what no pass has averaged: shards know nothing of it."""

    def average(optimizer: Optimizer, *_: Any) -> None:
        if _accumulating:
            average_local_gradients(param for group in optimizer.param_groups for param in group["params"])

    handle = register_optimizer_step_pre_hook(average)
    try:
        yield
    finally:
        handle.remove()


_OF_NONE = (
    "'NoneType' object has no attribute",
    "expects a non-empty TensorList",
    "'NoneType' and",
    "and 'NoneType'",
)
"""What Python and torch say where a script takes gradients for tensors that are None."""


def missing_gradients_note(error: str) -> str | None:
    """Return what to say of the error of a script that looks for the gradients of a pass inside of `no_sync`."""
    if all(each.syncs for each in _forwards) or not any(message in error for message in _OF_NONE):
        return None
    return (
        "fsdplaunch: the last pass was inside of no_sync(), whose gradients are no parameter's .grad until they"
        " are averaged.\nTake the pass out of no_sync() to have them; weights that ranks change by gradients of"
        " their own (SAM) cannot be sharded"
    )


@torch.no_grad()
def average_local_gradients(params: Iterable[Any]) -> None:
    """Average what passes inside of `no_sync` have added up for shards and no pass has averaged. Collective.

    Torch's wrapper would let each rank step with its own, so that they train apart from there on.
    """
    shards = {id(param) for param in params} if _accumulating else set()
    for forward in list(_accumulating):
        pending = [found for ref in forward.groups for found in take_local_gradients(ref, shards)]
        for shard, gradient in pending:
            averaged = _averaged(gradient, shard)
            shard.grad = averaged if shard.grad is None else shard.grad + averaged
        if pending and not forward.told:
            forward.told = True
            messages.say(
                f"{script_line()}: no pass outside of no_sync() has averaged these gradients: they are averaged"
                " here, where each rank would step with its own under DistributedDataParallel"
            )


def _averaged(gradient: torch.Tensor, shard: Any) -> Any:
    """Return the shard of the mean of all ranks' full gradients."""
    mesh = shard.device_mesh
    summed: Any = DTensor.from_local(gradient.to(shard.dtype), mesh, [Partial()] * mesh.ndim, run_check=False)
    return summed.redistribute(placements=shard.placements) / mesh.size()


def _clear(params: Iterable[Any]) -> None:
    """Clear what was added up for these shards by models that have ever added up."""
    shards = {id(param) for param in params}
    for forward in list(_accumulating):
        for ref in forward.groups:
            drop_local_gradients(ref, shards)


def _check_changed_alike(model: nn.Module) -> None:
    """Check before a model's first pass that what was done with its shards since then was done on all ranks.

    Raises:
        ShardingError: Some have changed them more often, such as by weights that rank 0 alone has loaded.
    """
    count = sum(changes(param) for param in model.parameters() if isinstance(param, DTensor))
    extremes = torch.tensor([count, -count])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        name = original_class(model).__name__
        msg = (
            f"{script_line()}: weights of {name} were changed on some ranks only after it was given to"
            " DistributedDataParallel: each rank has its own part of them"
        )
        hint = (
            "load or change them on all ranks (DistributedDataParallel sends rank 0's where it is built, and not"
            " afterwards), or before the model is given to it"
        )
        raise ShardingError(msg, hint=hint)


def _check_all_go_on(*, going_on: bool) -> None:
    """Raise where some ranks begin a pass and others have come to the end of `join`."""
    going = torch.tensor([int(going_on)])
    dist.all_reduce(going)
    if int(going) not in (0, dist.get_world_size()):
        left = dist.get_world_size() - int(going)
        msg = f"{script_line()}: {left} of {dist.get_world_size()} ranks have no batch left inside of join()"
        hint = "give all ranks as many batches (drop_last=True, DistributedSampler): every pass needs every rank"
        raise ShardingError(msg, hint=hint)
