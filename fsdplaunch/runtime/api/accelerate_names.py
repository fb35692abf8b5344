"""Function names that scripts for accelerate and its relatives use, doing the same with this package's own means.

Where the original takes an `accelerator`, it may be left out: the launch's plugin takes its place. Files are named
as accelerate names them, and written where they belong at once: a save that is killed leaves an incomplete file.
"""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.runtime.api.prepare import prepare
from fsdplaunch.runtime.inspection.parameters import unwrapped
from fsdplaunch.runtime.inspection.units import fsdp_modules, is_sharded, refuse_of_xla
from fsdplaunch.runtime.loading.load import load_full
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin, ambient_plugin, load_on_first_ranks_only
from fsdplaunch.runtime.saving.adapters import has_adapters, load_adapters, only_adapters
from fsdplaunch.runtime.saving.model_and_optimizer import (
    MODEL,
    OPTIMIZER,
    load_model,
    load_optimizer,
    model_to_save,
    optimizer_to_save,
    read_own_model,
    read_own_optimizer,
    write_own,
)
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.sharding.compute import checkpoint_blocks
from fsdplaunch.runtime.sharding.ignored import find_ignored
from fsdplaunch.runtime.sharding.mesh import own_device
from fsdplaunch.runtime.sharding.optimizers import name_of
from fsdplaunch.runtime.sharding.registry import registered
from fsdplaunch.runtime.sharding.wrap import plan_units
from fsdplaunch.runtime.torch_internals.modules import IncompatibleKeys, checkpointed_module

_OBJECTS = (nn.Module, Optimizer, dict)
"""What the first argument of a function's own can be; an accelerator and its plugin are none of these."""


def accelerator_optional(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function be called with accelerate's objects before its own arguments, and without them.

    These are the accelerator, or a plugin and the accelerator; None counts as either. The function gets them as
    the keywords `accelerator` and `fsdp_plugin`, under which they may be given as well.
    """
    takes_plugin = "fsdp_plugin" in inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        leading = list(itertools.takewhile(lambda each: not isinstance(each, _OBJECTS), args))
        rest = args[len(leading) :]
        if not rest and not any(isinstance(value, _OBJECTS) for value in kwargs.values()):
            return function(*args, **kwargs)  # without arguments of its own: Python says which
        for each in leading:
            if each is not None:
                kwargs["fsdp_plugin" if takes_plugin and hasattr(each, "fsdp_version") else "accelerator"] = each
        return function(*rest, **kwargs)

    return call


def plugin_of(accelerator: Any, plugin: Any = None) -> FullyShardedDataParallelPlugin:
    """Return a plugin as one of this package: the one given, else the accelerator's, else the launch's.

    Args:
        accelerator: An accelerator, its state, or a plugin itself; None without one.
        plugin: Of either package.
    """
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


def mesh_of(accelerator: Any) -> DeviceMesh | None:
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


@accelerator_optional
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


@accelerator_optional
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


@accelerator_optional
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
    chosen = plugin_of(accelerator, plugin)
    if chosen.fsdp_version != 2:  # noqa: PLR2004
        msg = f"fsdp2_prepare_model needs fsdp_version 2, the plugin has {chosen.fsdp_version}"
        raise UsageError(msg, hint="set fsdp_version: 2, or call fsdplaunch.prepare")
    sharded: nn.Module = prepare(model, plugin=chosen, mesh=mesh_of(accelerator))
    return sharded


@accelerator_optional
def fsdp2_apply_ac(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin | None = None, *, accelerator: Any = None
) -> nn.Module:
    """Have a model's blocks, or the units of its wrap policy, computed again in backward; in place.

    Args:
        model: Not sharded yet.
        plugin: Has the policy; the accelerator's when left out, and the launch's without one.
        accelerator: As in `fsdp2_prepare_model`.

    Returns:
        The model.

    Raises:
        ShardingError: It has neither blocks nor units.
    """
    settings = plugin_of(accelerator, plugin).settings()
    units = plan_units(model, settings, find_ignored(model, settings).below())
    checkpoint_blocks(model, units, settings, own_device(mesh_of(accelerator)))
    return model


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool] | None:
    """Return a function from each module of a model to whether it becomes a unit; None for NO_WRAP.

    Args:
        fsdp2_plugin: The plugin, or an accelerator that has one, or None for the launch's.
        model: Not sharded yet; blocks may be checkpointed already.
    """
    settings = plugin_of(fsdp2_plugin).settings()
    if settings.wraps_nothing:
        return None
    units = set(plan_units(model, settings, find_ignored(model, settings).below()).values())
    return lambda module: module in units or checkpointed_module(module) in units


_FULL = "FULL_STATE_DICT"


@accelerator_optional
def save_fsdp_model(
    model: nn.Module,
    output_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
    *,
    fsdp_plugin: Any = None,
    accelerator: Any = None,
) -> None:
    """Save a sharded model under accelerate's file names; every rank calls this.

    Args:
        model: Sharded by this package, by accelerate or by torch.
        output_dir: Made if it is not there.
        model_index: Its number in the folder.
        adapter_only: Save the active adapter of a PEFT model only; without meaning for other models.
        use_dcp: Under SHARDED_STATE_DICT, a folder that any number of ranks can load; else one file per rank.
        fsdp_plugin: Says in which form; may also stand first. Else the accelerator's, or the model's.
        accelerator: May also stand first or second.

    Raises:
        CheckpointError: It cannot be written.
        UsageError: The adapters of a PEFT model cannot be distinguished in that form.
    """
    kind, folder = _form(model, accelerator, fsdp_plugin), _made(output_dir)
    part = model_to_save(unwrapped(model), kind, model_index)
    if adapter_only and has_adapters(unwrapped(model)):
        part = only_adapters(part, unwrapped(model))
    if kind == "SHARDED_STATE_DICT" and not use_dcp:
        write_own(part.state["model"], folder, MODEL, model_index)
    else:
        replace(part, safe_name=None).write(folder)
    dist.barrier()


@accelerator_optional
def load_fsdp_model(
    model: nn.Module,
    input_dir: str | Path,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
    *,
    fsdp_plugin: Any = None,
    accelerator: Any = None,
) -> IncompatibleKeys | None:
    """Load what `save_fsdp_model`, accelerate's or this one, saved; every rank calls this.

    Args:
        model: Sharded. One that is to be sharded later is loaded on rank 0 alone, under FULL_STATE_DICT.
        input_dir: The folder that was given to save, or the model's own folder in it.
        model_index: Its number in the folder.
        adapter_only: As in `save_fsdp_model`.
        use_dcp: As when it was saved.
        fsdp_plugin: As in `save_fsdp_model`.
        accelerator: As in `save_fsdp_model`.

    Returns:
        No missing and no unexpected names; None on ranks that read nothing.

    Raises:
        CheckpointError: There is none, or it does not fit the model.
        UsageError: The model is not sharded yet, and only rank 0 would have its weights.
    """
    kind = _form(model, accelerator, fsdp_plugin)
    folder = _folder(input_dir, f"{MODEL}_{model_index}")
    dist.barrier()
    if not fsdp_modules(model):
        if dist.get_rank() == 0:  # the others get its values when the model is sharded
            name = f"{MODEL}.bin" if model_index == 0 else f"{MODEL}_{model_index}.bin"
            found: IncompatibleKeys = model.load_state_dict(read_plain(folder / name))
            return found
        plugin = plugin_of(accelerator, fsdp_plugin)
        if plugin.fsdp_version == 1 and not plugin.sync_module_states:
            msg = (
                "the model is not sharded yet, and sync_module_states is false: only rank 0 would have its weights"
            )
            raise UsageError(msg, hint="set sync_module_states to true, or load after sharding")
        return None
    if adapter_only and has_adapters(unwrapped(model)):
        load_adapters(unwrapped(model), folder, model_index, kind=kind, use_dcp=use_dcp)
    elif kind == "SHARDED_STATE_DICT" and not use_dcp:
        read_own_model(unwrapped(model), folder, model_index)
    else:
        load_model(unwrapped(model), folder, model_index, kind=kind)
    return IncompatibleKeys([], [])


@accelerator_optional
def save_fsdp_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | Path,
    optimizer_index: int = 0,
    use_dcp: bool = True,
    *,
    fsdp_plugin: Any = None,
    accelerator: Any = None,
) -> None:
    """Save an optimizer of a sharded model under accelerate's file names, as `save_fsdp_model` saves the model."""
    kind, folder = _form(model, accelerator, fsdp_plugin), _made(output_dir)
    part = optimizer_to_save(unwrapped(model), optimizer, kind, optimizer_index)
    if kind != _FULL and not use_dcp:
        write_own(part.state["optimizer"], folder, OPTIMIZER, optimizer_index)
    else:
        part.write(folder)
    dist.barrier()


@accelerator_optional
def load_fsdp_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | Path,
    optimizer_index: int = 0,
    adapter_only: bool = False,  # noqa: ARG001  (an optimizer has the state of what it trains)
    use_dcp: bool = True,
    *,
    fsdp_plugin: Any = None,
    accelerator: Any = None,
) -> None:
    """Load what `save_fsdp_optimizer`, accelerate's or this one, saved, as `load_fsdp_model` loads the model.

    Raises:
        CheckpointError: There is none, or it does not fit.
    """
    kind = _form(model, accelerator, fsdp_plugin)
    folder = _folder(input_dir, f"{OPTIMIZER}_{optimizer_index}")
    dist.barrier()
    if kind != _FULL and not use_dcp:
        read_own_optimizer(unwrapped(model), optimizer, folder, optimizer_index)
    else:
        load_optimizer(unwrapped(model), optimizer, folder, optimizer_index, kind=kind)


def _form(model: nn.Module, accelerator: Any, plugin: Any) -> str:
    refuse_of_xla(model, "this function of accelerate's")
    prepared = registered(model)
    if accelerator is None and plugin is None and prepared is not None:
        return str(prepared.plugin.settings().state_dict_type)
    return str(plugin_of(accelerator, plugin).settings().state_dict_type)


def _made(given: str | Path) -> Path:
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"cannot write {folder}: {(error.strerror or 'no reason given').lower()}"
        raise CheckpointError(msg) from None
    return folder


def _folder(given: str | Path, own: str) -> Path:
    return Path(given).parent if Path(given).name == own else Path(given)
