"""`fsdplaunch warm`: interpreters that have torch imported and wait for the next launch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplaunch.cli.output import Output
from fsdplaunch.cli.single_node import plan_for_this_node
from fsdplaunch.config.load import load_config
from fsdplaunch.errors import MachineError, UsageError
from fsdplaunch.launch.plan import LaunchTarget
from fsdplaunch.probe.hardware import read_hardware
from fsdplaunch.warm.client import ask_all, start_server
from fsdplaunch.warm.identity import UnsafeFolderError, folder_path

DEFAULT_SECONDS = 600.0
"""How long one that was started by hand stays where the configuration says nothing."""


def warm(
    *,
    show: bool,
    stop: bool,
    start: bool,
    file: Path | None,
    overrides: Sequence[str],
    as_json: bool,
    out: Output,
) -> int:
    """List, stop or start the warm interpreters of this user."""
    if show + stop + start > 1:
        msg = "--list, --stop and --start are three commands"
        raise UsageError(msg, hint="give one of them")
    if start:
        return _start_server_for(file, overrides, out)
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
        out.say("no interpreter is kept warm; fsdplaunch launch --keep-warm 600, or fsdplaunch warm --start")
    return 0


def _stop_servers(out: Output) -> int:
    """End the warm interpreters of this user; runs that were forked from them go on."""
    for one in (stopped := _ask({"stop": True})):
        out.say(f"process {one['pid']} ends" + (f" with its {one['runs']} runs" if one["runs"] else ""))
    if not stopped:
        out.say("no interpreter is kept warm")
    return 0


def _start_server_for(file: Path | None, overrides: Sequence[str], out: Output) -> int:
    """Start one for launches with this configuration."""
    loaded = load_config(file, overrides=overrides)
    target = LaunchTarget(name="train.py")
    plan = plan_for_this_node(loaded, read_hardware(os.environ), target, allow_unsharded=True)
    seconds = plan.config.launch.keep_warm_seconds or DEFAULT_SECONDS
    _ask({"state": True})  # refuses a folder that is not safe, before torch is imported
    started = start_server(plan, os.environ, seconds=seconds)
    for note in started["notes"]:
        out.note(note)
    out.say(f"process {started['pid']} waits for launches with {plan.workers} workers, for {seconds:.0f} s")
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
