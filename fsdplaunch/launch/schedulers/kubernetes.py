"""A run on Kubernetes: its objects, kubectl, and how the run is doing there.

A run is an Indexed Job with a headless Service. Words reach the container as a list: no
shell is in between. What the kubelet would expand, `$(NAME)`, is escaped. The rest of the package imports this
file by name, and works without it.
"""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fsdplaunch.config.resolve import node_range
from fsdplaunch.config.schema.config import Config, variable_of
from fsdplaunch.errors import EXIT_FAILED, EXIT_SAVED, EXIT_USAGE, LaunchError, UsageError
from fsdplaunch.launch.plan import DEFAULT_PORT
from fsdplaunch.launch.schedulers import ShownStreams, ask, stream_for
from fsdplaunch.parent_death import ended_with_us
from fsdplaunch.run_dir import GROUP_RUN

Object = dict[str, Any]
CONFIG_FOLDER = "/etc/fsdplaunch"
CONFIG_KEY = "config.yaml"
PROGRAM = ("python3", "-P", "-m", "fsdplaunch")
_LABEL = "app.kubernetes.io/managed-by"
_CONTAINER = "trainer"
"""The container that runs the launcher."""
_MARGIN_SECONDS = 15
_LONGEST_NAME = 52
"""A pod's name adds `-INDEX-SUFFIX` and must be a DNS label of at most 63 characters."""
LOOK_SECONDS = 2.0
"""Between two looks at a run that is followed."""
_MOST_STREAMS = 32
"""Pods whose output is shown at a time: each costs a process here and a connection there."""
_INDEX = "batch.kubernetes.io/job-completion-index"
Job = Mapping[str, Any]


def object_name(run_id: str) -> str:
    """Return a run's name as Kubernetes allows one: lower case letters, digits and dashes, a letter first."""
    words = re.sub(r"[^a-z0-9-]+", "-", run_id.lower()).strip("-")
    return f"fsdp-{words}"[:_LONGEST_NAME].rstrip("-")


def literal(word: str) -> str:
    """Return a word that the kubelet hands on unchanged: it replaces `$(NAME)`, and reads `$$` as `$`."""
    return word.replace("$", "$$")


def objects(
    config: Config, words: Sequence[str], *, run_id: str, snapshot: str, secrets: Mapping[str, str]
) -> list[Object]:
    """Return the objects in order; pods read the snapshot from a ConfigMap, and secrets from a Secret alone."""
    kube, name = config.kubernetes, object_name(run_id)
    if kube.image is None:
        msg = "kubernetes.image is not set"
        raise UsageError(msg, hint="name an image that has fsdplaunch and the script")
    least, most = node_range(config)
    if least != most:
        msg = f"launch.nodes {config.launch.nodes} is elastic, and a Kubernetes Job has a fixed number of pods"
        raise UsageError(msg, hint="set num_machines instead")
    space = {"namespace": kube.namespace} if kube.namespace else {}
    meta = {"name": name, **space, "labels": {_LABEL: "fsdplaunch"}}
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {CONFIG_KEY: snapshot}}
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in secrets.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": encoded}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
    parts = [settings, *([secret] if secrets else [])]
    # Each start of the pods gets a folder of its own: the cluster does not count them.
    env = {GROUP_RUN: f"{run_id}/"}
    if least > 1:
        parts.append({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service})
        env[variable_of("main_process_ip")] = f"{name}-0.{name}"
        env[variable_of("main_process_port")] = str(config.main_process_port or DEFAULT_PORT)
    job = _job(config, _container(config, words, name, env, secrets), name)
    return [*parts, {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": job}]


def _job(config: Config, container: Object, name: str) -> Object:
    kube, count = config.kubernetes, config.num_machines
    who = {"runAsUser": kube.user, "runAsGroup": kube.user, "fsGroup": kube.user} if kube.user else {}
    named: Object = {
        "serviceAccountName": kube.service_account,
        "nodeSelector": {key: str(value) for key, value in kube.node_selector.items()},
        "imagePullSecrets": [{"name": one} for one in kube.pull_secrets],
    }
    memory: Object = {"medium": "Memory", **({"sizeLimit": kube.shm_size} if kube.shm_size else {})}
    volumes = [{"name": "config", "configMap": {"name": name}}, {"name": "shm", "emptyDir": memory}]
    for number, source in enumerate(kube.volumes.values()):
        claim = {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else dict(source)
        volumes.append({"name": f"volume-{number}", **claim})
    pod = {
        "restartPolicy": "Never",
        **({"subdomain": name} if count > 1 else {}),
        "enableServiceLinks": False,
        "automountServiceAccountToken": kube.service_account is not None,
        **{key: value for key, value in named.items() if value},
        "terminationGracePeriodSeconds": round(config.launch.shutdown_grace_seconds) + _MARGIN_SECONDS,
        "securityContext": {"runAsNonRoot": True, **who, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": volumes,
        "containers": [container],
    }
    ends: Object = {"containerName": _CONTAINER, "operator": "In"}
    return {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimit": kube.retries * count,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                # Saved and left: start it again, and do not count it. A wrong configuration stays as wrong.
                {"action": "Ignore", "onExitCodes": {**ends, "values": [EXIT_SAVED]}},
                {"action": "FailJob", "onExitCodes": {**ends, "values": [EXIT_USAGE]}},
            ]
        },
        "template": {"metadata": {"labels": {_LABEL: "fsdplaunch"}}, "spec": pod},
    }


def _container(
    config: Config, words: Sequence[str], name: str, env: Mapping[str, str], secrets: Mapping[str, str]
) -> Object:
    kube = config.kubernetes
    if wrong := set(kube.resources) - {"requests", "limits"}:
        msg = f"kubernetes.resources holds {', '.join(sorted(wrong))}, and not requests and limits only"
        raise UsageError(msg, hint="for example {limits: {nvidia.com/gpu: 8, memory: 200Gi}}")
    resources = {  # quantities as texts, which Kubernetes takes for every resource
        part: {key: str(value) for key, value in dict(amounts).items()} for part, amounts in kube.resources.items()
    }
    hidden = [{"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in secrets]
    return {
        "name": _CONTAINER,
        "image": kube.image,
        "command": [literal(word) for word in words[: len(PROGRAM)]],
        "args": [literal(word) for word in words[len(PROGRAM) :]],
        **({"workingDir": kube.working_dir} if kube.working_dir else {}),
        "env": [*({"name": key, "value": literal(value)} for key, value in env.items()), *hidden],
        **({"envFrom": [{"secretRef": {"name": one}} for one in kube.secrets]} if kube.secrets else {}),
        **({"resources": resources} if resources else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  (the container's own)
            *({"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(kube.volumes)),
        ],
    }


def words_for(action: Sequence[str], namespace: str | None) -> list[str]:
    """Return a kubectl command line."""
    return ["kubectl", *(["--namespace", namespace] if namespace else []), *action]


def apply(text: str, namespace: str | None) -> str:
    """Make the objects; returns what kubectl says."""
    return _ask(words_for(["apply", "-f", "-"], namespace), text)


def delete(job: Mapping[str, Any]) -> str:
    """Delete a run's objects; returns what was done."""
    for kind in ("job", "service", "secret", "configmap"):
        # Without waiting: the pods may take their grace.
        words = ["delete", "--ignore-not-found", "--wait=false", kind, str(job["name"])]
        _ask(words_for(words, job.get("namespace")))
    return f"deleted {job['name']}"


def read(what: Sequence[str], namespace: str | None) -> dict[str, Any]:
    """Return an object, or a list of them, as the cluster has it; empty when there is none."""
    text = _ask(words_for(["get", *what, "--ignore-not-found", "--output", "json"], namespace))
    return dict(json.loads(text)) if text else {}


def _ask(words: Sequence[str], text: str = "") -> str:
    return ask(
        words,
        text=text,
        seconds=120,
        missing="install it, or write the objects with --dry-run and apply them elsewhere",
        late="is the cluster up? kubectl version",
        refused="see the objects with --dry-run",
    ).strip()


def state_of(job: Job) -> tuple[str, bool]:
    """Return the state of a run, as the cluster has it, in a few words, and whether it may still do something."""
    try:
        found = read(["job", str(job["name"])], job.get("namespace"))
    except LaunchError as error:
        return f"unknown: {error}", True
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
    ready = status.get("ready") or 0
    return (f"running ({ready} of {found['spec']['parallelism']} pods ready)" if ready else "pending"), True


def status_of(job: Job) -> int:
    """Return the exit status of a run that has ended: 0, or that of the container that failed first."""
    if state_of(job)[0] == "done":
        return 0
    ends = []
    for pod in _pods(job):
        for one in (pod.get("status") or {}).get("containerStatuses") or ():
            end = (one.get("state") or {}).get("terminated")
            if one["name"] == _CONTAINER and end and end["exitCode"]:
                ends.append(end)
    first = min(ends, key=lambda end: str(end.get("finishedAt")), default=None)
    return int(first["exitCode"]) if first else EXIT_FAILED


def _pods(job: Job) -> list[dict[str, Any]]:
    found = read(["pods", "--selector", f"job-name={job['name']}"], job.get("namespace"))
    return sorted(found.get("items") or (), key=lambda pod: int(pod["metadata"]["labels"].get(_INDEX, 0)))


def show_logs(job: Job) -> int:
    """Print what all pods have printed; returns kubectl's status."""
    what = ["logs", "--tail=-1", "--container", _CONTAINER, "--selector", f"job-name={job['name']}"]
    screen = ShownStreams()
    stream = _open_stream(what, job, screen)
    screen.copy()
    return stream.wait()


def follow(job: Job, tell: Callable[[str], None]) -> None:
    """Print what the pods print until the run has ended, and tell each new state. Ctrl-C leaves the run alone.

    A pod is waited for: kubectl itself refuses one whose image is still being fetched.
    """
    streams: dict[str, subprocess.Popen[bytes]] = {}
    shown, screen = "", ShownStreams()
    try:
        while True:
            state, unfinished = state_of(job)
            if state != shown:
                tell(shown := state)
            with suppress(LaunchError):  # the next look tells
                for pod in _pods(job):
                    name, phase = pod["metadata"]["name"], (pod.get("status") or {}).get("phase")
                    running = sum(stream.poll() is None for stream in streams.values())
                    can_show = name not in streams and phase in ("Running", "Succeeded", "Failed")
                    if can_show and running < _MOST_STREAMS:
                        what = ["logs", "--follow", "--container", _CONTAINER, name]
                        streams[name] = _open_stream(what, job, screen)
            if not unfinished:
                break
            screen.pause(LOOK_SECONDS)
        screen.copy()
        for stream in streams.values():
            stream.wait()
    finally:
        for stream in streams.values():
            if stream.poll() is None:
                stream.terminate()


def _open_stream(what: Sequence[str], job: Job, screen: ShownStreams) -> "subprocess.Popen[bytes]":
    stream = subprocess.Popen(
        words_for(what, job.get("namespace")),
        stdin=subprocess.DEVNULL,
        stdout=stream_for(sys.stdout),
        stderr=stream_for(sys.stderr),
        start_new_session=True,
        preexec_fn=ended_with_us(),  # noqa: PLW1509  (no threads here)
    )
    screen.add(stream, stdout=sys.stdout, stderr=sys.stderr)
    return stream
