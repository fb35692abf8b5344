"""Full weights that rank 0 alone has, and models that get them: `DistModule`, `apply_fsdp2`, `load_state_dict`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplaunch.errors import CheckpointError, UsageError
from fsdplaunch.runtime.inspection.units import is_sharded
from fsdplaunch.runtime.loading.load import LaterValues, load_full
from fsdplaunch.runtime.plugin import FullyShardedDataParallelPlugin
from fsdplaunch.runtime.saving.plain_files import read_plain
from fsdplaunch.runtime.sharding.mesh import shard_target
from fsdplaunch.runtime.sharding.shard import shard_model
from fsdplaunch.runtime.torch_internals.modules import IncompatibleKeys, share_tables


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
