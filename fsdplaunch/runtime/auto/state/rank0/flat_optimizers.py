"""An optimizer's state of what FSDP1 has sharded, on rank 0 alone: full tensors, as an unsharded model has them.

With `use_orig_params` under the numbers that parameters have in it, which are those of one process; without, where
it trains flat parameters, under the parameters' names, as `FSDP.optim_state_dict` has them.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.auto.state.late_tensors import StandingTensors
from fsdplaunch.runtime.auto.state.rank0.flat_shards import (
    FlatPlace,
    by_trained,
    places_in_units,
    state_name,
    state_of,
)
from fsdplaunch.runtime.auto.state.rank0.flat_states import FlatSource, inside
from fsdplaunch.runtime.auto.state.rank0.pulling import rank0_saves
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined, named_parameters
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import is_in_flat_parameter

_CALL = "state_dict() of an optimizer that trains what FSDP1 has sharded"
_OWN = ("torch.", "fsdplaunch.")


def answer_for_rank_0() -> None:
    """Have `optimizer.state_dict()` give full tensors where rank 0 alone calls it, else each rank's own."""
    original = Optimizer.state_dict
    if hasattr(original, "fsdplaunch_answers"):
        return

    @functools.wraps(original)
    def state_dict(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        local = original(self, *args, **kwargs)
        by_script = not str(sys._getframe(1).f_globals.get("__name__", "")).startswith(_OWN)
        return local if inside or not by_script or not _is_rank_0s(self) else _by_number_or_name(self, local)

    state_dict.fsdplaunch_answers = True  # type: ignore[attr-defined]
    Optimizer.state_dict = state_dict  # type: ignore[method-assign]


def _is_rank_0s(optimizer: Optimizer) -> bool:
    """Return whether this is rank 0, and makes a call for a state of FSDP1's that the others do not make."""
    saves = rank0_saves()
    if saves is None or not _is_main_thread() or not any(map(is_in_flat_parameter, trained_by(optimizer))):
        return False
    if saves.server is not None:
        saves.position.states += 1
        return False
    return saves.calls_alone()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def trained_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return what an optimizer trains, in the order of the numbers in its state dict."""
    return [param for group in optimizer.param_groups for param in group["params"]]


class _Reader:
    """Reads the state of one optimizer."""

    def __init__(self, optimizer: Optimizer, call: str) -> None:
        self.optimizer = optimizer
        self.call = call
        self.source = FlatSource(call, StandingTensors())
        context = self.source.saves.hook_context
        self.places = by_trained(places_in_units())
        numbers = [number for number, each in context.numbered_optimizers() if each is optimizer]
        self.number = numbers[0] if numbers else -1

    def full(self, place: FlatPlace) -> dict[str, Any]:
        """Return what the optimizer keeps of one parameter; {} where that was not trained."""
        own = state_of(self.optimizer, place)
        if own or not place.ranks or place.ranks[0] == 0:
            return {key: self._of_own(place, key, value) for key, value in own.items()}
        kept = self.source.saves.kept(place.ranks[0], self.number, place.key)
        return {key: self._of_other(place, key, *told) for key, told in kept.items()}

    def _of_own(self, place: FlatPlace, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return value.clone()  # those of one flat parameter would share it
        shard = place.state(value)
        if shard is None:
            msg = f"{self.call} was called on rank 0 only, and {key!r} in it is not divided as the parameter is"
            raise CheckpointError(msg, hint="save by FSDP.optim_state_dict(model, optimizer) on all ranks")
        return self.source.tensor(state_name(self.number, place, key), shard)

    def _of_other(self, place: FlatPlace, key: str, kind: str, *told: Any) -> Any:
        if kind == "plain":
            return told[0]
        dtype = getattr(torch, told[0])
        if kind == "number":
            return torch.tensor(told[1], dtype=dtype)
        return self.source.tensor(state_name(self.number, place, key), place.nothing(dtype))


def _by_number_or_name(optimizer: Optimizer, local: dict[str, Any]) -> dict[str, Any]:
    reader = _Reader(optimizer, _CALL)
    trained = trained_by(optimizer)
    places = [reader.places.get(id(param), []) for param in trained]
    if any(not place.flat.params for several in places for place in several):
        models = list(reader.source.saves.hook_context.numbers)
        return _named(reader, local, lambda: (item for model in models for item in _names(model, reader)))
    state = dict(local["state"])
    for number, found in enumerate(places):
        full = reader.full(found[0]) if found else {}
        if full:
            state[number] = full
    return {**local, "state": {number: state[number] for number in sorted(state)}}


def named_state(model: nn.Module, optimizer: Optimizer, call: str) -> dict[str, Any]:
    """Return what `FSDP.optim_state_dict(model, optimizer)` returns on rank 0 where all ranks call it.

    Args:
        model: Sharded by FSDP1.
        optimizer: Trains it.
        call: The script's, for errors.
    """
    reader = _Reader(optimizer, call)
    return _named(reader, optimizer.state_dict(), lambda: _names(model, reader))


def _named(
    reader: _Reader, local: dict[str, Any], names: Callable[[], Iterator[tuple[int, str, FlatPlace | None]]]
) -> dict[str, Any]:
    """Return a state under the parameters' names; arguments as above, `names` of what is trained."""
    found: dict[int, list[tuple[str, FlatPlace | None]]] = {}
    for trained, name, place in names():
        found.setdefault(trained, []).append((name, place))
    state: dict[Any, Any] = {}
    called: dict[int, list[Any]] = {}
    for number, param in enumerate(trained_by(reader.optimizer)):
        known: list[tuple[Any, FlatPlace | None]] = [*found.get(id(param), [(number, None)])]
        called[number] = [name for name, _ in known]
        for name, place in known:
            full = local["state"].get(number, {}) if place is None else reader.full(place)
            if full:
                state[name] = full
    groups = [
        {**group, "params": [name for number in group["params"] for name in called[number]]}
        for group in local["param_groups"]
    ]
    return {**local, "state": state, "param_groups": groups}


def _names(model: nn.Module, reader: _Reader) -> Iterator[tuple[int, str, FlatPlace | None]]:
    """Yield what may be trained by its id, the names of the parameters in it, and where they lie."""
    flat: set[int] = set()
    units = {id(unit) for unit in fsdp1_wrappers(model)}
    for path, unit in model.named_modules():
        for place in reader.source.places(unit) if id(unit) in units else ():
            trained: Any = place.flat.params[place.number] if place.flat.params else place.flat.tensor
            flat |= {id(trained), id(place.flat.tensor)}
            yield id(trained), clean_name(joined(path, place.flat.names[place.number])), place
    for name, param in named_parameters(model):
        if id(param) not in flat:
            yield id(param), name, None
