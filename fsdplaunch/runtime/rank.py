"""Which worker this process is, and where its files are."""

import os
from pathlib import Path

from fsdplaunch.config.environment import RUN_DIR
from fsdplaunch.run_dir import rank_folder


def rank() -> int:
    """Return this worker's number over all nodes, from 0; 0 when nothing started it as one of many."""
    return int(os.environ.get("RANK", "0"))


def own_folder() -> Path | None:
    """Return the folder of this rank's files in the run's folder, made if needed; None outside a launched run."""
    run_dir = os.environ.get(RUN_DIR)
    if not run_dir:
        return None
    folder = rank_folder(Path(run_dir), rank())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
