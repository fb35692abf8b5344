"""Options that several commands take, and how our groups of commands are made."""

from pathlib import Path
from typing import Annotated, Any

import typer

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="The YAML file [default: ./fsdp.yaml]",
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one key")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists")]


def script_argument(help_text: str) -> Any:
    """Return the argument of a command that runs a script; what follows the script belongs to it."""
    return typer.Argument(metavar="SCRIPT [ARGS]...", help=help_text, show_default=False)


def group(help_text: str, **more: Any) -> typer.Typer:
    """Make a group of commands: plain help, and errors as we say them."""
    return typer.Typer(help=help_text, rich_markup_mode=None, pretty_exceptions_enable=False, **more)
