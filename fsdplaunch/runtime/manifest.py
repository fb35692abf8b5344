"""`fsdplaunch.json`: what a checkpoint is made of. Written last, so its presence says that the rest is there."""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch import __version__
from fsdplaunch.config.environment import decode
from fsdplaunch.runtime.prepared import prepared_of

MANIFEST = "fsdplaunch.json"
FORMAT_VERSION = 1


def describe_run(models: list[torch.nn.Module], step: int | None) -> dict[str, Any]:
    """What a manifest says beside its files: who wrote it, on how many ranks, in which layout and formats."""
    return {
        "format": "fsdplaunch checkpoint",
        "format_version": FORMAT_VERSION,
        "step": step,
        "world_size": dist.get_world_size(),
        "versions": {"fsdplaunch": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "models": [_describe_model(model) for model in models],
        "config": asdict(decode()),
    }


def _describe_model(model: torch.nn.Module) -> dict[str, Any]:
    params = list(model.parameters())
    told: dict[str, Any] = {
        "class": type(model).__name__.removeprefix("FSDP"),
        "dtypes": sorted({str(param.dtype).removeprefix("torch.") for param in params}),
    }
    prepared = prepared_of(model)
    if prepared is not None:
        mesh = prepared.mesh
        told |= {
            "fsdp_version": prepared.settings.version,
            "sharding_strategy": prepared.settings.strategy,
            "mesh": dict(zip(mesh.mesh_dim_names or ("ranks",), mesh.shape, strict=False)),
            "tied": [list(names) for names in prepared.tied],
        }
    return told


def write_manifest(folder: Path, told: dict[str, Any]) -> None:
    """Write the manifest of a folder whose other files are all there, and force it to disk."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in _files(folder)}
    data = told | {"files": dict(sorted(files.items())), "complete": True}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None if it has none that can be read."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def own_files(folder: Path) -> list[str]:
    """The files a folder's manifest names."""
    files = (read_manifest(folder) or {}).get("files", {})
    return list(files) if isinstance(files, dict) else []


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint is whole: its manifest says so and every file has its size.

    A folder without manifest was written by another tool; it counts as whole if it has a model in it, because that
    tool leaves no way to tell.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return not (folder / MANIFEST).exists() and looks_like_checkpoint(folder)
    files = manifest.get("files")
    if manifest.get("complete") is not True or not isinstance(files, dict):
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items()
    )


def looks_like_checkpoint(folder: Path) -> bool:
    """Whether a folder itself, not one below it, holds a model in one of the layouts accelerate writes."""
    if (folder / MANIFEST).exists() or (folder / "pytorch_model_fsdp.bin").exists():
        return True
    return (folder / "pytorch_model_fsdp_0" / ".metadata").exists() or any(
        folder.glob("pytorch_model_fsdp_rank*.bin")
    )
