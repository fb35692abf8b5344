"""Write every rank's shards: each rank plans alone, and only the places of what was written go to rank 0."""

import array
import io
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from fsdplaunch.checkpoint.byte_transfer import Writeback
from fsdplaunch.checkpoint.manifest import INDEX_NAME, crc_of_items
from fsdplaunch.checkpoint.readers.dcp_index import gc_pause
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.saving.sharded_plan import SharedPlan, UnknownLayoutError, index_of
from fsdplaunch.runtime.torch_internals.checkpoint import FORMAT_VERSION, StorageInfo, flatten_state_dict


class EarlyFile(io.BufferedWriter):
    """A file that the kernel begins to write out while it grows."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"), buffer_size=2**20)
        self._writeback = Writeback(self.fileno())
        self._written = 0

    def write(self, data: Any, /) -> int:
        """Write, and every so often have the kernel begin."""
        count = super().write(data)
        self._written += count
        self._writeback.reached(self._written)
        return count


class EarlyFileSystem(FileSystem):
    """Torch's files of a checkpoint, with such files for what is written."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        if mode == "wb":
            with EarlyFile(Path(path)) as file:
                yield file
            return
        with super().create_stream(path, mode) as stream:
            yield stream


Place = tuple[int, int]
"""An item's offset and length in its rank's file, in bytes."""


def data_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def make_index(plan: SharedPlan, places: Callable[[int], Sequence[Place]], meta: StorageMeta | None) -> Metadata:
    """Return the index of a checkpoint, as torch would make it of the plans and results of all ranks.

    Args:
        plan: Which rank writes which chunk.
        places: Returns for a rank the place of each item of its plan.
        meta: What torch notes of the save.
    """
    entries: dict[str, Any] = {}
    for entry in plan.entries:
        if entry.size is None or entry.properties is None:
            entries[entry.name] = BytesStorageMetadata()
        else:
            # Tensors of one layout share the list, which the pickle then holds once.
            chunks: Any = entry.layout.chunks
            entries[entry.name] = TensorStorageMetadata(entry.properties, entry.size, chunks)
    items = {
        index_of(entry, chunk): StorageInfo(path, *place)
        for rank in range(plan.world)
        for path in [data_file(rank)]
        for (entry, chunk), place in zip(plan.written_by(rank), places(rank), strict=True)
    }
    metadata = Metadata(entries, dict(plan.paths), items, meta)
    if FORMAT_VERSION is not None:
        metadata.version = FORMAT_VERSION
    return metadata


State = dict[str, Any]


def write_sharded(state: State, folder: Path, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Write every rank's shards into a folder, with one index, and force all of it to disk; every rank calls this.

    Returns:
        On rank 0 the checksum of each data file, as the manifest has it; nothing where torch planned.

    Raises:
        CheckpointError: On all ranks, and the folder has no index.
    """
    writer = FileSystemWriter(folder)
    writer.fs = EarlyFileSystem()
    planner = DefaultSavePlanner()
    found = _plan_alone(state, planner, group)
    if found is None:  # not every rank can know what the others have: torch asks them
        save(state, storage_writer=writer, process_group=group)
        return {}
    shared, own = found
    places: list[Place] = []
    crc = 0
    with raise_on_all_ranks(f"write {folder}", group):
        places = _write_own(writer, planner, own)
        crc = _crc(folder / data_file(dist.get_rank()), places)
    gathered = _gather([*places, (crc, 0)], group)
    if dist.get_rank() != 0:
        return {}
    every = [_pairs(each) for each in gathered]
    _write_index(folder, shared, every, writer)
    return {data_file(rank): own[-1][0] for rank, own in enumerate(every) if len(own) > 1}


def _crc(path: Path, places: Sequence[Place]) -> int:
    if not places:
        return 0
    with path.open("rb") as file:
        return crc_of_items(file.fileno(), places)


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
    """Return every rank's places on rank 0: sixteen bytes for each item."""
    packed = array.array("q", [number for place in places for number in place]).tobytes()
    first = dist.get_rank() == 0
    gathered: list[Any] = [None] * (dist.get_world_size() if first else 0)
    dist.gather_object(packed, gathered if first else None, dst=0, group=group)
    return gathered


def _pairs(data: bytes) -> list[Place]:
    numbers = array.array("q", data)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _write_index(folder: Path, shared: SharedPlan, places: list[list[Place]], writer: FileSystemWriter) -> None:
    temporary = folder / f"{INDEX_NAME}.tmp"
    with gc_pause(), EarlyFile(temporary) as file:  # whose write lets other threads run; the pickler in C does not
        metadata = make_index(shared, lambda rank: places[rank][:-1], writer.storage_meta())
        pickle.dump(metadata, file, protocol=4)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / INDEX_NAME)
