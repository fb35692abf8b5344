"""`fsdplaunch runs`: list runs, show a run's output, cancel a run."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import load_config
from fsdplaunch.errors import EXIT_FAILED, UsageError
from fsdplaunch.launch.cluster.runs import Run, Tail, cancel, find_run, log_files, read_runs, result_of

LOOK_SECONDS = 1.0
"""Between two looks at a run that is followed; SLURM's controller answers many users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which output to show.

    Attributes:
        rank: One rank's own; None for what the launcher showed.
        stream: `stdout` or `stderr`, of a rank.
        follow: Go on until the run ends.
    """

    rank: int | None = None
    stream: str = "stdout"
    follow: bool = False


def folder_of(config: Path | None, log_dir: Path | None) -> Path:
    """Where the runs are: as said, or as the configuration says."""
    return log_dir if log_dir is not None else Path(load_config(config).config.launch.log_dir)


def list_runs(config: Path | None, log_dir: Path | None, *, limit: int, as_json: bool, out: Output) -> int:
    """List runs, newest first."""
    folder = folder_of(config, log_dir)
    if log_dir is not None and not folder.is_dir():
        msg = f"--log-dir {folder} is no folder"
        raise UsageError(msg, hint="name the one with the runs; a run is written to launch.log_dir")
    runs = read_runs(folder, limit=limit)
    if as_json:
        out.json([run.to_dict() for run in runs])
    elif not runs:
        out.say(f"no runs in {folder}")
    else:
        rows = [("run", "started by", "state", "script"), *(_row(run) for run in runs)]
        out.data("\n".join(_table(rows)))
    return 0


def _row(run: Run) -> tuple[str, str, str, str]:
    how = f"slurm job {run.job['job']}" if run.route == "slurm" else run.route
    return run.id, how, run.state, run.script


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def show_logs(name: str, config: Path | None, log_dir: Path | None, *, wanted: Wanted, out: Output) -> int:
    """Print a run's output, and go on printing when asked so."""
    folder = folder_of(config, log_dir)
    run, tail = find_run(folder, name), Tail()
    if wanted.rank is None and run.route == "here":
        out.note("a run started here showed its output there and then; this is rank 0's (--rank N for another's)")
    files = log_files(run, rank=wanted.rank, stream=wanted.stream)
    if not files and not wanted.follow:
        if not run.unfinished:
            msg = f"{run.id} has left no such output"
            raise UsageError(msg, hint=f"see {run.dir}")
        out.say(f"no output yet: {run.state}")
    _write(tail.read(files))
    while wanted.follow and run.unfinished:
        time.sleep(LOOK_SECONDS)
        run = find_run(folder, run.id)
        _write(tail.read(log_files(run, rank=wanted.rank, stream=wanted.stream)))
    return 0


def follow_run(run_dir: Path, out: Output) -> int:
    """Show a submitted run's output until it ends; returns its status. Ctrl-C leaves the run alone."""
    tail, said = Tail(), ""
    try:
        while True:
            run = find_run(run_dir.parent, run_dir.name)
            _write(tail.read(log_files(run, rank=None, stream="stdout")))
            if not run.unfinished:
                break
            if run.state != said:
                said = run.state
                out.say(f"job {run.job.get('job', run.id)}: {said}")
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        out.say(f"the run goes on; fsdplaunch runs cancel {run_dir.name} ends it")
        return 130
    out.say(f"run {run.id}: {run.state}")
    ended = result_of(run_dir)
    if run.state.startswith(("cancelled", "timeout", "node_fail")) or ended is None:
        return EXIT_FAILED
    return int(ended["exit_code"])


def cancel_run(name: str, config: Path | None, log_dir: Path | None, *, out: Output) -> int:
    """Ask a run to end."""
    run = find_run(folder_of(config, log_dir), name)
    out.say(f"{run.id}: {cancel(run)}")
    return 0


def _write(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
