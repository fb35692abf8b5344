"""What this machine has: NVIDIA GPUs, TPU chips, and the processors and memory that this process may use.

Read from the kernel and the driver's management library: no torch, no CUDA context.
"""

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdplaunch.display_text import GIB
from fsdplaunch.errors import MachineError
from fsdplaunch.files import read_size, read_text

_CGROUPS = "sys/fs/cgroup"


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors this process may use: its affinity, cut by the cgroup's CPU quota; at least 1.

    Args:
        root: Where /proc and /sys are found.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _groups(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, int(min([float(allowed), *quotas])))


def usable_memory(root: Path = Path("/")) -> int | None:
    """Return the host memory this process may use, in bytes: installed, cut by cgroup limits; None if unknown.

    Args:
        root: Where /proc and /sys are found.
    """
    limits = [installed] if (installed := _installed_memory(root)) else []
    for folder in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(folder / name)
            if limit is not None and limit > 0:
                limits.append(limit)
    return min(limits) if installed and limits else None


def memory_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel has killed a process of this process's cgroup for want of memory.

    Args:
        root: Where /proc and /sys are found.
    """
    for folder in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            words = dict(
                line.split()[:2] for line in read_text(folder / name).splitlines() if len(line.split()) > 1
            )
            if "oom_kill" in words:
                return int(words["oom_kill"])
    return 0


def _installed_memory(root: Path) -> int | None:
    if (installed := read_size(root / "proc/meminfo", "MemTotal")) is not None:
        return installed
    if "SC_PHYS_PAGES" in os.sysconf_names and root == Path("/"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits hold for this process, own group first, for cgroup v2 and v1."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            mounts = [root / _CGROUPS, root / _CGROUPS / "unified"]
        elif controller in controllers.split(","):
            mounts = [root / _CGROUPS / controllers, root / _CGROUPS / controller]
        else:
            continue
        own = Path(place.lstrip("/"))
        if ".." in own.parts:
            own = Path()
        for mount in mounts:
            # Without a cgroup namespace the path is the host's and absent here; its parents up to the mount,
            # which a container sees as its own group, are then what counts.
            yield from (mount / level for level in (own, *own.parents))


def _cpu_quota(folder: Path) -> float | None:
    """Return the processors' worth of time a group may use, or None without a limit."""
    words = read_text(folder / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # noqa: PLR2004
        return int(words[0]) / max(1, int(words[1]))
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota is None or not period or quota <= 0:
        return None
    return quota / period


def _number(path: Path) -> int | None:
    try:
        return int(read_text(path))
    except ValueError:
        return None  # "max", or no such file


_BF16_FROM = (8, 0)
_FP8_FROM = (8, 9)
_FP16_FROM = (5, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        index: Its number in the driver's order (that of the PCI bus), whatever CUDA_VISIBLE_DEVICES says.
        memory_bytes: Memory it has, used or not; 0 where the driver does not say.
        compute_capability: For example `(9, 0)`.
        busy: Processes that use it now: (process id, bytes).
        bus_id: Its PCI address as the kernel writes it, `0000:3b:00.0`; empty where unknown.
    """

    index: int
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    uuid: str = ""
    busy: tuple[tuple[int, int], ...] = ()
    bus_id: str = ""

    @property
    def has_bf16(self) -> bool:
        """Return whether it computes bf16 in hardware (sm_80 and later)."""
        return self.compute_capability >= _BF16_FROM

    @property
    def has_fp8(self) -> bool:
        """Return whether it computes fp8 in hardware (sm_89 and later)."""
        return self.compute_capability >= _FP8_FROM

    @property
    def has_fp16(self) -> bool:
        """Return whether it computes fp16 in hardware."""
        return self.compute_capability >= _FP16_FROM


@dataclass(frozen=True, slots=True)
class _Driver:
    """What the driver reported: whole GPUs, the requested slices, and what went wrong."""

    gpus: tuple[Gpu, ...] = ()
    slices: tuple[Gpu, ...] = ()
    notes: tuple[str, ...] = ()


def read_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs a process with this environment would see, and notes about them.

    Args:
        environ: Variables; only CUDA_VISIBLE_DEVICES is looked at.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    driver = _ask_driver([entry.strip() for entry in (wanted or "").split(",")])
    if wanted is None or not driver.gpus:
        return driver.gpus, driver.notes
    chosen, problem = _select(driver.gpus + driver.slices, wanted)
    note = f"CUDA_VISIBLE_DEVICES={wanted} shows {len(chosen)} of this machine's {len(driver.gpus)} GPUs"
    return chosen, (*driver.notes, note, *([problem] if problem else []))


def driver_is_installed() -> bool:
    """Return whether NVIDIA's management library can be loaded; 5 ms, where importing its bindings takes 60."""
    if sys.platform != "linux":
        return True  # named otherwise elsewhere; the bindings know
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _ask_driver(entries: list[str]) -> _Driver:
    """Read every GPU, and the slices (MIG) among these entries of CUDA_VISIBLE_DEVICES."""
    if not driver_is_installed():
        return _Driver()
    try:
        import pynvml as nvml
    except ImportError:
        return _Driver()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        absent = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return _Driver() if absent else _Driver(notes=(f"the NVIDIA driver does not answer: {error}",))
    try:
        return _read_all(nvml, entries)
    finally:
        nvml.nvmlShutdown()


def _read_all(nvml: ModuleType, entries: list[str]) -> _Driver:
    """Leave out a GPU that fails and name it: the others still train."""
    gpus, notes = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} does not answer: {error}")
    slices = [_read_slice(nvml, entry) for entry in entries if entry.startswith("MIG-")]
    return _Driver(tuple(gpus), tuple(part for part in slices if part), tuple(notes))


def _read_gpu(nvml: ModuleType, handle: Any) -> Gpu:
    return Gpu(
        index=int(nvml.nvmlDeviceGetIndex(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=_memory(nvml, handle),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        busy=_processes(nvml, handle),
        bus_id=_bus_id(nvml, handle),
    )


def _read_slice(nvml: ModuleType, uuid: str) -> Gpu | None:
    """Return a MIG slice: its own memory, everything else its GPU's."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        gpu = _read_gpu(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))
        return replace(gpu, uuid=uuid, memory_bytes=_memory(nvml, handle))
    except nvml.NVMLError:
        return None


def _memory(nvml: ModuleType, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0  # GPUs that share the host's memory have none of their own to report


def _processes(nvml: ModuleType, handle: Any) -> tuple[tuple[int, int], ...]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not allowed in some containers, and only of interest
        return ()
    return tuple((int(entry.pid), int(entry.usedGpuMemory or 0)) for entry in found)


def _bus_id(nvml: ModuleType, handle: Any) -> str:
    """Write a bus id as the kernel does: the domain in four digits, in lower case."""
    try:
        domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    except (nvml.NVMLError, AttributeError):
        return ""
    return f"{domain[-4:]}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _select(present: tuple[Gpu, ...], wanted: str) -> tuple[tuple[Gpu, ...], str | None]:
    """Return what CUDA would show: everything up to the first entry that names no GPU or one twice."""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry in ("", "-1", "NoDevFiles"):
            return tuple(chosen), None
        named = _named(present, entry)
        if named is None:
            return tuple(chosen), f"{entry!r} in CUDA_VISIBLE_DEVICES names no GPU here; CUDA stops reading there"
        if named in chosen:
            return tuple(chosen), f"{entry!r} in CUDA_VISIBLE_DEVICES names a GPU for the second time"
        chosen.append(named)
    return tuple(chosen), None


def _named(present: tuple[Gpu, ...], entry: str) -> Gpu | None:
    if re.fullmatch(r"[0-9]{1,6}", entry):
        return next((gpu for gpu in present if gpu.index == int(entry)), None)
    matches = [gpu for gpu in present if gpu.uuid and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


_DEVICES = Path("/sys/bus/pci/devices")
_OWN = ("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID")
"""What says a host's number, in PyTorch/XLA's order; with one launcher on each host, its process's too."""
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"})
"""PCI device numbers of TPU v2 to v7x, as in torch_xla 2.9."""


def count_tpu_chips(devices: Path = _DEVICES) -> int:
    """Return how many TPU chips the kernel lists.

    Args:
        devices: The folder of PCI devices.
    """
    return sum(
        _read(vendor.parent / "device") in _TPUS for vendor in devices.glob("*/vendor") if _is_google(vendor)
    )


def pod_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a TPU pod's variables say of keys that nobody else sets, as KEY=VALUE.

    Args:
        environ: The launcher's. TPU_WORKER_HOSTNAMES names the hosts, or TPU_PROCESS_ADDRESSES those of all
            processes; CLOUD_TPU_TASK_ID or TPU_WORKER_ID this one, as PyTorch/XLA reads them.

    Raises:
        MachineError: They name several hosts, and not which of them this is.
    """
    processes = [address.rpartition(":")[0] for address in _listed(environ, "TPU_PROCESS_ADDRESSES")]
    hosts = _listed(environ, "TPU_WORKER_HOSTNAMES") or list(dict.fromkeys(filter(None, processes)))
    if len(hosts) < 2:  # noqa: PLR2004  (one host is not a pod)
        return ()
    rank = _own_number(environ, hosts)
    return (f"num_machines={len(hosts)}", f"machine_rank={rank}", f"main_process_ip={hosts[0]}")


def _own_number(environ: Mapping[str, str], hosts: list[str]) -> int:
    """Return which of a pod's hosts this is."""
    named = next((name for name in _OWN if environ.get(name)), None)
    own = environ[named].strip() if named else ""
    if not (own.isascii() and own.isdecimal() and int(own) < len(hosts)):
        found = f"{named} is {own!r}" if named else f"{_OWN[-1]} is not set"
        msg = f"this TPU pod has {len(hosts)} hosts, {hosts[0]} first, and {found}: which of them is this?"
        raise MachineError(msg, hint=f"set {_OWN[-1]} to a number from 0 to {len(hosts) - 1}, or num_machines")
    return int(own)


def _listed(environ: Mapping[str, str], name: str) -> list[str]:
    """Return what a variable lists, separated by commas."""
    return [part.strip() for part in environ.get(name, "").split(",") if part.strip()]


def _is_google(vendor: Path) -> bool:
    return _read(vendor) == _GOOGLE


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="ascii").strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """This machine, as a worker started from here would see it.

    Attributes:
        gpus: GPUs CUDA would show, in its order.
        cpu_count: Processors this process may use (affinity and cgroup quota).
        memory_bytes: Host memory it may use (installed, or the cgroup's limit); None where unknown.
        notes: What the reader should know about how this was found.
    """

    gpus: tuple[Gpu, ...] = ()
    cpu_count: int = 1
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Return memory of the smallest GPU, which is what a plan must fit in; None where none is known."""
        return min((gpu.memory_bytes for gpu in self.gpus if gpu.memory_bytes), default=None)

    @property
    def all_have_bf16(self) -> bool:
        """Return whether there are GPUs and every one computes bf16."""
        return bool(self.gpus) and all(gpu.has_bf16 for gpu in self.gpus)


def read_hardware(environ: Mapping[str, str], *, root: Path = Path("/")) -> Hardware:
    """Look at this machine; takes some tens of milliseconds.

    Args:
        environ: Variables of the workers to be; CUDA_VISIBLE_DEVICES is honoured.
        root: Where /proc and /sys are found.
    """
    gpus, notes = read_gpus(environ)
    if not gpus and not notes and (root / "dev/kfd").exists():
        notes = ("an AMD GPU driver is loaded, but only NVIDIA GPUs are counted here",)
    return Hardware(gpus=gpus, cpu_count=usable_cpus(root), memory_bytes=usable_memory(root), notes=notes)


def describe_hardware(hardware: Hardware) -> str:
    """Return one line: GPUs by kind, memory, processors.

    Args:
        hardware: What was found.
    """
    return "   ".join([*_gpu_words(hardware.gpus), *_host_words(hardware)])


def _gpu_words(gpus: tuple[Gpu, ...]) -> list[str]:
    kinds: dict[tuple[str, int, tuple[int, int]], int] = {}
    for gpu in gpus:
        kind = (gpu.name, gpu.memory_bytes, gpu.compute_capability)
        kinds[kind] = kinds.get(kind, 0) + 1
    words = []
    for (name, memory, (major, minor)), count in kinds.items():
        size = f"{memory / GIB:.0f} GiB, " if memory else ""
        words.append(f"{count} x {name} ({size}sm_{major}{minor})")
    return words or ["no NVIDIA GPU"]


def _host_words(hardware: Hardware) -> list[str]:
    memory = [] if hardware.memory_bytes is None else [f"{hardware.memory_bytes / GIB:.0f} GiB of memory"]
    return [*memory, f"{hardware.cpu_count} processors"]
