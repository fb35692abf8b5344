"""What `model.state_dict()` holds for a while: full tensors, shards, or FSDP1's flat shards."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.inspection.parameters import clean_name, joined
from fsdplaunch.runtime.inspection.units import fsdp_modules, refuse_of_xla
from fsdplaunch.runtime.messages import quiet_torch
from fsdplaunch.runtime.plugin import state_dict_name
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.state_dict.gather import split_like
from fsdplaunch.runtime.state_dict.options import optimizer_config, state_config
from fsdplaunch.runtime.torch_internals.fsdp import (
    FLAT_PARAMETER,
    WRAPPED_ATTRIBUTE,
    FlatParameter,
    flat_parameter,
    without_mesh,
)


def flat_layout(model: nn.Module) -> dict[str, Any]:
    """Say what each flat parameter of a model is made of, in plain data.

    Args:
        model: Sharded by FSDP1, with flat parameters (`use_orig_params` false).

    Returns:
        For each flat parameter, by its name in a local state dict: `ranks`, which hold its parts in this order;
        `part`, the elements of each part but the last; and `runs`, the whole's runs of elements in their order,
        each as `[names, shape]`: a parameter with all its names, or padding without any. One that holds a
        parameter in another order than row by row is left out.
    """
    return {
        joined(clean_name(name), FLAT_PARAMETER): layout
        for name, unit in model.named_modules()
        if isinstance(unit, FullyShardedDataParallel) and (layout := _describe(unit, clean_name(name))) is not None
    }


def _describe(unit: FullyShardedDataParallel, prefix: str) -> dict[str, Any] | None:
    flat = flat_parameter(unit)
    if flat is None or not all(flat.is_contiguous):
        return None
    return {
        "ranks": dist.get_process_group_ranks(unit.process_group),
        "part": flat.shard_numel,
        "runs": list(_runs(flat, prefix)),
    }


def _runs(flat: FlatParameter, prefix: str) -> Iterator[list[Any]]:
    """Yield the runs of a flat parameter; a tied parameter lies there once and has several names."""
    names: dict[tuple[int, str], list[str]] = {
        (id(info.module), info.param_name): [fqn] for info, fqn in zip(flat.infos, flat.names, strict=True)
    }
    for shared in flat.shared:
        first = names[id(shared.prim_module), shared.prim_param_name]
        first.append(joined(shared.module_name, shared.param_name))
    known = zip(names.values(), flat.shapes, strict=True)
    for count, is_padding in zip(flat.counts, flat.is_padding, strict=True):
        if is_padding:
            yield [[], [count]]
        else:
            own, shape = next(known)
            yield [[joined(prefix, clean_name(name)) for name in own], list(shape)]


State = dict[str, Any]


@contextmanager
def local_state(model: nn.Module) -> Iterator[None]:
    """Have `model.state_dict()` and `load_state_dict` take torch's LOCAL_STATE_DICT inside the context.

    Raises:
        UsageError: The model has replicas, of which torch finds the ranks of one only.
    """
    units = {clean_name(name): each for name, each in model.named_modules() if _is_unit(each)}
    first = next(iter(units.values()))
    if dist.get_world_size(first.process_group) < dist.get_world_size():
        msg = "LOCAL_STATE_DICT cannot hold a model with replicas (HYBRID_SHARD)"
        raise UsageError(msg, hint="use SHARDED_STATE_DICT")
    handles = _Hooks(model, units).attach(model)
    try:
        with without_mesh(list(units.values())):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FullyShardedDataParallel)


class _Hooks:
    """Exchange the parameters that `use_orig_params` shows for the flat shards they are parts of."""

    def __init__(self, model: nn.Module, units: dict[str, Any]) -> None:
        names = {id(param): clean_name(name) for name, param in model.named_parameters()}
        found = {prefix: flat_parameter(unit) for prefix, unit in units.items()}
        self.flat = {joined(prefix, FLAT_PARAMETER): flat for prefix, flat in found.items() if flat is not None}
        self.shown = {
            key: {names[id(param)]: param for param in flat.params if id(param) in names}
            for key, flat in self.flat.items()
        }
        self.wrapped = isinstance(model, FullyShardedDataParallel)

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Register the hooks; torch marks them, which it can do to functions only."""

        def give(_module: nn.Module, state: State, prefix: str, _metadata: Any) -> None:
            self._give(state, prefix)

        def take(_module: nn.Module, state: State, prefix: str, *_: Any) -> None:
            self._take(state, prefix)

        def forget(_module: nn.Module, keys: Any) -> None:
            self._forget(keys.unexpected_keys)

        return [
            model.register_state_dict_post_hook(give),
            model.register_load_state_dict_pre_hook(take),
            model.register_load_state_dict_post_hook(forget),
        ]

    def _give(self, state: State, prefix: str) -> None:
        """Leave the flat shards in a state dict, without the same values under the parameters' names."""
        for key, names in self.shown.items():
            if prefix + key in state:
                for name in names:
                    state.pop(prefix + name, None)

    def _take(self, state: State, prefix: str) -> None:
        """Copy flat shards to their places; parameters are views of them and are loaded from themselves.

        The outermost unit's own hook has run: it has put its wrapper's name in front of everything.
        """
        inside = f"{WRAPPED_ATTRIBUTE}." if self.wrapped else ""
        given = {clean_name(name.removeprefix(prefix)): value for name, value in state.items()}
        for key, params in self.shown.items():
            if params and key in given:
                _copy(given[key], self.flat[key].shard)
                state.update({prefix + inside + name: param.detach() for name, param in params.items()})

    def _forget(self, unexpected: list[str]) -> None:
        """Take the flat shards, which are where they belong, from the names that the model does not have."""
        loaded = {key for key, names in self.shown.items() if names}
        unexpected[:] = [name for name in unexpected if clean_name(name) not in loaded]


def _copy(value: Any, shard: torch.Tensor) -> None:
    local = value.local_shards() if hasattr(value, "local_shards") else None
    values = value if local is None else local[0].tensor if local else shard[:0]
    with torch.no_grad():
        shard[: values.numel()].copy_(values)


@contextmanager
def state_dict_type(
    model: nn.Module,
    state_dict_type: StateDictType | str | None = None,
    state_dict_config: Any = None,
    optim_state_dict_config: Any = None,
) -> Iterator[None]:
    """Have `model.state_dict()` and `model.load_state_dict()` speak one kind of state dict inside the context.

    A full state is gathered, so every rank calls `state_dict`; under `rank0_only` all but the first get an empty
    one. A full state to load is given on every rank.

    Args:
        model: Sharded by either version, or with sharded modules inside.
        state_dict_type: `full_state_dict`, `sharded_state_dict`, `local_state_dict`, their first words, or torch's
            object; what the plugin says when left out.
        state_dict_config: Torch's options; the plugin's, or those that fit the type, when left out.
        optim_state_dict_config: The same for the optimizer's; used by FSDP1's functions.

    Raises:
        UsageError: It is not such a type, FSDP2 has no such type, or nothing of the model is sharded.
    """
    refuse_of_xla(model, "state_dict_type")
    prepared = registered(model)
    plugin = prepared.plugin if prepared is not None else None
    if state_dict_type is None and plugin is not None:
        wanted = plugin.state_dict_type
        state_dict_config = state_dict_config or plugin.state_dict_config
        optim_state_dict_config = optim_state_dict_config or plugin.optim_state_dict_config
    else:
        wanted = state_dict_type or StateDictType.FULL_STATE_DICT
    kind = StateDictType[state_dict_name(wanted)]
    options = _safe(state_config(kind, state_dict_config), model)
    optimizer_options = _safe(optimizer_config(kind, optim_state_dict_config), model)
    roots = fsdp_modules(model, root_only=True)
    if not roots:
        msg = f"nothing of this {type(model).__name__} is sharded, so its state dict has one kind only"
        raise UsageError(msg, hint="use what fsdplaunch.prepare returns")
    if isinstance(roots[0], FullyShardedDataParallel):
        local = local_state(model) if kind is StateDictType.LOCAL_STATE_DICT else nullcontext()
        kinds = FullyShardedDataParallel.state_dict_type(model, kind, options, optimizer_options)
        with quiet_torch(), local, kinds:
            yield
    else:
        if kind is StateDictType.LOCAL_STATE_DICT:
            msg = "fsdp_version 2 has no state_dict_type LOCAL_STATE_DICT"
            raise UsageError(msg, hint="use SHARDED_STATE_DICT")
        with _converted(model, kind, options):
            yield


def _safe(options: Any, model: nn.Module) -> Any:
    """Keep FSDP1 from moving to the host what is there already: up to torch 2.13 the process dies of it."""
    on_host = next((param.device.type == "cpu" for param in model.parameters()), True)
    return replace(options, offload_to_cpu=False) if on_host and options.offload_to_cpu else options


_entered: "weakref.WeakKeyDictionary[nn.Module, list[object]]" = weakref.WeakKeyDictionary()
"""The contexts that are open for a model of FSDP2, the innermost last: it alone decides."""


@contextmanager
def _converted(model: nn.Module, kind: StateDictType, options: Any) -> Iterator[None]:
    """Convert FSDP2's DTensors to full tensors on the way out, and full tensors to them on the way in."""
    full = kind is StateDictType.FULL_STATE_DICT
    empty = isinstance(options, FullStateDictConfig) and options.rank0_only and dist.get_rank() != 0

    def give(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if nested[-1] is not mine:
            return
        for name in [name for name in state if name.startswith(prefix)]:
            state[name] = _given(state[name], full=full, on_host=options.offload_to_cpu)
            if empty:
                del state[name]

    def take(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, param in model.named_parameters(remove_duplicate=False):
            key = prefix + clean_name(name)
            value = state.get(key)
            if isinstance(param, DTensor) and value is not None and not isinstance(value, DTensor):
                state[key] = split_like(value, param)

    mine = object()
    nested = _entered.setdefault(model, [])
    nested.append(mine)
    hooks = [model.register_state_dict_post_hook(give), model.register_load_state_dict_pre_hook(take)]
    try:
        yield
    finally:
        nested.remove(mine)
        for hook in hooks:
            hook.remove()


def _given(value: Any, *, full: bool, on_host: bool) -> Any:
    """Return a value as a state dict of the kind has it; a full tensor is gathered, so every rank calls this."""
    if full and isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if on_host and hasattr(value, "cpu") else value
