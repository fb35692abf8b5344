"""The runs in a folder: which there are, how each is doing, where its output is, how to end it."""

import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplaunch.errors import LaunchError, UsageError
from fsdplaunch.launch.cluster import slurm
from fsdplaunch.launch.run_folder import PLAN, RESULT, read_json

JOB = "job.json"
_FINISHED_BADLY = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        id: Its name, which is its folder's.
        dir: Its folder.
        route: How it was started: here, slurm, ssh or kubernetes.
        job: What the route knows it by.
        script: What it runs.
        state: In one or a few words.
        unfinished: It may still do something.
    """

    id: str
    dir: Path
    route: str
    job: Mapping[str, Any]
    script: str
    state: str
    unfinished: bool

    def to_dict(self) -> dict[str, Any]:
        """The run as plain data."""
        return {
            "run_id": self.id,
            "run_dir": str(self.dir),
            "route": self.route,
            "job": dict(self.job),
            "script": self.script,
            "state": self.state,
            "unfinished": self.unfinished,
        }


def write_job(run_dir: Path, *, route: str, **what: Any) -> None:
    """Note how a run was started, and by which process."""
    pid = os.getpid()
    about = {"route": route, "host": socket.gethostname(), "pid": pid, "since": _start_of(pid), **what}
    (run_dir / JOB).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def read_runs(folder: Path, *, limit: int | None = None) -> list[Run]:
    """The runs in a folder, newest first."""
    found = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    found.sort(key=lambda path: (path / PLAN).stat().st_mtime, reverse=True)
    chosen = found[:limit]
    jobs = {path: read_json(path / JOB) for path in chosen}
    numbers = [job["job"] for job in jobs.values() if job.get("route") == "slurm"]
    states = slurm.job_states(numbers)
    return [_read(path, job, states) for path, job in jobs.items()]


def is_run(path: Path) -> bool:
    """Whether a folder is a run's; `latest` is another name of one."""
    return not path.is_symlink() and (path / PLAN).is_file()


def find_run(folder: Path, name: str) -> Run:
    """The run of this name, or of which this is the beginning or the end.

    Raises:
        UsageError: There is none, or more than one.
    """
    if not folder.is_dir():
        msg = f"there is no folder {folder}"
        raise UsageError(msg, hint="name the one with the runs: --log-dir DIR")
    if name == "latest" and (folder / name).is_dir():
        name = (folder / name).resolve().name
    names = [path.name for path in folder.iterdir() if is_run(path)]
    chosen = [one for one in names if one == name] or [
        one for one in names if one.startswith(name) or one.endswith(name)
    ]
    if len(chosen) != 1:
        count = f"{len(chosen)} runs" if chosen else "no run"
        msg = f"{count} in {folder} by the name {name}"
        raise UsageError(msg, hint="fsdplaunch runs lists them")
    path = folder / chosen[0]
    job = read_json(path / JOB)
    return _read(path, job, slurm.job_states([job["job"]]) if job.get("route") == "slurm" else {})


def _read(path: Path, job: Mapping[str, Any], states: Mapping[str, str]) -> Run:
    route = str(job.get("route") or "here")
    ended = result_of(path)
    if route == "slurm":
        state, unfinished = _slurm_state(states.get(str(job["job"])), ended)
    elif ended is not None:
        state, unfinished = _words(ended), False
    else:
        state, unfinished = _process_state(job)
    script = str(read_json(path / PLAN).get("script") or "")
    return Run(id=path.name, dir=path, route=route, job=job, script=script, state=state, unfinished=unfinished)


def parts_of(run_dir: Path) -> list[Path]:
    """The folders of a run's starts, oldest first: its own, or one for each time SLURM started it."""
    tries = [path for path in [*run_dir.glob("try*"), *run_dir.glob("task*/try*")] if path.is_dir()]
    return sorted(tries, key=lambda path: path.stat().st_ctime) or [run_dir]


def result_of(run_dir: Path) -> dict[str, Any] | None:
    """How the last start of a run ended; None when it has not."""
    return read_json(parts_of(run_dir)[-1] / RESULT) or None


def _words(result: Mapping[str, Any]) -> str:
    if result.get("stopped_by"):
        return f"stopped by {result['stopped_by']}"
    return "done" if result["exit_code"] == 0 else f"failed ({result['exit_code']})"


def _slurm_state(state: str | None, ended: Mapping[str, Any] | None) -> tuple[str, bool]:
    if state is None:
        return (_words(ended) if ended else "unknown to SLURM"), False
    word = state.split()[0]
    if word in slurm.UNFINISHED:
        return state.lower(), True
    if word.startswith(_FINISHED_BADLY) or ended is None:
        return state.lower() + (f": {_words(ended)}" if ended and word == "FAILED" else ""), False
    return _words(ended), False


def _process_state(job: Mapping[str, Any]) -> tuple[str, bool]:
    host = job.get("host")
    if not job:
        return "unknown", False
    if host != socket.gethostname():
        return f"started on {host}", True
    if is_alive(job):
        return "running", True
    return "lost: its launcher has gone", False


def is_alive(job: Mapping[str, Any]) -> bool:
    """Whether the process that started a run is still there, and not another one of its number."""
    since = _start_of(int(job["pid"]))
    return since is not None and since == job.get("since")


def _start_of(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None when there is none, or a zombie."""
    with suppress(OSError, IndexError, ValueError):
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        return None if words[0] == "Z" else int(words[19])
    return None


def log_files(run: Run, *, rank: int | None, stream: str) -> list[Path]:
    """The files with a run's output, oldest first.

    Args:
        run: Which.
        rank: One rank's own; None for what the launcher showed, or rank 0's where that was not kept.
        stream: `stdout` or `stderr`, of a rank.
    """
    if rank is None and run.route == "slurm":
        return sorted(run.dir.glob("slurm-*.out"))
    found = run.dir.rglob(f"ranks/{rank or 0}/{stream}*.log")
    return sorted(found, key=lambda path: path.stat().st_mtime)


def cancel(run: Run) -> str:
    """Ask a run to end; returns what was done, in words.

    Raises:
        LaunchError: It has ended, or cannot be reached from here.
    """
    if not run.unfinished:
        msg = f"{run.id} is not running: {run.state}"
        raise UsageError(msg)
    if run.route == "slurm":
        slurm.cancel(str(run.job["job"]))
        return f"asked SLURM to end job {run.job['job']}"
    if run.route == "kubernetes":
        from fsdplaunch.launch.cluster.kubectl import delete

        return delete(run.job)
    if run.job.get("host") != socket.gethostname():
        msg = f"{run.id} was started on {run.job.get('host')}"
        raise LaunchError(msg, hint="run this command there")
    os.kill(int(run.job["pid"]), signal.SIGTERM)
    return f"asked its launcher, process {run.job['pid']}, to end"


class Tail:
    """What has been added to some files since the last look; files may come later."""

    def __init__(self) -> None:
        self._seen: dict[Path, int] = {}

    def read(self, files: Sequence[Path]) -> bytes:
        """The new bytes, file by file."""
        new = b""
        for path in files:
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._seen.get(path, 0))
                part = file.read()
                self._seen[path] = self._seen.get(path, 0) + len(part)
                new += part
        return new
