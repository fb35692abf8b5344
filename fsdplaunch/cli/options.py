"""Options that several commands take, the numbers and sizes that options are given, and who does a command."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer import Argument, Option

from fsdplaunch.cli.output import Output
from fsdplaunch.display_text import quoted
from fsdplaunch.errors import EXIT_USAGE, LaunchError
from fsdplaunch.features import feature


def script_argument(help_text: str) -> Any:
    """Return the argument of a command that runs a script; what follows the script belongs to it."""
    return typer.Argument(metavar="SCRIPT [ARGS]...", help=help_text, show_default=False)


def flag(option: str, text: str) -> Any:
    """Return an option without a value."""
    return Option(option, help=text)


def takes(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option with a value; its name is its parameter's where none is given."""
    return Option(*names, metavar=metavar, help=text, **more)


def completed(find: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what completes a word on the command line to one of those that are found."""
    return lambda incomplete: [word for word in find() if word.startswith(incomplete)]


def _runs() -> list[str]:
    return sorted((path.name for path in Path("runs").glob("*")), reverse=True)


def _assignments() -> Iterable[str]:
    from fsdplaunch.config.schema.config import all_keys

    for spec in all_keys():
        for name in dict.fromkeys((spec.name, ".".join(spec.path))):
            yield from (f"{name}={choice}" for choice in ("", *spec.key.kind.choices))


def keys_and_sections() -> Iterable[str]:
    """Return what `config explain` explains."""
    from fsdplaunch.config.schema.config import all_keys, section_classes

    return [*section_classes(), *(spec.name for spec in all_keys())]


def presets() -> Iterable[str]:
    """Return the presets' names."""
    from fsdplaunch.config.render import preset_files

    return preset_files()


@contextmanager
def joined_assignments() -> Iterator[None]:
    """Complete the value of KEY=VALUE in bash, which has split it at the '=' and replaces what stands behind."""
    if os.environ.get("_FSDPLAUNCH_COMPLETE") != "complete_bash":
        yield
        return
    place, joined, is_value = int(os.environ["COMP_CWORD"]), [""], True
    for word in os.environ["COMP_WORDS"].split("\n")[: place + 1]:
        if is_value or word == "=":
            joined[-1] += word
        else:
            joined.append(word)
        is_value = word == "="
    os.environ.update(COMP_WORDS="\n".join(joined), COMP_CWORD=str(len(joined) - 1))
    key = "".join(joined[-1].rpartition("=")[:2]) if len(joined) <= place else ""
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            yield
    finally:
        found = (line.removeprefix(key) for line in out.getvalue().split("\n"))
        print("\n".join(filter(None, found)))  # noqa: T201


ASSIGNMENTS = completed(_assignments)
_CONFIG_NAMES = ("-c", "--config", "--config_file", "--config-file")
ConfigOption = Annotated[
    Path | None, Option(*_CONFIG_NAMES, metavar="FILE", help="The YAML file [default: ./fsdp.yaml]")
]
SetOption = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override one key", autocompletion=ASSIGNMENTS)
]
JsonOption = Annotated[bool, Option("--json", help="Print one JSON object on stdout")]
OverwriteOption = Annotated[bool, Option("--overwrite", help="Replace a file that exists")]
ModuleOption = Annotated[bool, Option("-m", "--module", help="SCRIPT is a module, as in python -m")]
NotedOption = Annotated[list[str] | None, Option("--noted", hidden=True)]
LogDirOption = Annotated[
    Path | None,
    Option("--log-dir", metavar="FOLDER", help="Folder with the runs [default: launch.log_dir of the file]"),
]
_RUN = "The run, or as much of its name as is unique; latest"
RunArgument = Annotated[str, Argument(metavar="ID", help=_RUN, autocompletion=completed(_runs))]
"""A run that is named; `latest` where the parameter has that default."""
ScriptToTry = Annotated[str | None, script_argument("Script to try, and its arguments")]


def group(help_text: str, **more: Any) -> typer.Typer:
    """Make a group of commands: plain help, and errors as we say them."""
    return typer.Typer(help=help_text, rich_markup_mode=None, pretty_exceptions_enable=False, **more)


def both_ways(option: str, text: str) -> Any:
    """Return an option of accelerate's or torchrun's, which both take with underscores, too."""
    return Option(option, "--" + option[2:].replace("-", "_"), help=text)


class OptionError(LaunchError):
    """An option's value is not a number or a size, or not one that can be meant; typer passes it on."""

    exit_code = EXIT_USAGE


def number(
    option: str, least: float, most: float, text: str, *, whole: bool = False, short: str = "", **more: Any
) -> Any:
    """Return an option that takes a number, with its help."""

    def parse(value: Any) -> float:
        from fsdplaunch.config.schema import kinds  # --help reads no number

        if whole:
            return int(kinds.whole(int(least), int(most)).parse(value))
        if not least <= (found := kinds.parse_number(value)) <= most:
            raise ValueError(value)
        return found

    expects, names = f"a {'whole ' * whole}number from {least} to {most}", [short] if short else []
    return _checked(option, expects, parse, *names, metavar="N" if whole else "X", help=text, **more)


whole = partial(number, whole=True)
_MOST_BYTES = 2**60
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZES = {f"{name}B": factor for name, factor in _DECIMAL.items()} | _BINARY
_TIMES = {"S": 1, "M": 60, "H": 3600, "D": 86400, "W": 7 * 86400}


def _amount(units: Mapping[str, int], metavar: str, expects: str, option: str, text: str) -> Any:
    def parse(value: Any) -> int:
        from fsdplaunch.config.schema.kinds import parse_number

        word = str(value).strip().upper().replace(" ", "")
        digits = word.rstrip("".join(units))
        if not 1 <= (found := parse_number(digits) * units[word[len(digits) :]]) <= _MOST_BYTES:
            raise ValueError(value)
        return int(found)

    return _checked(option, expects, parse, metavar=metavar, help=text)


size = partial(_amount, _SIZES, "SIZE", "a size such as 5GB, 500MB or 2GiB")
age = partial(_amount, _TIMES, "TIME", "a time such as 12h, 30d or 4w")


def _checked(option: str, expects: str, parse: Callable[[Any], Any], *names: str, **more: Any) -> Any:
    def parsed(value: Any) -> Any:
        try:
            return parse(value)
        except (ValueError, KeyError, OverflowError):
            msg = f"{option} must be {expects}, got {quoted(str(value))}"
            raise OptionError(msg) from None

    return Option(*names, option, parser=parsed, **more)


def does(
    place: str,
    group: typer.Typer,
    name: str | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command of a group, or what the group does by itself, and the function that does it.

    The function is `module:function`, below `fsdplaunch.cli` unless the name is full. It gets the options by
    name, lists as tuples, a script's own arguments as `arguments`, and `out`, and returns the exit status.
    """
    module, _, function = place.partition(":")

    def decorate(declared: Callable[..., None]) -> Callable[..., None]:
        @wraps(declared)
        def command(**options: Any) -> None:
            context = options.pop("context", None)
            if context is not None and context.invoked_subcommand is not None:
                return
            if context is not None and not hasattr(context.command, "commands"):
                options["arguments"] = tuple(context.args)
            options.pop("help_all", None)  # acts in its callback
            for option, hint in get_type_hints(declared).items():
                if option in options and any(get_origin(part) is list for part in (hint, *get_args(hint))):
                    options[option] = tuple(options[option] or ())
            act = getattr(feature(module if "." in module else f"fsdplaunch.cli.{module}"), function)
            raise typer.Exit(act(**options, **(fixed or {}), out=Output()) or 0)

        if name is None:
            return group.callback(invoke_without_command=True, **settings)(command)
        return group.command(name, **settings)(command)

    return decorate
