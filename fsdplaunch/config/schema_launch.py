"""Keys of our own that say how workers start, compute and save. Part of the one schema."""

from dataclasses import dataclass

from fsdplaunch.config import values as v
from fsdplaunch.config.declare import key


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSection:
    """How workers are started. A section of our own; accelerate has no such keys in its file."""

    workers_per_node: v.Workers | None = key(
        v.WORKERS,
        None,
        """Worker processes per machine: a number, or auto for one per GPU (2 without GPUs). Left out,
        num_processes divided by num_machines.""",
        question="How many workers on each machine?",
    )
    nodes: str | None = key(
        v.NODE_RANGE,
        None,
        """MIN:MAX machines for an elastic run, which starts with MIN and takes in more up to MAX. Left out,
        exactly num_machines.""",
        pending="elastic node counts are not supported yet",
    )
    max_restarts: int = key(v.WHOLE, 0, "How often all workers are started again after one of them failed.")
    rendezvous_endpoint: str | None = key(
        v.ENDPOINT, None, "HOST:PORT where the machines meet. Left out on one machine, a free local port."
    )
    rendezvous_timeout_seconds: float = key(
        v.SECONDS, 300.0, "How long to wait for the other machines before giving up."
    )
    process_group_timeout_seconds: float = key(
        v.SECONDS, 600.0, "How long a collective may wait for the slowest rank before the run fails."
    )
    log_dir: str = key(
        v.TEXT, "runs", "Folder that gets one subfolder per run, with the plan, the result and rank output."
    )
    show_ranks: str = key(
        v.RANKS,
        "0",
        """Ranks whose output reaches the terminal: all, or numbers separated by commas. Every other rank's output
        goes to its files in the run's folder.""",
    )
    preload: tuple[str, ...] = key(
        v.MODULES,
        ("torch",),
        """Modules imported once per machine, before the workers are forked. Torch is among them unless the list is
        empty; an empty list starts every worker as a fresh Python.""",
    )
    numa_binding: v.NumaName | None = key(
        v.NUMA,
        None,
        """Bind each worker to the CPUs near its GPU: to its node, its socket, its share of the node's cores
        (exclusive), or one core complex.""",
        pending="binding workers to CPUs is not supported yet",
    )
    shutdown_grace_seconds: float = key(
        v.WAIT,
        30.0,
        """How long workers may take to save and end after a signal, or after another worker failed, before they
        are killed.""",
    )
    env: dict[str, str] = key(v.VARIABLES, {}, "Further environment variables for the workers, name: value.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSection:
    """Number formats, each on its own. Left out, mixed_precision decides."""

    param: v.DtypeName | None = key(
        v.DTYPE, None, "Format parameters are gathered and computed in. Left out, that of mixed_precision."
    )
    reduce: v.DtypeName | None = key(
        v.DTYPE,
        None,
        "Format gradients are summed over ranks in. Left out, fp32 whenever parameters compute in less.",
    )
    output: v.DtypeName | None = key(
        v.DTYPE,
        None,
        "Format the model's outputs are cast to (version 2). Left out, that of the computation.",
        versions=(2,),
    )
    buffer: v.DtypeName | None = key(
        v.DTYPE,
        None,
        "Format of buffers in forward (version 1). Left out, that of mixed_precision.",
        versions=(1,),
    )
    master: v.DtypeName | None = key(
        v.DTYPE,
        None,
        """Format the shards and the optimizer state are kept in. Left out, fp32 under mixed precision, else the
        model's own.""",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """Where and how checkpoints are written."""

    dir: str = key(
        v.TEXT,
        "checkpoints",
        "Folder that save_checkpoint and load_checkpoint use when the script names none.",
    )
    async_: bool = key(
        v.FLAG,
        False,
        "Write checkpoints in the background while training goes on.",
        pending="writing in the background is not supported yet",
    )
    keep_last: int | None = key(
        v.COUNT,
        None,
        "How many complete checkpoints stay; older ones are deleted. Left out, all.",
        pending="deleting old checkpoints is not supported yet",
    )
