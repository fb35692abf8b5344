"""Options of a merge, who follows it and what they hear, and its result."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fsdplaunch.checkpoint.dtypes import check_target
from fsdplaunch.checkpoint.output_folder import free_space
from fsdplaunch.checkpoint.readers.open import OpenCheckpoint
from fsdplaunch.errors import UsageError

PROGRESS_SECONDS = 0.1
MAX_JOBS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How to merge.

    Attributes:
        safe_serialization: Write safetensors; False: one `pytorch_model.bin`, which needs torch and the memory.
        max_shard_size: Bytes of tensors per safetensors file; larger models become several files and an index.
        overwrite: Replace the weights in an existing output folder; its other files stay.
        verify: Read the result back and compare every byte with the source and its checksums.
        checksums: Compare what is taken with the checksums that the checkpoint stores of it.
        strip_wrappers: Take the names of training wrappers (`_orig_mod`, a leading `module`, ...) out of names.
        remove_checkpoint_dir: Delete the checkpoint after the result was verified.
        dtype: Convert floating-point weights to `bf16`, `fp16` or `fp32`; None keeps what is stored.
        only: Merge only the weights that fit one of these patterns; see `weight_names.matches`.
        exclude: Leave out the weights that fit one of these patterns.
        rename: OLD and NEW leading parts of names.
        keep_tied: Write a weight with several names under each of them instead of once.
        optimizer: Merge the optimizer's state, not the weights, into `optimizer.bin`; needs torch and the memory.
        copy_from: The model's own folder: configuration, tokenizer and the like are copied from there.
        jobs: How many threads write.
    """

    safe_serialization: bool = True
    max_shard_size: int = 50 * 10**9
    overwrite: bool = False
    verify: bool = False
    checksums: bool = True
    strip_wrappers: bool = True
    remove_checkpoint_dir: bool = False
    dtype: str | None = None
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    keep_tied: bool = False
    copy_from: Path | None = None
    optimizer: bool = False
    jobs: int = 1

    @property
    def reads_back(self) -> bool:
        """Return whether the result is read back and compared."""
        return self.verify or self.remove_checkpoint_dir

    @property
    def is_one_file(self) -> bool:
        """Return whether the output is one file of torch's, written by one process."""
        return self.optimizer or not self.safe_serialization

    def __post_init__(self) -> None:
        if self.max_shard_size < 1:
            msg = f"max_shard_size must be at least 1 byte, got {self.max_shard_size}"
            raise UsageError(msg)
        if not self.checksums and (self.verify or self.remove_checkpoint_dir):
            msg = "a merge that is verified compares the checksums as well"
            raise UsageError(msg, hint="leave out --no-checksums")
        if self.remove_checkpoint_dir and self.optimizer:
            msg = "the checkpoint is removed only after a merge of the weights"
            raise UsageError(msg, hint="merge first, then remove the checkpoint yourself")
        check_target(self.dtype)
        chosen = [name for name in ("dtype", "only", "exclude", "rename", "copy_from") if getattr(self, name)]
        if chosen and self.is_one_file:
            msg = f"{chosen[0]} works only in a merge to safetensors"
            raise UsageError(msg, hint="merge to safetensors, or leave it out")
        if not 1 <= self.jobs <= MAX_JOBS:
            msg = f"jobs must be 1 to {MAX_JOBS}, got {self.jobs}"
            raise UsageError(msg)
        if self.jobs > 1 and self.is_one_file:
            msg = "jobs works only in a merge to safetensors"
            raise UsageError(msg, hint="merge to safetensors, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeStart:
    """What is about to be written, once all checks are passed.

    Attributes:
        source: The checkpoint folder that is read.
        output: The folder to make.
        tensors: Number of tensors.
        files: Number of files that the checkpoint's data stand in.
        nbytes: Bytes to write.
        free: Bytes free on the output's disk.
        memory: Bytes of memory that it takes.
    """

    source: Path
    output: Path
    tensors: int
    files: int
    nbytes: int
    free: int
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProgress:
    """How far a merge is.

    Attributes:
        phase: What is done at the moment.
        done: Bytes finished in this phase.
        total: Bytes of this phase.
        tensor: The tensor at hand.
    """

    phase: Literal["copy", "verify"]
    done: int
    total: int
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What a merge wrote.

    Attributes:
        output: The folder.
        files: The files that hold the weights, and their index if there is one.
        source: The checkpoint folder that was read, which may lie below the one that was given.
        tensors: Number of tensors.
        nbytes: Bytes of all files.
        seconds: Wall time.
        dtypes: Number of tensors of each dtype.
        skipped: Names of entries that are not in the result: values that are not tensors, optimizers.
        excluded: Names of weights that were left out on request.
        renamed: Stored and final name of weights that lost a wrapper's name or were renamed.
        tied: Names that are not written because another name holds the same weight: left out, and kept.
        copied: Files that came from the model's folder.
        verified: The result was read back and compared with the source.
        unchecked: Bytes of the weights that were not compared with a stored checksum.
        removed: The checkpoint was deleted.
    """

    output: Path
    files: tuple[Path, ...]
    source: Path
    tensors: int
    nbytes: int
    seconds: float
    dtypes: dict[str, int] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    copied: tuple[Path, ...] = ()
    verified: bool = False
    unchecked: int = 0
    removed: bool = False


Progress = Callable[[MergeProgress], None]
Announce = Callable[[MergeStart], None]
# What a merge to safetensors was measured to take at every size, and for each chunk of the checkpoint besides.
STREAMING_MEMORY = 80 * 10**6
MEMORY_PER_CHUNK = 400


class ProgressMeter:
    """Turns bytes into calls of `progress`, at most ten a second."""

    def __init__(self, phase: Literal["copy", "verify"], total: int, progress: Progress | None) -> None:
        self.phase, self.total, self.progress = phase, total, progress
        self.done, self.tensor, self.next = 0, "", 0.0

    def tick(self, count: int) -> None:
        """Count `count` more bytes."""
        self.done += count
        if self.progress is None:
            return
        now = time.monotonic()
        if now >= self.next or self.done == self.total:
            self.next = now + PROGRESS_SECONDS
            self.progress(MergeProgress(phase=self.phase, done=self.done, total=self.total, tensor=self.tensor))


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who follows a merge."""

    progress: Progress | None
    announce: Announce | None

    def start(self, opened: OpenCheckpoint, target: Path, tensors: int, nbytes: int, memory: int) -> None:
        """Say what is about to be written."""
        if self.announce is None:
            return
        start = MergeStart(
            source=opened.folder,
            output=target,
            tensors=tensors,
            files=len(opened.index.files),
            nbytes=nbytes,
            free=free_space(target),
            memory=memory,
        )
        self.announce(start)
