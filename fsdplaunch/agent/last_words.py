"""What a worker that ended badly said last: of a crash, what came before the stacks, and the script's lines."""

from pathlib import Path

import fsdplaunch

_CRASH = "Fatal Python error"  # as faulthandler begins
_LIBRARIES = (f"{Path(fsdplaunch.__file__).parent}/", "/site-packages/", "/lib/python", "<frozen ", "<string>")
_FRAMES = 3
"""How many lines of the script are kept, the innermost first."""


def last_words(lines: list[str], most: int = 20) -> list[str]:
    """Return the last lines of an error output, and of a crash those that tell of it: stacks fill the end.

    Args:
        lines: The end of the error output.
        most: How many are returned.
    """
    crash = next((number for number, line in enumerate(lines) if line.startswith(_CRASH)), None)
    if crash is None:
        return lines[-most:]
    frames = [line for line in lines[crash:] if line.lstrip().startswith("File ")]
    own = [line for line in frames if not any(mark in line for mark in _LIBRARIES)]
    said = [line for line in lines[:crash] if line.strip()]
    return [*said[-2:], lines[crash], *own[:_FRAMES]][-most:]
