"""What a checkpoint's manifest says of the run that wrote it; `checkpoint/manifest.py` has its format."""

import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch import __version__
from fsdplaunch.runtime.saving.flat_param_layout import flat_layout
from fsdplaunch.runtime.sharding.registry import registered

FORMAT_VERSION = 1


def describe_run(models: Mapping[torch.nn.Module, str], step: int | None) -> dict[str, Any]:
    """Return what a manifest says beside files and configuration: who wrote it, on which ranks, in which layout.

    Args:
        models: Each with the form it is written in, such as SHARDED_STATE_DICT.
        step: The checkpoint's number, or None.
    """
    return {
        "format": "fsdplaunch checkpoint",
        "format_version": FORMAT_VERSION,
        "step": step,
        "world_size": dist.get_world_size(),
        "versions": {"fsdplaunch": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "models": [_describe_model(model, form) for model, form in models.items()],
    }


def _describe_model(model: torch.nn.Module, form: str) -> dict[str, Any]:
    params = list(model.parameters())
    entry: dict[str, Any] = {
        "class": type(model).__name__.removeprefix("FSDP"),
        "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in params}),
    }
    prepared = registered(model)
    if prepared is not None:
        mesh = prepared.mesh
        entry |= {
            "fsdp_version": prepared.settings.version,
            "sharding_strategy": prepared.settings.strategy,
            "mesh": dict(zip(mesh.mesh_dim_names or ("ranks",), mesh.shape, strict=False)),
            "tied": [list(names) for names in prepared.tied],
        }
    if form == "LOCAL_STATE_DICT":
        entry["flat_parameters"] = flat_layout(model)
    return entry
