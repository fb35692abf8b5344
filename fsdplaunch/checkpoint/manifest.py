"""`fsdplaunch.json`, the manifest of our own saves: among the files of ranks, or beside the folder of a model."""

import json
from pathlib import Path
from typing import Any

MANIFEST_NAME = "fsdplaunch.json"
MAX_JSON = 64 * 2**20


def manifest_path(folder: Path) -> Path:
    """Return where the manifest of the model in `folder` is, if there is one."""
    inside = folder / MANIFEST_NAME
    return inside if inside.is_file() else folder.parent / MANIFEST_NAME


def told_of_model(folder: Path, number: int) -> dict[str, Any]:
    """Return what the manifest says about the model with this number in `folder`; nothing without one."""
    manifest = read_json(manifest_path(folder))
    models = manifest.get("models") if isinstance(manifest, dict) else None
    told = models[number] if isinstance(models, list) and number < len(models) else None
    return told if isinstance(told, dict) else {}


def read_json(path: Path) -> Any:
    """Return what a file of reasonable size holds; None when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.stat().st_size <= MAX_JSON else None
    except (OSError, ValueError, RecursionError):
        return None
