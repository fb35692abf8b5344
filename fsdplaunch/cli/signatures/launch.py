"""`fsdplaunch launch` and its own options."""

from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.options import ConfigOption, JsonOption, SetOption, script_argument

EPILOG = (
    "Examples: fsdplaunch launch train.py --lr 3e-4; fsdplaunch launch --dry-run train.py; "
    "fsdplaunch launch --set fsdp_sharding_strategy=SHARD_GRAD_OP train.py. "
    "Everything after SCRIPT belongs to the script."
)


def _print_all_options(wanted: bool) -> None:
    if wanted:
        from fsdplaunch.cli.launch.key_options import list_options

        Output().data(list_options())
        raise typer.Exit


def launch(
    context: typer.Context,
    script: Annotated[str | None, script_argument("Script to run on every rank, and its arguments")] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the command; start nothing")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Check that this machine can run it; start nothing")
    ] = False,
    no_python: Annotated[
        bool,
        typer.Option("--no-python", "--no_python", help="SCRIPT is a program of its own, not run in Python"),
    ] = False,
    allow_unsharded: Annotated[
        bool, typer.Option("--allow-unsharded", help="Accept a script that never shards a model")
    ] = False,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit to SLURM as slurm: in the file says; start nothing here")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Apply Kubernetes objects as kubernetes: in the file says")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="With --slurm or --kubernetes: show the output until the end")
    ] = False,
    noted: Annotated[list[str] | None, typer.Option("--noted", hidden=True)] = None,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", callback=_print_all_options, is_eager=True, help="List every key's option and exit"
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a training script, sharded as the YAML says."""
    from fsdplaunch.cli.launch.dispatch import launch_script, one_route
    from fsdplaunch.cli.launch.options import LaunchOptions

    launch_options = LaunchOptions(
        module=module,
        no_python=no_python,
        dry_run=dry_run,
        check_only=check_only,
        allow_unsharded=allow_unsharded,
        as_json=as_json,
        route=one_route(slurm=slurm, kubernetes=kubernetes, follow=follow),
        follow=follow,
        noted=tuple(noted or ()),
    )
    status = launch_script(
        script, context.args, file=config, overrides=overrides or [], launch_options=launch_options, out=Output()
    )
    raise typer.Exit(status)
