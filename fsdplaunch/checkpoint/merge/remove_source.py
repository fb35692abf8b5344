"""Delete a checkpoint that was merged and verified: its own files only, never anything else that stands there."""

import re
from pathlib import Path

from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.checkpoint.invalid_file import short
from fsdplaunch.checkpoint.readers.dcp_index import CheckpointIndex
from fsdplaunch.errors import UsageError

_DATA_FILE = re.compile(r"__\d+_\d+\.distcp")


def check_removal(folder: Path, skipped: tuple[str, ...], excluded: tuple[str, ...] = ()) -> None:
    """Refuse to remove a checkpoint that holds more than the merged weights.

    Raises:
        UsageError: When entries of it would be lost.
    """
    if excluded:
        msg = f"{folder} also holds {len(excluded)} weights that are left out: {short(excluded[0])} would be lost"
        raise UsageError(msg, hint="merge without removing the checkpoint")
    if skipped:
        shown = ", ".join(short(name) for name in skipped[:3])
        msg = f"{folder} also holds {len(skipped)} entries that are not weights and would be lost: {shown}"
        raise UsageError(msg, hint="merge without removing the checkpoint")


def remove_checkpoint(folder: Path, index: CheckpointIndex) -> bool:
    """Delete the data files and the index, then the folder when nothing else is in it.

    The index goes first: without it the rest is visibly incomplete, should this be interrupted.

    Returns:
        Whether the folder is gone.
    """
    (folder / INDEX_NAME).unlink(missing_ok=True)  # sharded safetensors have none
    for path in sorted(folder.iterdir()):
        if path.name in index.files or _DATA_FILE.fullmatch(path.name):
            path.unlink()
    if any(folder.iterdir()):
        return False
    folder.rmdir()
    return True
