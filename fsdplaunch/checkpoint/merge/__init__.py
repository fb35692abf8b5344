"""Options of a merge, how its progress is followed, and its result."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.checkpoint.dtypes import TARGETS
from fsdplaunch.errors import UsageError

PROGRESS_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """How to merge."""

    # Write safetensors; False: one `pytorch_model.bin`, which needs torch and the memory.
    safe_serialization: bool = True
    # Bytes of tensors per safetensors file; larger models become several files and an index.
    max_shard_size: int = 50 * 10**9
    overwrite: bool = False  # replace the weights in an existing output folder; its other files stay
    verify: bool = False  # read the result back and compare every byte with the source and its checksums
    checksums: bool = True  # compare what is taken with the checksums that the checkpoint stores of it
    remove_checkpoint_dir: bool = False  # delete the checkpoint after the result was verified
    # Convert floating-point weights to `bf16`, `fp16` or `fp32`; None keeps what is stored.
    dtype: str | None = None
    # Merge only the weights that fit one of these patterns: shell patterns, or leading parts of names.
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # leave out the weights that fit one of these patterns
    rename: tuple[tuple[str, str], ...] = ()  # OLD and NEW leading parts of names
    keep_tied: bool = False  # write a weight with several names under each of them instead of once
    # The model's own folder: configuration, tokenizer and the like are copied from there.
    copy_from: Path | None = None

    @property
    def reads_back(self) -> bool:
        """Return whether the result is read back and compared."""
        return self.verify or self.remove_checkpoint_dir

    def __post_init__(self) -> None:
        if self.max_shard_size < 1:
            msg = f"max_shard_size must be at least 1 byte, got {self.max_shard_size}"
            raise UsageError(msg)
        if not self.checksums and self.reads_back:
            msg = "verifying a merge needs the checksums"
            raise UsageError(msg, hint="leave out --no-checksums")
        if self.dtype not in (None, *TARGETS):
            msg = f"dtype {self.dtype!r} is not known"
            raise UsageError(msg, hint=f"use {', '.join(TARGETS)}")
        chosen = [name for name in ("dtype", "only", "exclude", "rename", "copy_from") if getattr(self, name)]
        if chosen and not self.safe_serialization:
            msg = f"{chosen[0]} works only in a merge to safetensors"
            raise UsageError(msg, hint="merge to safetensors, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeResult:
    """What a merge wrote."""

    output: Path
    files: tuple[Path, ...]  # the files that hold the weights, and their index if there is one
    source: Path  # the checkpoint folder that was read, which may lie below the one that was given
    tensors: int
    nbytes: int  # bytes of all files
    seconds: float = 0.0  # wall time
    dtypes: dict[str, int] = field(default_factory=dict)  # number of tensors of each dtype
    # Names of entries that are not in the result: values that are not tensors, optimizers.
    skipped: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # names of weights that were left out on request
    # Stored and final name of weights that lost a wrapper's name or were renamed.
    renamed: tuple[tuple[str, str], ...] = ()
    # Names that are not written because another name holds the same weight: left out, and kept.
    tied: tuple[tuple[str, str], ...] = ()
    copied: tuple[Path, ...] = ()  # files that came from the model's folder
    verified: bool = False  # the result was read back and compared with the source
    unchecked: int = 0  # bytes of the weights that were not compared with a stored checksum
    removed: bool = False  # the checkpoint was deleted


# Called with "copy" or "verify", the bytes done and those of the phase, and the tensor at hand.
Progress = Callable[[str, int, int, str], None]


class ProgressMeter:
    """Turns bytes into calls of `progress`, at most ten a second."""

    def __init__(self, phase: str, total: int, progress: Progress | None) -> None:
        self.phase, self.total, self.progress = phase, total, progress
        self.done, self.tensor, self.next = 0, "", 0.0

    def tick(self, count: int) -> None:
        """Count `count` more bytes."""
        self.done += count
        if self.progress is not None:
            now = time.monotonic()
            if now >= self.next or self.done == self.total:
                self.next = now + PROGRESS_SECONDS
                self.progress(self.phase, self.done, self.total, self.tensor)
