"""`fsdplaunch merge-weights`: say what is merged, show progress, say what came of it."""

from pathlib import Path

from fsdplaunch.cli.output import Output


def merge_command(
    checkpoint: Path,
    output: Path,
    *,
    safe_serialization: bool,
    remove_checkpoint_dir: bool,
    overwrite: bool,
    as_json: bool,
    out: Output,
) -> None:
    """Merge a sharded checkpoint and report the result."""
