"""Find the user's own code: which files are, and which of its lines is running."""

import sys
import sysconfig
from pathlib import Path


def is_user_file(file: str) -> bool:
    """Return whether a source file is the user's own: not of Python, of this package, or installed."""
    return not file.startswith(_FOREIGN) and "site-packages" not in file and "dist-packages" not in file


_FOREIGN = (
    str(Path(__file__).parents[2]) + "/",
    *{sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")},
    "<",
)


def script_line() -> str:
    """Return the line of the user's own code that is running: `train.py:31`."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return f"{file.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the script"
