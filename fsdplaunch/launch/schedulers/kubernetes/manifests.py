"""The Kubernetes objects of a run: an Indexed Job with a headless Service, or a Kubeflow TrainJob. Pure.

Words reach the container as a list: no shell is in between. What the kubelet would expand, `$(NAME)`, is escaped.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsdplaunch.config.schema.config import Config, KubernetesSection
from fsdplaunch.config.schema.walk import variable_of
from fsdplaunch.config.world_size import node_range
from fsdplaunch.errors import EXIT_SAVED, EXIT_USAGE, UsageError
from fsdplaunch.launch.agent_command import DEFAULT_PORT
from fsdplaunch.launch.run_id import GROUP_RUN

Object = dict[str, Any]
CONFIG_FOLDER = "/etc/fsdplaunch"
CONFIG_KEY = "config.yaml"
PROGRAM = ("python3", "-P", "-m", "fsdplaunch")
_LABEL = "app.kubernetes.io/managed-by"
JOB_CONTAINER, TRAIN_JOB_CONTAINER = "trainer", "node"
"""The container that runs the launcher: in our own Job, and as every ClusterTrainingRuntime has to call it."""
_MARGIN_SECONDS = 15
_LONGEST_NAME = 52
"""A pod's name adds `-INDEX-SUFFIX` and must be a DNS label of at most 63 characters."""


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
    """Return the objects, in the order they are to be made.

    Args:
        config: Resolved.
        words: What each pod runs.
        run_id: The run's name.
        snapshot: The configuration's text, which the pods read from a ConfigMap.
        secrets: Variables that the pods read from a Secret, and that stand nowhere else.

    Raises:
        UsageError: Something is missing or cannot be expressed for Kubernetes.
    """
    kube, name = config.kubernetes, object_name(run_id)
    if kube.image is None:
        msg = "kubernetes.image is not set"
        raise UsageError(msg, hint="name an image that has fsdplaunch and the script")
    least, most = node_range(config)
    if least != most:
        msg = f"launch.nodes {config.launch.nodes} is elastic, and a Kubernetes Job has a fixed number of pods"
        raise UsageError(msg, hint="set num_machines instead")
    meta = _meta(kube, name)
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {CONFIG_KEY: snapshot}}
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in secrets.items()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": encoded}
    parts = [settings, *([secret] if secrets else [])]
    if kube.kind == "trainjob":
        return [*parts, _train_job(config, words, name=name, run_id=run_id, secrets=secrets)]
    if least > 1:
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": name}}
        parts.append({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service})
    return [*parts, _job(config, words, name=name, run_id=run_id, secrets=secrets)]


def _meta(kube: KubernetesSection, name: str) -> Object:
    space = {"namespace": kube.namespace} if kube.namespace else {}
    return {"name": name, **space, "labels": {_LABEL: "fsdplaunch"}}


def _group(run_id: str) -> dict[str, str]:
    """Return what gives each start of the pods a folder of its own: the cluster does not count them."""
    return {GROUP_RUN: f"{run_id}/"}


def _job(config: Config, words: Sequence[str], *, name: str, run_id: str, secrets: Mapping[str, str]) -> Object:
    kube, count = config.kubernetes, config.num_machines
    env = _group(run_id)
    if count > 1:
        env |= {
            variable_of("main_process_ip"): f"{name}-0.{name}",
            variable_of("main_process_port"): str(config.main_process_port or DEFAULT_PORT),
        }
    pod = {
        "restartPolicy": "Never",
        **({"subdomain": name} if count > 1 else {}),
        "terminationGracePeriodSeconds": round(config.launch.shutdown_grace_seconds) + _MARGIN_SECONDS,
        "enableServiceLinks": False,
        "automountServiceAccountToken": kube.service_account is not None,
        **_pod_extras(kube),
        "securityContext": _pod_security(kube),
        "containers": [_container(config, words, [*_plain(env), *_from_secret(name, secrets)])],
        "volumes": volumes(kube, name),
    }
    spec = {
        "completions": count,
        "parallelism": count,
        "completionMode": "Indexed",
        "backoffLimit": kube.retries * count,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": failure_rules()},
        "template": {"metadata": {"labels": {_LABEL: "fsdplaunch"}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(kube, name), "spec": spec}


def failure_rules() -> list[Object]:
    """Return what the Job does about a pod that failed, by our exit codes."""

    def on_codes(action: str, *codes: int) -> Object:
        values = {"containerName": JOB_CONTAINER, "operator": "In", "values": list(codes)}
        return {"action": action, "onExitCodes": values}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_codes("Ignore", EXIT_SAVED),  # saved and left: start it again, and do not count it
        on_codes("FailJob", EXIT_USAGE),  # a wrong configuration is as wrong the next time
    ]


def _pod_extras(kube: KubernetesSection) -> Object:
    extras: Object = {}
    if kube.service_account:
        extras["serviceAccountName"] = kube.service_account
    if kube.node_selector:
        extras["nodeSelector"] = {name: str(value) for name, value in kube.node_selector.items()}
    if kube.pull_secrets:
        extras["imagePullSecrets"] = [{"name": name} for name in kube.pull_secrets]
    return extras


def _pod_security(kube: KubernetesSection) -> Object:
    who = {"runAsUser": kube.user, "runAsGroup": kube.user, "fsGroup": kube.user} if kube.user else {}
    return {"runAsNonRoot": True, **who, "seccompProfile": {"type": "RuntimeDefault"}}


def _plain(env: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": literal(value)} for name, value in env.items()]


def _from_secret(name: str, secrets: Mapping[str, str]) -> list[Object]:
    """Return the variables whose values only the kubelet reads, out of the run's Secret."""
    return [{"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}} for key in secrets]


def _container(config: Config, words: Sequence[str], env: list[Object]) -> Object:
    kube = config.kubernetes
    return {
        "name": JOB_CONTAINER,
        "image": kube.image,
        "command": [literal(word) for word in words[: len(PROGRAM)]],
        "args": [literal(word) for word in words[len(PROGRAM) :]],
        **({"workingDir": kube.working_dir} if kube.working_dir else {}),
        "env": env,
        **({"envFrom": [{"secretRef": {"name": name}} for name in kube.secrets]} if kube.secrets else {}),
        **({"resources": _resources(kube)} if kube.resources else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts(kube),
    }


def _resources(kube: KubernetesSection) -> Object:
    """Return quantities as texts, which Kubernetes takes for every resource."""
    wrong = set(kube.resources) - {"requests", "limits"}
    if wrong:
        msg = f"kubernetes.resources holds {', '.join(sorted(wrong))}, and not requests and limits only"
        raise UsageError(msg, hint="for example {limits: {nvidia.com/gpu: 8, memory: 200Gi}}")
    return {
        part: {name: str(value) for name, value in dict(amounts).items()}
        for part, amounts in kube.resources.items()
    }


def volumes(kube: KubernetesSection, name: str) -> list[Object]:
    """Return the pods' volumes: the configuration, shared memory, and what the configuration mounts."""
    memory: Object = {"medium": "Memory", **({"sizeLimit": kube.shm_size} if kube.shm_size else {})}
    own = [{"name": "config", "configMap": {"name": name}}, {"name": "shm", "emptyDir": memory}]
    for number, source in enumerate(kube.volumes.values()):
        claim = {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else dict(source)
        own.append({"name": f"volume-{number}", **claim})
    return own


def mounts(kube: KubernetesSection) -> list[Object]:
    """Return where the volumes go."""
    own: list[Object] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  (the container's own)
    ]
    return own + [{"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(kube.volumes)]


def _train_job(
    config: Config, words: Sequence[str], *, name: str, run_id: str, secrets: Mapping[str, str]
) -> Object:
    """Return a TrainJob: the operator makes the pods and the service; joining and rendezvous stay ours (c10d)."""
    kube = config.kubernetes
    if kube.secrets:
        msg = "kubernetes.secrets cannot be set in a TrainJob"
        raise UsageError(msg, hint="give them to the ClusterTrainingRuntime's pods, or use kind: job")
    container = _container(config, words, [*_plain(_group(run_id)), *_from_secret(name, secrets)])
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": kube.runtime}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _meta(kube, name),
        "spec": {
            "runtimeRef": runtime,
            "trainer": _trainer(config, container),
            "runtimePatches": [_runtime_patch(config, container, name)],
        },
    }


def _trainer(config: Config, container: Object) -> Object:
    """Return what a TrainJob itself says of its containers."""
    kube = config.kubernetes
    return {
        "image": kube.image,
        "command": container["command"],
        "args": container["args"],
        "numNodes": config.num_machines,
        "env": container["env"],
        **({"resourcesPerNode": container["resources"]} if kube.resources else {}),
    }


def _runtime_patch(config: Config, container: Object, name: str) -> Object:
    """Return what a TrainJob changes of its runtime's pods: all that it has no word of its own for."""
    patched = {part: container[part] for part in ("volumeMounts", "securityContext")}
    pod = {
        **_pod_extras(config.kubernetes),
        "securityContext": _pod_security(config.kubernetes),
        "terminationGracePeriodSeconds": round(config.launch.shutdown_grace_seconds) + _MARGIN_SECONDS,
        "volumes": volumes(config.kubernetes, name),
        "containers": [{"name": TRAIN_JOB_CONTAINER, **patched}],
    }
    job = {"name": TRAIN_JOB_CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "manager": "fsdplaunch.dev/launch",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }
