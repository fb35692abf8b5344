"""The watchdog: notice that no rank makes progress, say whom the others wait for, and keep every rank's stack.

Progress is an optimizer step or a byte of output, on any rank. Nothing is ended: a long evaluation that says
nothing looks just the same. Runs in the agent.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fsdplaunch.display_text import listed
from fsdplaunch.launch.root_cause import is_installed
from fsdplaunch.run_dir import STACK, STACK_SIGNAL, rank_folder
from fsdplaunch.step_record import read_steps

_NAMED = 4
ANSWER_SECONDS = 2.0
"""How long the ranks get to write their stacks."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_WAITING = ("torch/distributed/", "torch/_ops.py", "torch/autograd/graph.py")
"""Where a rank's main thread is while it waits for others: in a collective, or in backward, which makes some."""


_MEASURING = "fsdplaunch/runtime/measuring.py"
"""What calls a collective's end, to see how long it takes."""


class Position(NamedTuple):
    """Where a rank is: in which step, if it counts them, whether inside a collective, and at which line."""

    rank: int
    steps: int | None
    waits: bool
    frame: str

    def __str__(self) -> str:
        steps = [f"step {self.steps}"] if self.steps else []
        return f"rank {self.rank} ({', '.join([*steps, self.frame or 'does not answer'])})"


def read_position(rank: int, steps: int | None, dump: str) -> Position:
    """Make out where a rank is from the stack its faulthandler has written; the main thread's comes last."""
    main = next((block for block in reversed(dump.split("\n\n")) if block.strip()), "")
    frames = [match.groupdict() for line in main.splitlines() if (match := _FRAME.fullmatch(line))]
    if frames and frames[0]["file"].endswith(_MEASURING):
        del frames[0]
    own = next((frame for frame in frames if not is_installed(frame["file"])), frames[0] if frames else None)
    frame = f"{Path(own['file']).name}:{own['line']} in {own['name']}" if own else ""
    waits = bool(frames) and any(part in frames[0]["file"] for part in _WAITING)
    return Position(rank, steps, waits, frame)


def describe_stall(positions: Sequence[Position], seconds: float, *, run_dir: Path) -> str:
    """Return the line the user gets: who is behind has fewer steps, or else is in no collective."""
    steps = [position.steps for position in positions]
    if None not in steps and len(set(steps)) > 1:
        behind = [position for position in positions if position.steps == min(step or 0 for step in steps)]
    else:
        behind = [position for position in positions if not position.waits]
    waiting = len(positions) - len(behind)
    found = f"all ranks are at the same place: {positions[0]}"
    if behind and waiting:
        who = f"{waiting} ranks wait" if waiting != 1 else "1 rank waits"
        found = f"{who} for {listed([str(position) for position in behind], _NAMED)}"
    elif len({position.frame for position in positions}) > 1:
        # On GPUs a rank that waits stands in the script's own line that reads a value, such as `.item()`.
        found = f"ranks are at different lines: {listed([str(position) for position in positions], _NAMED)}"
    silent = f"no rank has made a step or printed anything for {seconds:.0f} s"
    return f"{silent}: {found}; stacks in {rank_folder(run_dir, '*')}/{STACK}"


class Watchdog:
    """Looks at the ranks' folders now and then."""

    def __init__(self, run_dir: Path, seconds: float) -> None:
        """Watch for stalls of so many seconds; 0 is never."""
        self._run_dir, self._seconds = run_dir, seconds
        self._next = 0.0
        self.watch({})

    def watch(self, pids: Mapping[int, int]) -> None:
        """Start anew with these processes, by rank."""
        self._folders = {rank: rank_folder(self._run_dir, rank) for rank in pids}
        self._pids, self._since, self._told = dict(pids), time.monotonic(), False
        self._seen: object = None
        self._asked: tuple[float, dict[int, int]] | None = None

    def look(self) -> str | None:
        """Return what is to be said, if anything is; costs nothing most of the time."""
        now = time.monotonic()
        if not self._seconds or not self._pids or now < self._next:
            return None
        self._next = now + min(1.0, self._seconds / 4)
        if self._asked is not None:
            asked, before = self._asked
            return self._answer(before) if now - asked >= ANSWER_SECONDS else None
        seen = []
        for folder in self._folders.values():
            record = read_steps(folder, only_head=True)
            seen.append((record.made if record else 0, *(_size(file) for file in sorted(folder.glob("std*.log")))))
        if seen != self._seen:
            self._seen, self._since, self._told = seen, now, False
        elif not self._told and now - self._since >= self._seconds:
            self._asked = (now, {rank: _size(folder / STACK) for rank, folder in self._folders.items()})
            for rank, folder in self._folders.items():  # have every rank that can write its stack
                record = read_steps(folder, only_head=True)
                if record is not None and record.pid == self._pids[rank] and STACK_SIGNAL is not None:
                    with suppress(ProcessLookupError):
                        os.kill(record.pid, STACK_SIGNAL)
        return None

    def _answer(self, before: Mapping[int, int]) -> str:
        self._asked, self._told = None, True
        positions = []
        for rank, folder in sorted(self._folders.items()):
            dump = b""
            with suppress(OSError), (folder / STACK).open("rb") as file:
                file.seek(before[rank])
                dump = file.read()
            record = read_steps(folder, only_head=True)
            positions.append(read_position(rank, record.made if record else None, dump.decode(errors="replace")))
        return describe_stall(positions, self._seconds, run_dir=self._run_dir)


def _size(file: Path) -> int:
    with suppress(OSError):
        return file.stat().st_size
    return 0
