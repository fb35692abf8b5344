"""A run on Kubernetes: how its Job or TrainJob is doing, what its pods print, how they ended."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdplaunch.errors import EXIT_FAILED, LaunchError
from fsdplaunch.launch.schedulers.kubernetes import kubectl
from fsdplaunch.launch.schedulers.kubernetes.manifests import JOB_CONTAINER, TRAIN_JOB_CONTAINER
from fsdplaunch.launch.schedulers.shown_output import ShownStreams, stream_for
from fsdplaunch.parent_death import ended_with_us

LOOK_SECONDS = 2.0
"""Between two looks at a run that is followed."""
MOST_STREAMS = 32
"""Pods whose output is shown at a time: each costs a process here and a connection there."""
_INDEX = "batch.kubernetes.io/job-completion-index"
Job = Mapping[str, Any]
State = tuple[str, bool]
"""One or a few words, and whether the run may still do something."""


def selector(job: Job) -> str:
    """Return the labels of a run's pods: Kubernetes' own for a Job, those of the JobSet that a TrainJob becomes.

    Args:
        job: What the run is known by: kind, name, namespace.
    """
    if job.get("kind") == "job":
        return f"job-name={job['name']}"
    return f"jobset.sigs.k8s.io/jobset-name={job['name']},jobset.sigs.k8s.io/replicatedjob-name=node"


def container(job: Job) -> str:
    """Return the container that runs the launcher."""
    return JOB_CONTAINER if job.get("kind") == "job" else TRAIN_JOB_CONTAINER


def state_of(job: Job) -> State:
    """Return the state of a run, as the cluster has it."""
    try:
        found = kubectl.read([str(job.get("kind")), str(job["name"])], job.get("namespace"))
    except LaunchError as error:
        return f"unknown: {error}", True
    return object_state(found)


def object_state(found: Mapping[str, Any]) -> State:
    """Return the state of a Job or TrainJob.

    Args:
        found: The object; empty when it is not there any more.
    """
    if not found:
        return "deleted", False
    status = found.get("status") or {}
    true = {one["type"]: one for one in status.get("conditions") or () if one.get("status") == "True"}
    if "Complete" in true:
        return "done", False
    if "Failed" in true:
        return f"failed: {true['Failed'].get('reason') or 'no reason given'}", False
    if "Suspended" in true:
        return "suspended", True
    if "jobsStatus" in status:  # of a TrainJob, which counts jobs and not pods
        return ("running" if any(one["ready"] for one in status["jobsStatus"]) else "pending"), True
    ready = status.get("ready") or 0
    return (f"running ({ready} of {found['spec']['parallelism']} pods ready)" if ready else "pending"), True


def status_of(job: Job) -> int:
    """Return the exit status of a run that has ended: 0, or that of the container that failed first."""
    if state_of(job)[0] == "done":
        return 0
    ends = [end for pod in _pods(job) if (end := _end_of(pod, container(job))) and end["exitCode"]]
    first = min(ends, key=lambda end: str(end.get("finishedAt")), default=None)
    return int(first["exitCode"]) if first else EXIT_FAILED


def _pods(job: Job) -> list[dict[str, Any]]:
    """Return the run's pods by number, those of earlier starts included."""
    found = kubectl.read(["pods", "--selector", selector(job)], job.get("namespace"))
    return sorted(found.get("items") or (), key=lambda pod: int(pod["metadata"]["labels"].get(_INDEX, 0)))


def _end_of(pod: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    for one in (pod.get("status") or {}).get("containerStatuses") or ():
        if one["name"] == name:
            end = (one.get("state") or {}).get("terminated")
            return dict(end) if end else None
    return None


def show_logs(job: Job) -> int:
    """Print what all pods have printed; returns kubectl's status."""
    what = ["logs", "--tail=-1", "--container", container(job), "--selector", selector(job)]
    screen = ShownStreams()
    stream = _open_stream(what, job, screen)
    screen.copy_all()
    return stream.wait()


def follow(job: Job, tell: Callable[[str], None]) -> None:
    """Print what the pods print until the run has ended. Ctrl-C leaves the run alone.

    A pod is waited for: kubectl itself refuses one whose image is still being fetched.

    Args:
        job: What the run is known by.
        tell: Gets each new state.
    """
    streams: dict[str, subprocess.Popen[bytes]] = {}
    shown, screen = "", ShownStreams()
    try:
        while True:
            state, unfinished = state_of(job)
            if state != shown:
                tell(shown := state)
            _open_streams(job, streams, screen)
            if not unfinished:
                break
            screen.copy(LOOK_SECONDS)
        screen.copy_all()
        for stream in streams.values():
            stream.wait()
    finally:
        for stream in streams.values():
            if stream.poll() is None:
                stream.terminate()


def _open_streams(job: Job, streams: dict[str, "subprocess.Popen[bytes]"], screen: ShownStreams) -> None:
    try:
        pods = _pods(job)
    except LaunchError:  # the next look tells
        return
    for pod in pods:
        name, phase = pod["metadata"]["name"], (pod.get("status") or {}).get("phase")
        running = sum(stream.poll() is None for stream in streams.values())
        if name in streams or phase not in ("Running", "Succeeded", "Failed") or running >= MOST_STREAMS:
            continue
        streams[name] = _open_stream(["logs", "--follow", "--container", container(job), name], job, screen)


def _open_stream(what: Sequence[str], job: Job, screen: ShownStreams) -> "subprocess.Popen[bytes]":
    """Start kubectl, and have what it prints shown here."""
    stream = subprocess.Popen(
        kubectl.words_for(what, job.get("namespace")),
        stdin=subprocess.DEVNULL,
        stdout=stream_for(sys.stdout),
        stderr=stream_for(sys.stderr),
        start_new_session=True,
        preexec_fn=ended_with_us(),  # noqa: PLW1509  (no threads here)
    )
    screen.add(stream, stdout=sys.stdout, stderr=sys.stderr)
    return stream
