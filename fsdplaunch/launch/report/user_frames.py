"""The lines of a traceback that are the user's own. Pure; used by the report and by the agent's watchdog."""

import re
from itertools import pairwise

FRAME_LIMIT = 6
"""Frames of the user's own code to show of a traceback; the innermost ones."""
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)$')
_INSTALLED = ("site-packages/", "dist-packages/", "/fsdplaunch/", "<frozen", "/lib/python3")


def user_frames(traceback: str, *, folder: str = "") -> list[str]:
    """Return the traceback's last frames outside installed libraries and this package, `file:line in name   code`.

    Where there are none, the innermost of all.

    Args:
        traceback: As Python prints it.
        folder: What files inside it are named by their path from here.
    """
    lines = [*traceback.rstrip().splitlines(), ""]
    found = [(match, code) for line, code in pairwise(lines) if (match := _FRAME.match(line))]
    own = [pair for pair in found if not is_installed(pair[0]["file"])] or found[-1:]
    return [_frame(match, code, folder) for match, code in own[-FRAME_LIMIT:]]


def _frame(match: re.Match[str], code: str, folder: str) -> str:
    file = match["file"].removeprefix(folder.rstrip("/") + "/") if folder else match["file"]
    text = f"   {code.strip()}" if code.startswith("    ") else ""
    return f"{file}:{match['line']} in {match['name']}{text}"


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed library, to Python or to this package."""
    return any(part in file for part in _INSTALLED)
