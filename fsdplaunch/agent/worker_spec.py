"""What an agent starts on its node: the configuration, turned into what each worker gets. In the agent.

Its command and variables, which of its streams reach the terminal, and the processors near its GPU. Torch's
own binding to processors is private, needs CUDA in the process that binds, and binds no worker without a GPU: here
/sys is read, without torch, CUDA or numactl.
"""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.launch_sections import LaunchSection
from fsdplaunch.files import read_text
from fsdplaunch.launch.entry_points import BOOTSTRAP, is_forked, is_python

_BITS = {"stdout": 1, "stderr": 2}
_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"


def is_shown(launch: LaunchSection, *, rank: int, local_rank: int, stream: str) -> bool:
    """Return whether a stream is shown; every stream goes to its file besides.

    What torchrun's options say goes first: a teed stream is shown, a redirected one is not, and of those only the
    filtered ranks'. Where they say nothing, `show_ranks` decides.

    Args:
        launch: The configuration.
        rank: Global rank.
        local_rank: Rank on its node.
        stream: `stdout` or `stderr`.
    """
    teed = _names(launch.tee, local_rank, stream)
    if teed is False and _names(launch.redirects, local_rank, stream):
        return False
    if launch.show_local_ranks is not None:
        return local_rank in _ranks_in(launch.show_local_ranks, at_least=local_rank)
    return teed or rank in _ranks_in(launch.show_ranks, at_least=rank)


def _ranks_in(text: str, *, at_least: int) -> set[int]:
    """Return the numbers a list of ranks names; `all` names those up to `at_least`."""
    return set(range(at_least + 1)) if text == "all" else {int(part) for part in text.split(",")}


def _names(streams: str | None, local_rank: int, stream: str) -> bool:
    """Return whether torchrun's notation (`3`, or `0:3,1:1`) names this stream of this worker."""
    if streams is None:
        return False
    if ":" not in streams:
        return bool(int(streams) & _BITS[stream])
    codes = dict(part.split(":") for part in streams.split(","))
    return bool(int(codes.get(str(local_rank), "0")) & _BITS[stream])


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
        return self.command if self.cold else _python_command(self.command)

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
        command=rest if warm or not is_python(command) else _python_command(rest),
        cold=not warm,
        cpus=_bind(config, workers),
        is_reported=is_reported,
        node=config.machine_rank,
        variables=_own_gpus(workers) if config.launch.virtual_local_rank else {},
    )


def _python_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command line that runs the bootstrap in an interpreter of its own."""
    return (sys.executable, "-u", "-m", BOOTSTRAP, *arguments)


def _own_gpus(workers: int) -> dict[int, dict[str, str]]:
    """Return each worker's own GPU, by the place it has among those visible here, as torchrun's option does it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = [str(number) for number in range(workers)] if visible is None else [""] * workers  # a run on the CPU
    names = visible.split(",") if visible else every
    return {
        local_rank: {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": names[local_rank].strip()}
        for local_rank in range(min(workers, len(names)))
    }


def _bind(config: Config, workers: int) -> dict[int, list[int]]:
    mode = config.launch.numa_binding or ("node" if config.enable_cpu_affinity else None)
    if mode is None or not hasattr(os, "sched_getaffinity"):
        return {}
    from fsdplaunch.probe.hardware import read_gpus

    gpus = [] if config.use_cpu else [gpu.bus_id for gpu in read_gpus(os.environ)[0]]
    places = [gpus[rank] if rank < len(gpus) else "" for rank in range(workers)]
    chosen = processors_for_ranks(mode, places, allowed=os.sched_getaffinity(0), root=Path("/"))
    return dict(enumerate(chosen))


def processors_for_ranks(mode: str, gpus: Sequence[str], *, allowed: Iterable[int], root: Path) -> list[list[int]]:
    """Return the processors each local rank is to be bound to; empty lists where nothing can be said.

    Args:
        mode: `node`, `socket`, `exclusive` or `core-complex`, as torchrun means them.
        gpus: PCI address of each local rank's GPU, `0000:3b:00.0`; an empty text for a worker without one, which
            then gets its share of the machine.
        allowed: Processors this process may use.
        root: Where /sys is found.
    """
    usable = set(allowed)
    nodes = {number: cpus & usable for number, cpus in _node_processors(root).items() if cpus & usable}
    if not nodes:
        return [[] for _ in gpus]
    homes = [_home(gpu, place, len(gpus), sorted(nodes), root) for place, gpu in enumerate(gpus)]
    choose: Mapping[str, Callable[[int], set[int]]] = {
        "node": lambda place: nodes[homes[place]],
        "socket": lambda place: _socket(nodes, homes[place], root),
        "exclusive": lambda place: _share(_cores(nodes[homes[place]], root), homes, place),
        "core-complex": lambda place: _turn(_complexes(nodes[homes[place]], root), homes, place),
    }
    return [sorted(choose[mode](place)) for place in range(len(gpus))]


def parse_list(text: str) -> set[int]:
    """Read the kernel's notation, `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _node_processors(root: Path) -> dict[int, set[int]]:
    folders = sorted((root / _NODES).glob("node[0-9]*"))
    return {int(folder.name.removeprefix("node")): parse_list(read_text(folder / "cpulist")) for folder in folders}


def _home(gpu: str, place: int, count: int, nodes: Sequence[int], root: Path) -> int:
    """Return the node a worker belongs to: its GPU's, or, where that is unknown, one of them in turn."""
    text = read_text(root / "sys/bus/pci/devices" / gpu / "numa_node").strip() if gpu else ""
    if text.lstrip("-").isdigit() and int(text) in nodes:
        return int(text)
    return nodes[place * len(nodes) // count]


def _socket(nodes: Mapping[int, set[int]], home: int, root: Path) -> set[int]:
    """Return all processors of the nodes on the same socket."""

    def package(node: int) -> str:
        return read_text(root / _CPUS / f"cpu{min(nodes[node])}/topology/physical_package_id")

    return {cpu for node, cpus in nodes.items() if package(node) == package(home) for cpu in cpus}


def _cores(cpus: set[int], root: Path) -> list[set[int]]:
    """Return the processors by core, the two threads of one together."""
    groups = {
        cpu: parse_list(read_text(root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list")) & cpus for cpu in cpus
    }
    return [groups[cpu] or {cpu} for cpu in sorted(cpus) if cpu == min(groups[cpu] or {cpu})]


def _complexes(cpus: set[int], root: Path) -> list[set[int]]:
    """Return the processors by the largest cache they share, those with the most processors first."""
    groups = {frozenset(_cache_mates(cpu, root) & cpus or {cpu}) for cpu in cpus}
    return [set(group) for group in sorted(groups, key=lambda group: (-len(group), min(group)))]


def _cache_mates(cpu: int, root: Path) -> set[int]:
    caches = sorted(
        (root / _CPUS / f"cpu{cpu}/cache").glob("index*"), key=lambda folder: read_text(folder / "level")
    )
    return parse_list(read_text(caches[-1] / "shared_cpu_list")) if caches else {cpu}


def _share(cores: list[set[int]], homes: Sequence[int], place: int) -> set[int]:
    """Return an even part of a node's cores; the first workers get the odd ones, and nobody gets none."""
    mates = [other for other, home in enumerate(homes) if home == homes[place]]
    turn = mates.index(place)
    if len(cores) < len(mates):
        return cores[turn % len(cores)]
    begin, end = (len(cores) * index // len(mates) for index in (turn, turn + 1))
    return set().union(*cores[begin:end])


def _turn(groups: list[set[int]], homes: Sequence[int], place: int) -> set[int]:
    turn = sum(home == homes[place] for home in homes[:place])
    return groups[turn % len(groups)]
