"""Gather the full state of a sharded model on rank 0, whoever sharded it and whichever part of it is asked for.

A library's `unwrap_model` returns the module inside of FSDP1's wrapper. Its own `state_dict` would hold this
rank's flat shards; the wrapper has to be asked instead, so wrappers are remembered as they are made.
"""

import functools
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.inspection import clean_name, joined, named_parameters
from fsdplaunch.runtime.inspection.units import fsdp1_wrappers, has_shards, is_sharded
from fsdplaunch.runtime.messages import script_line
from fsdplaunch.runtime.patch import own_attribute, wrap
from fsdplaunch.runtime.rank import rank
from fsdplaunch.runtime.sharding.registry import fsdp1_units
from fsdplaunch.runtime.state_dict.gather import ShardGatherer, gathered, spooled
from fsdplaunch.runtime.state_dict.state_dict_type import state_dict_type
from fsdplaunch.runtime.torch_internals.fsdp import flat_parameter

State = dict[str, Any]


def remember_wrappers() -> None:
    """Note every FSDP1 wrapper that is made from now on, and let the module inside answer as the wrapper does."""

    def construct_and_note(construct: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        fsdp1_units.add(self)
        own, held = type(self.module).state_dict, weakref.ref(self.module)

        def state_dict(*args: Any, **kwargs: Any) -> Any:
            inner: Any = held()
            owner = _owner(inner)
            if args or kwargs.get("destination") is not None or not isinstance(owner, FullyShardedDataParallel):
                return own(inner, *args, **kwargs)
            return below(owner.state_dict(**kwargs), inner, owner)

        self.module.__dict__["state_dict"] = state_dict

    wrap(FullyShardedDataParallel, "__init__", construct_and_note)


def holds_shards(model: nn.Module) -> bool:
    """Return whether anything of a model is sharded, by either FSDP version."""
    if any(map(is_sharded, model.modules())):
        return True
    return _owner(model) is not model or has_shards(model)


def full_state(model: nn.Module, call: str, gathering: ShardGatherer | None = None) -> State:
    """Return a sharded model's state dict in host memory on rank 0, and an empty one elsewhere. Collective.

    Full tensors under the names that the model, or a module of one, had before sharding; tied ones share their
    memory. `gathering` is given by a call that goes on with it.
    """
    together = gathering or ShardGatherer(call, keep=rank() == 0)
    owner = _owner(model)
    if fsdp1_wrappers(owner):
        together.meet()
        if not together.together:
            msg = f"{together.call} was called on rank 0 only, for a model that FSDP1 has sharded"
            raise CheckpointError(msg, hint="take it out of `if rank == 0:` and let rank 0 write")
        options = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with state_dict_type(owner, "full_state_dict", options), _units_spooled(owner):
            state = gathered(below(owner.state_dict(), model, owner), together)
    else:
        state = gathered({clean_name(name): value for name, value in model.state_dict().items()}, together)
    if gathering is None:
        together.leave()
    if rank() != 0:
        return {}
    check_shapes(state, model, call)
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in state.items()}


@contextmanager
def _units_spooled(owner: nn.Module) -> Iterator[None]:
    """Have `state_dict()` of what FSDP1 has sharded put each unit's tensors into files once it is gathered.

    Torch keeps a copy of each unit on rank 0, which would be all of the model; and of tied parameters two.
    """

    def spool(unit: Any, state: State, prefix: str, _metadata: Any) -> None:
        flat = flat_parameter(unit)
        for key in [key for key in state if key.startswith(prefix) and key not in done]:
            done.add(key)
            if isinstance(state[key], torch.Tensor) and state[key].is_cpu and not isinstance(state[key], DTensor):
                state[key] = spooled(state[key])
        if flat is None:
            return
        keys = {clean_name(key): key for key in state}
        for shared in flat.shared:
            first = keys.get(clean_name(prefix + joined(shared.prim_module_name, shared.prim_param_name)))
            second = keys.get(clean_name(prefix + joined(shared.module_name, shared.param_name)))
            if first is not None and second is not None:
                state[second] = state[first].detach()

    done: set[str] = set()
    with ExitStack() as stack:
        for unit in fsdp1_wrappers(owner):
            stack.callback(unit.register_state_dict_post_hook(spool).remove)
        yield


def check_shapes(state: Mapping[str, Any], model: nn.Module, call: str) -> None:
    """Refuse a state whose tensors are shards: not of the shapes that the full model has."""
    shapes = full_shapes(model)
    for name, value in state.items():
        found, wanted = getattr(value, "shape", None), shapes.get(clean_name(name))
        if found is not None and wanted is not None and tuple(found) != wanted:
            msg = f"{call} at {script_line()}: {name} has shape {list(found)}, the model's is {list(wanted)}"
            hint = "leave state_dict= out, or give it what accelerator.get_state_dict(model) returns"
            raise CheckpointError(msg, hint=hint)


def full_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each parameter of a model that is sharded or not, by its name before sharding."""
    owner = _owner(model)
    if not fsdp1_wrappers(owner):
        return {name: tuple(param.shape) for name, param in named_parameters(model, remove_duplicate=False)}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, unit in owner.named_modules():
        flat = flat_parameter(unit) if isinstance(unit, FullyShardedDataParallel) else None
        if flat is not None:
            own = zip(flat.names, flat.shapes, strict=True)
            shapes |= {joined(clean_name(name), each): tuple(shape) for each, shape in own}
    shapes |= {other: shapes[first] for first, other in tied_in_flat(owner)}
    return below(shapes, model, owner)


def tied_in_flat(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the first name of each parameter that FSDP1 holds once for several, with each further name."""
    for name, unit in model.named_modules():
        flat = flat_parameter(unit) if isinstance(unit, FullyShardedDataParallel) else None
        for shared in flat.shared if flat is not None else ():
            first = clean_name(joined(name, shared.prim_module_name, shared.prim_param_name))
            yield first, clean_name(joined(name, shared.module_name, shared.param_name))


def _owner(model: nn.Module) -> nn.Module:
    """Return the outermost FSDP1 wrapper around a module; the module itself when there is none."""
    around = [wrapper for wrapper in fsdp1_units if any(module is model for module in wrapper.modules())]
    return max(around, key=lambda wrapper: sum(1 for _ in wrapper.modules()), default=model)


def below(values: Mapping[str, Any], model: nn.Module, owner: nn.Module) -> State:
    """Return what of an owner's values belongs to a model inside, by the model's own names."""
    place = next(name for name, module in owner.named_modules(remove_duplicate=False) if module is model)
    prefix = f"{clean_name(place)}." if clean_name(place) else ""
    cleaned = {clean_name(name): value for name, value in values.items()}
    return {name.removeprefix(prefix): value for name, value in cleaned.items() if name.startswith(prefix)}


_known: list[tuple[nn.Module, Mapping[str, Any]]] = []
"""Models and what was gathered of them, the last first asked."""


@contextmanager
def knowing_state(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Have `state_dict()` of a model and of each module inside be what was gathered, for a while."""

    def answer(module: nn.Module, *args: Any, prefix: str = "", **kwargs: Any) -> Any:
        known = known_state(module)
        if known is None or args or kwargs.get("destination") is not None:  # asked for by a module around it
            return type(module).state_dict(module, *args, prefix=prefix, **kwargs)
        return {prefix + name: value for name, value in known.items()}

    _known.append((model, state))
    try:
        with ExitStack() as stack:
            for module in model.modules():
                stack.enter_context(own_attribute(module, "state_dict", functools.partial(answer, module)))
            yield
    finally:
        _known.pop()


def known_state(model: nn.Module) -> State | None:
    """Return what was gathered of a model, by its own names; None where nothing was."""
    for owner, state in reversed(_known):
        if any(module is model for module in owner.modules()):
            return below(state, model, owner)
    return None
