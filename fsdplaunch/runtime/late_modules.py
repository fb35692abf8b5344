"""Modules of this package that matter only where something else has imported them: looked up, never imported."""

import sys
from typing import Any

DEVICE = "fsdplaunch.runtime.device"
HANG_DETECTOR = "fsdplaunch.runtime.collectives.hang_detector"
PRETRAINED = "fsdplaunch.runtime.loading.pretrained"
SAVE_JOB = "fsdplaunch.runtime.saving.save_job"


def if_imported(name: str) -> Any:
    """Return the module of this name, or None while nothing has imported it."""
    return sys.modules.get(name)
