"""`fsdplaunch runs`: list runs, show a run's output, cancel a run."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import load_config
from fsdplaunch.display_text import one_line
from fsdplaunch.errors import UsageError
from fsdplaunch.features import KUBERNETES, feature
from fsdplaunch.launch.runs import LogTail, Run, cancel, find_run, log_files, read_runs, status_of
from fsdplaunch.launch.schedulers.remote_launchers import Screen

LOOK_SECONDS = 1.0
"""Between two looks at a run that is followed; SLURM's controller answers many users."""


def _folder_of(file: Path | None, log_dir: Path | None) -> Path:
    """Return where the runs are: as shown, or as the configuration says."""
    return log_dir if log_dir is not None else Path(load_config(file).config.launch.log_dir)


def list_runs(*, file: Path | None, log_dir: Path | None, limit: int, as_json: bool, out: Output) -> int:
    """List runs, newest first."""
    folder = _folder_of(file, log_dir)
    if log_dir is not None and not folder.is_dir():
        msg = f"--log-dir {folder} is not a folder"
        raise UsageError(msg, hint="name the one with the runs; a run is written to launch.log_dir")
    runs = read_runs(folder, limit=limit)
    if as_json:
        out.json([run.to_dict() for run in runs])
    elif not runs:
        out.say(f"no runs in {folder}")
    else:
        out.data("\n".join(_table([("run", "started by", "state", "script"), *map(_row, runs)])))
    return 0


def _row(run: Run) -> tuple[str, str, str, str]:
    how = f"slurm job {run.job['job']}" if run.route == "slurm" else run.route
    return one_line(run.id), one_line(how), one_line(run.state), one_line(run.script)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def show_logs(
    *, run: str, rank: int | None, stderr: bool, follow: bool, file: Path | None, log_dir: Path | None, out: Output
) -> int:
    """Print a run's output, or that of one rank, and go on printing when asked so."""
    folder, stream = _folder_of(file, log_dir), "stderr" if stderr else "stdout"
    found = find_run(folder, run)
    tail = LogTail()
    if found.route == "kubernetes" and rank is None:
        return _show_pods(found, follow=follow, out=out)
    if rank is None and found.route == "here":
        out.note("the run's output was shown in its own terminal; this is rank 0's, and --rank N shows another's")
    files = log_files(found, rank=rank, stream=stream)
    if not files and not follow:
        if not found.unfinished:
            msg = f"{found.id} has left no such output"
            raise UsageError(msg, hint=f"see {found.dir}")
        out.say(f"no output yet: {found.state}")
    screen = Screen(sys.stdout)
    screen.write(tail.read(files))
    while follow and found.unfinished:
        time.sleep(LOOK_SECONDS)
        found = find_run(folder, found.id)
        screen.write(tail.read(log_files(found, rank=rank, stream=stream)))
    screen.end()
    return 0


def _show_pods(run: Run, *, follow: bool, out: Output) -> int:
    kubernetes = feature(KUBERNETES)
    if not follow:
        return int(kubernetes.show_logs(run.job))
    kubernetes.follow(run.job, lambda state: out.say(f"job {run.job['name']}: {state}"))
    return 0


def follow_run(run_dir: Path, out: Output) -> int:
    """Show a submitted run's output until it ends; returns its status. Ctrl-C leaves the run alone."""
    try:
        run = find_run(run_dir.parent, run_dir.name)
        if run.route == "kubernetes":
            _show_pods(run, follow=True, out=out)
        else:
            _follow_job(run, out)
    except KeyboardInterrupt:
        out.say(f"the run goes on; fsdplaunch runs cancel {shlex.quote(run_dir.name)} ends it")
        return 130
    run = find_run(run_dir.parent, run_dir.name)
    out.say(f"run {run.id}: {run.state}")
    return status_of(run)


def _follow_job(run: Run, out: Output) -> None:
    tail, shown, screen = LogTail(), "", Screen(sys.stdout)
    while True:
        screen.write(tail.read(log_files(run, rank=None, stream="stdout")))
        if not run.unfinished:
            screen.end()
            return
        if run.state != shown:
            shown = run.state
            out.say(f"job {run.job.get('job', run.id)}: {shown}")
        time.sleep(LOOK_SECONDS)
        run = find_run(run.dir.parent, run.dir.name)


def cancel_run(*, run: str, file: Path | None, log_dir: Path | None, out: Output) -> int:
    """Ask a run to end."""
    found = find_run(_folder_of(file, log_dir), run)
    out.say(f"{found.id}: {cancel(found)}")
    return 0
