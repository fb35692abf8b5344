"""What every worker does to its own process before torch is imported: die with its agent, send its output home."""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TextIO

from fsdplaunch.config.environment import RUN_DIR

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, so that no worker outlives its agent.

    A parent that died before the request took effect is noticed by the change of parent; Linux only.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def rank() -> int:
    """This worker's number over all machines, from 0; 0 when nothing started it as one of many."""
    return int(os.environ.get("RANK", "0"))


def rank_folder() -> Path | None:
    """The folder of this rank's files in the run's folder, made if needed; None outside a launched run."""
    run_dir = os.environ.get(RUN_DIR)
    if not run_dir:
        return None
    folder = Path(run_dir) / "ranks" / str(rank())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def direct_output(show_ranks: str) -> None:
    """Send this rank's stdout and stderr to its files, unless it is among the ranks to show.

    The descriptors themselves are replaced, so that what C libraries and child processes write goes there too.

    Args:
        show_ranks: `all`, or rank numbers separated by commas.
    """
    folder = rank_folder()
    shown = show_ranks.strip() == "all" or str(rank()) in [part.strip() for part in show_ranks.split(",")]
    if folder is None or shown:
        return
    _send(sys.stdout, 1, folder / "stdout.log")
    _send(sys.stderr, 2, folder / "stderr.log")


def _send(stream: TextIO, descriptor: int, path: Path) -> None:
    stream.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), descriptor)
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)
