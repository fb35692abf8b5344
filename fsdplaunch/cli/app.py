"""Every command's signature, help and examples; bodies are imported when they run, so that help stays light."""

import os
import sys
from pathlib import Path
from typing import Annotated, get_type_hints

import typer
import typer.models

from fsdplaunch import __version__
from fsdplaunch.cli.output import Output
from fsdplaunch.errors import LaunchError

app = typer.Typer(
    name="fsdplaunch",
    help="Launch, shard, checkpoint and merge PyTorch FSDP training.",
    epilog="Start: fsdplaunch config, then fsdplaunch launch train.py",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[
    Path | None, typer.Option("-c", "--config", "--config_file", help="The YAML file [default: ./fsdp.yaml]")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout")]

LAUNCH_EPILOG = (
    "Examples: fsdplaunch launch train.py --lr 3e-4; fsdplaunch launch --dry-run train.py; "
    "fsdplaunch launch --set fsdp_sharding_strategy=SHARD_GRAD_OP train.py. "
    "Everything after SCRIPT belongs to the script."
)


def run(argv: list[str]) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name.

    Returns:
        The exit status.
    """
    try:
        app(args=_expanded(argv), prog_name="fsdplaunch")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except LaunchError as error:
        if os.environ.get("FSDPLAUNCH_TRACEBACK"):
            raise
        Output().error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (| head): end quietly, and keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _expanded(argv: list[str]) -> list[str]:
    """Turn configuration keys written as options of `launch` into `--set`; anything else stays."""
    if argv[:1] != ["launch"] or len(argv) < 2 or not argv[1].startswith("-"):  # noqa: PLR2004
        return argv
    from fsdplaunch.cli.key_options import expand

    flags, options = _own_options()
    return ["launch", *expand(argv[1:], own_flags=flags, own_options=options)]


def _own_options() -> tuple[set[str], set[str]]:
    """Names of launch's own options: those without a value, and those with one."""
    flags, options = {"--help", "--help-all"}, set[str]()
    for name, hint in get_type_hints(launch, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, typer.models.OptionInfo):
                spelled = "--" + name.replace("_", "-")
                names = set(info.param_decls or (spelled, spelled.replace("--", "--no-", 1)))
                (flags if hint.__origin__ is bool else options).update(names)
    return flags, options


def _print_version(wanted: bool) -> None:
    if wanted:
        Output().data(f"fsdplaunch {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Options before any command."""


@app.command(
    epilog=LAUNCH_EPILOG,
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
)
def launch(
    context: typer.Context,
    script: Annotated[str | None, typer.Argument(help="Script to run on every rank", show_default=False)] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the command; start nothing")
    ] = False,
    allow_unsharded: Annotated[
        bool, typer.Option("--allow-unsharded", help="Accept a script that never shards a model")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a training script on every worker, sharded as the YAML says."""
    from fsdplaunch.cli.launch_cmd import launch_script

    status = launch_script(
        script,
        context.args,
        file=config,
        overrides=overrides or [],
        module=module,
        dry_run=dry_run,
        allow_unsharded=allow_unsharded,
        as_json=as_json,
        out=Output(),
    )
    raise typer.Exit(status)


@app.command("merge-weights")
def merge_weights(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, or a folder that holds one")],
    output: Annotated[Path, typer.Argument(help="New folder for the result")],
    unsafe_serialization: Annotated[
        bool,
        typer.Option(
            "--unsafe-serialization",
            "--unsafe_serialization",
            help="Write pytorch_model.bin instead of safetensors",
        ),
    ] = False,
    remove_checkpoint_dir: Annotated[
        bool,
        typer.Option(
            "--remove-checkpoint-dir",
            "--remove_checkpoint_dir",
            help="Delete the checkpoint once the result has been read back and found equal",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT if it exists")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read the result back and compare")] = False,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest output file, as in 5GB")] = "50GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join a sharded checkpoint into safetensors."""
    from fsdplaunch.checkpoint.merge import MergeOptions
    from fsdplaunch.cli.merge_cmd import merge_command, parse_size

    options = MergeOptions(
        max_shard_size=parse_size(max_shard_size),
        overwrite=overwrite,
        verify=verify or remove_checkpoint_dir,
        safe_serialization=not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
    )
    merge_command(checkpoint, output, options=options, dry_run=dry_run, as_json=as_json, out=Output())
