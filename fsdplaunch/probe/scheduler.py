"""Which scheduler or launcher started this process, and what it says about the job: only variables are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ClusterKind = Literal["none", "slurm", "torchelastic", "mpi", "kubernetes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the environment says about the job this process belongs to.

    Attributes:
        kind: Who started the process; none when no variable says so.
        job_id: The scheduler's or launcher's name for the job.
        num_nodes: Nodes in the job.
        node_rank: This node's number, from 0.
        gpus_on_node: GPUs the scheduler gave to this node.
        node_list: The nodes, in the scheduler's own notation.
        num_tasks: Processes the scheduler or launcher started in all.
        tasks_on_node: Of those, on this node.
        task: This process's number among them, from 0.
    """

    kind: ClusterKind = "none"
    job_id: str | None = None
    num_nodes: int | None = None
    node_rank: int | None = None
    gpus_on_node: int | None = None
    node_list: str | None = None
    num_tasks: int | None = None
    tasks_on_node: int | None = None
    task: int | None = None


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """Return what the variables say. The innermost launcher wins: torchrun before SLURM before MPI.

    Args:
        environ: The process's variables.
    """
    for read in (_torchelastic, _slurm, _mpi, _kubernetes):
        found = read(environ)
        if found is not None:
            return found
    return Cluster()


def describe_cluster(cluster: Cluster) -> str | None:
    """Return one line about the job, or None when there is none.

    Args:
        cluster: What was found.
    """
    names = {"slurm": "SLURM job", "torchelastic": "torchrun", "mpi": "MPI job", "kubernetes": "Kubernetes job"}
    if cluster.kind == "none":
        return None
    words = [f"{names[cluster.kind]} {cluster.job_id}" if cluster.job_id else names[cluster.kind]]
    words += [f"{cluster.num_nodes} nodes" if cluster.num_nodes != 1 else "1 node"] if cluster.num_nodes else []
    words += [f"{cluster.gpus_on_node} GPUs on each"] if cluster.gpus_on_node else []
    words += [f"({cluster.node_list})"] if cluster.node_list else []
    return "   ".join(words)


def _torchelastic(environ: Mapping[str, str]) -> Cluster | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return Cluster(
        kind="torchelastic",
        job_id=environ["TORCHELASTIC_RUN_ID"],
        num_nodes=_count(environ, "GROUP_WORLD_SIZE"),
        node_rank=_count(environ, "GROUP_RANK"),
        num_tasks=_count(environ, "WORLD_SIZE"),
        tasks_on_node=_count(environ, "LOCAL_WORLD_SIZE"),
        task=_count(environ, "RANK"),
    )


def _slurm(environ: Mapping[str, str]) -> Cluster | None:
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        return None
    return Cluster(
        kind="slurm",
        job_id=job_id,
        num_nodes=_count(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        node_rank=_count(environ, "SLURM_NODEID"),
        gpus_on_node=_slurm_gpus(environ),
        node_list=environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST"),
        num_tasks=_count(environ, "SLURM_NTASKS", "SLURM_NPROCS"),
        tasks_on_node=_count(environ, "SLURM_NTASKS_PER_NODE"),
        task=_count(environ, "SLURM_PROCID"),
    )


def _slurm_gpus(environ: Mapping[str, str]) -> int | None:
    """Read SLURM_GPUS_ON_NODE, a number, or SLURM_GPUS_PER_NODE: `8`, `h100:8`, `a100:4,h100:4`."""
    counted = _count(environ, "SLURM_GPUS_ON_NODE")
    if counted is not None:
        return counted
    return count_gpus(environ.get("SLURM_GPUS_PER_NODE", ""))


def count_gpus(notation: str) -> int | None:
    """Return how many GPUs SLURM's notation means: `8`, `h100:8`, `a100:4,h100:4`; None for anything else."""
    numbers = [re.fullmatch(r"(?:[^:,]+:)*(\d+)(?:\([^)]*\))?", part.strip()) for part in notation.split(",")]
    return sum(int(match[1]) for match in numbers if match) if notation and all(numbers) else None


def _mpi(environ: Mapping[str, str]) -> Cluster | None:
    size = _count(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
    if size is None:
        return None
    return Cluster(
        kind="mpi",
        job_id=environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE"),
        num_tasks=size,
        tasks_on_node=_count(
            environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"
        ),
        task=_count(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    )


def _kubernetes(environ: Mapping[str, str]) -> Cluster | None:
    """Read an indexed Job, which gives each pod its number; only PET_NNODES may say how many pods there are."""
    if "JOB_COMPLETION_INDEX" not in environ or "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    return Cluster(
        kind="kubernetes",
        job_id=environ.get("JOB_NAME"),
        num_nodes=_count(environ, "PET_NNODES"),
        node_rank=_count(environ, "JOB_COMPLETION_INDEX"),
    )


def _count(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that holds a whole number."""
    for name in names:
        text = environ.get(name, "").strip()
        if re.fullmatch(r"[0-9]{1,18}", text):
            return int(text)
    return None
