"""Keys of our own for clusters: `slurm`, `kubernetes`, `ssh`. Part of the one schema."""

from dataclasses import dataclass
from typing import Any

from fsdplaunch.config.schema import kinds as v
from fsdplaunch.config.schema.key import key


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """What a job that `launch --slurm` submits asks for. Keys with sbatch's names are sbatch's options."""

    partition: str | None = key(v.TEXT, None, "Partition to run in.")
    account: str | None = key(v.TEXT, None, "Account that is charged.")
    qos: str | None = key(v.TEXT, None, "Quality of service.")
    time: str | None = key(v.TEXT, None, "Time limit, for example 12:00:00.")
    gpus_per_node: str | None = key(v.TEXT, None, "GPUs on each node: a number, or type:number.")
    cpus_per_task: int | None = key(v.COUNT, None, "CPUs on each node.")
    mem: str | None = key(v.TEXT, None, "Host memory on each node, for example 200G.")
    constraint: str | None = key(v.TEXT, None, "Features the nodes must have.")
    array: str | None = key(
        v.TEXT, None, "Submit so many jobs that differ in SLURM_ARRAY_TASK_ID, for example 0-3 or 0-9%2."
    )
    signal_seconds: int = key(
        v.WHOLE,
        120,
        """How long before the time limit the workers get SIGTERM, in order to save. SLURM may send it up to a
        minute early. 0 is never.""",
    )
    requeue: bool = key(
        v.FLAG,
        True,
        """Put the job back into the queue when its workers have saved and left (status 75), when it is preempted,
        and when a node fails.""",
    )
    container_image: str | None = key(
        v.TEXT, None, "Container image the workers run in, given to srun (Pyxis); python3 is then the image's."
    )
    container_mounts: tuple[str, ...] = key(v.LINES, (), "Mounts of that container, as host:container.")
    modules: tuple[str, ...] = key(v.LINES, (), "Environment modules to load first.")
    setup: tuple[str, ...] = key(v.LINES, (), "Lines of shell that run on the first node before the workers.")
    lines: tuple[str, ...] = key(v.LINES, (), "Further #SBATCH lines, without the #SBATCH.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSection:
    """What the Kubernetes objects say that `launch --kubernetes` applies."""

    kind: v.KubernetesName = key(v.KUBERNETES, "job", "job is an Indexed Job, trainjob a Kubeflow TrainJob.")
    image: str | None = key(v.TEXT, None, "Container image with fsdplaunch and the script.")
    namespace: str | None = key(v.TEXT, None, "Namespace of the objects. Left out, that of kubectl's context.")
    working_dir: str | None = key(v.TEXT, None, "Folder in the image to start in. Left out, the image's own.")
    resources: dict[str, Any] = key(
        v.TABLE, {}, "Requests and limits of each pod, as in a pod: {limits: {nvidia.com/gpu: 8}}."
    )
    volumes: dict[str, Any] = key(
        v.TABLE, {}, "Where to mount which claim: {/data: my-claim}; or a whole volume source as in a pod."
    )
    shm_size: str | None = key(
        v.TEXT, None, "Limit of /dev/shm, which holds data loaders' batches: 64Gi. Left out, the pod's memory."
    )
    secrets: tuple[str, ...] = key(v.LINES, (), "Secrets whose entries become environment variables.")
    pull_secrets: tuple[str, ...] = key(v.LINES, (), "Secrets to pull the image with.")
    service_account: str | None = key(v.TEXT, None, "Service account of the pods.")
    node_selector: dict[str, Any] = key(v.TABLE, {}, "Labels the nodes must have.")
    user: int | None = key(
        v.COUNT,
        None,
        "User number the pods run as, and group of their files. Left out, the image's, which must not be root.",
    )
    retries: int = key(
        v.WHOLE, 3, "How often a pod may fail in a way that another start can mend. Evictions do not count."
    )
    runtime: str = key(v.TEXT, "torch-distributed", "ClusterTrainingRuntime a TrainJob refers to.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSection:
    """Nodes that are reached over ssh. Naming some makes launch start there."""

    hosts: tuple[str, ...] = key(v.HOSTS, (), "Nodes, as ssh knows them, node 0 first.", per_node=True)
    hostfile: str | None = key(
        v.TEXT, None, "File with one node per line, slots=N for its number of workers allowed.", per_node=True
    )
    options: tuple[str, ...] = key(
        v.LINES, (), "Further options of the ssh command, each one word: -F, my_config, -oPort=2222."
    )
    python: str | None = key(
        v.TEXT, None, "Interpreter on the nodes, its whole path. Left out, that of this command."
    )
    remote_dir: str | None = key(v.TEXT, None, "Folder on the nodes. Left out, the one of this command.")
