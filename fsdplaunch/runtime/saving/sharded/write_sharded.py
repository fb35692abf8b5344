"""Write every rank's shards: each rank plans alone, and only the lengths of what was written go to rank 0."""

import array
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from fsdplaunch.checkpoint.index_file import INDEX_NAME
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.saving.early_writeback import EarlyFileSystem
from fsdplaunch.runtime.saving.sharded.index_file import Place, data_file, write_index
from fsdplaunch.runtime.saving.sharded.layouts import UnknownLayoutError
from fsdplaunch.runtime.saving.sharded.shared_plan import SharedPlan
from fsdplaunch.runtime.torch_internals.dcp import flatten_state_dict

State = dict[str, Any]


def write_sharded(state: State, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write every rank's shards into a folder, with one index, and force all of it to disk; every rank calls this.

    Raises:
        CheckpointError: On all ranks, and the folder has no index.
    """
    writer = FileSystemWriter(folder)
    writer.fs = EarlyFileSystem()
    planner = DefaultSavePlanner()
    found = _plan_alone(state, planner, group)
    if found is None:  # not every rank can know what the others have: torch asks them
        save(state, storage_writer=writer, process_group=group)
        return
    shared, own = found
    places: list[Place] = []
    with raise_on_all_ranks(f"write {folder}", group):
        places = _write_own(writer, planner, own)
    gathered = _gather(places, group)
    if dist.get_rank() == 0:
        _write_index(folder, shared, gathered, writer)


def _plan_alone(
    state: State, planner: DefaultSavePlanner, group: dist.ProcessGroup | None
) -> tuple[SharedPlan, SavePlan] | None:
    """Return what all ranks write and what this one does; None when the ranks do not know that of each other."""
    rank, found = dist.get_rank(), None
    with raise_on_all_ranks("plan what each rank writes", group):
        planner.set_up_planner(state, is_coordinator=rank == 0)
        local = planner.create_local_plan()
        try:
            shared = SharedPlan(*flatten_state_dict(state), dist.get_world_size())
            found = shared, shared.own_plan(local, rank)
        except UnknownLayoutError:
            found = None
    digests = from_all(None if found is None else found[0].digest, group)
    return found if None not in digests and len(set(digests)) == 1 else None


def _write_own(writer: FileSystemWriter, planner: DefaultSavePlanner, own: SavePlan) -> list[Place]:
    """Write this rank's file, and return where each item of its plan is."""
    rank = dist.get_rank()
    own = writer.prepare_local_plan(own)
    own = writer.prepare_global_plan([*[SavePlan([])] * rank, own])[
        rank
    ]  # it names files by the place in the list
    written = writer.write_data(planner.finish_plan(own), planner)
    written.wait()
    infos = {result.index: result.storage_data for result in written.value()}
    odd = [info for info in infos.values() if info.relative_path != data_file(rank) or info.transform_descriptors]
    if odd or len(infos) != len(own.items):
        msg = f"torch's writer has written other files than {data_file(rank)}"
        raise CheckpointError(msg, hint="report this with the version of torch")
    return [(infos[item.index].offset, infos[item.index].length) for item in own.items]


def _gather(places: Sequence[Place], group: dist.ProcessGroup | None) -> list[bytes]:
    """Return every rank's places on rank 0: sixteen bytes for each item, an eighth of the index."""
    packed = array.array("q", [number for place in places for number in place]).tobytes()
    first = dist.get_rank() == 0
    gathered: list[Any] = [None] * (dist.get_world_size() if first else 0)
    dist.gather_object(packed, gathered if first else None, dst=0, group=group)
    return gathered


def _pairs(data: bytes) -> list[Place]:
    numbers = array.array("q", data)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _write_index(folder: Path, shared: SharedPlan, places: list[bytes], writer: FileSystemWriter) -> None:
    temporary = folder / f"{INDEX_NAME}.tmp"
    with temporary.open("wb") as file:
        write_index(file, shared, lambda rank: _pairs(places[rank]), writer.storage_meta())
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / INDEX_NAME)
