"""Write a plan's safetensors files, check the stored checksums on the way, and read the result back.

The kernel moves data from file to file: nothing passes through here but what has to be put together or converted.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from fsdplaunch.checkpoint.byte_transfer import Copier, Writeback, crc32, write_all
from fsdplaunch.checkpoint.chunks import Piece, Region, flat_offset, intersect, row_major
from fsdplaunch.checkpoint.dtypes import convert
from fsdplaunch.checkpoint.merge.options import PROGRESS_SECONDS, ProgressMeter
from fsdplaunch.checkpoint.merge.plan import MergePlan, PlannedFile, PlannedTensor
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.safetensors_format import INDEX_NAME
from fsdplaunch.checkpoint.untrusted_files import short
from fsdplaunch.errors import CheckpointError

BLOCK = 8 * 2**20
# A conversion holds a block several times.
_CONVERTED_BLOCK = 2 * 2**20
# A sparse stretch of source is read whole up to this many bytes; beyond, it is cut until it is dense enough.
_SPARSE_READ = 16 * 2**10
_SPARSE_RATIO = 4

ReadPiece = Callable[[Piece, int, int], bytes]  # (piece, byte offset in its data, length)


def blocks_of(shape: Sequence[int], size: int, limit: int = BLOCK) -> Iterator[Region]:
    """Yield rectangles that cover `shape` in memory order, each one run of at most `limit` bytes.

    Args:
        shape: The tensor's shape, without empty dimensions.
        size: Bytes per element.
        limit: Bytes; one element is always allowed.
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
        first = piece.start + sum(
            (a - b) * s for a, b, s in zip(region.offsets, piece.region.offsets, piece.strides, strict=True)
        )
        raw = read(piece, first * size, span * size)
        _place(flip_bits(raw, piece.flip, size), piece.strides, target, at, strides, region.sizes, size)
        return
    dim = reach.index(max(reach))
    half = region.sizes[dim] // 2
    for start, count in ((0, half), (half, region.sizes[dim] - half)):
        offsets = tuple(o + start if d == dim else o for d, o in enumerate(region.offsets))
        sizes = tuple(count if d == dim else n for d, n in enumerate(region.sizes))
        _gather(piece, Region(offsets, sizes), read, target, at + start * strides[dim], strides, size)


def _place(
    raw: bytes,
    source_strides: Sequence[int],
    target: memoryview,
    at: int,
    strides: Sequence[int],
    sizes: Sequence[int],
    size: int,
) -> None:
    """Copy elements of `size` bytes from one layout into another; `target` starts at its element `at`."""
    import numpy as np  # only where chunks are not runs of bytes

    def seen(memory: Any, steps: Sequence[int]) -> Any:
        elements = np.frombuffer(memory, f"V{size}")
        return np.lib.stride_tricks.as_strided(elements, sizes, [step * size for step in steps])

    seen(target[at * size :], strides)[...] = seen(raw, source_strides)


def flip_bits(data: bytes, bits: int, size: int) -> bytes:
    """Invert `bits` in every element of `data`."""
    if not bits:
        return data
    mask = bits.to_bytes(size, "little") * (len(data) // size)
    return (int.from_bytes(data, "little") ^ int.from_bytes(mask, "little")).to_bytes(len(data), "little")


# Reading and checking this much is quicker than handing it to a thread.
_SMALL = 64 * 2**10
_BUFFER = 2**20
_MAX_THREADS = 4
_DAMAGED = "the checkpoint is damaged there; copy it again or use an older one"


class ChecksumCheck:
    """Checks chunks of one checkpoint, each once; leaving the block without an error waits for all of them.

    Args:
        sources: The checkpoint's files.
        wanted: Whether to check at all.
        jobs: How many of these there are at once, and share the processors.
    """

    def __init__(self, sources: DataFiles, *, wanted: bool = True, jobs: int = 1) -> None:
        self._sources, self._wanted = sources, wanted
        self._done: set[tuple[str, int, int]] = set()
        self._waiting: deque[tuple[str, Piece, Future[int]]] = deque()
        self._threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // jobs))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="fsdplaunch-checksum")
        self._local = threading.local()
        self.checked = 0

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
        self.checked += piece.data_length
        if piece.data_length <= _SMALL:
            check_crc(self._sources, name, piece, crc_of(piece, self._sources))
            return
        while len(self._waiting) > self._threads:
            self._compare()
        fd = os.dup(self._sources.descriptor(piece.place.file))
        self._waiting.append((name, piece, self._pool.submit(self._crc_in_file, fd, piece)))

    def _compare(self) -> None:
        name, piece, future = self._waiting.popleft()
        check_crc(self._sources, name, piece, future.result())

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


def crc_of(piece: Piece, sources: DataFiles) -> int:
    """Return the checksum of a chunk's data."""
    crc = 0
    for offset in range(0, piece.data_length, _BUFFER):
        crc = crc32(sources.read_piece(piece, offset, min(_BUFFER, piece.data_length - offset)), crc)
    return crc


def check_crc(sources: DataFiles, name: str, piece: Piece, crc: int) -> None:
    """Compare the checksum of a chunk of the tensor `name` with the stored one, if there is one.

    Raises:
        CheckpointError: They differ.
    """
    if piece.crc is None or piece.crc == crc:
        return
    path = sources.folder / piece.place.file
    msg = f"{path}: the bytes of {short(name)} at {piece.file_offset} do not match their checksum"
    raise CheckpointError(msg, hint=_DAMAGED)


def split_by_tensors(files: Sequence[PlannedFile], count: int) -> list[tuple[PlannedFile, ...]]:
    """Return up to `count` shares of the tensors, of about as many bytes each; a file may be in several."""
    total = sum(tensor.nbytes for file in files for tensor in file.tensors)
    shares: list[dict[str, list[PlannedTensor]]] = [{} for _ in range(count)]
    done = 0
    for file in files:
        for tensor in file.tensors:
            middle = done + tensor.nbytes / 2
            share = shares[min(count - 1, int(middle * count / total)) if total else 0]
            share.setdefault(file.name, []).append(tensor)
            done += tensor.nbytes
    by_name = {file.name: file for file in files}
    return [
        tuple(replace(by_name[name], tensors=tuple(tensors)) for name, tensors in share.items())
        for share in shares
        if share
    ]


class _Stopped(Exception):  # noqa: N818  (nobody sees it)
    """Another thread has failed."""


class _JobMeter(ProgressMeter):
    """Counts what one thread does, and ends it when another one has failed."""

    def __init__(self, stop: threading.Event, shown: ProgressMeter) -> None:
        super().__init__(shown.phase, 0, None)
        self._stop, self._shown = stop, shown

    def tick(self, count: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        super().tick(count)
        self._shown.tensor = self.tensor


Work = Callable[[Sequence[PlannedFile], DataFiles, ProgressMeter], None]


def _run_jobs(
    files: Sequence[PlannedFile], work: Work, sources: DataFiles, meter: ProgressMeter, jobs: int
) -> None:
    """Share the tensors of some files out to threads: they copy in the kernel, without the interpreter's lock.

    Raises:
        CheckpointError, OSError: From the first thread that failed; the others end with their next step.
    """
    if jobs == 1:
        work(files, sources, meter)
        return
    shares, stop = split_by_tensors(files, jobs), threading.Event()
    meters = [_JobMeter(stop, meter) for _ in shares]
    own = [sources.reopened(jobs) for _ in shares]
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(max(1, len(shares)), thread_name_prefix="fsdplaunch-merge") as pool,
    ):
        for each in own:
            stack.enter_context(each)
        running: Any = {pool.submit(work, *each) for each in zip(shares, own, meters, strict=True)}
        try:
            while running:
                done, running = wait(running, PROGRESS_SECONDS, FIRST_EXCEPTION)
                meter.tick(sum(each.done for each in meters) - meter.done)
                for future in done:
                    future.result()
        finally:
            stop.set()


def write_plan(
    plan: MergePlan,
    sources: DataFiles,
    folder: Path,
    meter: ProgressMeter,
    *,
    checksums: bool = True,
    jobs: int = 1,
) -> None:
    """Write every file of `plan` into `folder`, on disk when this returns.

    Args:
        plan: What goes where.
        sources: The checkpoint.
        folder: Where the files go.
        meter: Counts bytes.
        checksums: Compare what is taken with the checksums that the checkpoint has of it.
        jobs: How many threads write.

    Raises:
        CheckpointError: A chunk does not match its checksum.
    """
    for file in plan.files:
        _make_file(file, folder)

    def fill(files: Sequence[PlannedFile], sources: DataFiles, meter: ProgressMeter) -> None:
        copier = Copier()
        with ChecksumCheck(sources, wanted=checksums, jobs=jobs) as check:
            for file in files:
                _fill_file(file, folder, sources, copier, meter, check)

    _run_jobs(plan.files, fill, sources, meter, jobs)
    if plan.index:
        write_small_file(folder / INDEX_NAME, plan.index)


def _make_file(file: PlannedFile, folder: Path) -> None:
    """Make a file of its final size with its header."""
    fd = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(fd, file.nbytes)
        write_all(fd, file.header, 0)
        os.fsync(fd)  # of files without tensors
    finally:
        os.close(fd)


def write_small_file(path: Path, data: bytes) -> None:
    """Write a new file, on disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


class _Output:
    """One output file while it is written, from its start to its end."""

    def __init__(self, fd: int, meter: ProgressMeter) -> None:
        self.fd, self.meter, self.writeback = fd, meter, Writeback(fd)
        self.position = 0

    def moved(self, count: int) -> None:
        """Count bytes that now stand at the current position."""
        self.position += count
        self.meter.tick(count)
        self.writeback.reached(self.position)


def _fill_file(
    file: PlannedFile,
    folder: Path,
    sources: DataFiles,
    copier: Copier,
    meter: ProgressMeter,
    check: ChecksumCheck,
) -> None:
    """Write the tensors of `file`, which may be some of those that the file holds."""
    fd = os.open(folder / file.name, os.O_RDWR | os.O_CLOEXEC)
    try:
        output = _Output(fd, meter)
        for tensor in file.tensors:
            meter.tensor = tensor.name
            if tensor.in_runs:
                _copy(tensor, output, sources, copier, check)
            else:
                _assemble(tensor, output, sources)
                for piece in tensor.pieces:
                    check.add(tensor.stored_name, piece)
        os.fsync(fd)
    finally:
        os.close(fd)


def _copy(
    tensor: PlannedTensor, output: _Output, sources: DataFiles, copier: Copier, check: ChecksumCheck
) -> None:
    for piece in tensor.pieces:
        source = sources.descriptor(piece.place.file)
        offset = piece.file_offset + piece.start * tensor.dtype.size
        output.position = tensor.offset + piece.target
        copier.copy(source, offset, output.fd, output.position, piece.nbytes, tick=output.moved)
        check.add(tensor.stored_name, piece)


def _assemble(tensor: PlannedTensor, output: _Output, sources: DataFiles) -> None:
    output.position = tensor.offset
    for data in written_blocks(tensor, sources.read_piece):
        write_all(output.fd, data, output.position)
        output.moved(len(data))


_PIECE = 4 * 2**20


def verify_merge(
    plan: MergePlan, sources: DataFiles, folder: Path, meter: ProgressMeter, *, jobs: int = 1
) -> None:
    """Compare what stands in `folder` with what `plan` took from `sources`, in so many threads.

    Raises:
        CheckpointError: When a tensor differs, or when the source does not match its own checksums.
    """
    for file in plan.files:
        _check_header(file, folder / file.name)

    def compare(files: Sequence[PlannedFile], sources: DataFiles, meter: ProgressMeter) -> None:
        for file in files:
            _check_tensors(file, folder / file.name, sources, meter)

    _run_jobs(plan.files, compare, sources, meter, jobs)
    if plan.index and (folder / INDEX_NAME).read_bytes() != plan.index:
        _differs(f"{folder / INDEX_NAME} is not the index that was planned")


def _check_tensors(file: PlannedFile, path: Path, sources: DataFiles, meter: ProgressMeter) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for tensor in file.tensors:
            meter.tensor = tensor.name
            _check_tensor(tensor, fd, sources, meter)
    finally:
        os.close(fd)


def _check_header(file: PlannedFile, path: Path) -> None:
    """Check what the file says about itself against the plan."""
    with path.open("rb") as opened:
        # From the disk, not from the pages just written.
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if os.fstat(opened.fileno()).st_size != file.nbytes or opened.read(len(file.header)) != file.header:
            _differs(f"{path} has another size or header than planned")


def _check_tensor(tensor: PlannedTensor, fd: int, sources: DataFiles, meter: ProgressMeter) -> None:
    if tensor.in_runs:
        for piece in tensor.pieces:
            _check_run(tensor, piece, fd, sources, meter)
        return
    for piece in tensor.pieces:
        if piece.crc is not None:
            check_crc(sources, tensor.stored_name, piece, crc_of(piece, sources))
    position = tensor.offset
    for data in written_blocks(tensor, sources.read_piece):
        if _read(fd, position, len(data)) != data:
            _differs(f"the merged {short(tensor.name)} differs from the checkpoint")
        position += len(data)
        meter.tick(len(data))


def _check_run(tensor: PlannedTensor, piece: Piece, fd: int, sources: DataFiles, meter: ProgressMeter) -> None:
    """Compare one run with the merged file, and its item with its checksum, reading the source once."""
    first = piece.start * tensor.dtype.size
    base, crc = tensor.offset + piece.target, 0
    for offset in range(0, piece.data_length, _PIECE):
        data = sources.read_piece(piece, offset, min(_PIECE, piece.data_length - offset))
        crc = crc32(data, crc)
        start, end = max(offset, first), min(offset + len(data), first + piece.nbytes)
        if start < end:
            if _read(fd, base + start - first, end - start) != data[start - offset : end - offset]:
                _differs(f"the merged {short(tensor.name)} differs from the checkpoint")
            meter.tick(end - start)
    check_crc(sources, tensor.stored_name, piece, crc)


def _read(fd: int, offset: int, count: int) -> bytes:
    parts = []
    while count and (part := os.pread(fd, count, offset)):
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def _differs(what: str) -> NoReturn:
    raise CheckpointError(what, hint="the disk or a program changed it; merge again")


def verify_torch_file(path: Path, state: Mapping[Any, Any]) -> None:
    """Read a file of torch's back and compare it; tensors as bytes, so that NaN equals itself.

    Raises:
        CheckpointError: It does not hold the same.
    """
    import pickle  # with torch, and not where safetensors are checked

    import torch

    try:
        written = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as problem:
        msg = f"{path.name} could not be read back: {str(problem).splitlines()[0]}"
        raise CheckpointError(msg, hint="no output was made and the checkpoint is unchanged") from None
    if not _is_same(written, state):
        msg = f"{path.name} was read back and differs from the checkpoint"
        raise CheckpointError(msg, hint="no output was made and the checkpoint is unchanged; check the disk")


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two trees of tensors and plain values are equal, dtypes and bytes of tensors included."""
    import torch

    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and _same_bytes(one, other)
    if isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in other)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other) or one is other or (one != one and other != other)  # noqa: PLR0124  (NaN)


def _same_bytes(one: Any, other: Any) -> bool:
    import torch

    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)] if one.numel() else []
    return not flat or torch.equal(*flat)
