"""Write every rank's shards: each rank plans alone, and only the lengths of what was written go to rank 0.

Rank 0 writes the index of all: the pickle that torch would write, without making its objects. With them, for 1,024
ranks and 300 tensors, it took 5.1 s of CPU and 341 MB in place of 0.8 s and 3 MB, beside the training.
"""

import array
import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save

from fsdplaunch.checkpoint.byte_transfer import Writeback
from fsdplaunch.checkpoint.manifest import INDEX_NAME
from fsdplaunch.errors import CheckpointError
from fsdplaunch.runtime.collectives.rank_group import from_all, raise_on_all_ranks
from fsdplaunch.runtime.saving.sharded_plan import Chunk, Layout, Numbers, SharedPlan, UnknownLayoutError
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


_RANGES = ((0xFF, "<cB", b"K"), (0xFFFF, "<cH", b"M"), (0x7FFF_FFFF, "<ci", b"J"))


def recall(number: int) -> bytes:
    """Return the opcode that recalls what was memoized under a number."""
    return struct.pack("<cB", b"h", number) if number <= 0xFF else struct.pack("<cI", b"j", number)  # noqa: PLR2004


@lru_cache(maxsize=2**16)
def spell_int(number: int) -> bytes:
    """Return the opcode of a number that is not negative."""
    for largest, form, opcode in _RANGES:
        if number <= largest:
            return struct.pack(form, opcode, number)
    data = pickle.encode_long(number)
    return b"\x8a" + bytes([len(data)]) + data


def call_size(numbers: Numbers) -> bytes:
    """Return the opcodes that call torch.Size, which was recalled, with some numbers."""
    ints = b"".join(map(spell_int, numbers))
    tuples = {0: b")", 1: ints + b"\x85\x94", 2: ints + b"\x86\x94", 3: ints + b"\x87\x94"}
    return tuples.get(len(numbers), b"(" + ints + b"t\x94") + b"\x85\x94R\x94"


def count_memoized(numbers: Numbers) -> int:
    """Return how much that memoizes: the numbers, unless there are none, the arguments, the size."""
    return 3 if numbers else 2


_BATCH = 1000
_PROTOCOL = 4
_NEW, _END = b")\x81\x94}\x94(", b"ub"  # a record without arguments, then its state; both memoized
_MEMOIZED = 2  # by those
Place = tuple[int, int]


def data_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"__{rank}_0.distcp"


def write_index(
    file: IO[bytes], plan: SharedPlan, places: Callable[[int], Sequence[Place]], meta: StorageMeta | None
) -> None:
    """Write the index of a checkpoint.

    Args:
        file: Open for writing.
        plan: Which rank writes which chunk.
        places: Returns for a rank, asked once, the offset and the length of each item of its plan in its file, in
            bytes.
        meta: What torch notes of the save.
    """
    orders = {number: plan.order(number) for number in range(len(plan.entries))}
    first = {number: plan.writer(number, order[0]) for number, order in orders.items() if order}
    entries: dict[str, Any] = {}
    # In the order of the ranks that write the first chunk of each.
    for number in sorted(first, key=lambda number: (first[number], number)):
        entry = plan.entries[number]
        if entry.size is None or entry.properties is None:
            entries[entry.name] = BytesStorageMetadata()
        else:
            chunks: Any = _Chunks(entry.layout, orders[number])
            entries[entry.name] = TensorStorageMetadata(entry.properties, entry.size, chunks)
    metadata = Metadata(entries, dict(plan.paths), _Items(plan, places), meta)
    if FORMAT_VERSION is not None:
        metadata.version = FORMAT_VERSION
    _IndexPickler(file, _PROTOCOL).dump(metadata)


class _Chunks:
    """A tensor's chunks in their order, in the place of a list."""

    def __init__(self, layout: Layout, order: Sequence[int]) -> None:
        self.layout, self.order = layout, order


class _Items:
    """Where each item is, in the place of a dictionary."""

    def __init__(self, plan: SharedPlan, places: Callable[[int], Sequence[Place]]) -> None:
        self.plan, self._places = plan, places
        self.hints = [
            {chunk: place for place, chunk in enumerate(plan.order(number))} if entry.layout.copies else None
            for number, entry in enumerate(plan.entries)
        ]

    def of_rank(self, rank: int) -> list[tuple[int, int, Place]]:
        """Return entry, chunk and place of each item of a rank: values first, as they stand in its file."""
        written = zip(self.plan.written_by(rank), self._places(rank), strict=True)
        items = [(number, chunk, place) for (number, chunk), place in written]
        entries = self.plan.entries
        return sorted(items, key=lambda item: entries[item[0]].size is not None)

    def hint(self, number: int, chunk: int) -> int:
        """Return the place of a chunk among those of its tensor."""
        places = self.hints[number]
        return chunk if places is None else places[chunk]


class _Memo(dict[int, tuple[int, Any]]):
    """What the pickler has memoized. Records written as bytes count as well, and nothing refers to them."""

    passed = 0

    def __len__(self) -> int:
        return super().__len__() + self.passed


_PythonPickler: Any = pickle._Pickler  # the one in C writes nothing in between


class _IndexPickler(_PythonPickler):  # type: ignore[misc]
    """Python's pickler, which writes lists of chunks and the table of items as bytes."""

    def __init__(self, file: IO[bytes], protocol: int) -> None:
        super().__init__(file, protocol)
        self.memo: Any = _Memo()
        self._spelt: dict[tuple[int, Numbers], bytes] = {}
        self._chunk_words: tuple[bytes, bytes] | None = None
        self._item_words: tuple[bytes, ...] | None = None
        self._kept: list[Any] = []  # known by identity, so they must live on

    def save(self, obj: Any, *args: Any, **named: Any) -> None:
        """Write an object."""
        if type(obj) is _Chunks:
            self._save_chunks(obj)
        elif type(obj) is _Items:
            self._save_items(obj)
        else:
            super().save(obj, *args, **named)

    def _ref(self, obj: Any) -> bytes:
        """Return the opcode that recalls a class or a text that was written before."""
        return recall(self.memo[id(obj)][0])

    def _raw(self, data: bytes, memoized: int) -> None:
        self.write(data)
        self.memo.passed += memoized
        self.framer.commit_frame()

    def _record(self, record: Any) -> None:
        self._kept.append(record)
        super().save(record)

    def _save_chunks(self, chunks: _Chunks) -> None:
        self.write(b"]")
        self.memoize(chunks)
        self._kept.append(chunks)
        for start in range(0, len(chunks.order), _BATCH):
            numbers = tuple(chunks.order[start : start + _BATCH])
            self.write(b"(")
            if self._chunk_words is None:
                self._chunk_words = self._first_chunk(chunks.layout.chunks[numbers[0]])
                numbers = numbers[1:]
            key = (id(chunks.layout), numbers)
            if key not in self._spelt:
                words = self._chunk_words
                listed = (chunks.layout.chunks[number] for number in numbers)
                self._spelt[key] = b"".join(_chunk(words, each) for each in listed)
            held = (chunks.layout.chunks[number] for number in numbers)
            memoized = sum(
                _MEMOIZED + count_memoized(each.offsets or ()) + count_memoized(each.sizes) for each in held
            )
            self._raw(self._spelt[key] + b"e", memoized)

    def _first_chunk(self, chunk: Chunk) -> tuple[bytes, bytes]:
        """Write a chunk in torch's own words, and return those that all chunks begin with."""
        record = ChunkStorageMetadata(torch.Size(chunk.offsets or ()), torch.Size(chunk.sizes))
        self._record(record)
        offsets, sizes = map(self._ref, record.__dict__)
        size = self._ref(torch.Size)
        return self._ref(ChunkStorageMetadata) + _NEW + offsets + size, sizes + size

    def _save_items(self, items: _Items) -> None:
        self.write(b"}")
        self.memoize(items)
        self._kept.append(items)
        keys: dict[tuple[int, int, int], bytes] = {}
        for rank in range(items.plan.world):
            path = data_file(rank)
            self._kept.append(path)
            listed = items.of_rank(rank)
            for start in range(0, len(listed), _BATCH):
                self.write(b"(")
                rest = self._in_full(items, listed[start : start + _BATCH], path)
                self._raw(b"".join(self._spell(items, rest, path, keys)) + b"u", 0)

    def _in_full(self, items: _Items, listed: list[Any], path: str) -> Iterator[tuple[int, int, Place]]:
        """Write values, and the first tensor's item, in torch's own words; return the others."""
        rest = iter(listed)
        for number, chunk, place in listed:
            entry = items.plan.entries[number]
            if entry.size is not None and self._item_words is not None:
                break
            next(rest)
            offsets = entry.layout.chunks[chunk].offsets
            key = MetadataIndex(entry.name, offsets, None if offsets is None else items.hint(number, chunk))
            info = StorageInfo(path, *place)
            self._record(key)
            self._record(info)
            if offsets is not None:
                self._item_words = self._words_of(key)
        return rest

    def _words_of(self, key: MetadataIndex) -> tuple[bytes, ...]:
        """Return the opcodes between the numbers and texts of an item, once one has been written in full."""
        name, index, offset = map(self._ref, key.__dict__)
        path, start, length = (self._ref(word) for word in ("relative_path", "offset", "length"))
        begin = self._ref(MetadataIndex) + _NEW + name
        size = self._ref(torch.Size)
        return begin, index, offset + size, self._ref(StorageInfo) + _NEW + path, start, length

    def _spell(self, items: _Items, listed: Any, path: str, keys: dict[Any, bytes]) -> Iterator[bytes]:
        """Yield the bytes of items, counting what they memoize."""
        entries, memo = items.plan.entries, self.memo
        for number, chunk, (start, length) in listed:
            begin, index, offset, value, at, count = self._item_words or ()
            entry, hint = entries[number], items.hint(number, chunk)
            offsets = entry.layout.chunks[chunk].offsets or ()
            key = (id(entry.layout), chunk, hint)
            if key not in keys:
                keys[key] = index + spell_int(hint) + offset + call_size(offsets) + _END
            memo.passed += 2 * _MEMOIZED + count_memoized(offsets)
            where = memo.get(id(path))
            if where is None:
                text = b"\x8c" + bytes([len(path)]) + path.encode() + b"\x94"
                memo[id(path)] = (len(memo), path)
            else:
                text = recall(where[0])
            yield (
                begin
                + self._ref(entry.name)
                + keys[key]
                + value
                + text
                + at
                + spell_int(start)
                + count
                + spell_int(length)
                + _END
            )


def _chunk(words: tuple[bytes, bytes], chunk: Chunk) -> bytes:
    start, middle = words
    return start + call_size(chunk.offsets or ()) + middle + call_size(chunk.sizes) + _END


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
