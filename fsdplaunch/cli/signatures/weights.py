"""`fsdplaunch merge-weights`."""

from pathlib import Path
from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.numbers import whole
from fsdplaunch.cli.signatures.options import JsonOption

_COUNT = whole("--jobs", -(10**6), 10**6)
"""How many it may be is for MergeOptions to say."""

CheckpointArgument = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder, or a folder that holds one")
]
OutputArgument = Annotated[
    Path, typer.Argument(metavar="OUTPUT", help="Folder for the result; its other files stay")
]
UnsafeSerializationOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-serialization",
        "--unsafe_serialization",
        help="Write pytorch_model.bin instead of safetensors",
    ),
]
FileFormatOption = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="safetensors, or torch for pytorch_model.bin")
]
RemoveCheckpointDirOption = Annotated[
    bool,
    typer.Option(
        "--remove-checkpoint-dir",
        "--remove_checkpoint_dir",
        help="Delete the checkpoint once the result has been read back and found equal",
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace weights that OUTPUT holds")]
VerifyOption = Annotated[bool, typer.Option("--verify", help="Read the result back and compare")]
NoChecksumsOption = Annotated[
    bool, typer.Option("--no-checksums", help="Do not compare with the checkpoint's checksums while copying")
]
MaxShardSizeOption = Annotated[str, typer.Option(metavar="SIZE", help="Largest output file, as in 5GB")]
DtypeOption = Annotated[
    str | None, typer.Option(metavar="TYPE", help="Convert floating-point weights: bf16, fp16 or fp32")
]
OnlyOption = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Merge only these weights: shell pattern or prefix")
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Leave these weights out: shell pattern or prefix")
]
RenameOption = Annotated[
    list[str] | None, typer.Option(metavar="OLD=NEW", help="Replace the leading parts OLD of names by NEW")
]
KeepTiedOption = Annotated[
    bool, typer.Option("--keep-tied", help="Write a weight with several names under each of them")
]
OptimizerOption = Annotated[
    bool, typer.Option("--optimizer", help="Merge the optimizer's state into optimizer.bin instead")
]
CopyFromOption = Annotated[
    Path | None, typer.Option(metavar="MODEL_DIR", help="Copy config, tokenizer and the like from this folder")
]
PartsOption = Annotated[
    str | None,
    typer.Option(metavar="N/M", help="Write part N of M only; the last one to finish makes OUTPUT of all"),
]
JobsOption = Annotated[
    int,
    typer.Option(parser=_COUNT, metavar="N", help="How many processes write on this machine"),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing")]


def merge_weights(
    checkpoint: CheckpointArgument,
    output: OutputArgument,
    unsafe_serialization: UnsafeSerializationOption = False,
    file_format: FileFormatOption = "safetensors",
    remove_checkpoint_dir: RemoveCheckpointDirOption = False,
    overwrite: OverwriteOption = False,
    verify: VerifyOption = False,
    no_checksums: NoChecksumsOption = False,
    max_shard_size: MaxShardSizeOption = "50GB",
    dtype: DtypeOption = None,
    only: OnlyOption = None,
    exclude: ExcludeOption = None,
    rename: RenameOption = None,
    keep_tied: KeepTiedOption = False,
    optimizer: OptimizerOption = False,
    copy_from: CopyFromOption = None,
    parts: PartsOption = None,
    jobs: JobsOption = 1,
    dry_run: DryRunOption = False,
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
