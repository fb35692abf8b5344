"""Which scheduler or launcher started this process, and what it says about the job: only variables are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

ClusterKind = Literal["none", "slurm", "torchelastic", "mpi", "kubernetes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the environment says about the job this process belongs to."""

    kind: ClusterKind = "none"  # who started the process; none when no variable says so
    job_id: str | None = None  # the scheduler's or launcher's name for the job
    num_nodes: int | None = None  # nodes in the job
    node_rank: int | None = None  # this node's number, from 0
    gpus_on_node: int | None = None  # GPUs the scheduler gave to this node
    node_list: str | None = None  # the nodes, in the scheduler's own notation
    num_tasks: int | None = None  # processes the scheduler or launcher started in all
    tasks_on_node: int | None = None  # of those, on this node
    task: int | None = None  # this process's number among them, from 0


_VARIABLES: Mapping[ClusterKind, Mapping[str, tuple[str, ...]]] = {
    "torchelastic": {
        "job_id": ("TORCHELASTIC_RUN_ID",),
        "num_nodes": ("GROUP_WORLD_SIZE",),
        "node_rank": ("GROUP_RANK",),
        "num_tasks": ("WORLD_SIZE",),
        "tasks_on_node": ("LOCAL_WORLD_SIZE",),
        "task": ("RANK",),
    },
    "slurm": {
        "job_id": ("SLURM_JOB_ID", "SLURM_JOBID"),
        "num_nodes": ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"),
        "node_rank": ("SLURM_NODEID",),
        "gpus_on_node": ("SLURM_GPUS_ON_NODE",),
        "node_list": ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
        "num_tasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
        "tasks_on_node": ("SLURM_NTASKS_PER_NODE",),
        "task": ("SLURM_PROCID",),
    },
    "mpi": {
        "job_id": ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"),
        "num_tasks": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
        "tasks_on_node": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"),
        "task": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"),
    },
    "kubernetes": {  # an indexed Job, which gives each pod its number; only PET_NNODES may say how many there are
        "job_id": ("JOB_NAME",),
        "num_nodes": ("PET_NNODES",),
        "node_rank": ("JOB_COMPLETION_INDEX",),
    },
}
"""What each says in which variables, the first of them that is set; the innermost launcher comes first."""
_TEXTS = ("job_id", "node_list")


def read_cluster(environ: Mapping[str, str]) -> Cluster:
    """Return what the variables say. The innermost launcher wins: torchrun before SLURM before MPI."""
    for kind, variables in _VARIABLES.items():
        found: dict[str, Any] = {}
        for name, sources in variables.items():
            given = [environ[source].strip() for source in sources if environ.get(source)]
            numbers = [int(text) for text in given if re.fullmatch(r"[0-9]{1,18}", text)]
            found[name] = next(iter(given if name in _TEXTS else numbers), None)
        is_here = {
            "torchelastic": "TORCHELASTIC_RUN_ID" in environ,
            "slurm": found["job_id"] is not None,
            "mpi": found.get("num_tasks") is not None,
            "kubernetes": "JOB_COMPLETION_INDEX" in environ and "KUBERNETES_SERVICE_HOST" in environ,
        }
        if is_here[kind]:
            if kind == "slurm" and found["gpus_on_node"] is None:
                found["gpus_on_node"] = count_gpus(environ.get("SLURM_GPUS_PER_NODE", ""))
            return Cluster(kind=kind, **found)
    return Cluster()


def describe_cluster(cluster: Cluster) -> str | None:
    """Return one line about the job, or None when there is none."""
    names = {"slurm": "SLURM job", "torchelastic": "torchrun", "mpi": "MPI job", "kubernetes": "Kubernetes job"}
    if cluster.kind == "none":
        return None
    words = [f"{names[cluster.kind]} {cluster.job_id}" if cluster.job_id else names[cluster.kind]]
    words += [f"{cluster.num_nodes} nodes" if cluster.num_nodes != 1 else "1 node"] if cluster.num_nodes else []
    words += [f"{cluster.gpus_on_node} GPUs on each"] if cluster.gpus_on_node else []
    words += [f"({cluster.node_list})"] if cluster.node_list else []
    return "   ".join(words)


def count_gpus(notation: str) -> int | None:
    """Return how many GPUs SLURM's notation means: `8`, `h100:8`, `a100:4,h100:4`; None for anything else."""
    numbers = [re.fullmatch(r"(?:[^:,]+:)*(\d+)(?:\([^)]*\))?", part.strip()) for part in notation.split(",")]
    return sum(int(match[1]) for match in numbers if match) if notation and all(numbers) else None
