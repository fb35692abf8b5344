"""What ranks hold of tensors that FSDP1 keeps in flat parameters: parameters, and an optimizer's state of them.

A unit's parameters lie one after the other in its flat parameter, which is cut into equal parts, one per rank. So
a rank has a run of elements of a parameter, all of it, or nothing. Its optimizer's state is divided alike.
"""

import itertools
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.optim import Optimizer

from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import FlatParameter, divided_over, flat_parameter
from fsdplaunch.runtime.torch_internals.tensors import change_count

Key = tuple[int, int, int]
"""A parameter's model, unit and place in it, the same on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatShard:
    """This rank's elements of one tensor.

    Attributes:
        local: They, flat; none where all are on other ranks.
        start: Where they begin among the elements of the full tensor.
        shape: The full tensor's.
        strides: How it lies in memory.
        ranks: Those that have elements of it, in order.
        changed: How often this rank's were changed in place; None where it has none.
    """

    local: torch.Tensor
    start: int
    shape: torch.Size
    strides: tuple[int, ...]
    ranks: tuple[int, ...]
    changed: int | None

    @property
    def dtype(self) -> torch.dtype:
        """Return the full tensor's dtype."""
        return self.local.dtype

    def shaped(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of all its elements in their order."""
        return elements.as_strided(self.shape, self.strides).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPlace:
    """Where one parameter lies.

    Attributes:
        key: Its name among ranks.
        flat: The flat parameter.
        number: Its place in it.
        ranks: Those that have elements of it, in order.
    """

    key: Key
    flat: FlatParameter
    number: int
    ranks: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """Return the full parameter's shape."""
        return self.flat.shapes[self.number]

    def parameter(self) -> FlatShard:
        """Return this rank's elements of the parameter, in full precision, whatever is gathered now."""
        shown = self.flat.params[self.number] if self.flat.params else None
        counted = self.flat.tensor if shown is None else shown
        own = self._cut(self.flat.shard)
        if shown is not None and shown.numel() == own.numel() and shown.dtype == own.dtype:
            own = shown.detach().reshape(-1)  # the script may have given it other data
        return self._shard(own, _changes(counted))

    def state(self, value: torch.Tensor) -> FlatShard | None:
        """Return this rank's elements of a tensor of the parameter's state; None where it is not divided alike."""
        if value.dim() == 0:
            return None
        own = value.detach().reshape(-1)
        wanted = len(self._own()) if self.flat.params else self.flat.shard.numel()
        if own.numel() != wanted:
            return None
        return self._shard(own if self.flat.params else self._cut(own), _changes(value))

    def nothing(self, dtype: torch.dtype) -> FlatShard:
        """Return what a rank without elements has of a tensor of the parameter's state."""
        return self._shard(torch.empty(0, dtype=dtype), 0)

    def _own(self) -> range:
        """Return which elements of this rank's shard are the parameter's."""
        info = self.flat.places[self.number]
        return (
            range(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard) if info.in_shard else range(0)
        )

    def _cut(self, shard: torch.Tensor) -> torch.Tensor:
        return shard[self._own().start : self._own().stop]

    def _shard(self, local: torch.Tensor, changed: int) -> FlatShard:
        info = self.flat.places[self.number]
        return FlatShard(
            local=local,
            start=info.intra_param_start_idx if info.in_shard else 0,
            shape=self.shape,
            strides=self.flat.strides[self.number],
            ranks=self.ranks,
            changed=changed if local.numel() else None,
        )


def places_of(unit: Any, key: tuple[int, int]) -> list[FlatPlace]:
    """Return the places of a unit's parameters.

    Args:
        unit: A wrapper of FSDP1.
        key: The numbers of its model and its own.
    """
    flat = flat_parameter(unit)
    if flat is None:
        return []
    group = dist.get_process_group_ranks(unit.process_group)
    return [
        FlatPlace(key=(*key, number), flat=flat, number=number, ranks=_ranks(group, begin, end, flat.shard_numel))
        for number, (begin, end) in enumerate(_extents(flat))
    ]


def _extents(flat: FlatParameter) -> Iterator[tuple[int, int]]:
    """Yield where each parameter begins and ends in the whole flat parameter."""
    ends = list(itertools.accumulate(flat.counts))
    for count, end, is_padding in zip(flat.counts, ends, flat.is_padding, strict=True):
        if not is_padding:
            yield end - count, end


def _ranks(group: list[int], begin: int, end: int, part: int) -> tuple[int, ...]:
    return tuple(group[begin // part : (end - 1) // part + 1]) if begin < end else ()


def number_units(model: nn.Module, number: int) -> None:
    """Give each wrapper of a model a name that stays, whoever takes wrappers out of the model for a while.

    Args:
        model: Sharded by FSDP1, or not.
        number: The model's, the same on all ranks.
    """
    for unit_number, unit in enumerate(fsdp1_wrappers(model)):
        _units[unit] = number, unit_number
        flat = flat_parameter(unit)
        for tensor in () if flat is None else (flat.tensor, *flat.params):  # ranks begin in ways of their own
            _begun[id(tensor)] = change_count(tensor)


def unit_key(unit: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of a wrapper's model and its own; None where ranks know no such wrapper."""
    return _units.get(unit)


def places_in_units() -> dict[Key, FlatPlace]:
    """Return the places of all parameters in wrappers that have names, by the parameters' own."""
    return {place.key: place for unit, key in list(_units.items()) for place in places_of(unit, key)}


_units: "weakref.WeakKeyDictionary[nn.Module, tuple[int, int]]" = weakref.WeakKeyDictionary()
_begun: dict[int, int] = {}
"""Changes that count no more, by the id of what is changed: models, which stay until the script ends."""


def by_trained(places: dict[Key, FlatPlace]) -> dict[int, list[FlatPlace]]:
    """Return, by the id of what an optimizer trains, the places in it: of one parameter, or of a flat one all."""
    found: dict[int, list[FlatPlace]] = {}
    for place in places.values():
        trained: Any = place.flat.params[place.number] if place.flat.params else place.flat.tensor
        found.setdefault(id(trained), []).append(place)
    return found


def parameter_name(place: FlatPlace) -> str:
    """Return the name by which ranks ask for a parameter."""
    return json.dumps(["flat", *place.key])


def state_name(optimizer: int, place: FlatPlace, key: str) -> str:
    """Return the name by which ranks ask for a tensor of an optimizer's state."""
    return json.dumps(["flat state", optimizer, key, *place.key])


def find_flat(name: list[Any], places: dict[Key, FlatPlace], optimizers: dict[int, Optimizer]) -> FlatShard | None:
    """Return what this rank has of a tensor; None where it has no such tensor.

    Args:
        name: What was asked for, parsed.
        places: Of `places_in`.
        optimizers: By number.
    """
    place = places.get(tuple(name[-3:]))
    if place is None or name[0] == "flat":
        return None if place is None else place.parameter()
    _, number, key, *_ = name
    value = state_of(optimizers.get(number), place).get(key)
    return place.state(value) if isinstance(value, torch.Tensor) else None


def state_of(optimizer: Optimizer | None, place: FlatPlace) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter on this rank, or of the flat one around it."""
    trained: Any = place.flat.params[place.number] if place.flat.params else place.flat.tensor
    return {} if optimizer is None else dict(optimizer.state.get(trained, {}))


def described(kept: dict[str, Any]) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter without the values of its tensors, as JSON has it.

    Returns:
        For each key the dtype of a divided tensor as `["divided", dtype]`, a tensor without dimensions as
        `["number", dtype, value]`, and what else JSON can tell as `["plain", value]`.
    """
    return {key: _described(value) for key, value in kept.items()}


def _described(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return ["plain", value if isinstance(value, int | float | str | None) else None]
    dtype = str(value.dtype).removeprefix("torch.")
    return ["divided", dtype] if value.dim() else ["number", dtype, value.item()]


def is_divided_over_all(model: nn.Module) -> bool:
    """Return whether FSDP1 has divided a model over all ranks of the run, in replicas or not."""
    units = fsdp1_wrappers(model)
    strategies: set[Any] = {unit.sharding_strategy for unit in units}
    over_all = all(divided_over(unit) == dist.get_world_size() for unit in units)
    return over_all and bool(strategies - {ShardingStrategy.NO_SHARD})


def _changes(tensor: torch.Tensor) -> int:
    return change_count(tensor) - _begun.get(id(tensor), 0)
