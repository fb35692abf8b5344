"""Which of the run's nodes this is, how many there are, and where they join: from scheduler and configuration."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from fsdplaunch.config.resolve import node_range
from fsdplaunch.config.schema.config import Config
from fsdplaunch.errors import UsageError
from fsdplaunch.launch.coordination import network
from fsdplaunch.launch.plan import DEFAULT_PORT
from fsdplaunch.probe.scheduler import Cluster, read_cluster

_RANK_VARIABLE = "FSDPLAUNCH_NODE_RANK"
_SPECIAL_STEP = 0xFFFFFF00
"""SLURM's numbers for steps that srun did not start: batch scripts, interactive shells."""
_FIRST_PORT, _PORT_PAIRS, _STEPS = 20000, 6000, 10
_SOURCES = {"slurm": "SLURM", "mpi": "mpirun", "kubernetes": "Kubernetes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlacement:
    """This node among the run's nodes."""

    least: int  # nodes the run needs
    most: int  # nodes it may have
    rank: int | None = None  # this node's number; None when it is to be assigned
    host: str | None = None  # address of node 0 as this node knows it; None when this node is to be it
    port: int = DEFAULT_PORT
    names: tuple[str, ...] = ()  # the nodes' names by number, where they are known
    source: str = "the configuration"  # where this comes from, for messages


def assumed_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a scheduler's variables say of keys that nobody else does, as KEY=VALUE."""
    count = _nodes_of(read_cluster(environ), environ)
    return (f"num_machines={count}",) if count is not None and count > 1 else ()


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process, and not sbatch or salloc."""
    text = environ.get("SLURM_STEP_ID", "")
    return bool(re.fullmatch(r"[0-9]{1,20}", text)) and int(text) < _SPECIAL_STEP


def _nodes_of(cluster: Cluster, environ: Mapping[str, str]) -> int | None:
    """Return nodes on which the scheduler started this launcher, or could."""
    if cluster.kind == "slurm" and is_step(environ):
        return int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or "1")
    if cluster.kind == "mpi":
        return cluster.num_tasks if cluster.tasks_on_node == 1 else None
    return cluster.num_nodes if cluster.kind in ("slurm", "kubernetes") else None


def find_placement(config: Config, environ: Mapping[str, str]) -> NodePlacement:
    """Return this node's place among the nodes; what the configuration says goes before what a scheduler says.

    Raises:
        UsageError: Scheduler and configuration contradict each other, or a launcher per worker was started.
    """
    least, most = node_range(config)
    cluster = read_cluster(environ)
    if cluster.kind == "slurm" and not is_step(environ):
        cluster = Cluster()  # the batch script's own shell: this process is alone
    source = _SOURCES.get(cluster.kind, "the configuration")
    if most > 1 or (cluster.num_nodes or 1) > 1:
        _check_tasks(cluster, source)
    if most == 1:
        return NodePlacement(least=1, most=1)
    count = _nodes_of(cluster, environ)
    if count is not None and not least <= count <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        msg = f"the configuration asks for {wanted} nodes, but {source} has {count}"
        raise UsageError(msg, hint="leave num_machines out: the scheduler's number is then taken")
    if count is not None and cluster.kind == "slurm":
        most = least = count
    host, port, names = _meeting_place(config, cluster, environ)
    rank = _rank(config, cluster, environ)
    if (rank or 0) >= most:
        msg = f"this is node {rank}, but there are {most}"
        raise UsageError(msg, hint=f"nodes count from 0: see --machine-rank, {_RANK_VARIABLE}, the scheduler")
    if host is None and rank:
        msg = f"this is node {rank}, but nothing says where node 0 is"
        raise UsageError(msg, hint="set main_process_ip to node 0's address")
    return NodePlacement(
        least=least, most=most, rank=rank, host=host, port=port or DEFAULT_PORT, names=names, source=source
    )


def is_coordinator(place: NodePlacement) -> bool:
    """Return whether the others come to this node: it is configured as node 0, or node 0's address is its own."""
    if place.host is None or place.rank == 0:
        return True
    return place.rank is None and network.own_address_of(place.host) is not None


def _meeting_place(
    config: Config, cluster: Cluster, environ: Mapping[str, str]
) -> tuple[str | None, int | None, tuple[str, ...]]:
    host, port = config.main_process_ip, config.main_process_port or None
    names: tuple[str, ...] = ()
    if config.launch.rendezvous_endpoint:
        host, _, text = config.launch.rendezvous_endpoint.rpartition(":")
        host, port = host.removeprefix("[").removesuffix("]"), int(text) or None
    if cluster.kind == "slurm":
        names = _slurm_names(environ)
        if host is None:  # where SLURM itself reaches it, which works where its name does not resolve
            found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", "-o", names[0]))
            host = found[1] if found else names[0]
        if port is None:  # of the step's own, so that jobs on one node do not meet; the next is torch's store's
            job, step = int(environ.get("SLURM_JOB_ID", "0")), int(environ.get("SLURM_STEP_ID", "0"))
            port = _FIRST_PORT + 2 * ((job * _STEPS + step) % _PORT_PAIRS)
    if cluster.kind == "kubernetes" and host is None:
        host, port = environ.get("PET_MASTER_ADDR"), port or _decimal(environ.get("PET_MASTER_PORT"))
    return host, port, names


def _rank(config: Config, cluster: Cluster, environ: Mapping[str, str]) -> int | None:
    if config.machine_rank is not None:
        return config.machine_rank
    if (text := environ.get(_RANK_VARIABLE)) is not None:
        rank = _decimal(text)
        if rank is None:
            msg = f"{_RANK_VARIABLE} is {text!r}, which is not a node's rank"
            raise UsageError(msg, hint="set it to 0, 1, ..., or unset it: the rank is then assigned")
        return rank
    if cluster.kind == "mpi":
        return cluster.task
    return cluster.node_rank if cluster.kind in ("slurm", "kubernetes") else None


def _decimal(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text.strip()) else None


def _check_tasks(cluster: Cluster, source: str) -> None:
    """Refuse several launchers on one node: each would start all of its workers."""
    many = cluster.tasks_on_node or 1
    if cluster.kind == "slurm" and cluster.num_tasks and cluster.num_nodes:
        many = max(many, -(-cluster.num_tasks // cluster.num_nodes))
    if cluster.kind in ("slurm", "mpi") and many > 1:
        flag = "--ntasks-per-node=1" if cluster.kind == "slurm" else "--npernode 1 (Open MPI) or -ppn 1"
        msg = f"{source} started {many} launchers on each node; each would start every worker"
        raise UsageError(msg, hint=f"start one on each node: {flag}")


def _slurm_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if names := _scontrol("show", "hostnames", text).split():
        return tuple(names)
    if text and "[" not in text:
        return tuple(text.split(","))
    msg = f"the nodes of this job ({text or 'SLURM_JOB_NODELIST is not set'}) cannot be listed without scontrol"
    raise UsageError(msg, hint="make scontrol available here, or set main_process_ip")


def _scontrol(*words: str) -> str:
    if shutil.which("scontrol") is None:
        return ""
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout
