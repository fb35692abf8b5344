"""Which NVIDIA GPUs this process would see, read through the driver's management library: no torch, no CUDA.

A machine without driver or library has no GPUs and no note is made of it; a driver or a GPU that fails is
named. CUDA_VISIBLE_DEVICES is read as
CUDA reads it: numbers or (shortened) UUIDs, up to the first one that names no GPU.
"""

import ctypes
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

_BF16_FROM = (8, 0)
_FP8_FROM = (8, 9)
_FP16_FROM = (5, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU.

    Attributes:
        index: Its number in the driver's order (that of the PCI bus), whatever CUDA_VISIBLE_DEVICES says.
        memory_bytes: Memory it has, used or not; 0 where the driver does not tell.
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
        """Tell whether it computes bf16 in hardware (sm_80 and later)."""
        return self.compute_capability >= _BF16_FROM

    @property
    def has_fp8(self) -> bool:
        """Tell whether it computes fp8 in hardware (sm_89 and later)."""
        return self.compute_capability >= _FP8_FROM

    @property
    def has_fp16(self) -> bool:
        """Tell whether it computes fp16 in hardware."""
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
