"""Each worker sees its own GPU only, as number 0.

Needed because a script for one GPU says `cuda` or `cuda:0`, and has no reason to ask for a number.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

from fsdplaunch.runtime.auto.detect.import_scan import find_mention


def see_own_gpu(script: str | None, environ: MutableMapping[str, str] | None = None) -> bool:
    """Show this process one GPU, if its script is written for one. Before anything asks CUDA for devices.

    A script that shards by itself, or that reads LOCAL_RANK, knows about the others and is left alone.

    Args:
        script: The script's file.
        environ: What to change; the process's own environment when left out.

    Returns:
        Whether it did.
    """
    variables = os.environ if environ is None else environ
    local = int(variables.get("LOCAL_RANK", "0"))
    if script is None or find_mention([script]) is not None or _reads_local_rank(script):
        return False
    visible = [name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if "CUDA_VISIBLE_DEVICES" in variables and local >= len(visible):
        return False  # the worker without a GPU of its own is refused later, with its number
    variables["CUDA_VISIBLE_DEVICES"] = visible[local] if visible else str(local)
    variables["LOCAL_RANK"] = "0"
    return True


def _reads_local_rank(script: str) -> bool:
    try:
        return "LOCAL_RANK" in Path(script).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
