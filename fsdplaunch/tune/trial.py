"""One trial: an ordinary launch of the user's script with a candidate's configuration, in a folder of its own."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fsdplaunch.config.environment import MEASURE_SCRATCH, MEASURE_SOURCE, MEASURE_STEPS
from fsdplaunch.config.schema.config import Config
from fsdplaunch.launch.plan import LaunchPlan, LaunchTarget
from fsdplaunch.launch.report.run_result import Failure, RunResult
from fsdplaunch.launch.runner import run_plan
from fsdplaunch.run_dir import MEASURED, rank_folder, read_json
from fsdplaunch.tune.measured import WARM_UP, read_measured
from fsdplaunch.tune.outcome import Outcome
from fsdplaunch.tune.scratch import make_scratch, moved

_GRACE_SECONDS = 5.0
_ENDING_SECONDS = 10.0
"""How long a script's own exit handlers may take when all has been measured."""
_WARM_SECONDS = 30.0
"""How long the interpreter of one trial waits for the next one; after the last it ends by itself."""
_KILLED = 137
_STATED = 200
"""Characters of a script's own error that a row shows."""

Planner = Callable[[Config, LaunchTarget, Path], LaunchPlan]
"""Returns the plan for a configuration, a script and the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRunner:
    """Launches trials, one at a time.

    Attributes:
        plan: Makes the plan of a launch, as `fsdplaunch launch` does.
        target: The user's script and its arguments.
        folder: Of this search; each trial gets one inside.
        source: The user's folder.
        limit_seconds: How long one launch may take.
        guarded: Whether the script's writes elsewhere are refused.
    """

    plan: Planner
    target: LaunchTarget
    folder: Path
    source: Path
    limit_seconds: float
    guarded: bool

    def run(self, config: Config, number: int, steps: int) -> Outcome:
        """Launch the script and return what it took.

        Args:
            config: The candidate's.
            number: Of this trial, from 1.
            steps: To be measured, after the first ones.
        """
        place = self.folder / "trials" / f"{number:03d}"
        shutil.rmtree(place, ignore_errors=True)  # of an interrupted search that goes on
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        make_scratch(self.source, work, leave_out=(self.folder, self.folder.parent))
        try:
            plan = self._prepared(self.plan(_for_trial(config), self._moved(work), place), work, steps)
            watch = _Watch(plan, self.limit_seconds)
            result = run_plan(plan, folder=work, is_over=watch.is_over)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return self._outcome(watch, result, steps)

    def _moved(self, work: Path) -> LaunchTarget:
        name = self.target.name
        if not self.target.is_module and not Path(name).is_absolute() and not (work / name).exists():
            name = os.path.normpath(self.source / name)  # ../train.py
        arguments = tuple(moved(text, self.source, work) for text in self.target.arguments)
        return replace(self.target, name=moved(name, self.source, work), arguments=arguments)

    def _prepared(self, plan: LaunchPlan, work: Path, steps: int) -> LaunchPlan:
        env = {**plan.env, MEASURE_STEPS: str(WARM_UP + steps), "PYTHONDONTWRITEBYTECODE": "1", "PWD": str(work)}
        if self.guarded:
            env |= {MEASURE_SCRATCH: str(self.folder), MEASURE_SOURCE: str(self.source)}
        return replace(plan, env=env)

    def _outcome(self, watch: "_Watch", result: RunResult, steps: int) -> Outcome:
        if result.exit_code == 0 or (watch.has_ended and watch.is_measured):
            records = [read_json(path) for path in watch.records]
            return replace(read_measured(records, steps), wall=result.seconds)
        kind, why = _why(result) if not watch.has_ended else ("time", f"not done in {self.limit_seconds:.0f} s")
        return Outcome(failure=why, kind=kind, wall=result.seconds)


class _Watch:
    """Says when a launch is over: its time is up, or all has been measured and the script does not end.

    Attributes:
        records: Where each rank writes what it measured.
        is_measured: Whether all have.
        has_ended: Whether the launch was ended for this.

    Args:
        plan: Of the launch.
        limit: Seconds that it may take.
    """

    def __init__(self, plan: LaunchPlan, limit: float) -> None:
        self.records = [rank_folder(plan.run_dir, rank) / MEASURED for rank in range(plan.workers)]
        self.is_measured = self.has_ended = False
        self._end = time.monotonic() + limit

    def is_over(self) -> bool:
        """Return whether the launch is to be ended now."""
        if not self.is_measured and all(path.is_file() for path in self.records):
            self.is_measured = True
            self._end = min(self._end, time.monotonic() + _ENDING_SECONDS)
        self.has_ended = time.monotonic() >= self._end
        return self.has_ended


def _for_trial(config: Config) -> Config:
    """Return the configuration for a trial: no restarts, output into files only, torch imported once for all."""
    launch = replace(
        config.launch,
        max_restarts=0,
        redirects="3",
        tee=None,
        keep_warm_seconds=max(config.launch.keep_warm_seconds, _WARM_SECONDS),
        shutdown_grace_seconds=min(config.launch.shutdown_grace_seconds, _GRACE_SECONDS),
    )
    return replace(config, launch=launch)


def _why(result: RunResult) -> tuple[str, str]:
    """Return the kind of a failure, and its words."""
    if result.stopped_by is not None:
        return "stopped", f"stopped by {result.stopped_by}"
    failure = result.failure
    if failure is None:
        return "error", f"ended with exit code {result.exit_code}"
    words = _words(failure)
    if "WriteRefusedError" in words:
        return "write", words.partition("WriteRefusedError: ")[2] or words
    return ("memory", _memory_words(failure)) if _is_out_of_memory(failure) else ("error", words[:_STATED])


def _words(failure: Failure) -> str:
    message = failure.message or next((line for line in reversed(failure.tail) if line.strip()), "")
    first = message.strip().splitlines()[0] if message.strip() else f"exit code {failure.exit_code}"
    return f"rank {failure.rank}: {first}" if failure.rank is not None else first


def _is_out_of_memory(failure: Failure) -> bool:
    message = failure.message or ""
    return failure.exit_code == _KILLED or "OutOfMemory" in message or "can't allocate memory" in message


def _memory_words(failure: Failure) -> str:
    return "out of host memory: killed" if failure.exit_code == _KILLED else "out of memory"
