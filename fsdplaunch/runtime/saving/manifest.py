"""`fsdplaunch.json`: what a checkpoint is made of. Written last, so its presence says that the rest is there."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch import __version__
from fsdplaunch.checkpoint.manifest import MANIFEST_NAME
from fsdplaunch.config.environment import decode
from fsdplaunch.runtime.saving.flat_param_layout import flat_layout
from fsdplaunch.runtime.sharding.registry import registered

FORMAT_VERSION = 1


def describe_run(models: Mapping[torch.nn.Module, str], step: int | None) -> dict[str, Any]:
    """What a manifest says beside its files: who wrote it, on how many ranks, in which layout and formats.

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
        "config": asdict(decode()),
    }


def _describe_model(model: torch.nn.Module, form: str) -> dict[str, Any]:
    params = list(model.parameters())
    told: dict[str, Any] = {
        "class": type(model).__name__.removeprefix("FSDP"),
        "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in params}),
    }
    prepared = registered(model)
    if prepared is not None:
        mesh = prepared.mesh
        told |= {
            "fsdp_version": prepared.settings.version,
            "sharding_strategy": prepared.settings.strategy,
            "mesh": dict(zip(mesh.mesh_dim_names or ("ranks",), mesh.shape, strict=False)),
            "tied": [list(names) for names in prepared.tied],
        }
    if form == "LOCAL_STATE_DICT":
        told["flat_parameters"] = flat_layout(model)
    return told


def write_manifest(folder: Path, told: dict[str, Any], sequence: int) -> None:
    """Write the manifest of a folder whose other files are all there, and force it to disk.

    Args:
        folder: Of a checkpoint, not yet in its place.
        told: From `describe_run`.
        sequence: How many checkpoints were completed in its place and beside it, this one included.
    """
    files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    data = told | {"sequence": sequence, "files": dict(sorted(files.items())), "complete": True}
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if it has none that can be read."""
    try:
        data = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def own_files(folder: Path) -> list[str]:
    """The files a folder's manifest names."""
    files = (read_manifest(folder) or {}).get("files", {})
    return list(files) if isinstance(files, dict) else []


def sequence_of(folder: Path) -> int:
    """The number a manifest gives its checkpoint among those beside it; 0 without one."""
    number = (read_manifest(folder) or {}).get("sequence", 0)
    return number if isinstance(number, int) else 0


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is whole."""
    return find_gap(folder) is None


def find_gap(folder: Path) -> str | None:
    """What a checkpoint lacks to be whole, or None: the manifest must say so and every file have its size.

    A folder without manifest was written by another tool; it counts as whole if it has a model in it and each
    sharded folder its index, which is written last, because that tool leaves no other way to tell.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return "its manifest cannot be read" if (folder / MANIFEST_NAME).exists() else _find_foreign_gap(folder)
    files = manifest.get("files")
    if manifest.get("complete") is not True or not isinstance(files, dict):
        return "its manifest does not call it complete"
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _find_foreign_gap(folder: Path) -> str | None:
    sharded = [*folder.glob("pytorch_model_fsdp_*/"), *folder.glob("optimizer_*/")]
    unfinished = sorted(path.name for path in sharded if not (path / ".metadata").exists())
    if unfinished:
        return f"{unfinished[0]} has no index: its save did not finish"
    return None if looks_like_checkpoint(folder) else "there is no model in it"


def looks_like_checkpoint(folder: Path) -> bool:
    """Whether a folder itself, not one below it, holds a model in one of the layouts accelerate writes."""
    if (folder / MANIFEST_NAME).exists() or (folder / "pytorch_model_fsdp.bin").exists():
        return True
    return (folder / "pytorch_model_fsdp_0" / ".metadata").exists() or any(
        folder.glob("pytorch_model_fsdp_rank*.bin")
    )
