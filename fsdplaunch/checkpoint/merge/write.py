"""Write a plan's safetensors files, check the stored checksums on the way, and read the result back.

The kernel moves data from file to file: nothing passes through here but what has to be put together or converted.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self
from zlib import crc32

from fsdplaunch.checkpoint.byte_transfer import Copier, Writeback, read_all, write_all
from fsdplaunch.checkpoint.chunks import Piece, Region, flat_offset, intersect, row_major
from fsdplaunch.checkpoint.dtypes import convert
from fsdplaunch.checkpoint.merge import ProgressMeter
from fsdplaunch.checkpoint.merge.plan import MergePlan, PlannedFile, PlannedTensor
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.safetensors_format import INDEX_NAME
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError
from fsdplaunch.files import durable_file

BLOCK = 8 * 2**20
# A conversion holds a block several times.
_CONVERTED_BLOCK = 2 * 2**20
# A sparse stretch of source is read whole up to this many bytes; beyond, it is cut until it is dense enough.
_SPARSE_READ = 16 * 2**10
_SPARSE_RATIO = 4

ReadPiece = Callable[[Piece, int, int], bytes]  # (piece, byte offset in its data, length)


def blocks_of(shape: Sequence[int], size: int, limit: int = BLOCK) -> Iterator[Region]:
    """Yield rectangles that cover `shape` in memory order, each one run of at most `limit` bytes, or one element.

    No dimension of the shape is empty; an element has `size` bytes.
    """
    dim, inner = len(shape), size
    while dim and inner * shape[dim - 1] <= limit:
        dim -= 1
        inner *= shape[dim]
    if not dim:
        yield Region((0,) * len(shape), tuple(shape))
        return
    dim -= 1
    step = max(1, limit // inner)
    for outer in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            sizes = (*(1 for _ in outer), min(step, shape[dim] - start), *shape[dim + 1 :])
            yield Region((*outer, start, *(0 for _ in shape[dim + 1 :])), sizes)


def written_blocks(tensor: PlannedTensor, read: ReadPiece) -> Iterator[bytes | bytearray]:
    """Yield the bytes of `tensor` as the output file holds them, block by block, in its dtype there."""
    same = tensor.written is tensor.dtype
    for block in blocks_of(tensor.shape, tensor.dtype.size, BLOCK if same else _CONVERTED_BLOCK):
        yield convert(gather_block(tensor, block, read), tensor.dtype, tensor.written, name=tensor.stored_name)


def gather_block(tensor: PlannedTensor, block: Region, read: ReadPiece) -> bytearray:
    """Return the bytes of one block of `tensor`, in row-major order."""
    size = tensor.dtype.size
    target = bytearray(block.numel * size)
    view = memoryview(target)
    strides = row_major(block.sizes)
    for piece in tensor.pieces:
        common = intersect(piece.region, block)
        if common is not None:
            inside = tuple(a - b for a, b in zip(common.offsets, block.offsets, strict=True))
            _gather(piece, common, read, view, flat_offset(block.sizes, inside), strides, size)
    return target


def _gather(
    piece: Piece, region: Region, read: ReadPiece, target: memoryview, at: int, strides: tuple[int, ...], size: int
) -> None:
    """Copy `region` of a piece into `target` at element `at`, cutting it until each read is dense."""
    reach = [(n - 1) * s for n, s in zip(region.sizes, piece.strides, strict=True)]
    span = sum(reach) + 1
    dense = span <= _SPARSE_RATIO * region.numel and span * size <= BLOCK
    if dense or span * size <= _SPARSE_READ:
        import numpy as np  # only where chunks are not runs of bytes

        def seen(memory: Any, steps: Sequence[int]) -> Any:
            elements = np.frombuffer(memory, f"V{size}")
            return np.lib.stride_tricks.as_strided(elements, region.sizes, [step * size for step in steps])

        first = piece.start + sum(
            (a - b) * s for a, b, s in zip(region.offsets, piece.region.offsets, piece.strides, strict=True)
        )
        seen(target[at * size :], strides)[...] = seen(read(piece, first * size, span * size), piece.strides)
        return
    dim = reach.index(max(reach))
    half = region.sizes[dim] // 2
    for start, count in ((0, half), (half, region.sizes[dim] - half)):
        offsets = tuple(o + start if d == dim else o for d, o in enumerate(region.offsets))
        sizes = tuple(count if d == dim else n for d, n in enumerate(region.sizes))
        _gather(piece, Region(offsets, sizes), read, target, at + start * strides[dim], strides, size)


# Reading and checking this much is quicker than handing it to a thread.
_SMALL = 64 * 2**10
_BUFFER = 2**20
_MAX_THREADS = 4


class ChecksumCheck:
    """Checks chunks of one checkpoint, where `wanted`, each once; leaving the block without an error waits."""

    def __init__(self, sources: DataFiles, *, wanted: bool = True) -> None:
        self._sources, self._wanted = sources, wanted
        self._done: set[tuple[str, int, int]] = set()
        self._waiting: deque[tuple[str, Piece, Future[int]]] = deque()
        self._threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fsdplaunch-checksum")
        self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while kind is None and self._waiting:
                self._compare()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, piece: Piece) -> None:
        """Check the chunk `piece` of the tensor `name`, now or soon.

        Raises:
            CheckpointError: This chunk, or one before it, does not match its checksum.
        """
        place = (piece.place.file, piece.file_offset, piece.data_length)
        if not self._wanted or piece.crc is None or place in self._done:
            return
        self._done.add(place)  # many tensors may lie in one storage
        if piece.data_length <= _SMALL:
            data = self._sources.read_piece(piece, 0, piece.data_length)
            _check_crc(self._sources, name, piece, crc32(data, 0))
            return
        while len(self._waiting) > self._threads:
            self._compare()
        fd = os.dup(self._sources.descriptor(piece.place.file))
        self._waiting.append((name, piece, self._pool.submit(self._crc_in_file, fd, piece)))

    def _compare(self) -> None:
        name, piece, future = self._waiting.popleft()
        _check_crc(self._sources, name, piece, future.result())

    def _crc_in_file(self, fd: int, piece: Piece) -> int:
        """Return the checksum of what stands in the file, and close the descriptor."""
        try:
            if not hasattr(self._local, "buffer"):
                self._local.buffer = memoryview(bytearray(_BUFFER))
            buffer, crc, position, left = self._local.buffer, 0, piece.file_offset, piece.data_length
            while left and (count := os.preadv(fd, [buffer[: min(left, _BUFFER)]], position)):
                crc = crc32(buffer[:count], crc)
                position += count
                left -= count
            return crc
        finally:
            os.close(fd)


def _check_crc(sources: DataFiles, name: str, piece: Piece, crc: int) -> None:
    if piece.crc not in (None, crc):
        path = sources.folder / piece.place.file
        msg = f"{path}: the bytes of {short(name)} at {piece.file_offset} do not match their checksum"
        raise CheckpointError(msg, hint="the checkpoint is damaged there; copy it again or use an older one")


def write_plan(
    plan: MergePlan, sources: DataFiles, folder: Path, meter: ProgressMeter, *, checksums: bool = True
) -> None:
    """Write every file of `plan` into `folder`, on disk when this returns; `meter` counts bytes.

    With `checksums`, what is taken is compared with those that the checkpoint has of it.

    Raises:
        CheckpointError: A chunk does not match its checksum.
    """
    copier = Copier()
    with ChecksumCheck(sources, wanted=checksums) as check:
        for file in plan.files:
            _write_file(file, folder, sources, copier, meter, check)
    if plan.index:
        with durable_file(folder / INDEX_NAME, "xb") as index:
            index.write(plan.index)


def _write_file(
    file: PlannedFile, folder: Path, sources: DataFiles, copier: Copier, meter: ProgressMeter, check: ChecksumCheck
) -> None:
    fd = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, file.nbytes)
        write_all(fd, file.header, 0)
        writeback, position = Writeback(fd), 0

        def moved(count: int) -> None:
            """Count bytes that now stand at the current position."""
            nonlocal position
            position += count
            meter.tick(count)
            writeback.reached(position)

        for tensor in file.tensors:
            meter.tensor, position, in_runs = tensor.name, tensor.offset, tensor.in_runs
            if not in_runs:
                for data in written_blocks(tensor, sources.read_piece):
                    write_all(fd, data, position)
                    moved(len(data))
            for piece in tensor.pieces:
                if in_runs:
                    source = sources.descriptor(piece.place.file)
                    offset = piece.file_offset + piece.start * tensor.dtype.size
                    position = tensor.offset + piece.target
                    copier.copy(source, offset, fd, position, piece.nbytes, tick=moved)
                check.add(tensor.stored_name, piece)
        os.fsync(fd)
    finally:
        os.close(fd)


_PIECE = 4 * 2**20


def verify_merge(plan: MergePlan, sources: DataFiles, folder: Path, meter: ProgressMeter) -> None:
    """Compare what stands in `folder` with what `plan` took from `sources`.

    Raises:
        CheckpointError: When a tensor differs, or when the source does not match its own checksums.
    """
    for file in plan.files:
        fd = os.open(folder / file.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # From the disk, not from the pages just written.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if os.fstat(fd).st_size != file.nbytes or read_all(fd, 0, len(file.header)) != file.header:
                _differs(f"{folder / file.name} does not have the planned size or header")
            for tensor in file.tensors:
                meter.tensor, position, in_runs = tensor.name, tensor.offset, tensor.in_runs
                for data in () if in_runs else written_blocks(tensor, sources.read_piece):
                    _compare(tensor, data, fd, position, meter)
                    position += len(data)
                for piece in tensor.pieces:
                    _check_piece(tensor, piece, fd, sources, meter, compare=in_runs)
        finally:
            os.close(fd)
    if plan.index and (folder / INDEX_NAME).read_bytes() != plan.index:
        _differs(f"{folder / INDEX_NAME} is not the index that was planned")


def _check_piece(
    tensor: PlannedTensor, piece: Piece, fd: int, sources: DataFiles, meter: ProgressMeter, *, compare: bool
) -> None:
    """Read a chunk once and compare it with its checksum, and with the merged file where it is a run there."""
    first, crc = piece.start * tensor.dtype.size, 0
    for offset in range(0, piece.data_length, _PIECE):
        data = sources.read_piece(piece, offset, min(_PIECE, piece.data_length - offset))
        crc = crc32(data, crc)
        start, end = max(offset, first), min(offset + len(data), first + piece.nbytes)
        if compare and start < end:
            position = tensor.offset + piece.target + start - first
            _compare(tensor, data[start - offset : end - offset], fd, position, meter)
    _check_crc(sources, tensor.stored_name, piece, crc)


def _compare(tensor: PlannedTensor, data: bytes | bytearray, fd: int, position: int, meter: ProgressMeter) -> None:
    if read_all(fd, position, len(data)) != data:
        _differs(f"the merged {short(tensor.name)} differs from the checkpoint")
    meter.tick(len(data))


def _differs(what: str) -> NoReturn:
    raise CheckpointError(what, hint="the disk or a program changed it; merge again")
