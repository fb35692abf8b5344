"""The doctor's checks, in the order of its report. Each is a pure function of the facts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from fsdplaunch.config.resolve import CPU_WORKERS, workers_per_node
from fsdplaunch.display_text import GIB, MIB, counted
from fsdplaunch.doctor.facts import Check, DoctorFacts, Status
from fsdplaunch.errors import EXIT_MACHINE
from fsdplaunch.launch.preflight import check_gpus as check_gpu_use
from fsdplaunch.probe.hardware import driver_problem
from fsdplaunch.probe.torch_version import how_to_install, mismatch, parse


def check_torch(facts: DoctorFacts) -> Iterator[Check]:
    """Check that there is a torch that can be imported, new enough, with what runs here need."""
    torch = facts.torch
    if torch is None:
        yield Check("torch", "skipped", "not asked (--no-torch)")
    elif torch.error:
        yield Check("torch", "problem", f"cannot be used: {torch.error}", how_to_install())
    elif (found := mismatch(torch.version)) is not None:
        yield Check("torch", "problem" if found.is_fatal else "warning", found.message, found.hint)
    elif torch.lacks:
        yield Check("torch", "problem", f"{torch.version} lacks {torch.lacks}", "install an official build")
    elif facts.gpus and not torch.nccl:
        yield Check("torch", "problem", f"{torch.version} lacks NCCL", "install an official CUDA build of torch")
    else:
        built = f", CUDA {torch.cuda}" if torch.cuda else ", CPU only"
        nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
        yield Check("torch", "ok", f"{torch.version}{built}{nccl}")


def check_driver(facts: DoctorFacts) -> Iterator[Check]:
    """Check that the driver is new enough for the CUDA of this torch, and that torch sees the same GPUs."""
    torch, driver = facts.torch, facts.driver
    wanted: Status = "problem" if facts.wants_gpus else "warning"
    if not driver.version:
        if problem := driver_problem(facts.notes):
            yield Check("driver", wanted, problem, "reboot, or install it again; use_cpu: true runs on the CPU")
        elif torch is not None and torch.sees_gpus:
            text = f"torch can use {torch.sees_gpus} GPUs, which NVIDIA's library does not list: runs use the CPU"
            hint = "only NVIDIA GPUs are used; are the driver's libraries complete?"
            yield Check("driver", "warning", text, hint)
        elif facts.wants_gpus and torch is not None and torch.cuda:
            hint = "install the driver, pass the GPUs into the container (--gpus all), or set use_cpu: true"
            yield Check("driver", "warning", "no NVIDIA driver, but torch has CUDA", hint)
        else:
            yield Check("driver", "skipped", "no NVIDIA driver: runs use the CPU and gloo")
        return
    runs = f", runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else ""
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


def check_gpus(facts: DoctorFacts) -> Iterator[Check]:
    """Check how many there are, whether they are alike, and whether pairs of them read each other's memory."""
    for note in facts.notes:
        if not driver_problem([note]):
            yield Check("gpus", "warning", note)
    if not facts.gpus:
        required = facts.config is not None and facts.config.launch.workers_per_node == "gpu"
        yield Check("gpus", "problem" if required else "skipped", "no NVIDIA GPU is visible")
        return
    kinds = Counter(gpu.kind for gpu in facts.gpus)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        hint = "choose identical ones with gpu_ids: the slowest limits the speed, the smallest the memory"
        yield Check("gpus", "warning", f"different GPUs: {text}", hint)
    else:
        yield Check("gpus", "ok", text)
    slow = [pair for pair, can in facts.driver.peers.items() if not can]
    if slow:
        first, second = slow[0]
        pairs = f"{len(slow)} of {len(facts.driver.peers)} pairs"
        text = f"{pairs} go through host memory, for example GPU {first} and {second}"
        yield Check("links", "warning", text, "is NCCL_P2P_DISABLE unset, and the IOMMU (ACS) off?")
    elif len(facts.gpus) > 1:
        yield Check("links", "ok", "all pairs read each other's memory")


def check_use(facts: DoctorFacts) -> Iterator[Check]:
    """Check that the GPUs compute in the configured dtype and in torch's code, and that nobody else uses them."""
    if facts.config is not None and facts.wants_gpus:
        for found in check_gpu_use(facts.config, facts.gpus):
            yield Check("gpus", "problem" if found.fatal else "warning", found.message, found.hint)
    archs = facts.torch.archs if facts.torch else ()
    majors = {arch.removeprefix("sm_").removeprefix("compute_").rstrip("af")[:-1] for arch in archs}
    for gpu in facts.gpus:
        if majors and str(gpu.compute_capability[0]) not in majors:
            text = f"torch has no code for GPU {gpu.visible_name} ({gpu.arch})"
            yield Check("gpus", "problem", text, "install another build of torch")
        if gpu.bad_memory:
            text = f"GPU {gpu.visible_name} has {counted(gpu.bad_memory, 'uncorrected memory error')}"
            yield Check("memory errors", "problem", text, "reset or replace it, or leave it out")


_LITTLE_MEMORY = 4 * GIB
_LITTLE_SHARED = GIB
_NO_SHARED = 64 * MIB
_FEW_FILES, _NO_FILES = 4096, 1024
_LITTLE_SPACE, _NO_SPACE = 10 * GIB, 64 * MIB
SHARED = "/dev/shm"  # noqa: S108  (asked about, not written to)
_SHARED_KINDS = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse", "wekafs", "9p")
_FLEETING_KINDS = ("tmpfs", "ramfs", "overlay")


def check_host(facts: DoctorFacts) -> Iterator[Check]:
    """Check that there is a processor for each worker, and how much host memory this process may use."""
    workers = len(facts.gpus) or CPU_WORKERS
    text = f"{facts.cpus} usable (affinity and container limits considered)"
    if facts.cpus < workers:
        hint = "give the container more processors, or start fewer workers"
        yield Check("processors", "warning", f"{text} for {counted(workers, 'worker')}", hint)
    else:
        yield Check("processors", "ok", text)
    text = "not known" if facts.memory is None else f"{facts.memory / GIB:.1f} GiB usable"
    if facts.memory is not None and facts.memory < _LITTLE_MEMORY:
        yield Check("memory", "warning", text, "loading weights and offloading need more")
    else:
        yield Check("memory", "skipped" if facts.memory is None else "ok", text)


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
            yield Check("disk", "warning", f"{text}: lost when the container ends", hint)
        else:
            yield Check("disk", "ok", text)


_UNLIKELY = ("docker*", "veth*", "br-*", "virbr*", "cni*", "flannel*", "cali*", "tun*", "tap*")


def check_interfaces(facts: DoctorFacts) -> Iterator[Check]:
    """Check which interface gloo will use: its variable's, or that of this node's name. Is what is named there?"""
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
    wanted = facts.environ.get("GLOO_SOCKET_IFNAME")
    own = facts.own_address
    fits = [each for each in facts.interfaces if (_named(each.name, wanted) if wanted else each.address == own)]
    gloo = fits[0] if fits else None
    speed = f" at {gloo.speed / 1000:g} Gbit/s" if gloo is not None and gloo.speed else ""
    text = f"gloo takes {gloo.name} ({gloo.address}){speed}" if gloo is not None else "gloo's is not known"
    text += f"; up: {', '.join(each.name for each in usable)}"
    virtual = gloo is not None and any(fnmatch(gloo.name, pattern) for pattern in _UNLIKELY)
    if facts.nodes > 1 and (virtual or gloo is None or gloo.name == "lo"):
        hint = "export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME with the interface between the nodes"
        yield Check("network", "warning", text, hint)
    else:
        yield Check("network", "ok", text)


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
        yield Check("name", status, f"{facts.hostname} resolves to no address", hint)
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
        here = f"it has {counted(gpus, 'visible GPU')}"
        text = f"the configuration sets {counted(workers, 'worker')} on this node, {here}"
        yield Check("config", "problem", text, "lower num_processes, or set use_cpu: true")
    else:
        yield Check("config", "ok", facts.config_path)


CHECKS: Sequence[Callable[[DoctorFacts], Iterator[Check]]] = (
    check_torch,
    check_driver,
    check_gpus,
    check_use,
    check_host,
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
    counts = {status: sum(check.status == status for check in checks) for status in ("problem", "warning")}
    return ", ".join(counted(count, status) for status, count in counts.items() if count) or "no problems"


def check_connections(measured: Mapping[str, Any]) -> Iterator[Check]:
    """Say what the network test found: world, hosts, wrong, and all_reduce in bytes per second."""
    for rank, sizes in measured["wrong"].items():
        text = f"rank {rank} on {measured['hosts'][int(rank)]} got a wrong sum for {sizes[0]} elements"
        hint = "test this node's memory, GPU and network card; NCCL_DEBUG=INFO shows which path the data took"
        yield Check("all-reduce", "problem", text, hint)
    if not measured["wrong"]:
        rate = measured["all_reduce"]
        speed = f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.0f} MB/s"  # noqa: PLR2004
        text = f"correct on all {measured['world']} ranks, {speed} per link ({measured['backend']})"
        yield Check("all-reduce", "ok", text)
