"""Keep what a model's forward, or a hook, writes into parameters: a momentum encoder, a weight that is clamped.

Needed because a unit computes with gathered parameters, which are thrown away: what was written there is to be in
the shards when the unit gives them back.
"""

import weakref
from typing import Any

import torch
from torch import nn

from fsdplaunch.runtime.inspection.units import is_unit
from fsdplaunch.runtime.state_dict.split_like import cut_to_shard
from fsdplaunch.runtime.torch_internals.dtensor import local_tensor
from fsdplaunch.runtime.torch_internals.fsdp.gathered_parameters import (
    before_giving_back,
    call_when_gathered,
    gathered_now,
    group_refs,
)
from fsdplaunch.runtime.torch_internals.tensors import counted_changes

_gathered: dict[int, "weakref.ref[torch.Tensor]"] = {}
"""The tensors that torch gathers parameters into, by their ids."""
_taken: set[int] = set()
"""Those whose `.data` was taken in this pass: what is written there is not counted."""
_get: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def keep_written(model: nn.Module) -> None:
    """Have the units of a model that was just sharded keep what is written while they are gathered."""
    for unit in filter(is_unit, model.modules()):
        for group in group_refs(unit):
            _Written(group)


class _Written:
    """How often the parameters of one group were changed until it last gave them back.

    Looked at where the group gives back, and not by hooks: those of the script may write before and after ours.
    """

    def __init__(self, group: "weakref.ref[Any]") -> None:
        self.group = group
        self.gathered: list[torch.Tensor] = []
        self.counts: list[int] = []
        call_when_gathered(group, self.note)
        before_giving_back(group, self.gathered, self.counts, _taken, self.keep)

    def note(self, gathered: torch.Tensor) -> None:
        """Know a parameter's tensor, into which torch gathers from then on."""
        number = id(gathered)
        _gathered[number] = weakref.ref(gathered, lambda _: _gathered.pop(number, None))
        self.gathered.append(gathered)
        self.counts.append(counted_changes(gathered))

    def keep(self) -> None:
        """Write into the shards what has changed."""
        before, self.counts[:] = list(self.counts), map(counted_changes, self.gathered)
        for earlier, now, (gathered, shard) in zip(before, self.counts, gathered_now(self.group), strict=False):
            if now != earlier or id(gathered) in _taken:
                _taken.discard(id(gathered))
                _write(gathered, shard)


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
