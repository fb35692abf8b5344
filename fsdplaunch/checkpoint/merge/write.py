"""Write a plan's safetensors files: header, then each tensor's bytes, moved inside the kernel where possible."""

import os
from collections.abc import Sequence
from pathlib import Path

from fsdplaunch.checkpoint.merge.assemble_tensor import written_blocks
from fsdplaunch.checkpoint.merge.checksums import ChecksumCheck
from fsdplaunch.checkpoint.merge.file_copy import Copier, write_all
from fsdplaunch.checkpoint.merge.options import ProgressMeter
from fsdplaunch.checkpoint.merge.parallel.jobs import run_jobs
from fsdplaunch.checkpoint.merge.parallel.shares import split_by_tensors
from fsdplaunch.checkpoint.merge.plan import MergePlan, PlannedFile, PlannedTensor
from fsdplaunch.checkpoint.readers.data_files import DataFiles
from fsdplaunch.checkpoint.safetensors_format import INDEX_NAME
from fsdplaunch.checkpoint.writeback import Writeback


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
        jobs: How many processes write.

    Raises:
        CheckpointError: A chunk does not match its checksum.
    """
    for file in plan.files:
        _make_file(file, folder)

    def fill(files: Sequence[PlannedFile], meter: ProgressMeter) -> None:
        copier = Copier()
        with ChecksumCheck(sources, wanted=checksums, processes=jobs) as check:
            for file in files:
                _fill_file(file, folder, sources, copier, meter, check)

    run_jobs(split_by_tensors(plan.files, jobs) if jobs > 1 else [plan.files], fill, meter)
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
