"""Detect that not all ranks see the one folder that rank 0 has made or found."""

import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.monitored_barrier import name_ranks
from fsdplaunch.runtime.collectives.rank_group import from_all, from_rank_0

TOKEN = ".token"  # noqa: S105  (a file's name)
PATIENCE_SECONDS = 3.0
"""How long a network file system may take to show a new file."""


def check_same(folder: Path, target: Path, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank means the same folder, and sees in it what rank 0 puts there; every rank calls this.

    Args:
        folder: Made by rank 0.
        target: What it is to become; as the script named it on this rank.
        group: All ranks, in a group of its own when another thread uses theirs meanwhile.

    Raises:
        CheckpointError: On all ranks, with the nodes and ranks that do not.
    """
    token = secrets.token_hex(8)
    if dist.get_rank() == 0:
        (folder / TOKEN).write_text(token)
    sent, wanted = from_rank_0((token, str(target)), group)
    answers = from_all((socket.gethostname(), str(target) == wanted, _shows(folder / TOKEN, sent)), group)
    if dist.get_rank() == 0:
        os.unlink(folder / TOKEN)  # noqa: PTH108
    elsewhere = [rank for rank, (_, same, _) in enumerate(answers) if not same]
    if elsewhere:
        msg = f"rank 0 saves to {wanted}, {name_ranks(elsewhere)} elsewhere"
        raise CheckpointError(msg, hint="give all ranks the same folder and step")
    blind = [rank for rank, (_, _, sees) in enumerate(answers) if not sees]
    if blind:
        raise not_shared(target, [host for host, _, _ in answers], blind)


def not_shared(folder: Path, hosts: Sequence[str], blind: Sequence[int]) -> CheckpointError:
    """Return the error for a folder that some ranks' nodes do not share with rank 0's."""
    nodes = ", ".join(dict.fromkeys(f"{hosts[rank]}" for rank in blind))
    msg = f"{folder} of {hosts[0]} (rank 0) is not visible on {nodes} ({name_ranks(blind)})"
    return CheckpointError(msg, hint="use a folder on a file system that all nodes share")


def check_found(folder: Path, mark: str) -> None:
    """Check that every rank sees a checkpoint that rank 0 found; every rank calls this.

    Args:
        folder: Of the checkpoint.
        mark: The name of a file in it that rank 0 sees.

    Raises:
        CheckpointError: On all ranks, with the nodes and ranks that do not.
    """
    size = from_rank_0((folder / mark).stat().st_size if dist.get_rank() == 0 else None)
    seen = from_all((socket.gethostname(), _size(folder / mark) == size))
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
