"""Write every rank's shards: each rank plans alone, and only the places of what was written go to rank 0."""

import array
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from fsdplaunch.checkpoint.byte_transfer import Writeback
from fsdplaunch.checkpoint.manifest import INDEX_NAME, crc_of_items
from fsdplaunch.checkpoint.readers.data_files import DataFiles, data_crcs
from fsdplaunch.checkpoint.readers.dcp_index import gc_pause, read_index
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.saving.sharded_plan import Entry, SharedPlan, UnknownLayoutError
from fsdplaunch.runtime.torch_internals.late_imports import FORMAT_VERSION, StorageInfo, flatten_state_dict


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
        with EarlyFile(Path(path)) if mode == "wb" else super().create_stream(path, mode) as stream:
            yield stream


Place = tuple[int, int]
"""An item's offset and length in its rank's file, in bytes."""


def data_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def write_index(
    file: Any, plan: SharedPlan, places: Callable[[int], Sequence[Place]], meta: StorageMeta | None
) -> None:
    """Write the index of a checkpoint, as torch would make it of the plans and results of all ranks.

    It may list a million items, and `pickle` would keep each and what it is made of until the end, a kilobyte. So
    only the first is pickled; the others are written as it would write them, with references to the first's words.
    `places` returns for a rank where each item of its plan is; `meta` is what torch notes of the save.
    """
    entries: dict[str, Any] = {}
    for entry in plan.entries:
        if entry.size is None or entry.properties is None:
            entries[entry.name] = BytesStorageMetadata()
        else:
            # Tensors of one layout share the list, which the pickle then holds once.
            chunks: Any = entry.layout.chunks
            entries[entry.name] = TensorStorageMetadata(entry.properties, entry.size, chunks)
    items = (
        (entry, chunk, data_file(rank), place)
        for rank in range(plan.world)
        for (entry, chunk), place in zip(plan.written_by(rank), places(rank), strict=True)
    )
    stored = {
        entry.index_of(chunk): StorageInfo(path, *place)
        for entry, chunk, path, place in itertools.islice(items, 1)
    }
    metadata = Metadata(entries, dict(plan.paths), stored, meta)
    if FORMAT_VERSION is not None:
        metadata.version = FORMAT_VERSION
    head = io.BytesIO()
    pickler = pickle.Pickler(head, protocol=4)
    pickler.dump(metadata)
    if not stored:
        file.write(head.getvalue())
        return
    memo = pickler.memo.copy()
    rows = _Rows({known: number for number, known in memo.values() if isinstance(known, str | type)}, len(memo))
    fields = next(n for n, known in memo.values() if type(known) is dict and known.get("storage_data") is stored)
    # In place of the end: set the fields once more, and meanwhile fill the dictionary that has the first item.
    file.write(head.getvalue()[:-1] + b"(" + _recall(fields) + b"}" + rows.words["storage_data"])
    file.write(_recall(memo[id(stored)][0]) + b"(")
    for number, item in enumerate(items, 1):
        file.write(rows.row(*item))
        if number % _BATCH == 0:
            file.write(b"u(")
    file.write(b"ustb.")


_BATCH = 1000


def _recall(number: int) -> bytes:
    return b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")  # noqa: PLR2004


class _Rows:
    """Items of an index as `pickle` writes them, by the words that it has remembered, and how many."""

    def __init__(self, words: dict[Any, int], count: int) -> None:
        self.words = {word: _recall(number) for word, number in words.items()}
        self.sizes: dict[torch.Size, tuple[bytes, int]] = {}
        self.count = count

    def row(self, entry: Entry, chunk: int, path: str, place: Place) -> bytes:
        """Return the bytes of an item's key and its place: objects with a class and their fields."""
        words, held = self.words, entry.layout.chunks[chunk]
        number, offsets, remembered = b"N", b"N", 0
        if held is not None:
            number = _number(chunk)
            offsets, remembered = self.sizes.get(held.offsets) or self._size(held.offsets)
        self.count += 4 + remembered
        key = [words[MetadataIndex], b")\x81\x94}\x94(", words["fqn"], words[entry.name]]
        key += [words["index"], number, words["offset"], offsets, b"ub"]
        name = words.get(path)
        if name is None:
            name, words[path] = b"\x8c" + bytes([len(path)]) + path.encode() + b"\x94", _recall(self.count)
            self.count += 1
        value = [words[StorageInfo], b")\x81\x94}\x94(", words["relative_path"], name]
        value += [words["offset"], _number(place[0]), words["length"], _number(place[1]), b"ub"]
        return b"".join(key + value)

    def _size(self, size: torch.Size) -> tuple[bytes, int]:
        """Return a size's bytes and how many objects are remembered of it."""
        own = pickle.dumps(tuple(size), 2)[2:-3] + b"\x94" if size else b")"
        self.sizes[size] = self.words[torch.Size] + own + b"\x85\x94R\x94", 3 if size else 2
        return self.sizes[size]


def _number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


State = dict[str, Any]


def write_sharded(state: State, folder: Path, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Write every rank's shards into a folder, with one index, and force all to disk; every rank calls this.

    Returns on rank 0 the checksum of each data file, as the manifest has it. When one rank fails, all raise, and
    the folder has no index.
    """
    writer = FileSystemWriter(folder)
    writer.fs = EarlyFileSystem()
    planner = DefaultSavePlanner()
    found = _plan_alone(state, planner, group)
    if found is None:  # not every rank can know what the others have: torch asks them
        save(state, storage_writer=writer, process_group=group)
        if dist.get_rank() != 0:
            return {}
        made = read_index(folder)
        with DataFiles(folder, made.files) as files:
            return data_crcs(files, made.places.values())
    shared, own = found
    places: list[Place] = []
    crc, path = 0, folder / data_file(dist.get_rank())
    with raise_on_all_ranks(f"write {folder}", group):
        places = _write_own(writer, planner, own)
        if places:
            with path.open("rb") as file:
                crc = crc_of_items(file.fileno(), places)
    # Every rank's places on rank 0: sixteen bytes for each item.
    packed = array.array("q", [number for place in (*places, (crc, 0)) for number in place]).tobytes()
    gathered: list[Any] = [None] * (dist.get_world_size() if dist.get_rank() == 0 else 0)
    dist.gather_object(packed, gathered or None, dst=0, group=group)
    if not gathered:
        return {}
    every = list(map(unpacked, gathered))
    temporary = folder / f"{INDEX_NAME}.tmp"
    with gc_pause(), EarlyFile(temporary) as index:
        write_index(index, shared, lambda rank: every[rank][:-1], writer.storage_meta())
        index.flush()
        os.fsync(index.fileno())
    temporary.rename(folder / INDEX_NAME)
    return {data_file(rank): own[-1][0] for rank, own in enumerate(every) if len(own) > 1}


def unpacked(data: bytes) -> list[Place]:
    """Return the pairs of numbers that a rank has sent."""
    numbers = array.array("q", data)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


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
    # It names files by the place in the list.
    own = writer.prepare_global_plan([*[SavePlan([])] * rank, own])[rank]
    written = writer.write_data(planner.finish_plan(own), planner)
    written.wait()
    infos = {result.index: result.storage_data for result in written.value()}
    odd = [info for info in infos.values() if info.relative_path != data_file(rank) or info.transform_descriptors]
    if odd or len(infos) != len(own.items):
        msg = f"torch's writer has written other files than {data_file(rank)}"
        raise CheckpointError(msg, hint="report this with the version of torch")
    return [(infos[item.index].offset, infos[item.index].length) for item in own.items]
