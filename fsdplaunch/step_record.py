"""What every optimizer step took on one rank: a small mapped file that its worker writes and others read.

The file holds the last steps one by one, and the whole run in at most `HISTORY` parts: when these are full, each
two become one of twice as many steps. Writing costs no system call, and a killed worker leaves what it wrote.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from fsdplaunch.run_dir import PRIVATE_MODE, open_file

STEPS = "steps"
"""File of this in a rank's folder."""
RING = 256
"""Steps that are kept one by one."""
HISTORY = 512
"""Parts of the whole run."""
_MAGIC = b"fsdpstp2"
_HEAD = struct.Struct("<8sQQdQQQQ")
"""Magic, process id, steps made, time of the last one (seconds since 1970), parts kept, steps of a part, steps
that the run makes, bytes of the GPU: 0 where these are not known."""
_STEP = struct.Struct("<11d")
_MOST = 1e15
_SIZE = _HEAD.size + (RING + HISTORY) * _STEP.size


class Step(NamedTuple):
    """One step, or the mean of several; NaN where something cannot be known."""

    number: float  # from 1; of several, the last one's
    ended: float  # seconds since 1970
    seconds: float  # since the end of the step before
    data_seconds: float = nan  # of these, waiting for the next batch
    peer_seconds: float = nan  # of these, in collectives: waiting for other ranks, and for the network
    memory_bytes: float = nan  # at the end: allocated on the GPU, or resident
    peak_bytes: float = nan  # the most so far, of the same
    samples: float = nan  # that this rank's loaders gave
    tokens: float = nan  # of these, where they are rows of token ids
    gradient_norm: float = nan  # where the script computed one
    skipped: float = 0.0  # 1 where the loss scale had the step left out


class RankSteps(NamedTuple):
    """What one rank has written."""

    pid: int
    made: int  # steps
    ended: float  # when the last step ended, in seconds since 1970; 0 before the first
    recent: Sequence[Step]  # the last of them, oldest first
    history: Sequence[Step]  # the whole run in parts, oldest first
    total: int = 0  # steps that the run makes; 0 where nothing says so
    memory_limit: int = 0  # bytes of its GPU; 0 without one


class StepWriter:
    """Writes one rank's file. Not for several threads."""

    def __init__(self, folder: Path) -> None:
        """Begin the file in a rank's folder anew."""
        descriptor = os.open(folder / STEPS, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, PRIVATE_MODE)
        try:
            os.ftruncate(descriptor, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._pid, self.made, self._ended = os.getpid(), 0, 0.0
        self.total = self.memory_limit = 0  # of what is said of the run and of its GPU, once they are known
        self._parts, self._stride = 0, 1
        self._open: list[Step] = []  # of the part that is not full yet
        self._write_head()

    def count(self, ended: float) -> None:
        """Count a step that nothing more is known of yet."""
        self.made, self._ended = self.made + 1, ended
        self._write_head()

    def add(self, step: Step) -> None:
        """Write what a counted step took."""
        self._put(int(step.number - 1) % RING, step)
        self._open.append(step)
        if len(self._open) >= self._stride:
            self._add_part(mean_step(self._open))
            self._open.clear()
        self._write_head()

    def _add_part(self, part: Step) -> None:
        self._put(RING + self._parts, part)
        self._parts += 1
        if self._parts == HISTORY:
            for place in range(HISTORY // 2):
                pair = [self._get(RING + 2 * place), self._get(RING + 2 * place + 1)]
                self._put(RING + place, mean_step(pair))
            self._parts, self._stride = HISTORY // 2, 2 * self._stride

    def _get(self, place: int) -> Step:
        return Step(*_STEP.unpack_from(self._map, _HEAD.size + place * _STEP.size))

    def _put(self, place: int, step: Step) -> None:
        _STEP.pack_into(self._map, _HEAD.size + place * _STEP.size, *step)

    def _write_head(self) -> None:
        parts = (self._parts, self._stride, self.total, self.memory_limit)
        _HEAD.pack_into(self._map, 0, _MAGIC, self._pid, self.made, self._ended, *parts)


def mean_step(steps: Sequence[Step]) -> Step:
    """Return several steps as one: means of what they took, the largest peak, the last one's number and end."""
    if len(steps) == 1:
        return steps[0]
    columns = [[value for value in column if not isnan(value)] for column in zip(*steps, strict=True)]
    means = [sum(column) / len(column) if column else nan for column in columns]
    last = steps[-1]
    peaks = columns[Step._fields.index("peak_bytes")]
    return Step(*means)._replace(number=last.number, ended=last.ended, peak_bytes=max(peaks, default=nan))


def _sound(values: tuple[float, ...]) -> Step:
    """Return a step without what no worker can have measured: its script may write to any file."""
    amounts = values[:-2]  # a norm may be infinite
    return Step(*[value if 0 <= value < _MOST else nan for value in amounts], *values[-2:])


def read_steps(folder: Path, *, only_head: bool = False) -> RankSteps | None:
    """Read a rank's file from its folder, or only its head; None when there is none, or it is not one of ours."""
    with suppress(OSError, struct.error), open_file(folder / STEPS) as file:
        data = file.read(_HEAD.size if only_head else _SIZE)
        magic, pid, made, ended, parts, _, *known = _HEAD.unpack_from(data)
        if magic != _MAGIC or parts > HISTORY:
            return None
        if only_head:
            return RankSteps(pid, made, ended, [], [], *known)
        if len(data) != _SIZE:
            return None
        read = [_sound(_STEP.unpack_from(data, _HEAD.size + place * _STEP.size)) for place in range(RING + parts)]
        # Not the places that no step has reached yet, or that were written again after the head was read.
        recent = sorted(step for step in read[:RING] if max(0, made - RING) < step.number <= made)
        return RankSteps(pid, made, ended, recent, read[RING:], *known)
    return None
