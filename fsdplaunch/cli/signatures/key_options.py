"""Configuration keys written as options of the commands that run a script."""

from collections.abc import Callable
from typing import Any, get_type_hints

import typer.models

from fsdplaunch.cli.signatures.checks import check
from fsdplaunch.cli.signatures.launch import launch

_COMMANDS: dict[str, Callable[..., None]] = {"launch": launch, "check": check}


def expanded(argv: list[str]) -> list[str]:
    """Turn configuration keys written as options of `launch` or `check` into `--set`; anything else stays."""
    if argv[:1] not in ([name] for name in _COMMANDS) or len(argv) < 2 or not argv[1].startswith("-"):  # noqa: PLR2004
        return argv
    from fsdplaunch.cli.launch.key_options import expand

    flags, options = own_options(argv[0])
    return [argv[0], *expand(argv[1:], own_flags=flags, own_options=options)]


def own_options(command: str) -> tuple[set[str], set[str]]:
    """Return names of a command's own options: those without a value, and those with one."""
    flags, options = {"--help", "-h"}, set[str]()
    hints: dict[str, Any] = get_type_hints(_COMMANDS[command], include_extras=True)
    for name, hint in hints.items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, typer.models.OptionInfo):
                spelled = "--" + name.replace("_", "-")
                first = () if info.default is ... else (str(info.default),)  # typer keeps the first spelling there
                written = {*first, *(info.param_decls or ())}
                names = written or {spelled, spelled.replace("--", "--no-", 1)}
                (flags if hint.__origin__ is bool else options).update(names)
    return flags, options
