"""`fsdplaunch warm`."""

from typing import Annotated

import typer

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.signatures.options import ConfigOption, JsonOption, SetOption

WARM_EPILOG = "fsdplaunch launch --keep-warm 600 train.py leaves one behind by itself, for the next launch."


def warm(
    show: Annotated[bool, typer.Option("--list", help="List them (the default)")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End them; runs go on")] = False,
    start: Annotated[bool, typer.Option("--start", help="Start one for launches with this configuration")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep torch imported for the next launch.

    Lists, stops or starts interpreters that have it and wait.
    """
    from fsdplaunch.cli import warm as commands
    from fsdplaunch.errors import UsageError

    if show + stop + start > 1:
        msg = "--list, --stop and --start are three commands"
        raise UsageError(msg, hint="give one of them")
    if start:
        raise typer.Exit(commands.start(config, overrides or [], Output()))
    if stop:
        raise typer.Exit(commands.stop_servers(Output()))
    raise typer.Exit(commands.list_servers(as_json=as_json, out=Output()))
