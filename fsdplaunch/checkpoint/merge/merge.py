"""Merge a sharded checkpoint into one model folder: find it, read its index, plan, check, copy, publish."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fsdplaunch.checkpoint.merge import MergeOptions, MergeResult, Progress, ProgressMeter
from fsdplaunch.checkpoint.merge.prepare import PreparedMerge, copy_model_files, prepare, remove_checkpoint
from fsdplaunch.checkpoint.merge.write import verify_merge, write_plan
from fsdplaunch.checkpoint.output_folder import atomic_output, check_output
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint, find_model, open_checkpoint
from fsdplaunch.checkpoint.untrusted_files import real_path
from fsdplaunch.errors import CheckpointError, UsageError

__all__ = ["MergeOptions", "MergeResult", "PreparedMerge", "merge", "merge_fsdp_weights", "prepare_merge"]
_UNCHANGED = "no output was made and the checkpoint is unchanged"


def prepare_merge(
    checkpoint: Path, options: MergeOptions | None = None, *, output: Path | None = None
) -> PreparedMerge:
    """Plan a merge to safetensors and check that it can be done; only headers are read, nothing is written.

    Args:
        checkpoint: A sharded checkpoint, or a folder that holds exactly one.
        options: How to merge.
        output: The folder to make; when given, it is checked as well.

    Raises:
        UsageError: When the output cannot be written there.
        CheckpointError: When the checkpoint cannot be merged, or the disk is too full.
    """
    options = options or MergeOptions()
    if not options.safe_serialization:
        msg = "only a merge to safetensors can be planned without writing"
        raise UsageError(msg)
    with _reported(checkpoint, output):
        source = find_model(checkpoint)
        target = None if output is None else _check_output(checkpoint, source, output, options)
        with open_checkpoint(source) as opened:
            return prepare(opened, target, options)


def merge(
    checkpoint: Path, output: Path, *, options: MergeOptions | None = None, progress: Progress | None = None
) -> MergeResult:
    """Merge the model's weights in `checkpoint` into the folder `output`.

    The output appears whole or not at all; on an error or Ctrl-C nothing is left and the source is as it was.

    Args:
        checkpoint: A sharded checkpoint, or a folder that holds exactly one.
        output: The folder to make.
        options: How to merge.
        progress: Called now and then, from this thread.

    Raises:
        UsageError: When the output cannot be written there.
        CheckpointError: When the checkpoint cannot be merged, or the disk is too full.
    """
    started, options = time.monotonic(), options or MergeOptions()
    with _reported(checkpoint, output):
        source = find_model(checkpoint)
        target = _check_output(checkpoint, source, output, options)
        with open_checkpoint(source) as opened:
            if options.safe_serialization:
                result = _merge_to_safetensors(opened, target, options, progress)
            else:
                from fsdplaunch.checkpoint.merge.torch_output import merge_to_torch

                result = merge_to_torch(opened, target, options, progress)
            removed = False
            if options.remove_checkpoint_dir and result.verified:
                try:
                    removed = remove_checkpoint(opened)
                except OSError as problem:
                    msg = f"{opened.folder} could not be removed: {problem.strerror or problem}"
                    hint = f"the merged weights are complete in {target}; remove the rest yourself"
                    raise CheckpointError(msg, hint=hint) from None
    return replace(result, removed=removed, seconds=time.monotonic() - started)


def _merge_to_safetensors(
    opened: OpenCheckpoint, target: Path, options: MergeOptions, progress: Progress | None
) -> MergeResult:
    prepared = prepare(opened, target, options)
    plan, selection = prepared.plan, prepared.selection
    with atomic_output(target, overwrite=options.overwrite) as partial:
        copy_model_files(prepared.model_files, partial)
        meter = ProgressMeter("copy", plan.tensor_bytes, progress)
        # Verifying reads every chunk again and compares its checksum then.
        write_plan(plan, opened.sources, partial, meter, checksums=options.checksums and not options.reads_back)
        if options.reads_back:
            verify_merge(plan, opened.sources, partial, ProgressMeter("verify", plan.tensor_bytes, progress))
    pieces = (piece for tensor in plan.tensors for piece in tensor.pieces)
    return MergeResult(
        output=target,
        files=tuple(target / name for name in plan.names),
        source=prepared.folder,
        tensors=len(plan.tensors),
        nbytes=plan.nbytes,
        dtypes=dict(Counter(tensor.written.name for tensor in plan.tensors)),
        skipped=selection.skipped,
        excluded=selection.excluded,
        tied=prepared.tied,
        copied=tuple(target / path.name for path in prepared.model_files),
        renamed=selection.renamed,
        verified=options.reads_back,
        unchecked=sum(piece.nbytes for piece in pieces if piece.crc is None or not options.checksums),
    )


def _check_output(checkpoint: Path, source: Path, output: Path, options: MergeOptions) -> Path:
    target = check_output(output, (checkpoint, source), overwrite=options.overwrite)
    if options.copy_from is not None and real_path(options.copy_from) == target:
        msg = f"the output {output} is also the model folder to copy files from"
        raise UsageError(msg, hint="choose another output folder")
    return target


@contextmanager
def _reported(source: Path, output: Path | None) -> Iterator[None]:
    """Turn what the operating system refuses into an error that says what was being done."""
    try:
        yield
    except CheckpointError:  # a RuntimeError that says so itself
        raise
    except (OSError, RuntimeError) as problem:  # torch's writer says that of a full disk
        place = f"{problem.filename}: " if isinstance(problem, OSError) and problem.filename else ""
        goal = f" into {output}" if output else ""
        why = getattr(problem, "strerror", None) or str(problem).partition("\n")[0]
        msg = f"merging {source}{goal} failed: {place}{why}"
        raise CheckpointError(msg, hint=_UNCHANGED) from problem
    except MemoryError:
        msg = f"merging {source} ran out of memory"
        raise CheckpointError(msg, hint=_UNCHANGED) from None


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
    *,
    overwrite: bool = False,
) -> None:
    """Merge sharded weights into `output_path/model.safetensors`, or `pytorch_model.bin`.

    Takes what accelerate's function of this name takes, and like it writes tied weights under every name.
    In a distributed job rank 0 merges and all ranks wait.

    Args:
        checkpoint_dir: A sharded checkpoint, or a folder that holds exactly one.
        output_path: The folder to make. One that is there keeps its files, and may hold no weights yet.
        safe_serialization: Write safetensors rather than a pickle.
        remove_checkpoint_dir: Delete the checkpoint after the result was read back and compared with it.
        overwrite: Replace weights in `output_path`, all at once.

    Raises:
        UsageError: When the output cannot be written there.
        CheckpointError: When the checkpoint cannot be merged; on every rank.
    """
    options = MergeOptions(
        safe_serialization=safe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
        keep_tied=True,
        overwrite=overwrite,
    )
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        merge(Path(checkpoint_dir), Path(output_path), options=options)
        return
    outcome: list[BaseException | None] = [None]
    if distributed.get_rank() == 0:
        try:
            merge(Path(checkpoint_dir), Path(output_path), options=options)
        except Exception as problem:
            outcome = [problem]
    distributed.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
