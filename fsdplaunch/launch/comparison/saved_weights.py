"""Which weights a run has saved, from which the next run of the same script may resume."""

import os
from pathlib import Path

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".tar")
_AT_MOST = 50_000
"""Files looked at: a folder of images is no reason to wait."""


def saved_since(folder: Path, began: float) -> Path | None:
    """Return the newest file of weights under a folder that was written since then, relative to it; None without.

    Args:
        folder: Hidden folders in it are left out.
        began: In seconds since 1970.
    """
    newest, when, looked_at = None, began, 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        looked_at += len(files)
        for path in (Path(place, name) for name in files if name.endswith(_SUFFIXES)):
            written = _written(path)
            if written >= when:
                newest, when = path, written
        if looked_at > _AT_MOST:
            break
    return None if newest is None else newest.relative_to(folder)


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # a broken link, or removed meanwhile
        return float("-inf")
