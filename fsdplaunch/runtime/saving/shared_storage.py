"""Whether all ranks see the one folder that rank 0 has made, and whether what is to come fits into it."""

import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdplaunch.byte_sizes import size_words
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.error_sync import from_rank_0
from fsdplaunch.runtime.collectives.monitored_barrier import name_ranks

TOKEN = ".token"  # noqa: S105  (a file's name)
PATIENCE_SECONDS = 3.0
"""How long a network file system may take to show a new file."""
_SPARE = 2**20


def check_room(folder: Path, needed: int) -> None:
    """Check that a number of bytes fit into an existing folder.

    Raises:
        CheckpointError: With both numbers.
    """
    free = shutil.disk_usage(folder).free
    if needed + _SPARE > free:
        msg = f"the checkpoint needs {size_words(needed)}, {folder.parent} has {size_words(free)} free"
        raise CheckpointError(msg, hint="free some space, set checkpoint.keep_last, or choose another disk")


def check_same(folder: Path, target: Path) -> None:
    """Check that every rank means the same folder, and sees in it what rank 0 puts there; every rank calls this.

    Args:
        folder: Made by rank 0.
        target: What it is to become; as the script named it on this rank.

    Raises:
        CheckpointError: On all ranks, with the machines and ranks that do not.
    """
    token = secrets.token_hex(8)
    if dist.get_rank() == 0:
        (folder / TOKEN).write_text(token)
    told, wanted = from_rank_0((token, str(target)))
    told_by_all: list[Any] = [None] * dist.get_world_size()
    mine = (socket.gethostname(), str(target) == wanted, _shows(folder / TOKEN, told))
    dist.all_gather_object(told_by_all, mine)
    if dist.get_rank() == 0:
        os.unlink(folder / TOKEN)  # noqa: PTH108
    elsewhere = [rank for rank, (_, same, _) in enumerate(told_by_all) if not same]
    if elsewhere:
        msg = f"rank 0 saves to {wanted}, {name_ranks(elsewhere)} elsewhere"
        raise CheckpointError(msg, hint="give all ranks the same folder and step")
    blind = [rank for rank, (_, _, sees) in enumerate(told_by_all) if not sees]
    if blind:
        raise not_shared(target, [host for host, _, _ in told_by_all], blind)


def not_shared(folder: Path, hosts: Sequence[str], blind: Sequence[int]) -> CheckpointError:
    """The error for a folder that some ranks' machines do not share with rank 0's."""
    machines = ", ".join(dict.fromkeys(f"{hosts[rank]}" for rank in blind))
    msg = f"{folder} of {hosts[0]} (rank 0) is not visible on {machines} ({name_ranks(blind)})"
    return CheckpointError(msg, hint="use a folder on a file system that all machines share")


def check_found(folder: Path, mark: str) -> None:
    """Check that every rank sees a checkpoint that rank 0 found; every rank calls this.

    Args:
        folder: Of the checkpoint.
        mark: The name of a file in it that rank 0 sees.

    Raises:
        CheckpointError: On all ranks, with the machines and ranks that do not.
    """
    size = from_rank_0((folder / mark).stat().st_size if dist.get_rank() == 0 else None)
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (socket.gethostname(), _size(folder / mark) == size))
    blind = [rank for rank, (_, sees) in enumerate(seen) if not sees]
    if blind:
        raise not_shared(folder, [host for host, _ in seen], blind)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _shows(path: Path, text: str) -> bool:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if path.read_text() == text:
                return True
        except OSError:
            pass
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
