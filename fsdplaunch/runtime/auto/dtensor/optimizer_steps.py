"""Let torch's own optimizers step without our handlers: they compute with shards alone, and often."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdplaunch.runtime.auto.dtensor.reads import decided
from fsdplaunch.runtime.auto.dtensor.row_loops import put_kept_rows
from fsdplaunch.runtime.auto.dtensor.shard_handlers import cuts, full_tensor
from fsdplaunch.runtime.state_dict.split_like import split_like
from fsdplaunch.runtime.torch_internals.dtensor import operator_handlers, placements_of, use_operator_handlers

_BY_ELEMENT = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD"}
)
"""Those of torch that update each element by its own history: all that they make is placed as the parameter is."""
_Table = dict[Any, Any]


@contextmanager
def stepping_without_handlers(
    operators: Iterable[Any], asking: Set[Any], wrap: Callable[[], None]
) -> Iterator[None]:
    """Take handlers out of DTensor's table for the time of such a step.

    A step with a closure computes what the script does in it.

    Args:
        operators: Whose handlers no such step needs.
        asking: Whose handlers no optimizer's step needs: they ask whether rank 0 computes alone.
        wrap: Wraps the methods that update shards: torch adds only what is placed alike to one of few rows.
    """
    steps, handlers, asked = _Steps(), _Handlers([frozenset(operators), asking]), _Handlers([asking])

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        put_kept_rows()
        if (len(args) > 1 or kwargs) and any(each is not None for each in (*args[1:], *kwargs.values())):
            return
        _place_gradients(optimizer)
        seen = steps.look_at(optimizer)
        (handlers if seen.by_element else asked).take_out()
        if seen.small and (seen.replicates or any(map(_has_other_gradient, seen.small))):
            wrap()

    def end(*_: Any) -> None:
        for each in (handlers, asked):
            if each.are_out:
                each.put_back()

    with ExitStack() as stack:
        stack.callback(end)  # a step that failed has not
        stack.callback(register_optimizer_step_pre_hook(begin).remove)
        stack.callback(register_optimizer_step_post_hook(end).remove)
        yield


def _place_gradients(optimizer: Optimizer) -> None:
    """Give each parameter a gradient of its own kind, where the script has set one of the other.

    Plain ones are full (`p.grad = torch.from_numpy(g)`). Plain parameters are copies of the weights that the
    script steps in their place, in higher precision (`master.grad = p.grad.float()`).
    """
    for group in optimizer.param_groups:
        params: list[Any] = group["params"]
        for param in params:
            gradient = param.grad
            if gradient is None or isinstance(gradient, DTensor) is isinstance(param, DTensor):
                continue
            param.grad = split_like(gradient, param) if isinstance(param, DTensor) else full_tensor(gradient)


class _Handlers:
    """Two tables, of which DTensor has one at a time: to exchange entries touches hundreds of objects a step."""

    def __init__(self, operators: Sequence[Set[Any]]) -> None:
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
            self._rest = {
                op: each for op, each in table.items() if not any(op in each for each in self._operators)
            }
            self._lengths = len(table), len(self._rest)
        use_operator_handlers(self._rest)

    def put_back(self) -> None:
        self.are_out = False
        if operator_handlers() is self._rest:
            if len(self._rest) != self._lengths[1]:  # something was put into it meanwhile
                self._full |= self._rest
            use_operator_handlers(self._full)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What an optimizer steps over.

    Attributes:
        key: Tells its parameters from others.
        by_element: Whether it updates each element by its own history.
        small: Its shards of fewer rows than ranks.
        replicates: Whether torch makes full tensors of those to compute with them, as older versions do.
    """

    key: Any
    by_element: bool
    small: tuple[Any, ...]
    replicates: bool


class _Steps:
    """What was seen of each optimizer; looked at anew where its parameters are others."""

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = weakref.WeakKeyDictionary()

    def look_at(self, optimizer: Optimizer) -> _Seen:
        """Return what an optimizer steps over. Collective at its first step, where torch replicates."""
        groups = [group["params"] for group in optimizer.param_groups if group["params"]]
        key = [(id(params[0]), len(params)) for params in groups]
        seen = self._seen.get(optimizer)
        if seen is None or seen.key != key:
            kind = type(optimizer)
            by_element = kind.__name__ in _BY_ELEMENT and kind.__module__.startswith("torch.optim.")
            small = tuple(param for params in groups for param in params if _is_small(param))
            with decided():  # ranks may step a script's optimizers in different orders
                replicates = any(map(_is_replicated_by_torch, small))
            seen = self._seen[optimizer] = _Seen(key, by_element, small, replicates)
        return seen


def _is_small(param: Any) -> bool:
    return isinstance(param, DTensor) and any(rows < ranks for rows, ranks in cuts(param))


@torch.no_grad()
def _is_replicated_by_torch(param: Any) -> bool:
    result: Any = torch.sqrt(param)
    return bool(placements_of(result) != placements_of(param))


def _has_other_gradient(param: Any) -> bool:
    """Return whether the script has set a gradient that is not placed as its shard is."""
    return isinstance(param.grad, DTensor) and placements_of(param.grad) != placements_of(param)
