"""`fsdplaunch warm`: interpreters that have torch imported and wait for the next launch."""

import os

from fsdplaunch.cli.output import Output
from fsdplaunch.errors import MachineError
from fsdplaunch.warm import UnsafeFolderError, folder_path
from fsdplaunch.warm.client import ask_all


def warm(*, stop: bool, as_json: bool, out: Output) -> int:
    """List the warm interpreters of this user, or end them; runs that were forked from them go on."""
    try:
        found = ask_all(os.environ, {"stop": True} if stop else {"state": True})
    except UnsafeFolderError as error:
        raise MachineError(str(error), hint="remove it; fsdplaunch makes it again, for your user only") from None
    if as_json and not stop:
        out.json({"folder": folder_path(os.environ), "interpreters": found})
        return 0
    for one in found:
        if stop:
            out.say(
                f"process {one['pid']} ends" + (f" when its {one['runs']} runs have ended" if one["runs"] else "")
            )
            continue
        left = one["seconds_left"]
        when = f"{one['runs']} running" if left is None else f"{left:.0f} s left"
        what = f"{one['served']:>4} launches  {one['python']}  {' '.join(one['modules'])}"
        out.data(f"{one['pid']:>8}  {when:>12}  {what}")
    if not found:
        hint = "" if stop else "; fsdplaunch launch --keep-warm 600 keeps one"
        out.say(f"no interpreter is kept warm{hint}")
    return 0
