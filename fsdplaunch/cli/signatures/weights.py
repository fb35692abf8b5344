"""`fsdplaunch merge-weights`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.options import JsonOption


def merge_weights(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder, or a folder that holds one")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder for the result; its other files stay")],
    unsafe_serialization: Annotated[
        bool,
        typer.Option(
            "--unsafe-serialization",
            "--unsafe_serialization",
            help="Write pytorch_model.bin instead of safetensors",
        ),
    ] = False,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="safetensors, or torch for pytorch_model.bin")
    ] = "safetensors",
    remove_checkpoint_dir: Annotated[
        bool,
        typer.Option(
            "--remove-checkpoint-dir",
            "--remove_checkpoint_dir",
            help="Delete the checkpoint once the result has been read back and found equal",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace weights that OUTPUT holds")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read the result back and compare")] = False,
    no_checksums: Annotated[
        bool, typer.Option("--no-checksums", help="Do not compare with the checkpoint's checksums while copying")
    ] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest output file, as in 5GB")] = "50GB",
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Convert floating-point weights: bf16, fp16 or fp32")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Merge only these weights: shell pattern or prefix")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave these weights out: shell pattern or prefix")
    ] = None,
    rename: Annotated[
        list[str] | None, typer.Option(metavar="OLD=NEW", help="Replace the leading parts OLD of names by NEW")
    ] = None,
    keep_tied: Annotated[
        bool, typer.Option("--keep-tied", help="Write a weight with several names under each of them")
    ] = False,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Merge the optimizer's state into optimizer.bin instead")
    ] = False,
    copy_from: Annotated[
        Path | None, typer.Option(metavar="MODEL_DIR", help="Copy config, tokenizer and the like from this folder")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(metavar="N/M", help="Write part N of M only; the last one to finish makes OUTPUT of all"),
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="How many processes write on this machine")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join a sharded checkpoint into safetensors."""
    from fsdplaunch.checkpoint.merge.merge import MergeOptions
    from fsdplaunch.cli.merge import merge_command, parse_format, parse_part, parse_rename
    from fsdplaunch.cli.size_option import parse_size

    options = MergeOptions(
        max_shard_size=parse_size(max_shard_size),
        overwrite=overwrite,
        verify=verify or remove_checkpoint_dir,
        checksums=not no_checksums,
        safe_serialization=parse_format(file_format) and not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
        dtype=dtype,
        only=tuple(only or ()),
        exclude=tuple(exclude or ()),
        rename=tuple(map(parse_rename, rename or ())),
        keep_tied=keep_tied,
        copy_from=copy_from,
        optimizer=optimizer,
        part=None if parts is None else parse_part(parts),
        jobs=jobs,
    )
    merge_command(checkpoint, output, options=options, dry_run=dry_run, as_json=as_json, out=Output())
