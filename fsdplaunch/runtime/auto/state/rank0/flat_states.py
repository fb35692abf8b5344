"""State dicts of what FSDP1 has sharded, on rank 0 alone: full tensors under plain names, fetched when read.

What a state dict holds are late tensors: each is put together of the ranks' shards when it is written, copied or
computed with, so that rank 0 holds one of them at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.state.late_storages import SMALLEST
from fsdplaunch.runtime.auto.state.late_tensors import LateTensors
from fsdplaunch.runtime.auto.state.rank0.flat_shards import (
    FlatPlace,
    FlatShard,
    parameter_name,
    places_of,
    unit_key,
)
from fsdplaunch.runtime.auto.state.rank0.pulling import Rank0Saves, rank0_saves
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.script_line import script_line
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import (
    WRAPPED_ATTRIBUTE,
    flat_parameter,
    original_buffer_dtypes,
    showing_full,
)

HINT = "take it out of `if rank == 0:` and let rank 0 write: what FSDP1 has sharded is gathered by all ranks"
inside: list[bool] = []
"""Not empty inside of a call that gathers what FSDP1 has sharded, which calls others."""


@contextmanager
def being_inside() -> Iterator[None]:
    """Note that calls which gather are made by another one that does."""
    inside.append(True)
    try:
        yield
    finally:
        inside.pop()


class FlatSource:
    """Gives full tensors to one state dict of rank 0.

    Args:
        call: The script's, for errors.
        late: What holds the tensors until they are read; None where their values are wanted at once.
    """

    def __init__(self, call: str, late: LateTensors | None) -> None:
        saves = rank0_saves()
        if saves is None:
            raise AssertionError
        self.saves: Rank0Saves = saves
        self.call = call
        self._late = late
        self._steps = saves.position.steps

    def places(self, unit: Any) -> list[FlatPlace]:
        """Return where a unit's parameters lie.

        Raises:
            CheckpointError: The ranks have no name for the unit: nothing has trained its model yet.
        """
        key = unit_key(unit)
        if key is not None:
            return places_of(unit, key)
        if flat_parameter(unit) is None:
            return []
        raise alone(self.call, HINT)

    def tensor(self, name: str, shard: FlatShard) -> torch.Tensor:
        """Return a full tensor, or what stands for it until it is read."""
        fetch = partial(self.saves.flat, name, shard, self.call, self._steps)
        small = shard.shape.numel() * shard.dtype.itemsize < SMALLEST
        return fetch() if small or self._late is None else self._late.tensor(shard.shape, shard.dtype, fetch)


def alone(call: str, hint: str) -> CheckpointError:
    """Return the error of a call on rank 0 that it cannot make alone."""
    saves = rank0_saves()
    where = next(iter(saves.where.items()), None) if saves is not None else None
    other = f": rank {where[0]} went on, to {where[1]}" if where else ""
    return CheckpointError(f"{call} at {script_line()} was called on rank 0 only{other}", hint=hint)


def model_state(model: nn.Module, source: FlatSource, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what `state_dict()` of a wrapper returns where all ranks call it, in host memory.

    Args:
        model: A wrapper of FSDP1.
        source: Gives the full tensors.
        args: As for `Module.state_dict`.
        kwargs: Likewise.

    Raises:
        CheckpointError: Another rank has other shards, or has ended.
    """
    units = fsdp1_wrappers(model)
    full = _full_parameters(units, source)
    with showing_full(units, full), being_inside():
        state: dict[str, Any] = nn.Module.state_dict(model, *args, **kwargs)
    _rename(state)
    _restore_buffers(state, model, str(kwargs.get("prefix", "")))
    return state


def _full_parameters(units: list[Any], source: FlatSource) -> dict[int, dict[str, Any]]:
    """Return the full parameters by their attributes, by the ids of their modules."""
    full: dict[int, dict[str, Any]] = {}
    for unit in units:
        places = source.places(unit)
        for place in places:
            info = place.flat.infos[place.number]
            tensor = source.tensor(parameter_name(place), place.parameter())
            full.setdefault(id(info.module), {})[info.param_name] = tensor
        for shared in places[0].flat.shared if places else ():
            tied = full[id(shared.prim_module)][shared.prim_param_name]
            full.setdefault(id(shared.module), {})[shared.param_name] = tied
    return full


def _rename(state: dict[str, Any]) -> None:
    """Take the wrappers out of the names, in place and in order."""
    items = [(key.replace(f"{WRAPPED_ATTRIBUTE}.", ""), value) for key, value in state.items()]
    state.clear()
    state.update(items)


def _restore_buffers(state: dict[str, Any], model: nn.Module, prefix: str) -> None:
    """Give buffers the dtype that they had before FSDP1 computed with them in another one."""
    for name, unit in model.named_modules():
        dtypes = original_buffer_dtypes(unit) if isinstance(unit, FullyShardedDataParallel) else {}
        for buffer, dtype in dtypes.items():
            key = prefix + joined(clean_name(name), buffer)
            if key in state and state[key].dtype is not dtype:
                state[key] = state[key].to(dtype)
