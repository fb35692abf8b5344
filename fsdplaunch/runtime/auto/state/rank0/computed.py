"""Name what a script computes from shards on every rank, so that rank 0 can save it alone.

`mean[name] = 0.9 * mean[name] + 0.1 * param.detach()` makes a new shard at every step, whose parts on other ranks
rank 0 could not ask for. The name of one is a digest of the operator, its numbers and the names of what it was
computed from: the same on every rank that computed the same.
"""

import hashlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdplaunch.runtime.auto.context import HookContext
from fsdplaunch.runtime.auto.dtensor.shard_handlers import Handler
from fsdplaunch.runtime.auto.state.rank0.copies import name_of_copy, remember_copy
from fsdplaunch.runtime.auto.state.rank0.shard_names import ShardName, changes, identity, named_shards, numbered

_MARK = "fsdplaunch_computed"
_SHARES = {torch.ops.aten.mul.Tensor: "mul", torch.ops.aten.div.Tensor: "div"}


@dataclass(frozen=True, slots=True)
class Computed:
    """How a shard was computed.

    Attributes:
        digest: Hexadecimal, of the operator and what it was given.
        begun: How often the shard had been changed when it was made.
    """

    digest: str
    begun: int

    def __deepcopy__(self, memo: Any) -> "Computed":
        """Return itself: a copy of the shard has a name of its own."""
        return self


_alive: "weakref.WeakValueDictionary[int, DTensor]" = weakref.WeakValueDictionary()
"""What was computed, by ids, in the order in which it was made."""


def is_computed(name: ShardName) -> bool:
    """Return whether a name is that of something computed, which one rank alone may have done."""
    return bool(json.loads(name)[0] == "computed")


def named_computed() -> Iterator[tuple[ShardName, DTensor]]:
    """Yield what was computed from shards and is alive, with names that are the same on every rank that did.

    What was computed alike has numbers in its names, and how many there are: where only one rank computed a
    further one, no name is the same.
    """
    alike: dict[ShardName, list[DTensor]] = {}
    for tensor in list(_alive.values()):
        alike.setdefault(_name(tensor), []).append(tensor)
    for name, tensors in alike.items():
        for number, tensor in enumerate(tensors):
            yield numbered(name, number, len(tensors)), tensor


def _name(tensor: DTensor) -> ShardName:
    mark: Computed = tensor.__dict__[_MARK]
    return json.dumps(["computed", mark.digest, changes(tensor) - mark.begun])


class Namer:
    """Gives names to what operators compute from shards.

    Args:
        hook_context: This worker's.
    """

    def __init__(self, hook_context: HookContext) -> None:
        self._hook_context = hook_context
        self._named: dict[tuple[Any, ...], tuple[ShardName, DTensor]] = {}
        self._place: tuple[int, int] | None = None

    def naming(self, handler: Handler) -> Handler:
        """Return a handler that names what another one computes."""

        def compute(func: Any, args: Any, kwargs: Any) -> Any:
            result = handler(func, args, kwargs)
            if type(result) is DTensor and self._hook_context.size > 1 and not torch.compiler.is_compiling():
                self._note_share(result, func, args)
                self._mark(result, func, args, kwargs)
            return result

        return compute

    def _note_share(self, result: DTensor, func: Any, args: Any) -> None:
        """Remember `(1 - decay) * value` as a copy of the value: rank 0 alone may keep an average."""
        method = _SHARES.get(func)
        if method is not None and isinstance(args[0], DTensor) and isinstance(args[1], int | float):
            position = self._hook_context.position
            remember_copy(result, args[0], (method, args[1:], {}), (position.steps, position.passes))

    def _mark(self, result: DTensor, func: Any, args: Any, kwargs: Any) -> None:
        given = [self._describe(each) for each in (*args, *kwargs.values())]
        if None in given or not result.dim():
            return
        digest = hashlib.sha256(json.dumps([str(func), given, list(kwargs)]).encode()).hexdigest()
        result.__dict__[_MARK] = Computed(digest, changes(result))
        _alive[id(result)] = result

    def _describe(self, value: Any) -> str | None:
        """Return what an operator was given, in the same words on every rank; None where there are none."""
        if isinstance(value, DTensor):
            return self._describe_shard(value)
        if isinstance(value, torch.Tensor):
            return repr(value.item()) if not value.dim() and value.device.type == "cpu" else None
        return repr(value)

    def _describe_shard(self, shard: DTensor) -> str | None:
        if _MARK in shard.__dict__:
            return _name(shard)
        copied = name_of_copy(shard, self._describe_shard)
        if copied is not None:
            return copied
        name, named = self._look_up().get(identity(shard), (None, shard))
        return name and json.dumps([name, *(self._place or ()), changes(named), changes(shard)])

    def _look_up(self) -> dict[tuple[Any, ...], tuple[ShardName, DTensor]]:
        """Return the parameters, and what optimizers keep, as they are at this step, with their names."""
        position = self._hook_context.position
        place = position.steps, position.passes
        if place != self._place:
            self._place = place
            self._named = {identity(each): (name, each) for name, each in named_shards(self._hook_context)}
        return self._named
