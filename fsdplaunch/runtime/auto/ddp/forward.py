"""The passes of a sharded model that a script runs through DistributedDataParallel, and what the wrapper is asked.

As torch's wrapper does: gradients are averaged or only added up, decided when a pass begins; buffers are rank 0's.
"""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import ShardingError
from fsdplaunch.runtime import messages
from fsdplaunch.runtime.auto.rank0.passes import is_alone_without_compiling, turns_on_all_ranks
from fsdplaunch.runtime.auto.rank0.position import changes
from fsdplaunch.runtime.compute.local_gradients import average_gradients, average_local_gradients
from fsdplaunch.runtime.inspection.parameter_names import parameters_of
from fsdplaunch.runtime.inspection.units import original_class
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.modules import BUILTIN_HOOK, joins
from fsdplaunch.runtime.torch_internals.tensors import overwriting_uncounted
from fsdplaunch.runtime.torch_internals.wrappers import compiled_module, untraced

__all__ = ["METHODS", "Forward", "average_local_gradients", "only_compresses"]


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
        self.is_alone = False
        self.before, self.after = untraced(self.begin), untraced(self.end)  # made once: that takes long

    def begin(self, ddp: Any) -> None:
        """Do what comes before a pass.

        Args:
            ddp: The wrapper, whose `require_backward_grad_sync` the script and `no_sync` set.
        """
        if joins(ddp):
            _check_all_go_on(ddp)
        if self.model not in _trained and self.model.training and torch.is_grad_enabled():
            _trained.add(self.model)
            turns_on_all_ranks(self.model)
            _check_changed_alike(self.model)
        if ddp.require_backward_grad_sync != self.syncs:
            self.syncs = bool(ddp.require_backward_grad_sync)
            average_gradients(self.model, on=self.syncs)
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


_trained: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models that were called in training mode."""


def _check_changed_alike(model: nn.Module) -> None:
    """Check before a model's first pass that what was done with its shards since then was done on all ranks.

    Raises:
        ShardingError: Some have changed them more often, such as by weights that rank 0 alone has loaded.
    """
    count = sum(changes(param) for param in parameters_of(model) if isinstance(param, DTensor))
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


# What DistributedDataParallel is asked beside its passes -------------------------------------------------------


def _forward(original: Any) -> Any:
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        ours: Forward | None = self.__dict__.get("fsdplaunch_forward")
        if ours is None:
            return original(self, *inputs, **kwargs)
        ours.before(self)
        module = self.module
        output = (module if module is ours.model else ours.computing(module))(*inputs, **kwargs)
        ours.after(self)
        return output

    return forward


def _join_hook(original: Any) -> Any:
    def join_hook(self: Any, **kwargs: Any) -> Any:
        return _Left() if "fsdplaunch_forward" in self.__dict__ else original(self, **kwargs)

    return join_hook


class _Left(JoinHook):
    """What `join()` calls on a rank that has no batch left, while others have: torch would shadow their passes."""

    def main_hook(self) -> None:
        """Raise, as the others do."""
        raise _unequal_batches()


def _check_all_go_on(ddp: Any) -> None:
    """Raise where a rank begins a pass inside of `join()` and another has no batch left. Collective."""
    going = torch.ones(1, device=ddp.join_device)
    dist.all_reduce(going, group=ddp.join_process_group)
    if int(going.item()) < dist.get_world_size(ddp.join_process_group):
        raise _unequal_batches()


def _unequal_batches() -> ShardingError:
    msg = f"{script_line()}: some ranks have no batch left inside of join(), and others have"
    hint = "give all ranks as many batches (drop_last=True, DistributedSampler): every pass needs every rank"
    return ShardingError(msg, hint=hint)


_COMPRESSING = {
    *("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook", "batched_powerSGD_hook"),
    *("fp16_compress_wrapper_hook", "bf16_compress_wrapper_hook"),
}
"""Torch's hooks for communication that make it cheaper, and mean to compute the same; or wrap one that does."""


def only_compresses(hook: Any) -> bool:
    """Return whether a hook for communication is torch's and means to compute the same; also in a wrapper."""
    name, home = getattr(hook, "__name__", ""), str(getattr(hook, "__module__", ""))
    if not home.startswith("torch.") or name not in _COMPRESSING:
        return False
    return "wrapper" not in name or only_compresses(inspect.getclosurevars(hook).nonlocals.get("hook"))


def _register_comm_hook(original: Any) -> Any:
    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        if "fsdplaunch_forward" not in self.__dict__:
            original(self, state, hook)
            return
        name = getattr(hook, "__name__", type(hook).__name__)
        if not only_compresses(hook):
            msg = f"{script_line()} registers {name}, which changes how gradients are averaged"
            hint = "leave it out; precision.reduce sets the dtype that gradients are averaged in"
            raise ShardingError(msg, hint=hint)
        _name_comm_hook(name)

    return register_comm_hook


def _register_builtin_hook(original: Any) -> Any:
    def register_builtin_hook(self: Any, kind: Any) -> None:
        if "fsdplaunch_forward" in self.__dict__:
            _name_comm_hook(kind.name)
        else:
            original(self, kind)

    return register_builtin_hook


def _name_comm_hook(name: str) -> None:
    messages.say(
        f"{script_line()}: {name} has no effect: FSDP averages the gradients, in the dtype of precision.reduce"
    )


METHODS = {
    "forward": _forward,
    "join_hook": _join_hook,
    "register_comm_hook": _register_comm_hook,
    BUILTIN_HOOK: _register_builtin_hook,
}
"""What stands in the place of the wrapper's own methods, from the first whose model is sharded on."""
