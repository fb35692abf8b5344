"""Merge a sharded checkpoint into safetensors: read the index, plan, check, copy, publish.

Standard library only: the data moves from file to file without torch and, mostly, without leaving the kernel.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.checkpoint.assemble import blocks_of, gather_block, needs_assembly
from fsdplaunch.checkpoint.index import CheckpointIndex, read_index
from fsdplaunch.checkpoint.layout import find_model
from fsdplaunch.checkpoint.names import Selection, select_weights
from fsdplaunch.checkpoint.plan import MergePlan, Piece, PlannedFile, PlannedTensor, build_plan
from fsdplaunch.checkpoint.safetensors_file import INDEX_NAME
from fsdplaunch.checkpoint.sources import Sources, open_sources, read_items
from fsdplaunch.checkpoint.staging import check_output, check_space, staged
from fsdplaunch.checkpoint.transfer import Copier, write_all
from fsdplaunch.errors import CheckpointError

GB = 10**9
_PROGRESS_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How to merge.

    Attributes:
        max_shard_size: Bytes of tensors per output file; larger models become several files and an index.
        overwrite: Replace the weights in an existing output folder.
        verify: Read the result back and compare every byte with the source and its checksums.
    """

    max_shard_size: int = 50 * GB
    overwrite: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProgress:
    """How far a merge is.

    Attributes:
        phase: `copy` or `verify`.
        done: Bytes finished in this phase.
        total: Bytes of this phase.
        tensor: The tensor at hand.
    """

    phase: str
    done: int
    total: int
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What a merge wrote.

    Attributes:
        output: The folder.
        files: The files in it.
        source: The checkpoint folder that was read, which may lie below the one that was given.
        tensors: Number of tensors.
        nbytes: Bytes of all files.
        seconds: Wall time.
        dtypes: Number of tensors of each element type.
        skipped: Names of entries that are not in the result: values that are not tensors, other parts.
        verified: The result was read back and compared with the source.
    """

    output: Path
    files: tuple[Path, ...]
    source: Path
    tensors: int
    nbytes: int
    seconds: float
    dtypes: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    verified: bool = False


Progress = Callable[[MergeProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A merge that is planned and checked, with nothing written yet."""

    folder: Path
    selection: Selection
    plan: MergePlan


def prepare_merge(checkpoint: Path, options: MergeOptions) -> Prepared:
    """Find the model in `checkpoint` and plan its merge; reads headers only. `--dry-run` shows the result."""
    folder = find_model(checkpoint).folder
    index = read_index(folder)
    selection = select_weights(index, where=str(folder))
    with open_sources(folder, index) as sources:
        return _prepare(folder, selection, sources, options)


def _prepare(folder: Path, selection: Selection, sources: Sources, options: MergeOptions) -> Prepared:
    items = read_items(sources, (tensor for _, tensor in selection.tensors))
    plan = build_plan(selection, items, max_shard_size=options.max_shard_size)
    return Prepared(folder=folder, selection=selection, plan=plan)


def merge(
    checkpoint: Path, output: Path, *, options: MergeOptions | None = None, progress: Progress | None = None
) -> MergeResult:
    """Merge the model's weights in `checkpoint` into the folder `output`.

    The output appears whole or not at all; the source is only read.

    Args:
        checkpoint: A sharded checkpoint, or a folder that holds exactly one.
        output: The folder to make.
        options: How to merge.
        progress: Called now and then from this thread.

    Raises:
        UsageError: When the output cannot be written there.
        CheckpointError: When the checkpoint cannot be merged.
    """
    started, options = time.monotonic(), options or MergeOptions()
    folder = find_model(checkpoint).folder
    target = check_output(output, (checkpoint, folder), overwrite=options.overwrite)
    index = read_index(folder)
    selection = select_weights(index, where=str(folder))
    try:
        with open_sources(folder, index) as sources:
            prepared = _prepare(folder, selection, sources, options)
            check_space(target, prepared.plan.nbytes)
            with staged(target) as partial:
                _write(prepared.plan, sources, partial, progress)
    except OSError as problem:
        msg = f"merging {folder} into {output} failed: {problem.strerror or problem}"
        raise CheckpointError(msg, hint="nothing was written; the checkpoint is unchanged") from problem
    return _result(prepared, index, target, time.monotonic() - started)


def _result(prepared: Prepared, _: CheckpointIndex, target: Path, seconds: float) -> MergeResult:
    plan, selection = prepared.plan, prepared.selection
    names = [file.name for file in plan.files] + ([INDEX_NAME] if plan.index else [])
    return MergeResult(
        output=target,
        files=tuple(target / name for name in names),
        source=prepared.folder,
        tensors=len(plan.tensors),
        nbytes=plan.nbytes,
        seconds=seconds,
        dtypes=dict(Counter(tensor.dtype.name for tensor in plan.tensors)),
        skipped=(*(value.name for _, value in selection.values), *selection.others),
    )


class _Meter:
    """Turns bytes into calls of `progress`, at most ten a second."""

    def __init__(self, phase: str, total: int, progress: Progress | None) -> None:
        self.phase, self.total, self.progress = phase, total, progress
        self.done, self.tensor, self.next = 0, "", 0.0

    def tick(self, count: int) -> None:
        self.done += count
        if self.progress is None:
            return
        now = time.monotonic()
        if now >= self.next or self.done == self.total:
            self.next = now + _PROGRESS_SECONDS
            self.progress(MergeProgress(phase=self.phase, done=self.done, total=self.total, tensor=self.tensor))


def _write(plan: MergePlan, sources: Sources, folder: Path, progress: Progress | None) -> None:
    meter, copier = _Meter("copy", plan.tensor_bytes, progress), Copier()
    for file in plan.files:
        fd = os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _write_file(file, fd, sources, copier, meter)
            os.fsync(fd)
        finally:
            os.close(fd)
    if plan.index:
        with (folder / INDEX_NAME).open("xb") as index:
            index.write(plan.index)
            index.flush()
            os.fsync(index.fileno())


def _write_file(file: PlannedFile, fd: int, sources: Sources, copier: Copier, meter: _Meter) -> None:
    os.ftruncate(fd, file.nbytes)
    write_all(fd, file.header, 0)
    for tensor in file.tensors:
        meter.tensor = tensor.name
        if needs_assembly(tensor):
            _assemble(tensor, fd, sources, meter)
            continue
        for piece in tensor.pieces:
            offset = piece.file_offset + piece.start * tensor.dtype.size
            source = sources.descriptor(piece.place.file)
            copier.copy(source, offset, fd, tensor.offset + piece.target, piece.nbytes, tick=meter.tick)


def _assemble(tensor: PlannedTensor, fd: int, sources: Sources, meter: _Meter) -> None:
    def read(piece: Piece, offset: int, count: int) -> bytes:
        return sources.read(piece.place, piece.file_offset - piece.place.offset + offset, count)

    position = tensor.offset
    for block in blocks_of(tensor.shape, tensor.dtype.size):
        data = gather_block(tensor, block, read)
        write_all(fd, data, position)
        position += len(data)
        meter.tick(len(data))


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge sharded weights into `output_path/model.safetensors`, as accelerate's function of this name does."""
    if not safe_serialization or remove_checkpoint_dir:
        msg = "only safetensors without removing the checkpoint is supported so far"
        raise CheckpointError(msg)
    merge(Path(checkpoint_dir), Path(output_path))
