"""Keep what a model's own forward writes into parameters: a momentum encoder, a weight that is clamped or normed.

Needed because a unit computes with gathered parameters, which are thrown away: what a forward has written there is
to be in the shards when the unit gives them back.
"""

import weakref
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.state_dict.optim_state_dict import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import gathered_now, group_refs
from fsdplaunch.runtime.torch_internals.tensors import counted_changes

_gathered: dict[int, "weakref.ref[torch.Tensor]"] = {}
"""The tensors that torch gathers parameters into, by their ids."""
_taken: set[int] = set()
"""Those whose `.data` was taken in this pass: what is written there is not counted."""
_get: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def keep_written(model: nn.Module) -> None:
    """Have the units of a model that was just sharded keep what their forward writes."""
    for unit in filter(is_unit, model.modules()):
        _Written(unit)


class _Written:
    """What one unit's parameters were when its pass began, by hooks inside of the gathering."""

    def __init__(self, unit: nn.Module) -> None:
        self.groups = group_refs(unit)
        self.gathered: list[torch.Tensor] = []
        self.counts: list[int] = []
        unit.register_forward_pre_hook(self.begin)
        unit.register_forward_hook(self.end, prepend=True)

    def begin(self, *_: Any) -> None:
        """Note how often each parameter was changed so far."""
        if torch.compiler.is_compiling():
            return
        if not self.gathered:  # torch gathers into the same tensors from then on
            self.gathered = [gathered for gathered, _ in self.pairs()]
            for gathered in self.gathered:
                _note(gathered)
        self.counts = list(map(counted_changes, self.gathered))

    def end(self, *_: Any) -> None:
        """Write into the shards what has changed."""
        if torch.compiler.is_compiling():
            return
        counts = list(map(counted_changes, self.gathered))
        if counts == self.counts and not _taken:
            return
        for before, count, (gathered, shard) in zip(self.counts, counts, self.pairs(), strict=False):
            if count != before or id(gathered) in _taken:
                _taken.discard(id(gathered))
                _write(gathered, shard)

    def pairs(self) -> list[tuple[Any, Any]]:
        """Return the unit's parameters as they are gathered, each with its shard."""
        return [pair for ref in self.groups for pair in gathered_now(ref)]


def _note(gathered: torch.Tensor) -> None:
    number = id(gathered)
    _gathered[number] = weakref.ref(gathered, lambda _: _gathered.pop(number, None))


def is_gathered(param: Any) -> bool:
    """Return whether a plain tensor is one that torch gathers a parameter into."""
    known = _gathered.get(id(param))
    return known is not None and known() is param


def take_data(param: Any) -> Any:
    """Return a parameter's `.data`; what is written there is looked for when its unit's pass ends."""
    if id(param) in _gathered and is_gathered(param):
        _taken.add(id(param))
    return _get(param)


def put_data(param: Any, value: torch.Tensor) -> None:
    """Write what the script makes a gathered parameter's `.data`: torch gathers into the same memory again."""
    _taken.add(id(param))
    _get(param).copy_(value)


@torch.no_grad()
def _write(gathered: torch.Tensor, shard: Any) -> None:
    """Write what has changed: gathered in a lower precision, the rest is rounded."""
    local = local_tensor(shard)
    new = local_tensor(cut_to_shard(gathered.detach(), shard))
    local.copy_(torch.where(new != local.to(new.dtype), new.to(local.dtype), local))
