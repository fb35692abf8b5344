"""Keys of our own for clusters: `slurm`, `kubernetes`, `ssh`. Part of the one schema."""

from dataclasses import dataclass
from typing import Any

from fsdplaunch.config import values as v
from fsdplaunch.config.declare import key

_SLURM = "submitting to SLURM is not supported yet; inside an allocation use srun fsdplaunch launch"
_KUBERNETES = "launching on Kubernetes is not supported yet"
_SSH = "launching over SSH is not supported yet; start fsdplaunch launch on every machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSection:
    """What a submitted SLURM job asks for. Each key is the sbatch option of the same name."""

    partition: str | None = key(v.TEXT, None, "Partition to run in.", pending=_SLURM)
    account: str | None = key(v.TEXT, None, "Account that is charged.", pending=_SLURM)
    qos: str | None = key(v.TEXT, None, "Quality of service.", pending=_SLURM)
    time: str | None = key(v.TEXT, None, "Time limit, for example 12:00:00.", pending=_SLURM)
    gpus_per_node: str | None = key(
        v.TEXT, None, "GPUs on each machine: a number, or type:number.", pending=_SLURM
    )
    cpus_per_task: int | None = key(v.COUNT, None, "CPUs on each machine.", pending=_SLURM)
    mem: str | None = key(v.TEXT, None, "Host memory on each machine, for example 200G.", pending=_SLURM)
    constraint: str | None = key(v.TEXT, None, "Features the machines must have.", pending=_SLURM)
    container_image: str | None = key(v.TEXT, None, "Container image the job runs in.", pending=_SLURM)
    modules: tuple[str, ...] = key(v.LINES, (), "Environment modules to load first.", pending=_SLURM)
    lines: tuple[str, ...] = key(v.LINES, (), "Further #SBATCH lines, without the #SBATCH.", pending=_SLURM)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSection:
    """What the Kubernetes objects of a run say."""

    kind: v.KubernetesName = key(
        v.KUBERNETES, "job", "job is an Indexed Job, trainjob a Kubeflow TrainJob.", pending=_KUBERNETES
    )
    image: str | None = key(v.TEXT, None, "Container image with fsdplaunch and the script.", pending=_KUBERNETES)
    namespace: str | None = key(v.TEXT, None, "Namespace of the objects.", pending=_KUBERNETES)
    resources: dict[str, Any] = key(v.TABLE, {}, "Requests and limits of each pod.", pending=_KUBERNETES)
    volumes: dict[str, Any] = key(v.TABLE, {}, "Mount path: claim.", pending=_KUBERNETES)
    secrets: tuple[str, ...] = key(
        v.LINES, (), "Secrets whose entries become environment variables.", pending=_KUBERNETES
    )
    service_account: str | None = key(v.TEXT, None, "Service account of the pods.", pending=_KUBERNETES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SshSection:
    """Machines that are reached over ssh."""

    hosts: tuple[str, ...] = key(v.NAMES, (), "Machines, as ssh knows them, machine 0 first.", pending=_SSH)
    hostfile: str | None = key(v.TEXT, None, "File with one machine per line, slots=N allowed.", pending=_SSH)
