"""Which worker this process is, and where its files are."""

import os
from pathlib import Path

from fsdplaunch.config.environment import RUN_DIR
from fsdplaunch.run_dir import rank_folder as folder_of


def rank() -> int:
    """This worker's number over all machines, from 0; 0 when nothing started it as one of many."""
    return int(os.environ.get("RANK", "0"))


def rank_folder() -> Path | None:
    """The folder of this rank's files in the run's folder, made if needed; None outside a launched run."""
    run_dir = os.environ.get(RUN_DIR)
    if not run_dir:
        return None
    folder = folder_of(Path(run_dir), rank())
    folder.mkdir(parents=True, exist_ok=True)
    return folder
