"""Tell of lengths that a script asked of its loaders before it was known who shards, and that no longer hold.

Where the source mentions something that may shard, the decision waits for the first training batch. A schedule or
a last step that was counted before by `len(loader)` is then of one process, and its end is never reached.
"""

import weakref
from typing import Any

from fsdplaunch.runtime import messages
from fsdplaunch.runtime.script_line import script_line


class EarlyLengths:
    """The lengths that were given out undivided, by loader."""

    def __init__(self) -> None:
        self._given: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()

    def note(self, loader: Any, length: int) -> None:
        """Remember a length that is given out, and the line that asked for it first."""
        self._given.setdefault(loader, (length, script_line()))

    def compare(self, loader: Any) -> None:
        """Tell, where a loader that is divided now is read to train, that a length of it is another one."""
        if loader not in self._given:
            return
        length, line = self._given.pop(loader)
        if len(loader) != length:
            messages.say(
                f"{line}: len() of the loader was {length}, before it was known who shards, and each rank reads"
                f" {len(loader)} batches: what was counted by it, such as a schedule or a last save, does not fit;"
                " with --shard always it is known from the start"
            )
