"""`fsdplaunch warm`: interpreters that have torch imported and wait for the next launch."""

import os
from typing import Any

from fsdplaunch.cli.output import Output
from fsdplaunch.errors import MachineError
from fsdplaunch.warm.client import ask_all
from fsdplaunch.warm.identity import UnsafeFolderError, folder_path


def warm(*, stop: bool, as_json: bool, out: Output) -> int:
    """List or stop the warm interpreters of this user."""
    return _stop_servers(out) if stop else _list_servers(as_json=as_json, out=out)


def _list_servers(*, as_json: bool, out: Output) -> int:
    """Print the warm interpreters of this user."""
    found = _ask({"state": True})
    if as_json:
        out.json({"folder": folder_path(os.environ), "interpreters": found})
        return 0
    for one in found:
        out.data(_line(one))
    if not found:
        out.say("no interpreter is kept warm; fsdplaunch launch --keep-warm 600 keeps one")
    return 0


def _stop_servers(out: Output) -> int:
    """End the warm interpreters of this user; runs that were forked from them go on."""
    for one in (stopped := _ask({"stop": True})):
        out.say(f"process {one['pid']} ends" + (f" with its {one['runs']} runs" if one["runs"] else ""))
    if not stopped:
        out.say("no interpreter is kept warm")
    return 0


def _ask(question: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        return ask_all(os.environ, question)
    except UnsafeFolderError as error:
        raise MachineError(str(error), hint="remove it; fsdplaunch makes it anew, for you alone") from None


def _line(one: dict[str, Any]) -> str:
    left = one["seconds_left"]
    when = f"{one['runs']} running" if left is None else f"{left:.0f} s left"
    return f"{one['pid']:>8}  {when:>12}  {one['served']:>4} launches  {one['python']}  {' '.join(one['modules'])}"
