"""What an agent starts on its node: the configuration, turned into what each worker gets. In the agent.

Its command and variables, which of its streams reach the terminal, and the processors near its GPU. Torch's
own binding to processors is private, needs CUDA in the process that binds, and binds no worker without a GPU: here
/sys is read, without torch, CUDA or numactl.
"""

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdplaunch.config.schema.config import Config
from fsdplaunch.config.schema.launch_sections import LaunchSection
from fsdplaunch.files import read_text
from fsdplaunch.launch.entry_points import BOOTSTRAP, is_forked, is_python

_BITS = {"stdout": 1, "stderr": 2}


def is_shown(launch: LaunchSection, *, rank: int, local_rank: int, stream: str) -> bool:
    """Return whether a stream (`stdout` or `stderr`) is shown; every stream goes to its file besides.

    What torchrun's options say goes first: a teed stream is shown, a redirected one is not, and of those only the
    filtered ranks'. Where they say nothing, `show_ranks` decides.
    """

    def names(streams: str | None) -> bool:
        """Return whether torchrun's notation (`3`, or `0:3,1:1`) names this stream of this worker."""
        text = streams or "0"
        if ":" in text:
            text = dict(part.split(":") for part in text.split(",")).get(str(local_rank), "0")
        return bool(int(text) & _BITS[stream])

    def has(ranks: str, number: int) -> bool:
        return ranks == "all" or number in map(int, ranks.split(","))

    teed = names(launch.tee)
    if names(launch.redirects) and not teed:
        return False
    if launch.show_local_ranks is not None:
        return has(launch.show_local_ranks, local_rank)
    return teed or has(launch.show_ranks, rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What to start on this node, as often as it takes."""

    run_dir: Path
    launch: LaunchSection = field(default_factory=LaunchSection)
    command: tuple[str, ...]  # what the bootstrap is to run; or, when `cold`, a whole command line to execute
    cold: bool
    # By local rank, the processors it may use; empty for no change.
    cpus: Mapping[int, Sequence[int]] = field(default_factory=dict)
    # By local rank, variables that only that worker gets.
    variables: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    is_reported: bool = True  # a launcher waits that will report the failure
    node: int | None = None  # this node's number; None where torch numbers the nodes
    secret: str = field(default="", repr=False)  # the run's; empty on a lone node
    # The socket at which the run's store is to listen, where the launcher has bound one.
    held: socket.socket | None = field(default=None, repr=False)

    @property
    def cold_command(self) -> tuple[str, ...]:
        """Return the command line of a worker that is executed: a program's, or that of an own interpreter."""
        return self.command if self.cold else (sys.executable, "-u", "-m", BOOTSTRAP, *self.command)


def make_worker_spec(
    config: Config, command: Sequence[str], *, run_dir: Path, workers: int, is_reported: bool
) -> WorkerSpec:
    """Decide what each of so many workers of this node gets; `command` is from the agent's own command line."""
    warm = is_forked(config, command)
    own_gpus: dict[int, dict[str, str]] = {}
    if config.launch.virtual_local_rank:  # each worker sees its own GPU alone, as torchrun's option has it
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = list(map(str, range(workers))) if visible is None else [""] * workers  # a run on the CPU
        for local_rank, name in enumerate((visible.split(",") if visible else every)[:workers]):
            own_gpus[local_rank] = {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": name.strip()}
    interpreter = (sys.executable, "-u") if is_python(command) and not warm else ()
    mode, cpus = config.launch.numa_binding or ("node" if config.enable_cpu_affinity else None), {}
    if mode is not None and hasattr(os, "sched_getaffinity"):
        from fsdplaunch.probe.hardware import read_gpus

        gpus = [] if config.use_cpu else [gpu.bus_id for gpu in read_gpus(os.environ)[0]]
        places = [*gpus, *[""] * workers][:workers]
        cpus = dict(enumerate(processors_for_ranks(mode, places, allowed=os.sched_getaffinity(0), root=Path("/"))))
    return WorkerSpec(
        run_dir=run_dir,
        launch=config.launch,
        command=tuple(command[2:]) if warm else (*interpreter, *command),
        cold=not warm,
        cpus=cpus,
        is_reported=is_reported,
        node=config.machine_rank,
        variables=own_gpus,
    )


def processors_for_ranks(mode: str, gpus: Sequence[str], *, allowed: Iterable[int], root: Path) -> list[list[int]]:
    """Return the processors each local rank is to be bound to; empty lists where nothing can be said.

    `mode` is `node` or `exclusive`, as torchrun means them. `gpus` are the PCI address of each local rank's GPU,
    `0000:3b:00.0`, or an empty text for a worker without one, which then gets its share of the `allowed` ones.
    """
    usable, nodes = set(allowed), {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        if cpus := parse_list(read_text(folder / "cpulist")) & usable:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    if not nodes:
        return [[] for _ in gpus]
    homes = []  # the node each worker belongs to: its GPU's, or, where that is unknown, one of them in turn
    for place, gpu in enumerate(gpus):
        text = read_text(root / "sys/bus/pci/devices" / gpu / "numa_node").strip() if gpu else ""
        known = int(text) if text.isdigit() else -1
        homes.append(known if known in nodes else sorted(nodes)[place * len(nodes) // len(gpus)])
    found = []
    for place, home in enumerate(homes):
        cpus = nodes[home]
        if mode == "exclusive":  # an even part of the cores; where there are too few, some share one
            turn, mates, groups = homes[:place].count(home), homes.count(home), set()
            for cpu in cpus:
                file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
                groups.add(frozenset(parse_list(read_text(file)) & cpus or {cpu}))
            cores = sorted(groups, key=min)
            begin, end = (len(cores) * index // mates for index in (turn, turn + 1))
            cpus = set().union(*cores[begin:end]) or set(cores[turn % len(cores)])
        found.append(sorted(cpus))
    return found


def parse_list(text: str) -> set[int]:
    """Read the kernel's notation, `0-3,8`."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found
