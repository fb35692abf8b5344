"""Write a plan's safetensors files: header, then each tensor's bytes, moved inside the kernel where possible."""

import os
from pathlib import Path

from fsdplaunch.checkpoint.assemble import written_blocks
from fsdplaunch.checkpoint.options import Meter
from fsdplaunch.checkpoint.plan import MergePlan, PlannedFile, PlannedTensor
from fsdplaunch.checkpoint.safetensors_file import INDEX_NAME
from fsdplaunch.checkpoint.sources import Sources
from fsdplaunch.checkpoint.transfer import Copier, write_all


def write_plan(plan: MergePlan, sources: Sources, folder: Path, meter: Meter) -> None:
    """Write every file of `plan` into `folder`, on disk when this returns."""
    copier = Copier()
    for file in plan.files:
        fd = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_file(file, fd, sources, copier, meter)
            os.fsync(fd)
        finally:
            os.close(fd)
    if plan.index:
        write_small_file(folder / INDEX_NAME, plan.index)


def write_small_file(path: Path, data: bytes) -> None:
    """Write a new file, on disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _write_file(file: PlannedFile, fd: int, sources: Sources, copier: Copier, meter: Meter) -> None:
    os.ftruncate(fd, file.nbytes)
    write_all(fd, file.header, 0)
    for tensor in file.tensors:
        meter.tensor = tensor.name
        if not tensor.in_runs:
            _assemble(tensor, fd, sources, meter)
            continue
        for piece in tensor.pieces:
            source = sources.descriptor(piece.place.file)
            offset = piece.file_offset + piece.start * tensor.dtype.size
            copier.copy(source, offset, fd, tensor.offset + piece.target, piece.nbytes, tick=meter.tick)


def _assemble(tensor: PlannedTensor, fd: int, sources: Sources, meter: Meter) -> None:
    position = tensor.offset
    for data in written_blocks(tensor, sources.read_piece):
        write_all(fd, data, position)
        position += len(data)
        meter.tick(len(data))
