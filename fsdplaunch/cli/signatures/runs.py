"""`fsdplaunch runs` and its commands."""

from pathlib import Path
from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.numbers import whole
from fsdplaunch.cli.signatures.options import ConfigOption, JsonOption, group

runs_app = group("List runs, show their output, cancel one.")

LogDirOption = Annotated[
    Path | None,
    typer.Option("--log-dir", metavar="FOLDER", help="Folder with the runs [default: launch.log_dir of the file]"),
]


@runs_app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
    limit: Annotated[
        int,
        typer.Option(
            "-n", "--limit", parser=whole("--limit", 1, 10**6), metavar="N", help="How many, newest first"
        ),
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """List runs, newest first, with their states."""
    if context.invoked_subcommand is None:
        from fsdplaunch.cli.launch import runs as run_commands

        raise typer.Exit(run_commands.list_runs(config, log_dir, limit=limit, as_json=as_json, out=Output()))


@runs_app.command("logs")
def runs_logs(
    run: Annotated[str, typer.Argument(metavar="ID", help="The run, or as much of its name as is unique; latest")],
    rank: Annotated[
        int | None,
        typer.Option(
            parser=whole("--rank", 0, 2**24),
            metavar="N",
            help="One rank's output instead of what the launcher showed",
        ),
    ] = None,
    stderr: Annotated[bool, typer.Option("--stderr", help="That rank's error output")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run ends")] = False,
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Print a run's output."""
    from fsdplaunch.cli.launch import runs as run_commands

    wanted = run_commands.LogRequest(rank=rank, stream="stderr" if stderr else "stdout", follow=follow)
    raise typer.Exit(run_commands.show_logs(run, config, log_dir, wanted=wanted, out=Output()))


@runs_app.command("cancel")
def runs_cancel(
    run: Annotated[str, typer.Argument(metavar="ID", help="The run, or as much of its name as is unique; latest")],
    config: ConfigOption = None,
    log_dir: LogDirOption = None,
) -> None:
    """Ask a run to end; its workers may save first."""
    from fsdplaunch.cli.launch import runs as run_commands

    raise typer.Exit(run_commands.cancel_run(run, config, log_dir, out=Output()))
