"""The watchdog: notice that no rank gets on, say which ones the others wait for, and keep every rank's stack.

Progress is an optimizer step or a byte of output, on any rank. Nothing is ended: a long evaluation that says
nothing looks just the same. Runs in the agent.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.launch.root_cause import is_installed
from fsdplaunch.run_dir import STACK, STACK_SIGNAL, Heartbeat, rank_folder, read_heartbeat

ANSWER_SECONDS = 2.0
"""How long the ranks get to write their stacks."""
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)')
_WAITING = ("torch/distributed/", "torch/_ops.py", "torch/autograd/graph.py")
"""Where a rank's main thread is while it waits for others: in a collective, or in backward, which makes some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank is.

    Attributes:
        rank: Its number.
        steps: Optimizer steps it has made; None when it keeps no heartbeat.
        waits: Its main thread is inside a collective.
        frame: The innermost line outside installed libraries, `train.py:88 in step`; empty when it did not answer.
    """

    rank: int
    steps: int | None
    waits: bool
    frame: str


def read_position(rank: int, beat: Heartbeat | None, dump: str) -> Position:
    """Make out where a rank is from the stack its faulthandler has written; the main thread's comes last."""
    main = next((block for block in reversed(dump.split("\n\n")) if block.strip()), "")
    frames = [match.groupdict() for line in main.splitlines() if (match := _FRAME.fullmatch(line))]
    innermost = frames[0]["file"] if frames else ""
    own = next((frame for frame in frames if not is_installed(frame["file"])), frames[0] if frames else None)
    return Position(
        rank=rank,
        steps=beat.steps if beat is not None else None,
        waits=any(part in innermost for part in _WAITING),
        frame=f"{Path(own['file']).name}:{own['line']} in {own['name']}" if own else "",
    )


def find_behind(positions: Sequence[Position]) -> list[Position]:
    """Return the ranks that the others wait for: those with fewer steps, else those that are not in a collective.

    Empty when all are alike.
    """
    steps = {position.steps for position in positions}
    if len(steps) > 1 and None not in steps:
        fewest = min(position.steps or 0 for position in positions)
        return [position for position in positions if position.steps == fewest]
    late = [position for position in positions if not position.waits]
    return late if len(late) < len(positions) else []


def describe_stall(positions: Sequence[Position], seconds: float, *, run_dir: str) -> str:
    """Return the line the user gets."""
    behind = find_behind(positions)
    if behind:
        names = ", ".join(f"rank {position.rank} ({_where(position)})" for position in behind[:4])
        more = f" and {len(behind) - 4} more" if len(behind) > 4 else ""  # noqa: PLR2004
        waiting = len(positions) - len(behind)
        who = f"{waiting} ranks wait" if waiting != 1 else "1 rank waits"
        found = f"{who} for {names}{more}"
    else:
        first = positions[0]
        found = f"all ranks are alike (rank {first.rank}: {_where(first)})"
    return f"no rank has got on for {seconds:.0f} s: {found}; stacks in {rank_folder(Path(run_dir), '*')}/{STACK}"


def _where(position: Position) -> str:
    steps = [f"step {position.steps}"] if position.steps else []
    return ", ".join([*steps, position.frame or "does not answer"])


class Watchdog:
    """Looks at the ranks' folders now and then."""

    def __init__(self, run_dir: Path, seconds: float) -> None:
        """Watch for stalls of so many seconds; 0 is never."""
        self._run_dir = run_dir
        self._seconds = seconds
        self._pids: Mapping[int, int] = {}
        self._seen: object = None
        self._since = self._next = 0.0
        self._asked: tuple[float, dict[int, int]] | None = None
        self._told = False

    def watch(self, pids: Mapping[int, int]) -> None:
        """Start anew with these processes, by rank."""
        self._pids, self._seen, self._asked, self._told = dict(pids), None, None, False
        self._since = time.monotonic()

    def look(self) -> str | None:
        """Return what is to be said, if anything is; costs nothing most of the time."""
        now = time.monotonic()
        if not self._seconds or not self._pids or now < self._next:
            return None
        self._next = now + min(1.0, self._seconds / 4)
        if self._asked is not None:
            return self._answer(now)
        seen = [self._traces(rank) for rank in self._pids]
        if seen != self._seen:
            self._seen, self._since, self._told = seen, now, False
        elif not self._told and now - self._since >= self._seconds:
            self._asked = (now, self._ask())
        return None

    def _traces(self, rank: int) -> tuple[int, ...]:
        folder = rank_folder(self._run_dir, rank)
        beat = read_heartbeat(folder)
        return (beat.steps if beat else 0, *(_size(file) for file in sorted(folder.glob("std*.log"))))

    def _ask(self) -> dict[int, int]:
        """Have every rank that can write its stack; return how long their files were before."""
        before = {}
        for rank, pid in self._pids.items():
            before[rank] = _size(rank_folder(self._run_dir, rank) / STACK)
            beat = read_heartbeat(rank_folder(self._run_dir, rank))
            if beat is not None and beat.pid == pid and STACK_SIGNAL is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        return before

    def _answer(self, now: float) -> str | None:
        asked, before = self._asked or (now, {})
        if now - asked < ANSWER_SECONDS:
            return None
        self._asked, self._told = None, True
        positions = [
            read_position(rank, read_heartbeat(rank_folder(self._run_dir, rank)), self._dump(rank, before[rank]))
            for rank in sorted(self._pids)
        ]
        return describe_stall(positions, now - self._since, run_dir=str(self._run_dir))

    def _dump(self, rank: int, start: int) -> str:
        with suppress(OSError), (rank_folder(self._run_dir, rank) / STACK).open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
        return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
