"""Names that scripts for accelerate and its relatives use, doing the same with this package's own means.

Where the original takes an `accelerator`, it may be left out: the launch's plugin takes its place.
"""

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.runtime.api.prepare import prepare
from fsdplaunch.runtime.inspection import unwrapped
from fsdplaunch.runtime.inspection.units import is_sharded
from fsdplaunch.runtime.loading.load import LaterValues, load_full
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin, ambient_plugin, load_on_first_ranks_only
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.sharding.ignored import find_ignored
from fsdplaunch.runtime.sharding.mesh import shard_target
from fsdplaunch.runtime.sharding.optimizers import name_of
from fsdplaunch.runtime.sharding.shard import shard_model
from fsdplaunch.runtime.sharding.wrap import plan_units
from fsdplaunch.runtime.torch_internals.modules import IncompatibleKeys, checkpointed_module, share_tables

_OBJECTS = (nn.Module, Optimizer, dict)
"""What the first argument of a function's own can be; an accelerator and its plugin are none of these."""


def _accelerator_optional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be called with accelerate's accelerator before its own arguments, and without it.

    None counts as one. The function gets it as the keyword `accelerator`, under which it may be given as well.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leading = list(itertools.takewhile(lambda each: not isinstance(each, _OBJECTS), args))
        rest = args[len(leading) :]
        if not rest and not any(isinstance(value, _OBJECTS) for value in kwargs.values()):
            return function(*args, **kwargs)  # without arguments of its own: Python says which
        given = [each for each in leading if each is not None]
        return function(*rest, **kwargs, **({"accelerator": given[-1]} if given else {}))

    return call


def _plugin_of(accelerator: Any, plugin: Any = None) -> FullyShardedDataParallelPlugin:
    """Return a plugin of either package as ours: the one given, else the accelerator's, else the launch's."""
    state = getattr(accelerator, "state", accelerator)
    found = plugin or (state if hasattr(state, "fsdp_version") else getattr(state, "fsdp_plugin", None))
    if found is None:
        return ambient_plugin()
    if isinstance(found, FullyShardedDataParallelPlugin):
        return found
    names = [each.name for each in fields(FullyShardedDataParallelPlugin) if each.init]
    values = {name: value for name in names if (value := getattr(found, name, None)) is not None}
    if found.auto_wrap_policy is None:
        values["auto_wrap_policy"] = "NO_WRAP"
    if found.sync_module_states:  # its function gives storage without values, which is done here anyway
        values.pop("param_init_fn", None)
    return FullyShardedDataParallelPlugin(**values)


def _mesh_of(accelerator: Any) -> DeviceMesh | None:
    """Return the axes of an accelerator's mesh that FSDP shards and replicates over; None when it has no mesh."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    names = getattr(getattr(accelerator, "parallelism_config", None), "fsdp_dim_names", None)
    if not isinstance(mesh, DeviceMesh):
        return None
    return mesh[tuple(names)] if names else mesh


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load pretrained weights on each node's first rank only; `prepare` sends them on."""
    os.environ.setdefault("ACCELERATE_USE_FSDP", "true")
    load_on_first_ranks_only(True)


def disable_fsdp_ram_efficient_loading() -> None:
    """Have transformers load pretrained weights on every rank."""
    load_on_first_ranks_only(False)


@_accelerator_optional
def fsdp2_load_full_state_dict(
    model: nn.Module,
    full_sd: Mapping[str, Any],
    cpu_offload: bool = False,
    *,
    accelerator: Any = None,  # noqa: ARG001  (the mesh is the model's own)
) -> nn.Module:
    """Load a full state dict, which only rank 0 needs to hold, into a sharded model; every rank calls this.

    Args:
        model: Sharded; parameters without storage get it.
        full_sd: Full tensors by name on rank 0; ignored elsewhere.
        cpu_offload: Give parameters without storage theirs in host memory, where FSDP2's offloading wants them.
        accelerator: Not needed; may also stand first, as in accelerate.

    Returns:
        The model.
    """
    load_full(model, full_sd, strict=True, on_host=cpu_offload)
    return model


@_accelerator_optional
def fsdp2_switch_optimizer_parameters(
    optimizer: Optimizer,
    mapping: Mapping[Any, nn.Parameter],
    *,
    accelerator: Any = None,  # noqa: ARG001  (accepted as by the other functions)
) -> None:
    """Exchange an optimizer's parameters by the address of their data, in place.

    `prepare` does this by name and moves the state as well; this is for scripts that shard by themselves.

    Args:
        optimizer: Built on the full parameters, or holding what accelerate puts in their place: tensors whose
            `data_ptr` is the address itself.
        mapping: The sharded parameter for each full parameter's `data_ptr()`.
        accelerator: Not needed.

    Raises:
        KeyError: A parameter has no successor, and which one; trained on, it would never reach the model.
    """
    for index, group in enumerate(optimizer.param_groups):
        new = []
        for position, param in enumerate(group["params"]):
            pointer = param.data_ptr  # the mapping may have the very method that returns the address
            address = pointer if not callable(pointer) or pointer in mapping else pointer()
            if address not in mapping:
                named = group.get("param_names") or {}
                name = named[position] if named else name_of(param) or f"parameter {position} of group {index}"
                msg = f"no sharded parameter for {name}, of shape {tuple(param.shape)}, in the mapping"
                raise KeyError(msg)
            new.append(mapping[address])
        group["params"] = new


@_accelerator_optional
def fsdp2_prepare_model(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin | None = None, *, accelerator: Any = None
) -> nn.Module:
    """Shard a model with FSDP2, in place, and return it; one that is sharded already stays as it is.

    Args:
        model: Any.
        plugin: How; the accelerator's when left out, and the launch's without one.
        accelerator: Whose plugin and mesh to use; may also stand first, as in accelerate.

    Raises:
        UsageError: The plugin is for FSDP1.
    """
    if is_sharded(unwrapped(model)):
        return model
    chosen = _plugin_of(accelerator, plugin)
    if chosen.fsdp_version != 2:  # noqa: PLR2004
        msg = f"fsdp2_prepare_model needs fsdp_version 2, the plugin has {chosen.fsdp_version}"
        raise UsageError(msg, hint="set fsdp_version: 2, or call fsdplaunch.prepare")
    sharded: nn.Module = prepare(model, plugin=chosen, mesh=_mesh_of(accelerator))
    return sharded


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return a function from each module of a model to whether it becomes a unit; None for NO_WRAP.

    Args:
        fsdp2_plugin: The plugin, or an accelerator that has one, or None for the launch's.
        model: Not sharded yet; blocks may be checkpointed already.
    """
    settings = _plugin_of(fsdp2_plugin).settings()
    if settings.wraps_nothing:
        return None
    units = set(plan_units(model, settings, find_ignored(model, settings).below()).values())
    return lambda module: module in units or checkpointed_module(module) in units


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model with FSDP2 over a mesh, in place, the rest as the launch's configuration says.

    What has values on no rank and no module can initialize stays on the meta device, sharded: it gets them from
    `DistModule.load_state_dict` or `fsdp2_load_full_state_dict`.
    """
    if is_sharded(model):
        return
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    place = shard_target(plugin.settings(), mesh=mesh, process_group=None, device=None)
    shard_model(model, plugin, place, LaterValues)


class DistModule(nn.Module):
    """A sharded module that loads full state dicts: rank 0 has the tensors, every rank gets its shard.

    Everything else is the wrapped module's: attributes, parameters, submodules, state dict, forward.

    Raises:
        UsageError: It is given no module, such as what `apply_fsdp2` returns.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            msg = f"DistModule wraps a module, got {type(module).__name__}"
            raise UsageError(msg, hint="apply_fsdp2 shards in place and returns nothing")
        del self.__dict__["training"]
        share_tables(self, module)  # so that nn.Module's methods see one module
        self.__dict__["wrapped"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "wrapped" in self.__dict__:
            setattr(self.__dict__["wrapped"], name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.__dict__["wrapped"](*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load a full state dict that only rank 0 needs to hold; every rank calls this.

        Args:
            state_dict: Parameters and persistent buffers by name on rank 0; ignored elsewhere.
            strict: Raise when names differ from the module's.
            assign: As in `nn.Module`, for parameters without storage; they get it in any case.

        Returns:
            The names that were missing, and those that were not expected.
        """
        del assign
        return load_full(self.__dict__["wrapped"], state_dict, strict=strict)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's state dict."""
        return self.__dict__["wrapped"].state_dict(*args, **kwargs)


def load_state_dict(
    checkpoint_file: str, device_map: int | str | torch.device | Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read a file of weights on rank 0; every other rank gets an empty mapping and reads nothing.

    Args:
        checkpoint_file: `.safetensors`, or a file of `torch.save` without code in it.
        device_map: Where the tensors go: one device, or one per module name (`""` for all others). The CPU when
            left out.

    Raises:
        CheckpointError: The file cannot be read, or holds objects that only running code could read.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        return {}
    path = Path(checkpoint_file)
    state: dict[str, Any]
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state = dict(load_file(path))
        except (SafetensorError, OSError) as error:
            msg = f"cannot read {path}: {error}"
            raise CheckpointError(msg, hint="the file is missing or damaged") from None
    else:
        state = read_plain(path)
    if device_map is None:
        return state
    places = device_map if isinstance(device_map, Mapping) else {"": device_map}
    for name, tensor in state.items():
        fitting = [module for module in places if not module or name == module or name.startswith(f"{module}.")]
        state[name] = tensor.to(places[max(fitting, key=len)] if fitting else "cpu")
    return state
