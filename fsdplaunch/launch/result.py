"""What came of a run, and the lines that say so. Pure: reads no clock, prints nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FRAME_LIMIT = 6
"""Frames of the user's own code to show of a traceback; the innermost ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first rank that failed.

    Attributes:
        rank: Its global rank, or None when the agent itself failed.
        exit_code: Its status as a shell would see it (128 + n for signal n).
        signal: Name of the signal it died of, or None.
        message: `Type: text` of its exception, or None when it left no record.
        traceback: The exception's traceback, or None.
    """

    rank: int | None
    exit_code: int
    signal: str | None = None
    message: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The end of a run.

    Attributes:
        exit_code: What the launcher exits with.
        seconds: Wall time from the agent's start to its end.
        failure: The cause, or None after success or a requested stop.
        stopped_by: Name of the signal that was asked for from outside, or None.
    """

    exit_code: int
    seconds: float
    failure: Failure | None = None
    stopped_by: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        failure = None
        if self.failure is not None:
            names = ("rank", "exit_code", "signal", "message", "traceback")
            failure = {name: getattr(self.failure, name) for name in names}
        return {
            "stage": "run",
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "failure": failure,
            "stopped_by": self.stopped_by,
        }


def read_result(record: Mapping[str, Any], *, exit_code: int) -> RunResult:
    """Make a RunResult of the agent's `result.json`.

    Args:
        record: The file's content; empty when the agent ended without writing one.
        exit_code: The agent process's own status.
    """
    attempts = record.get("attempts") or []
    cause = (attempts[-1]["cause"] if attempts else None) or {}
    error = cause.get("error") or {}
    stopped_by = record.get("stopped_by")
    failure = None
    if exit_code and not stopped_by:
        failure = Failure(
            rank=cause.get("rank"),
            exit_code=exit_code,
            signal=cause.get("signal"),
            message=error.get("message"),
            traceback=error.get("traceback"),
        )
    return RunResult(
        exit_code=exit_code, seconds=float(record.get("seconds", 0.0)), failure=failure, stopped_by=stopped_by
    )


def user_frames(traceback: str, *, script: str) -> list[str]:
    """The traceback's last frames outside installed libraries and this package, two lines each."""
    lines = traceback.rstrip().splitlines()
    frames: list[str] = []
    for number, line in enumerate(lines):
        if not line.startswith('  File "') or "site-packages" in line or "/fsdplaunch/" in line:
            continue
        if "<frozen" in line and script not in line:
            continue
        frames.append(line.strip())
        if number + 1 < len(lines) and lines[number + 1].startswith("    "):
            frames.append("  " + lines[number + 1].strip())
    return frames[-2 * FRAME_LIMIT :]


def failure_lines(result: RunResult, *, script: str, run_dir: str) -> list[str]:
    """Say which rank failed, of what, where in the user's code, and where the log is."""
    failure = result.failure
    if failure is None:
        return []
    if failure.rank is None:
        log = f"{run_dir}/agent.log"
        return [f"the run failed with exit code {failure.exit_code} before any worker did", f"log: {log}"]
    if failure.signal:
        head = f"rank {failure.rank} was killed by {failure.signal} after {result.seconds:.0f} s"
    else:
        head = f"rank {failure.rank} failed with exit code {failure.exit_code} after {result.seconds:.0f} s"
    lines = [head]
    if failure.message:
        lines.append(f"  {failure.message}")
    if failure.traceback:
        lines.extend(f"    {frame}" for frame in user_frames(failure.traceback, script=script))
    lines.append(f"  logs: {run_dir}/ranks/{failure.rank}")
    return lines
