"""Write what holds no shards to files that the script has opened: every rank does, one after the other.

A rank that opens a file of the same name later than another empties it, and a temporary file of its own may be
renamed to where rank 0's was: a rank that wrote nothing would leave an empty file. Nothing here is collective, for
rank 0 may save alone.
"""

import contextlib
import io
from collections import Counter
from collections.abc import Callable
from typing import Any

from fsdplaunch.runtime.auto.state.files.path_store import note, wait_for_note
from fsdplaunch.runtime.script_line import script_line

_PATIENCE_SECONDS = 1.0
"""How late the rank before may be; one that saves alone waits so long."""
_saves: Counter[str] = Counter()
"""How often each line of the script has saved."""


def write_in_turn(write: Callable[[], None], f: Any, *, rank: int) -> None:
    """Write after the rank before has done so at the same line, as often as this one.

    Args:
        write: Writes to the file.
        f: The file, opened by the script.
        rank: This one; rank 0 has written.
    """
    line = script_line()
    _saves[line] += 1
    key = f"fsdplaunch/opened/{line}/{_saves[line]}"
    if rank:
        wait_for_note(f"{key}/{rank - 1}", _PATIENCE_SECONDS)
        write()
    with contextlib.suppress(AttributeError, OSError, ValueError):
        f.flush()
    if rank and isinstance(f, io.BufferedWriter):
        f.truncate()  # what the rank before wrote may be longer
    note(f"{key}/{rank}")
