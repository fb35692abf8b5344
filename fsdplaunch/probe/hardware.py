"""What this machine has: NVIDIA GPUs, TPU chips, and the processors and memory that this process may use.

Read from the kernel and the driver's management library: no torch, no CUDA context.
"""

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from fsdplaunch.display_text import GIB, counted
from fsdplaunch.errors import MachineError
from fsdplaunch.files import read_size, read_text

_CGROUPS = "sys/fs/cgroup"


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the processors this process may use: its affinity, cut by the cgroup's CPU quota; at least 1."""
    most = float(len(os.sched_getaffinity(0)))
    for folder in _groups(root, "cpu"):
        words = read_text(folder / "cpu.max").split()
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():  # noqa: PLR2004
            quota, period = int(words[0]), max(1, int(words[1]))
        if quota and period and quota > 0:
            most = min(most, quota / period)
    return max(1, int(most))


def usable_memory(root: Path = Path("/")) -> int | None:
    """Return the host memory this process may use, in bytes: installed, cut by cgroup limits; None if unknown."""
    installed = read_size(root / "proc/meminfo", "MemTotal")
    names = ("memory.max", "memory.limit_in_bytes")
    limits = [_number(folder / name) for folder in _groups(root, "memory") for name in names]
    return min([installed, *(limit for limit in limits if limit and limit > 0)]) if installed else None


def memory_kills(root: Path = Path("/")) -> int:
    """Return how often the kernel has killed a process of this process's cgroup for want of memory."""
    for folder in _groups(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            lines = [line.split() for line in read_text(folder / name).splitlines()]
            words = dict(line[:2] for line in lines if len(line) > 1)
            if "oom_kill" in words:
                return int(words["oom_kill"])
    return 0


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


def _number(path: Path) -> int | None:
    try:
        return int(read_text(path))
    except ValueError:
        return None  # "max", or no such file


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    index: int  # its number in the driver's order (that of the PCI bus), whatever CUDA_VISIBLE_DEVICES says
    name: str
    memory_bytes: int  # memory it has, used or not; 0 where the driver does not say
    compute_capability: tuple[int, int]  # for example `(9, 0)`
    uuid: str = ""
    busy: tuple[tuple[int, int], ...] = ()  # processes that use it now: (process id, bytes)
    bus_id: str = ""  # its PCI address as the kernel writes it, `0000:3b:00.0`; empty where unknown
    bad_memory: int = 0  # uncorrected memory errors since the driver was loaded
    is_slice: bool = False  # it is a part of a GPU (MIG)

    @property
    def visible_name(self) -> str:
        """Return how CUDA_VISIBLE_DEVICES and gpu_ids name it."""
        return self.uuid if self.is_slice else str(self.index)

    @property
    def arch(self) -> str:
        """Return what code for it is called: `sm_90`."""
        return "sm_{}{}".format(*self.compute_capability)

    @property
    def kind(self) -> str:
        """Return what is alike of equal GPUs, for people."""
        size = f"{self.memory_bytes / GIB:.0f} GiB, " if self.memory_bytes else ""
        return f"{self.name} ({size}{self.arch})"

    @property
    def has_bf16(self) -> bool:
        """Return whether it computes bf16 in hardware (sm_80 and later)."""
        return self.compute_capability >= (8, 0)

    @property
    def has_fp8(self) -> bool:
        """Return whether it computes fp8 in hardware (sm_89 and later)."""
        return self.compute_capability >= (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """NVIDIA's driver."""

    version: str = ""  # for example `580.126`; empty without a driver
    cuda: tuple[int, int] | None = None  # the newest CUDA it runs, `(13, 0)`
    # for each pair of visible GPUs, by their names, whether one can read the other's memory
    peers: Mapping[tuple[str, str], bool] = field(default_factory=dict)


def read_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs a process with this CUDA_VISIBLE_DEVICES would see, and notes about them."""
    with _driver_library() as (nvml, problem):
        if nvml is None:
            return (), (problem,) if problem else ()
        gpus, slices, notes = _read_all(nvml)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not gpus:
        chosen = slices or gpus
    else:
        chosen, wrong = _select(gpus, slices, wanted)
        note = f"CUDA_VISIBLE_DEVICES={wanted} shows {len(chosen)} of this machine's {len(gpus)} GPUs"
        notes += [note, *([wrong] if wrong else [])]
    first = next((gpu for gpu in chosen if gpu.is_slice), None)
    if first is not None and len(chosen) > 1:
        notes.append(f"CUDA shows a process one MIG slice, here {first.uuid}: start a run for each slice")
        chosen = [first]
    return tuple(chosen), tuple(notes)


def read_driver(gpus: Sequence[Gpu]) -> Driver:
    """Return what only the doctor asks of the driver: its versions, and which GPUs read each other's memory."""
    with _driver_library() as (nvml, _):
        if nvml is None:
            return Driver()
        newest = int(nvml.nvmlSystemGetCudaDriverVersion())
        # A tuple with this number in nvidia-ml-py 12.535 to 13.615.
        read = nvml.NVML_P2P_CAPS_INDEX_READ
        read = read[0] if isinstance(read, tuple) else read
        peers: dict[tuple[str, str], bool] = {}
        for one, other in combinations([gpu for gpu in gpus if not gpu.is_slice], 2):
            with suppress(nvml.NVMLError):
                first, second = (nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in (one, other))
                status = nvml.nvmlDeviceGetP2PStatus(first, second, read)
                peers[one.visible_name, other.visible_name] = status == nvml.NVML_P2P_STATUS_OK
        version = nvml.nvmlSystemGetDriverVersion()
        return Driver(version=version, cuda=(newest // 1000, newest % 1000 // 10), peers=peers)


_SILENT = "the NVIDIA driver does not answer"


def driver_problem(notes: Iterable[str]) -> str:
    """Return the note that says that there is a driver which does not answer; empty where none does."""
    return next((note for note in notes if note.startswith(_SILENT)), "")


class GpuUse(NamedTuple):
    """What one GPU is doing; None where the driver does not say."""

    percent: int | None  # of the time that something computes on it
    celsius: int | None


def read_gpu_use() -> dict[str, GpuUse]:
    """Return what each GPU is doing now, by its number."""
    found = {}
    with _driver_library() as (nvml, _):
        for index in range(nvml.nvmlDeviceGetCount() if nvml is not None else 0):
            if (gpu := _asked(nvml, nvml.nvmlDeviceGetHandleByIndex, index)) is not None:
                rates = _asked(nvml, nvml.nvmlDeviceGetUtilizationRates, gpu)
                degrees = _asked(nvml, nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU)
                found[str(index)] = GpuUse(percent=rates.gpu if rates else None, celsius=degrees)
    return found


def driver_is_installed() -> bool:
    """Return whether NVIDIA's management library can be loaded; 5 ms, where importing its bindings takes 60."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@contextmanager
def _driver_library() -> Iterator[tuple[Any, str | None]]:
    """Give the bindings of the driver's library, opened; or None, and what is wrong with the driver."""
    nvml: Any = None
    problem = None
    if driver_is_installed():
        with suppress(ImportError):
            nvml = import_module("pynvml")
    if nvml is not None:
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            absent = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            nvml, problem = None, None if absent else f"{_SILENT}: {error}"
    try:
        yield nvml, problem
    finally:
        if nvml is not None:
            nvml.nvmlShutdown()


def _read_all(nvml: Any) -> tuple[list[Gpu], list[Gpu], list[str]]:
    """Return whole GPUs, the slices (MIG) of those that are divided, and notes.

    A GPU that fails is left out and named: the others still train. A slice has its own memory; everything else is
    its GPU's.
    """
    gpus: list[Gpu] = []
    slices: list[Gpu] = []
    notes = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_read_gpu(nvml, handle))
        except nvml.NVMLError as error:
            notes.append(f"GPU {index} does not answer: {error}")
            continue
        mode, most = (
            _asked(nvml, ask, handle) for ask in (nvml.nvmlDeviceGetMigMode, nvml.nvmlDeviceGetMaxMigDeviceCount)
        )
        for number in range(most if mode and mode[0] else 0):
            part = _asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is not None:  # fewer have been made than there may be
                memory, uuid = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, part), nvml.nvmlDeviceGetUUID(part)
                size = int(memory.total) if memory else 0
                slices.append(replace(gpus[-1], uuid=uuid, memory_bytes=size, is_slice=True))
    return gpus, slices, notes


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    # Some have no memory of their own or count no errors; some containers are not told of processes.
    memory = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    place = _asked(nvml, getattr(nvml, "nvmlDeviceGetPciInfo", None), handle)
    domain, _, rest = place.busId.lower().partition(":") if place else ("", "", "")
    processes = _asked(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Gpu(
        index=int(nvml.nvmlDeviceGetIndex(handle)),
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=int(memory.total) if memory else 0,
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        busy=tuple((int(entry.pid), int(entry.usedGpuMemory or 0)) for entry in processes),
        bus_id=f"{domain[-4:]}:{rest}" if rest else "",  # as the kernel writes it: the domain in four digits
        bad_memory=int(_asked(nvml, nvml.nvmlDeviceGetTotalEccErrors, handle, kind, since) or 0),
    )


def _asked(nvml: Any, question: Any, *args: Any) -> Any:
    """Return what the driver answers; None where it does not, or knows no such question."""
    with suppress(nvml.NVMLError):
        return question(*args) if question is not None else None
    return None


def _select(gpus: Sequence[Gpu], slices: Sequence[Gpu], wanted: str) -> tuple[list[Gpu], str | None]:
    """Return what CUDA would show: everything up to the first entry that names no GPU or one twice.

    Of a GPU that is divided its number names the first slice.
    """
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry in ("", "-1", "NoDevFiles"):
            break
        if re.fullmatch(r"[0-9]{1,6}", entry):
            matches = [gpu for gpu in (*slices, *gpus) if gpu.index == int(entry)][:1]
        else:
            matches = [gpu for gpu in (*gpus, *slices) if gpu.uuid and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
            return chosen, f"{entry!r} in CUDA_VISIBLE_DEVICES names no GPU here; CUDA stops reading there"
        if matches[0] in chosen:
            return chosen, f"{entry!r} in CUDA_VISIBLE_DEVICES names a GPU for the second time"
        chosen += matches
    return chosen, None


_DEVICES = Path("/sys/bus/pci/devices")
_OWN = ("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID")
"""What says a host's number, in PyTorch/XLA's order; with one launcher on each host, its process's too."""
_GOOGLE = "0x1ae0"
_TPUS = frozenset({"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"})
"""PCI device numbers of TPU v2 to v7x, as in torch_xla 2.9."""


def count_tpu_chips(devices: Path = _DEVICES) -> int:
    """Return how many TPU chips the kernel lists among its PCI devices."""

    def said(path: Path) -> str:
        with suppress(OSError, UnicodeDecodeError):
            return path.read_text(encoding="ascii").strip()
        return ""

    vendors = [vendor for vendor in devices.glob("*/vendor") if said(vendor) == _GOOGLE]
    return sum(said(vendor.parent / "device") in _TPUS for vendor in vendors)


def pod_settings(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return what a TPU pod's variables say to PyTorch/XLA of keys that nobody else sets, as KEY=VALUE.

    TPU_WORKER_HOSTNAMES names the hosts, or TPU_PROCESS_ADDRESSES those of all processes; which of them this is
    must be there, too.
    """

    def listed(name: str) -> list[str]:
        return [part.strip() for part in environ.get(name, "").split(",") if part.strip()]

    processes = [address.rpartition(":")[0] for address in listed("TPU_PROCESS_ADDRESSES")]
    hosts = listed("TPU_WORKER_HOSTNAMES") or list(dict.fromkeys(filter(None, processes)))
    if len(hosts) < 2:  # noqa: PLR2004  (one host is not a pod)
        return ()
    named = next((name for name in _OWN if environ.get(name)), None)
    own = environ[named].strip() if named else ""
    if not (own.isascii() and own.isdecimal() and int(own) < len(hosts)):
        found = f"{named} is {own!r}" if named else f"{_OWN[-1]} is not set"
        msg = f"this TPU pod has {len(hosts)} hosts, {hosts[0]} first, and {found}: which of them is this?"
        raise MachineError(msg, hint=f"set {_OWN[-1]} to a number from 0 to {len(hosts) - 1}, or num_machines")
    return (f"num_machines={len(hosts)}", f"machine_rank={int(own)}", f"main_process_ip={hosts[0]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """This machine, as a worker started from here would see it."""

    gpus: tuple[Gpu, ...] = ()  # GPUs CUDA would show, in its order
    cpu_count: int = 1  # processors this process may use (affinity and cgroup quota)
    # host memory it may use (installed, or the cgroup's limit); None where unknown
    memory_bytes: int | None = None
    has_amd: bool = False  # there is a driver of AMD's GPUs, which are not counted
    notes: tuple[str, ...] = ()  # what the reader should know about how this was found

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Return memory of the smallest GPU, which is what a plan must fit in; None where none is known."""
        return min((gpu.memory_bytes for gpu in self.gpus if gpu.memory_bytes), default=None)

    @property
    def all_have_bf16(self) -> bool:
        """Return whether there are GPUs and every one computes bf16."""
        return bool(self.gpus) and all(gpu.has_bf16 for gpu in self.gpus)


def read_hardware(environ: Mapping[str, str], *, root: Path = Path("/")) -> Hardware:
    """Look at this machine, as workers with these variables would see it; takes some tens of milliseconds."""
    gpus, notes = read_gpus(environ)
    has_amd = (root / "dev/kfd").exists()
    if not gpus and not notes:
        devices = [name for name in ("nvidia0", "dxg", "nvhost-gpu") if (root / "dev" / name).exists()]
        if has_amd:
            notes = ("AMD GPUs are not used: only NVIDIA's are counted here",)
        elif devices and not driver_is_installed():
            notes = (f"GPUs are not used: there is /dev/{devices[0]}, but no libnvidia-ml.so.1 to count them",)
    return Hardware(
        gpus=gpus, cpu_count=usable_cpus(root), memory_bytes=usable_memory(root), has_amd=has_amd, notes=notes
    )


def describe_hardware(hardware: Hardware) -> str:
    """Return one line: GPUs by kind, memory, processors."""
    words = [f"{count} x {kind}" for kind, count in Counter(gpu.kind for gpu in hardware.gpus).items()]
    words = words or ["no NVIDIA GPU"]
    words += [] if hardware.memory_bytes is None else [f"{hardware.memory_bytes / GIB:.0f} GiB of memory"]
    return ", ".join([*words, counted(hardware.cpu_count, "processor")])
