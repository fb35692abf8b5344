"""One trial: launch the script with a candidate's configuration, in a folder of links, and read what it took."""

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from fsdplaunch.config.environment import MEASURE_SCRATCH, MEASURE_SOURCE, MEASURE_STEPS
from fsdplaunch.config.schema.config import Config
from fsdplaunch.display_text import counted
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.launch.run_result import RunResult
from fsdplaunch.launch.runner import run_plan
from fsdplaunch.run_dir import rank_folder
from fsdplaunch.step_record import RankSteps, read_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One launch of one candidate."""

    seconds: tuple[float, ...] = ()  # of each measured step, on the slowest rank; empty where nothing was measured
    memory: int = 0  # peak bytes on the rank that needed most: of the GPU's allocator, or resident on the CPU
    wall: float = 0.0  # seconds of the whole launch
    failure: str = ""  # why there is no measurement; "" where there is one
    kind: str = ""  # of failure: `memory`, `time`, `write`, `stopped` or `error`; "" without one

    @property
    def median(self) -> float:
        """Return the median step in seconds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the seconds under which a quarter and three quarters of the steps were."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high


WARM_UP = 3
"""Steps that are made before those that count: allocation, first gathers, compilation."""
_FEWEST_STEPS = 3  # measured steps below which a launch says nothing


def read_measured(records: Sequence[RankSteps | None], steps: int) -> Outcome:
    """Return what the ranks measured together of so many steps, or of the last that their records hold."""
    found = [record for record in records if record is not None]
    made = min((record.made for record in found), default=0) if len(found) == len(records) else 0
    if made - WARM_UP < min(_FEWEST_STEPS, steps):
        few = counted(made, "optimizer step") if made else "no optimizer step"
        return Outcome(failure=f"the script ended after {few}, {WARM_UP + steps} are needed", kind="error")
    timed = [{step.number: step for step in record.recent if WARM_UP < step.number <= made} for record in found]
    return Outcome(
        seconds=tuple(
            max(one[number].seconds for one in timed) for number in sorted(set.intersection(*map(set, timed)))
        ),
        memory=int(max(step.peak_bytes for one in timed for step in one.values())),
    )


_COPIED_BYTES = 1 << 20  # size up to which a file is copied
_ALL_COPIED_BYTES = 64 << 20  # what the copies may take together; the files that come after them are links
_MOST_FILES = 20_000  # shown one by one; a folder that comes after them is a link


def make_scratch(source: Path, target: Path, *, leave_out: Collection[Path]) -> None:
    """Make a folder that reads as the user's, but for some: small files are copies, others are links."""
    target.mkdir(parents=True)
    count, room, pending = 0, _ALL_COPIED_BYTES, [(source, target)]
    while pending:
        folder, place = pending.pop()
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path, shown = Path(entry.path), place / entry.name
            readable = os.access(path, os.R_OK)
            count += 1
            if path in leave_out:
                continue
            if entry.is_dir(follow_symlinks=False):
                if readable and not entry.name.startswith(".") and count < _MOST_FILES:
                    shown.mkdir()
                    pending.append((path, shown))
                    continue
            elif entry.is_file() and readable and entry.stat().st_size <= min(_COPIED_BYTES, room):
                shutil.copy2(path, shown)
                room -= entry.stat().st_size
                continue
            shown.symlink_to(os.path.realpath(path))


_GRACE_SECONDS = 5.0
_ENDING_SECONDS = 10.0  # how long a script's own exit handlers may take when all has been measured
_WARM_SECONDS = 30.0
"""How long the interpreter of one trial waits for the next one; after the last it ends by itself."""
_KILLED = 137
_STATED = 200  # characters of a script's own error that a row shows


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Launches trials, one at a time."""

    # makes the plan of a launch from a configuration, a script and the run's folder
    plan: Callable[[Config, LaunchTarget, Path], LaunchPlan]
    target: LaunchTarget  # the user's script and its arguments
    folder: Path  # of this search; each trial gets one inside
    source: Path  # the user's folder
    limit_seconds: float  # how long one launch may take
    guarded: bool  # whether the script's writes elsewhere are refused

    def run(self, config: Config, number: int, steps: int) -> Outcome:
        """Launch the script as trial `number`, to measure so many steps after the first ones."""
        place, work = self.folder / "trials" / f"{number:03d}", self.folder / "work"
        make_scratch(self.source, work, leave_out=(self.folder, self.folder.parent))
        launch = replace(
            config.launch,
            max_restarts=0,
            measure=True,
            metrics={},
            redirects="3",  # output into files only
            tee=None,
            keep_warm_seconds=max(config.launch.keep_warm_seconds, _WARM_SECONDS),
            shutdown_grace_seconds=min(config.launch.shutdown_grace_seconds, _GRACE_SECONDS),
        )
        try:
            plan = self.plan(replace(config, launch=launch), self._target_in(work), place)
            env = {
                **plan.env,
                MEASURE_STEPS: str(WARM_UP + steps),
                "PYTHONDONTWRITEBYTECODE": "1",
                "PWD": str(work),
            }
            if self.guarded:
                env |= {MEASURE_SCRATCH: str(self.folder), MEASURE_SOURCE: str(self.source)}
            watch = _Watch(plan, self.limit_seconds, steps=WARM_UP + steps)
            result = run_plan(replace(plan, env=env), folder=work, is_over=watch.is_over)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        if result.exit_code == 0 or (watch.has_ended and watch.is_measured):
            return replace(
                read_measured([read_steps(folder) for folder in watch.folders], steps), wall=result.seconds
            )
        kind, why = _why(result) if not watch.has_ended else ("time", f"not done in {self.limit_seconds:.0f} s")
        return Outcome(failure=why, kind=kind, wall=result.seconds)

    def _target_in(self, work: Path) -> LaunchTarget:
        """Return the script and its arguments with paths in the user's folder leading into the scratch folder."""

        def moved(text: str) -> str:
            if len(self.source.parts) < 2:  # noqa: PLR2004  (the root is in every path)
                return text
            place = rf"(^|[=:,]){re.escape(str(self.source))}(?=/|$)"
            return re.sub(place, lambda found: f"{found[1]}{work}", text)

        name = self.target.name
        if not self.target.is_module and not Path(name).is_absolute() and not (work / name).exists():
            name = os.path.normpath(self.source / name)  # ../train.py
        return replace(self.target, name=moved(name), arguments=tuple(map(moved, self.target.arguments)))


class _Watch:
    """Says when a launch is over: its time is up, or all has been measured and the script does not end."""

    def __init__(self, plan: LaunchPlan, limit: float, *, steps: int) -> None:
        self.folders = [rank_folder(plan.run_dir, rank) for rank in range(plan.workers)]
        self._steps = steps
        self.is_measured = self.has_ended = False
        self._end = time.monotonic() + limit

    def is_over(self) -> bool:
        if not self.is_measured and all(map(self._has_ended, self.folders)):
            self.is_measured = True
            self._end = min(self._end, time.monotonic() + _ENDING_SECONDS)
        self.has_ended = time.monotonic() >= self._end
        return self.has_ended

    def _has_ended(self, folder: Path) -> bool:
        record = read_steps(folder, only_head=True)
        return record is not None and record.made >= self._steps


def _why(result: RunResult) -> tuple[str, str]:
    if result.stopped_by is not None:
        return "stopped", f"stopped by {result.stopped_by}"
    failure = result.failure
    if failure is None:
        return "error", f"ended with exit code {result.exit_code}"
    if failure.exit_code == _KILLED:
        return "memory", "out of host memory: killed"
    message = failure.message or next((line for line in reversed(failure.tail) if line.strip()), "")
    if "OutOfMemory" in message or "can't allocate memory" in message:
        return "memory", "out of memory"
    words = message.strip().splitlines()[0] if message.strip() else f"exit code {failure.exit_code}"
    if "WriteRefusedError: " in words:
        return "write", words.partition("WriteRefusedError: ")[2]
    return "error", (f"rank {failure.rank}: {words}" if failure.rank is not None else words)[:_STATED]
