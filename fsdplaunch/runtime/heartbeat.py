"""Keep the numbers that `fsdplaunch.worker_status` describes, and be ready to write this worker's stack."""

import faulthandler
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

from fsdplaunch.runtime.rank import own_folder
from fsdplaunch.worker_status import HEARTBEAT, LAYOUT, STACK, STACK_SIGNAL

_kept: list[Any] = []
"""Files that stay open for the life of the process."""


def start_heartbeat() -> None:
    """Count optimizer steps in this rank's folder from now on; nothing happens outside a launched run.

    In a process that has no torch yet no steps are counted: importing it is the script's business.
    """
    folder = own_folder()
    if folder is None or STACK_SIGNAL is None:
        return
    stack = (folder / STACK).open("a", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    beat = _open(folder / HEARTBEAT)
    _kept.extend([stack, beat])
    pid, steps = os.getpid(), 0
    LAYOUT.pack_into(beat, 0, pid, 0, 0)

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        LAYOUT.pack_into(beat, 0, pid, steps, time.time_ns())

    if "torch" in sys.modules:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(count)


def _open(path: Path) -> mmap.mmap:
    path.write_bytes(bytes(LAYOUT.size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), LAYOUT.size)
