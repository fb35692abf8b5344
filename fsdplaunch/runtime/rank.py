"""Which worker this process is, where its files are, and its record in them."""

import faulthandler
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.config.resolve import has_one_axis, mesh_sizes
from fsdplaunch.config.schema.config import Config
from fsdplaunch.run_dir import RUN_DIR, STACK, STACK_SIGNAL, rank_folder
from fsdplaunch.step_record import StepWriter

_RANK_VARIABLE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS)"
    r"|SLURM_(PROCID|LOCALID|NTASKS|NPROCS|NODEID)|(OMPI_COMM_WORLD|PMI|MPI|MV2_COMM_WORLD)_(LOCAL_)?(RANK|SIZE)"
)
"""Variables that scripts look at to know whether they are one of several processes."""

_hidden: dict[str, str] = {}


def hide_ranks() -> None:
    """Take the variables that show several processes out of the environment; this package remembers them."""
    for name in [name for name in os.environ if _RANK_VARIABLE.fullmatch(name)]:
        _hidden[name] = os.environ.pop(name)


def rank_variable(name: str) -> str | None:
    """Return a variable that shows several processes, hidden from the script or not; None if it is not set."""
    return _hidden.get(name) or os.environ.get(name)


def rank() -> int:
    """Return this worker's number over all nodes, from 0; 0 when nothing started it as one of many."""
    return int(rank_variable("RANK") or 0)


def world_size() -> int:
    """Return how many workers there are over all nodes; 1 when nothing started this one as one of many."""
    return int(rank_variable("WORLD_SIZE") or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """This worker's number among those that read different data, and how many they are."""

    rank: int
    size: int


def configured_data_ranks(config: Config, *, rank: int, size: int) -> DataRanks:
    """Return a worker's number among those that read different data; those that split layers read the same."""
    if config.distributed_type != "FSDP" or has_one_axis(config):
        return DataRanks(rank=rank, size=size)
    sizes = mesh_sizes(config, size)
    alike = sizes.context * sizes.tensor
    return DataRanks(rank=rank // alike, size=size // alike)


def own_folder() -> Path | None:
    """Return the folder of this rank's files in the run's folder, made if needed; None outside a launched run."""
    run_dir = os.environ.get(RUN_DIR)
    if not run_dir:
        return None
    folder = rank_folder(Path(run_dir), rank())
    folder.mkdir(parents=True, exist_ok=True)
    return folder


_kept: list[Any] = []  # files that stay open for the life of the process


def begin_record() -> StepWriter | None:
    """Begin the record of steps in this rank's folder, and answer a signal there with every thread's stack.

    Returns None outside a launched run.
    """
    folder = own_folder()
    if folder is None or STACK_SIGNAL is None:
        return None
    stack = (folder / STACK).open("a", encoding="utf-8")
    _kept.append(stack)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    return StepWriter(folder)
