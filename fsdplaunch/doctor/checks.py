"""The doctor's checks, in the order of its report. Each is a pure function of the facts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from statistics import median
from typing import Any

from fsdplaunch.config.resolve import CPU_WORKERS, workers_per_node
from fsdplaunch.display_text import GIB, MIB
from fsdplaunch.doctor.facts import Check, DoctorFacts, NetworkInterface, Status
from fsdplaunch.errors import EXIT_MACHINE
from fsdplaunch.launch.preflight import cannot_compute, describe_process
from fsdplaunch.probe.hardware import Gpu
from fsdplaunch.probe.torch_version import how_to_install, mismatch, parse


def check_torch(facts: DoctorFacts) -> Iterator[Check]:
    """Check that there is a torch that can be imported, new enough, with torch.distributed and gloo."""
    torch = facts.torch
    if torch is None:
        yield Check("torch", "skipped", "not asked (--no-torch)")
    elif torch.error:
        yield Check("torch", "problem", f"cannot be used: {torch.error}", how_to_install())
    elif (found := mismatch(torch.version)) is not None:
        yield Check("torch", "problem" if found.is_fatal else "warning", found.message, found.hint)
    elif not (torch.has_distributed and torch.has_gloo):
        lacks = "torch.distributed" if not torch.has_distributed else "gloo"
        yield Check("torch", "problem", f"{torch.version} lacks {lacks}", "install an official build")
    else:
        built = f", CUDA {torch.cuda}" if torch.cuda else ", CPU only"
        nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
        yield Check("torch", "ok", f"{torch.version}{built}{nccl}")


def check_driver(facts: DoctorFacts) -> Iterator[Check]:
    """Check that the driver is new enough for the CUDA of this torch, and that torch sees the same GPUs."""
    torch, driver = facts.torch, facts.driver
    if not driver.version:
        yield _without_driver(facts)
        return
    runs = f", runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
    wanted: Status = "problem" if facts.wants_gpus else "warning"
    if torch is None or torch.error:
        yield Check("driver", "ok", f"{driver.version}{runs}")
    elif not torch.cuda:
        hint = "pip install a CUDA build of torch, or set use_cpu: true"
        text = f"{driver.version}{runs}, but torch {torch.version} was built without CUDA"
        yield Check("driver", wanted, text, hint)
    elif driver.cuda and (parse(torch.cuda) or (0, 0))[0] > driver.cuda[0]:
        hint = "install a newer driver, or a torch built for an older CUDA"
        text = f"{driver.version} runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}, torch needs {torch.cuda}"
        yield Check("driver", "problem", text, hint)
    elif facts.gpus and torch.sees_gpus < len(facts.gpus):
        reason = f": {torch.gpu_error}" if torch.gpu_error else ""
        text = f"the driver shows {len(facts.gpus)} GPUs, torch can use {torch.sees_gpus}{reason}"
        yield Check("driver", wanted, text, "nvidia-smi says more")
    else:
        yield Check("driver", "ok", f"{driver.version}{runs}")


def _without_driver(facts: DoctorFacts) -> Check:
    torch = facts.torch
    if torch is not None and torch.sees_gpus:
        text = f"torch can use {torch.sees_gpus} GPUs, which NVIDIA's library does not show: runs use the CPU"
        hint = "only NVIDIA GPUs are used; are the driver's libraries complete?"
        return Check("driver", "warning", text, hint)
    if facts.wants_gpus and torch is not None and torch.cuda:
        hint = "install the driver, pass the GPUs into the container (--gpus all), or set use_cpu: true"
        return Check("driver", "warning", "no NVIDIA driver, but torch has CUDA", hint)
    return Check("driver", "skipped", "no NVIDIA driver: runs use the CPU and gloo")


def check_nccl(facts: DoctorFacts) -> Iterator[Check]:
    """Check that torch has NCCL, which GPU runs need."""
    torch = facts.torch
    if torch is None or torch.error or not facts.gpus:
        yield Check("nccl", "skipped", "no GPUs here: gloo is used")
    elif not torch.nccl:
        hint = "install an official CUDA build of torch"
        yield Check("nccl", "problem", f"torch {torch.version} has no NCCL", hint)
    else:
        yield Check("nccl", "ok", torch.nccl)


def check_gpus(facts: DoctorFacts) -> Iterator[Check]:
    """Check how many there are, and whether they are alike."""
    for note in facts.notes:
        yield Check("gpus", "warning", note)
    if not facts.gpus:
        required = facts.config is not None and facts.config.launch.workers_per_node == "gpu"
        yield Check("gpus", "problem" if required else "skipped", "no NVIDIA GPU is visible")
        return
    kinds = Counter(f"{gpu.name} ({gpu.memory_bytes / GIB:.0f} GiB, {_arch(gpu)})" for gpu in facts.gpus)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        hint = "choose equal ones with gpu_ids: the slowest sets the pace, the smallest the size"
        yield Check("gpus", "warning", f"unlike GPUs: {text}", hint)
    else:
        yield Check("gpus", "ok", text)


def check_busy(facts: DoctorFacts) -> Iterator[Check]:
    """Check that nobody else computes on the GPUs."""
    for gpu in facts.gpus:
        for pid, used in gpu.busy:
            text = f"GPU {gpu.visible_name} is used by {describe_process(pid)}, {used / GIB:.1f} GiB"
            yield Check("gpus", "warning", text, "choose others with gpu_ids, or end it")


def check_links(facts: DoctorFacts) -> Iterator[Check]:
    """Check that pairs of GPUs can read each other's memory."""
    slow = [pair for pair, can in facts.driver.peers.items() if not can]
    if len(facts.gpus) < 2:  # noqa: PLR2004
        yield Check("links", "skipped", "fewer than two GPUs")
    elif slow:
        first, second = slow[0]
        pairs = f"{len(slow)} of {len(facts.driver.peers)} pairs"
        text = f"{pairs} go through host memory, GPU {first} and {second} first"
        yield Check("links", "warning", text, "NCCL_P2P_DISABLE unset? IOMMU (ACS) off?")
    else:
        yield Check("links", "ok", "all pairs read each other's memory")


def check_health(facts: DoctorFacts) -> Iterator[Check]:
    """Check that no GPU has lost data in its memory."""
    for gpu in (gpu for gpu in facts.gpus if gpu.bad_memory):
        text = f"GPU {gpu.visible_name} has {gpu.bad_memory} uncorrected memory errors since the driver was loaded"
        yield Check("memory errors", "problem", text, "reset or replace it, or leave it out")


def check_dtypes(facts: DoctorFacts) -> Iterator[Check]:
    """Check that the GPUs compute in the configured dtype, and that torch has code for them."""
    config, archs = facts.config, facts.torch.archs if facts.torch else ()
    majors = {arch.removeprefix("sm_").removeprefix("compute_").rstrip("af")[:-1] for arch in archs}
    for gpu in facts.gpus:
        for wanted, instead in cannot_compute(config, gpu) if config is not None and not config.use_cpu else ():
            text = f"GPU {gpu.visible_name} ({gpu.name}) cannot compute in {wanted}"
            yield Check("dtypes", "problem", text, f"set mixed_precision to {instead}")
        if majors and str(gpu.compute_capability[0]) not in majors:
            text = f"torch has no code for GPU {gpu.visible_name} ({_arch(gpu)})"
            yield Check("dtypes", "problem", text, "install another build of torch")


def _arch(gpu: Gpu) -> str:
    return "sm_{}{}".format(*gpu.compute_capability)


_LITTLE_MEMORY = 4 * GIB
_LITTLE_SHARED = GIB
_NO_SHARED = 64 * MIB
_FEW_FILES, _NO_FILES = 4096, 1024
_LITTLE_SPACE, _NO_SPACE = 10 * GIB, 64 * MIB
SHARED = "/dev/shm"  # noqa: S108  (asked about, not written to)
_SHARED_KINDS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "wekafs", "9p")
_FLEETING_KINDS = ("tmpfs", "ramfs", "overlay")


def check_processors(facts: DoctorFacts) -> Iterator[Check]:
    """Check that there is a processor for each worker."""
    workers = len(facts.gpus) or CPU_WORKERS
    text = f"{facts.cpus} usable (affinity and container limits counted)"
    if facts.cpus < workers:
        hint = "give the container more processors, or start fewer workers"
        yield Check("processors", "warning", f"{text} for {workers} workers", hint)
    else:
        yield Check("processors", "ok", text)


def check_memory(facts: DoctorFacts) -> Iterator[Check]:
    """Check how much host memory this process may use."""
    if facts.memory is None:
        yield Check("memory", "skipped", "not known")
    elif facts.memory < _LITTLE_MEMORY:
        text = f"{facts.memory / GIB:.1f} GiB usable"
        yield Check("memory", "warning", text, "loading weights and offloading need more")
    else:
        yield Check("memory", "ok", f"{facts.memory / GIB:.1f} GiB usable")


def check_shared_memory(facts: DoctorFacts) -> Iterator[Check]:
    """Check the size of /dev/shm, through which data loaders' workers, and NCCL within a node, pass data."""
    size = facts.shared_memory
    if size is None:
        yield Check(SHARED, "warning", "there is none", "mount a tmpfs there")
        return
    text = f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
    hint = "run the container with --shm-size=8g, or with --ipc=host"
    if size <= _NO_SHARED and len(facts.gpus) > 1:
        yield Check(SHARED, "problem", f"{text}: NCCL needs more", hint)
    elif size < _LITTLE_SHARED:
        yield Check(SHARED, "warning", f"{text}: data loaders may need more", hint)
    else:
        yield Check(SHARED, "ok", text)


def check_limits(facts: DoctorFacts) -> Iterator[Check]:
    """Check the limits of open files and locked memory."""
    soft, hard = facts.open_files
    text = f"{soft} open files" if soft >= 0 else "open files without limit"
    if 0 <= soft < _FEW_FILES:
        raised = f"ulimit -n {hard}" if hard > soft else "ask the administrator for a higher hard limit"
        status: Status = "problem" if soft < _NO_FILES and len(facts.gpus) > 1 else "warning"
        yield Check("limits", status, text, raised)
    else:
        yield Check("limits", "ok", text)
    if facts.locked_memory >= 0 and facts.gpus and facts.nodes > 1:
        text = f"locked memory is limited to {facts.locked_memory / MIB:.0f} MiB: RDMA registers more"
        yield Check("limits", "warning", text, "ulimit -l unlimited")


def check_disks(facts: DoctorFacts) -> Iterator[Check]:
    """Check that there is room and permission where files go, and that the nodes share it."""
    for disk in facts.disks:
        kind = f", {disk.kind}" if disk.kind else ""
        text = f"{disk.use} in {disk.path}: {disk.free / GIB:.1f} GiB free{kind}"
        if not disk.writable:
            yield Check("disk", "problem", f"{disk.path} cannot be written to", "choose another folder")
        elif disk.free < _NO_SPACE:
            yield Check("disk", "problem", text, "make room")
        elif disk.free < _LITTLE_SPACE:
            yield Check("disk", "warning", text, "checkpoints of large models need more")
        elif facts.nodes > 1 and not disk.kind.startswith(_SHARED_KINDS) and disk.kind:
            hint = "all nodes must see the same folder for checkpoints"
            yield Check("disk", "warning", f"{text}, on this node only", hint)
        elif disk.kind in _FLEETING_KINDS and disk.use == "checkpoints":
            hint = "mount a disk, or set checkpoint.dir"
            yield Check("disk", "warning", f"{text}: gone when the container ends", hint)
        else:
            yield Check("disk", "ok", text)


_UNLIKELY = ("docker*", "veth*", "br-*", "virbr*", "cni*", "flannel*", "cali*", "tun*", "tap*")


def check_interfaces(facts: DoctorFacts) -> Iterator[Check]:
    """Check which interface training will use, and whether one that a variable names is there."""
    usable = [each for each in facts.interfaces if each.address and each.name != "lo"]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = facts.environ.get(name)
        if wanted and not any(_named(each.name, wanted) for each in facts.interfaces):
            there = ", ".join(each.name for each in facts.interfaces) or "none"
            text = f"{name}={wanted} names no interface that is up; there are {there}"
            yield Check("network", "problem", text, "correct the variable, or unset it")
    if not usable:
        status: Status = "problem" if facts.nodes > 1 else "ok"
        yield Check("network", status, "only this node itself can be reached")
        return

    def words(interface: NetworkInterface | None) -> str:
        if interface is None:
            return "none that is known"
        speed = f" at {interface.speed / 1000:g} Gbit/s" if interface.speed else ""
        return f"{interface.name} ({interface.address}){speed}"

    gloo, nccl = chosen(facts, "GLOO_SOCKET_IFNAME"), chosen(facts, "NCCL_SOCKET_IFNAME")
    text = f"gloo takes {words(gloo)}" + (f", NCCL takes {words(nccl)}" if facts.gpus else "")
    text += f"; up: {', '.join(each.name for each in usable)}"
    virtual = gloo is not None and any(fnmatch(gloo.name, pattern) for pattern in _UNLIKELY)
    if facts.nodes > 1 and (virtual or gloo is None or gloo.name == "lo"):
        hint = "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface between the nodes"
        yield Check("network", "warning", text, hint)
    else:
        yield Check("network", "ok", text)


def chosen(facts: DoctorFacts, variable: str) -> NetworkInterface | None:
    """Return the interface that a backend will take, which GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is for.

    The variable wins. Gloo takes the one that holds the address this node's name resolves to; NCCL the first in
    its order that is neither the loopback nor a container's bridge.
    """
    wanted = facts.environ.get(variable)
    if wanted:
        return next((each for each in facts.interfaces if _named(each.name, wanted)), None)
    if variable.startswith("GLOO"):
        return next((each for each in facts.interfaces if each.address == facts.own_address), None)
    usable = [each for each in facts.interfaces if each.name != "lo" and each.address]
    fast = [each for each in usable if each.name.startswith("ib")]
    plain = [each for each in usable if not any(fnmatch(each.name, pattern) for pattern in _UNLIKELY)]
    return next(iter([*fast, *plain, *usable]), None)


def _named(name: str, wanted: str) -> bool:
    """Read NCCL's notation: prefixes separated by commas; `=` exact, `^` all but these."""
    but = wanted.startswith("^")
    exact = wanted.lstrip("^").startswith("=")
    entries = [entry for entry in wanted.lstrip("^=").split(",") if entry]
    hit = any(name == entry if exact else name.startswith(entry) for entry in entries)
    return hit != but


def check_name(facts: DoctorFacts) -> Iterator[Check]:
    """Check that other nodes, and gloo itself, find this one by its name."""
    if not facts.own_address:
        status: Status = "problem" if facts.nodes > 1 else "warning"
        hint = f"add {facts.hostname} to /etc/hosts with an address of this node"
        text = f"{facts.hostname} resolves to no address"
        yield Check("name", status, text, hint)
    elif facts.nodes > 1 and facts.own_address.startswith("127."):
        hint = "remove the line from /etc/hosts, or set GLOO_SOCKET_IFNAME"
        text = f"{facts.hostname} resolves to {facts.own_address}, which other nodes cannot reach"
        yield Check("name", "warning", text, hint)
    else:
        yield Check("name", "ok", f"{facts.hostname} is {facts.own_address}")


def check_port(facts: DoctorFacts) -> Iterator[Check]:
    """Check that the port the nodes meet at is free."""
    if not facts.port:
        yield Check("port", "ok", "any free one: the run is on one node")
    elif not facts.port_is_taken:
        yield Check("port", "ok", f"{facts.port} is free")
    else:
        status: Status = "problem" if facts.nodes > 1 else "warning"
        text = f"{facts.port} is in use, as ss -ltnp shows"
        yield Check("port", status, text, "set main_process_port to a free one")


def check_config(facts: DoctorFacts) -> Iterator[Check]:
    """Check that the configuration is right, and that there is a GPU for each worker that it sets."""
    for error in facts.config_errors:
        yield Check("config", "problem", error, "fsdplaunch config validate shows all of it")
    if facts.config is None:
        return
    workers, gpus = workers_per_node(facts.config), len(facts.gpus)
    if workers is not None and 0 < gpus < workers and facts.wants_gpus:
        text = f"the configuration sets {workers} workers on this node, it has {gpus} visible GPUs"
        yield Check("config", "problem", text, "lower num_processes, or set use_cpu: true")
    else:
        yield Check("config", "ok", facts.config_path)


CHECKS: Sequence[Callable[[DoctorFacts], Iterator[Check]]] = (
    check_torch,
    check_driver,
    check_nccl,
    check_gpus,
    check_busy,
    check_links,
    check_health,
    check_dtypes,
    check_processors,
    check_memory,
    check_shared_memory,
    check_limits,
    check_disks,
    check_interfaces,
    check_name,
    check_port,
    check_config,
)


def run_checks(facts: DoctorFacts) -> list[Check]:
    """Run every check; that the interpreter is new enough is known by the time this runs."""
    return [Check("python", "ok", facts.python), *(found for check in CHECKS for found in check(facts))]


def status_of(checks: Sequence[Check]) -> int:
    """Return the command's exit status: 3 when there is a problem."""
    return EXIT_MACHINE if any(check.status == "problem" for check in checks) else 0


def summary(checks: Sequence[Check]) -> str:
    """Return `1 problem, 2 warnings`, or that all is well."""
    words = []
    for status in ("problem", "warning"):
        count = sum(check.status == status for check in checks)
        words += [f"{count} {status}{'s' if count > 1 else ''}"] if count else []
    return ", ".join(words) or "no problems"


SLOW = 0.5
"""Part of the median speed below which a connection is called slow."""
_MBYTE, _GBYTE = 1e6, 1e9
_FEWEST = 3
"""Links that a median of links needs to mean something."""


def check_connections(measured: Mapping[str, Any]) -> Iterator[Check]:
    """Say what the network test found: world, hosts, wrong, pairs and all_reduce in bytes per second."""
    world, hosts = measured["world"], measured["hosts"]
    for rank, sizes in measured["wrong"].items():
        text = f"rank {rank} on {hosts[int(rank)]} got a wrong sum for {sizes[0]} elements"
        hint = "test this node's memory, GPU and network card; NCCL_DEBUG=INFO says which way data went"
        yield Check("all-reduce", "problem", text, hint)
    if not measured["wrong"]:
        text = f"right on all {world} ranks, {_speed(measured['all_reduce'])} per link ({measured['backend']})"
        yield Check("all-reduce", "ok", text)
    kinds: dict[str, dict[str, float]] = {"within a node": {}, "between nodes": {}}
    for pair, rate in measured["pairs"].items():
        first, second = map(int, pair.split("-"))
        kinds["within a node" if hosts[first] == hosts[second] else "between nodes"][pair] = rate
    for place, pairs in kinds.items():
        if pairs:
            yield _compare_links(place, pairs, hosts)
    slow = slowest_rank(measured["pairs"])
    if slow is not None:
        text = f"rank {slow} on {hosts[slow]} is slow with every peer"
        yield Check("links", "warning", text, "look at that node's network and load")


def _compare_links(place: str, pairs: Mapping[str, float], hosts: list[str]) -> Check:
    name, middle = min(pairs, key=lambda pair: pairs[pair]), median(pairs.values())
    first, second = map(int, name.split("-"))
    where = hosts[first] if hosts[first] == hosts[second] else f"{hosts[first]} and {hosts[second]}"
    text = f"{place}: {_speed(middle)} in the middle of {len(pairs)}, slowest {_speed(pairs[name])}"
    text += f" (rank {first} and {second}, {where})"
    if len(pairs) >= _FEWEST and pairs[name] < SLOW * middle:
        return Check("links", "warning", text, "cable, switch port or interface of that link")
    return Check("links", "ok", text)


def slowest_rank(pairs: Mapping[str, float]) -> int | None:
    """Return the rank whose fastest connection is below half of the median of others; None without one."""
    best: dict[int, float] = {}
    for name, rate in pairs.items():
        for rank in map(int, name.split("-")):
            best[rank] = max(best.get(rank, 0.0), rate)
    if len(best) < _FEWEST:
        return None
    rank = min(best, key=lambda each: best[each])
    return rank if best[rank] < SLOW * median(best.values()) else None


def _speed(rate: float) -> str:
    """Return bytes per second in words: 2.1 GB/s."""
    return f"{rate / _GBYTE:.1f} GB/s" if rate >= _GBYTE else f"{rate / _MBYTE:.0f} MB/s"
