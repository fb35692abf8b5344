"""The runs in a folder: which there are, how each is doing, where its output is, how to end it."""

import os
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdplaunch.errors import EXIT_FAILED, LaunchError, UsageError
from fsdplaunch.launch.entry_points import KUBERNETES, feature
from fsdplaunch.launch.runs.records import read_job
from fsdplaunch.launch.runs.states import State, ended_state, process_state, result_of, slurm_state, start_of
from fsdplaunch.launch.schedulers.slurm import commands as slurm
from fsdplaunch.run_dir import JOB, LATEST, PLAN, read_json, write_json

_TASK = "task"
"""Folder of a task of an array inside its run's, with its number; RUN/task3 is also its name."""


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
        task: Its number, where it is a task of an array.
        tasks: Of an array, as runs of their own.
    """

    id: str
    dir: Path
    route: str
    job: Mapping[str, Any]
    script: str
    state: str
    unfinished: bool
    task: int | None = None
    tasks: Sequence["Run"] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {
            "run_id": self.id,
            "run_dir": str(self.dir),
            "route": self.route,
            "job": dict(self.job),
            "script": self.script,
            "state": self.state,
            "unfinished": self.unfinished,
            **({"tasks": [task.to_dict() for task in self.tasks]} if self.tasks else {}),
        }


def write_job(run_dir: Path, *, route: str, **what: Any) -> None:
    """Note how a run was started, and by which process."""
    pid = os.getpid()
    about = {"route": route, "host": socket.gethostname(), "pid": pid, "since": start_of(pid), **what}
    write_json(run_dir / JOB, about)


def read_runs(folder: Path, *, limit: int | None = None) -> list[Run]:
    """Return the runs in a folder, newest first."""
    found = [path for path in folder.iterdir() if is_run(path)] if folder.is_dir() else []
    found.sort(key=lambda path: (path / PLAN).stat().st_mtime, reverse=True)
    return _read_all(found[:limit])


def _read_all(folders: Sequence[Path]) -> list[Run]:
    jobs = {path: read_job(path) for path in folders}
    numbers = [job["job"] for job in jobs.values() if job.get("route") == "slurm"]
    states = slurm.job_states(numbers)
    return [_read(path, job, states.get(str(job.get("job")), {})) for path, job in jobs.items()]


def is_run(path: Path) -> bool:
    """Return whether a folder is a run's; `latest` is another name of one."""
    return not path.is_symlink() and (path / PLAN).is_file()


def find_run(folder: Path, name: str) -> Run:
    """Return the run of this name, or of which this is the beginning or the end; with /task3 behind it, that task.

    Raises:
        UsageError: There is none, or more than one.
    """
    name, _, task = name.partition("/")
    if not folder.is_dir():
        msg = f"there is no folder {folder}"
        raise UsageError(msg, hint="name the one with the runs: --log-dir DIR")
    if name == LATEST and (folder / name).is_dir():
        name = os.path.basename(os.path.realpath(folder / name))  # noqa: PTH119  (links may lead in a circle)
    names = [path.name for path in folder.iterdir() if is_run(path)]
    chosen = [one for one in names if one == name] or [
        one for one in names if one.startswith(name) or one.endswith(name)
    ]
    if len(chosen) != 1:
        count = f"{len(chosen)} runs" if chosen else "no run"
        msg = f"{count} in {folder} by the name {name}"
        raise UsageError(msg, hint="fsdplaunch runs lists them")
    (run,) = _read_all([folder / chosen[0]])
    return _task_of(run, task) if task else run


def _task_of(run: Run, name: str) -> Run:
    found = next((task for task in run.tasks if task.dir.name == name), None)
    if found is None:
        msg = f"{run.id} has no {name}"
        numbers = ", ".join(task.dir.name for task in run.tasks)
        raise UsageError(msg, hint=f"it has {numbers}" if numbers else "it is not an array: leave the / out")
    return found


def _read(path: Path, job: Mapping[str, Any], reported: Mapping[str, str]) -> Run:
    """Return a run out of its folder.

    Args:
        path: The folder.
        job: What the route knows it by.
        reported: States of its tasks that SLURM knows; its own is under "".
    """
    route = str(job.get("route") or "here")
    script = str(read_json(path / PLAN).get("script") or "")
    run = Run(id=path.name, dir=path, route=route, job=job, script=script, state="", unfinished=False)
    if route == "slurm" and (tasks := _tasks(run, reported)):
        counts = Counter(task.state for task in tasks)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        return replace(run, state=words, unfinished=any(task.unfinished for task in tasks), tasks=tasks)
    state, unfinished = _state(run, reported.get(""))
    return replace(run, state=state, unfinished=unfinished)


def _state(run: Run, reported: str | None) -> State:
    ended = result_of(run.dir)
    if run.route == "slurm":
        return slurm_state(reported, ended)
    if ended is not None:
        return ended_state(ended), False
    if run.route != "kubernetes":
        return process_state(run.job)
    kubernetes = feature(KUBERNETES)
    return kubernetes.state_of(run.job) if kubernetes is not None else ("unknown to this installation", False)


def _tasks(run: Run, reported: Mapping[str, str]) -> list[Run]:
    """Return the tasks of an array that have started, or of which SLURM knows."""
    started = (path.name.removeprefix(_TASK) for path in run.dir.glob(f"{_TASK}*"))
    tasks = []
    for number in sorted(int(text) for text in {*started, *reported} if text.isdecimal()):
        name, job = f"{_TASK}{number}", {**run.job, "job": f"{run.job['job']}_{number}"}
        task = replace(run, id=f"{run.id}/{name}", dir=run.dir / name, job=job, task=number)
        state, unfinished = slurm_state(reported.get(str(number)), result_of(task.dir))
        tasks.append(replace(task, state=state, unfinished=unfinished))
    return tasks


def status_of(run: Run) -> int:
    """Return the status of a run that has ended: its workers' own; of an array, of the first task that failed."""
    if run.tasks:
        return next((status for task in run.tasks if (status := status_of(task))), 0)
    if run.route == "kubernetes" and (kubernetes := feature(KUBERNETES)) is not None:
        return int(kubernetes.status_of(run.job))
    ended = result_of(run.dir)
    if ended is None or run.state.startswith(("cancelled", "timeout", "node_fail")):
        return EXIT_FAILED
    return int(ended["exit_code"])


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
        return str(feature(KUBERNETES).delete(run.job))
    if run.job.get("host") != socket.gethostname():
        msg = f"{run.id} was started on {run.job.get('host')}"
        raise LaunchError(msg, hint="run this command there")
    os.kill(int(run.job["pid"]), signal.SIGTERM)
    return f"asked its launcher, process {run.job['pid']}, to end"
