"""`fsdplaunch runs`: list runs, show a run's output, cancel a run."""

import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fsdplaunch.cli.output import Output
from fsdplaunch.config.load import load_config
from fsdplaunch.display_text import counted, one_line, rough_time, size_words, step_time, table
from fsdplaunch.errors import EXIT_USAGE, UsageError
from fsdplaunch.features import KUBERNETES, feature
from fsdplaunch.launch.runs import (
    LogTail,
    Run,
    cancel,
    find_run,
    log_files,
    look_at_files,
    read_runs,
    remove_run,
    status_of,
)
from fsdplaunch.launch.schedulers import Screen

LOOK_SECONDS = 1.0
"""Between two looks at a run that is followed; SLURM's controller answers many users."""


def folder_of(file: Path | None, log_dir: Path | None) -> Path:
    """Return the folder with the runs: as it is named, or the configuration's."""
    return log_dir if log_dir is not None else Path(load_config(file).config.launch.log_dir)


def list_runs(*, file: Path | None, log_dir: Path | None, limit: int, as_json: bool, out: Output) -> int:
    """List runs, newest first."""
    folder = folder_of(file, log_dir)
    if log_dir is not None and not folder.is_dir():
        msg = f"--log-dir {folder} is not a folder"
        raise UsageError(msg, hint="name the folder that holds the runs, launch.log_dir of their launches")
    runs = read_runs(folder, limit=limit)
    if as_json:
        out.json([run.to_dict() for run in runs])
        return 0
    if not runs:
        out.say(f"no runs in {folder}")
        return 0
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    rows = [("run", "age", "took", "workers", "steps", "step", "state", "script"), *map(_row, runs)]
    for line in table(rows):
        out.data(line[:columns])
    return 0


def _row(run: Run) -> tuple[str, ...]:
    how = {"here": "", "slurm": f", job {run.job.get('job')}"}.get(run.route, f", {run.route}")
    return (
        one_line(run.id),
        rough_time(time.time() - run.started),
        "" if run.seconds is None else rough_time(run.seconds),
        str(run.workers or ""),
        "" if run.steps is None else str(run.steps),
        "" if run.step_seconds is None else step_time(run.step_seconds),
        one_line(run.state + how),
        one_line(run.script),
    )


def prune_runs(
    *, older_than: int, yes: bool, file: Path | None, log_dir: Path | None, as_json: bool, out: Output
) -> int:
    """List runs that have ended and have not changed for so many seconds, ask, and delete their folders."""
    found = [(run, look_at_files(run.dir)) for run in read_runs(folder_of(file, log_dir)) if not run.unfinished]
    old = [(run, seen) for run, seen in found if time.time() - seen.changed >= older_than]
    gone = [(run, seen) for run, seen in old if seen.foreign is None]
    for run, seen in old:
        if seen.foreign is not None:
            out.note(f"{run.id} is kept: {seen.foreign} in it was not written by a launch")
    if gone and not yes:
        for line in table([(run.id, rough_time(time.time() - run.started), run.state) for run, _ in gone]):
            out.say(line)
        out.ask(f"delete {counted(len(gone), 'run')}, {size_words(sum(seen.size for _, seen in gone))}? [y/N] ")
        if not sys.stdin.isatty() or input().strip().lower() not in ("y", "yes"):
            out.say("nothing was deleted; --yes deletes without asking")
            return 0 if sys.stdin.isatty() else EXIT_USAGE
    for run, seen in gone:
        remove_run(run, seen)
    if as_json:
        out.json({"deleted": [run.id for run, _ in gone]})
    out.say(f"deleted {counted(len(gone), 'run')} unchanged for {rough_time(older_than)}")
    return 0


def show_logs(
    *, run: str, rank: int | None, stderr: bool, follow: bool, file: Path | None, log_dir: Path | None, out: Output
) -> int:
    """Print a run's output, or that of one rank, and go on printing when asked so."""
    stream = "stderr" if stderr else "stdout"
    found = find_run(folder_of(file, log_dir), run)
    if found.route == "kubernetes" and rank is None:
        return _show_pods(found, follow=follow, out=out)
    if rank is None and found.route == "here":
        out.note("the run's output was shown in its own terminal; this is rank 0's, and --rank N shows another's")
    if not log_files(found, rank=rank, stream=stream) and not follow:
        if not found.unfinished:
            msg = f"{found.id} has no such output"
            raise UsageError(msg, hint=f"see {found.dir}")
        out.say(f"no output yet: {found.state}")
    _show_files(found, rank=rank, stream=stream, follow=follow)
    return 0


def _show_files(
    run: Run, *, rank: int | None, stream: str, follow: bool, tell: Callable[[str], None] = lambda _: None
) -> None:
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
    found = find_run(folder_of(file, log_dir), run)
    out.say(f"{found.id}: {cancel(found)}")
    return 0
