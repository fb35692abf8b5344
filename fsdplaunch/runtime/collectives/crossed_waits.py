"""Tell when all ranks wait for each other in torch's collectives, but at different lines: none of them will go on.

A script whose ranks decide by themselves whether they make a pass or a backward (a loss that is not finite) waits
so, until torch's timeout. Nothing is ended: ranks may stand in collectives of different groups, that take long.
"""

import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fsdplaunch.name_lists import listed
from fsdplaunch.runtime import messages

TELL_SECONDS = 10.0
"""How long every rank must have stood in one place."""
AGAIN_SECONDS = 2.0
"""How long rank 0 must have seen the others there."""
_GONE = "-"
_COLLECTIVES = str(Path(torch.__file__).parent / "distributed")


class CrossedWaits:
    """One rank's part in it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.noted = self.told = False
        self.seen: tuple[list[str], float] | None = None

    def stay(self, frame: FrameType, line: str, seconds: float) -> None:
        """Note that this rank's main thread has stood in a place for so long; rank 0 looks at all others.

        Args:
            frame: The innermost there.
            line: The user's.
            seconds: How long.
        """
        if self.told or seconds < TELL_SECONDS or not frame.f_code.co_filename.startswith(_COLLECTIVES):
            return
        if not self.noted:
            self.store.set(_key(dist.get_rank()), line)
            self.noted = True
        if dist.get_rank() == 0:
            self._compare()

    def go_on(self) -> None:
        """Note that it has gone on."""
        self.seen = None
        if self.noted:
            self.store.set(_key(dist.get_rank()), _GONE)
            self.noted = False

    def _compare(self) -> None:
        keys = [_key(rank) for rank in range(dist.get_world_size())]
        if not self.store.check(keys):
            return
        lines = [self.store.get(key).decode() for key in keys]
        if _GONE in lines or self.seen is None or self.seen[0] != lines:
            self.seen = (lines, time.monotonic())
        elif len({*lines}) > 1 and time.monotonic() - self.seen[1] > AGAIN_SECONDS:
            self.told = True
            _tell(lines)


def _key(rank: int) -> str:
    return f"fsdplaunch/stuck/{rank}"


def _tell(lines: list[str]) -> None:
    where = [
        f"rank {listed([str(rank) for rank, at in enumerate(lines) if at == line], 3)} at {line}"
        for line in dict.fromkeys(lines)
    ]
    messages.say(
        f"the ranks wait for each other at different lines, and none goes on: {'; '.join(where[:4])}\n"
        "  try  make each pass, backward and collective on all ranks: what leaves one out must be decided by a"
        " number that all of them have (torch.distributed.all_reduce)"
    )
