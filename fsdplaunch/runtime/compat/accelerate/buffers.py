"""Let accelerate shard models whose state has buffers (BatchNorm's averages), or parameters that no layer holds.

With `cpu_ram_efficient_loading` its `fsdp2_prepare_model` takes each entry of the state for a shard, and ends with
an AttributeError at the first buffer (accelerate 1.15). Buffers that no state holds it keeps as they are.
A parameter of the model itself (a ViT's `cls_token`) it looks for in the layer before the dot of its name, ending
in a ValueError, unless the model has transformers' `get_parameter_or_buffer`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplaunch.runtime.collectives.rank_group import RankGroup
from fsdplaunch.runtime.compat.import_hook import once_imported
from fsdplaunch.runtime.patch import own_attribute
from fsdplaunch.runtime.torch_internals.modules import is_persistent, own_buffers, put_tensor, set_persistent


def keep_buffers_for_accelerate() -> None:
    """Keep the buffers of what accelerate shards by FSDP2, if and when the script imports it."""
    once_imported("accelerate.accelerator", _adapt)


def _adapt(module: Any) -> None:
    prepare = getattr(module, "fsdp2_prepare_model", None)
    if prepare is None:
        return

    @functools.wraps(prepare)
    def prepare_with_buffers(accelerator: Any, model: nn.Module) -> nn.Module:
        if not getattr(accelerator.state.fsdp_plugin, "cpu_ram_efficient_loading", False):
            return prepare(accelerator, model)  # type: ignore[no-any-return]
        load, find = functools.partial(_load, model), getattr(model, "get_parameter_or_buffer", None)
        with (
            _out_of_states(model) as buffers,
            own_attribute(model, "load_state_dict", load),
            own_attribute(model, "get_parameter_or_buffer", find or functools.partial(_of_name, model)),
        ):
            prepared: nn.Module = prepare(accelerator, model)
        values = [getattr(owner, attribute) for owner, attribute in buffers]
        RankGroup([dist.group.WORLD], accelerator.device).send(*values)  # ranks but the first may have read none
        return prepared

    module.fsdp2_prepare_model = prepare_with_buffers


def _load(model: nn.Module, state: Any, **kwargs: Any) -> Any:
    """Load what accelerate has made of the model's own state: old BatchNorms' buffers are taken to be missing."""
    return type(model).load_state_dict(model, state, **kwargs, strict=False)


def _of_name(model: nn.Module, name: str) -> Any:
    layer, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(layer), attribute)


@contextmanager
def _out_of_states(model: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Take a model's buffers out of its state meanwhile; give the modules and attributes that have them."""
    found = [
        (owner, attribute)
        for owner in model.modules()
        for attribute, _ in own_buffers(owner)
        if is_persistent(owner, attribute)
    ]
    for owner, attribute in found:
        set_persistent(owner, attribute, persistent=False)
        buffer = getattr(owner, attribute).contiguous()
        put_tensor(owner, attribute, torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer)
    try:
        yield found
    finally:
        for owner, attribute in found:
            set_persistent(owner, attribute, persistent=True)
