"""An iterator over a loader that begins to read at its first batch.

Loaders that keep one iterator for all epochs (YOLOv5's, timm's) make it where they are built, which may be before
the script gives its model to DistributedDataParallel.
"""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class LateIterator:
    """Stands for an iterator of a loader until it is asked for something.

    Args:
        begin: Makes the iterator.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin: Callable[[], Iterator[Any]] | None = begin
        self._iterator: Any = None

    def _begun(self) -> Any:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._iterator = begin()
        return self._iterator

    def __iter__(self) -> "LateIterator":
        return self

    def __next__(self) -> Any:
        return next(self._begun())

    def __len__(self) -> int:
        return len(self._begun())

    def __getattr__(self, name: str) -> Any:
        if name in ("_begin", "_iterator"):
            raise AttributeError(name)  # of one that is copied
        return getattr(self._begun(), name)


def asked_by_constructor() -> bool:
    """Return whether an iterator is asked for, by who calls this, where a loader or what keeps it is built."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name == "__iter__":
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "__init__"
