"""Prepare the steps of optimizers: gradients of their parameters' kind, and no handlers that no step needs."""

import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdplaunch.runtime.auto.detect.ownership import Ownership
from fsdplaunch.runtime.auto.dtensor.reads import decided
from fsdplaunch.runtime.auto.dtensor.row_loops import put_kept_rows
from fsdplaunch.runtime.auto.dtensor.shard_handlers import cuts, full_tensor
from fsdplaunch.runtime.auto.optimizers.local_steps import steps_with_local_shards
from fsdplaunch.runtime.state_dict.split_like import split_like
from fsdplaunch.runtime.torch_internals.dtensor import operator_handlers, placements_of, use_operator_handlers

_Table = dict[Any, Any]


@contextmanager
def stepping_without_handlers(
    operators: Set[Any], ownership: Ownership, wrap: Callable[[], None]
) -> Iterator[None]:
    """Take handlers out of DTensor's table for the time of a step.

    A step with a closure computes what the script does in it.

    Args:
        operators: Whose handlers no step needs: they ask whether rank 0 computes alone.
        ownership: Who shards.
        wrap: Wraps the methods that update shards: torch adds only what is placed alike to one of few rows.
    """
    replicated, handlers = _Replicated(), _Handlers(operators)

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        put_kept_rows()
        if (len(args) > 1 or kwargs) and any(each is not None for each in (*args[1:], *kwargs.values())):
            return
        _place_gradients(optimizer, ours=bool(ownership.ours))
        handlers.take_out()
        if not steps_with_local_shards(optimizer) and replicated.is_trained_by(optimizer):
            wrap()

    def end(*_: Any) -> None:
        if handlers.are_out:
            handlers.put_back()

    with ExitStack() as stack:
        stack.callback(end)  # a step that failed has not
        stack.callback(register_optimizer_step_pre_hook(begin).remove)
        stack.callback(register_optimizer_step_post_hook(end).remove)
        yield


def _place_gradients(optimizer: Optimizer, *, ours: bool) -> None:
    """Give each parameter a gradient of its own kind, where the script has set one of another.

    Plain ones are full (`p.grad = torch.from_numpy(g)`). Plain parameters are copies of the weights that the
    script steps in their place, in higher precision (`master.grad = p.grad.float()`). What is computed of full
    tensors may be on all ranks alike.
    """
    for group in optimizer.param_groups:
        params: list[Any] = group["params"]
        for param in params:
            gradient = param.grad
            if gradient is None:
                continue
            if isinstance(gradient, DTensor) is not isinstance(param, DTensor):
                param.grad = split_like(gradient, param) if isinstance(param, DTensor) else full_tensor(gradient)
            elif ours and isinstance(gradient, DTensor) and placements_of(gradient) != placements_of(param):
                param.grad = gradient.redistribute(param.device_mesh, param.placements)


class _Handlers:
    """Two tables, of which DTensor has one at a time: to exchange entries touches hundreds of objects a step."""

    def __init__(self, operators: Set[Any]) -> None:
        self._operators = operators
        self._full: _Table = {}
        self._rest: _Table = {}
        self._lengths = (0, 0)
        self.are_out = False

    def take_out(self) -> None:
        table = operator_handlers()
        self.are_out = True
        if table is self._rest:
            return
        if table is not self._full or len(table) != self._lengths[0]:  # something was put into it
            self._full = table
            self._rest = {op: each for op, each in table.items() if op not in self._operators}
            self._lengths = len(table), len(self._rest)
        use_operator_handlers(self._rest)

    def put_back(self) -> None:
        self.are_out = False
        if operator_handlers() is self._rest:
            if len(self._rest) != self._lengths[1]:  # something was put into it meanwhile
                self._full |= self._rest
            use_operator_handlers(self._full)


class _Replicated:
    """Which optimizers step over what torch makes full tensors of, to compute with it, as older versions do."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Optimizer, tuple[Any, bool]] = weakref.WeakKeyDictionary()

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer does, over shards of fewer rows than ranks; looked at anew over other ones.

        Collective at its first step, where torch makes full tensors.
        """
        groups = [group["params"] for group in optimizer.param_groups if group["params"]]
        key = [(id(params[0]), len(params)) for params in groups]
        seen = self._seen.get(optimizer)
        if seen is None or seen[0] != key:
            small = [param for params in groups for param in params if _is_small(param)]
            with decided():  # ranks may step a script's optimizers in different orders
                seen = self._seen[optimizer] = key, any(map(_is_replicated_by_torch, small))
        return seen[1]


def _is_small(param: Any) -> bool:
    return isinstance(param, DTensor) and any(rows < ranks for rows, ranks in cuts(param))


@torch.no_grad()
def _is_replicated_by_torch(param: Any) -> bool:
    result: Any = torch.sqrt(param)
    return bool(placements_of(result) != placements_of(param))
