"""What an agent starts on its node: the configuration, turned into what each worker gets. In the agent."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.agent.output_selection import is_shown
from fsdplaunch.config.schema.config import Config, LaunchSection
from fsdplaunch.launch.entry_points import BOOTSTRAP
from fsdplaunch.launch.preloaded import is_forked, is_python


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What to start on this node, as often as it takes.

    Attributes:
        run_dir: The run's folder.
        launch: The configuration's section about workers.
        command: What the bootstrap is to run; or, when `cold`, a whole command line.
        cold: Execute the command instead of forking a preloaded interpreter.
        cpus: By local rank, the processors it may use; empty for no change.
        variables: By local rank, variables that only that worker gets.
        is_reported: A launcher waits that will report the failure.
        node: This node's number; None where torch numbers the nodes.
        secret: The run's; empty on a lone node.
        held: The socket at which the run's store is to listen, where the launcher has bound one.
    """

    run_dir: Path
    launch: LaunchSection = field(default_factory=LaunchSection)
    command: tuple[str, ...]
    cold: bool
    cpus: Mapping[int, Sequence[int]] = field(default_factory=dict)
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    is_reported: bool = True
    node: int | None = None
    secret: str = field(default="", repr=False)
    held: socket.socket | None = field(default=None, repr=False)

    @property
    def cold_command(self) -> tuple[str, ...]:
        """Return the command line of a worker that is executed."""
        return self.command if self.cold else python_command(self.command)

    def is_shown(self, rank: int, local_rank: int, stream: str) -> bool:
        """Return whether a stream reaches the terminal."""
        return is_shown(self.launch, rank=rank, local_rank=local_rank, stream=stream)


def make_worker_spec(
    config: Config, command: Sequence[str], *, run_dir: Path, workers: int, is_reported: bool
) -> WorkerSpec:
    """Decide what each worker of this node gets.

    Args:
        config: Resolved configuration.
        command: The workers' command, from the agent's own command line.
        run_dir: The run's folder.
        workers: Workers on this node.
        is_reported: A launcher waits that will report the failure.
    """
    rest = tuple(command[2:]) if is_python(command) else tuple(command)
    warm = is_forked(config, command)
    return WorkerSpec(
        run_dir=run_dir,
        launch=config.launch,
        command=rest if warm or not is_python(command) else python_command(rest),
        cold=not warm,
        cpus=_bind(config, workers),
        is_reported=is_reported,
        node=config.machine_rank,
        variables=_own_gpus(workers) if config.launch.virtual_local_rank else {},
    )


def python_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs the bootstrap in an interpreter of its own."""
    return (sys.executable, "-u", "-m", BOOTSTRAP, *arguments)


def _own_gpus(workers: int) -> dict[int, dict[str, str]]:
    """Return each worker's own GPU, by the place it has among those visible here, as torchrun's option does it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(workers)]
    return {
        local_rank: {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": names[local_rank].strip()}
        for local_rank in range(min(workers, len(names)))
    }


def _bind(config: Config, workers: int) -> dict[int, list[int]]:
    mode = config.launch.numa_binding or ("node" if config.enable_cpu_affinity else None)
    if mode is None or not hasattr(os, "sched_getaffinity"):
        return {}
    from fsdplaunch.agent.numa import processors_for_ranks
    from fsdplaunch.probe.gpus import read_gpus

    gpus = [] if config.use_cpu else [gpu.bus_id for gpu in read_gpus(os.environ)[0]]
    places = [gpus[rank] if rank < len(gpus) else "" for rank in range(workers)]
    chosen = processors_for_ranks(mode, places, allowed=os.sched_getaffinity(0), root=Path("/"))
    return dict(enumerate(chosen))
