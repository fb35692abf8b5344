"""FSDP1's local state: each rank's flat shards, whatever the model was made with.

Torch gives it for models made over a process group, and takes it back into models that show flat parameters.
Models that `prepare` makes have a mesh and show their own parameters; here both are made to fit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.hooks import RemovableHandle

from fsdplaunch.errors import UsageError
from fsdplaunch.runtime.inspection.parameter_names import clean_name, joined
from fsdplaunch.runtime.torch_internals.fsdp.fsdp1 import (
    FLAT_PARAMETER,
    WRAPPED_ATTRIBUTE,
    flat_parameter,
    without_mesh,
)

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
