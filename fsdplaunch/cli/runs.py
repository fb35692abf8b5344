"""`fsdplaunch runs`: list runs, show a run's output, cancel a run."""

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import load_config
from fsdplaunch.display_text import one_line
from fsdplaunch.errors import UsageError
from fsdplaunch.features import KUBERNETES, feature
from fsdplaunch.launch.runs import LogTail, Run, cancel, find_run, log_files, read_runs, status_of
from fsdplaunch.launch.schedulers import Screen

LOOK_SECONDS = 1.0
"""Between two looks at a run that is followed; SLURM's controller answers many users."""


def _folder_of(file: Path | None, log_dir: Path | None) -> Path:
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
        return 0
    if not runs:
        out.say(f"no runs in {folder}")
        return 0
    rows = [("run", "started by", "state", "script")]
    for run in runs:
        how = f"slurm job {run.job['job']}" if run.route == "slurm" else run.route
        rows.append((one_line(run.id), one_line(how), one_line(run.state), one_line(run.script)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        out.data("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def show_logs(
    *, run: str, rank: int | None, stderr: bool, follow: bool, file: Path | None, log_dir: Path | None, out: Output
) -> int:
    """Print a run's output, or that of one rank, and go on printing when asked so."""
    stream = "stderr" if stderr else "stdout"
    found = find_run(_folder_of(file, log_dir), run)
    if found.route == "kubernetes" and rank is None:
        return _show_pods(found, follow=follow, out=out)
    if rank is None and found.route == "here":
        out.note("the run's output was shown in its own terminal; this is rank 0's, and --rank N shows another's")
    if not log_files(found, rank=rank, stream=stream) and not follow:
        if not found.unfinished:
            msg = f"{found.id} has left no such output"
            raise UsageError(msg, hint=f"see {found.dir}")
        out.say(f"no output yet: {found.state}")
    _show_files(found, rank=rank, stream=stream, follow=follow)
    return 0


def _show_files(
    run: Run, *, rank: int | None, stream: str, follow: bool, tell: Callable[[str], None] = lambda _: None
) -> None:
    """Print a run's output, until its end where it is followed; `tell` gets each state before that."""
    tail, shown, screen = LogTail(), "", Screen(sys.stdout)
    while True:
        is_last = not (follow and run.unfinished)
        screen.write(tail.read(log_files(run, rank=rank, stream=stream)), is_last=is_last)
        if is_last:
            return
        if run.state != shown:
            tell(shown := run.state)
        time.sleep(LOOK_SECONDS)
        run = find_run(run.dir.parent, run.dir.name)


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
            name = run.job.get("job", run.id)
            _show_files(
                run, rank=None, stream="stdout", follow=True, tell=lambda now: out.say(f"job {name}: {now}")
            )
    except KeyboardInterrupt:
        out.say(f"the run goes on; fsdplaunch runs cancel {shlex.quote(run_dir.name)} ends it")
        return 130
    run = find_run(run_dir.parent, run_dir.name)
    out.say(f"run {run.id}: {run.state}")
    return status_of(run)


def cancel_run(*, run: str, file: Path | None, log_dir: Path | None, out: Output) -> int:
    """Ask a run to end."""
    found = find_run(_folder_of(file, log_dir), run)
    out.say(f"{found.id}: {cancel(found)}")
    return 0
